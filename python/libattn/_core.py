"""From arrays to one call of the C library, for any framework.

A framework is a small object (see _numpy.py and _torch.py) with
    view(x)               address, shape, strides in elements and dtype code of an array, as a View
    rows(x)               x, or a copy of it when its last dim is not contiguous
    contiguous(x)         x, or a contiguous copy
    broadcast(x, shape)   x seen with that shape
    empty(like, shape, code)   a new array where `like` lives
    place(x)              where x lives, as a Place
    itemsize(x)           bytes of an element
What is checked here is what C cannot see: shapes that must agree, dtypes of tables. The rest is the library's to say.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional, Sequence

from . import _lib
from ._lib import Buffers, Problem, check, library

INT32 = -1  # dtype code of tables, which C knows by their place
CODE_NAMES = {INT32: "int32", _lib.F32: "float32", _lib.F64: "float64"}  # of tables


class View(NamedTuple):
    address: int
    shape: tuple
    strides: tuple  # in elements
    code: int  # ATTN_F32, ..., INT32, or 0 for what is neither


class Place(NamedTuple):
    """Where a call runs."""

    context: Any  # of the C library
    stream: Optional[int] = None
    scratch: Any = None  # bytes -> an array of so many there; None: the C library sees to its workspace itself


class Options(NamedTuple):
    """Everything but q, k, v. The order is that of the torch operators' arguments."""

    bias: Any = None  # (batch or 1, heads_q or 1, max_q or 1, max_kv or 1)
    sink: Any = None  # (heads_q,) float32
    alibi: Any = None  # (heads_q,) or (batch, heads_q) float32
    cu_q: Any = None  # (batch + 1,) int32: q is packed
    cu_kv: Any = None  # (batch + 1,) int32: k and v are packed
    used_q: Any = None  # (batch,) int32
    used_kv: Any = None  # (batch,) int32
    leftpad: Any = None  # (batch,) int32
    batch_index: Any = None  # (batch,) int32
    page_table: Any = None  # (slots, pages) int32: k and v are (num_pages, page_size, heads_kv, dim)
    flashmask: Any = None  # (batch, 1 or heads_kv, max_kv, vectors) int32
    q_descale: Any = None  # broadcasts to (batch, heads_kv), float32
    k_descale: Any = None
    v_descale: Any = None
    seed: Any = None  # (2,) int64 in host memory: seed and offset of the dropout generator
    max_q: int = 0  # with cu_q
    max_kv: int = 0  # with cu_kv
    scale: Optional[float] = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout: float = 0.0
    descale_pages: bool = False  # k_descale, v_descale broadcast to (num_pages, heads_kv)


class Append(NamedTuple):
    """What flash_attn_with_kvcache writes into the cache before attention."""

    k: Any  # (batch, new, heads_kv, dim), with cu (total, heads_kv, dim)
    v: Any
    cu: Any = None  # (batch + 1,) int32
    max_new: int = 0  # with cu
    rotary_cos: Any = None  # (positions, rotary_dim / 2)
    rotary_sin: Any = None
    rotary_pos: Any = None  # (batch,) int32
    interleaved: bool = True


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def expect_shape(name: str, view: View, *shapes: Sequence[int]) -> View:
    require(
        any(tuple(view.shape) == tuple(shape) for shape in shapes),
        f"{name}.shape={tuple(view.shape)}: want {' or '.join(str(tuple(shape)) for shape in shapes)}",
    )
    return view


def expect_layout(name: str, view: View, cu) -> None:
    """Packed where there are offsets, a batch without."""
    want = "(batch, rows, heads, dim)" if cu is None else "(total, heads, dim), packed by its offsets"
    require(len(view.shape) == (4 if cu is None else 3), f"{name}.shape={tuple(view.shape)}: want {want}")


def tensor(view: View) -> _lib.Tensor:
    """(batch, rows, heads, dim), or packed (rows, heads, dim)."""
    strides = view.strides if len(view.shape) == 4 else (0, *view.strides)
    return _lib.Tensor(view.address, (ctypes.c_int64 * 3)(*strides[:3]))


def matrix(view: View) -> _lib.Matrix:
    """Four dims, of which those of size one are broadcast."""
    strides = (0 if size == 1 else stride for size, stride in zip(view.shape, view.strides))
    return _lib.Matrix(view.address, (ctypes.c_int64 * 4)(*strides))


class Call:
    """One problem and its buffers, filled step by step. Holds a reference to every array that C will see."""

    def __init__(self, framework, op: int, q, k, v, options: Options):
        self.framework, self.options, self.kept = framework, options, []
        self.problem, self.buffers = Problem(op=op), Buffers()
        self._sizes(self.rows("q", q), self.rows("k", k), self.rows("v", v))
        self._tables()
        self._numbers()

    def keep(self, x) -> View:
        self.kept.append(x)
        return self.framework.view(x)

    def rows(self, name: str, x) -> View:
        view = self.keep(self.framework.rows(x))
        if view.code <= 0:
            raise TypeError(f"{name}: want a floating-point dtype of at most 64 bits, or int8, not {x.dtype}")
        return view

    def table(self, name: str, x, *shapes: Sequence[int], code: int = INT32) -> View:
        view = self.keep(self.framework.contiguous(x))
        if view.code != code:
            raise TypeError(f"{name}: want {CODE_NAMES[code]}, not {x.dtype}")
        return expect_shape(name, view, *shapes)

    def flag(self, bit: int) -> None:
        self.problem.flags |= bit

    def _sizes(self, q: View, k: View, v: View) -> None:
        p, b, o = self.problem, self.buffers, self.options
        expect_layout("q", q, o.cu_q)
        expect_layout("k", k, o.cu_kv)
        p.dtype, p.kv_dtype = q.code, k.code
        p.heads_q, p.dim_qk = q.shape[-2:]
        p.heads_kv, p.dim_v = k.shape[-2], v.shape[-1]
        expect_shape("k", k, (*k.shape[:-1], p.dim_qk))
        expect_shape("v", v, (*k.shape[:-1], p.dim_v))
        if v.code != k.code:
            raise TypeError("v: want the dtype of k")
        if o.cu_q is None:
            p.batch, p.max_q = q.shape[:2]
        else:
            p.batch, p.max_q, p.total_q = self._offsets("cu_seqlens_q", "cu_q", o.cu_q, _lib.VARLEN_Q), o.max_q, q.shape[0]
        if o.page_table is not None:
            table = self.framework.view(o.page_table).shape
            require(len(table) == 2, f"page_table.shape={tuple(table)}: want (batch, pages)")
            p.num_pages, p.page_size = k.shape[:2]
            slots, p.max_kv = table[0], table[1] * p.page_size
        elif o.cu_kv is not None:
            batch = self._offsets("cu_seqlens_k", "cu_kv", o.cu_kv, _lib.VARLEN_KV)
            require(batch == p.batch, f"cu_seqlens_k.shape=({batch + 1},): want ({p.batch + 1},), as of the queries")
            slots, p.max_kv, p.total_kv = batch, o.max_kv, k.shape[0]
        else:
            slots, p.max_kv = k.shape[:2]
            require(
                o.batch_index is not None or slots == p.batch, f"k.shape={tuple(k.shape)}: want batch {p.batch}, as of q"
            )
        if o.batch_index is not None:
            p.cache_batch = slots
        b.q, b.k, b.v = tensor(q), tensor(k), tensor(v)

    def _offsets(self, name: str, field: str, x, bit: int) -> int:
        size = self.framework.view(x).shape
        require(len(size) == 1 and size[0] > 0, f"{name}.shape={tuple(size)}: want (batch + 1,)")
        setattr(self.buffers, field, self.table(name, x, size).address)
        self.flag(bit)
        return size[0] - 1

    def _tables(self) -> None:
        p, b, o = self.problem, self.buffers, self.options
        for name, bit in (
            ("used_q", _lib.USED_Q),
            ("used_kv", _lib.USED_KV),
            ("leftpad", _lib.LEFTPAD),
            ("batch_index", _lib.BATCH_INDEX),
        ):
            x = getattr(o, name)
            if x is not None:
                setattr(b, name, self.table(name, x, (p.batch,)).address)
                self.flag(bit)
        if o.page_table is not None:
            pages = self.framework.view(o.page_table).shape[1]
            table = self.table("page_table", o.page_table, (p.cache_batch or p.batch, pages))
            b.page_table, b.page_table_stride = table.address, table.shape[1]
        if o.flashmask is not None:
            shape = self.framework.view(o.flashmask).shape
            vectors = shape[-1] if shape else 0
            mask = self.table(
                "startend_row_indices",
                o.flashmask,
                (p.batch, 1, p.max_kv, vectors),
                (p.batch, p.heads_kv, p.max_kv, vectors),
            )
            b.flashmask, p.flashmask_vectors, p.flashmask_heads = mask.address, vectors, mask.shape[1]
        if o.alibi is not None:
            alibi = self.table("alibi_slopes", o.alibi, (p.heads_q,), (p.batch, p.heads_q), code=_lib.F32)
            b.alibi, b.alibi_stride = alibi.address, p.heads_q if len(alibi.shape) == 2 else 0
            self.flag(_lib.ALIBI)
        if o.sink is not None:
            b.sink = self.table("learnable_sink", o.sink, (p.heads_q,), code=_lib.F32).address
            self.flag(_lib.SINK)
        if o.bias is not None:
            self._bias(self.keep(o.bias))
        require(not o.descale_pages or p.page_size, "descale_pages: wants a page_table")
        for name in ("q_descale", "k_descale", "v_descale"):
            x = getattr(o, name)
            if x is not None:
                of_pages = o.descale_pages and name != "q_descale"
                shape = (p.num_pages if of_pages else p.batch, p.heads_kv)
                setattr(b, name, self.table(name, self.framework.broadcast(x, shape), shape, code=_lib.F32).address)
                b.descale_stride[:] = (p.heads_kv, 1)
                self.flag(_lib.DESCALE)
        if o.descale_pages:
            self.flag(_lib.DESCALE_PAGES)

    def _bias(self, bias: View) -> None:
        p = self.problem
        full = (p.batch, p.heads_q, p.max_q, p.max_kv)
        fits = len(bias.shape) == 4 and all(have in (1, want) for have, want in zip(bias.shape, full))
        require(fits, f"bias.shape={tuple(bias.shape)}: want {full}, or 1 where it is broadcast")
        if bias.code <= 0:
            raise TypeError(f"bias: want a floating-point dtype, not {self.options.bias.dtype}")
        p.bias_dtype, self.buffers.bias = bias.code, matrix(bias)
        self.flag(_lib.BIAS)

    def _numbers(self) -> None:
        p, o = self.problem, self.options
        if o.causal:
            self.flag(_lib.CAUSAL)
        if o.window_left >= 0 or o.window_right >= 0:
            p.window_left, p.window_right = max(o.window_left, -1), max(o.window_right, -1)
            self.flag(_lib.WINDOW)
        if o.scale is not None:
            p.scale = o.scale
            self.flag(_lib.SCALE)
        if p.dtype == _lib.F32:
            self.flag(_lib.float32_flags())
        p.softcap, p.dropout = max(o.softcap, 0.0), o.dropout
        if o.seed is not None:
            self.buffers.seed, self.buffers.offset = o.seed.tolist()

    def append(self, new: Append) -> None:
        p, b = self.problem, self.buffers
        k, v = self.rows("k", new.k), self.rows("v", new.v)
        expect_layout("k", k, new.cu)
        expect_shape("k", k, (*k.shape[:-2], p.heads_kv, p.dim_qk))
        expect_shape("v", v, (*k.shape[:-2], p.heads_kv, p.dim_v))
        if k.code != p.dtype or v.code != p.dtype:
            raise TypeError("k, v: want the dtype of q")
        if new.cu is None:
            require(k.shape[0] == p.batch, f"k.shape={tuple(k.shape)}: want batch {p.batch}, as of q")
            p.max_new = k.shape[1]
        else:
            self._offsets("cu_seqlens_k_new", "cu_new", new.cu, _lib.VARLEN_NEW)
            p.max_new, p.total_new = new.max_new, k.shape[0]
        b.k_new, b.v_new = tensor(k), tensor(v)
        self.flag(_lib.APPEND)
        if new.rotary_cos is not None:
            require(new.rotary_sin is not None, "rotary_sin=None: rotary_cos wants it")
            cos, sin = (self.keep(self.framework.contiguous(x)) for x in (new.rotary_cos, new.rotary_sin))
            expect_shape("rotary_sin", sin, cos.shape)
            p.rotary_len, p.rotary_dim, p.rotary_dtype = cos.shape[0], 2 * cos.shape[1], cos.code
            b.rotary_cos, b.rotary_sin = cos.address, sin.address
            self.flag(_lib.ROTARY | (_lib.ROTARY_INTERLEAVED if new.interleaved else 0))
            if new.rotary_pos is not None:
                b.rotary_pos = self.table("rotary_seqlens", new.rotary_pos, (p.batch,)).address
                self.flag(_lib.ROTARY_POS)

    def run(self, function) -> None:
        place = self.framework.place(self.kept[0])
        if place.scratch is None:
            check(function(place.context, ctypes.byref(self.problem), ctypes.byref(self.buffers), place.stream))
            return
        plan = _lib.cuda_plan(bytes(self.problem))
        self.buffers.workspace_size = plan.workspace
        self.buffers.workspace = self.keep(place.scratch(plan.workspace)).address if plan.workspace else None
        check(library.attn_run(plan.handle, ctypes.byref(self.buffers), place.stream))


def output_code(code: int) -> int:
    return _lib.BF16 if code in (_lib.E4M3, _lib.E5M2) else code


def lse_code(code: int) -> int:
    return _lib.F64 if code == _lib.F64 else _lib.F32


def lse_shape(q_shape: Sequence[int]) -> tuple:
    """(batch, heads, rows), packed (heads, total)."""
    return (*q_shape[:-3], q_shape[-2], q_shape[-3])


def forward(framework, q, k, v, options: Options, want_probs: bool = False, append: Optional[Append] = None):
    """(o, lse, probs); probs is None unless wanted. With append, writes into k and v first."""
    call = Call(framework, _lib.FORWARD, q, k, v, options)
    p, b = call.problem, call.buffers
    if append is not None:
        for name, cache, kept in (("k_cache", k, call.kept[1]), ("v_cache", v, call.kept[2])):
            require(kept is cache, f"{name}: its last dim must be contiguous, since it is written")
        call.append(append)
    o = framework.empty(q, (*q.shape[:-1], p.dim_v), output_code(p.dtype))
    lse = framework.empty(q, lse_shape(q.shape), lse_code(p.dtype))
    b.o, b.lse = tensor(call.keep(o)), call.keep(lse).address
    probs = None
    if want_probs:
        probs = framework.empty(q, (p.batch, p.heads_q, p.max_q, p.max_kv), lse_code(p.dtype))
        view = call.keep(probs)
        b.probs = _lib.Matrix(view.address, (ctypes.c_int64 * 4)(*view.strides))
    call.run(library.attn_forward)
    return o, lse, probs


def backward(framework, d_o, d_lse, q, k, v, o, lse, options: Options, wanted: Sequence[bool]):
    """Gradients of q, k, v, bias, sink, each None unless wanted."""
    call = Call(framework, _lib.BACKWARD, q, k, v, options)
    p, b = call.problem, call.buffers
    b.o = tensor(expect_shape("o", call.rows("o", o), (*q.shape[:-1], p.dim_v)))
    b.d_o = tensor(expect_shape("d_o", call.rows("d_o", d_o), o.shape))
    b.lse = call.table("lse", lse, lse_shape(q.shape), code=lse_code(p.dtype)).address
    if d_lse is not None:
        b.d_lse = call.table("d_lse", d_lse, lse_shape(q.shape), code=lse_code(p.dtype)).address

    def gradient(x, want):
        return framework.empty(x, x.shape, framework.view(x).code) if want else None

    d_q, d_k, d_v, d_bias, d_sink = results = [
        gradient(x, want) for x, want in zip((q, k, v, options.bias, options.sink), wanted)
    ]
    for name, x in (("d_q", d_q), ("d_k", d_k), ("d_v", d_v)):
        if x is not None:
            setattr(b, name, tensor(call.keep(x)))
    if d_bias is not None:
        b.d_bias = matrix(call.keep(d_bias))
    if d_sink is not None:
        b.d_sink = call.keep(d_sink).address
    call.run(library.attn_backward)
    return results


def merge(framework, o_parts, lse_parts, out_code: int):
    """From (parts, batch, rows, heads, dim) and (parts, batch, heads, rows) to o and lse without the parts."""
    kept = framework.rows(o_parts), framework.contiguous(lse_parts)
    o, lse = map(framework.view, kept)
    require(len(o.shape) == 5, f"out_partial.shape={tuple(o.shape)}: want (parts, batch, rows, heads, dim)")
    parts, batch, rows, heads, dim = o.shape
    expect_shape("lse_partial", lse, (parts, batch, heads, rows))
    size = 8 if lse.code == _lib.F64 else 4
    item = framework.itemsize(kept[0])
    out = framework.empty(o_parts, (batch, rows, heads, dim), out_code)
    out_lse = framework.empty(o_parts, (batch, heads, rows), lse.code)
    tensors = (_lib.Tensor * parts)(
        *(tensor(View(o.address + n * o.strides[0] * item, o.shape[1:], o.strides[1:], o.code)) for n in range(parts))
    )
    addresses = (ctypes.c_void_p * parts)(*(lse.address + n * batch * heads * rows * size for n in range(parts)))
    args = _lib.MergeArgs(
        dtype=o.code,
        out_dtype=out_code,
        parts=parts,
        batch=batch,
        rows=rows,
        heads=heads,
        dim=dim,
        o_parts=tensors,
        lse_parts=addresses,
        o=tensor(framework.view(out)),
        lse=framework.view(out_lse).address,
    )
    place = framework.place(kept[0])
    check(library.attn_merge(place.context, ctypes.byref(args), place.stream))
    return out, out_lse


def rotary(framework, x, y, cos, sin, pos, cu, max_rows: int, interleaved: bool, inverse: bool) -> None:
    """Rotates x (batch, rows, heads, dim), or packed with cu, into y, which may be x itself."""
    tables = [framework.contiguous(t) if t is not None else None for t in (cos, sin, pos, cu)]
    x_view, y_view = framework.view(x), framework.view(y)
    expect_layout("x", x_view, cu)
    require(x_view.shape[-1] == 1 or x_view.strides[-1] == y_view.strides[-1] == 1, "x: its last dim must be contiguous")
    views = [framework.view(t) if t is not None else None for t in tables]
    expect_shape("sin", views[1], views[0].shape)
    require(len(views[0].shape) == 2, f"cos.shape={tuple(views[0].shape)}: want (positions, rotary_dim / 2)")
    batch, rows = x_view.shape[:2] if cu is None else (views[3].shape[0] - 1, max_rows)
    for name, view, size in (("seqlen_offsets", views[2], batch), ("cu_seqlens", views[3], batch + 1)):
        if view is not None:
            expect_shape(name, view, (size,))
            if view.code != INT32:
                raise TypeError(f"{name}: want int32")
    args = _lib.RotaryArgs(
        dtype=x_view.code,
        rotary_dtype=views[0].code,
        batch=batch,
        rows=rows,
        heads=x_view.shape[-2],
        dim=x_view.shape[-1],
        rotary_len=views[0].shape[0],
        rotary_dim=2 * views[0].shape[1],
        interleaved=interleaved,
        inverse=inverse,
        x=tensor(x_view),
        y=tensor(y_view),
        cos=views[0].address,
        sin=views[1].address,
        pos=views[2] and views[2].address,
        cu=views[3] and views[3].address,
        total=x_view.shape[0] if cu is not None else 0,
    )
    place = framework.place(x)
    check(library.attn_rotary(place.context, ctypes.byref(args), place.stream))
