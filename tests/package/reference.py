"""Attention as the formula says, in torch, and how far from it a result may be.

`attend` works on one sequence and stores every matrix; in float64 it is the truth (`exact`), in the dtype under test it is
the naive computation (`naive`) whose error sets the measure.
"""

import math
from typing import Callable, Iterable, List, NamedTuple, Optional

import torch


class Setting(NamedTuple):
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    alibi: Optional[torch.Tensor] = None  # (heads,)
    kept: Optional[torch.Tensor] = None  # (heads, rows, keys): 0 where dropped, else 1 / (1 - dropout)
    bias: Optional[torch.Tensor] = None  # broadcasts to (heads, rows, keys)
    sink: Optional[torch.Tensor] = None  # (heads,)
    masked: Optional[torch.Tensor] = None  # (heads or 1, rows, keys) bool: besides all that


def allowed(rows, keys, causal, window, offset=None):
    """(rows, keys) bool. offset: the key that row 0 is level with; by default the last row is with the last key."""
    i, j = torch.arange(rows)[:, None] + (keys - rows if offset is None else offset), torch.arange(keys)
    mask = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        mask &= j <= i
    if window[0] >= 0:
        mask &= j >= i - window[0]
    if window[1] >= 0:
        mask &= j <= i + window[1]
    return mask


def attend(q, k, v, setting: Setting, scale=None, offset=None, with_lse=True):
    """q (rows, heads, dim), k and v (keys, heads_kv, dim). Returns o (rows, heads, dim), p (heads, rows, keys), lse.

    offset: see `allowed`. Without lse, which costs another exponential of everything, that is None.
    """
    rows, heads, dim = q.shape
    keys = k.shape[0]
    offset = keys - rows if offset is None else offset
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q * (1 / math.sqrt(dim) if scale is None else scale), k)
    if setting.softcap:
        s = setting.softcap * torch.tanh(s / setting.softcap)
    if setting.alibi is not None:
        distance = (torch.arange(rows)[:, None] + offset - torch.arange(keys)).abs()
        # The slopes are float32. In float64 their products must be exact: a truth that rounds them as the naive computation
        # does would count only our own rounding.
        slope = setting.alibi.to(torch.promote_types(s.dtype, torch.float32))
        s = s - (slope[:, None, None] * distance).to(s.dtype)
    if setting.bias is not None:
        s = s + setting.bias
    mask = allowed(rows, keys, setting.causal, setting.window, offset)
    if setting.masked is not None:
        mask = mask & ~setting.masked
    if not mask.all():
        s = s.masked_fill(~mask, -torch.inf)
    empty = ~mask.any(-1).expand(heads, rows)
    logits = (
        s if setting.sink is None else torch.cat([s, setting.sink.to(s.dtype)[:, None, None].expand(heads, rows, 1)], -1)
    )
    p = torch.softmax(logits, -1)[..., :keys]
    if empty.any():
        p = p.masked_fill(empty[..., None], 0)
    lse = torch.logsumexp(logits, -1).masked_fill(empty, -torch.inf) if with_lse else None
    dropped = p if setting.kept is None else p * setting.kept.to(p.dtype)
    return torch.einsum("hij,jhd->ihd", dropped.to(v.dtype), v), p, lse


def magnitudes(q, k, v, d_o, p, setting: Setting):
    """What o, d_q, d_k, d_v would be if nothing cancelled: the size of the terms that each row sums. All in float64."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    keys, values = k.abs().repeat_interleave(group, 1), v.abs().repeat_interleave(group, 1)
    kept = p if setting.kept is None else p * setting.kept
    scale = 1 / math.sqrt(q.shape[2])
    o = torch.einsum("hij,jhd->ihd", kept, values)
    delta = (d_o.abs() * o).sum(-1).T[..., None]  # the sum of kept * d_p over the keys
    d_p = torch.einsum("ihd,jhd->hij", d_o.abs(), values)
    d_s = kept * d_p + p * delta

    def join(x):  # gradients of a KV head are sums over its query heads
        return x.unflatten(1, (heads // group, group)).sum(2)

    return (
        o,
        torch.einsum("hij,jhd->ihd", d_s, keys) * scale,
        join(torch.einsum("hij,ihd->jhd", d_s, q.abs())) * scale,
        join(torch.einsum("hij,ihd->jhd", kept, d_o.abs())),
    )


def exact(q, k, v, d_o, setting: Setting, block=128):
    """The truth: o, d_q, d_k, d_v, and their magnitudes, in float64.

    So many rows at a time, which a cache holds, and only the keys that those may see.
    """
    assert setting.bias is None and setting.masked is None  # they would have to be cut as `kept` is
    q, k, v, d_o = (x.detach().double() for x in (q, k, v, d_o))
    rows, keys = q.shape[0], k.shape[0]
    results, sizes = ([torch.zeros_like(x) for x in (q, q, k, v)] for _ in range(2))
    mask = allowed(rows, keys, setting.causal, setting.window)
    for first in range(0, rows, block):
        at = slice(first, min(first + block, rows))
        seen = mask[at].any(0).nonzero()
        if seen.numel() == 0:
            continue
        to = slice(seen[0].item(), seen[-1].item() + 1)
        part = setting if setting.kept is None else setting._replace(kept=setting.kept[:, at, to].double())
        inputs = [x.requires_grad_() for x in (q[at].clone(), k[to].clone(), v[to].clone())]
        o, p, _ = attend(*inputs, part, offset=first + keys - rows - to.start, with_lse=False)
        found = (o.detach(), *torch.autograd.grad(o, inputs, d_o[at]))
        inputs = [x.detach() for x in inputs]
        for all_of, parts in ((results, found), (sizes, magnitudes(*inputs, d_o[at], p.detach(), part))):
            for whole, x, where in zip(all_of, parts, (at, at, to, to)):
                whole[where] += x
    return results, sizes


def naive(q, k, v, d_o, setting: Setting, order=None):
    """o, d_q, d_k, d_v in the dtype of q. order: one of the head dims; another gives the same sums, rounded otherwise."""
    q, k, v = (x.detach() for x in (q, k, v))
    if order is not None:
        q, k = q[..., order], k[..., order]
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o, _, _ = attend(*inputs, setting, with_lse=False)
    d_q, d_k, d_v = torch.autograd.grad(o, inputs, d_o)
    if order is not None:
        back = order.argsort()
        d_q, d_k = d_q[..., back], d_k[..., back]
    return o.detach(), d_q, d_k, d_v


def row_errors(result, truth, size):
    """RMS error of each row, relative to the row's own size; rows in which nothing is summed must be exact.

    Probabilities below the smallest normal float32, `tiny`, may vanish: an error of tiny times what they are multiplied
    with. So a row is not taken as smaller than tiny / eps, where that is one eps of it.
    """
    error, scale = (x.double().square().mean(-1).sqrt().flatten() for x in (result.double() - truth, size))
    assert torch.all(error[scale == 0] == 0), "a row in which nothing is summed is not exact"
    float32 = torch.finfo(torch.float32)
    scale = torch.where(scale > 0, scale.clamp(min=float32.tiny / float32.eps), scale)
    return error[scale > 0] / scale[scale > 0]


class Measure(NamedTuple):
    """What `assert_close` holds the results of one tensor to: computed once for all functions that shall have it."""

    truth: torch.Tensor
    size: torch.Tensor  # see magnitudes
    theirs: List[torch.Tensor]  # row errors of the naive computations
    redraw: Callable[[], Iterable[torch.Tensor]]  # more naive results, where those do not settle it


def measure(naives, truth, size, redraw=tuple):
    return Measure(truth, size, [row_errors(naive, truth, size) for naive in naives], redraw)


class Unlucky(AssertionError):
    """More rows in float32 break the rule than in naive computations of the same data."""


def assert_close(name, result, measure: Measure, factor):
    """Holds a result to `factor` times the naive computation's error, per row.

    Each row is measured by its own size, and nothing is held to less than the unit roundoff of its dtype. A row may be
    `factor` times as far off as the very same row of the naive computation. That holds for every
    row. But float32 computed in float32 alone and naive round alike, and a row of naive that sees few keys is nearly exact by luck now and then:
    naive itself breaks the rule against naive with its head dims in another order, in 3 % of the rows of o. So where `theirs` has several
    no more rows may break it than break it in the worst of three such naive computations (`theirs`, after the first), or
    one. Often that is one or two rows of a thousand, and three say little of naive's luck: where ours has more, `redraw` makes
    twelve more, and it may have as many as naive has on average and three standard deviations (of a Poisson distribution,
    which counts of rare things have); beyond that it is Unlucky. And rows that are so small that the probabilities below `tiny`, which vanish, can be an eps of them are not counted. That is a matter
    of how many, not of how much: besides, in every dtype and for all rows, the worst row may be `factor` times as far off
    as naive's worst one, and the typical (RMS) row as the typical one.
    """
    truth, size, theirs, redraw = measure
    ours = row_errors(result, truth, size)
    if ours.numel() == 0:
        return
    info = torch.finfo(result.dtype)
    unit = info.eps / 2
    limits = factor * theirs[0].clamp(min=unit)
    if result.dtype == torch.float32:
        sizes = size.square().mean(-1).sqrt().flatten()
        limits[sizes[sizes > 0] < info.tiny / info.eps**2] = torch.inf  # 8e-25
    over, *lucky = ((errors > limits).sum().item() for errors in (ours, *theirs[1:]))
    allowed = max(1, *lucky) if lucky else 0
    if lucky and over > allowed:
        lucky += ((row_errors(other, truth, size) > limits).sum().item() for other in redraw())
        mean = sum(lucky) / len(lucky)
        allowed = max(allowed, math.floor(mean + 3 * math.sqrt(mean)))
    too_many = f"{name}: {over} rows are off more than {factor} times the same one of naive, {allowed} may be"
    assert over <= allowed or lucky, too_many
    theirs = torch.cat(theirs)
    for kind, reduce in (("worst", torch.max), ("typical", lambda x: x.square().mean().sqrt())):
        have, limit = reduce(ours).item(), factor * max(reduce(theirs).item(), unit)
        assert have <= limit, f"{name}: {kind} row is off by {have:.2e}, limit {limit:.2e}"
    if over > allowed:
        raise Unlucky(too_many)
