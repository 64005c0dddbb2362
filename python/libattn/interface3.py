"""FlashAttention-3's functions, in its order of arguments: what `import flash_attn_interface` means there.

They are those of libattn.interface; only places differ (softmax_scale comes where flash_attn 2 has dropout_p), and
return_attn_probs returns (out, softmax_lse). `ours` are keywords that only libattn.interface has, such as
learnable_sink.
"""

from __future__ import annotations

from typing import Any, Optional

from . import interface
from .interface import Array, Window, flash_attn_combine

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Array] = None,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **ours,
):
    """libattn.interface.flash_attn_func. Returns out, or (out, softmax_lse)."""
    return interface.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        return_softmax_lse=return_attn_probs,
        **ours,
    )


def flash_attn_qkvpacked_func(
    qkv: Array,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: Optional[int] = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **ours,
):
    """libattn.interface.flash_attn_qkvpacked_func. Returns out, or (out, softmax_lse)."""
    return interface.flash_attn_qkvpacked_func(
        qkv,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_heads_q=num_heads_q,
        return_softmax_lse=return_attn_probs,
        **ours,
    )


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Optional[Array],
    cu_seqlens_k: Optional[Array],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    seqused_q: Optional[Array] = None,
    seqused_k: Optional[Array] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Array] = None,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **ours,
):
    """libattn.interface.flash_attn_varlen_func. Returns out, or (out, softmax_lse)."""
    return interface.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        return_softmax_lse=return_attn_probs,
        **ours,
    )


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Optional[Array] = None,
    v: Optional[Array] = None,
    qv: Optional[Array] = None,
    rotary_cos: Optional[Array] = None,
    rotary_sin: Optional[Array] = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None,
    page_table: Optional[Array] = None,
    cu_seqlens_q: Optional[Array] = None,
    cu_seqlens_k_new: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Array] = None,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    **ours,
):
    """libattn.interface.flash_attn_with_kvcache. Returns out, or (out, softmax_lse)."""
    return interface.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        qv=qv,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        return_softmax_lse=return_softmax_lse,
        **ours,
    )


def get_scheduler_metadata(*_arguments, **_options) -> None:
    """None: there is nothing to prepare, and scheduler_metadata=None is what flash_attn_with_kvcache takes."""
