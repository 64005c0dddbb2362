#!/usr/bin/env python3
"""Decode: one new token for each sequence against its KV cache, in GB/s of cache that is read; torch's cuDNN and FlashAttention-2 beside it.

    python bench/decode.py                         the cases of CASES, bf16, head dim 128
    python bench/decode.py --cases 8k paged        those whose names have one of the words
    python bench/decode.py --chain                 32 layers one after the other, each reading what the one before it has written
    python bench/decode.py --device cpu --quick    small caches on the host

How it is timed: bench/measure.py; libattn, the peers and a copy on the device take turns, in CUDA graphs. Each has several sets of
inputs, larger than the L2 cache twice over, and takes them in turn: what it reads it finds in memory. The copy adds 1, as a kernel does it: copy_ becomes a node for the copy engine in a
graph, which is slower (2.8 TB/s on an H200 where kernels move 4.3). One of x bytes counts 2 x. The last column is the share of the copy's
GB/s that libattn reached.

Latent attention (MLA: keys of 576 dims, whose first 512 are the values, one KV head) has nobody beside it, as torch does such dims in no fast way;
its bytes are counted once, and TFLOP/s are said too, of the query heads that there are.

Caches of 8 bits have libattn with the same numbers in 16 bits beside them, and how many times faster they are: that column is a ratio of times, GB/s
are of the bytes that each reads.

With --chain a layer appends a key, attends to its cache and so makes the queries of the next; all share a workspace, and two arrays are queries and results in turn.
That is timed with kernels that begin while the one before them ends, and without (ATTN_CUDA_SERIAL), in microseconds of a layer. The last layer's result must have the bits that it
has when nothing is begun before all else has ended.

Before a case is timed its result is held against that of torch in float32; exit status 1 means that one is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import sys
from typing import NamedTuple

import torch
from measure import Options, Report, _core, _lib, _torch, add_arguments, agree, difference, finish_arguments, libattn_run, measure
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

COLD_BYTES = 256 << 20  # of all sets of inputs together, at least
COPY_BYTES = 1 << 30
LATENT = 512  # dims of v in those of k
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
KINDS = {  # of 8 bits: dtype, and what numbers are divided by
    "e4m3": (torch.float8_e4m3fn, 1 / 16),
    "e5m2": (torch.float8_e5m2, 1 / 16),
    "i8": (torch.int8, 1 / 32),
}


class Case(NamedTuple):
    name: str
    lengths: list
    heads: int = 32
    heads_kv: int = 8
    dim: int = 128
    page: int = 0  # 0: contiguous
    used: bool = False  # lengths on the device, although they are all alike
    kv: str = ""  # of KINDS: k and v of 8 bits
    factors: bool = False  # of pages, each its own
    latent: bool = False  # one KV head, whose first LATENT columns are v


def mla(name, lengths, heads, **more):
    return Case(f"mla {heads}, {name}", lengths, heads, 1, 576, latent=True, **more)


CASES = [
    Case("1x8k", [8192]),
    Case("1x131k", [131072]),
    Case("16x8k", [8192] * 16),
    Case("64x4k", [4096] * 64),
    Case("4x32k, 64 heads", [32768] * 4, heads=64),
    Case("1x12k", [12288]),
    Case("1x16k", [16384]),
    Case("4x16k", [16384] * 4),
    Case("1x16k, one KV head", [16384], heads=4, heads_kv=1),
    Case("1x131k, one KV head", [131072], heads=4, heads_kv=1),
    Case("16x8k, used", [8192] * 16, used=True),
    Case("skewed: 131k and 63 of 512", [131072] + [512] * 63),
    Case("16x8k, pages of 16", [8192] * 16, page=16),
    Case("64x4k, pages of 16", [4096] * 64, page=16),
    Case("16x8k, pages of 1", [8192] * 16, page=1),
    Case("16x8k, pages of 64", [8192] * 16, page=64),
    Case("16x8k, pages of 128", [8192] * 16, page=128),
    Case("16x8k, pages of 256", [8192] * 16, page=256),
    Case("skewed, pages of 16", [131072] + [512] * 63, page=16),
    Case("16x8k, d64", [8192] * 16, dim=64),
    Case("16x8k, d96", [8192] * 16, dim=96),
    Case("16x8k, d192", [8192] * 16, dim=192),
    Case("16x8k, d256", [8192] * 16, dim=256),
    Case("1x8k, e4m3", [8192], kv="e4m3"),
    Case("1x131k, e4m3", [131072], kv="e4m3"),
    Case("16x8k, e4m3", [8192] * 16, kv="e4m3"),
    Case("64x4k, e4m3", [4096] * 64, kv="e4m3"),
    Case("4x32k, 64 heads, e4m3", [32768] * 4, heads=64, kv="e4m3"),
    Case("skewed: 131k and 63 of 512, e4m3", [131072] + [512] * 63, kv="e4m3"),
    Case("16x8k, pages of 16, e4m3", [8192] * 16, page=16, kv="e4m3"),
    Case("16x8k, pages of 1, e4m3", [8192] * 16, page=1, kv="e4m3"),
    Case("16x8k, factors of 16 e4m3", [8192] * 16, page=16, kv="e4m3", factors=True),
    Case("64x4k, factors of 64 e4m3", [4096] * 64, page=64, kv="e4m3", factors=True),
    Case("64x4k, factors of 16 i8", [4096] * 64, page=16, kv="i8", factors=True),
    Case("16x8k, d64, factors of 16 e4m3", [8192] * 16, dim=64, page=16, kv="e4m3", factors=True),
    Case("16x8k, d256, factors of 16 e4m3", [8192] * 16, dim=256, page=16, kv="e4m3", factors=True),
    Case("16x8k, d64, e4m3", [8192] * 16, dim=64, kv="e4m3"),
    Case("16x8k, d96, e4m3", [8192] * 16, dim=96, kv="e4m3"),
    Case("16x8k, d256, e4m3", [8192] * 16, dim=256, kv="e4m3"),
    Case("16x8k, e5m2", [8192] * 16, kv="e5m2"),
    Case("16x8k, i8", [8192] * 16, kv="i8"),
    Case("64x4k, i8", [4096] * 64, kv="i8"),
    mla("64x4k", [4096] * 64, 16),
    mla("1x131k", [131072], 16),
    mla("16x8k", [8192] * 16, 16),
    mla("1x8k", [8192], 16),
    mla("64x4k", [4096] * 64, 64),
    mla("16x8k", [8192] * 16, 64),
    mla("64x4k", [4096] * 64, 128),
    mla("1x131k", [131072], 128),
    mla("16x8k", [8192] * 16, 128),
    mla("1x8k", [8192], 128),
    mla("64x4k, pages of 64", [4096] * 64, 16, page=64),
    mla("64x4k, pages of 64", [4096] * 64, 128, page=64),
    mla("64x4k, pages of 1", [4096] * 64, 16, page=1),
]


def quick(case):
    return case._replace(lengths=[max(3, n // 128) for n in case.lengths[:3]], heads=4, heads_kv=1 if case.latent else 2)


def even(case):
    return len(set(case.lengths)) == 1


def flops(case):
    return 2 * sum(case.lengths) * case.heads * (case.dim + (LATENT if case.latent else case.dim))


def cache_bytes(case, dtype):
    if case.latent:
        return sum(case.lengths) * case.dim * dtype.itemsize
    return 2 * sum(case.lengths) * case.heads_kv * case.dim * (1 if case.kv else dtype.itemsize)


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor  # [batch][most][heads][dim]; of different lengths [total][heads][dim]; paged [pages][page][heads][dim]
    v: torch.Tensor
    options: Options
    dense: tuple  # k and v for the peers, or ()


def make(case, dtype, device):
    inputs = make_any(case, dtype, device)
    return inputs._replace(v=inputs.k[..., :LATENT], dense=()) if case.latent else inputs


def make_any(case, dtype, device):
    batch, most = len(case.lengths), max(case.lengths)
    q = torch.randn(batch, 1, case.heads, case.dim, dtype=dtype, device=device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    if not even(case) and not case.page:
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        k, v = (torch.randn(sum(case.lengths), case.heads_kv, case.dim, dtype=dtype, device=device) for _ in range(2))
        return Inputs(q, k, v, Options(cu_kv=starts, max_kv=most), ())
    if not case.page:
        k, v = (torch.randn(batch, most, case.heads_kv, case.dim, dtype=dtype, device=device) for _ in range(2))
        return Inputs(q, k, v, Options(used_kv=lengths) if case.used else Options(), (k, v))
    each = -(-most // case.page)
    place = torch.randperm(batch * each, device=device)
    k, v = (torch.randn(batch * each, case.page, case.heads_kv, case.dim, dtype=dtype, device=device) for _ in range(2))
    options = Options(page_table=place.view(batch, each).to(torch.int32), used_kv=lengths, max_kv=most)
    return Inputs(q, k, v, options, ())


def narrow(inputs, case):
    """The same inputs with k and v of 8 bits."""
    dtype, factor = KINDS[case.kv]

    def convert(x, factors):
        x = x.float() / (factors[:, None, :, None] if case.factors else factor)
        return (x.round().clamp(-127, 127) if case.kv == "i8" else x).to(dtype)

    shape = (inputs.k.shape[0], case.heads_kv) if case.factors else (case.heads_kv,)
    factors = [torch.full(shape, factor, device=inputs.q.device) for _ in range(2)]
    if case.factors:
        factors = [x * (0.5 + torch.rand_like(x)) for x in factors]
    options = inputs.options._replace(k_descale=factors[0], v_descale=factors[1], descale_pages=case.factors)
    return Inputs(inputs.q, convert(inputs.k, factors[0]), convert(inputs.v, factors[1]), options, ())


def multiplied(inputs, case):
    """k and v as the numbers that they stand for."""
    factors = inputs.options.k_descale, inputs.options.v_descale
    return [x.float() * (y[:, None, :, None] if case.factors else KINDS[case.kv][1]) for x, y in zip(inputs[1:3], factors)]


def widen(inputs, case, dtype):
    """And those numbers in 16 bits again; rounded once more, if there are more than 8 bits of mantissa in all."""
    k, v = (x.to(dtype) for x in multiplied(inputs, case))
    return Inputs(inputs.q, k, v, inputs.options._replace(k_descale=None, v_descale=None, descale_pages=False), ())


def keys_of(inputs, case, b, x):
    """Keys or values of sequence b: [heads][length][dim]."""
    length = case.lengths[b]
    if not even(case) and not case.page:
        return x[sum(case.lengths[:b]) :][:length].transpose(0, 1)
    if not case.page:
        return x[b, :length].transpose(0, 1)
    return x[inputs.options.page_table[b].long()].flatten(0, 1)[:length].transpose(0, 1)


def expected(inputs, case):
    """By torch in float32, a sequence at a time."""
    rows = []
    wide = multiplied(inputs, case) if case.kv else inputs[1:3]
    for b in range(len(case.lengths)):
        if case.latent:  # heads are rows
            k, v = (keys_of(inputs, case, b, x)[0].float() for x in wide)
            rows.append((torch.softmax(inputs.q[b, 0].float() @ k.T / math.sqrt(case.dim), -1) @ v)[None])
            continue
        k, v = (keys_of(inputs, case, b, x).float().repeat_interleave(case.heads // case.heads_kv, 0) for x in wide)
        q = inputs.q[b].transpose(0, 1).float()
        weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(case.dim), -1)
        rows.append((weights @ v).transpose(0, 1))
    return torch.stack(rows)


def peer_run(inputs, backend):
    q = inputs.q.transpose(1, 2)
    k, v = (x.transpose(1, 2) for x in inputs.dense)

    def run():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def peers_of(sets):
    """{name: runs} of those that take the case."""
    found = {}
    for name, backend in PEERS.items() if sets[0].dense and sets[0].q.is_cuda else ():
        runs = [peer_run(inputs, backend) for inputs in sets]
        try:
            runs[0]()
            found[name] = runs
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return found


def copy_run(arguments):
    size = COPY_BYTES if arguments.device == "cuda" and not arguments.quick else 1 << 20
    x, y = (torch.zeros(size // 4, device=arguments.device) for _ in range(2))
    return lambda: torch.add(x, 1, out=y), 2 * size


def bench(case, dtype, arguments, report, copy):
    count = 1 if arguments.quick else max(2, math.ceil(COLD_BYTES / cache_bytes(case, dtype)))
    sets = [make(case, dtype, arguments.device) for _ in range(count)]
    if case.kv:
        sets = [narrow(inputs, case) for inputs in sets]
    made = [libattn_run(inputs.q, inputs.k, inputs.v, inputs.options) for inputs in sets]
    errors = difference(made[0][0](), expected(sets[0], case))
    is_right = agree(errors, dtype)
    wide = [libattn_run(*inputs[:4]) for inputs in (widen(x, case, dtype) for x in sets)] if case.kv else []
    others = {"16 bits": [run for run, _ in wide]} if case.kv else peers_of(sets)
    runners = {"libattn": [run for run, _ in made], **others, "copy": [copy[0]]}
    times = measure(runners, arguments)
    moved = {name: copy[1] if name == "copy" else cache_bytes(case, dtype) for name in runners}
    if case.kv:
        moved["16 bits"] *= dtype.itemsize
    speed = {name: moved[name] / times.ms[name] / 1e6 for name in runners}  # GB/s
    share = 100 * speed["libattn"] / speed["copy"]
    tflops = flops(case) / times.ms["libattn"] / 1e9
    peers = "  ".join(f"{name} {1e3 * times.ms[name]:8.1f} us {speed[name]:6.0f} ({times.ms[name] / times.ms['libattn']:.2f}x)"
                      for name in others)
    print(f"{case.name:32} {cache_bytes(case, dtype) / 1e6:7.1f} MB  {1e3 * times.ms['libattn']:8.1f} us {speed['libattn']:6.0f} GB/s "
          f"{share:5.1f} % of copy {speed['copy']:.0f}  {f'{tflops:6.1f} TFLOP/s  ' if case.latent else ''}{peers}  {made[0][1]} {times.how}"
          f"{'' if is_right else f'  WRONG: {errors}'}", flush=True)
    report.write({"case": case.name, "kernel": made[0][1], "bytes": cache_bytes(case, dtype), "sets": count, "how": times.how,
                  "rounds": times.rounds, "us": {name: 1e3 * ms for name, ms in times.ms.items()}, "gb_s": speed,
                  "percent_of_copy": share, "tflop_s": tflops, "errors": errors, "right": is_right})
    return is_right


# ---- layers ----

LAYERS = 32
CHAINS = [Case("1x8k", [8192]), Case("1x1k", [1024]), Case("8x2k", [2048] * 8), Case("16x8k", [8192] * 16)]
# Lengths on the device; an append; a rotation; numbers of rows there, too, which makes append and rotation kernels of their own.
STEPS = {"decode": (False, False, False, False), "used": (True, False, False, False),
         "append, decode": (True, True, False, True), "append in decode": (True, True, False, False),
         "append, rotate, decode": (True, True, True, True), "all in decode": (True, True, True, False)}


class Chain:
    """So many layers with one plan and one workspace. Scores are large, so that a result shows which queries it comes from."""

    def __init__(self, case, dtype, device, step, context):
        has_lengths, appends, rotates, apart = STEPS[step]
        batch, most = len(case.lengths), case.lengths[0]
        self.first = torch.randn(batch, 1, case.heads, case.dim, dtype=dtype, device=device) / 64
        self.x = [torch.empty_like(self.first) for _ in range(2)]
        self.lse = torch.empty(batch, case.heads, 1, device=device)
        lengths = torch.full((batch,), most - appends, dtype=torch.int32, device=device)
        rows = torch.ones(batch, dtype=torch.int32, device=device)
        options = Options(scale=8.0, used_q=rows if apart else None, used_kv=lengths if has_lengths else None)
        angles = torch.rand(most, case.dim // 2, device=device)
        tables = {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)} if rotates else {}
        self.calls = []
        for layer in range(LAYERS):
            k, v = (torch.randn(batch, most, case.heads_kv, case.dim, dtype=dtype, device=device) for _ in range(2))
            q, o = self.x[layer % 2], self.x[1 - layer % 2]
            call = _core.Call(_torch, _lib.FORWARD, q, k, v, options)
            if appends:
                call.append(_core.Append(q[:, :, : case.heads_kv], q[:, :, -case.heads_kv :], **tables))
            call.buffers.o, call.buffers.lse = _core.tensor(call.keep(o)), call.keep(self.lse).address
            self.calls.append(call)
        self.plan = _lib.Plan(context, self.calls[0].problem)
        self.space = torch.empty(self.plan.workspace + 64, dtype=torch.uint8, device=device)
        for call in self.calls:
            call.buffers.workspace = self.space.data_ptr() + -self.space.data_ptr() % 64
            call.buffers.workspace_size = self.plan.workspace

    def run(self, between=lambda: None):
        self.x[0].copy_(self.first)
        for call in self.calls:
            between()
            stream = torch.cuda.current_stream().cuda_stream if self.first.is_cuda else None
            _lib.check(_lib.library.attn_run(self.plan.handle, ctypes.byref(call.buffers), stream))
        between()
        return self.x[LAYERS % 2]


def contexts(device):
    """Of libattn: kernels that begin early, and none."""
    if device == "cpu":
        return {"early": _lib.host_context()}
    os.environ.pop("ATTN_CUDA_SERIAL", None)
    early = _lib.context_of("cuda", 1)
    os.environ["ATTN_CUDA_SERIAL"] = "1"
    serial = _lib.context_of("cuda", 2)  # a number of threads that means nothing there, so that it is another one
    del os.environ["ATTN_CUDA_SERIAL"]
    return {"early": early, "serial": serial}


def bench_chain(case, dtype, arguments, report):
    wait = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    wrong = []
    for step in STEPS:
        torch.manual_seed(1)
        chains = {name: Chain(case, dtype, arguments.device, step, context) for name, context in contexts(arguments.device).items()}
        times = measure({name: [chain.run] for name, chain in chains.items()}, arguments)
        for name, chain in chains.items():
            wanted = chain.run(wait).clone()
            for _ in range(20):  # as fast as it goes
                found = chain.run()
            if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)) or not wanted.float().norm() > 0:
                wrong.append(name)
        us = {name: 1e3 * ms / LAYERS for name, ms in times.ms.items()}
        print(f"{case.name:8} {step:22} " + "  ".join(f"{name} {x:8.2f} us" for name, x in us.items()) +
              f"  a layer of {LAYERS}  {chain.plan.kernel} {times.how}{f'  WRONG: {wrong}' if wrong else ''}", flush=True)
        report.write({"chain": case.name, "step": step, "us": us, "layers": LAYERS, "how": times.how, "wrong": wrong})
        del chains
    return not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", metavar="WORD", help="only those whose names have one of the words")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16"])
    parser.add_argument("--chain", action="store_true", help="layers, one after the other")
    add_arguments(parser, seconds=1.0)
    arguments = finish_arguments(parser.parse_args())
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[arguments.dtype]
    torch.manual_seed(1)
    report = Report(arguments, dtype=arguments.dtype)
    copy, wrong = copy_run(arguments), 0
    for case in CHAINS if arguments.chain else CASES:
        if arguments.cases and not any(word in case.name for word in arguments.cases):
            continue
        case = quick(case) if arguments.quick else case
        wrong += not (bench_chain(case, dtype, arguments, report) if arguments.chain else bench(case, dtype, arguments, report, copy))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
