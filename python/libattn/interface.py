"""The functions of flash_attn 2.8: its names, arguments, defaults, layouts and results, on torch tensors and numpy arrays.

Arguments after the `*` come from FlashAttention-3 and later, and are given by keyword. `deterministic`, `num_splits`,
`pack_gqa`, `sm_margin` and `scheduler_metadata` are taken and change nothing: results here are always the same bits.

Masks are aligned to the bottom right: the last query sees the last key. With o = seqlen_k - seqlen_q, query i sees key j
where j <= i + o (causal) and i + o - window_size[0] <= j <= i + o + window_size[1] (-1: no limit on that side). A row that
sees no key is zero. Query head h reads KV head h // (nheads // nheads_k).

What all of them share:
    dropout_p       probability of dropping, drawn from the generator of torch (torch.manual_seed) or numpy
    softmax_scale   1 / sqrt(headdim) by default
    softcap         c > 0 turns scores s into c * tanh(s / c)
    alibi_slopes    (nheads,) or (batch, nheads) float32: scores lose slope * |i + o - j|
    learnable_sink  (nheads,): a logit that joins the denominator of each row; has a gradient
    return_attn_probs   returns (out, softmax_lse, S_dmask): softmax_lse is (batch, nheads, seqlen_q), varlen
                    (nheads, total_q), float32 (float64 for float64), and has a gradient; S_dmask is
                    (batch, nheads, seqlen_q, seqlen_k), the probabilities before dropout, negative where they are dropped
    return_softmax_lse  returns (out, softmax_lse), without the matrix of probabilities
    q_descale, k_descale, v_descale   broadcast to (batch, nheads_k) float32: fp8 and int8 numbers are multiplied by them
v may have a head dim of its own, and so has the output then. float8 inputs give bfloat16.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

from ._core import Append, Options, require
from ._dispatch import operations

Array = Any  # a torch tensor, a numpy array, or anything with __dlpack__
Window = Tuple[Optional[int], Optional[int]]


def _refuse(**arguments) -> None:
    for name, value in arguments.items():
        if value:
            raise NotImplementedError(f"{name}={value!r}: libattn has no {name}")


def _window(window_size: Window) -> dict:
    left, right = (-1 if side is None else side for side in window_size)
    return {"window_left": left, "window_right": right}


def _attend(ops, q, k, v, options: Options, return_attn_probs: bool, return_softmax_lse: bool):
    if options.dropout > 0:
        options = options._replace(seed=ops.new_seed(q))
    out, lse, probs = ops.attention(q, k, v, options, return_attn_probs)
    return (out, lse, probs) if return_attn_probs else (out, lse) if return_softmax_lse else out


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Optional[Array] = None,
    learnable_sink: Optional[Array] = None,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    qv: Optional[Array] = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
):
    """Attention of q (batch, seqlen_q, nheads, headdim) to k, v (batch, seqlen_k, nheads_k, headdim).

    attn_bias is added to the scores: (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k or 1), with a gradient.
    Returns out (batch, seqlen_q, nheads, headdim), or (out, softmax_lse, S_dmask).
    """
    _refuse(qv=qv is not None, attention_chunk=attention_chunk)
    ops = operations(q)
    options = Options(
        bias=attn_bias,
        sink=ops.float32(learnable_sink),
        alibi=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        dropout=dropout_p,
        **_window(window_size),
    )
    return _attend(ops, q, k, v, options, return_attn_probs, return_softmax_lse)


def flash_attn_kvpacked_func(
    q: Array,
    kv: Array,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **later,
):
    """flash_attn_func with k and v in kv (batch, seqlen_k, 2, nheads_k, headdim)."""
    k, v = _unpack("kv", kv, 2, 5)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **later,
    )


def flash_attn_qkvpacked_func(
    qkv: Array,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    num_heads_q: Optional[int] = None,
    **later,
):
    """flash_attn_func with all three in qkv (batch, seqlen, 3, nheads, headdim).

    With num_heads_q, qkv is (batch, seqlen, nheads + 2 * nheads_k, headdim).
    """
    if num_heads_q is None:
        q, k, v = _unpack("qkv", qkv, 3, 5)
    else:
        qkv = operations(qkv).asarray(qkv)
        require(
            len(qkv.shape) == 4 and (qkv.shape[2] - num_heads_q) % 2 == 0,
            f"qkv.shape={tuple(qkv.shape)}: want (batch, seqlen, {num_heads_q} + 2 * nheads_k, headdim)",
        )
        end = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:end], qkv[:, :, end:]
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **later,
    )


def _unpack(name: str, x: Array, count: int, dims: int) -> tuple:
    ops = operations(x)
    x = ops.asarray(x)
    shape = tuple(x.shape)
    require(
        len(shape) == dims and shape[-3] == count,
        f"{name}.shape={shape}: want {'(batch, seqlen' if dims == 5 else '(total'}, {count}, nheads, headdim)",
    )
    return ops.unbind(x, dims - 3)


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Optional[Array],
    cu_seqlens_k: Optional[Array],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Array] = None,
    *,
    seqused_q: Optional[Array] = None,
    seqused_k: Optional[Array] = None,
    page_table: Optional[Array] = None,
    learnable_sink: Optional[Array] = None,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    qv: Optional[Array] = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
):
    """Sequences of different lengths, packed one after the other: q (total_q, nheads, headdim), k, v (total_k, ...).

    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where each sequence begins and the last one ends. max_seqlen_q,
    max_seqlen_k: at least the longest. seqused_q, seqused_k: (batch,) int32, how many rows of each sequence count.
    page_table, also called block_table: (batch, pages) int32; k and v are (num_pages, page_size, nheads_k, headdim) then,
    and their lengths come from seqused_k or cu_seqlens_k. Where cu_seqlens_q or cu_seqlens_k is None, the tensors are
    (batch, seqlen, heads, headdim). Returns out (total_q, nheads, headdim), or (out, softmax_lse, S_dmask).
    """
    _refuse(qv=qv is not None, attention_chunk=attention_chunk)
    ops = operations(q)
    cu_seqlens_q, cu_seqlens_k = ops.asarray(cu_seqlens_q), ops.asarray(cu_seqlens_k)
    page_table = block_table if page_table is None else page_table
    if page_table is not None:
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
    require(cu_seqlens_q is None or max_seqlen_q is not None, "max_seqlen_q=None: cu_seqlens_q wants it")
    require(cu_seqlens_k is None or max_seqlen_k is not None, "max_seqlen_k=None: cu_seqlens_k wants it")
    options = Options(
        sink=ops.float32(learnable_sink),
        alibi=alibi_slopes,
        cu_q=cu_seqlens_q,
        cu_kv=cu_seqlens_k,
        used_q=seqused_q,
        used_kv=seqused_k,
        page_table=page_table,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        max_q=max_seqlen_q or 0,
        max_kv=max_seqlen_k or 0,
        scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        dropout=dropout_p,
        **_window(window_size),
    )
    return _attend(ops, q, k, v, options, return_attn_probs, return_softmax_lse)


def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **later,
):
    """flash_attn_varlen_func with k and v in kv (total_k, 2, nheads_k, headdim)."""
    k, v = _unpack("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **later,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Array,
    cu_seqlens: Array,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **later,
):
    """flash_attn_varlen_func with all three in qkv (total, 3, nheads, headdim)."""
    q, k, v = _unpack("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **later,
    )


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Optional[Array] = None,
    v: Optional[Array] = None,
    rotary_cos: Optional[Array] = None,
    rotary_sin: Optional[Array] = None,
    cache_seqlens: Optional[Union[int, Array]] = None,
    cache_batch_idx: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None,
    block_table: Optional[Array] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Array] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Optional[Array] = None,
    cu_seqlens_q: Optional[Array] = None,
    cu_seqlens_k_new: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Array] = None,
    learnable_sink: Optional[Array] = None,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    descale_pages: bool = False,
    qv: Optional[Array] = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any = None,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
):
    """Attention of q (batch, seqlen_q, nheads, headdim) to a cache; k, v (batch, new, nheads_k, headdim) are added first.

    k_cache, v_cache: (batch_cache, seqlen_cache, nheads_k, headdim), changed in place when k and v are given. With
    page_table (batch, pages) int32, also called block_table, they are (num_pages, page_size, nheads_k, headdim), any page
    size. A cache in float8 or int8 is converted to, by k_descale and v_descale; with descale_pages these have numbers for
    pages and broadcast to (num_pages, nheads_k).
    cache_seqlens: (batch,) int32 or an int: keys in the cache before the new ones. cache_batch_idx: (batch,) int32, which
    slot of the cache each sequence has. cache_leftpad: (batch,) int32, where its keys begin.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2). New keys are rotated for the positions cache_seqlens,
    cache_seqlens + 1, ... (or from rotary_seqlens on); q likewise when causal or local, else all of it for the first.
    rotary_interleaved pairs dims (0, 1), (2, 3), ...; otherwise (0, rotary_dim / 2), ...
    cu_seqlens_q: q is (total_q, nheads, headdim). cu_seqlens_k_new: k, v are (total_new, nheads_k, headdim).
    Returns out (batch, seqlen_q, nheads, headdim), or (out, softmax_lse). Appending has no gradient.
    """
    _refuse(qv=qv is not None, attention_chunk=attention_chunk)
    require((k is None) == (v is None), "k, v: want both or neither")
    ops = operations(q)
    q, k, cu_seqlens_q = map(ops.asarray, (q, k, cu_seqlens_q))
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if isinstance(cache_seqlens, int):
        cache_seqlens = ops.full(q, batch, cache_seqlens)
    options = Options(
        sink=ops.float32(learnable_sink),
        alibi=alibi_slopes,
        cu_q=cu_seqlens_q,
        used_kv=cache_seqlens,
        leftpad=cache_leftpad,
        batch_index=cache_batch_idx,
        page_table=block_table if page_table is None else page_table,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        descale_pages=descale_pages,
        max_q=q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        **_window(window_size),
    )
    if k is None:
        require(rotary_cos is None, "rotary_cos: wants k and v, the keys to rotate (layers.rotary rotates by itself)")
        out, lse, _ = ops.attention(q, k_cache, v_cache, options)
    else:
        require(cache_seqlens is not None, "cache_seqlens=None: k and v want it, to know where in the cache to write")
        append = Append(k, v, cu_seqlens_k_new, k.shape[0], rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved)
        out, lse = ops.attention_with_append(q, k_cache, v_cache, options, append)
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(out_partial: Array, lse_partial: Array, out: Optional[Array] = None, out_dtype: Any = None):
    """Merges partial results over disjoint sets of keys.

    out_partial: (parts, batch, seqlen, nheads, headdim), or varlen (parts, total, nheads, headdim); lse_partial: the same
    without headdim. Returns out (batch, seqlen, nheads, headdim) and softmax_lse (batch, seqlen, nheads).
    """
    ops = operations(out_partial)
    out_partial, lse_partial = ops.asarray(out_partial), ops.asarray(lse_partial)
    packed = len(out_partial.shape) == 4
    if packed:
        out_partial, lse_partial = out_partial[:, None], lse_partial[:, None]
    dtype = out_partial.dtype if out is None and out_dtype is None else out_dtype if out is None else out.dtype
    merged, lse = ops.combine(out_partial, lse_partial.swapaxes(-1, -2), dtype)
    lse = lse.swapaxes(-1, -2)
    if packed:
        merged, lse = merged[0], lse[0]
    if out is not None:
        out[...] = merged
        merged = out
    return merged, lse
