#!/usr/bin/env python3
"""FlashMask patterns: libattn's flashmask_attention beside torch's FlexAttention, in bf16 with head dim 128.

    python bench/masks.py                          every pattern, 2 sequences of 8192 tokens, 16 heads
    python bench/masks.py --patterns document      those whose names have the word
    python bench/masks.py --device cpu --quick     128 tokens on the host, FlexAttention not compiled

How it is timed: bench/measure.py. A pattern is written down twice: as the vectors of FlashMask, which say for each key the
rows that do not see it, and as a mask_mod of FlexAttention, a predicate of row and key; tests/package/test_bench.py holds
one against the other, pair by pair. FlexAttention gets a BlockMask, made once, and is compiled before the clock runs;
libattn works out in every call which tiles it can skip. TFLOP/s count useful work, 4 * head_dim operations for each pair
that the mask allows, whoever computes more than that.

Where documents are causal, the same documents are also run as packed sequences (varlen): skipping is worth its name if that
is hardly faster. Both results are held against each other's; exit status 1 means that they differ.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any, NamedTuple, Optional

import torch
from measure import (
    Options,
    Report,
    add_arguments,
    agree,
    difference,
    finish_arguments,
    geometric_mean,
    is_portable,
    kernel_note,
    libattn_run,
    measure,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

FLEX_WANTED = 1.5  # times FlexAttention's speed, causal documents
VARLEN_WANTED = 1.15  # times the time of packed sequences


class Pattern(NamedTuple):
    vectors: Any  # (n, 1, 2 or 4) int32; help(libattn.flashmask_attention) says what they mean
    causal: bool  # the causal rule applies besides
    mod: Any  # (batch, head, row, key) -> may row see key: all of the mask
    starts: Optional[list] = None  # where causal documents begin, and the end: the mask as packed sequences


# ---- patterns: a function of the number of tokens and the device, for each ----


def generator(n):
    """The same numbers for the same size, on every device."""
    return torch.Generator().manual_seed(n)


def uneven(n, count):
    """Where `count` documents of random lengths begin, and n."""
    cuts = torch.randperm(n - 1, generator=generator(n))[: count - 1] + 1
    return [0, *sorted(cuts.tolist()), n]


def spans(starts, device):
    """For each position: which document it is in, where that begins and ends. In int32, for FlexAttention to load less."""
    bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    at = torch.arange(starts[-1], dtype=torch.int32, device=device)
    which = torch.bucketize(at, bounds[1:], right=True, out_int32=True)
    return which, bounds[which], bounds[which + 1]


def pattern(columns, causal, mod, starts=None):
    return Pattern(torch.stack(columns, -1).to(torch.int32), causal, mod, starts)


def causal(n, device):
    return pattern([torch.full((n,), n, device=device)], True, lambda b, h, i, j: i >= j)


def sliding_window(n, device):
    """A row sees itself and the n / 8 keys before it."""
    left = n // 8
    j = torch.arange(n, device=device)
    return pattern([(j + left + 1).clamp_max(n)], True, lambda b, h, i, j: (i >= j) & (i - j <= left))


def causal_documents(starts, device):
    which, _, end = spans(starts, device)
    return pattern([end], True, lambda b, h, i, j: (i >= j) & (which[i] == which[j]), starts)


def causal_document(n, device):
    """8 documents of random lengths."""
    return causal_documents(uneven(n, 8), device)


def causal_document_even(n, device):
    """8 documents of one length."""
    return causal_documents(list(range(0, n + 1, n // 8)), device)


def document(n, device):
    """8 documents, each of which sees all of itself."""
    which, start, end = spans(uneven(n, 8), device)
    return pattern([end, start], False, lambda b, h, i, j: which[i] == which[j])


def share_question(n, device):
    """4 documents of a question (the first two fifths) and three answers, which see the question and themselves."""
    starts = uneven(n, 4)
    parts = [a + (b - a) * fifths // 5 for a, b in zip(starts, starts[1:]) for fifths in (0, 2, 3, 4)] + [n]
    which, _, end = spans(starts, device)
    part, _, part_end = spans(parts, device)
    question = part % 4 == 0
    return pattern(
        [torch.where(question, end, part_end)],
        True,
        lambda b, h, i, j: (i >= j) & (which[i] == which[j]) & (question[j] | (part[i] == part[j])),
    )


def global_and_window(n, device):
    """The first n / 64 tokens see all and are seen by all; the others see n / 16 to either side."""
    first, side = n // 64, n // 16
    j = torch.arange(n, device=device)
    seen_by_all = j < first
    columns = [
        torch.where(seen_by_all, n, (j + side + 1).clamp_max(n)),
        torch.full_like(j, n),
        torch.where(seen_by_all, 0, first),
        torch.where(seen_by_all, 0, (j - side).clamp_min(first)),
    ]
    return pattern(columns, False, lambda b, h, i, j: (i < first) | (j < first) | ((i - j).abs() <= side))


def causal_blockwise(n, device):
    """8 blocks that see only themselves, but for the last, which sees all."""
    starts = uneven(n, 8)
    which, _, end = spans(starts, device)
    last = which == 7
    columns = [torch.where(last, n, end), torch.where(last, n, starts[7])]
    return pattern(columns, True, lambda b, h, i, j: (i >= j) & ((which[i] == which[j]) | (which[i] == 7)))


def prefix_lm(n, device):
    """The first quarter is seen by all rows, the rest is causal."""
    prefix = n // 4
    j = torch.arange(n, device=device)
    columns = [torch.full_like(j, n), torch.where(j < prefix, 0, j)]
    return pattern(columns, False, lambda b, h, i, j: (j < prefix) | (i >= j))


def prefix_lm_document(n, device):
    """8 documents whose first half is seen by all of their rows, the rest is causal."""
    which, start, end = spans(uneven(n, 8), device)
    j = torch.arange(n, device=device)
    prefix = j < (start + end) // 2
    columns = [end, torch.where(prefix, start, j)]
    return pattern(columns, False, lambda b, h, i, j: (which[i] == which[j]) & (prefix[j] | (i >= j)))


def qk_sparse(n, device):
    """Causal, but for two spans of rows that do not see the keys of their own span."""
    which, _, end = spans([0, n // 8, 3 * n // 16, 5 * n // 16, n // 2, n], device)
    j = torch.arange(n, device=device)
    dropped = which % 2 == 1
    columns = [torch.where(dropped, j, n), torch.where(dropped, end, n)]
    return pattern(columns, True, lambda b, h, i, j: (i >= j) & ~(dropped[j] & (which[i] == which[j])))


def random_eviction(n, device):
    """Each key is thrown out of the cache at some row after its own."""
    j = torch.arange(n)
    out = (j + 1 + (torch.rand(n, generator=generator(n)) * (n - j)).long()).clamp_max(n).to(device, torch.int32)
    return pattern([out], True, lambda b, h, i, j: (i >= j) & (i < out[j]))


PATTERNS = {
    "causal": causal,
    "causal-document": causal_document,
    "causal-document-even": causal_document_even,
    "sliding-window": sliding_window,
    "document": document,
    "share-question": share_question,
    "global-and-window": global_and_window,
    "causal-blockwise": causal_blockwise,
    "prefix-lm": prefix_lm,
    "prefix-lm-document": prefix_lm_document,
    "qk-sparse": qk_sparse,
    "random-eviction": random_eviction,
}


def dense(mod, n, device):
    """The mask of a mask_mod as (row, key) booleans."""
    i, j = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)[None, :]
    return mod(0, 0, i, j).broadcast_to(n, n)


# ---- who is measured ----


def flashmask_run(q, k, v, made):
    mask = made.vectors.expand(q.shape[0], 1, *made.vectors.shape).contiguous()
    return libattn_run(q, k, v, Options(flashmask=mask, causal=made.causal))


def varlen_run(q, k, v, starts):
    batch, n = q.shape[:2]
    cu = torch.tensor([b * n + start for b in range(batch) for start in starts[:-1]] + [batch * n], dtype=torch.int32)
    cu = cu.to(q.device)
    longest = max(b - a for a, b in zip(starts, starts[1:]))
    options = Options(cu_q=cu, cu_kv=cu, max_q=longest, max_kv=longest, causal=True)
    return libattn_run(*(x.flatten(0, 1) for x in (q, k, v)), options)


def flex_run(q, k, v, made):
    """A function that runs FlexAttention, compiled on a GPU, and the seconds that it took to be ready."""
    began = time.monotonic()
    n, on_gpu = q.shape[1], q.is_cuda
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    blocks = create_block_mask(made.mod, None, None, n, n, device=q.device)
    if on_gpu:
        torch._dynamo.reset()  # each mask is a compilation, and only so many are made of one function
    function = torch.compile(flex_attention, dynamic=False, fullgraph=True) if on_gpu else flex_attention

    def run():
        return function(q, k, v, block_mask=blocks).transpose(1, 2)

    with warnings.catch_warnings():  # of being slow and of being eager, on the host
        warnings.simplefilter("ignore")
        run()
    if on_gpu:
        torch.cuda.synchronize()
    return run, time.monotonic() - began


def run_pattern(name, shape, dtype, arguments):
    n, device = shape[1], arguments.device
    made = PATTERNS[name](n, device)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    ours, kernel = flashmask_run(q, k, v, made)
    flex, ready = flex_run(q, k, v, made)
    runners, kernels = {"libattn": [ours], "flex": [flex]}, {"libattn": kernel}
    if made.starts:
        varlen, kernels["varlen"] = varlen_run(q, k, v, made.starts)
        runners["varlen"] = [lambda: varlen().view(shape)]
    errors = {other: difference(ours(), runners[other][0]()) for other in runners if other != "libattn"}
    times = measure(runners, arguments)
    pairs = int(dense(made.mod, n, device).sum())
    operations = 4 * shape[0] * shape[2] * shape[3] * pairs
    return {
        "pattern": name,
        "allowed": pairs / n**2,
        "kernels": kernels,
        "ms": times.ms,
        "rounds": times.rounds,
        "how": times.how,
        "tflops": {who: operations / ms * 1e-9 for who, ms in times.ms.items()},
        "over_flex": times.ms["flex"] / times.ms["libattn"],
        "over_varlen": times.ms["libattn"] / times.ms["varlen"] if made.starts else None,
        "flex_ready_s": ready,
        "error": errors,
        "wrong": [other for other, found in errors.items() if not agree(found, dtype)],
    }


# ---- output ----


def print_line(r, device):
    varlen = f"{r['tflops']['varlen']:9.1f}{r['over_varlen']:8.3f}" if r["over_varlen"] else f"{'':17}"
    notes = [kernel_note(r["kernels"]["libattn"], device)] + ([r["how"]] if r["how"] == "with launch" else [])
    if is_portable(r["kernels"].get("varlen", "_sm90_"), device):
        notes.append(f"varlen: {kernel_note(r['kernels']['varlen'], device)}")
    print(
        f"{r['pattern']:22}{100 * r['allowed']:6.1f}%{r['tflops']['libattn']:9.1f}{r['tflops']['flex']:9.1f}"
        f"{r['over_flex']:8.3f}{varlen}{r['error']['flex'][0]:10.1e}{r['flex_ready_s']:7.1f}  {'; '.join(notes)}",
        flush=True,
    )
    for other in r["wrong"]:
        print(f"{r['pattern']}: WRONG: libattn and {other} differ by {r['error'][other]} (relative RMS, worst row)")


def print_verdicts(results, device):
    portable = [r["pattern"] for r in results if any(is_portable(kernel, device) for kernel in r["kernels"].values())]
    print(f"\n{len(portable)} of {len(results)} patterns without a Hopper kernel: {' '.join(portable) or 'none'}")
    for r in results:
        if r["over_varlen"]:
            fast, skips = r["over_flex"] >= FLEX_WANTED, r["over_varlen"] <= VARLEN_WANTED
            print(
                f"{r['pattern']}: {r['over_flex']:.2f} times FlexAttention's speed, {'met' if fast else 'MISSED'} "
                f"(want {FLEX_WANTED}); {r['over_varlen']:.3f} times the time of packed sequences, "
                f"{'met' if skips else 'MISSED'} (want {VARLEN_WANTED})"
            )
    least = min(results, key=lambda r: r["over_flex"])
    print(
        f"libattn / FlexAttention: mean {geometric_mean(r['over_flex'] for r in results):.3f}, least "
        f"{least['over_flex']:.3f} {least['pattern']}, {len(results)} patterns"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, 0.5)
    parser.add_argument("--patterns", default="", metavar="WORD", help="only those whose names have it")
    parser.add_argument("--list", action="store_true", help="names of the patterns, and nothing else")
    arguments = parser.parse_args(argv)
    names = [name for name in PATTERNS if arguments.patterns in name]
    if arguments.list:
        print(*names, sep="\n")
        return 0
    if not names:
        sys.exit(f"masks.py: no pattern has {arguments.patterns} in its name; --list names them")
    finish_arguments(arguments)
    shape = (2, 128, 2, 32) if arguments.quick else (2, 8192, 16, 128)  # batch, tokens, heads, dims
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    report = Report(arguments, dtype=str(dtype).split(".")[1], shape=shape)
    print(
        f"{'TFLOP/s, useful':22}{'pairs':>7}{'libattn':>9}{'flex':>9}{'/flex':>8}{'varlen':>9}{'t/t':>8}{'error':>10}"
        f"{'ready':>7}  kernel   (t/t: time over varlen's; ready: seconds to compile FlexAttention)"
    )
    results = []
    for name in names:
        with torch.no_grad():
            results.append(run_pattern(name, shape, dtype, arguments))
        print_line(results[-1], arguments.device)
        report.write(results[-1])
    if arguments.device == "cuda":  # FlexAttention that is not compiled is no measure
        print_verdicts(results, arguments.device)
    return 1 if any(r["wrong"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
