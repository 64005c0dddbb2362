"""Hugging Face transformers: `attn_implementation="libattn"`.

    import libattn.transformers
    libattn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="libattn")

A mask is None where no token is padding, and two numbers per sequence, where its keys begin and end, where the padding is
on the left or the cache is a static one, which is longer than what it holds: both take the kernels for decoding. Any other
padding, and a sliding window, is one number per key: FlashMask rows (see libattn.flashmask_attention). The causal rule
applies besides. Only other patterns (packed sequences, chunks, windows in a static cache, masks of the user's own) take
transformers' square mask, added to the scores.
"""

from __future__ import annotations

import weakref
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import is_tracing

from . import _quick, _torch
from ._core import Options


def _look_at(present: Tensor, used) -> Tuple[bool, bool]:
    """Whether no key that counts is padding, and whether none is but on the left. Waits for the device."""
    fits, complete = used <= present.shape[1], present.all()
    if fits is False:
        return False, False
    if complete if fits is True else complete & fits:  # mostly: so this is asked first, by itself
        return True, True
    rises = (present[:, 1:] >= present[:, :-1]).all() & present[:, -1].all() & fits
    return tuple(torch.stack([rises & present[:, 0].all(), rises]).tolist())


def _ends(leftpad, used, batch_size: int, device) -> Tensor:
    """Where the keys of each sequence begin and end: (1, 2, 1, batch) int32.

    Masks that are ready have four dims in transformers, and FlashMask rows have 1 where these have 2.
    """
    ends = torch.empty((1, 2, 1, batch_size), dtype=torch.int32, device=device)
    ends[0, 0], ends[0, 1] = leftpad, used
    return ends


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
    """The mask of a kind of layer: None (causal), _ends, FlashMask rows (batch, 1, kv_length, 1) int32, a square of bool.

    allow_is_causal_skip says that the pattern is causal, or causal with a window of local_size, and nothing else; models
    that want a square, to add one of their own to it, do not say so. With a static cache and one query it is never said: such
    a model cannot be told there. The causal rule looks from the last key back, so it holds only where the last query stands at
    the last key that counts.
    """
    used = q_offset + q_length - kv_offset  # a tensor, with a static cache
    aligned = isinstance(used, int) and used == kv_length
    present = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    wants_square = not allow_is_causal_skip and (aligned or q_length > 1)
    if mask_function is causal_mask_function and local_size is None and not wants_square:
        if present is None:
            return None if aligned else _ends(0, used, batch_size, device)
        if present.numel() and not is_tracing(present):  # whose graph would hold what this mask says for every other
            complete, left = _look_at(present, used)
            if complete and aligned:
                return None
            if left:
                return _ends(0 if complete else present.shape[1] - present.sum(1), used, batch_size, device)
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
    if present is None and not windowed:
        return None
    rows = torch.full((batch_size, kv_length), q_length, dtype=torch.int32, device=device)
    if windowed:  # key j is seen last by the row that is local_size - 1 behind it
        behind = torch.arange(kv_length, dtype=torch.int32, device=device) + (local_size - kv_length + q_length)
        rows = torch.minimum(rows, behind.clamp(min=0))
    if present is not None:
        short = kv_length - present.shape[1]  # a mask may stop before the tokens that are being generated
        present = torch.nn.functional.pad(present, (0, short)) if short > 0 else present
        rows = rows * present
    return rows[:, None, :, None].to(torch.int32)


_plain: dict[tuple, Options] = {}
_ended: Tuple = (lambda: None, None, None)  # the mask that came last, the numbers it came with, and their Options


def _options(mask: Optional[Tensor], numbers: tuple) -> Optional[Options]:
    """Options that are the same for each layer, or for each token too; None where they are not of that sort.

    Where sequences end lies in memory that views of the mask see as well, so these are made for a mask's first layer only.
    """
    global _ended
    if mask is None:
        options = _plain.get(numbers)
        if options is None:
            if len(_plain) >= 64:
                _plain.clear()
            scale, causal, window, softcap = numbers
            options = _plain[numbers] = Options(scale=scale, causal=causal, window_left=window, softcap=softcap)
        return options
    last, with_numbers, options = _ended  # at once: other threads have masks of their own
    if last() is mask and with_numbers == numbers:
        return options
    if mask.dtype != torch.int32 or mask.shape[1] != 2:
        return None
    begin, end = mask.view(2, -1).unbind()
    scale, _, _, softcap = numbers
    options = Options(used_kv=end, leftpad=begin, scale=scale, causal=True, softcap=softcap)
    _ended = (weakref.ref(mask), numbers, options)
    return options


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
    scaling = None if scaling is None else float(scaling)
    if position_bias is None and s_aux is None and not dropout and not torch.compiler.is_compiling():
        window = sliding_window - 1 if causal and sliding_window is not None else -1
        options = _options(attention_mask, (scaling, causal, window, softcap or 0.0))
        out = None if options is None else _quick.forward(query, key, value, options, heads_first=True)
        if out is not None:
            return out, None
    window, bias, rows, begin, end = -1, position_bias, None, None, None
    if attention_mask is None:
        window = sliding_window - 1 if causal and sliding_window is not None else -1
    elif attention_mask.dtype == torch.int32:
        causal = True
        if attention_mask.shape[1] == 2:
            begin, end = attention_mask.view(2, -1).unbind()
        else:
            rows = attention_mask
    else:
        causal = False
        mask = _torch.bias_of_mask(attention_mask[..., : key.shape[2]], query)
        bias = mask if position_bias is None else mask + position_bias
    options = Options(
        bias=bias,
        sink=_torch.float32(s_aux),
        used_kv=end,
        leftpad=begin,
        flashmask=rows,
        seed=_torch.new_seed(query) if dropout > 0 else None,
        scale=scaling,
        causal=causal,
        window_left=window,
        softcap=softcap or 0.0,
        dropout=dropout,
    )
    out = _quick.forward(query, key, value, options, heads_first=True)
    if out is None:
        out = _torch.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), options)[0]
    return out, None


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer with room behind them: a token is written there, where DynamicLayer copies all of them.

    What the layer shows is a view of the beginning of its rooms. Whatever else transformers does with that (beam search,
    moving) gives another tensor, which moves to a new room, as what was cropped does: somebody may hold what was behind it.
    Where gradients may be wanted, and in what torch.compile makes, it does as DynamicLayer does.
    """

    rooms = (None, None)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> Tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self._differs(key_states, value_states):
            self.rooms = (None, None)
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        grown = [_append(*x) for x in zip(self.rooms, (self.keys, self.values), (key_states, value_states))]
        self.rooms = tuple(room for room, _ in grown)
        self.keys, self.values = (view for _, view in grown)
        return self.keys, self.values

    def crop(self, *args, **kwargs) -> None:
        before = self.get_seq_length()
        super().crop(*args, **kwargs)
        if self.get_seq_length() != before:
            self.rooms = (None, None)

    def offload(self) -> None:
        super().offload()
        self.rooms = (None, None)

    def _differs(self, *new: Tensor) -> bool:
        """From the keys and values that are there, in more than their number: concatenation says what comes of that."""
        there = (self.keys, self.values) if self.is_initialized else ()
        return any(x.numel() and (x.dtype != y.dtype or x.shape[:2] != y.shape[:2]) for x, y in zip(there, new))


def _append(room: Optional[Tensor], old: Tensor, new: Tensor) -> Tuple[Tensor, Tensor]:
    """`new` behind `old`, which is the beginning of `room`, or else is copied to a larger one: the room, and the view of both."""
    used = old.shape[2] if old.numel() else 0
    end = used + new.shape[2]
    fits = room is not None and room.shape[2] >= end and used > 0
    fits = fits and (torch.is_inference_mode_enabled() or not room.is_inference())
    if not (fits and old.data_ptr() == room.data_ptr() and old.stride() == room.stride() and len(old) == len(room)):
        room = new.new_empty((*new.shape[:2], end + max(end // 4, 256), new.shape[3]))
        if used:
            room[:, :, :used] = old
    room[:, :, used:end] = new
    return room, room[:, :, :end]


class GrowingCache(DynamicCache):
    """DynamicCache, but that a token costs what it is large, not what the cache is.

    model.generate(..., past_key_values=libattn.transformers.GrowingCache(config=model.config))
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for layer in self.layers:
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer  # with what it may hold already
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = GrowingLayer


def register(name: str = "libattn") -> None:
    """Adds the attention implementation `name` to transformers."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
