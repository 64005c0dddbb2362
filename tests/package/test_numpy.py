"""The same functions on numpy arrays give the same bits as on torch tensors; anything with __dlpack__ will do."""

import libattn
import ml_dtypes
import numpy as np
import pytest
import torch
from libattn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_


@pytest.fixture
def arrays():
    source = np.random.default_rng(0)
    return [source.standard_normal(shape, dtype=np.float32) for shape in ((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))]


def to_torch(x):
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x.copy())
    return x


def same(function, *args, **options):
    found = function(*args, **options)
    wanted = function(*map(to_torch, args), **{name: to_torch(x) for name, x in options.items()})
    for a, b in zip(*((x if isinstance(x, (tuple, list)) else [x]) for x in (found, wanted))):
        assert type(a) is np.ndarray
        np.testing.assert_array_equal(a, b.numpy())


def ints(*values):
    return np.array(values, dtype=np.int32)


def test_every_function(arrays):
    q, k, v = arrays
    probs = {"return_attn_probs": True}
    same(libattn.flash_attn_func, q, k, v, causal=True, window_size=(3, 1), softcap=4.0, **probs)
    same(libattn.flash_attn_func, q, k, v, alibi_slopes=np.ones(4, np.float32), learnable_sink=np.ones(4), **probs)
    same(libattn.flash_attn_func, q, k, v, attn_bias=np.ones((1, 1, 7, 9), np.float32))
    same(libattn.flash_attn_kvpacked_func, q, np.stack([k, v], 2))
    same(libattn.flash_attn_qkvpacked_func, np.stack([q, q, q], 2))
    same(libattn.flash_attn_qkvpacked_func, np.concatenate([q, q], 2), num_heads_q=4)
    cu_q, cu_k = ints(0, 3, 7), ints(0, 9, 9)
    same(libattn.flash_attn_varlen_func, q[0], k[0], v[0], cu_q, cu_k, 4, 9, causal=True, **probs)
    same(libattn.flash_attn_varlen_kvpacked_func, q[0], np.stack([k[0], v[0]], 1), cu_q, cu_k, 4, 9)
    same(libattn.flash_attn_varlen_qkvpacked_func, np.stack([q[0]] * 3, 1), cu_q, 4)
    same(libattn.flash_attn_with_kvcache, q, k, v, cache_seqlens=ints(9, 2), return_softmax_lse=True)
    same(libattn.flashmask_attention, q, k, v, np.full((2, 1, 9, 1), 4, np.int32), causal=True, return_softmax_lse=True)
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    same(libattn.scaled_dot_product_attention, *heads_first, np.tri(7, 9, dtype=bool), enable_gqa=True)
    same(libattn.flash_attn_combine, np.stack([q, q]), np.ones((2, 2, 7, 4), np.float32))
    cos, sin = np.cos(k[0, :, 0, :3]), np.sin(k[0, :, 0, :3])
    same(apply_rotary_emb, q, cos, sin, seqlen_offsets=2)
    same(apply_rotary_emb, q, cos, sin, True, seqlen_offsets=ints(0, 2))
    same(apply_rotary_emb, q[0], cos, sin, cu_seqlens=ints(0, 3, 7), max_seqlen=4)


def test_append_and_rotate_in_place(arrays):
    q, k, v = arrays
    caches = [np.zeros((2, 12, 2, 8), np.float32) for _ in range(2)]
    tensors = [torch.zeros(2, 12, 2, 8) for _ in range(2)]
    new = k[:, :3], v[:, :3]
    out = libattn.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=4, causal=True)
    wanted = libattn.flash_attn_with_kvcache(to_torch(q), *tensors, *map(to_torch, new), cache_seqlens=4, causal=True)
    for a, b in zip((out, *caches), (wanted, *tensors)):
        np.testing.assert_array_equal(a, b.numpy())
    caches[0].flags.writeable = False
    with pytest.raises(ValueError, match="k_cache: want a writable"):
        libattn.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=4)
    cos, sin = np.cos(k[0, :, 0, :3]), np.sin(k[0, :, 0, :3])
    for function, shape in ((apply_rotary_emb_qkv_, (2, 7, 3, 4, 8)), (apply_rotary_emb_kv_, (2, 7, 2, 4, 8))):
        x = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
        y = to_torch(x)
        assert function(x, cos, sin) is x
        np.testing.assert_array_equal(x, function(y, to_torch(cos), to_torch(sin)).numpy())


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_dtypes(arrays, dtype):
    q, k, v = (x.astype(dtype) for x in arrays)
    out = libattn.flash_attn_func(q, k, v)
    assert out.dtype == dtype
    wide = libattn.flash_attn_func(*(x.astype(np.float64) for x in (q, k, v)))
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), wide, rtol=2 * eps, atol=2 * eps)


def test_fp8(arrays):
    q, k, v = (x.astype(ml_dtypes.float8_e4m3fn) for x in arrays)
    assert libattn.flash_attn_func(q, k, v).dtype == ml_dtypes.bfloat16


def test_strides(arrays):
    q, k, v = arrays
    wanted = libattn.flash_attn_func(q[:, ::-2], k, np.broadcast_to(v[:1], v.shape))
    found = libattn.flash_attn_func(q[:, ::-2].copy(), k, np.broadcast_to(v[:1], v.shape).copy())
    np.testing.assert_array_equal(wanted, found)
    across = np.asfortranarray(q)
    np.testing.assert_array_equal(libattn.flash_attn_func(across, across, across), libattn.flash_attn_func(q, q, q))


class Foreign:
    """An array of some other library, known by __dlpack__ alone."""

    def __init__(self, x):
        self.x, self.shape = x, x.shape

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_dlpack(arrays):
    out = libattn.flash_attn_func(*map(Foreign, arrays), causal=True)
    np.testing.assert_array_equal(out, libattn.flash_attn_func(*arrays, causal=True))


def test_dropout_follows_numpy_seed(arrays):
    draws = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        draws.append(libattn.flash_attn_func(*arrays, dropout_p=0.5))
    assert np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])


def test_errors(arrays):
    q, k, v = arrays
    with pytest.raises(TypeError, match="q: want a floating-point dtype"):
        libattn.flash_attn_func(q.astype(np.complex64), k, v)
    with pytest.raises(ValueError, match=r"v.shape=\(2, 8, 2, 8\)"):
        libattn.flash_attn_func(q, k, v[:, :8])
    with pytest.raises(TypeError, match="alibi_slopes: want float32, not float64"):
        libattn.flash_attn_func(q, k, v, alibi_slopes=np.ones(4))
    with pytest.raises(TypeError, match="str"):
        libattn.flash_attn_func("q", k, v)
