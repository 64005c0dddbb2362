#!/usr/bin/env python3
"""A prefix that many sequences share: one step of decode with its keys read for each sequence, and in ways that read them for many at once.

    python bench/prefix.py                           64 sequences, 32768 shared keys and 256 of their own, bf16
    python bench/prefix.py --sequences 16            fewer; a multiple of 16
    python bench/prefix.py --device cpu --quick      small, on the host

    alone, same pages    one call: a page table for each sequence, which begins with the same pages
    alone, copies        one call: the shared keys in front of each sequence's own
    groups of 16         the queries of 16 sequences are the rows of one
    one group            of all sequences: more rows than decode's kernel takes, so the forward kernel has them, and does not split keys
    chunks               the shared keys are sequences of --chunk keys, packed; each has all queries for its rows
    chunks, heads        and so are the query heads of a KV head: q is [head][sequence][dim] (examples/prefix.c)

All but the first two are three calls: the shared keys, those of their own, and attn_merge of the parts, which are float32. "of it" are single calls.

How it is timed: bench/measure.py, in CUDA graphs; as in bench/decode.py each way has several sets of inputs, together larger than the L2 cache twice over, and takes
them in turn. Before that each result is held against float64 and against the first way's; exit status 1 means that one is wrong. The table comes last.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
from typing import NamedTuple

import torch
from decode import COLD_BYTES
from measure import Options, Report, _core, _lib, _torch, add_arguments, agree, difference, finish_arguments, measure, plan_run

DTYPE = torch.bfloat16
GROUP = 16  # rows of a group
BAR = 8  # how many times faster the best way shall be


class Sizes(NamedTuple):
    sequences: int
    shared: int  # keys
    own: int
    chunk: int
    page: int
    heads: int = 32
    heads_kv: int = 8
    dim: int = 128


def cache_bytes(s):
    return 2 * (s.shared + s.sequences * s.own) * s.heads_kv * s.dim * DTYPE.itemsize


class Inputs(NamedTuple):
    q: torch.Tensor  # [sequence][head][dim]
    k: torch.Tensor  # [row][head][dim]: the shared ones, then those of each sequence
    v: torch.Tensor


def make(s, device):
    rows = s.shared + s.sequences * s.own
    q = torch.randn(s.sequences, s.heads, s.dim, dtype=DTYPE, device=device)
    return Inputs(q, *(torch.randn(rows, s.heads_kv, s.dim, dtype=DTYPE, device=device) for _ in range(2)))


def shared_keys(s, inputs):
    return inputs.k[: s.shared], inputs.v[: s.shared]


def own_keys(s, inputs):
    return (x[s.shared :].view(s.sequences, s.own, s.heads_kv, s.dim) for x in inputs[1:])


def expected(s, inputs):
    """In float64, a KV head at a time: [sequence][head][dim]."""
    group, heads = s.heads // s.heads_kv, []
    for h in range(s.heads_kv):
        q = inputs.q[:, h * group : (h + 1) * group].double() / math.sqrt(s.dim)
        k, v = (x[:, h].double() for x in shared_keys(s, inputs))
        own_k, own_v = (x[:, :, h].double() for x in own_keys(s, inputs))
        p = torch.softmax(torch.cat([q @ k.T, q @ own_k.transpose(1, 2)], -1), -1)
        heads.append(p[..., : s.shared] @ v + p[..., s.shared :] @ own_v)
    return torch.cat(heads, 1)


def table(numbers, device):
    return torch.as_tensor(numbers, dtype=torch.int32).to(device)


# ---- calls: a function that runs one and returns its result, and the kernel's name ----


def call_run(q, k, v, options, o, lse):
    call = _core.Call(_torch, _lib.FORWARD, q, k, v, options)
    call.problem.out_dtype = _torch.CODES[o.dtype]
    call.buffers.o, call.buffers.lse = _core.tensor(call.keep(o)), call.keep(lse).address
    return plan_run(call, q, o, None)


def merge_run(parts):
    """Of (o, lse), each [sequence][head][dim] and [head][sequence]."""
    rows, heads, dim = parts[0][0].shape
    device = parts[0][0].device
    result = torch.empty(rows, heads, dim, dtype=DTYPE, device=device)
    views = [[_torch.view(x) for x in part] for part in parts]
    tensors = (_lib.Tensor * len(parts))(*(_core.tensor(o) for o, _ in views))
    addresses = (ctypes.c_void_p * len(parts))(*(lse.address for _, lse in views))
    args = _lib.MergeArgs(
        dtype=_lib.F32, out_dtype=_torch.CODES[DTYPE], parts=len(parts), batch=1, rows=rows, heads=heads, dim=dim,
        o_parts=tensors, lse_parts=addresses, o=_core.tensor(_torch.view(result)),
    )
    assert all(lse.shape == (heads, rows) and lse.is_contiguous() for _, lse in parts)

    def run(kept=(parts, tensors, addresses)):
        place = _torch.place(result)
        _lib.check(_lib.library.attn_merge(place.context, ctypes.byref(args), place.stream))
        return result

    return run


def parts_of(*shape, device):
    return torch.empty(*shape, dtype=torch.float32, device=device)


# ---- ways: (run, kernels) ----


def alone_pages(s, inputs):
    device, each = inputs.q.device, s.own // s.page
    first = torch.arange(s.shared // s.page).expand(s.sequences, -1)
    rest = s.shared // s.page + torch.arange(s.sequences * each).view(s.sequences, each)
    pages = (x.view(-1, s.page, s.heads_kv, s.dim) for x in inputs[1:])
    options = Options(page_table=table(torch.cat([first, rest], 1), device),
                      used_kv=table([s.shared + s.own] * s.sequences, device))
    return alone(s, inputs, *pages, options)


def alone_copies(s, inputs):
    k, v = (torch.cat([x.expand(s.sequences, -1, -1, -1), own], 1)
            for x, own in zip(shared_keys(s, inputs), own_keys(s, inputs)))
    return alone(s, inputs, k, v, Options())


def alone(s, inputs, k, v, options):
    o = torch.empty_like(inputs.q)
    run, kernel = call_run(inputs.q[:, None], k, v, options, o[:, None], parts_of(s.sequences, s.heads, 1, device=o.device))
    return (lambda: run()[:, 0]), [kernel]


def own_run(s, inputs):
    """Each sequence's own keys; and their part."""
    device = inputs.q.device
    o, lse = parts_of(*inputs.q.shape, device=device), parts_of(s.heads, s.sequences, device=device)
    options = Options(cu_q=table(range(s.sequences + 1), device), max_q=1)
    return (*call_run(inputs.q, *own_keys(s, inputs), options, o, lse), (o, lse))


def joined(s, inputs, shared, parts):
    """The shared keys' call and its parts, with those of the sequences' own."""
    run, kernel = shared
    run_own, kernel_own, part = own_run(s, inputs)
    merge = merge_run([*parts, part])

    def run_all():
        run()
        run_own()
        return merge()

    return run_all, [kernel, kernel_own]


def groups(s, inputs, size):
    device, count = inputs.q.device, s.sequences // size
    k, v = (x[None] for x in shared_keys(s, inputs))
    options = Options(cu_q=table(range(0, s.sequences + 1, size), device), max_q=size, batch_index=table([0] * count, device))
    o, lse = parts_of(*inputs.q.shape, device=device), parts_of(s.heads, s.sequences, device=device)
    return joined(s, inputs, call_run(inputs.q, k, v, options, o, lse), [(o, lse)])


def chunks(s, inputs, heads_are_rows):
    """q is as a rotation could have written it, and is read with a stride of 0 for each chunk."""
    device, count = inputs.q.device, -(-s.shared // s.chunk)
    heads = s.heads_kv if heads_are_rows else s.heads
    by_head = inputs.q.transpose(0, 1).contiguous()
    q = by_head.view(heads, -1, s.dim).transpose(0, 1).expand(count, -1, -1, -1)
    options = Options(cu_kv=table([min(n * s.chunk, s.shared) for n in range(count + 1)], device), max_kv=s.chunk)
    o, lse = parts_of(count, s.heads, s.sequences, s.dim, device=device), parts_of(count, s.heads, s.sequences, device=device)
    whole = o.view(count, heads, -1, s.dim).transpose(1, 2)
    shared = call_run(q, *shared_keys(s, inputs), options, whole, lse)
    return joined(s, inputs._replace(q=by_head.transpose(0, 1)), shared, [(o[n].transpose(0, 1), lse[n]) for n in range(count)])


WAYS = {
    "alone, same pages": alone_pages,
    "alone, copies": alone_copies,
    f"groups of {GROUP}": lambda s, inputs: groups(s, inputs, GROUP),
    "one group": lambda s, inputs: groups(s, inputs, s.sequences),
    "chunks": lambda s, inputs: chunks(s, inputs, False),
    "chunks, heads": lambda s, inputs: chunks(s, inputs, True),
}


def single_calls(s, inputs):
    """Single calls of the ways, to see what they take."""
    device = inputs.q.device
    found = {"own keys": own_run(s, inputs)[0]}
    for count in (2, -(-s.shared // s.chunk) + 1):
        found[f"merge of {count}"] = merge_run(
            [(parts_of(*inputs.q.shape, device=device).zero_(), parts_of(s.heads, s.sequences, device=device).zero_())
             for _ in range(count)])
    return found


def check(s, inputs, made):
    """{way: (errors, is it right?)} against float64 and the first way."""
    wanted, first, found = expected(s, inputs), None, {}
    for name, (run, _) in made.items():
        o = run().clone()
        first = o if first is None else first
        errors = difference(o, wanted)
        found[name] = errors, agree(errors, DTYPE) and agree(difference(o, first), DTYPE)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--shared", type=int, default=32768, help="keys of the prefix (default 32768)")
    parser.add_argument("--own", type=int, default=256, help="keys of a sequence besides (default 256)")
    parser.add_argument("--chunk", type=int, default=4096, help="keys of the prefix that are worked by themselves (default 4096)")
    parser.add_argument("--page", type=int, default=16)
    add_arguments(parser, seconds=2.0)
    arguments = finish_arguments(parser.parse_args())
    s = Sizes(*(getattr(arguments, name) for name in Sizes._fields[:5]))
    if arguments.quick:
        s = s._replace(sequences=min(s.sequences, 32), shared=s.shared // 64, own=48, chunk=s.chunk // 32, heads=4, heads_kv=2)
    if s.sequences % GROUP or s.shared % s.page or s.own % s.page:
        sys.exit(f"prefix.py: want sequences in multiples of {GROUP}, keys in multiples of a page")
    torch.manual_seed(1)
    report = Report(arguments, dtype="bf16", **s._asdict())
    sets = [make(s, arguments.device) for _ in range(1 if arguments.quick else max(2, math.ceil(COLD_BYTES / cache_bytes(s))))]
    made = {name: [way(s, x) for x in (sets[:1] if way is alone_copies else sets)] for name, way in WAYS.items()}
    checked = check(s, sets[0], {name: ways[0] for name, ways in made.items()})
    singles = [single_calls(s, x) for x in sets]
    runners = {name: [run for run, _ in ways] for name, ways in made.items()}
    runners |= {f"of it: {name}": [x[name] for x in singles] for name in singles[0]}
    times = measure(runners, arguments)
    first = times.ms["alone, same pages"]
    for name in runners:
        ms, (errors, is_right) = times.ms[name], checked.get(name, (None, True))
        kernels = made[name][0][1] if name in made else []
        note = "" if errors is None else f"rms {errors[0]:.1e} worst row {errors[1]:.1e}  {', '.join(kernels)}"
        print(f"{name:24} {1e3 * ms:9.1f} us {first / ms:7.2f}x  {note}{'' if is_right else '  WRONG'}")
        report.write({"way": name, "us": 1e3 * ms, "times_faster": first / ms, "errors": errors, "right": is_right,
                      "kernels": kernels, "how": times.how, "rounds": times.rounds})
    best = min((name for name in made if not name.startswith("alone")), key=times.ms.get)
    print(f"{times.how}, {len(sets)} sets of {cache_bytes(s) / 1e6:.0f} MB; {best} is {first / times.ms[best]:.1f} times as fast as "
          f"alone, want {BAR}{'' if first / times.ms[best] >= BAR else ': NOT REACHED'}")
    sys.exit(not all(is_right for _, is_right in checked.values()))


if __name__ == "__main__":
    main()
