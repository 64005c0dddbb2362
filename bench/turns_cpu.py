#!/usr/bin/env python3
"""Builds of the library on the host, in turns in one process: what a change brings, on a machine that is never quiet.

    python bench/turns_cpu.py old=../old/build/libattn.so new=build/libattn.so
    python bench/turns_cpu.py avx512=build/libattn.so:avx512 amx=build/libattn.so:amx torch --dtype f32
    python bench/turns_cpu.py old=a/libattn.so again=a/libattn.so new=b/libattn.so --op backward --threads 16
    python bench/turns_cpu.py f32=build/libattn.so f16=build/libattn.so::f16 bf16=build/libattn.so::bf16

A variant is NAME=LIBRARY, NAME=LIBRARY:ISA, the instruction set as ATTN_CPU has it, or NAME=LIBRARY:ISA:DTYPE; torch is torch. The first one is what the others
are compared with. Give one twice to see what a difference must be to count. Tensors are [batch][row][head][dim]; medians of all calls,
in brackets the fastest, then GFLOP/s and how many times as fast as the first. bench/measure.py says how turns go. The library must fit the
Python package of this checkout.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Library:
    """A build of the library, by a copy of the package of its own."""

    def __init__(self, path, isa, dtype, threads, precision):
        self.dtype = dtype
        for name in [x for x in sys.modules if x == "measure" or x == "libattn" or x.startswith("libattn.")]:
            del sys.modules[name]
        os.environ["LIBATTN_LIBRARY"] = str(pathlib.Path(path).resolve())
        os.environ["ATTN_CPU"] = isa  # which a context reads when it is made; empty: no choice
        self.measure = importlib.import_module("measure")
        self.measure.libattn.set_num_threads(threads)
        self.measure.libattn.set_backend("cpu")
        self.measure.libattn.set_float32_precision(precision)
        self.context = self.measure._lib.host_context()

    def run(self, q, k, v, d_o, options):
        options = self.measure.Options(**options)
        q, k, v, d_o = (None if x is None else x.to(self.dtype or x.dtype) for x in (q, k, v, d_o))
        if d_o is not None:
            return self.measure.libattn_backward_run(q, k, v, d_o, options)[0]
        return self.measure.libattn_run(q, k, v, options)[0]


def torch_run(q, k, v, d_o, options):
    causal = options["causal"]
    if d_o is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

        def run():
            with torch.no_grad():
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

        return run
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=causal)
    d_o = d_o.transpose(1, 2)
    return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)


def numbers(text):
    return [int(x) for x in text.split(",")]


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="NAME=LIBRARY[:ISA[:DTYPE]]", help="or torch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--dim", type=numbers, default=[64, 128])
    parser.add_argument("--seqlen", type=numbers, default=[512, 2048])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--op", choices=["forward", "backward"], default="forward")
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring in a case (default 1.5)")
    parser.add_argument(
        "--precision", choices=["single", "mixed", "double"], default="single", help="of float32 (default single)"
    )
    arguments = parser.parse_args(words)
    for word in arguments.variants:
        if word != "torch" and not pathlib.Path(word.partition("=")[2].partition(":")[0]).is_file():
            parser.error(f"{word}: want torch, or NAME=LIBRARY with a library that is there")
    return arguments


def make_variants(arguments):
    made = {}
    for word in arguments.variants:
        name, _, rest = word.partition("=")
        path, isa, dtype = (rest.split(":") + ["", ""])[:3]
        made[name] = (
            torch_run
            if word == "torch"
            else Library(path, isa, DTYPES.get(dtype), arguments.threads, arguments.precision).run
        )
    return made


def time_case(runs, arguments):
    """Milliseconds of all calls, by name. Threads of the one before go to sleep first, where there are several."""
    import measure

    times = {name: [] for name in runs}
    for run in runs.values():
        run()
    began, rounds = time.monotonic(), 0
    while rounds < measure.LEAST_LONG_ROUNDS or time.monotonic() - began < arguments.seconds:
        for name in measure.turns(list(runs), rounds):
            found = measure.host_turn([runs[name]], 0, 30 if arguments.threads > 1 else 0)
            times[name] += found[1:] or found
        rounds += 1
    return times


def main(words=None):
    arguments = parse(words)
    torch.set_num_threads(arguments.threads)
    variants = make_variants(arguments)
    backward = arguments.op == "backward"
    print(f"{arguments.op} {arguments.dtype}, {arguments.heads} heads, {arguments.threads} threads, torch {torch.__version__}")
    for dim in arguments.dim:
        for rows in arguments.seqlen:
            for causal in (False, True):
                shape = (1, rows, arguments.heads, dim)
                q, k, v, d_o = (torch.randn(shape).to(DTYPES[arguments.dtype]) for _ in range(4))
                runs = {name: make(q, k, v, d_o if backward else None, {"causal": causal}) for name, make in variants.items()}
                times = time_case(runs, arguments)
                pairs = arguments.heads * (rows * (rows + 1) // 2 if causal else rows * rows)
                flops = 4 * dim * pairs * (2.5 if backward else 1)
                typical = {name: statistics.median(t) for name, t in times.items()}
                first = typical[next(iter(typical))]
                cells = [
                    f"{name} {ms:.3f} ({min(times[name]):.3f}) ms {flops / ms * 1e-6:.0f} x{first / ms:.3f}"
                    for name, ms in typical.items()
                ]
                print(f"dim {dim:3} {rows:5} {'causal' if causal else 'full':6}  " + "  ".join(cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
