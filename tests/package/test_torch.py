"""What torch expects of an operator: opcheck, compile, export, gradcheck, autocast, seeds, strides, clear errors."""

import pathlib
import sysconfig

import libattn
import pytest
import torch
import torch.utils.checkpoint
from libattn import _torch  # noqa: F401  registers the operators
from libattn._core import Append, Options
from reference import Setting, attend

OPS = torch.ops.libattn


def tensors(*shapes, dtype=torch.float32, grad=False):
    return [torch.randn(*shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---- operators ----

ALIBI, SEED = torch.rand(4), torch.tensor([7, 11])
CALLS = {
    "plain": ([(2, 4, 4, 3), (2, 5, 2, 3), (2, 5, 2, 3)], Options(), False),
    "probs": ([(2, 4, 4, 3), (2, 5, 2, 3), (2, 5, 2, 2)], Options(causal=True, scale=0.3, softcap=9.0), True),
    "dropout": ([(2, 4, 4, 3), (2, 5, 4, 3), (2, 5, 4, 3)], Options(window_left=3, dropout=0.2, seed=SEED), True),
    "alibi": ([(2, 4, 4, 3), (2, 5, 1, 3), (2, 5, 1, 3)], Options(alibi=ALIBI), False),
    "varlen": (
        [(7, 4, 3), (9, 2, 3), (9, 2, 3)],
        Options(cu_q=ints(0, 3, 7), cu_kv=ints(0, 9, 9), max_q=4, max_kv=9),
        True,
    ),
    "used": ([(2, 4, 4, 3), (2, 5, 2, 3), (2, 5, 2, 3)], Options(used_q=ints(3, 4), used_kv=ints(5, 0)), False),
    "bias": ([(2, 4, 4, 3), (2, 5, 2, 3), (2, 5, 2, 3)], Options(bias=torch.randn(1, 4, 4, 5), sink=torch.randn(4)), False),
    "flashmask": (
        [(2, 4, 4, 3), (2, 5, 2, 3), (2, 5, 2, 3)],
        Options(causal=True, flashmask=torch.randint(0, 5, (2, 1, 5, 1), dtype=torch.int32)),
        False,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_forward(name):
    shapes, options, probs = CALLS[name]
    leaves = [x.clone().requires_grad_() if x is not None and x.is_floating_point() else x for x in options[:2]]
    torch.library.opcheck(OPS.forward.default, (*tensors(*shapes, grad=True), *leaves, *options[2:], probs))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wanted", [(True,) * 3, (False, True, False)])
def test_opcheck_backward(name, wanted):
    shapes, options, _ = CALLS[name]
    q, k, v = tensors(*shapes)
    o, lse, _ = OPS.forward(q, k, v, *options, False)
    wanted = [*wanted, options.bias is not None, options.sink is not None]
    for d_lse in (None, torch.randn_like(lse)):
        torch.library.opcheck(OPS.backward.default, (torch.randn_like(o), d_lse, q, k, v, o, lse, *options, wanted))


def test_opcheck_kvcache():
    q, k, v, k_new, v_new, cos, sin = tensors((2, 1, 4, 8), *[(3, 6, 2, 8)] * 2, *[(2, 1, 2, 8)] * 2, *[(9, 2)] * 2)
    options = Options(used_kv=ints(0, 4), batch_index=ints(2, 0), causal=True)
    append = Append(k_new, v_new, rotary_cos=cos, rotary_sin=sin)
    torch.library.opcheck(OPS.kvcache.default, (q, k, v, *options, *append))


def test_opcheck_combine_and_rotary():
    o, lse = tensors((3, 2, 5, 4, 8), (3, 2, 4, 5), grad=True)
    torch.library.opcheck(OPS.combine.default, (o, lse, torch.float32))
    torch.library.opcheck(OPS.combine.default, (o.detach().half(), lse.detach(), torch.bfloat16))
    x, cos, sin = tensors((2, 5, 3, 8), (9, 3), (9, 3))
    packed = x.reshape(10, 3, 8)
    for op in (OPS.rotary.default, OPS.rotary_.default):
        torch.library.opcheck(op, (x.clone(), cos, sin, ints(0, 4), None, 5, False, False))
        torch.library.opcheck(op, (packed.clone(), cos, sin, None, ints(0, 3, 9), 6, True, True))
    torch.library.opcheck(OPS.rotary.default, (x.clone().requires_grad_(), cos, sin, None, None, 5, True, False))


# ---- derivatives ----


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("name", CALLS)
def test_gradcheck(name, backend, request):
    """In float64, of the output and of lse, by everything that has a gradient."""
    libattn.set_backend(backend)
    request.addfinalizer(lambda: libattn.set_backend("cpu"))
    shapes, options, _ = CALLS[name]
    q, k, v = tensors(*shapes, dtype=torch.float64, grad=True)
    bias = None if options.bias is None else options.bias.double().requires_grad_()

    def run(q, k, v, bias):
        o, lse, _ = OPS.forward(q, k, v, bias, *options[1:], False)
        return o, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(run, (q, k, v, bias))


def test_gradient_of_sinks():
    """Sinks are float32 whatever the rest is, so finite differences take larger steps."""
    q, k, v = tensors((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), dtype=torch.float64)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda sink: libattn.flash_attn_func(q, k, v, causal=True, learnable_sink=sink), (sink,), eps=1e-2, atol=1e-4
    )


def test_gradcheck_combine_and_rotary():
    o, lse = tensors((3, 2, 5, 4, 8), (3, 2, 5, 4), dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(libattn.flash_attn_combine, (o, lse))
    from libattn.layers.rotary import apply_rotary_emb, apply_rotary_emb_qkv_

    x, cos, sin = tensors((2, 5, 3, 8), (9, 3), (9, 3), dtype=torch.float64)
    x.requires_grad_()
    for inplace in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, inplace=inplace: apply_rotary_emb(x.clone(), cos, sin, inplace=inplace, seqlen_offsets=2), (x,)
        )
    qkv = torch.randn(2, 5, 3, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda qkv: apply_rotary_emb_qkv_(qkv.clone(), cos, sin, interleaved=True), (qkv,))


def test_second_derivatives_are_refused():
    q, k, v = tensors(*[(1, 3, 2, 4)] * 3, dtype=torch.float64, grad=True)
    with pytest.raises(NotImplementedError, match="no second ones"):
        torch.autograd.gradgradcheck(lambda *x: libattn.flash_attn_func(*x), (q, k, v))


def test_gradient_through_lse():
    q, k, v = tensors((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), grad=True)
    weight = torch.randn(2, 4, 7)
    out, lse, _ = libattn.flash_attn_func(q, k, v, return_attn_probs=True)
    ours = torch.autograd.grad(out.square().sum() + (lse * weight).sum(), (q, k, v))
    loss = 0
    for b in range(2):
        o, _, row = attend(q[b], k[b], v[b], Setting())
        loss = loss + o.square().sum() + (row * weight[b]).sum()
    for a, b in zip(ours, torch.autograd.grad(loss, (q, k, v))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# ---- graphs ----


class Block(torch.nn.Module):
    """A transformer block whose attention is one of ours."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.up, self.down = torch.nn.Linear(dim, 2 * dim), torch.nn.Linear(2 * dim, dim)
        self.slopes = torch.nn.Buffer(torch.rand(heads))

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        y = libattn.flash_attn_qkvpacked_func(qkv, causal=True, window_size=(5, 0), softcap=20.0, alibi_slopes=self.slopes)
        x = x + self.out(y.flatten(-2))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        x = x + self.out(libattn.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


NO_HEADERS = not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(NO_HEADERS, reason="what inductor compiles includes Python.h"))


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_compile_a_block(backend):
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=backend == "aot_eager")
    for rows in (9, 12) if backend == "aot_eager" else (9,):
        x = torch.randn(2, rows, 32, requires_grad=True)
        wanted = torch.autograd.grad(block(x).square().sum(), (x, *block.parameters()))
        found = torch.autograd.grad(compiled(x).square().sum(), (x, *block.parameters()))
        for a, b in zip(found, wanted):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compile_the_other_functions():
    q, kv = tensors((9, 4, 8), (9, 2, 2, 8), grad=True)
    cu = ints(0, 4, 9)

    def step(q, kv, cu, k_cache, v_cache, new, lengths):
        out = libattn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 5, 5, causal=True)
        last = libattn.flash_attn_with_kvcache(q[None, -1:], k_cache, v_cache, new, new, cache_seqlens=lengths)
        return out, last

    caches, others = torch.zeros(2, 1, 6, 2, 8).unbind(), torch.zeros(2, 1, 6, 2, 8).unbind()
    new, lengths = torch.randn(1, 1, 2, 8), ints(3)
    wanted = step(q, kv, cu, *caches, new, lengths)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, kv, cu, *others, new, lengths)
    for a, b in zip((*found, *others), (*wanted, *caches)):
        assert torch.equal(a, b)
    assert caches[0][0, 3].any() and found[0].requires_grad and not found[1].requires_grad


def test_export():
    block, x = Block().eval(), torch.randn(2, 9, 32)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(block, (x,), dynamic_shapes={"x": {1: rows}})
    for length in (9, 17):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(program.module()(x), block(x))


# ---- dtypes, seeds, memory ----


def test_dropout_follows_manual_seed():
    q, k, v = tensors((2, 64, 4, 16), (2, 64, 4, 16), (2, 64, 4, 16))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append([libattn.flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2)])
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], draws[0][1]) and not torch.equal(draws[0][0], draws[2][0])


def test_autocast():
    q, k, v = tensors(*[(2, 9, 4, 16)] * 3, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = libattn.flash_attn_func(q, k, v)
        assert out.dtype == torch.bfloat16
        assert libattn.flash_attn_func(q.double(), k.double(), v.double()).dtype == torch.float64
    assert torch.equal(out, libattn.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_strided_inputs_are_read_in_place(monkeypatch):
    """Slices, transposes and broadcasts give the same bits as their copies; only a strided last dim is copied."""
    q, k, v = (torch.randn(4, 18, 2, 16)[:, ::2].transpose(1, 2).transpose(0, 2) for _ in range(3))
    k = k[:1].expand(k.shape)
    wanted = libattn.flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "contiguous", lambda x: pytest.fail("copied"))
        assert not q.is_contiguous() and _torch.rows(q) is q and _torch.rows(k) is k
        assert torch.equal(libattn.flash_attn_func(q, k, v, causal=True), wanted)
    across = torch.randn(2, 16, 2, 9).transpose(1, 3)
    assert torch.equal(libattn.flash_attn_func(across, across, across), libattn.flash_attn_func(*[across.contiguous()] * 3))


def test_only_the_gradients_that_are_wanted():
    q, k, v = tensors(*[(2, 9, 4, 16)] * 3)
    v.requires_grad_()
    libattn.flash_attn_func(q, k, v).sum().backward()
    assert q.grad is None and k.grad is None and v.grad.shape == v.shape


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8)])
def test_nothing_to_do(shape):
    q = torch.randn(*shape, requires_grad=True)
    out = libattn.flash_attn_func(q, q, q)
    out.sum().backward()
    assert out.shape == q.grad.shape == shape


def test_batched_gradients():
    """Gradients that a transform hands in, of a forward that saw none."""
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    o = libattn.flash_attn_func(q, k, v)
    directions = torch.randn(3, *o.shape, dtype=torch.float64)
    together = torch.autograd.grad(o, q, directions, retain_graph=True, is_grads_batched=True)[0]
    for direction, found in zip(directions, together):
        assert torch.equal(found, torch.autograd.grad(o, q, direction, retain_graph=True)[0])


def test_checkpoint():
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def lse(q):
        return libattn.flash_attn_func(q, k, v, return_attn_probs=True)[1].sum()

    want = torch.autograd.grad(lse(q), q)[0]
    found = torch.autograd.grad(torch.utils.checkpoint.checkpoint(lse, q, use_reentrant=False), q)[0]
    assert torch.equal(found, want)


def test_lazy_tensors():
    """Tensors whose sign waits, and gradients of zero that have no memory, are what they say they are."""
    q, k, v, d_o = torch.randn(4, 1, 6, 2, 8, dtype=torch.float64)
    lazy = [torch._neg_view(-x) for x in (q, k, v)]
    assert all(x.is_neg() for x in lazy)
    assert torch.equal(libattn.flash_attn_func(*lazy), libattn.flash_attn_func(q, k, v))
    slopes = torch.tensor([0.5, 0.25])
    have = libattn.flash_attn_func(q, k, v, alibi_slopes=torch._neg_view(-slopes))
    assert torch.equal(have, libattn.flash_attn_func(q, k, v, alibi_slopes=slopes))
    o = libattn.flash_attn_func(q.requires_grad_(), k, v)
    want = torch.autograd.grad(o, q, d_o, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(o, q, torch._neg_view(-d_o), retain_graph=True)[0], want)
    nothing = torch._efficientzerotensor(o.shape, dtype=o.dtype)
    assert torch.autograd.grad(o, q, nothing)[0].count_nonzero() == 0


def test_meta_tensors():
    q = torch.empty(2, 5, 4, 8, device="meta", dtype=torch.bfloat16)
    o = libattn.flash_attn_func(q, q, q)
    assert o.is_meta and o.shape == q.shape and o.dtype == q.dtype


def test_no_keys():
    q, k = torch.randn(2, 5, 2, 8, requires_grad=True), torch.randn(2, 0, 2, 8, requires_grad=True)
    out = libattn.flash_attn_func(q, k, k)
    out.sum().backward()
    assert not out.any() and not q.grad.any()


def test_threads():
    """Many Python threads at once, each with tensors of its own."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [tensors(*[(1, 33, 2, 16)] * 3) for _ in range(16)]
    wanted = [libattn.flash_attn_func(*x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda x: libattn.flash_attn_func(*x), inputs))
    assert all(map(torch.equal, found, wanted))


def test_fp8_and_int8():
    q = torch.randn(2, 9, 4, 16, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 33, 2, 16) for _ in range(2))
    scale = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    for dtype, low in ((torch.float8_e4m3fn, lambda x: x), (torch.float8_e5m2, lambda x: x), (torch.int8, torch.round)):
        stored = [low(x * 8).to(dtype) for x in (k, v)]
        exact = [(x.float() * scale[:, None, :, None]).bfloat16() for x in stored]
        found = libattn.flash_attn_func(q, *stored, k_descale=scale, v_descale=scale)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, libattn.flash_attn_func(q, *exact), rtol=2e-2, atol=2e-2)
    eight = q.to(torch.float8_e4m3fn)
    assert libattn.flash_attn_func(eight, eight, eight).dtype == torch.bfloat16


# ---- errors ----


def error(kind, words, *args, **options):
    with pytest.raises(kind) as caught:
        libattn.flash_attn_func(*args, **options)
    for word in words:
        assert word in str(caught.value), caught.value


def test_errors_name_the_argument():
    q, k, v = tensors((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    error(ValueError, ["v.shape=(2, 8, 2, 8)", "(2, 9, 2, 8)"], q, k, v[:, :8])
    error(ValueError, ["k.shape=(2, 9, 2, 4)", "(2, 9, 2, 8)"], q, k[..., :4], v)
    error(ValueError, ["k.shape=(1, 9, 2, 8)", "batch 2"], q, k[:1], v[:1])
    error(ValueError, ["q.shape=(7, 4, 8)"], q[0], k, v)
    error(ValueError, ["heads_q=4", "heads_kv", "3"], q, *tensors((2, 9, 3, 8), (2, 9, 3, 8)))
    error(ValueError, ["dropout=1"], q, k, v, dropout_p=1.0)
    error(ValueError, ["alibi_slopes.shape=(3,)", "(4,)", "(2, 4)"], q, k, v, alibi_slopes=torch.rand(3))
    error(TypeError, ["alibi_slopes", "float32"], q, k, v, alibi_slopes=torch.rand(4).double())
    error(ValueError, ["bias.shape=(2, 4, 7, 8)"], q, k, v, attn_bias=torch.rand(2, 4, 7, 8))
    error(TypeError, ["v", "dtype of k"], q, k, v.half())
    error(ValueError, ["f64"], q, k.double(), v.double())
    error(TypeError, ["complex64"], q.to(torch.complex64), k, v)
    error(TypeError, ["list"], [1.0], k, v)
    error(NotImplementedError, ["attention_chunk=3"], q, k, v, attention_chunk=3)
    error(NotImplementedError, ["qv"], q, k, v, qv=q)
    with pytest.raises(ValueError, match=r"cu_q\[2\]=9"):
        libattn.flash_attn_varlen_func(q[0], k[0], v[0], ints(0, 3, 9), ints(0, 3, 9), 9, 9)
    with pytest.raises(TypeError, match="cu_seqlens_q: want int32"):
        libattn.flash_attn_varlen_func(q[0], k[0], v[0], torch.tensor([0, 7]), ints(0, 9), 9, 9)
    with pytest.raises(ValueError, match="max_seqlen_q=None"):
        libattn.flash_attn_varlen_func(q[0], k[0], v[0], ints(0, 7), ints(0, 9), None, 9)


def test_other_devices_are_refused(monkeypatch):
    q = torch.randn(1, 2, 3, 4)
    monkeypatch.setattr(_torch, "DEVICES", ())
    with pytest.raises(NotImplementedError, match="device=cpu"):
        libattn.flash_attn_func(q, q, q)
