"""The functions of the package on torch tensors: five operators in torch's dispatcher, each with a fake kernel.

    libattn::forward    q, k, v and options to o, lse, probs; differentiable
    libattn::backward   the gradient of it; an operator of its own, so that compiled graphs contain it
    libattn::kvcache    append to the cache, then attention; changes the cache, has no gradient
    libattn::combine    merges partial results; differentiable
    libattn::rotary, libattn::rotary_   rotary embedding, out of place (differentiable) and in place

Their schemas are spelled out here because `Options` gives most of the arguments of three of them.
"""

from __future__ import annotations

import sys
from typing import Optional

import torch
from torch.library import custom_op

from . import _core, _lib
from ._core import Append, Options, Place, View

CODES = {
    torch.float32: _lib.F32,
    torch.float16: _lib.F16,
    torch.bfloat16: _lib.BF16,
    torch.float64: _lib.F64,
    torch.float8_e4m3fn: _lib.E4M3,
    torch.float8_e5m2: _lib.E5M2,
    torch.int8: _lib.I8,
    torch.int32: _core.INT32,
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
DEVICES = ("cpu", "cuda")  # whose memory there is a backend for

# ---- the framework, as _core wants it ----


def view(x) -> View:
    return View(x.data_ptr(), tuple(x.shape), x.stride(), CODES.get(x.dtype, 0))


def rows(x):
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def contiguous(x):
    return x.contiguous()


def broadcast(x, shape):
    return x.expand(shape)


def empty(like, shape, code):
    return torch.empty(shape, dtype=DTYPES[code], device=like.device)


def itemsize(x) -> int:
    return x.element_size()


def place(x):
    """The context for the tensor's own device, and its current stream.

    A workspace comes from torch's allocator, which gives its memory to nobody else on that stream before the call is over,
    and which knows what to do inside a CUDA graph.
    """
    if x.device.type not in DEVICES:
        raise NotImplementedError(f"device={x.device}: libattn works on tensors of {' and '.join(DEVICES)}")
    if x.device.type == "cpu":
        return Place(_lib.host_context())
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return Place(_lib.cuda_context(), stream, lambda size: torch.empty(size, dtype=torch.uint8, device=x.device))


_this = sys.modules[__name__]


def same_device(*tensors) -> None:
    """Tables and tensors of one call live together; place() looks only at the first."""
    devices = {x.device for x in tensors if isinstance(x, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"tensors are on {' and '.join(sorted(map(str, devices)))}: want them on one device")


# ---- forward and backward ----

_TENSORS = Options._fields[: Options._fields.index("max_q")]
_OPTIONS = (
    ", ".join(f"Tensor? {name}" for name in _TENSORS)
    + ", SymInt max_q, SymInt max_kv, float? scale, bool causal, SymInt window_left, SymInt window_right"
    + ", float softcap, float dropout, bool descale_pages"
)


def _or_empty(x, like):
    """Operators return tensors only; an empty one stands for what was not asked for."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x


@custom_op(
    "libattn::forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool want_probs) -> (Tensor, Tensor, Tensor)",
)
def _forward(q, k, v, *rest):
    return _run_forward(q, k, v, *rest)


def _run_forward(q, k, v, *rest):
    *options, want_probs = rest
    options = Options(*options)
    same_device(q, k, v, *options._replace(seed=None))  # which C takes by value
    o, lse, probs = _core.forward(_this, q, k, v, options, want_probs)
    return o, lse, _or_empty(probs, q)


def _fake_outputs(q, v):
    code = CODES[q.dtype]
    o = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=DTYPES[_core.output_code(code)])
    return o, q.new_empty(_core.lse_shape(q.shape), dtype=DTYPES[_core.lse_code(code)])


@_forward.register_fake
def _(q, k, v, *rest):
    *options, want_probs = rest
    options = Options(*options)
    o, lse = _fake_outputs(q, v)
    if not want_probs:
        return o, lse, _or_empty(None, q)
    batch = q.shape[0] if options.cu_q is None else options.cu_q.shape[0] - 1
    max_q = q.shape[1] if options.cu_q is None else options.max_q
    if options.page_table is not None:
        max_kv = options.page_table.shape[1] * k.shape[1]
    else:
        max_kv = k.shape[1] if options.cu_kv is None else options.max_kv
    return o, lse, q.new_empty((batch, q.shape[-2], max_q, max_kv), dtype=lse.dtype)


@custom_op(
    "libattn::backward",
    mutates_args=(),
    schema=f"(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_OPTIONS}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(d_o, d_lse, q, k, v, o, lse, *rest):
    *options, wanted = rest
    found = _core.backward(_this, d_o, d_lse, q, k, v, o, lse, Options(*options), wanted)
    return tuple(_or_empty(x, q) for x in found)


@_backward.register_fake
def _(d_o, d_lse, q, k, v, o, lse, *rest):
    *options, wanted = rest
    options = Options(*options)
    inputs = (q, k, v, options.bias, options.sink)
    return tuple(x.new_empty(x.shape) if want else _or_empty(None, q) for x, want in zip(inputs, wanted))


def _forward_setup(ctx, inputs, output):
    q, k, v, *options, _ = inputs
    o, lse, probs = output
    tables, ctx.numbers = options[: len(_TENSORS)], options[len(_TENSORS) :]
    ctx.mark_non_differentiable(probs)
    ctx.save_for_backward(q, k, v, o, lse, *tables)


def _forward_gradient(ctx, d_o, d_lse, _):
    return _gradient(ctx, d_o, d_lse, *ctx.saved_tensors)


def _gradient(ctx, d_o, d_lse, q, k, v, o, lse, *tables):
    wanted = list(ctx.needs_input_grad[:5])
    found = torch.ops.libattn.backward(d_o, d_lse, q, k, v, o, lse, *tables, *ctx.numbers, wanted)
    return (*(x if want else None for x, want in zip(found, wanted)), *(None,) * (len(Options._fields) - 2 + 1))


_forward.register_autograd(_forward_gradient, setup_context=_forward_setup)


class _Eager(torch.autograd.Function):
    """The operator without torch's dispatcher, which takes longer than all the rest of a small call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _run_forward(*inputs)
        ctx.set_materialize_grads(False)
        _forward_setup(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, d_o, d_lse, _):
        if d_o is None and d_lse is None:
            return (None,) * (len(Options._fields) + 4)
        saved = q, k, v, o, lse, *tables = ctx.saved_tensors  # once: a checkpoint gives them out but once
        d_o = torch.zeros_like(o) if d_o is None else d_o
        if torch.is_grad_enabled() or not _is_eager(d_o, d_lse):  # a second derivative, which the operator refuses; vmap, ...
            return _gradient(ctx, d_o, d_lse, *saved)
        wanted = ctx.needs_input_grad[:5]
        found = _core.backward(_this, d_o, d_lse, q, k, v, o, lse, Options(*tables, *ctx.numbers), list(wanted))
        return (*found, *(None,) * (len(Options._fields) - 2 + 1))


_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by autograd's own vmap, which is no transform
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_eager(*tensors):
    """Do plain tensors come here, and nobody who looks on: no compiler, tracer, mode of the dispatcher or transform?"""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or _modes() or _transforms():
        return False
    return all(x is None or type(x) in _PLAIN and not x.is_meta and not is_lazy(x) and not _is_batched(x) for x in tensors)


def is_lazy(x):
    """Does its memory not hold what it is? A sign that waits, or zeros that are nowhere: the dispatcher makes them real."""
    return x.is_neg() or x._is_zerotensor()


def _no_gradient(name):
    def refuse(ctx, *_):
        raise NotImplementedError(f"libattn::{name} is not differentiable" + _WHY.get(name, ""))

    return refuse


_WHY = {"backward": ": attention has first derivatives here, no second ones"}
_backward.register_autograd(_no_gradient("backward"))

# ---- the cache ----


@custom_op(
    "libattn::kvcache",
    mutates_args=("k", "v"),
    schema=f"(Tensor q, Tensor(a!) k, Tensor(b!) v, {_OPTIONS}, Tensor k_new, Tensor v_new, Tensor? cu_new, SymInt max_new,"
    " Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_pos, bool interleaved) -> (Tensor, Tensor)",
)
def _kvcache(q, k, v, *rest):
    options, append = Options(*rest[: len(Options._fields)]), Append(*rest[len(Options._fields) :])
    same_device(q, k, v, *rest)
    return _core.forward(_this, q, k, v, options, append=append)[:2]


@_kvcache.register_fake
def _(q, k, v, *rest):
    return _fake_outputs(q, v)


# ---- merging and rotating ----


@custom_op(
    "libattn::combine", mutates_args=(), schema="(Tensor o_parts, Tensor lse_parts, ScalarType dtype) -> (Tensor, Tensor)"
)
def _combine(o_parts, lse_parts, dtype):
    same_device(o_parts, lse_parts)
    return _core.merge(_this, o_parts, lse_parts, CODES[dtype])


@_combine.register_fake
def _(o_parts, lse_parts, dtype):
    return o_parts.new_empty(o_parts.shape[1:], dtype=dtype), lse_parts.new_empty(lse_parts.shape[1:])


def _combine_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], *output)


def _combine_gradient(ctx, d_o, d_lse):
    """o = sum w_p o_p and d w_p / d lse_p = w_p (1 - w_p), with w_p = exp(lse_p - lse)."""
    o_parts, lse_parts, o, lse = ctx.saved_tensors
    weight = torch.where(lse_parts == -torch.inf, 0, torch.exp(lse_parts - lse))
    moved = ((o_parts.to(lse.dtype) - o.to(lse.dtype)) * d_o.to(lse.dtype)).sum(-1).transpose(-1, -2)
    d_o_parts = (weight.transpose(-1, -2)[..., None] * d_o).to(o_parts.dtype)
    return d_o_parts, torch.where(weight == 0, 0, weight * (moved + d_lse)), None


_combine.register_autograd(_combine_gradient, setup_context=_combine_setup)

_ROTARY = "Tensor cos, Tensor sin, Tensor? pos, Tensor? cu, SymInt max_rows, bool interleaved, bool inverse"


@custom_op("libattn::rotary", mutates_args=(), schema=f"(Tensor x, {_ROTARY}) -> Tensor")
def _rotary(x, cos, sin, pos, cu, max_rows, interleaved, inverse):
    same_device(x, cos, sin, pos, cu)
    x = rows(x)
    if cu is None:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:  # rows that no sequence covers stay as they are
        y = x.clone(memory_format=torch.contiguous_format)
    _core.rotary(_this, x, y, cos, sin, pos, cu, max_rows, interleaved, inverse)
    return y


@_rotary.register_fake
def _(x, *rest):
    return x.new_empty(x.shape)


def _rotary_setup(ctx, inputs, output):
    _, cos, sin, pos, cu, *ctx.numbers = inputs
    ctx.save_for_backward(cos, sin, pos, cu)


def _rotary_gradient(ctx, d_y):
    max_rows, interleaved, inverse = ctx.numbers
    return (torch.ops.libattn.rotary(d_y, *ctx.saved_tensors, max_rows, interleaved, not inverse), *(None,) * 7)


_rotary.register_autograd(_rotary_gradient, setup_context=_rotary_setup)


@custom_op("libattn::rotary_", mutates_args=("x",), schema=f"(Tensor(a!) x, {_ROTARY}) -> ()")
def _rotary_inplace(x, cos, sin, pos, cu, max_rows, interleaved, inverse):
    same_device(x, cos, sin, pos, cu)
    _core.rotary(_this, x, x, cos, sin, pos, cu, max_rows, interleaved, inverse)


@_rotary_inplace.register_fake
def _(*args):
    return None


# ---- what the interfaces call; _numpy.py has the same names ----


def asarray(x):
    return x


def float32(x):
    return None if x is None else x.to(torch.float32)


def int32(x):
    return x.to(torch.int32)


def full(like, size, value):
    return torch.full((size,), value, dtype=torch.int32, device=like.device)


def new_seed(like):
    """Seed and offset of the dropout generator, from torch's: it follows torch.manual_seed."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device="cpu")


def unbind(x, axis):
    return x.unbind(axis)  # its gradient is one stack


def bias_of_mask(mask, like):
    """True: may see."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _autocast(*tensors):
    """Under autocast attention is done in its dtype, as torch's own is; float64 and 8-bit dtypes are left alone."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x for x in tensors)


def attention(q, k, v, options: Options, want_probs: bool = False):
    q, k, v = _autocast(q, k, v)
    attend = _Eager.apply if _is_eager(q, k, v, *options[: len(_TENSORS)]) else torch.ops.libattn.forward
    o, lse, probs = attend(q, k, v, *options, want_probs)
    return o, lse, probs if want_probs else None


def attention_with_append(q, k_cache, v_cache, options: Options, append: Append):
    inputs = (q, k_cache, v_cache, *options, *append)
    return torch.ops.libattn.kvcache(
        *(x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs)
    )


def combine(o_parts, lse_parts, dtype: torch.dtype):
    return torch.ops.libattn.combine(o_parts, lse_parts, dtype)


def rotary(x, cos, sin, pos, cu, max_rows: int, interleaved: bool, inplace: bool) -> Optional[torch.Tensor]:
    if not inplace:
        return torch.ops.libattn.rotary(x, cos, sin, pos, cu, max_rows, interleaved, False)
    if torch.is_grad_enabled() and x.requires_grad:  # autograd follows a copy, not an operator that changes its argument
        return x.copy_(torch.ops.libattn.rotary(x, cos, sin, pos, cu, max_rows, interleaved, False))
    torch.ops.libattn.rotary_(x, cos, sin, pos, cu, max_rows, interleaved, False)
    return x
