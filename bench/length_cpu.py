#!/usr/bin/env python3
"""What a pair of query and key costs on the host, by length: it should be the same whatever the length.

    python bench/length_cpu.py                             one thread, processor time, so that other work on the machine
                                                           counts for little
    python bench/length_cpu.py --threads 16                time by the clock, on a machine with nothing else to do
    python bench/length_cpu.py --json length.jsonl         and then: python bench/plots_cpu.py length.jsonl plots/

Self-attention of numpy arrays in float32, causal unless --full; attn_run on a plan, as a C program calls it; lengths take turns, and the
fastest call of each counts. bench/peers_cpu.py has the same beside torch and ONNX Runtime.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import platform
import sys
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads wait by spinning, which is processor time
import numpy  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
import libattn  # noqa: E402
from libattn import _core, _lib, _numpy  # noqa: E402


def make_run(q, k, v, causal):
    """A function that runs the plan, and keeps what it needs."""
    call = _core.Call(_numpy, _lib.FORWARD, q, k, v, _core.Options(causal=causal))
    o, lse = numpy.empty_like(q), numpy.empty(_core.lse_shape(q.shape), dtype=numpy.float32)
    call.buffers.o, call.buffers.lse = _core.tensor(call.keep(o)), call.keep(lse).address
    plan = _lib.Plan(_lib.host_context(), call.problem)
    space = numpy.zeros(plan.workspace + 64, dtype=numpy.uint8)
    call.buffers.workspace, call.buffers.workspace_size = space.ctypes.data + -space.ctypes.data % 64, plan.workspace
    buffers = ctypes.byref(call.buffers)
    return lambda kept=(call, space, o, lse): _lib.check(_lib.library.attn_run(plan.handle, buffers, None))


def seconds(call, clock):
    begin = clock()
    call()
    return clock() - begin


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--full", action="store_true", help="no mask")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--rounds", type=int, default=5, help="calls of the longest; of shorter ones as many as take as long")
    parser.add_argument("--json", metavar="FILE", help="lines for plots_cpu.py")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    libattn.set_backend("cpu")
    libattn.set_num_threads(arguments.threads)
    libattn.set_float32_precision("single")
    lengths = [int(x) for x in arguments.lengths.split(",")]
    random = numpy.random.default_rng(1)
    calls, best = {}, {}
    for n in lengths:
        q, k, v = (random.standard_normal((1, n, arguments.heads, arguments.dim), dtype=numpy.float32) for _ in range(3))
        calls[n] = make_run(q, k, v, not arguments.full)
        calls[n]()
    for _ in range(arguments.rounds):
        for n in lengths:
            times = min((max(lengths) // n) ** 2, 32)
            best[n] = min([best.get(n, float("inf")), *(seconds(calls[n], clock) for _ in range(times))])
    pairs = {n: arguments.heads * (n * n if arguments.full else n * (n + 1) // 2) for n in lengths}
    cost = {n: best[n] * 1e9 / pairs[n] for n in lengths}
    for n in lengths:
        print(f"{n:6} rows {best[n] * 1e3:10.3f} ms {cost[n]:8.4f} ns a pair {4 * arguments.dim / cost[n]:8.1f} GFLOP/s")
    spread = max(cost.values()) / min(cost.values()) - 1
    kind = "processor time" if arguments.threads == 1 else "time by the clock"
    shape = f"{arguments.heads} heads of {arguments.dim}, {'full' if arguments.full else 'causal'}"
    print(f"varies by {100 * spread:.1f}% ({kind}, {arguments.threads} threads, {shape})")
    if arguments.json:
        lines = [{"machine": platform.machine(), "threads": arguments.threads}]
        for n in lengths:
            rate = {"libattn": 4 * arguments.dim / cost[n]}
            case = {"case": f"length-s{n}-f32", "kind": "length", "rows": n, "dim": arguments.dim, "variant": {}}
            lines.append({**case, "threads": arguments.threads, "rate": rate})
        pathlib.Path(arguments.json).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
