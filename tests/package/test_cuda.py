"""CUDA tensors: every function against its own results on the CPU, streams, graphs, sizes that overflow 32 bits, errors.

Everything here is skipped where torch sees no GPU or the library was built without GPU kernels, unless LIBATTN_WANT_GPU is
set: then it is an error, so that a run that is meant for a GPU cannot pass without one.
"""

import ctypes
import functools
import os

import libattn
import pytest
import torch
from libattn import _lib
from libattn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_


def why_not():
    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    try:
        _lib.cuda_context()
    except NotImplementedError as reason:
        return str(reason)
    return None


if os.environ.get("LIBATTN_WANT_GPU") and why_not():
    raise RuntimeError(f"LIBATTN_WANT_GPU is set: {why_not()}")
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
GPU = "cuda"
# Both sides round results to the dtype; the GPU rounds probabilities to it, too, and float32 takes three TF32 products.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def status():
    """No test leaves a value on the device that had to be brought into range, unless it looks for that itself."""
    yield
    torch.cuda.synchronize()
    libattn.device_status()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def to_gpu(x):
    if isinstance(x, torch.Tensor):
        return x.to(GPU)
    return type(x)(map(to_gpu, x)) if isinstance(x, (list, tuple)) else x


def flat(x):
    return [y for part in x for y in flat(part)] if isinstance(x, (list, tuple)) else [x]


def compare(function, *args, dtype=torch.float32, **options):
    """The function on the CPU and on the GPU; floating-point arguments are of the dtype unless they are tables."""
    wanted = function(*args, **options)
    found = function(*map(to_gpu, args), **{name: to_gpu(x) for name, x in options.items()})
    for a, b in zip(flat(found), flat(wanted)):
        assert a.device.type == GPU and a.dtype == b.dtype and a.shape == b.shape
        close(a, b, dtype)
    return found


def close(found, wanted, dtype):
    size = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu().double(), wanted.double(), rtol=size, atol=size)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


# ---- every function, as on the CPU ----

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (17, 3)},
    "softcap": {"softcap": 5.0, "causal": True},
    "scale": {"softmax_scale": -0.3},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 192, 256, 320])
def test_flash_attn_func(dim, mask, dtype):
    q, k, v = normal(2, 75, 4, dim, dtype=dtype), normal(2, 133, 2, dim, dtype=dtype), normal(2, 133, 2, dim, dtype=dtype)
    compare(libattn.flash_attn_func, q, k, v, dtype=dtype, **MASKS[mask])


@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi_bias_sink_and_lse(dtype):
    q, k, v = (normal(2, 70, 4, 32, dtype=dtype) for _ in range(3))
    options = {
        "alibi_slopes": torch.rand(2, 4),
        "learnable_sink": torch.randn(4),
        "attn_bias": normal(1, 4, 70, 70, dtype=dtype),
    }
    lse = libattn.flash_attn_func(q, k, v, return_attn_probs=True, **options)[1]
    found = compare(libattn.flash_attn_func, q, k, v, dtype=dtype, return_attn_probs=True, **options)
    torch.testing.assert_close(found[1].cpu(), lse, rtol=1e-5, atol=1e-5)


def test_head_dims_of_their_own():
    for dim, dim_v in ((192, 128), (64, 128), (576, 512), (17, 5)):
        compare(libattn.flash_attn_func, normal(1, 40, 2, dim), normal(1, 50, 1, dim), normal(1, 50, 1, dim_v), causal=True)


def test_packed_arguments():
    compare(libattn.flash_attn_qkvpacked_func, normal(2, 33, 3, 4, 32), causal=True)
    compare(libattn.flash_attn_qkvpacked_func, normal(2, 33, 4 + 2 * 2, 32), num_heads_q=4)
    compare(libattn.flash_attn_kvpacked_func, normal(2, 9, 4, 32), normal(2, 33, 2, 2, 32))
    cu, cu_k = ints(0, 4, 9, 9, 30), ints(0, 8, 8, 20, 60)
    compare(libattn.flash_attn_varlen_qkvpacked_func, normal(30, 3, 2, 32), cu, 21, causal=True)
    compare(libattn.flash_attn_varlen_kvpacked_func, normal(30, 4, 32), normal(60, 2, 2, 32), cu, cu_k, 21, 40)


def test_varlen_used_lengths_and_pages():
    q, cu = normal(30, 4, 32), ints(0, 4, 9, 9, 30)
    k, v = normal(60, 2, 32), normal(60, 2, 32)
    options = {"seqused_q": ints(3, 5, 0, 20), "seqused_k": ints(7, 0, 12, 11), "causal": True}
    compare(libattn.flash_attn_varlen_func, q, k, v, cu, ints(0, 8, 8, 20, 60), 21, 40, return_attn_probs=True, **options)
    pages, table = normal(9, 16, 2, 32), torch.randperm(9, dtype=torch.int32)[:8].reshape(4, 2)
    compare(
        libattn.flash_attn_varlen_func, q, pages, pages, cu, None, 21, None, page_table=table, seqused_k=ints(7, 0, 32, 11)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_kvcache(rows, paged, dtype):
    shape = (14, 16, 2, 64) if paged else (4, 112, 2, 64)
    caches = [normal(*shape, dtype=dtype) for _ in range(2)]
    others = [x.to(GPU) for x in caches]
    q, new = normal(2, rows, 4, 64, dtype=dtype), normal(2, 2, rows, 2, 64, dtype=dtype)
    cos, sin = torch.randn(2, 200, 16).to(dtype).unbind()
    options = {
        "cache_seqlens": ints(90, 3),
        "cache_leftpad": ints(2, 0),
        "causal": True,
        "rotary_cos": cos,
        "rotary_sin": sin,
    }
    options["block_table" if paged else "cache_batch_idx"] = (
        torch.randperm(14, dtype=torch.int32).reshape(2, 7) if paged else ints(3, 1)
    )
    call = libattn.flash_attn_with_kvcache
    wanted = call(q, *caches, *new, return_softmax_lse=True, **options)
    found = call(q.to(GPU), *others, *new.to(GPU), return_softmax_lse=True, **{n: to_gpu(x) for n, x in options.items()})
    close(found[0], wanted[0], dtype)
    torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(others, caches))  # what is appended is the same bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shared_prefix(dtype):
    from test_kvcache import with_shared_prefix

    prefix, own = normal(2, 3000, 2, 64, dtype=dtype), normal(2, 21, 600, 2, 64, dtype=dtype)
    q, used = normal(21, 8, 64, dtype=dtype), ints(*(29 * n % 600 for n in range(21)))
    found = compare(with_shared_prefix, q, prefix, own, used, dtype=dtype)
    alone = with_shared_prefix(*map(to_gpu, (q[20:], prefix, own[:, 20:], used[20:])))
    assert torch.equal(found[20:], alone)


def test_flashmask_and_sdpa():
    q, k, v = normal(2, 60, 4, 32), normal(2, 60, 2, 32), normal(2, 60, 2, 32)
    for vectors, causal in ((1, True), (2, True), (2, False), (4, False)):
        mask = torch.randint(0, 61, (2, 2, 60, vectors), dtype=torch.int32)
        compare(libattn.flashmask_attention, q, k, v, mask, causal=causal, return_softmax_lse=True)
    q, k, v = (normal(2, 4, 33, 16) for _ in range(3))
    compare(libattn.scaled_dot_product_attention, q, k, v, is_causal=True)
    compare(libattn.scaled_dot_product_attention, q, k, v, torch.rand(33, 33) > 0.3)


def test_eight_bits():
    q = normal(2, 9, 4, 32, dtype=torch.bfloat16)
    scale = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        k, v = ((8 * torch.randn(2, 40, 2, 32)).round().to(dtype) for _ in range(2))
        compare(libattn.flash_attn_func, q, k, v, dtype=torch.bfloat16, k_descale=scale, v_descale=scale)
    eight = normal(2, 33, 4, 64).to(torch.float8_e4m3fn)
    compare(libattn.flash_attn_func, eight, eight, eight, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 3, 20])  # of 8 rows of a group at once, of more, and by another kernel
def test_factors_of_pages(rows):
    q, new = normal(2, rows, 8, 64, dtype=torch.bfloat16), normal(2, 2, rows, 2, 64, dtype=torch.bfloat16)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        caches = [(8 * torch.randn(60, 16, 2, 64)).round().to(dtype) for _ in range(2)]
        others = [x.to(GPU) for x in caches]
        options = {
            "block_table": torch.randperm(60, dtype=torch.int32).reshape(2, 30),
            "cache_seqlens": ints(401, 90),
            "k_descale": torch.rand(60, 2) / 8 + 0.01,
            "v_descale": torch.rand(60, 2) + 0.01,
        }
        call = functools.partial(libattn.flash_attn_with_kvcache, descale_pages=True, return_softmax_lse=True)
        wanted = call(q, *caches, *new, **options)
        found = call(q.to(GPU), *others, *new.to(GPU), **{n: to_gpu(x) for n, x in options.items()})
        close(found[0], wanted[0], torch.bfloat16)
        torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=1e-4, atol=1e-4)
        for a, b in zip(others, caches):  # what is appended is the same bits
            assert torch.equal(a.cpu().view(torch.int8), b.view(torch.int8))


def test_combine():
    o, lse = normal(3, 2, 9, 4, 32), torch.randn(3, 2, 9, 4)
    lse[1, 0] = -torch.inf
    compare(libattn.flash_attn_combine, o, lse)
    compare(libattn.flash_attn_combine, o[:, 0], lse[:, 0], out_dtype=torch.bfloat16, dtype=torch.bfloat16)


def test_rotary():
    x, (cos, sin) = normal(2, 9, 4, 32), torch.randn(2, 40, 12).unbind()
    for interleaved in (False, True):
        compare(apply_rotary_emb, x, cos, sin, interleaved, seqlen_offsets=ints(3, 20))
        compare(apply_rotary_emb, x[0], cos, sin, interleaved, cu_seqlens=ints(0, 4, 9), max_seqlen=5)
    for function, shape in ((apply_rotary_emb_qkv_, (2, 9, 3, 4, 32)), (apply_rotary_emb_kv_, (2, 9, 2, 4, 32))):
        host = normal(*shape)
        there = host.to(GPU)
        function(host, cos, sin)
        function(there, cos.to(GPU), sin.to(GPU))
        assert torch.equal(there.cpu(), host)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_drops_the_same(dtype):
    """Seeds come from torch's CPU generator, and what is dropped is a function of the seed alone."""
    q, k, v = (normal(2, 70, 4, 32, dtype=dtype) for _ in range(3))
    results = []
    for where in ("cpu", GPU):
        torch.manual_seed(7)
        results.append(libattn.flash_attn_func(*(x.to(where) for x in (q, k, v)), dropout_p=0.3, return_attn_probs=True))
    signs = [torch.signbit(probs).cpu() for _, _, probs in results]
    assert torch.equal(*signs) and 0.28 < signs[0].float().mean() < 0.32
    close(results[1][0], results[0][0], dtype)


def test_strided_and_odd_addresses():
    """Views are read in place, whatever their alignment."""
    wide = normal(2, 40, 4, 70, dtype=torch.float16).to(GPU)
    odd = wide[..., 1:65]
    assert odd.data_ptr() % 4 == 2
    found = libattn.flash_attn_func(odd, odd, odd, causal=True)
    wanted = libattn.flash_attn_func(*[odd.contiguous()] * 3, causal=True)
    assert torch.equal(found, wanted)
    turned = wide.transpose(1, 2)
    close(libattn.flash_attn_func(turned, turned, turned), libattn.flash_attn_func(*[turned.cpu()] * 3), torch.float16)


def test_nothing_to_do():
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8)):
        q = torch.randn(*shape, device=GPU)
        assert libattn.flash_attn_func(q, q, q).shape == shape
    assert not libattn.flash_attn_func(torch.randn(2, 5, 2, 8, device=GPU), *torch.randn(2, 2, 0, 2, 8, device=GPU)).any()


# ---- gradients ----


def gradients(function, inputs, where, weights, **options):
    """Of sum(result * weights), for results and weights in a list; by every input that is given."""
    inputs = [x.detach().to(where).requires_grad_() for x in inputs]
    options = {name: to_gpu(x) if where == GPU else x for name, x in options.items()}
    results = flat([function(*inputs, **options)])
    sum((x * w.to(where)).sum() for x, w in zip(results, weights)).backward()
    return [x.grad for x in inputs]


def compare_gradients(function, *inputs, dtype=torch.float32, results=1, **options):
    """On the CPU and on the GPU, with the same gradient of each result."""
    torch.manual_seed(5)
    with torch.no_grad():
        shapes = [x.shape for x in flat([function(*inputs, **options)])[:results]]
    weights = [normal(*shape, dtype=dtype) for shape in shapes]
    wanted = []
    for where in ("cpu", GPU):
        torch.manual_seed(6)  # of dropout
        wanted.append(gradients(function, inputs, where, weights, **options))
    for a, b in zip(*reversed(wanted)):
        assert a.device.type == GPU and a.dtype == b.dtype and a.shape == b.shape
        scale = max(1.0, b.double().abs().max().item())
        close(a.double() / scale, b.double() / scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 192, 256, 320])
def test_gradients(dim, mask, dtype):
    q, k, v = normal(2, 75, 4, dim, dtype=dtype), normal(2, 133, 2, dim, dtype=dtype), normal(2, 133, 2, dim, dtype=dtype)
    compare_gradients(libattn.flash_attn_func, q, k, v, dtype=dtype, **MASKS[mask])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_bias_sink_and_lse(dtype):
    q, k, v = (normal(2, 70, 4, 32, dtype=dtype) for _ in range(3))
    slopes = torch.rand(2, 4)

    def attention(q, k, v, bias, sink):
        out, lse, _ = libattn.flash_attn_func(
            q, k, v, attn_bias=bias, learnable_sink=sink, alibi_slopes=slopes.to(q.device), return_attn_probs=True
        )
        return out, lse

    for shape in ((1, 4, 70, 70), (2, 1, 1, 70), (1, 4, 1, 1)):
        bias = normal(*shape, dtype=dtype)
        compare_gradients(attention, q, k, v, bias, torch.randn(4), dtype=dtype, results=2)


def test_gradients_with_dropout_dims_and_flashmask():
    q, k, v = normal(2, 70, 4, 48), normal(2, 130, 2, 48), normal(2, 130, 2, 24)
    compare_gradients(libattn.flash_attn_func, q, k, v, dropout_p=0.3, causal=True)
    compare_gradients(libattn.flash_attn_func, normal(1, 40, 2, 576), normal(1, 50, 1, 576), normal(1, 50, 1, 512))


def test_gradients_of_packed_rows():
    cu, cu_k = ints(0, 4, 9, 9, 30), ints(0, 8, 8, 20, 60)

    def attention(q, k, v):
        where = q.device
        return libattn.flash_attn_varlen_func(
            q, k, v, cu.to(where), cu_k.to(where), 21, 40, causal=True, seqused_k=ints(7, 0, 12, 11).to(where)
        )

    for dtype in DTYPES:
        inputs = normal(33, 4, 32, dtype=dtype), normal(64, 2, 32, dtype=dtype), normal(64, 2, 32, dtype=dtype)
        compare_gradients(attention, *inputs, dtype=dtype)


def test_gradients_from_an_expanded_gradient():
    """d_o with strides of zero, as sum() gives it."""
    q, k, v = (torch.randn(2, 40, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    libattn.flash_attn_func(q, k, v).sum().backward()
    others = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = libattn.flash_attn_func(*others)
    out.backward(torch.ones_like(out))
    assert all(torch.equal(x.grad, y.grad) for x, y in zip((q, k, v), others))


def test_gradients_are_the_same_bits():
    """Again, with other work beside them, alone, and in a batch: GQA 16:2, a window."""
    q = torch.randn(3, 300, 16, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(3, 300, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weights = torch.randn_like(q)

    def step(q, k, v, weights):
        out = libattn.flash_attn_func(q, k, v, causal=True, window_size=(100, 0))
        return torch.autograd.grad(out, (q, k, v), weights)

    wanted, stream = step(q, k, v, weights), torch.cuda.Stream()
    for _ in range(30):
        with torch.cuda.stream(stream):
            torch.randn(1000, 1000, device=GPU) @ torch.randn(1000, 1000, device=GPU)
        assert all(map(torch.equal, step(q, k, v, weights), wanted))
    alone = step(*(x[1:2] for x in (q, k, v, weights)))
    assert all(torch.equal(x[0], y[1]) for x, y in zip(alone, wanted))


def test_gradients_in_a_graph_and_compiled():
    q, k, v = (torch.randn(2, 65, 4, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step(q, k, v):
        return torch.autograd.grad(libattn.flash_attn_func(q, k, v, causal=True).float().square().sum(), (q, k, v))

    wanted = step(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(q, k, v)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wanted))

    def loss(q, k, v):
        return libattn.flash_attn_func(q, k, v, causal=True).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(compiled(q, k, v), (q, k, v)), wanted))


def test_gradients_of_nothing():
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8)):
        q = torch.randn(*shape, device=GPU, requires_grad=True)
        libattn.flash_attn_func(q, q, q).sum().backward()
        assert q.grad.shape == shape
    q, k = torch.randn(2, 5, 2, 8, device=GPU, requires_grad=True), torch.randn(2, 0, 2, 8, device=GPU)
    libattn.flash_attn_func(q, k, k).sum().backward()
    assert not q.grad.any()


# ---- streams, graphs, threads ----


def test_streams():
    """Work goes to the current stream and waits for nobody: an input that is made late is still seen."""
    q, k, v = (torch.randn(1, 512, 8, 64, device=GPU) for _ in range(3))
    wanted = libattn.flash_attn_func(q, k, v)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            late = q.clone()
            found.append(libattn.flash_attn_func(late, k, v))
    assert not streams[0].query()  # nothing has waited for it
    torch.cuda.synchronize()
    assert all(torch.equal(x, wanted) for x in found)


def test_graph_with_lengths_that_change():
    """One capture, replayed with other lengths and other queries; decode is split over keys."""
    caches = torch.randn(2, 3, 2000, 2, 64, device=GPU, dtype=torch.bfloat16).unbind()
    q = torch.randn(3, 1, 8, 64, device=GPU, dtype=torch.bfloat16)
    lengths = ints(5, 2000, 700).to(GPU)

    def step():
        return libattn.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, return_softmax_lse=True)

    step()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for values in ((5, 2000, 700), (1, 0, 2000), (1999, 513, 512)):
        lengths.copy_(ints(*values))
        q.normal_()
        graph.replay()
        wanted = step()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]), values
        assert (lse == -torch.inf).all(-1).all(-1).tolist() == [n == 0 for n in values]


def test_without_the_dispatcher():
    """libattn._quick: the operator's bits, also from a graph, and with padding on the left."""
    from libattn import _quick, _torch
    from libattn._core import Options

    k, v = torch.randn(2, 3, 2000, 2, 64, device=GPU, dtype=torch.bfloat16).transpose(2, 3).contiguous().transpose(2, 3)
    q = torch.randn(3, 1, 8, 64, device=GPU, dtype=torch.bfloat16)
    lengths, begins = ints(2000, 700, 5).to(GPU), ints(0, 300, 4).to(GPU)
    options = Options(causal=True, used_kv=lengths, leftpad=begins)
    assert torch.equal(_quick.forward(q, k, v, options), _torch.attention(q, k, v, options)[0])
    assert torch.equal(_quick.forward(q, k, v, Options()), _torch.attention(q, k, v, Options())[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _quick.forward(q, k, v, options)
    for values in ((2000, 700, 5), (100, 301, 2000)):
        lengths.copy_(ints(*values))
        q.normal_()
        graph.replay()
        assert torch.equal(out, _torch.attention(q, k, v, options)[0]), values


def test_without_the_dispatcher_a_cache_grows():
    """On each device, on streams side by side that each have a workspace of their own, in memory that comes back."""
    from libattn import _quick, _torch
    from libattn._core import Options

    options = Options(causal=True)
    for device in range(torch.cuda.device_count()):
        there = {"device": f"cuda:{device}", "dtype": torch.bfloat16}
        q, rooms = torch.randn(3, 8, 1, 64, **there), torch.randn(2, 3, 2, 3000, 64, **there)
        streams = [torch.cuda.default_stream(device), *(torch.cuda.Stream(device) for _ in range(3))]
        results = []
        torch.cuda.synchronize(device)
        for keys in range(2500, 2540):
            with torch.cuda.stream(streams[keys % 4]):
                k, v = rooms[:, :, :, :keys]
                wanted = _torch.attention(*(x.transpose(1, 2) for x in (q, k, v)), options)[0]
                for _ in range(2):
                    results.append((wanted, _quick.forward(q, k, v, options, heads_first=True)))
                    k, v = k.contiguous(), v.contiguous()
        torch.cuda.synchronize(device)
        for wanted, found in results:
            assert found.device == q.device and torch.equal(found, wanted)


def test_graph_with_append_and_packed_rows():
    q, new = torch.randn(8, 4, 64, device=GPU), torch.randn(2, 8, 4, 64, device=GPU)
    caches, used, cu = torch.zeros(2, 2, 64, 4, 64, device=GPU), ints(0, 9).to(GPU), ints(0, 3, 8).to(GPU)
    options = {"cache_seqlens": used, "cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 8, "causal": True}

    def step(caches):
        return libattn.flash_attn_with_kvcache(q, *caches, *new, **options)

    step(caches.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(caches)
    for lengths, starts in (((0, 9), (0, 3, 8)), ((40, 1), (0, 8, 8)), ((2, 56), (0, 1, 8))):
        used.copy_(ints(*lengths))
        cu.copy_(ints(*starts))
        caches.normal_()
        others = caches.clone()
        graph.replay()
        assert torch.equal(out, step(others)) and torch.equal(caches, others)


def test_the_same_bits():
    """Again, alone, and in a batch."""
    q, k, v = (torch.randn(5, 200, 4, 64, device=GPU, dtype=torch.bfloat16) for _ in range(3))
    wanted = libattn.flash_attn_func(q, k, v, causal=True)
    for b in range(5):
        alone = libattn.flash_attn_func(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True)
        assert torch.equal(alone[0], wanted[b])
    assert all(torch.equal(libattn.flash_attn_func(q, k, v, causal=True), wanted) for _ in range(20))


def test_threads():
    from concurrent.futures import ThreadPoolExecutor

    inputs = [[torch.randn(1, 133, 2, 64, device=GPU) for _ in range(3)] for _ in range(16)]
    wanted = [libattn.flash_attn_func(*x) for x in inputs]
    torch.cuda.synchronize()

    def call(x):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            out = libattn.flash_attn_func(*x)
        stream.synchronize()
        return out

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, inputs))
    assert all(map(torch.equal, found, wanted))


def test_compile():
    q, k, v = (torch.randn(2, 33, 4, 64, device=GPU) for _ in range(3))

    def step(q, k, v):
        return libattn.flash_attn_func(q * 2, k, v, causal=True) + 1

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v), step(q, k, v))


def test_autocast():
    q, k, v = (torch.randn(2, 33, 4, 64, device=GPU) for _ in range(3))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = libattn.flash_attn_func(q, k, v)
    assert torch.equal(out, libattn.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16()))


# ---- sizes ----


def reference(q, k, v):
    """Attention in float64 of one (rows, dim) head."""
    scores = (q.double() @ k.double().T) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v.double()


def needs_memory(gib):
    """Leaves the test out on a small GPU; where one is wanted (scripts/gpu.sh), that fails."""
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        leave = pytest.fail if os.environ.get("LIBATTN_WANT_GPU") else pytest.skip
        leave(f"{gib} GiB of GPU memory are wanted, {free:.0f} are free")


def test_more_than_two_billion_elements():
    """The last rows and heads of tensors whose offsets do not fit into 31 bits."""
    needs_memory(24)
    rows, heads, dim = 2**31 // (64 * 128) + 5, 64, 128
    q = torch.zeros(1, rows, heads, dim, device=GPU, dtype=torch.bfloat16)
    k = torch.randn(1, 70, heads, dim, device=GPU, dtype=torch.bfloat16)
    v = torch.randn(1, 70, heads, dim, device=GPU, dtype=torch.bfloat16)
    assert q.numel() > 2**31
    q[0, -300:] = 3 * torch.randn(300, heads, dim, device=GPU)
    out = libattn.flash_attn_func(q, k, v)
    close(out[0, 5, 3], v[0, :, 3].double().mean(0).cpu(), torch.bfloat16)
    for row, h in ((-300, 0), (-1, 63), (-77, 31)):
        close(out[0, row, h], reference(q[0, row, h][None], k[0, :, h], v[0, :, h])[0].cpu(), torch.bfloat16)
    # And the other way round: keys and values of that size, of which the last ones weigh the most.
    del out
    few = torch.randn(1, 20, heads, dim, device=GPU, dtype=torch.bfloat16)
    out = libattn.flash_attn_func(few, q, q)
    for row, h in ((0, 0), (19, 63)):
        close(out[0, row, h], reference(few[0, row, h][None], q[0, :, h], q[0, :, h])[0].cpu(), torch.bfloat16)


def test_seventy_thousand_batches():
    q, k, v = (torch.randn(70001, 3, 2, 32, device=GPU, dtype=torch.float16) for _ in range(3))
    out = libattn.flash_attn_func(q, k, v)
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) / 32**0.5
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.float())
    torch.testing.assert_close(out.float(), wanted, rtol=4e-3, atol=4e-3)


def test_gradients_of_seventy_thousand_batches():
    q, k, v = (torch.randn(70001, 3, 2, 32, device=GPU, dtype=torch.float16, requires_grad=True) for _ in range(3))
    weights = torch.randn_like(q)
    found = torch.autograd.grad(libattn.flash_attn_func(q, k, v), (q, k, v), weights)
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) / 32**0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.float())
    for a, b in zip(found, torch.autograd.grad(out, (q, k, v), weights.float())):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-2)


def test_gradients_of_more_than_two_billion_elements():
    """The last rows and heads: their gradients are those of the same rows alone."""
    needs_memory(48)
    rows, heads, dim = 2**31 // (64 * 128) + 5, 64, 128
    q = torch.zeros(1, rows, heads, dim, device=GPU, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 70, heads, dim, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    q[0, -300:] = 3 * torch.randn(300, heads, dim, device=GPU)
    last = q[:, -100:].clone().requires_grad_()
    q.requires_grad_()
    libattn.flash_attn_func(q, k, v).square().sum().backward()
    libattn.flash_attn_func(last, k, v).square().sum().backward()
    assert torch.equal(q.grad[:, -100:], last.grad)


@pytest.mark.parametrize("causal", [False, True])
def test_every_length_to_300(causal):
    """Sequences of 1, 2, ... 300 rows and as many keys in one packed batch."""
    lengths = torch.arange(1, 301)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32)
    q, k, v = (normal(int(cu[-1]), 2, 64, dtype=torch.bfloat16) for _ in range(3))
    compare(libattn.flash_attn_varlen_func, q, k, v, cu, cu, 300, 300, causal=causal, dtype=torch.bfloat16)
    one = torch.arange(301, dtype=torch.int32)  # one row each: decode
    compare(libattn.flash_attn_varlen_func, q[:300], k, v, one, cu, 1, 300, causal=causal, dtype=torch.bfloat16)


# ---- what is refused ----


def test_mixed_devices_are_refused():
    q = torch.randn(1, 9, 2, 32)
    with pytest.raises(ValueError, match="one device"):
        libattn.flash_attn_func(q.to(GPU), q, q)
    with pytest.raises(ValueError, match="one device"):
        libattn.flash_attn_func(*[q.to(GPU)] * 3, alibi_slopes=torch.rand(2))


def test_host_pointers_are_refused():
    """By the C library itself, for whoever calls it without torch."""
    q = torch.randn(1, 9, 2, 32)
    there = q.to(GPU)
    from libattn import _core, _torch

    call = _core.Call(_torch, _lib.FORWARD, there, there, there, _core.Options())
    call.buffers.o, call.buffers.k = _core.tensor(_torch.view(torch.empty_like(there))), _core.tensor(_torch.view(q))
    with pytest.raises(ValueError, match=r"k\.data=\w+: is host memory"):
        call.run(_lib.library.attn_forward)


def test_two_contexts():
    """A CUDA context of the caller's own beside the primary one: the work is done in that which is current."""
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64

    def call(name, *args):
        assert getattr(driver, name)(*args) == 0, name

    def put(x):
        memory, size = address(), ctypes.c_size_t(x.numel() * x.element_size())
        call("cuMemAlloc_v2", ctypes.byref(memory), size)
        call("cuMemcpyHtoD_v2", memory, ctypes.c_void_p(x.data_ptr()), size)
        return memory.value

    def tensor(x):
        return _lib.Tensor(put(x), (ctypes.c_int64 * 3)(*x.stride()[:3]))

    q, k, v = (torch.randn(2, 300, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    used, found = ints(300, 211), torch.zeros_like(q)
    wanted = libattn.flash_attn_with_kvcache(*map(to_gpu, (q, k, v)), cache_seqlens=to_gpu(used), causal=True).cpu()
    problem = _lib.Problem(op=_lib.FORWARD, dtype=_lib.BF16, flags=_lib.CAUSAL | _lib.USED_KV)
    problem.batch, problem.max_q, problem.heads_q, problem.dim_qk = q.shape
    problem.max_kv, problem.heads_kv, problem.dim_v = problem.max_q, problem.heads_q, problem.dim_qk
    own = ctypes.c_void_p()
    call("cuCtxCreate_v2", ctypes.byref(own), ctypes.c_uint(0), ctypes.c_int(torch.cuda.current_device()))
    try:  # torch would work in this context, too, as long as it is current
        buffers = _lib.Buffers(q=tensor(q), k=tensor(k), v=tensor(v), o=tensor(found), used_kv=put(used))
        _lib.check(_lib.library.attn_forward(_lib.cuda_context(), ctypes.byref(problem), ctypes.byref(buffers), None))
        call("cuCtxSynchronize")
        size = ctypes.c_size_t(found.numel() * 2)
        call("cuMemcpyDtoH_v2", ctypes.c_void_p(found.data_ptr()), address(buffers.o.data), size)
    finally:
        call("cuCtxDestroy_v2", own)
    assert torch.equal(found, wanted)
    again = libattn.flash_attn_with_kvcache(*map(to_gpu, (q, k, v)), cache_seqlens=to_gpu(used), causal=True)
    assert torch.equal(again.cpu(), wanted)  # the primary one is none the worse for it


def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU here")
    q = torch.randn(1, 40, 2, 64)
    wanted = libattn.flash_attn_func(*[q.to("cuda:0")] * 3)
    there = libattn.flash_attn_func(*[q.to("cuda:1")] * 3)  # while cuda:0 is the current device
    assert there.device.index == 1
    close(there, wanted.cpu(), torch.float32)
    with pytest.raises(ValueError, match="one device"):
        libattn.flash_attn_func(q.to("cuda:0"), q.to("cuda:1"), q.to("cuda:1"))


def test_bad_lengths_are_noted():
    q, cache = torch.randn(2, 1, 2, 32, device=GPU), torch.randn(2, 64, 2, 32, device=GPU)
    out = libattn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=ints(64, 65).to(GPU))
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"used_kv\[1\]"):
        libattn.device_status()
    libattn.device_status()  # said once
    assert torch.equal(out, libattn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=64))


# ---- transformers ----


def test_generate():
    import libattn.transformers
    import transformers

    libattn.transformers.register()
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    ids = torch.randint(2, 97, (3, 20))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :11] = 0
    batch = {"input_ids": (ids * mask).to(GPU), "attention_mask": mask.to(GPU)}
    tokens, state = [], None
    for implementation in ("eager", "libattn"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        state = state or model.state_dict()
        model.load_state_dict(state)
        model.to(GPU).eval()
        for cache in ("dynamic", "static"):
            options = {"max_new_tokens": 48, "do_sample": False, "disable_compile": True, "cache_implementation": cache}
            tokens.append(model.generate(**batch, **options))
    assert tokens[0].shape == (3, 68) and len(set(tokens[0][:, 20:].flatten().tolist())) > 4
    assert all(torch.equal(x, tokens[0]) for x in tokens[1:])
