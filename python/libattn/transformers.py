"""Hugging Face transformers: `attn_implementation="libattn"`.

    import libattn.transformers
    libattn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="libattn")

A mask is one number per key instead of a square: FlashMask rows (see libattn.flashmask_attention), which carry padding and
the sliding window; the causal rule applies besides. Only other patterns (packed sequences, chunks, static caches, masks of
the user's own) take transformers' square mask, added to the scores.
"""

from __future__ import annotations

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from . import _torch
from ._core import Options


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Optional[Tensor] = None,
    local_size: Optional[int] = None,
    allow_is_causal_skip: bool = True,
    device="cpu",
    **rest,
) -> Optional[Tensor]:
    """The mask of one kind of layer: None (causal), FlashMask rows (batch, 1, kv_length, 1) int32, or a square of bool.

    allow_is_causal_skip says that the pattern is causal, or causal with a window of local_size, and nothing else. The
    causal rule looks from the last key back, so it holds only where the last query stands at the last key.
    """
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if not (allow_is_causal_skip and aligned):
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            allow_is_causal_skip=False,
            device=device,
            **rest,
        )
    windowed = local_size is not None and kv_length > local_size
    if attention_mask is None and not windowed:
        return None
    rows = torch.full((batch_size, kv_length), q_length, dtype=torch.int32, device=device)
    if windowed:  # key j is seen last by the row that is local_size - 1 behind it
        behind = torch.arange(kv_length, dtype=torch.int32, device=device) + (local_size - kv_length + q_length)
        rows = torch.minimum(rows, behind.clamp(min=0))
    if attention_mask is not None:
        present = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        short = kv_length - present.shape[1]  # a mask may stop before the tokens that are being generated
        present = torch.nn.functional.pad(present, (0, short)) if short > 0 else present
        rows = rows * present
    return rows[:, None, :, None].to(torch.int32)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    softcap: Optional[float] = None,
    sliding_window: Optional[int] = None,
    is_causal: Optional[bool] = None,
    s_aux: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    **rest,
) -> Tuple[Tensor, None]:
    """query (batch, heads, rows, dim), key and value (batch, heads_kv, keys, dim); returns (batch, rows, heads, dim), None.

    s_aux: (heads,), the sinks. position_bias: (batch or 1, heads, rows, keys), added to the scores. Probabilities are not
    returned: they are never stored.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = Options(
        bias=position_bias, sink=_torch.float32(s_aux), scale=scaling, softcap=softcap or 0.0, dropout=dropout
    )
    if attention_mask is None:
        window = sliding_window - 1 if causal and sliding_window is not None else -1
        options = options._replace(causal=causal, window_left=window)
    elif attention_mask.dtype == torch.int32:
        options = options._replace(causal=True, flashmask=attention_mask)
    else:
        mask = _torch.bias_of_mask(attention_mask[..., : key.shape[2]], query)
        options = options._replace(bias=mask if position_bias is None else mask + position_bias)
    if dropout > 0:
        options = options._replace(seed=_torch.new_seed(query))
    out, _, _ = _torch.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), options)
    return out, None


def register(name: str = "libattn") -> None:
    """Adds the attention implementation `name` to transformers."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
