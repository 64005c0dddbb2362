#!/usr/bin/env python3
"""libattn beside torch and ONNX Runtime on the host: who is faster, case by case, and how far from what the machine can do.

    python bench/peers_cpu.py                          every case, on every CPU
    python bench/peers_cpu.py --threads 1              on one
    python bench/peers_cpu.py --quick                  one or two sizes of each kind, few runs, no verdicts
    python bench/peers_cpu.py --cases 'decode.*f32'    those whose names match; --list names them
    python bench/peers_cpu.py --json cpu.jsonl --plots plots/

Everybody works on the same memory in one process and takes turns; bench/measure.py says how it is timed. Prefill and
backward have tensors [batch][row][head][dim], decode and verify a cache [batch][head][row][dim]. In decode each run takes
the next of so many sets of inputs that no cache holds them all.

    libattn   attn_run on a plan, as a C program calls it
    torch     scaled_dot_product_attention with enable_gqa; in decode also with the query heads of a group as rows of one
              head ("grouped"), which reads each key once; the backward is that of autograd
    ort       ONNX Runtime's GroupQueryAttention and MultiHeadAttention, those of them that have the case

Of variants the faster one counts; what the others do is in brackets. Counted are 4 dim operations for each pair of query
and key that the mask allows, 2.5 times that in the backward, and for decode the bytes of q, k, v and o. Shares are of what
`attn bench` measures right before and right after the case, the larger of the two: multiply-adds in f32, and reading. The
last lines say what was wanted and what was found.

Results are held together. Where two of them differ, ref says which one is off: exit status 1 means that it is libattn, or that
a peer does not compute the same at all. Gradients have no such judge. Speed does not change the exit status.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

try:
    import torch
except ImportError:
    sys.exit("peers_cpu.py: torch is missing; the tensors are torch's, so that nothing can be measured without it")
from measure import (
    ROOT,
    Options,
    Report,
    add_common_arguments,
    agree,
    difference,
    finish_arguments,
    geometric_mean,
    libattn,
    libattn_backward_run,
    libattn_run,
    measure,
)

try:
    import onnx_run
except ImportError as error:
    onnx_run, NO_ORT = None, str(error)

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
MOST_SETS_BYTES = 1 << 30
LONGEST_PEER = 8192  # rows of a case of "length", which is about libattn, that others take part in
# Gradients in 16 bits: torch rounds P and dS to them between its products, which adds to the rounding of the results.
GRADIENT_LIMIT = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    kind: str  # prefill, backward, decode, verify, length
    dtype: str
    rows: int
    keys: int
    dim: int = 128
    heads: int = 8
    heads_kv: int = 8
    batch: int = 1
    causal: bool = True

    @property
    def name(self):
        words = {
            "prefill": [f"d{self.dim}", f"s{self.rows}", "causal" if self.causal else "full"],
            "backward": [f"d{self.dim}", f"s{self.rows}", "causal" if self.causal else "full"],
            "decode": [f"k{self.keys}", f"b{self.batch}"],
            "verify": [f"q{self.rows}", f"k{self.keys}"],
            "length": [f"s{self.rows}"],
        }[self.kind]
        return "-".join([self.kind, *words, self.dtype])

    @property
    def flops(self):
        pairs = self.rows * self.keys - (self.rows * (self.rows - 1) // 2 if self.causal else 0)
        return 4 * self.dim * pairs * self.heads * self.batch * (2.5 if self.kind == "backward" else 1)

    @property
    def bytes(self):
        vectors = 2 * self.rows * self.heads + 2 * self.keys * self.heads_kv
        return vectors * self.dim * self.batch * DTYPES[self.dtype].itemsize

    def rate(self, ms):
        """GB/s of decode, GFLOP/s of the others."""
        return (self.bytes if self.kind == "decode" else self.flops) / ms * 1e-6


def all_cases():
    grouped = {"heads": 32, "heads_kv": 8}
    squares = [
        (kind, dtype, rows, rows, dim, causal)
        for kind in ("prefill", "backward")
        for dtype in DTYPES
        for dim in (64, 128)
        for causal in (True, False)
        for rows in (512, 1024, 2048, 4096)
    ]
    return [
        *(Case(kind, dtype, rows, keys, dim, causal=causal) for kind, dtype, rows, keys, dim, causal in squares),
        *(
            Case("decode", dtype, 1, keys, batch=batch, causal=False, **grouped)
            for dtype in DTYPES
            for batch in (1, 8)
            for keys in (4096, 8192, 16384, 32768)
        ),
        *(Case("verify", dtype, 16, 4096, **grouped) for dtype in DTYPES),
        *(Case("length", "f32", rows, rows, heads=2, heads_kv=2) for rows in (1024, 2048, 4096, 8192, 16384, 32768)),
    ]


def is_quick(case):
    """One or two sizes of each kind."""
    return case.batch == 1 and (case.keys == 4096 if case.kind in ("decode", "verify") else case.rows in (512, 1024))


# ---- who is measured ----


def cache_bytes():
    """Of the largest cache that Linux knows of; 64 MiB where it says nothing."""
    sizes = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG])", path.read_text().strip())
        if found:
            sizes.append(int(found[1]) << {"K": 10, "M": 20, "G": 30}[found[2]])
    return max(sizes, default=64 << 20)


def inputs(case, quick):
    """Sets of (q, k, v)."""
    count = 1
    if case.kind == "decode" and not quick:
        count = math.ceil(min(2 * cache_bytes(), MOST_SETS_BYTES) / case.bytes)
    dtype = DTYPES[case.dtype]
    q = (case.batch, case.rows, case.heads, case.dim)
    kv = (case.batch, case.keys, case.heads_kv, case.dim)
    if case.kind not in ("decode", "verify"):
        return [[torch.randn(shape).to(dtype) for shape in (q, kv, kv)] for _ in range(count)]
    cache = (case.batch, case.heads_kv, case.keys, case.dim)
    return [
        [torch.randn(q).to(dtype), *(torch.randn(cache, dtype=dtype).transpose(1, 2) for _ in range(2))]
        for _ in range(count)
    ]


def torch_run(q, k, v, causal):
    rows, keys = q.shape[1], k.shape[1]
    mask = None
    if causal and rows != keys:  # torch's own mask begins at the first key
        mask = torch.full((rows, keys), -math.inf).triu(keys - rows + 1).to(q.dtype)
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def run():
        with torch.no_grad():
            found = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=grouped
            )
        return found.transpose(1, 2)

    return run


def torch_grouped_run(q, k, v):
    """One row: the heads of a group are rows of one head."""
    batch, _, heads, dim = q.shape
    rows = q.view(batch, k.shape[2], -1, dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)

    def run():
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(rows, k, v).view(batch, 1, heads, dim)

    return run


def torch_backward_run(q, k, v, d_o, causal):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=causal)
    d_o = d_o.transpose(1, 2)

    def run():
        return torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    return run


def ort_runs(case, sets, threads):
    """Runs by name, and why there are no others."""
    found, refused = {}, {}
    for name, operator in onnx_run.OPERATORS.items():
        try:
            runs = [operator(*x, case.causal, threads) for x in sets]
            runs[0]()
            found[f"ort-{name}"] = runs
        except onnx_run.Refused as error:
            refused[f"ort-{name}"] = str(error)
    return found, refused


def make_runners(case, peers, arguments):
    """The sets of inputs, {name: one function for each of them}, libattn's kernel, and why who is missing."""
    sets = inputs(case, arguments.quick)
    options = Options(causal=case.causal)
    if case.kind == "backward":
        d_o = torch.randn(sets[0][0].shape).to(sets[0][0].dtype)
        ours = [libattn_backward_run(*x, d_o, options) for x in sets]
    else:
        ours = [libattn_run(*x, options) for x in sets]
    runners = {"libattn": [run for run, _ in ours]}
    if case.kind == "length" and case.rows > LONGEST_PEER:
        return sets, runners, ours[0][1], {}
    if "torch" in peers:
        if case.kind == "backward":
            runners["torch"] = [torch_backward_run(*x, d_o, case.causal) for x in sets]
        else:
            runners["torch"] = [torch_run(*x, case.causal) for x in sets]
        if case.kind == "decode":
            runners["torch-grouped"] = [torch_grouped_run(*x) for x in sets]
    refused = {}
    if "ort" in peers and case.kind != "backward":
        more, refused = ort_runs(case, sets, arguments.threads)
        runners |= more
    return sets, runners, ours[0][1], refused


# ---- one case ----


def is_peers_fault(case, name, theirs, sets):
    """Whether libattn is as exact as it should be, and the peer only somewhat less: a sum of 32,768 terms in float, say."""
    dtype = DTYPES[case.dtype]
    wanted = libattn_run(*sets[0], Options(causal=case.causal), backend="ref")[0]()
    ours = difference(libattn_run(*sets[0], Options(causal=case.causal))[0](), wanted)
    found = difference(theirs, wanted)
    print(f"{case.name}: {name} is off by {found} from ref, libattn by {ours} (relative RMS, worst row)")
    return agree(ours, dtype) and agree([x / 10 for x in found], dtype)


def compare(case, runners, sets):
    """Complains about results that are not libattn's; how many, and (RMS, worst row) of each."""
    dtype = DTYPES[case.dtype]
    ours = runners["libattn"][0]()
    errors, wrong = {}, 0
    for name in list(runners)[1:]:
        theirs = runners[name][0]()
        if case.kind == "backward":  # the first row of a causal d_q is zero but for rounding: rows say nothing
            errors[name] = max(difference(a, b)[0] for a, b in zip(ours, theirs)), 0.0
            fine = errors[name][0] <= GRADIENT_LIMIT[dtype]
        else:
            errors[name] = difference(ours, theirs)
            fine = agree(errors[name], dtype) or is_peers_fault(case, name, theirs, sets)
        if not fine:
            print(f"{case.name}: WRONG: libattn and {name} differ by {errors[name]} (relative RMS, worst row)")
        wrong += not fine
    return wrong, errors


def run_case(case, peers, arguments):
    sets, runners, kernel, refused = make_runners(case, peers, arguments)
    wrong, errors = compare(case, runners, sets)
    times = measure(runners, arguments)
    rates = {name: case.rate(ms) for name, ms in times.ms.items()}
    best = {}  # of each peer's variants
    for name in list(runners)[1:]:
        peer = name.split("-")[0]
        if peer not in best or rates[name] > rates[best[peer]]:
            best[peer] = name
    ratios = {peer: rates["libattn"] / rates[name] for peer, name in best.items()}
    if ratios:
        ratios["best"] = min(ratios.values())
    return {
        "case": case.name,
        **case._asdict(),
        "threads": arguments.threads,
        "kernel": kernel,
        "ms": times.ms,
        "rounds": times.rounds,
        "unit": "GB/s" if case.kind == "decode" else "GFLOP/s",
        "rate": rates,
        "variant": best,
        "refused": refused,
        "ratio": ratios,
        "error": errors,
        "wrong": wrong,
    }


# ---- the machine, and calls that do hardly anything ----


def attn_lines(*words):
    """What the command line prints with --json; none, and a word about it, where it is missing."""
    tool = next((str(x) for x in (ROOT / "build" / "attn",) if x.is_file()), shutil.which("attn"))
    if not tool:
        print("no build/attn and no attn in PATH: floors and overhead are not measured", file=sys.stderr)
        return []
    done = subprocess.run([tool, "bench", "--json", "--backend", "cpu", *words], capture_output=True, text=True)
    if done.returncode:
        print(f"{tool}: {done.stderr.strip()}", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def find_floors(threads):
    lines = attn_lines("--threads", str(threads), "--heads", "1", "--seqlen", "16", "--repeat", "1")
    return {name: lines[0][name] for name in ("peak_gflops", "read_gb_per_s")} if lines else {}


# ---- output ----


def print_line(r):
    best = r["variant"]
    columns = [r["rate"]["libattn"], 100 * r["share"]]
    columns += [r["rate"].get(best.get(peer), math.nan) for peer in ("torch", "ort")]
    columns += [r["ratio"].get(peer, math.nan) for peer in ("torch", "ort")]
    text = "{:9.1f}{:7.0f}%{:9.1f}{:9.1f}{:9.2f}{:9.2f}".format(*columns).replace("nan", "  -")
    others = [f"{name} {rate:.1f}" for name, rate in r["rate"].items() if name != "libattn" and name not in best.values()]
    variants = " ".join(name for name in best.values() if "-" in name) + (f" ({', '.join(others)})" if others else "")
    print(f"{r['case']:30}{r['ms']['libattn']:10.3f}{text}  {r['unit']:8} {r['kernel']} {variants}", flush=True)


def print_refused(results):
    """Cases that ONNX Runtime has no operator for, and what it says of them."""
    without = [r for r in results if r["refused"] and "ort" not in r["variant"]]
    for why in sorted({why for r in without for why in r["refused"].values()}):
        print(f"{sum(why in r['refused'].values() for r in without)} cases without ort: {why}")


def print_overhead(lines):
    for line in lines:
        print(
            f"{line['what']:52} {line['rows']} x {line['keys']}, {line['heads']} heads of {line['dim']}: {line['us']:.2f} us"
        )


def verdict(title, rows, value, want, form="{:.2f}"):
    """One line about the least of a value over some results."""
    found = {r["case"]: value(r) for r in rows}
    found = {name: number for name, number in found.items() if number is not None and not math.isnan(number)}
    if not found:
        print(f"{title}: not measured")
        return
    least = min(found, key=found.get)
    met = sum(number >= want for number in found.values())
    mean = geometric_mean(found.values())
    print(
        f"{title}: {'met' if met == len(found) else 'MISSED: met'} in {met} of {len(found)} cases, least "
        f"{form.format(found[least])} {least}, mean {form.format(mean)} (want {form.format(want)})"
    )


def print_verdicts(results, overhead):
    """What the cpu backend is held to: the floors, the better peer, 16 bits no slower than 32, cost by length, overhead."""

    def of(kind, **fields):
        return [r for r in results if r["kind"] == kind and all(r[name] == value for name, value in fields.items())]

    def ratio(peer):
        return lambda r: r["ratio"].get(peer)

    def share(r):
        return r["share"]

    def over_f32(r):
        """Speed against the same case in f32; runs of different moments, so good to some percent."""
        twin = [x for x in results if x["case"] == r["case"].replace(r["dtype"], "f32")]
        return twin[0]["ms"]["libattn"] / r["ms"]["libattn"] if twin else None

    def decode(r):
        """How far the lower of the two bars, 85 % of reading and 2.5 times the better peer, is reached."""
        return max(r["share"] / 0.85, r["ratio"].get("best", 0.0) / 2.5)

    def own_call(r):
        """Against torch as it is called, which reads a key once for each query head of its group."""
        return r["ms"]["torch"] / r["ms"]["libattn"] if "torch" in r["ms"] else None

    print()
    for dim, want in ((64, 0.75), (128, 0.8)):
        rows = [r for r in of("prefill", dim=dim, dtype="f32") if r["rows"] >= 2048]
        verdict(f"prefill d{dim} f32, share of peak", rows, share, want)
    for dtype in DTYPES:
        verdict(f"prefill {dtype} / better peer", of("prefill", dtype=dtype), ratio("best"), 1.2)
    verdict("backward f32, share of peak", [r for r in of("backward", dtype="f32") if r["rows"] >= 2048], share, 0.7)
    for dtype in DTYPES:
        verdict(f"backward {dtype} / torch", of("backward", dtype=dtype), ratio("torch"), 1.5)
    for kind in ("prefill", "backward", "decode"):
        for dtype in ("f16", "bf16"):
            verdict(f"{kind} {dtype} / f32", of(kind, dtype=dtype), over_f32, 1.5 if kind == "decode" else 1.0)
    for batch in (1, 8):
        verdict(f"decode f32 batch {batch}, of the lower bar", of("decode", dtype="f32", batch=batch), decode, 1.0)
    verdict("decode / torch with enable_gqa", of("decode"), own_call, 2.5)
    verdict("decode f16 / ONNX Runtime", of("decode", dtype="f16"), ratio("ort"), 1.2)
    verdict("verify, share of peak", of("verify"), share, 0.6)
    lengths = of("length")
    if lengths:
        cost = [r["ms"]["libattn"] / (r["rows"] * (r["rows"] + 1)) for r in lengths]
        spread = max(cost) / min(cost) - 1
        span = f"{lengths[0]['rows']} to {lengths[-1]['rows']} rows"
        print(f"cost of a pair, {span}: {'met' if spread <= 0.1 else 'MISSED'}, varies by {100 * spread:.1f}% (want 10%)")
    for line in overhead[:3:2]:  # the first of the process; 1 x 1 x 64
        want = 2000 if line["what"].startswith("first") else 2
        print(f"{line['what']}: {'met' if line['us'] < want else 'MISSED'}, {line['us']:.2f} us (want {want})")


# ---- main ----


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, 1.0)
    parser.add_argument("--threads", type=int, default=0, help="of everybody (default: every CPU)")
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases whose names it is found in")
    parser.add_argument("--fastest", action="store_true", help="the fastest run counts, not the median: on a busy machine")
    parser.add_argument("--peers", default="torch,ort", help="which of them (default torch,ort)")
    parser.add_argument("--plots", metavar="DIR", help="draw PNG files there; wants matplotlib")
    parser.add_argument("--list", action="store_true", help="names of the cases, and nothing else")
    arguments = parser.parse_args(argv)
    arguments.device, arguments.turn_ms = "cpu", 10 if arguments.quick else 60
    return finish_arguments(arguments)


def find_peers(arguments):
    peers = arguments.peers.split(",")
    if unknown := [name for name in peers if name and name not in ("torch", "ort")]:
        sys.exit(f"peers_cpu.py: --peers {unknown[0]}: want some of torch,ort")
    if "ort" in peers and onnx_run is None:
        print(f"no ONNX Runtime: {NO_ORT}; pip install onnxruntime onnx brings it", file=sys.stderr)
        peers.remove("ort")
    return peers


def main(argv=None):
    arguments = parse_arguments(argv)
    cases = [case for case in all_cases() if not arguments.quick or is_quick(case)]
    cases = [case for case in cases if re.search(arguments.cases, case.name)]
    if arguments.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    if not cases and not re.search(arguments.cases, "overhead"):
        sys.exit(f"peers_cpu.py: no case matches {arguments.cases!r}; --list names them")
    peers = find_peers(arguments)
    arguments.threads = arguments.threads or torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    libattn.set_num_threads(arguments.threads)
    libattn.set_float32_precision("single")  # as the peers compute it
    before = floors = find_floors(arguments.threads)
    version = {"onnxruntime": onnx_run.VERSION} if "ort" in peers else {}
    report = Report(arguments, **version, threads=arguments.threads, **floors)
    titles = ("libattn", "share", "torch", "ort", "/torch", "/ort")
    print("{:30}{:>10}{:>9}{:>8}{:>9}{:>9}{:>9}{:>9}".format("", "ms", *titles))
    results = []
    for case in cases:
        result = run_case(case, peers, arguments)
        after = find_floors(arguments.threads)
        floor = "read_gb_per_s" if case.kind == "decode" else "peak_gflops"
        result["floor"] = max(before.get(floor, math.nan), after.get(floor, math.nan))
        result["share"] = result["rate"]["libattn"] / result["floor"]
        before = after
        results.append(result)
        print_line(results[-1])
        report.write(results[-1])
    print_refused(results)
    overhead = []
    if re.search(arguments.cases, "overhead"):
        overhead = attn_lines("--suite", "overhead", "--threads", str(arguments.threads))
        print_overhead(overhead)
        for line in overhead:
            report.write(line)
    if not arguments.quick:
        print_verdicts(results, overhead)
    if arguments.plots:
        draw(results, floors, arguments)
    return 1 if any(r["wrong"] for r in results) else 0


def draw(results, floors, arguments):
    try:
        import plots_cpu
    except ImportError as error:
        print(f"no plots: {error}", file=sys.stderr)
        return
    for path in plots_cpu.draw(results, floors, pathlib.Path(arguments.plots)):
        print(f"drawn: {path}")


if __name__ == "__main__":
    sys.exit(main())
