"""The functions of the package on numpy arrays; there are no gradients here.

Other objects with __dlpack__ in host memory are seen as numpy arrays, without a copy; results are numpy arrays.
"""

from __future__ import annotations

import sys

import numpy as np

from . import _core, _lib
from ._core import Append, Options, Place, View

CODES = {
    np.dtype(np.float32): _lib.F32,
    np.dtype(np.float16): _lib.F16,
    np.dtype(np.float64): _lib.F64,
    np.dtype(np.int8): _lib.I8,
    np.dtype(np.int32): _core.INT32,
}
try:
    import ml_dtypes
except ImportError:  # bf16 and fp8 arrays cannot exist then
    pass
else:
    CODES[np.dtype(ml_dtypes.bfloat16)] = _lib.BF16
    CODES[np.dtype(ml_dtypes.float8_e4m3fn)] = _lib.E4M3
    CODES[np.dtype(ml_dtypes.float8_e5m2)] = _lib.E5M2
DTYPES = {code: dtype for dtype, code in CODES.items()}


def view(x) -> View:
    if any(stride % x.itemsize for stride in x.strides):
        raise ValueError(f"strides={x.strides}: want multiples of the {x.itemsize} bytes of {x.dtype}")
    return View(x.ctypes.data, x.shape, tuple(stride // x.itemsize for stride in x.strides), CODES.get(x.dtype, 0))


def rows(x):
    return x if x.shape[-1:] == (1,) or x.strides[-1:] == (x.itemsize,) else np.ascontiguousarray(x)


def contiguous(x):
    return np.ascontiguousarray(x)


def broadcast(x, shape):
    return np.broadcast_to(x, shape)


def empty(like, shape, code):
    if code not in DTYPES:
        raise TypeError(
            "the output is bfloat16, and numpy knows it only through the package ml_dtypes: pip install ml_dtypes"
        )
    return np.empty(shape, DTYPES[code])


def itemsize(x) -> int:
    return x.itemsize


def place(x):
    return Place(_lib.host_context())


_this = sys.modules[__name__]


def asarray(x):
    """Arrays of any library as numpy's; what is no array, a number for instance, stays as it is."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x
    if hasattr(x, "__dlpack__"):
        return np.from_dlpack(x)
    return np.asarray(x) if hasattr(x, "__array__") else x


def float32(x):
    return None if x is None else np.asarray(asarray(x), dtype=np.float32)


def int32(x):
    """Lengths and positions as a table, whatever integers they are."""
    return np.asarray(x, dtype=np.int32)


def full(like, size, value):
    return np.full((size,), value, dtype=np.int32)


def new_seed(like):
    """Seed and offset of the dropout generator, from numpy's global generator: it follows np.random.seed."""
    return np.random.randint(0, 2**63 - 1, size=2, dtype=np.int64)


def unbind(x, axis):
    return tuple(np.moveaxis(x, axis, 0))


def bias_of_mask(mask, like):
    """True: may see."""
    return np.where(mask, 0, -np.inf).astype(like.dtype) if mask.dtype == bool else mask


def attention(q, k, v, options: Options, want_probs: bool = False):
    q, k, v = map(asarray, (q, k, v))
    return _core.forward(_this, q, k, v, Options(*map(asarray, options)), want_probs)


def attention_with_append(q, k_cache, v_cache, options: Options, append: Append):
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(cache, np.ndarray) or not cache.flags.writeable:
            raise ValueError(f"{name}: want a writable numpy array, since new keys and values are written into it")
    options, append = Options(*map(asarray, options)), Append(*map(asarray, append))
    return _core.forward(_this, asarray(q), k_cache, v_cache, options, append=append)[:2]


def combine(o_parts, lse_parts, dtype):
    return _core.merge(_this, o_parts, lse_parts, CODES[np.dtype(dtype)])


def rotary(x, cos, sin, pos, cu, max_rows, interleaved, inplace):
    x = asarray(x)
    y = x if inplace else x.copy() if cu is not None else np.empty_like(x)
    cos, sin, pos, cu = map(asarray, (cos, sin, pos, cu))
    _core.rotary(_this, x, y, cos, sin, pos, cu, max_rows, interleaved, False)
    return y
