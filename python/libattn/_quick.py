"""Attention on torch tensors without gradients, for callers who come once for each layer and token.

What depends on shapes, strides and dtypes alone (the problem, the plan, the strides in the buffers, every check) is found
out once and kept; a call fills in addresses and runs. A cache that grows has other shapes for each token, but no more than
its number of keys and its strides are new then: the rest is taken from the token before. torch's dispatcher is left out,
which costs more than all the rest: so this is for plain tensors outside of compilation, autograd and tracing, and forward()
returns None for whatever else it is given.

Nothing that a call changes is kept but a workspace, one to each thread and device, and that for the default stream alone:
there whatever comes later runs later, no graph is captured, and no other stream ever has its name.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, NamedTuple, Optional

import torch
from torch.compiler import is_compiling

from . import _core, _lib, _torch
from ._core import Options

_MOST_SPACE = 16 << 20  # bytes of a workspace that is kept
_MOST = 512  # kinds of calls that are kept: a cache that grows by a token has a new one for each

# Buffers as 64-bit words, which are filled in far faster than the fields of structs in a struct.
_Words = ctypes.c_uint64 * (ctypes.sizeof(_lib.Buffers) // 8)


def _word(name: str) -> int:
    return getattr(_lib.Buffers, name).offset // 8


_TABLES = {name: _word(name) for name in ("used_kv", "leftpad", "sink")}  # those that are taken here
_Q, _K, _V, _O = map(_word, "qkvo")
_WORKSPACE, _WORKSPACE_SIZE = _word("workspace"), _word("workspace_size")


def _function(name: str, arguments: int):
    """A function of the library that takes whatever has an address."""
    function = _lib.library[name]  # a new one each time, whose types are its own
    function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p] * arguments
    return function


_run, _forward = _function("attn_run", 3), _function("attn_forward", 4)


class Ready(NamedTuple):
    """A kind of calls. o and the workspace are made like `o` and `scratch`, which have the sizes, but no memory."""

    problem: Any  # _lib.Problem, which nobody changes
    words: bytes  # of _Words: all but the addresses
    plan: Optional[_lib.Plan]  # on a GPU
    device: int  # there
    o: torch.Tensor
    scratch: Optional[torch.Tensor]


class _Spaces(threading.local):
    """A thread's workspaces. Two threads that shared one could queue the two halves of their calls by turns."""

    def __init__(self):
        self.kept: dict[int, torch.Tensor] = {}  # by device


_spaces = _Spaces()
_lock = threading.Lock()  # for whoever adds to these
_ready: dict[tuple, Ready] = {}  # by everything
_alike: dict[tuple, Ready] = {}  # by everything but the number of keys and their strides: one of these kinds
_ones: dict[tuple, torch.Tensor] = {}  # by device and dtype: one element
_TYPES = (torch.Tensor, torch.nn.Parameter)
_FIRST_NUMBER = Options._fields.index("max_q")
_ARRAYS = Options._fields[:_FIRST_NUMBER]
_DROPOUT = Options._fields.index("dropout")

# What a call asks torch for, by the shortest way there is.
_is_tracing, _is_grad_enabled, _empty_like = torch._C._is_tracing, torch.is_grad_enabled, torch.empty_like
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_is_any_autocast = torch._C._is_any_autocast_enabled
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None: a torch without CUDA


def _like(shape: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor for empty_like, which takes less time than empty, whose elements are all the same one."""
    if (device, dtype) not in _ones:
        _ones[device, dtype] = torch.empty(1, dtype=dtype, device=device)
    one = _ones[device, dtype]
    return one.expand(shape) if 0 not in shape else one.new_empty(shape)


def _finish(problem, words: bytes, o: torch.Tensor) -> Ready:
    device = o.device
    if device.type == "cpu":
        return Ready(problem, words, None, -1, o, None)
    plan = _lib.cuda_plan(bytes(problem))
    filled = _Words.from_buffer_copy(words)
    filled[_WORKSPACE_SIZE] = plan.workspace
    scratch = _like((plan.workspace,), torch.uint8, device) if plan.workspace else None
    return Ready(problem, bytes(filled), plan, device.index, o, scratch)


def _make(q, k, v, options: Options, tables: list) -> Optional[Ready]:
    call = _core.Call(_torch, _lib.FORWARD, q, k, v, options)
    given = (q, k, v, *(getattr(options, name) for name in tables))
    if any(all(kept is not x for x in given) for kept in call.kept):
        return None  # something had to be copied
    _torch.same_device(*given)
    _torch.place(q)  # which raises where there is no backend
    o_dtype = _torch.DTYPES[_core.output_code(call.problem.dtype)]
    o = _like((*q.shape[:-1], call.problem.dim_v), o_dtype, q.device)
    call.buffers.o = _core.tensor(_torch.view(torch.empty(o.shape, dtype=o_dtype, device="meta")))
    return _finish(call.problem, bytes(call.buffers), o)


def _with_keys(old: Ready, k, v, heads_first: bool) -> Ready:
    """The same with other keys: as many in v as in k, and rows that need no copy."""
    problem, words = _lib.Problem.from_buffer_copy(old.problem), _Words.from_buffer_copy(old.words)
    row, head = (2, 1) if heads_first else (1, 2)
    problem.max_kv = k.shape[row]
    for at, x in ((_K, k), (_V, v)):
        strides = x.stride()
        words[at + 1], words[at + 2], words[at + 3] = strides[0], strides[row], strides[head]
    return _finish(problem, bytes(words), old.o)


def _workspace(ready: Ready, stream: int) -> torch.Tensor:
    """Bytes that are the call's own until it is over. The allocator gives them to nobody else on this stream before."""
    size = ready.plan.workspace
    if stream or size > _MOST_SPACE:
        return _empty_like(ready.scratch)
    kept = _spaces.kept
    space = kept.get(ready.device)
    if space is None or len(space) < size:
        space = kept[ready.device] = _empty_like(ready.scratch)
    return space


def _add(kept: dict, key: tuple, ready: Ready) -> None:
    """The oldest goes, if there are too many. Who is about to run it holds it."""
    with _lock:
        while len(kept) >= _MOST:
            del kept[next(iter(kept))]
        kept[key] = ready


def _find(key: tuple, q, k, v, options: Options, heads_first: bool, tables: list) -> Optional[Ready]:
    """What is kept under no key yet. Whoever else is making the same makes no difference."""
    row = 2 if heads_first else 1
    less = None
    if len(k.shape) == len(v.shape) == 4 and k.shape[row] == v.shape[row] and k.stride(3) == v.stride(3) == 1:
        shapes = [x.shape[:row] + x.shape[row + 1 :] for x in (k, v)]
        less = (*key[:_KEYS], *shapes, *key[_KEYS + 4 :])
        old = _alike.get(less)
        if old is not None:
            ready = _with_keys(old, k, v, heads_first)
            _add(_ready, key, ready)
            return ready
    seen = [x.transpose(1, 2) for x in (q, k, v)] if heads_first else (q, k, v)
    ready = _make(*seen, options, tables)
    if ready is not None:
        _add(_ready, key, ready)
        if less is not None:
            _add(_alike, less, ready)
    return ready


_KEYS = 5  # where shapes and strides of k and v are in a key


def forward(q, k, v, options: Options, heads_first: bool = False):
    """o of attention; None where this is not the way. heads_first: q, k and v are (batch, heads, rows, dim); o never is."""
    if is_compiling():  # first of all: the rest is not for its eyes
        return None
    tables = None
    for x in options[:_FIRST_NUMBER]:
        if x is not None:
            tables = [name for name, x in zip(_ARRAYS, options) if x is not None]
            break
    if options[_DROPOUT] or _is_tracing() or _modes() or _transforms():
        return None
    if type(q) not in _TYPES or type(k) not in _TYPES or type(v) not in _TYPES:
        return None
    if _torch.is_lazy(q) or _torch.is_lazy(k) or _torch.is_lazy(v):
        return None
    if _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    device = q.device
    if _is_any_autocast() and torch.is_autocast_enabled(device.type):
        return None
    key = (
        heads_first,
        options[_FIRST_NUMBER:],
        _lib.float32_flags(),
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.shape,
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        device,
        k.device,
        v.device,
    )
    if tables is not None:
        for name in tables:
            x = getattr(options, name)
            if name not in _TABLES or type(x) not in _TYPES or _torch.is_lazy(x) or (x.requires_grad and _is_grad_enabled()):
                return None
            key += (name, x.shape, x.stride(), x.dtype, x.device)
    ready = _ready.get(key)
    if ready is None:
        ready = _find(key, q, k, v, options, heads_first, tables or [])
        if ready is None:
            return None
    o = _empty_like(ready.o)
    words = _Words.from_buffer_copy(ready.words)
    words[_Q], words[_K], words[_V], words[_O] = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
    if tables is not None:
        for name in tables:
            words[_TABLES[name]] = getattr(options, name).data_ptr()
    plan = ready.plan
    if plan is None:
        status = _forward(_lib.host_context(), ctypes.byref(ready.problem), words, None)
    else:
        stream = _stream_of(ready.device)
        if ready.scratch is not None:
            space = _workspace(ready, stream)  # alive until the call is queued
            words[_WORKSPACE] = space.data_ptr()
        status = _run(plan.handle, words, stream)
    if status:
        _lib.check(status)
    return o
