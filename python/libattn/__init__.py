"""libattn: exact attention, flash_attn's functions for torch tensors and numpy arrays.

    from libattn import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)      # (batch, seqlen, nheads, headdim)

The functions and their arguments: help(libattn.interface). `python -m libattn` says what this installation can do.
"""

from . import _lib
from ._lib import device_status, set_backend, set_float32_precision, set_num_threads
from .interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .masks import flashmask_attention, scaled_dot_product_attention

__version__ = _lib.version()

__all__ = [
    "device_status",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flashmask_attention",
    "scaled_dot_product_attention",
    "set_backend",
    "set_float32_precision",
    "set_num_threads",
]
