"""libattn._quick: the bits of the operator, at less cost; or None, and the operator sees to it."""

import pytest
import torch
from libattn import _lib, _quick, _torch
from libattn._core import Options


def tensors(batch=2, rows=1, keys=40, dtype=torch.float32):
    q, k, v = (torch.randn(batch, n, heads, 16, dtype=dtype) for n, heads in ((rows, 4), (keys, 2), (keys, 2)))
    return q, k, v


TABLES = {
    "used_kv": torch.tensor([40, 17], dtype=torch.int32),
    "leftpad": torch.tensor([0, 5], dtype=torch.int32),
    "sink": torch.randn(4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("names", [(), ("used_kv",), ("used_kv", "leftpad"), ("sink",), ("used_kv", "leftpad", "sink")])
def test_same_bits(dtype, names):
    options = Options(causal=True, softcap=3.0, scale=0.3, **{name: TABLES[name] for name in names})
    for _ in range(3):  # with what was kept, too
        q, k, v = tensors(dtype=dtype)
        wanted = _torch.attention(q, k, v, options)[0]
        assert torch.equal(_quick.forward(q, k, v, options), wanted)
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]  # as transformers has them
        assert torch.equal(_quick.forward(*strided, options), wanted)
        first = [x.transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(_quick.forward(*first, options, heads_first=True), wanted)
        first = [x.contiguous() for x in first]
        assert torch.equal(_quick.forward(*first, options, heads_first=True), wanted)


def test_lengths_change_under_the_same_shapes():
    q, k, v = tensors()
    for lengths in ([40, 17], [1, 40], [0, 3]):
        options = Options(used_kv=torch.tensor(lengths, dtype=torch.int32))
        assert torch.equal(_quick.forward(q, k, v, options), _torch.attention(q, k, v, options)[0])
    _lib.set_float32_precision("double")
    try:
        assert torch.equal(_quick.forward(q, k, v, options), _torch.attention(q, k, v, options)[0])
    finally:
        _lib.set_float32_precision("mixed")


def test_what_is_not_for_it():
    q, k, v = tensors()
    plain = Options()
    assert _quick.forward(q, k, v, plain) is not None
    assert _quick.forward(q.clone().requires_grad_(), k, v, plain) is None
    with torch.no_grad():
        assert _quick.forward(q.clone().requires_grad_(), k, v, plain) is not None
    assert _quick.forward(torch.nn.Parameter(q), k, v, plain) is None
    assert _quick.forward(q[..., ::2], k[..., :8], v, plain) is None  # a copy is needed
    assert _quick.forward(q, k, v, Options(dropout=0.5, seed=torch.zeros(2, dtype=torch.int64))) is None
    assert _quick.forward(q, k, v, Options(alibi=torch.ones(4))) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert _quick.forward(q, k, v, plain) is None
    seen = []
    torch.vmap(lambda x: seen.append(_quick.forward(x, k, v, plain)) or x)(q[None])
    assert seen == [None]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert _quick.forward(q, k, v, plain) is None


def test_errors_are_the_librarys():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="k.shape"):
        _quick.forward(q, k[:1], v[:1], Options())
    with pytest.raises(ValueError, match="used_kv"):
        _quick.forward(q, k, v, Options(used_kv=torch.tensor([41, 1], dtype=torch.int32)))
    with pytest.raises(TypeError, match="int32"):
        _quick.forward(q, k, v, Options(used_kv=torch.tensor([4, 1])))


def test_kinds_are_forgotten(monkeypatch):
    monkeypatch.setattr(_quick, "_MOST", 4)
    monkeypatch.setattr(_quick, "_ready", {})
    for keys in range(1, 12):
        q, k, v = tensors(keys=keys)
        assert torch.equal(_quick.forward(q, k, v, Options()), _torch.attention(q, k, v, Options())[0])
        assert len(_quick._ready) <= 4
