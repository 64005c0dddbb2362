"""The C library: where it is, its structs as ctypes sees them, its errors as exceptions, and one context per backend.

The structs mirror include/attn.h field by field; tests/package/test_abi.py holds them against a C compiler's view.
"""

from __future__ import annotations

import ctypes as c
import functools
import os
import pathlib
import sys
import threading

OK, INVALID, UNSUPPORTED, NO_MEMORY, SYSTEM, DEVICE = range(6)
BACKENDS = {"auto": 0, "ref": 1, "cpu": 2, "cuda": 3}
FORWARD, BACKWARD, KV_APPEND = range(3)
F32, F16, BF16, F64, E4M3, E5M2, I8 = range(1, 8)

(
    CAUSAL,
    WINDOW,
    SCALE,
    ALIBI,
    BIAS,
    SINK,
    VARLEN_Q,
    VARLEN_KV,
    USED_Q,
    USED_KV,
    LEFTPAD,
    BATCH_INDEX,
    APPEND,
    VARLEN_NEW,
    ROTARY,
    ROTARY_INTERLEAVED,
    ROTARY_POS,
    DESCALE,
    PRECISE,
    UNORDERED,
    PRECISE_FEW,
    DESCALE_PAGES,
) = (1 << n for n in range(22))


class Struct(c.Structure):
    """A struct that begins with its size, set here as the header wants it."""

    def __init__(self, **fields):
        super().__init__(**fields)
        if self._fields_[0][0] == "size":
            self.size = c.sizeof(self)


class Config(Struct):
    _fields_ = [
        ("size", c.c_size_t),
        ("backend", c.c_int),
        ("threads", c.c_int32),
        ("alloc", c.c_void_p),
        ("free", c.c_void_p),
        ("alloc_user", c.c_void_p),
        ("parallel_for", c.c_void_p),
        ("parallel_user", c.c_void_p),
    ]


class Problem(Struct):
    _fields_ = [
        ("size", c.c_size_t),
        ("op", c.c_int),
        ("dtype", c.c_int),
        ("kv_dtype", c.c_int),
        ("out_dtype", c.c_int),
        ("bias_dtype", c.c_int),
        ("rotary_dtype", c.c_int),
        ("flags", c.c_uint32),
        ("batch", c.c_int32),
        ("heads_q", c.c_int32),
        ("heads_kv", c.c_int32),
        ("dim_qk", c.c_int32),
        ("dim_v", c.c_int32),
        ("max_q", c.c_int32),
        ("max_kv", c.c_int32),
        ("total_q", c.c_int64),
        ("total_kv", c.c_int64),
        ("window_left", c.c_int32),
        ("window_right", c.c_int32),
        ("flashmask_vectors", c.c_int32),
        ("flashmask_heads", c.c_int32),
        ("page_size", c.c_int32),
        ("num_pages", c.c_int32),
        ("cache_batch", c.c_int32),
        ("max_new", c.c_int32),
        ("total_new", c.c_int64),
        ("rotary_dim", c.c_int32),
        ("rotary_len", c.c_int32),
        ("scale", c.c_double),
        ("softcap", c.c_double),
        ("dropout", c.c_double),
    ]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("stride", c.c_int64 * 3)]


class Matrix(c.Structure):
    _fields_ = [("data", c.c_void_p), ("stride", c.c_int64 * 4)]


class Buffers(Struct):
    _fields_ = [
        ("size", c.c_size_t),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("lse", c.c_void_p),
        ("d_o", Tensor),
        ("d_lse", c.c_void_p),
        ("d_q", Tensor),
        ("d_k", Tensor),
        ("d_v", Tensor),
        ("bias", Matrix),
        ("d_bias", Matrix),
        ("probs", Matrix),
        ("alibi", c.c_void_p),
        ("alibi_stride", c.c_int64),
        ("sink", c.c_void_p),
        ("d_sink", c.c_void_p),
        ("cu_q", c.c_void_p),
        ("cu_kv", c.c_void_p),
        ("used_q", c.c_void_p),
        ("used_kv", c.c_void_p),
        ("leftpad", c.c_void_p),
        ("batch_index", c.c_void_p),
        ("page_table", c.c_void_p),
        ("page_table_stride", c.c_int64),
        ("flashmask", c.c_void_p),
        ("k_new", Tensor),
        ("v_new", Tensor),
        ("cu_new", c.c_void_p),
        ("rotary_cos", c.c_void_p),
        ("rotary_sin", c.c_void_p),
        ("rotary_pos", c.c_void_p),
        ("q_descale", c.c_void_p),
        ("k_descale", c.c_void_p),
        ("v_descale", c.c_void_p),
        ("descale_stride", c.c_int64 * 2),
        ("seed", c.c_uint64),
        ("offset", c.c_uint64),
        ("workspace", c.c_void_p),
        ("workspace_size", c.c_size_t),
    ]


class MergeArgs(Struct):
    _fields_ = [
        ("size", c.c_size_t),
        ("dtype", c.c_int),
        ("out_dtype", c.c_int),
        ("parts", c.c_int32),
        ("batch", c.c_int32),
        ("rows", c.c_int32),
        ("heads", c.c_int32),
        ("dim", c.c_int32),
        ("o_parts", c.POINTER(Tensor)),
        ("lse_parts", c.POINTER(c.c_void_p)),
        ("o", Tensor),
        ("lse", c.c_void_p),
    ]


class RotaryArgs(Struct):
    _fields_ = [
        ("size", c.c_size_t),
        ("dtype", c.c_int),
        ("rotary_dtype", c.c_int),
        ("batch", c.c_int32),
        ("rows", c.c_int32),
        ("heads", c.c_int32),
        ("dim", c.c_int32),
        ("rotary_dim", c.c_int32),
        ("rotary_len", c.c_int32),
        ("interleaved", c.c_int32),
        ("inverse", c.c_int32),
        ("x", Tensor),
        ("y", Tensor),
        ("cos", c.c_void_p),
        ("sin", c.c_void_p),
        ("pos", c.c_void_p),
        ("cu", c.c_void_p),
        ("total", c.c_int64),
    ]


class KernelInfo(Struct):
    _fields_ = [
        ("name", c.c_char_p),
        ("backend", c.c_char_p),
        ("needs", c.c_char_p),
        ("op", c.c_int),
        ("rows", c.c_int32),
        ("cols", c.c_int32),
        ("available", c.c_int32),
    ]


def find_library() -> pathlib.Path:
    """The shared library: LIBATTN_LIBRARY if it is set, else that of the package, else that of a checkout's build/."""
    name = "libattn.dylib" if sys.platform == "darwin" else "libattn.so"
    here = pathlib.Path(__file__).resolve().parent
    wish = os.environ.get("LIBATTN_LIBRARY")
    places = [pathlib.Path(wish)] if wish else [here / name, here.parent.parent / "build" / name]
    for place in places:
        if place.is_file():
            return place
    raise ImportError(
        f"libattn: the shared library is missing; looked for {' and '.join(map(str, places))}. "
        "Install the package with `pip install .` in a checkout, build the library there with `make`, "
        "or set LIBATTN_LIBRARY to the path of a libattn that you have built."
    )


def load_library() -> c.CDLL:
    path = find_library()
    try:
        library = c.CDLL(str(path))
        for name, result, arguments in (
            ("attn_status_name", c.c_char_p, [c.c_int]),
            ("attn_error_detail", c.c_char_p, []),
            ("attn_version", c.c_int, []),
            ("attn_cpu_features", c.c_char_p, []),
            ("attn_context_create", c.c_int, [c.POINTER(c.c_void_p), c.POINTER(Config)]),
            ("attn_context_backend", c.c_char_p, [c.c_void_p]),
            ("attn_context_threads", c.c_int32, [c.c_void_p]),
            ("attn_device_status", c.c_int, [c.c_void_p]),
            ("attn_plan_create", c.c_int, [c.POINTER(c.c_void_p), c.c_void_p, c.POINTER(Problem)]),
            ("attn_plan_destroy", None, [c.c_void_p]),
            ("attn_plan_workspace", c.c_size_t, [c.c_void_p]),
            ("attn_plan_kernel", c.c_char_p, [c.c_void_p]),
            ("attn_run", c.c_int, [c.c_void_p, c.POINTER(Buffers), c.c_void_p]),
            ("attn_forward", c.c_int, [c.c_void_p, c.POINTER(Problem), c.POINTER(Buffers), c.c_void_p]),
            ("attn_backward", c.c_int, [c.c_void_p, c.POINTER(Problem), c.POINTER(Buffers), c.c_void_p]),
            ("attn_merge", c.c_int, [c.c_void_p, c.POINTER(MergeArgs), c.c_void_p]),
            ("attn_rotary", c.c_int, [c.c_void_p, c.POINTER(RotaryArgs), c.c_void_p]),
            ("attn_kernel_get", c.c_int, [c.c_int32, c.POINTER(KernelInfo), c.c_size_t]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ImportError(f"libattn: {path} is not a shared library of this package: {error}") from error
    return library


library = load_library()


def check(status: int) -> None:
    """Turns a status into an exception that carries the library's own words."""
    if status == OK:
        return
    detail = library.attn_error_detail().decode()
    kind = {INVALID: ValueError, UNSUPPORTED: NotImplementedError, NO_MEMORY: MemoryError}.get(status, RuntimeError)
    raise kind(f"{library.attn_status_name(status).decode()}: {detail}")


def version() -> str:
    number = library.attn_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


_lock = threading.Lock()
_contexts: dict[tuple[str, int], c.c_void_p] = {}
_choice = {"backend": "cpu", "threads": 0, "float32": "mixed"}


def set_backend(name: str) -> None:
    """Which backend works on host memory from now on: "cpu", or "ref" (the naive algorithm in double, slow)."""
    if name not in ("cpu", "ref"):
        raise ValueError(f'backend={name!r}: want "cpu" or "ref"')
    _choice["backend"] = name


def set_num_threads(threads: int) -> None:
    """Threads of the cpu backend; 0: the environment's ATTN_NUM_THREADS, else every CPU this process may use."""
    _choice["threads"] = int(threads)


def set_float32_precision(precision: str) -> None:
    """What float32 is computed in from now on: "mixed" (the default), "single" or "double".

    mixed: on a CPU float32, and again in double what weighs few keys, where float32 would not be as exact; how long that takes
    depends on the data. single: float32 everywhere. double: with results rounded once. Every row of a result is as exact as
    float32 can hold it, on a CPU in the backward too, and a call takes about three times as long there; on a GPU, where the
    kernels for it have no tensor cores, far longer, and gradients are those of the rounded softmax_lse.
    """
    if precision not in ("mixed", "single", "double"):
        raise ValueError(f'precision={precision!r}: want "mixed", "single" or "double"')
    _choice["float32"] = precision


_FLOAT32 = {"mixed": PRECISE_FEW, "single": 0, "double": PRECISE}


def float32_flags() -> int:
    return _FLOAT32[_choice["float32"]]


def context_of(backend: str, threads: int = 0) -> c.c_void_p:
    """One context for each choice, kept for the life of the process."""
    key = (backend, threads)
    made = _contexts.get(key)  # mostly it is there, and nobody takes it away
    if made is not None:
        return made
    with _lock:
        if key not in _contexts:
            made = c.c_void_p()
            config = Config(backend=BACKENDS[key[0]], threads=key[1])
            check(library.attn_context_create(c.byref(made), c.byref(config)))
            _contexts[key] = made
        return _contexts[key]


def host_context() -> c.c_void_p:
    """The context for host memory."""
    return context_of(_choice["backend"], _choice["threads"])


def cuda_context() -> c.c_void_p:
    """The context for the memory of NVIDIA GPUs, all of them; NotImplementedError where there are none."""
    return context_of("cuda")


def device_status() -> None:
    """Raises ValueError if lengths, pages or indices in GPU memory were out of range since the last time.

    Kernels bring such values into range and make a note of it, since the host never reads them. New keys whose slot,
    own page, used_kv, cu_kv or cu_new is out of range are written nowhere. It does not wait for the GPU: what runs
    still is not yet in it. torch.cuda.synchronize() comes first.
    """
    check(library.attn_device_status(cuda_context()))


class Plan:
    """A plan of the C library: how a problem will be computed, and the workspace that it wants."""

    def __init__(self, context: c.c_void_p, problem: Problem):
        self.handle = c.c_void_p()
        check(library.attn_plan_create(c.byref(self.handle), context, c.byref(problem)))
        self.workspace = library.attn_plan_workspace(self.handle)

    @property
    def kernel(self) -> str:
        return library.attn_plan_kernel(self.handle).decode()

    def __del__(self):
        if library is not None:  # which it is when the interpreter ends
            library.attn_plan_destroy(self.handle)


@functools.lru_cache(maxsize=256)
def cuda_plan(problem: bytes) -> Plan:
    """The plan of a problem, given as its bytes, on the GPU. Who runs it holds it, whatever the cache forgets."""
    return Plan(cuda_context(), Problem.from_buffer_copy(problem))


def kernels() -> list[KernelInfo]:
    """Every row of the kernel table."""
    rows = []
    while True:
        info = KernelInfo()
        if library.attn_kernel_get(len(rows), c.byref(info), c.sizeof(info)) != OK:
            return rows
        rows.append(info)
