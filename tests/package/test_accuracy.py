"""Every drop-in function, forward and gradients, against float64: at most twice (gradients three times) the naive error.

The axes below have many combinations; the tests take a set of them in which every pair of values of two axes occurs.
"""

import itertools
import os
import random

import libattn
import pytest
import torch
from reference import Setting, assert_close, attend, magnitudes

AXES = {
    "function": ["func", "kvpacked", "qkvpacked", "varlen", "varlen_kvpacked", "varlen_qkvpacked", "kvcache"],
    "dim": [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256],
    "lengths": [(1, 1), (113, 203), (128, 217), (239, 1), (3, 799), (127, 512), (512, 256), (1023, 1024), (1024, 1023)],
    "heads": [(2, 2), (4, 2), (4, 1)],
    "mask": ["full", "causal", "local", "causal local"],
    "softcap": [0.0, 50.0],
    "alibi": [False, True],
    "dropout": [0.0, 0.17],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
}


def makes_sense(case):
    """qkvpacked has one length and one kind of heads; a cache has no dropout."""
    return not (
        ("qkvpacked" in case["function"] and case["heads"] != (2, 2)) or (case["function"] == "kvcache" and case["dropout"])
    )


def every_pair(axes):
    """Few cases that contain every sensible pair of values of two axes; the same ones each time."""
    source = random.Random(1)
    names = list(axes)

    def pairs(case):
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    def draw():
        while True:
            case = {name: source.choice(values) for name, values in axes.items()}
            if makes_sense(case):
                return case

    missing = set()
    for a, b in itertools.combinations(names, 2):
        for x, y in itertools.product(axes[a], axes[b]):
            if makes_sense({"function": "func", "heads": (2, 2), "dropout": 0.0, a: x, b: y}):
                missing.add((a, x, b, y))
    cases = []
    while missing:
        best = max((draw() for _ in range(50)), key=lambda case: len(pairs(case) & missing))
        if not pairs(best) & missing:  # rare pairs are not found by chance
            a, x, b, y = min(missing, key=str)
            best = next(case for case in iter(draw, None) if (case[a], case[b]) == (x, y))
        missing -= pairs(best)
        cases.append(best)
    return cases


def every_case(axes):
    return [case for values in itertools.product(*axes.values()) if makes_sense(case := dict(zip(axes, values)))]


def chosen():
    """LIBATTN_CASES=all, or so many of them at random (LIBATTN_SEED), or by default every pair."""
    wanted = os.environ.get("LIBATTN_CASES")
    if not wanted:
        return every_pair(AXES)
    cases = every_case(AXES)
    return cases if wanted == "all" else random.Random(int(os.environ.get("LIBATTN_SEED", 1))).sample(cases, int(wanted))


CASES = chosen()


def name_of(case):
    return "-".join(str(value).replace("torch.", "").replace(" ", "") for value in case.values())


def sequences(case):
    """Lengths of the batch: one sequence, or for varlen three, an empty one among them."""
    rows, keys = case["lengths"]
    if "qkvpacked" in case["function"]:
        rows = keys
    if "varlen" not in case["function"]:
        return [(rows, keys)]
    return [(rows, keys), (0, 0), ((rows + 1) // 2, (keys + 1) // 2 if "qkv" not in case["function"] else (rows + 1) // 2)]


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def run(case, q, k, v, lengths, **options):
    """Calls the function under test with packed tensors (total, heads, dim); returns out, packed, and the dropout signs."""
    names = {"func": "flash_attn_func", "kvcache": "flash_attn_with_kvcache"}
    function = getattr(libattn, names.get(case["function"], f"flash_attn_{case['function']}_func"))
    cu_q, cu_k = offsets(n for n, _ in lengths), offsets(n for _, n in lengths)
    max_q, max_k = max(n for n, _ in lengths), max(n for _, n in lengths)
    name = case["function"]
    if name == "kvcache":
        return function(q[None], k[None], v[None], **options)[0], None
    options.update(dropout_p=case["dropout"], return_attn_probs=True)
    if name == "func":
        out, _, probs = function(q[None], k[None], v[None], **options)
    elif name == "kvpacked":
        out, _, probs = function(q[None], torch.stack([k, v], 1)[None], **options)
    elif name == "qkvpacked":
        out, _, probs = function(torch.stack([q, k, v], 1)[None], **options)
    elif name == "varlen":
        out, _, probs = function(q, k, v, cu_q, cu_k, max_q, max_k, **options)
    elif name == "varlen_kvpacked":
        out, _, probs = function(q, torch.stack([k, v], 1), cu_q, cu_k, max_q, max_k, **options)
    else:
        out, _, probs = function(torch.stack([q, k, v], 1), cu_q, max_q, **options)
    return (out if "varlen" in name else out[0]), probs


def naive_results(inputs, d_o, setting):
    """o, d_q, d_k, d_v of the naive computation, each a list of draws.

    In float32 the naive error is as small as ours, and that of a row a matter of luck. So there are four draws of it: the
    head dims in another order give the same sums, rounded otherwise.
    """
    q, k, v = inputs
    dim = q.shape[-1]
    results = []
    for n in range(4 if q.dtype == torch.float32 else 1):
        order = torch.randperm(dim) if n else torch.arange(dim)
        o, _, _ = attend(q[..., order], k[..., order], v, setting)
        results.append([x.detach() for x in (o, *torch.autograd.grad(o, inputs, d_o))])
    return list(zip(*results))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_accuracy(case):
    lengths, dtype, (heads, heads_kv) = sequences(case), case["dtype"], case["heads"]
    window = (37, 21) if "local" in case["mask"] else (-1, -1)
    alibi = torch.rand(heads) * 0.3 if case["alibi"] else None
    setting = Setting(causal="causal" in case["mask"], window=window, softcap=case["softcap"], alibi=alibi)
    total_q, total_k = (sum(column) for column in zip(*lengths))
    shapes = ((total_q, heads), (total_k, heads_kv), (total_k, heads_kv))
    q, k, v = inputs = [torch.randn(*shape, case["dim"]).to(dtype).requires_grad_() for shape in shapes]
    d_o = torch.randn(total_q, heads, case["dim"]).to(dtype)
    options = {"causal": setting.causal, "window_size": window, "softcap": setting.softcap, "alibi_slopes": alibi}
    out, signs = run(case, q, k, v, lengths, **options)
    found = (out, *torch.autograd.grad(out, inputs, d_o))

    first_q = first_k = 0
    for b, (rows, keys) in enumerate(lengths):
        at = (slice(first_q, first_q + rows), *(slice(first_k, first_k + keys),) * 2)
        first_q, first_k = first_q + rows, first_k + keys
        if rows == 0:
            continue
        if case["dropout"]:
            kept = ~torch.signbit(signs[b, :, :rows, :keys]) / (1 - case["dropout"])
            setting = setting._replace(kept=kept.double())
        exact = [x[part].detach().double().requires_grad_() for x, part in zip(inputs, at)]
        o_exact, p, _ = attend(*exact, setting)
        wanted = (o_exact, *torch.autograd.grad(o_exact, exact, d_o[at[0]].double()))
        draws = naive_results([x[part].detach().requires_grad_() for x, part in zip(inputs, at)], d_o[at[0]], setting)
        sizes = magnitudes(*(x.detach() for x in exact), d_o[at[0]].double(), p.detach(), setting)
        parts = (at[0], *at)
        for n, (name, factor) in enumerate((("o", 2), ("d_q", 3), ("d_k", 3), ("d_v", 3))):
            assert_close(name, found[n][parts[n]].detach(), draws[n], wanted[n].detach(), sizes[n], factor)


@pytest.mark.parametrize("dropout", [0.17])
def test_dropout_rate(dropout):
    q = torch.randn(2, 256, 4, 32)
    _, _, signs = libattn.flash_attn_func(q, q, q, dropout_p=dropout, return_attn_probs=True)
    rate = torch.signbit(signs).double().mean().item()
    assert abs(rate - dropout) < 5 * (dropout * (1 - dropout) / signs.numel()) ** 0.5
