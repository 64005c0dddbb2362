"""Rotary embedding: flash_attn.layers.rotary. The functions take torch tensors and numpy arrays; the module is torch's.

cos, sin are (positions, rotary_dim / 2); the first rotary_dim of the head dims are rotated. interleaved pairs dims (0, 1),
(2, 3), ...; otherwise (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ... Row i of sequence b is at position
seqlen_offsets + i, where seqlen_offsets is an int or (batch,). Functions whose name ends in _ work in place.
"""

from __future__ import annotations

from typing import Any, Optional, Union

from .._core import require
from .._dispatch import operations

Array = Any


def apply_rotary_emb(
    x: Array,
    cos: Array,
    sin: Array,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Union[int, Array] = 0,
    cu_seqlens: Optional[Array] = None,
    max_seqlen: Optional[int] = None,
) -> Array:
    """Rotates x (batch, seqlen, nheads, headdim), or with cu_seqlens (total, nheads, headdim)."""
    ops = operations(x)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if not isinstance(seqlen_offsets, int):
        offsets = ops.int32(seqlen_offsets)
    else:
        offsets = ops.full(x, batch, seqlen_offsets) if seqlen_offsets else None
    require(cu_seqlens is None or max_seqlen is not None, "max_seqlen=None: cu_seqlens wants it")
    rows = x.shape[1] if cu_seqlens is None else max_seqlen
    return ops.rotary(x, cos, sin, offsets, cu_seqlens, rows, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Array,
    cos: Array,
    sin: Array,
    cos_k: Optional[Array] = None,
    sin_k: Optional[Array] = None,
    interleaved: bool = False,
    seqlen_offsets: Union[int, Array] = 0,
    num_heads_q: Optional[int] = None,
) -> Array:
    """Rotates q and k inside qkv (batch, seqlen, 3, nheads, headdim), in place; k by cos_k, sin_k where they are given.

    With num_heads_q, qkv is (batch, seqlen, nheads + 2 * nheads_k, headdim).
    """
    if num_heads_q is None:
        require(
            len(qkv.shape) == 5 and qkv.shape[2] == 3,
            f"qkv.shape={tuple(qkv.shape)}: want (batch, seqlen, 3, nheads, headdim), or num_heads_q",
        )
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        require(
            len(qkv.shape) == 4 and (qkv.shape[2] - num_heads_q) % 2 == 0,
            f"qkv.shape={tuple(qkv.shape)}: want (batch, seqlen, {num_heads_q} + 2 * nheads_k, headdim)",
        )
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : (num_heads_q + qkv.shape[2]) // 2]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Array, cos: Array, sin: Array, interleaved: bool = False, seqlen_offsets: Union[int, Array] = 0
) -> Array:
    """Rotates k inside kv (batch, seqlen, 2, nheads_k, headdim), in place."""
    require(
        len(kv.shape) == 5 and kv.shape[2] == 2, f"kv.shape={tuple(kv.shape)}: want (batch, seqlen, 2, nheads_k, headdim)"
    )
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def __getattr__(name: str):
    """RotaryEmbedding is a torch module, so torch is imported when it is asked for and not before."""
    if name == "RotaryEmbedding":
        from .._rotary_module import RotaryEmbedding

        return RotaryEmbedding
    raise AttributeError(name)
