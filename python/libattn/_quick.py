"""Attention on torch tensors without gradients, for callers who come once for each layer and token.

What depends on shapes, strides and dtypes alone (the problem, the plan, the strides in the buffers, every check) is found
out once and kept; a call fills in addresses and runs. torch's dispatcher is left out, which costs more than all the rest:
so this is for plain tensors outside of compilation, autograd and tracing, and forward() returns None for whatever else
it is given.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional

import torch

from . import _core, _lib, _torch
from ._core import Options

_MOST = 512  # kinds of calls that are kept: a cache that grows by a token has a new one for each


class Ready(NamedTuple):
    problem: Any  # _lib.Problem, which nobody changes
    buffers: bytes  # of _lib.Buffers: all but the addresses
    plan: Optional[_lib.Plan]  # on a GPU
    o_shape: tuple
    o_dtype: torch.dtype


_ready: dict[tuple, Ready] = {}
_TABLES = ("used_kv", "leftpad", "sink")  # those that are taken here
_TYPES = (torch.Tensor, torch.nn.Parameter)
_ARRAYS = Options._fields[: Options._fields.index("max_q")]
_NUMBERS = slice(Options._fields.index("max_q"), None)


def _is_plain(tensors) -> bool:
    if torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack():
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:
        if type(x) not in _TYPES or (grad and x.requires_grad):
            return False
    return not torch.is_autocast_enabled(tensors[0].device.type)


def _make(q, k, v, options: Options, tables: tuple) -> Optional[Ready]:
    call = _core.Call(_torch, _lib.FORWARD, q, k, v, options)
    given = (q, k, v, *(getattr(options, name) for name in tables))
    if any(all(kept is not x for x in given) for kept in call.kept):
        return None  # something had to be copied
    _torch.same_device(*given)
    o_shape = (*q.shape[:-1], call.problem.dim_v)
    o_dtype = _torch.DTYPES[_core.output_code(call.problem.dtype)]
    call.buffers.o = _core.tensor(_torch.view(torch.empty(o_shape, dtype=o_dtype, device="meta")))
    plan = _lib.cuda_plan(bytes(call.problem)) if q.is_cuda else None
    return Ready(call.problem, bytes(call.buffers), plan, o_shape, o_dtype)


def forward(q, k, v, options: Options, heads_first: bool = False):
    """o of attention; None where this is not the way. heads_first: q, k and v are (batch, heads, rows, dim); o never is."""
    if torch.compiler.is_compiling():  # first of all: the rest is not for its eyes
        return None
    given, tables = [q, k, v], []
    for name, x in zip(_ARRAYS, options):
        if x is None:
            continue
        if name not in _TABLES:
            return None
        given.append(x)
        tables.append(name)
    if options.dropout or not _is_plain(given):
        return None
    key = [heads_first, options[_NUMBERS], _lib.float32_flags(), *tables]
    for x in given:
        key += (x.shape, x.stride(), x.dtype, x.device)
    key = tuple(key)
    ready = _ready.get(key)
    if ready is None:
        seen = [x.transpose(1, 2) for x in given[:3]] if heads_first else given[:3]
        ready = _make(*seen, options, tables)
        if ready is None:
            return None
        if len(_ready) >= _MOST:
            _ready.clear()
        _ready[key] = ready
    place = _torch.place(q)
    b = _lib.Buffers.from_buffer_copy(ready.buffers)
    o = torch.empty(ready.o_shape, dtype=ready.o_dtype, device=q.device)
    b.q.data, b.k.data, b.v.data, b.o.data = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
    for name, x in zip(tables, given[3:]):
        setattr(b, name, x.data_ptr())
    if ready.plan is None:
        _lib.check(_lib.library.attn_forward(place.context, ctypes.byref(ready.problem), ctypes.byref(b), place.stream))
        return o
    space = place.scratch(ready.plan.workspace) if ready.plan.workspace else None  # alive until the call is queued
    b.workspace, b.workspace_size = space.data_ptr() if space is not None else None, ready.plan.workspace
    _lib.check(_lib.library.attn_run(ready.plan.handle, ctypes.byref(b), place.stream))
    return o
