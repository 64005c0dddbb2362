"""Attention on torch tensors without gradients, for callers who come once for each layer and token.

What depends on shapes, strides and dtypes alone (the problem, the plan, the strides in the buffers, every check) is found out
once and kept; a call fills in addresses and runs. torch's dispatcher is left out, which costs more than all the rest: so this is
for plain tensors outside of compilation, autograd and tracing, and forward() returns None for whatever else it is given.
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
    o: tuple  # shape and dtype of the output
    tables: tuple  # names of the tables that there are


_ready: dict[tuple, Ready] = {}
_TABLES = ("used_kv", "leftpad", "sink")  # those that are taken here
_ARRAYS = slice(0, Options._fields.index("max_q"))
_NUMBERS = slice(Options._fields.index("max_q"), None)


def _is_plain(*tensors) -> bool:
    return (
        not torch.jit.is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and not torch.is_autocast_enabled(tensors[0].device.type)
    )


def _look(x):
    return x.shape, x.stride(), x.dtype, x.device


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
    return Ready(call.problem, bytes(call.buffers), plan, (o_shape, o_dtype), tables)


def forward(q, k, v, options: Options):
    """o of attention; None where this is not the way."""
    if torch.compiler.is_compiling():  # first of all: the rest is not for its eyes
        return None
    tables = tuple(name for name in _TABLES if getattr(options, name) is not None)
    given = [getattr(options, name) for name in tables]
    arrays = sum(x is not None for x in options[_ARRAYS])
    if arrays > len(tables) or options.dropout or not _is_plain(q, k, v, *given):
        return None
    key = (_look(q), _look(k), _look(v), *map(_look, given), tables, options[_NUMBERS], _lib.float32_flags())
    ready = _ready.get(key)
    if ready is None:
        ready = _make(q, k, v, options, tables)
        if ready is None:
            return None
        if len(_ready) >= _MOST:
            _ready.clear()
        _ready[key] = ready
    place = _torch.place(q)
    b = _lib.Buffers.from_buffer_copy(ready.buffers)
    o = torch.empty(ready.o[0], dtype=ready.o[1], device=q.device)
    b.q.data, b.k.data, b.v.data, b.o.data = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
    for name, x in zip(tables, given):
        setattr(b, name, x.data_ptr())
    if ready.plan is None:
        _lib.check(_lib.library.attn_forward(place.context, ctypes.byref(ready.problem), ctypes.byref(b), place.stream))
        return o
    space = place.scratch(ready.plan.workspace) if ready.plan.workspace else None  # alive until the call is queued
    b.workspace, b.workspace_size = space.data_ptr() if space is not None else None, ready.plan.workspace
    _lib.check(_lib.library.attn_run(ready.plan.handle, ctypes.byref(b), place.stream))
    return o
