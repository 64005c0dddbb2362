"""Attention by other people's words for masks: PaddlePaddle's FlashMask and torch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

from ._core import Options, require
from ._dispatch import operations

Array = Any


def flashmask_attention(
    query: Array,
    key: Array,
    value: Array,
    startend_row_indices: Optional[Array] = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: Optional[Union[int, Tuple[int, int]]] = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Optional[Array] = None,
    rng_name: str = "",
    training: bool = True,
    name: Optional[str] = None,
    softmax_scale: Optional[float] = None,
    block_mask: Optional[Array] = None,
    learnable_sink: Optional[Array] = None,
):
    """Attention with a mask of O(seqlen_k) numbers. query (batch, seqlen_q, nheads, headdim), key and value
    (batch, seqlen_k, nheads_k, headdim).

    startend_row_indices: (batch, 1 or nheads_k, seqlen_k, n) int32. For each key, the query rows that may not see it:
        causal, n=1: rows >= r0          not causal, n=2: rows >= r0, and rows < r1
        causal, n=2: r0 <= rows < r1     not causal, n=4: r0 <= rows < r1, and r2 <= rows < r3
    window_size (left, right) instead of it: a sliding window, as in flash_attn_func.
    fixed_seed_offset: (2,) int64, seed and offset of dropout; otherwise they are drawn. rng_name and name are ignored.
    Returns out, or a list [out, softmax_lse, seed_offset] of it and what was asked for.
    """
    if block_mask is not None:
        raise NotImplementedError("block_mask: libattn has no block masks; startend_row_indices can say the same")
    require(startend_row_indices is None or window_size is None, "window_size: want None with startend_row_indices")
    ops = operations(query)
    left, right = (-1, -1) if window_size is None else (window_size,) * 2 if isinstance(window_size, int) else window_size
    dropout = dropout if training else 0.0
    seed = fixed_seed_offset
    if dropout > 0 and seed is None:
        seed = ops.new_seed(query)
    options = Options(
        flashmask=startend_row_indices,
        sink=ops.float32(learnable_sink),
        seed=seed,
        scale=softmax_scale,
        causal=causal,
        window_left=left,
        window_right=right,
        dropout=dropout,
    )
    out, lse, _ = ops.attention(query, key, value, options)
    results = [out, *([lse] if return_softmax_lse else []), *([seed] if return_seed_offset else [])]
    return out if len(results) == 1 else results


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Optional[Array] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
):
    """As in torch.nn.functional: query (..., heads, L, E), key (..., heads, S, E), value (..., heads, S, Ev).

    attn_mask: bool (True: may see) or floating point (added to the scores, with a gradient), broadcast to
    (..., heads, L, S). is_causal aligns to the top left, as torch does: row i sees j <= i. enable_gqa: key and value may
    have fewer heads, which divide those of query. Returns (..., heads, L, Ev).
    """
    ops = operations(query)
    query, key, value, attn_mask = (ops.asarray(x) for x in (query, key, value, attn_mask))
    require(
        len(query.shape) == len(key.shape) == len(value.shape) >= 2,
        f"query.shape={tuple(query.shape)}: query, key and value want the same number of dims, 2 or more",
    )
    require(attn_mask is None or not is_causal, "is_causal=True: want attn_mask=None, since only one of them can hold")
    lead = tuple(query.shape[:-2])
    heads = lead[-1] if len(lead) > 1 else 1
    heads_kv = key.shape[-3] if len(lead) > 1 else 1
    require(heads == heads_kv or enable_gqa, f"key.shape={tuple(key.shape)}: want {heads} heads, or enable_gqa=True")

    rows, keys = query.shape[-2], key.shape[-2]
    if is_causal and keys > rows:  # no row sees further
        key, value, keys = key[..., :rows, :], value[..., :rows, :], rows
    if attn_mask is not None:
        attn_mask = ops.bias_of_mask(attn_mask, query)
        while len(attn_mask.shape) < len(query.shape):
            attn_mask = attn_mask[None]
        if len(lead) != 2:  # batch dims are joined, so the mask has them all
            attn_mask = ops.broadcast(attn_mask, (*lead, rows, keys)).reshape(-1, heads, rows, keys)
    q, k, v = (
        x.reshape(-1, h, *x.shape[-2:]).swapaxes(1, 2) for x, h in ((query, heads), (key, heads_kv), (value, heads_kv))
    )
    options = Options(
        bias=attn_mask,
        scale=scale,
        window_right=rows - keys if is_causal else -1,
        dropout=dropout_p,
        seed=ops.new_seed(query) if dropout_p > 0 else None,
    )
    out, _, _ = ops.attention(q, k, v, options)
    return out.swapaxes(1, 2).reshape(*lead, rows, value.shape[-1])
