"""libattn._quick: the bits of the operator, at less cost; or None, and the operator sees to it."""

import concurrent.futures
import ctypes

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
    negated = [torch._neg_view(-x) for x in (q, k, v)]  # signs that wait, zeros without memory: not for who reads memory
    assert all(_quick.forward(*(negated[n] if n == m else x for n, x in enumerate((q, k, v))), plain) is None for m in range(3))
    assert _quick.forward(torch._efficientzerotensor(q.shape), k, v, plain) is None
    padded = torch.zeros(q.shape[0], dtype=torch.int32)
    assert _quick.forward(q, k, v, Options(leftpad=padded)) is not None
    assert _quick.forward(q, k, v, Options(leftpad=torch._neg_view(padded))) is None
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


@pytest.fixture
def made(monkeypatch):
    """One entry for each time that everything was found out anew; begins with nothing kept."""
    made, make = [], _quick._make
    monkeypatch.setattr(_quick, "_ready", {})
    monkeypatch.setattr(_quick, "_alike", {})
    monkeypatch.setattr(_quick, "_make", lambda *arguments: made.append(1) or make(*arguments))
    return made


def same(q, k, v, options=None, heads_first=False):
    """Twice, since the second one finds what the first one has kept."""
    options = options or Options(causal=True)
    seen = [x.transpose(1, 2) for x in (q, k, v)] if heads_first else (q, k, v)
    wanted = _torch.attention(*seen, options)[0]
    found = [_quick.forward(q, k, v, options, heads_first=heads_first) for _ in range(2)]
    return all(torch.equal(x, wanted) and x.stride() == wanted.stride() and x.dtype == wanted.dtype for x in found)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("names", [(), ("used_kv", "leftpad")])
def test_a_cache_grows(made, heads_first, names):
    """By views of one room, and by copies: what does not depend on the number of keys is found out once."""
    options = Options(causal=True, **{name: torch.tensor([3, 1], dtype=torch.int32) for name in names})
    rows = 2 if heads_first else 1
    q = torch.randn(2, 4, 1, 16) if heads_first else torch.randn(2, 1, 4, 16)
    rooms = torch.randn((2, 2, 2, 90, 16) if heads_first else (2, 2, 90, 2, 16))
    for keys in (*range(3, 80), 40):
        k, v = rooms.narrow(rows + 1, 0, keys)
        assert same(q, k, v, options, heads_first)
        assert same(q, k.contiguous(), v.contiguous(), options, heads_first)
        assert same(q, k, v.contiguous(), options, heads_first)
    assert len(made) == 1


def test_what_is_kept_fits_nothing_else(made):
    """Each of these differs in one thing from what was called before."""
    q, k, v = tensors(keys=40)
    assert same(q, k, v)
    others = [
        (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
        (q, k, v.transpose(1, 2).contiguous().transpose(1, 2)),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        (torch.randn(2, 2, 4, 16)[:, :1], k, v),
        (q, k[:, ::2], v[:, ::2]),
        (q, k[:1].expand(2, -1, -1, -1), v),
        (q[:, :, :2], k, v),
        (q, k, torch.randn(2, 40, 2, 8)),
        (q, k[:, :, :1], v[:, :, :1]),
        (q[:1], k[:1], v[:1]),
        (q.repeat(1, 3, 1, 1), k, v),
    ]
    for other in others:
        assert same(*other)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert same(*(x.to(dtype) for x in (q, k, v)))
    for options in (Options(), Options(scale=2.0), Options(window_left=3), Options(softcap=1.0), Options(causal=True)):
        assert same(q, k, v, options)
    table = torch.tensor([[4, 3], [2, 1]], dtype=torch.int32)
    assert same(q, k, v, Options(used_kv=table[0]))
    assert _quick.forward(q, k, v, Options(used_kv=table[:, 0])) is None  # a copy is needed
    assert same(q, k, v, Options(leftpad=table[0])) and same(q, k, v, Options(used_kv=table[0], leftpad=table[1]))


def test_precision_is_that_of_the_call():
    q, k, v = tensors(rows=8, keys=300)
    results = set()
    try:
        for precision in ("single", "double", "single"):
            _lib.set_float32_precision(precision)
            assert same(q, k, v)
            results.add(bytes(_quick.forward(q, k, v, Options()).numpy()))
    finally:
        _lib.set_float32_precision("mixed")
    assert len(results) == 2


def test_memory_is_not_kept():
    """Addresses are those of the call: freed memory comes back with other numbers in it, and o is a new one each time."""
    options, results = Options(causal=True), []
    for _ in range(20):
        q, k, v = tensors()
        results.append((_quick.forward(q, k, v, options), _torch.attention(q, k, v, options)[0]))
        del q, k, v
    assert all(torch.equal(found, wanted) for found, wanted in results)
    assert len({found.data_ptr() for found, _ in results}) == len(results)


def test_errors_are_the_librarys_after_success():
    q, k, v = tensors()
    assert same(q, k, v)
    for bad in ((q, k, v[:, :-1]), (q, k[..., :8], v), (q, k[:1], v[:1]), (q, k, v[:, :, :1])):
        with pytest.raises(ValueError, match="shape"):
            _quick.forward(*bad, Options(causal=True))
    with pytest.raises(TypeError, match="dtype of k"):
        _quick.forward(q, k, v.double(), Options(causal=True))
    with pytest.raises(ValueError, match="dtype"):
        _quick.forward(q.double(), k, v, Options(causal=True))
    assert _quick.forward(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, Options(causal=True)) is None
    assert same(q, k, v)


def test_inference_mode(made):
    """What was kept inside is good outside, and the other way round."""
    q, k, v = tensors()
    with torch.inference_mode():
        inside = _quick.forward(q, k, v, Options())
    outside = _quick.forward(q, k, v, Options())
    assert inside.is_inference() and not outside.is_inference() and torch.equal(inside, outside)
    outside.requires_grad_().sum().backward()
    with torch.inference_mode():
        assert _quick.forward(q, k, v, Options()).is_inference()


def test_nothing_to_do():
    """Results without elements have the strides that they always had."""
    for sizes in ({"batch": 0}, {"rows": 0}, {"keys": 0}):
        assert same(*tensors(**sizes))


def test_threads(made, monkeypatch):
    """Each with lengths of its own, while kinds are forgotten all the time."""
    monkeypatch.setattr(_quick, "_MOST", 3)
    cases = [[tensors(keys=keys, rows=rows) for keys in range(1, 30)] for rows in (1, 1, 2, 3)]
    wanted = [[_torch.attention(*case, Options())[0] for case in some] for some in cases]

    def work(n):
        return all(
            torch.equal(_quick.forward(*case, Options()), want)
            for _ in range(20)
            for case, want in zip(cases[n], wanted[n])
        )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.fixture
def gpu(made, monkeypatch):
    """The way of a GPU, but that the host computes: of each run, keys, size and address of the workspace, and stream."""
    ran, finish = [], _quick._finish

    class Plan:
        def __init__(self, problem):
            self.handle, self.workspace = problem, 64 * problem.max_kv

    def finish_there(problem, words, o):
        plan, words = Plan(problem), _quick._Words.from_buffer_copy(words)
        words[_quick._WORKSPACE_SIZE] = plan.workspace
        scratch = _quick._like((plan.workspace,), torch.uint8, o.device)
        return finish(problem, bytes(words), o)._replace(plan=plan, device=5, scratch=scratch)

    def run(problem, words, stream):
        buffers = _lib.Buffers.from_buffer_copy(words)
        ran.append((problem.max_kv, buffers.workspace_size, buffers.workspace, stream))
        return _quick._forward(_lib.host_context(), ctypes.byref(problem), words, None)

    monkeypatch.setattr(_quick, "_finish", finish_there)
    monkeypatch.setattr(_quick, "_run", run)
    monkeypatch.setattr(_quick, "_spaces", _quick._Spaces())
    monkeypatch.setattr(_quick, "_stream_of", lambda device: 100 + device)
    return ran


def test_the_way_of_a_gpu(made, gpu):
    """Which plan is run, on which device's stream, with which workspace."""
    for keys in (7, 8, 9, 7):
        assert same(*tensors(keys=keys))
    assert [(keys, size, stream) for keys, size, _, stream in gpu] == [(n, 64 * n, 105) for n in (7, 7, 8, 8, 9, 9, 7, 7)]
    assert all(space for _, _, space, _ in gpu) and len(made) == 1 and not _quick._spaces.kept


def test_a_workspace_is_kept_for_the_default_stream(gpu, monkeypatch):
    """And for no other; one to each thread, as large as any call has wanted, but for very large ones."""
    monkeypatch.setattr(_quick, "_stream_of", lambda device: 0)
    monkeypatch.setattr(_quick, "_MOST_SPACE", 64 * 50)
    for keys in (9, 9, 8, 40, 9, 8, 51, 9):
        assert same(*tensors(keys=keys))
    spaces = [space for _, _, space, _ in gpu]
    kept = _quick._spaces.kept[5]
    assert len(set(spaces[:6])) == 1 and set(spaces[6:12]) == set(spaces[14:]) == {kept.data_ptr()}
    assert kept.data_ptr() not in spaces[12:14] and len(kept) == 64 * 40
    monkeypatch.setattr(_quick, "_stream_of", lambda device: 100)
    assert same(*tensors(keys=9)) and kept.data_ptr() not in [space for _, _, space, _ in gpu[16:]]
    monkeypatch.setattr(_quick, "_stream_of", lambda device: 0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(same, *tensors(keys=9)).result()
        assert gpu[-1][2] == pool.submit(lambda: _quick._spaces.kept[5].data_ptr()).result() != kept.data_ptr()
