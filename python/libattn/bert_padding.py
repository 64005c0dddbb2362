"""From padded batches to packed ones and back: flash_attn.bert_padding, on torch tensors."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (n,) of input (rows, ...), with a gradient."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with values (n, ...) in the rows `indices` (n,), with a gradient."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of hidden_states (batch, seqlen, ...) that attention_mask (batch, seqlen) keeps.

    unused_mask (batch, seqlen): tokens that take up room without counting. Returns the packed tokens (total, ...), their
    indices (total,) in the flattened input, cu_seqlens (batch + 1,) int32, the longest length, and how many tokens of each
    sequence count (batch,).
    """
    present = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = present.sum(dim=-1, dtype=torch.int32)
    indices = present.flatten().nonzero().flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _offsets(lengths), int(lengths.max()), attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> Tuple[Tensor, Tensor, Tensor, int]:
    """Packs rows that each hold several short sequences, one after the other.

    attention_mask_in_length (batch, seqlen): the lengths of a row's sequences, then zeros. Returns the packed tokens
    (total, ...), their indices, cu_seqlens (sequences + 1,) int32, and the longest length.
    """
    positions = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    present = positions < attention_mask_in_length.sum(dim=-1, keepdim=True)
    indices = present.flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _offsets(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input: (total, ...) to (batch, seqlen, ...), zeros where there was padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
