#!/usr/bin/env python3
"""libattn beside torch's attention on one GPU: who is faster, case by case.

    python bench/peers.py                          every forward case of bench/peers/h200.json
    python bench/peers.py --cases d128,causal      those whose names have both words
    python bench/peers.py --json peers.jsonl       one line for the run, one for each case

All of them run in one process and take turns, run by run, so that clock, temperature and power are the same for each.
Inputs rotate over three sets, each larger than the L2 cache. Runs are queued without a pause, with CUDA events around each;
the time is the median. Counted are 4 * batch * heads * seqlen^2 * head_dim operations, half of that for causal. libattn is
called as a C program would, attn_run on a plan; the others through torch.nn.functional.scaled_dot_product_attention, all on
the same memory.

Peers that torch does not have (FlashAttention-3) come in by figures that were measured beside cuDNN on an H200: a ratio
against cuDNN in this run, divided by best_over_cudnn there, is the ratio against the best of all of them.

Each result of libattn is held against FlashAttention-2's; exit status 1 means that one is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETS = 3
WARM = 2


def import_package():
    """The installed package, or the one of this checkout."""
    try:
        import libattn
    except ImportError:
        sys.path.insert(0, str(ROOT / "python"))
        import libattn
    return libattn


def name_of(case):
    return f"d{case['head_dim']}-{'causal' if case['causal'] else 'full'}-s{case['seqlen']}"


def wanted(case, words):
    """Whole words: d64 is not d640, s512 is not s5120."""
    return all(word in name_of(case).split("-") for word in words)


def commit():
    """Of this checkout; ATTN_COMMIT where the sources came without their history."""
    if "ATTN_COMMIT" in os.environ:
        return os.environ["ATTN_COMMIT"]
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---- who is measured ----


def libattn_call(torch, q, k, v, causal):
    """A function that runs attention of (batch, seqlen, heads, dim) tensors, and its output."""
    from libattn import _core, _lib, _torch

    call = _core.Call(_torch, _lib.FORWARD, q, k, v, _core.Options(causal=causal))
    o, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    call.buffers.o, call.buffers.lse = _core.tensor(call.keep(o)), call.keep(lse).address
    plan = _lib.cuda_plan(bytes(call.problem))
    space = torch.empty(max(plan.workspace, 1), dtype=torch.uint8, device=q.device)
    call.buffers.workspace, call.buffers.workspace_size = space.data_ptr(), plan.workspace
    stream, buffers = torch.cuda.current_stream().cuda_stream, ctypes.byref(call.buffers)

    def run(kept=(call, space, lse)):
        _lib.check(_lib.library.attn_run(plan.handle, buffers, stream))
        return o

    return run, plan.kernel


def torch_call(torch, backend, q, k, v, causal):
    from torch.nn.attention import sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def run():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return run


def make_runners(torch, case, dtype, peers):
    """{name: one function for each set of inputs}, and libattn's kernel. A peer that refuses the case is left out."""
    shape = (case["batch"], case["seqlen"], case["heads"], case["head_dim"])
    sets = [[torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3)] for _ in range(SETS)]
    ours = [libattn_call(torch, *x, case["causal"]) for x in sets]
    runners, kernel = {"libattn": [run for run, _ in ours]}, ours[0][1]
    for name, backend in peers.items():
        try:
            made = [torch_call(torch, backend, *x, case["causal"]) for x in sets]
            made[0]()
            runners[name] = made
        except RuntimeError as error:
            print(f"{name_of(case)}: no {name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return runners, kernel


# ---- measuring ----


def check(torch, runners):
    """Relative RMS of the difference between libattn's result and FlashAttention-2's; None without the latter."""
    if "fa2" not in runners:
        return None
    ours, theirs = runners["libattn"][0]().float(), runners["fa2"][0]().float()
    return ((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()).item()


def measure(torch, runners, reps):
    """Medians in milliseconds."""
    times = {name: [] for name in runners}
    for _ in range(WARM):
        for run in runners.values():
            for one in run:
                one()
    torch.cuda.synchronize()
    names = list(runners)
    for rep in range(reps):
        if rep % 4 == 0:  # the GPU waits a moment, so that the queue is never empty from here to the next pause
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)
        order = names[rep % len(names) :] + names[: rep % len(names)]
        for n, name in enumerate(order if rep % 2 else order[::-1]):  # nobody always follows the same one
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            runners[name][(rep + n) % SETS]()
            end.record()
            times[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for b, e in marks) for name, marks in times.items()}


def tflops(case, ms):
    count = 4 * case["batch"] * case["heads"] * case["seqlen"] ** 2 * case["head_dim"] / (2 if case["causal"] else 1)
    return count / ms * 1e-9


def run_case(torch, case, dtype, peers, reps):
    runners, kernel = make_runners(torch, case, dtype, peers)
    error = check(torch, runners)
    ms = measure(torch, runners, reps)
    rates = {name: tflops(case, time) for name, time in ms.items()}
    ratios = {name: rates["libattn"] / rate for name, rate in rates.items() if name != "libattn"}
    if "cudnn" in ratios and case.get("best_over_cudnn"):
        ratios["best"] = ratios["cudnn"] / case["best_over_cudnn"]
    keys = ("op", "head_dim", "causal", "seqlen", "batch", "heads")
    return {
        **{key: case[key] for key in keys},
        "kernel": kernel,
        "ms": ms,
        "tflops": rates,
        "ratio": ratios,
        "error": error,
    }


# ---- output ----


def geometric_mean(numbers):
    return math.exp(statistics.fmean(map(math.log, numbers)))


def print_line(result, names):
    rates = "".join(f"{result['tflops'].get(name, math.nan):9.1f}" for name in ("libattn", *names))
    ratios = "".join(f"{result['ratio'].get(name, math.nan):9.3f}" for name in (*names, "best"))
    print(f"{name_of(result):20}{rates}{ratios}  {result['kernel']}", flush=True)


def print_summary(results, names):
    print(f"\n{'libattn / peer':20}{'mean':>9}{'least':>9}{'below 1':>9}   (geometric mean over {len(results)} cases)")
    for name in (*names, "best"):
        ratios = {name_of(r): r["ratio"][name] for r in results if name in r["ratio"]}
        if not ratios:
            continue
        least = min(ratios, key=ratios.get)
        below = sum(ratio < 1 for ratio in ratios.values())
        print(f"{name:20}{geometric_mean(ratios.values()):9.3f}{ratios[least]:9.3f}{below:9}   {least}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", default="", metavar="WORDS", help="only cases whose names have all of these: d128,causal,s8192"
    )
    parser.add_argument("--peers", default="fa2,cudnn,efficient", help="which of them (default: all three)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--reps", type=int, default=20, help="runs of each in a case (default 20)")
    parser.add_argument(
        "--figures", default=ROOT / "bench" / "peers" / "h200.json", help="cases, and ratios of the best peer"
    )
    parser.add_argument("--json", metavar="FILE", help="write lines of JSON there, too")
    parser.add_argument("--list", action="store_true", help="names of the cases, and nothing else")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    words = [word for word in arguments.cases.split(",") if word]
    cases = [case for case in json.loads(pathlib.Path(arguments.figures).read_text())["cases"] if wanted(case, words)]
    if arguments.list:
        print(*map(name_of, cases), sep="\n")
        return 0
    if not cases:
        sys.exit(f"peers.py: no case has all of {words}; --list names them")
    import torch
    from torch.nn.attention import SDPBackend

    libattn = import_package()
    if not torch.cuda.is_available():
        sys.exit("peers.py: torch sees no GPU here")
    known = {
        "fa2": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    names = [name for name in arguments.peers.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"peers.py: --peers {unknown[0]}: want some of {','.join(known)}")
    header = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "libattn": libattn.__version__,
        "commit": commit(),
        "dtype": arguments.dtype,
        "reps": arguments.reps,
    }
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    columns = "".join(f"{name:>9}" for name in ("libattn", *names)) + "".join(
        f"{'/' + name:>9}" for name in (*names, "best")
    )
    print(f"{'TFLOP/s; ratios':20}{columns}  kernel")
    results, wrong = [], 0
    out = open(arguments.json, "w") if arguments.json else None
    if out:
        print(json.dumps(header), file=out, flush=True)
    for n, case in enumerate(cases):
        if sys.stderr.isatty():
            print(f"\r{n + 1}/{len(cases)} {name_of(case):24}\r", end="", file=sys.stderr, flush=True)
        with torch.no_grad():
            peers = {name: known[name] for name in names}
            result = run_case(torch, case, getattr(torch, arguments.dtype), peers, arguments.reps)
        results.append(result)
        print_line(result, names)
        if result["error"] is not None and not result["error"] < 1e-2:
            print(f"{name_of(case)}: WRONG: relative RMS of the difference to FlashAttention-2 is {result['error']:.3g}")
            wrong += 1
        if out:
            print(json.dumps(result), file=out, flush=True)
    print_summary(results, names)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
