"""Attention as the formula says, in torch, and how far from it a result may be.

`attend` works on one sequence and stores every matrix; in float64 it is the truth, in the dtype under test it is the naive
computation whose error sets the measure.
"""

import math
from typing import NamedTuple, Optional

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


def allowed(rows, keys, causal, window):
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    mask = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        mask &= j <= i
    if window[0] >= 0:
        mask &= j >= i - window[0]
    if window[1] >= 0:
        mask &= j <= i + window[1]
    return mask


def attend(q, k, v, setting: Setting, scale=None):
    """q (rows, heads, dim), k and v (keys, heads_kv, dim). Returns o (rows, heads, dim), p (heads, rows, keys), lse."""
    rows, heads, dim = q.shape
    keys = k.shape[0]
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q * (1 / math.sqrt(dim) if scale is None else scale), k)
    if setting.softcap:
        s = setting.softcap * torch.tanh(s / setting.softcap)
    if setting.alibi is not None:
        distance = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)).abs()
        # The slopes are float32. In float64 their products must be exact: a truth that rounds them as the naive computation
        # does would count only our own rounding.
        slope = setting.alibi.to(torch.promote_types(s.dtype, torch.float32))
        s = s - (slope[:, None, None] * distance).to(s.dtype)
    if setting.bias is not None:
        s = s + setting.bias
    mask = allowed(rows, keys, setting.causal, setting.window)
    if setting.masked is not None:
        mask = mask & ~setting.masked
    s = s.masked_fill(~mask, -torch.inf)
    empty = ~mask.any(-1).expand(heads, rows)
    logits = (
        s if setting.sink is None else torch.cat([s, setting.sink.to(s.dtype)[:, None, None].expand(heads, rows, 1)], -1)
    )
    p = torch.softmax(logits, -1)[..., :keys].masked_fill(empty[..., None], 0)
    lse = torch.logsumexp(logits, -1).masked_fill(empty, -torch.inf)
    dropped = p if setting.kept is None else p * setting.kept.to(p.dtype)
    return torch.einsum("hij,jhd->ihd", dropped.to(v.dtype), v), p, lse


def magnitudes(q, k, v, d_o, p, setting: Setting):
    """What o, d_q, d_k, d_v would be if nothing cancelled: the size of the terms that each row sums. All in float64."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    keys, values = k.abs().repeat_interleave(group, 1), v.abs().repeat_interleave(group, 1)
    kept = 1 if setting.kept is None else setting.kept
    scale = 1 / math.sqrt(q.shape[2])
    d_p = torch.einsum("ihd,jhd->hij", d_o.abs(), values) * kept
    d_s = p * (d_p + (p * d_p).sum(-1, keepdim=True)) * scale

    def join(x):  # gradients of a KV head are sums over its query heads
        return x.unflatten(1, (heads // group, group)).sum(2)

    return (
        torch.einsum("hij,jhd->ihd", p * kept, values),
        torch.einsum("hij,jhd->ihd", d_s, keys),
        join(torch.einsum("hij,ihd->jhd", d_s, q.abs())),
        join(torch.einsum("hij,ihd->jhd", p * kept, d_o.abs())),
    )


def row_errors(result, truth, size):
    """RMS error of each row, relative to the row's own size; rows in which nothing is summed must be exact.

    Probabilities below the smallest normal float32, `tiny`, may vanish: an error of tiny times what they are multiplied
    with. So a row is not taken as smaller than tiny / eps, where that is one eps of it.
    """
    error, scale = (x.double().square().mean(-1).sqrt().flatten() for x in (result.double() - truth, size))
    assert torch.all(error[scale == 0] == 0)
    float32 = torch.finfo(torch.float32)
    scale = torch.where(scale > 0, scale.clamp(min=float32.tiny / float32.eps), scale)
    return error[scale > 0] / scale[scale > 0]


def assert_close(name, result, naives, truth, size, factor):
    """Holds a result to `factor` times the naive computation's error, per row.

    Each row is measured by its own size, and nothing is held to less than the unit roundoff of its dtype. A row may be `factor`
    times as far off as the very same row of the naive computation. In float16 and bfloat16 that holds for every row. In float32
    both sides round alike, and a row of naive that sees few keys is nearly exact by luck now and then: naive itself breaks the
    rule against naive with its head dims in another order, in 3 % of the rows of o. So in float32 no more rows may break it than
    break it in such a naive computation (`naives`, after the first), or one; and rows that are so small that the probabilities
    below `tiny`, which vanish, can be an eps of them are not counted. That is a matter of how many, not of how much: besides, in
    every dtype and for all rows, the worst row may be `factor` times as far off as naive's worst one, and the typical (RMS) row
    as the typical one.
    """
    ours, theirs = row_errors(result, truth, size), [row_errors(naive, truth, size) for naive in naives]
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
    assert over <= allowed, f"{name}: {over} rows are off more than {factor} times the same one of naive, {allowed} may be"
    theirs = torch.cat(theirs)
    for kind, reduce in (("worst", torch.max), ("typical", lambda x: x.square().mean().sqrt())):
        have, limit = reduce(ours).item(), factor * max(reduce(theirs).item(), unit)
        assert have <= limit, f"{name}: {kind} row is off by {have:.2e}, limit {limit:.2e}"
