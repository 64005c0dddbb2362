#!/usr/bin/env python3
"""What each feature of attention costs over plain causal attention, in bf16, for head dims 64, 128 and 256.

    python bench/features.py                       2 sequences of 8192 tokens, 2048 dims in all heads
    python bench/features.py --features varlen     plain and those whose names have the word
    python bench/features.py --device cpu --quick  256 tokens on the host

How it is timed: bench/measure.py; plain and all features of a head dim take turns. The cost is that of a pair: time divided
by the pairs of query and key that the mask allows, over the same of plain attention. So a window or sequences of many
lengths may cost something although they take less time; all others have the pairs of plain, and the cost is simply time.

Before a feature is timed, a small problem with it is held against the ref backend, on the host in double; exit status 1
means that one is wrong. Speed does not change the exit status.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import torch
from measure import (
    Options,
    Report,
    add_arguments,
    agree,
    difference,
    finish_arguments,
    is_portable,
    kernel_note,
    libattn_run,
    measure,
)

DIMS = (64, 128, 256)
WANTED = {"dropout": 35.0}  # percent; every other feature of HELD: 10
HELD = ("softcap", "alibi", "window", "gqa", "varlen", "dropout")
DROPOUT = 0.17
SMALL = 256  # rows of problems that are held against ref, and of --quick: one page of the larger size


class Sizes(NamedTuple):
    batch: int
    rows: int
    heads: int
    dim: int
    dtype: Any
    device: str

    def randn(self, *shape):
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def qkv(self, heads_kv=None):
        return [self.randn(self.batch, self.rows, heads, self.dim) for heads in (self.heads, *[heads_kv or self.heads] * 2)]

    def ints(self, numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)


class Case(NamedTuple):
    q: Any
    k: Any
    v: Any
    options: Options
    pairs: int  # that the mask allows, over all heads of q


def triangle(n):
    return n * (n + 1) // 2


def generator(sizes):
    """The same lengths and pages for the same sizes, on every device."""
    return torch.Generator().manual_seed(sizes.rows)


# ---- features: a function from sizes to a case, for each ----


def with_options(sizes, **options):
    return Case(*sizes.qkv(), Options(causal=True, **options), sizes.batch * sizes.heads * triangle(sizes.rows))


def plain(sizes):
    return with_options(sizes)


def softcap(sizes):
    """Low, so that a kernel without it would be found out: scores are around one."""
    return with_options(sizes, softcap=5.0)


def softcap_50(sizes):
    """As models have it: hardly any score comes near."""
    return with_options(sizes, softcap=50.0)


def alibi(sizes):
    slopes = 2.0 ** (-8.0 * torch.arange(1, sizes.heads + 1, device=sizes.device) / sizes.heads)
    return with_options(sizes, alibi=slopes.float())


def window(sizes):
    """Half of the rows before each: 4096 of 8192."""
    left = sizes.rows // 2
    case = with_options(sizes, window_left=left, window_right=0)
    unseen = triangle(sizes.rows - left - 1)
    return case._replace(pairs=sizes.batch * sizes.heads * (triangle(sizes.rows) - unseen))


def gqa(sizes):
    """Four heads of q to one of k and v."""
    return with_options(sizes)._replace(**dict(zip("qkv", sizes.qkv(sizes.heads // 4))))


def packed(sizes, lengths):
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    q, k, v = (sizes.randn(starts[-1], sizes.heads, sizes.dim) for _ in range(3))
    cu = sizes.ints(starts)
    options = Options(causal=True, cu_q=cu, cu_kv=cu, max_q=max(lengths), max_kv=max(lengths))
    return Case(q, k, v, options, sizes.heads * sum(map(triangle, lengths)))


def varlen(sizes):
    """64 sequences of random lengths, up to that of plain."""
    return packed(sizes, torch.randint(1, sizes.rows + 1, (64,), generator=generator(sizes)).tolist())


def varlen_short(sizes):
    """64 sequences in as many tokens as plain has in all: 256 on average, where half of the work is at diagonals."""
    total = sizes.batch * sizes.rows
    cuts = torch.randperm(total - 1, generator=generator(sizes))[:63].sort().values + 1
    bounds = [0, *cuts.tolist(), total]
    return packed(sizes, [b - a for a, b in zip(bounds, bounds[1:])])


def dropout(sizes):
    return with_options(sizes, dropout=DROPOUT, seed=torch.tensor([5, 7]))


def sink(sizes):
    return with_options(sizes, sink=torch.randn(sizes.heads, device=sizes.device))


def paged(sizes, page):
    """The same keys in pages that lie about."""
    q, k, v = sizes.qkv()
    count = sizes.batch * sizes.rows // page
    place = torch.randperm(count, generator=generator(sizes)).to(sizes.device)
    pages = []
    for x in (k, v):
        there = torch.empty_like(x).view(count, page, sizes.heads, sizes.dim)
        there[place] = x.view_as(there)
        pages.append(there)
    table = place.view(sizes.batch, -1).to(torch.int32)
    options = Options(causal=True, page_table=table, used_kv=sizes.ints([sizes.rows] * sizes.batch))
    return Case(q, *pages, options, sizes.batch * sizes.heads * triangle(sizes.rows))


def paged_256(sizes):
    return paged(sizes, 256)


def paged_16(sizes):
    return paged(sizes, 16)


def bias(sizes):
    """One matrix in the dtype of q for all heads and sequences."""
    return with_options(sizes, bias=sizes.randn(1, 1, sizes.rows, sizes.rows))


FEATURES = {
    "plain": plain,
    "softcap": softcap,
    "softcap-50": softcap_50,
    "alibi": alibi,
    "window": window,
    "gqa": gqa,
    "varlen": varlen,
    "varlen-short": varlen_short,
    "dropout": dropout,
    "sink": sink,
    "paged-256": paged_256,
    "paged-16": paged_16,
    "bias": bias,
}

# ---- right, and how fast ----


def on_host(case):
    def move(x):
        return x.cpu() if isinstance(x, torch.Tensor) else x

    return [move(x) for x in (case.q, case.k, case.v)], Options(*map(move, case.options))


def check(feature, sizes):
    """(relative RMS, worst row) of the difference to ref for a small problem of the same kind."""
    case = FEATURES[feature](sizes._replace(rows=SMALL, heads=4))
    found, _ = libattn_run(case.q, case.k, case.v, case.options)
    tensors, options = on_host(case)
    wanted, _ = libattn_run(*tensors, options, backend="ref")
    return difference(found().cpu(), wanted())


def run_dim(names, sizes, arguments):
    """A result for each feature of one head dim."""
    errors = {name: check(name, sizes) for name in names}
    cases = {name: FEATURES[name](sizes) for name in names}
    made = {name: libattn_run(case.q, case.k, case.v, case.options) for name, case in cases.items()}
    times = measure({name: [run] for name, (run, _) in made.items()}, arguments)
    per_pair = {name: times.ms[name] / cases[name].pairs for name in names}
    return [
        {
            "head_dim": sizes.dim,
            "feature": name,
            "kernel": made[name][1],
            "pairs": cases[name].pairs,
            "ms": times.ms[name],
            "rounds": times.rounds,
            "how": times.how,
            "tflops": 4 * sizes.dim / per_pair[name] * 1e-9,
            "cost_percent": 100 * (per_pair[name] / per_pair["plain"] - 1),
            "error": errors[name],
            "wrong": not agree(errors[name], sizes.dtype),
        }
        for name in names
    ]


# ---- output ----


def wanted(feature):
    """The most that it may cost, in percent; None: nobody said."""
    return WANTED.get(feature, 10.0) if feature in HELD else None


def verdict(result):
    most = wanted(result["feature"])
    return "" if most is None else f"{'met' if result['cost_percent'] <= most else 'MISSED'} (want {most:.0f}%)"


def print_line(r, device):
    notes = [verdict(r)] + ([r["how"]] if r["how"] == "with launch" else [])
    print(
        f"d{r['head_dim']:<5}{r['feature']:14}{r['ms']:10.3f}{r['tflops']:10.1f}{r['cost_percent']:+9.1f}%"
        f"{r['error'][0]:10.1e}  {kernel_note(r['kernel'], device)}  {' '.join(notes)}",
        flush=True,
    )
    if r["wrong"]:
        print(f"d{r['head_dim']} {r['feature']}: WRONG: libattn and ref differ by {r['error']} (relative RMS, worst row)")


def print_summary(results, device):
    portable = [f"d{r['head_dim']}-{r['feature']}" for r in results if is_portable(r["kernel"], device)]
    print(f"\n{len(portable)} of {len(results)} without a Hopper kernel: {' '.join(portable) or 'none'}")
    missed = [f"d{r['head_dim']}-{r['feature']} {r['cost_percent']:+.1f}%" for r in results if "MISSED" in verdict(r)]
    print(f"{len(missed)} cost more than wanted: {', '.join(missed) or 'none'}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, 4.0)
    parser.add_argument("--features", default="", metavar="WORD", help="only plain and those whose names have it")
    parser.add_argument("--dims", default=",".join(map(str, DIMS)), help="head dims (default 64,128,256)")
    arguments = finish_arguments(parser.parse_args(argv))
    names = [name for name in FEATURES if name == "plain" or arguments.features in name]
    dtype = torch.bfloat16
    rows = SMALL if arguments.quick else 8192
    report = Report(arguments, dtype="bfloat16", batch=2, rows=rows)
    print(f"{'dim':6}{'feature':14}{'ms':>10}{'TFLOP/s':>10}{'cost':>10}{'error':>10}  kernel   (TFLOP/s of allowed pairs)")
    results = []
    for dim in map(int, arguments.dims.split(",")):
        heads = 4 if arguments.quick else 2048 // dim
        with torch.no_grad():
            found = run_dim(names, Sizes(2, rows, heads, dim, dtype, arguments.device), arguments)
        for result in found:
            print_line(result, arguments.device)
            report.write(result)
        results += found
    print_summary(results, arguments.device)
    return 1 if any(r["wrong"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
