#!/usr/bin/env python3
"""How exact gradients are: d_q, d_k and d_v against float64, libattn's beside those of torch's attention.

    python bench/gradients.py                       4096 rows and keys, 8 heads of dim 128, bf16 and f16
    python bench/gradients.py --causal --dim 64     another problem; the bars are those of the first
    python bench/gradients.py --json gradients.jsonl
    python bench/gradients.py --device cpu --quick  few rows, on the host

Three kinds of inputs: normal, all N(0,1); outliers, to whose q, k and v N(0,100) is added with probability 0.001; and
outliers-d_o, with the same in d_o. Truth is the textbook's formula in float64 on the inputs as they are rounded, head by
head. Everybody starts from a forward of their own. The error is RMS of the difference over RMS of the truth: of all heads
together, and in brackets of the worst row by itself, which may have next to no gradient.

Exit status 1: libattn is above a bar, or not a number. "least": the error of the truth rounded to the dtype.
"""

from __future__ import annotations

import argparse
import sys

import torch
from measure import Options, Report, kernel_note, libattn_backward_run
from peers import PEERS, torch_backward_run

KINDS = ("normal", "outliers", "outliers-d_o")
NAMES = ("d_q", "d_k", "d_v")
BARS = {  # 4096 x 4096 x 128; those of outliers are FlashAttention-3's errors
    ("bfloat16", "normal"): (2.5e-3, 2.5e-3, 2.5e-3),
    ("float16", "normal"): (3.2e-4, 3.2e-4, 3.2e-4),
    ("bfloat16", "outliers"): (3.9e-3, 4.8e-3, 2.1e-3),
}


def make_inputs(kind, rows, heads, dim, dtype, device):
    """q, k, v and d_o, the same on every device and in either dtype but for their rounding."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for name in ("q", "k", "v", "d_o"):
        x = torch.randn(1, rows, heads, dim, generator=draw)
        far = 10 * torch.randn(x.shape, generator=draw) * (torch.rand(x.shape, generator=draw) < 0.001)
        if kind == "outliers-d_o" or (kind == "outliers" and name != "d_o"):
            x += far
        made.append(x.to(dtype).to(device))
    return made


def exact(q, k, v, d_o, causal):
    """(d_q, d_k, d_v) in float64."""
    gradients = [torch.empty(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5
    for h in range(q.shape[2]):
        a, b, c, d = (x[0, :, h].double() for x in (q, k, v, d_o))
        p = scale * (a @ b.T)
        if causal:
            p.masked_fill_(torch.ones_like(p, dtype=torch.bool).triu_(1), -torch.inf)
        p = p.softmax(-1)
        d_s = d @ c.T
        d_s = p * (d_s - (p * d_s).sum(-1, keepdim=True))
        for to, x in zip(gradients, (scale * (d_s @ b), scale * (d_s.T @ a), p.T @ d)):
            to[0, :, h] = x
    return gradients


def error(found, truth):
    """(relative RMS, that of the worst row)"""
    gap = found.double() - truth
    rows = gap.square().sum(-1).sqrt() / truth.square().sum(-1).sqrt().clamp_min(1e-30)
    return (gap.square().mean().sqrt() / truth.square().mean().sqrt()).item(), rows.max().item()


def gradients_of(inputs, causal, device):
    """{name: (d_q, d_k, d_v)} of everybody who takes the problem, and libattn's kernel."""
    run, kernel = libattn_backward_run(*inputs, Options(causal=causal))
    found = {"libattn": run()}
    for name, backend in PEERS[device].items():
        try:
            found[name] = torch_backward_run(backend, *inputs, causal)()
        except RuntimeError as fault:
            print(f"no {name}: {str(fault).splitlines()[0]}", file=sys.stderr)
    return found, kernel


def run_kind(kind, arguments, dtype):
    """A result for each of them."""
    inputs = make_inputs(kind, arguments.rows, arguments.heads, arguments.dim, getattr(torch, dtype), arguments.device)
    truth = exact(*inputs, arguments.causal)
    found, kernel = gradients_of(inputs, arguments.causal, arguments.device)
    found["least"] = tuple(x.to(getattr(torch, dtype)) for x in truth)
    return [
        {
            "dtype": dtype,
            "inputs": kind,
            "name": name,
            **({"kernel": kernel} if name == "libattn" else {}),
            "error": {x: error(y, z) for x, y, z in zip(NAMES, gradients, truth)},
        }
        for name, gradients in found.items()
    ]


def misses(result):
    """What of libattn's is above its bar, in words."""
    bars = BARS.get((result["dtype"], result["inputs"]), (torch.inf,) * 3)
    return [
        f"{x} {result['error'][x][0]:.2e}, bar {bar:.1e}" for x, bar in zip(NAMES, bars) if not result["error"][x][0] <= bar
    ]


def print_result(result, device):
    cells = "".join(f"{rms:14.2e} ({worst:.1e})" for rms, worst in result["error"].values())
    note = kernel_note(result["kernel"], device) if "kernel" in result else ""
    print(f"{result['dtype']:10}{result['inputs']:14}{result['name']:10}{cells}  {note}".rstrip(), flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where (default cuda)")
    parser.add_argument("--quick", action="store_true", help="few rows: does it work at all?")
    parser.add_argument("--rows", type=int, default=4096, help="and keys (default 4096)")
    parser.add_argument("--heads", type=int, default=8, help="default 8")
    parser.add_argument("--dim", type=int, default=128, help="default 128")
    parser.add_argument("--causal", action="store_true", help="with a causal mask")
    parser.add_argument("--json", metavar="FILE", help="write lines of JSON there, too")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gradients.py: torch sees no GPU here; --device cpu --quick tries it out without")
    if arguments.quick:
        arguments.rows, arguments.heads = min(arguments.rows, 256), min(arguments.heads, 2)
    report = Report(
        arguments, **{name: getattr(arguments, name) for name in ("rows", "heads", "dim", "causal")}, op="backward"
    )
    print(f"{'dtype':10}{'inputs':14}{'':10}" + "".join(f"{name + ' (worst row)':>24}" for name in NAMES) + "  kernel")
    missed = []
    todo = [(dtype, kind) for dtype in ("bfloat16", "float16") for kind in KINDS]
    for n, (dtype, kind) in enumerate(todo):
        if sys.stderr.isatty():
            print(f"\r{n + 1}/{len(todo)} {dtype} {kind:14}\r", end="", file=sys.stderr, flush=True)
        for result in run_kind(kind, arguments, dtype):
            print_result(result, arguments.device)
            report.write(result)
            if result["name"] == "libattn":
                missed += [f"{dtype} {kind} {words}" for words in misses(result)]
    print(*(f"MISSED: {words}" for words in missed), sep="\n", end="\n" if missed else "")
    print("every bar is met" if not missed else f"{len(missed)} above their bars")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
