#!/usr/bin/env python3
"""libattn beside torch's attention on one GPU: who is faster, case by case.

    python bench/peers.py                          every forward case of bench/peers/h200.json
    python bench/peers.py --hopper                 what Hopper's kernels are held to: cuDNN, fp16, more head dims
    python bench/peers.py --backward               the backward: cases of the file again, d_q, d_k and d_v together
    python bench/peers.py --backward --unordered   the same with ATTN_UNORDERED, and beside it without ("ordered", the default)
    python bench/peers.py --cases d128,causal      those whose names have both words
    python bench/peers.py --json peers.jsonl       one line for the run, one for each case

How it is timed: bench/measure.py. Inputs rotate over three sets. Counted are 2 * batch * heads * seqlen^2 * (dim_qk +
dim_v) operations, half of them for causal, 2.5 times as many for a backward. libattn is called as a C program would, attn_run
on a plan; the others through torch.nn.functional.scaled_dot_product_attention, for a backward torch.autograd.grad, all on
the same memory.

Peers that torch does not have (FlashAttention-3) come in by figures that were measured beside cuDNN on an H200: a ratio
against cuDNN in this run, divided by best_over_cudnn there, is the ratio against the best of all of them.

Each result of libattn is held against a peer's; exit status 1 means that one is wrong. --hopper takes cuDNN as the only
peer, runs fp16 beside bf16, adds cases for head dims that the file has at one length only or not at all, and says at the
end what was wanted and what was found. Speed does not change the exit status.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys

import torch
from measure import (
    ROOT,
    Options,
    Report,
    add_arguments,
    agree,
    difference,
    finish_arguments,
    geometric_mean,
    is_portable,
    kernel_note,
    libattn_backward_run,
    libattn_run,
    measure,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

SETS = 3
PEERS = {
    "cuda": {
        "fa2": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {"fa2": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH},
}
GRID = (64, 128, 256)  # head dims of the grid that counts
OTHERS = (96, 192)  # which are held against cuDNN alone
HALF = "float16"  # libattn's other dtype, where both are measured
ORDERED = "ordered"  # libattn without ATTN_UNORDERED, where both are measured
RATIOS = {HALF: "fp16/bf16", ORDERED: "ordered / fast"}  # of libattn and libattn


def name_of(case):
    dim_v = case.get("dim_v")
    dims = f"d{case['head_dim']}" + (f"-v{dim_v}" if dim_v else "")
    return f"{dims}-{'causal' if case['causal'] else 'full'}-s{case['seqlen']}"


def wanted(case, words):
    """Whole words: d64 is not d640, s512 is not s5120."""
    return all(word in name_of(case).split("-") for word in words)


def more_cases(cases):
    """Cases of --hopper that the file does not have: 16384 tokens and 2048 dims in all heads, as there."""
    made = [
        {"op": "fwd", "head_dim": dim, "causal": causal, "seqlen": rows, "batch": 16384 // rows, "heads": 2048 // dim}
        for dim in OTHERS
        for causal in (False, True)
        for rows in (512, 2048, 8192)
    ]
    for dim, dim_v, heads in ((192, 128, 16), (64, 512, 4)):
        made.append(
            {"op": "fwd", "head_dim": dim, "dim_v": dim_v, "causal": True, "seqlen": 8192, "batch": 2, "heads": heads}
        )
    known = set(map(name_of, cases))
    return cases + [case for case in made if name_of(case) not in known]


def shrunk(case):
    return {**case, "seqlen": case["seqlen"] // 128, "batch": 1, "heads": 2}


# ---- who is measured ----


def torch_run(backend, q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def run():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return run


def torch_backward_run(backend, q, k, v, d_o, causal):
    """Gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o = torch_run(backend, *leaves, causal)()
    return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)


def torch_runs(case, name, backend, sets):
    """One function for each set of inputs; None, and a word about it, if the peer refuses them."""
    make = torch_backward_run if case["op"] == "bwd" else torch_run
    try:
        runs = [make(backend, *x, case["causal"]) for x in sets]
        runs[0]()
        return runs
    except RuntimeError as error:
        print(f"{name_of(case)}: no {name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def make_runners(case, dtype, peers, other, device):
    """{name: one function for each set of inputs}, libattn's kernels, and who is to say what the first result should be."""
    rows = (case["batch"], case["seqlen"], case["heads"])
    dims = (case["head_dim"], case["head_dim"], case.get("dim_v") or case["head_dim"])
    backward = case["op"] == "bwd"
    dims += (dims[2],) * backward  # of d_o
    sets = [[torch.randn(*rows, dim, device=device, dtype=dtype) for dim in dims] for _ in range(SETS)]
    options = Options(causal=case["causal"])
    libattn = libattn_backward_run if backward else libattn_run
    how = {"unordered": True} if other == ORDERED else {}
    ours = {"libattn": [libattn(*x, options, **how) for x in sets]}
    if other == HALF:
        ours[HALF] = [libattn(*(y.half() for y in x), options) for x in sets]
    if other == ORDERED:
        ours[ORDERED] = [libattn(*x, options) for x in sets]
    runners = {name: [run for run, _ in made] for name, made in ours.items()}
    theirs = {name: torch_runs(case, name, backend, sets) for name, backend in peers.items()}
    runners.update({name: runs for name, runs in theirs.items() if runs})
    judge = next((name for name in peers if name in runners), None)
    if not judge:
        runners["math"] = torch_runs(case, "math", SDPBackend.MATH, sets[:1])
    judge = (judge, runners[judge][0]) if judge else ("math", runners.pop("math")[0])
    return runners, {name: made[0][1] for name, made in ours.items()}, judge


def gap(found, wanted):
    """Of results, or of gradients: the largest. Rows of those may be next to nothing, so they count as a whole."""
    if isinstance(found, torch.Tensor):
        return difference(found, wanted)
    return (max(difference(x, y)[0] for x, y in zip(found, wanted)),) * 2


def check(case, runners, judge, dtype):
    """Complains about results of libattn that are not the judge's; how many, and (RMS, worst row) of each."""
    name_of_judge, run = judge
    errors = {name: gap(runners[name][0](), run()) for name in ("libattn", HALF, ORDERED) if name in runners}
    wrong = [name for name in errors if not agree(errors[name], dtype)]
    for name in wrong:
        print(f"{name_of(case)}: WRONG: {name} and {name_of_judge} differ by {errors[name]} (relative RMS, worst row)")
    return len(wrong), errors


def tflops(case, ms):
    dims = case["head_dim"] + (case.get("dim_v") or case["head_dim"])
    count = 2 * case["batch"] * case["heads"] * case["seqlen"] ** 2 * dims * (2.5 if case["op"] == "bwd" else 1)
    return count / (2 if case["causal"] else 1) / ms * 1e-9


def run_case(case, dtype, peers, other, arguments):
    runners, kernels, judge = make_runners(case, dtype, peers, other, arguments.device)
    wrong, errors = check(case, runners, judge, dtype)
    times = measure(runners, arguments)
    rates = {name: tflops(case, time) for name, time in times.ms.items()}
    ratios = {name: rates["libattn"] / rates[name] for name in peers if name in rates}
    if "cudnn" in ratios and case.get("best_over_cudnn"):
        ratios["best"] = ratios["cudnn"] / case["best_over_cudnn"]
    if other:
        ratios[other] = rates[other] / rates["libattn"]
    keys = ("op", "head_dim", "dim_v", "causal", "seqlen", "batch", "heads")
    return {
        **{key: case[key] for key in keys if key in case},
        "kernel": kernels["libattn"],
        "kernels": kernels,
        "ms": times.ms,
        "rounds": times.rounds,
        "how": times.how,
        "tflops": rates,
        "ratio": ratios,
        "error": errors,
        "wrong": wrong,
    }


# ---- output ----


def print_line(result, columns, ratios, device):
    numbers = "".join(f"{result['tflops'].get(name, math.nan):10.1f}" for name in columns)
    numbers += "".join(f"{result['ratio'].get(name, math.nan):10.3f}" for name in ratios)
    notes = [kernel_note(result["kernel"], device)] + ([result["how"]] if result["how"] == "with launch" else [])
    other = result["kernels"].get(HALF, "")
    if other and is_portable(other, device) != is_portable(result["kernel"], device):
        notes.append(f"fp16: {kernel_note(other, device)}")
    print(f"{name_of(result):20}{numbers}  {'; '.join(notes)}", flush=True)


def summary(results, name):
    """(geometric mean, least, the least one's name, how many are below 1) of a ratio; None if nobody has it."""
    ratios = {name_of(r): r["ratio"][name] for r in results if name in r["ratio"]}
    if not ratios:
        return None
    least = min(ratios, key=ratios.get)
    return geometric_mean(ratios.values()), ratios[least], least, sum(ratio < 1 for ratio in ratios.values())


def print_summary(results, names):
    print(f"\n{'libattn / peer':20}{'mean':>10}{'least':>10}{'below 1':>10}   (geometric mean over {len(results)} cases)")
    for name in names:
        if found := summary(results, name):
            mean, least, where, below = found
            print(f"{RATIOS.get(name, name):20}{mean:10.3f}{least:10.3f}{below:10}   {where}")


def print_verdicts(results, device):
    """What Hopper's kernels are held to. The last line has the figures of the grid."""
    grid = [r for r in results if r["head_dim"] in GRID and "dim_v" not in r]
    others = [r for r in results if r["head_dim"] in OTHERS and "dim_v" not in r]
    portable = [name_of(r) for r in results if any(is_portable(kernel, device) for kernel in r["kernels"].values())]
    print(f"\n{len(portable)} of {len(results)} cases without a Hopper kernel: {' '.join(portable) or 'none'}")
    for title, rows, name, want_mean, want_least in (
        ("d96, d192 / cuDNN", others, "cudnn", 1.0, 1.0),
        ("fp16 / bf16", grid, HALF, 0.98, 0.98),
        ("grid / cuDNN", grid, "cudnn", None, None),
        ("grid / best peer", grid, "best", 1.0, 0.95),
    ):
        found = summary(rows, name)
        if not found:
            print(f"{title}: not measured")
            continue
        mean, least, where, _ = found
        verdict = ""
        if want_mean is not None:
            met = mean >= want_mean and least >= want_least
            verdict = f" {'met' if met else 'MISSED'} (want {want_mean:.2f}, {want_least:.2f})"
        print(f"{title}: mean {mean:.3f}, least {least:.3f} {where}{verdict}, {len(rows)} cases")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, 0.6)
    parser.add_argument("--hopper", action="store_true", help="cuDNN alone, fp16 beside bf16, more head dims; see above")
    parser.add_argument("--backward", action="store_true", help="the backward pass")
    parser.add_argument("--unordered", action="store_true", help="with ATTN_UNORDERED, and beside it without; see above")
    parser.add_argument(
        "--cases", default="", metavar="WORDS", help="only cases whose names have all of these: d128,causal,s8192"
    )
    parser.add_argument("--peers", help="which of fa2, cudnn, efficient (default: all); fa2, math on the host")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument(
        "--figures", default=ROOT / "bench" / "peers" / "h200.json", help="cases, and ratios of the best peer"
    )
    parser.add_argument("--list", action="store_true", help="names of the cases, and nothing else")
    arguments = parser.parse_args(argv)
    known = PEERS[arguments.device]
    if arguments.hopper and arguments.backward:
        parser.error("--backward: --hopper is about the forward")
    if arguments.unordered and not arguments.backward:
        parser.error("--unordered: is about --backward")
    if arguments.hopper and arguments.dtype != "bfloat16":
        parser.error("--dtype: --hopper measures both")
    default = "cudnn" if arguments.hopper and "cudnn" in known else ",".join(known)
    names = [name for name in (arguments.peers or default).split(",") if name]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--peers {unknown[0]}: want some of {','.join(known)}")
    return arguments, {name: known[name] for name in names}


def main(argv=None):
    arguments, peers = parse_arguments(argv)
    words = [word for word in arguments.cases.split(",") if word]
    cases = json.loads(pathlib.Path(arguments.figures).read_text())["cases"]
    cases = [case for case in cases if case["op"] == ("bwd" if arguments.backward else "fwd")]
    cases = [case for case in (more_cases(cases) if arguments.hopper else cases) if wanted(case, words)]
    if arguments.list:
        print(*map(name_of, cases), sep="\n")
        return 0
    if not cases:
        sys.exit(f"peers.py: no case has all of {words}; --list names them")
    finish_arguments(arguments)
    if arguments.backward:
        arguments.no_graphs = True  # torch.autograd.grad cannot be captured
    if arguments.quick:
        cases = [shrunk(case) for case in cases if case["seqlen"] == 8192]
    dtype = getattr(torch, arguments.dtype)
    op = "backward" + ", unordered" * arguments.unordered if arguments.backward else "forward"
    report = Report(arguments, op=op, dtype=arguments.dtype + (" and float16" if arguments.hopper else ""))
    other = HALF if arguments.hopper else ORDERED if arguments.unordered else None
    columns = ["libattn", *([other] if other else []), *peers]
    ratios = [*peers, "best", *([other] if other else [])]
    titles = columns + [RATIOS.get(name, f"/{name}")[:9] for name in ratios]
    print(f"{'TFLOP/s; ratios':20}{''.join(f'{title:>10}' for title in titles)}  kernel")
    results = []
    for n, case in enumerate(cases):
        if sys.stderr.isatty():
            print(f"\r{n + 1}/{len(cases)} {name_of(case):24}\r", end="", file=sys.stderr, flush=True)
        with torch.no_grad():
            results.append(run_case(case, dtype, peers, other, arguments))
        print_line(results[-1], columns, ratios, arguments.device)
        report.write(results[-1])
    print_summary(results, ratios)
    wrong = sum(result["wrong"] for result in results)
    if arguments.hopper and arguments.device == "cuda":
        print_verdicts(results, arguments.device)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
