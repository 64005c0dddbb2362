"""`attn run`: every option against attention in numpy, on both backends."""

import numpy as np
import pytest

from conftest import attention, band, call, from_bf16, to_bf16

pytestmark = pytest.mark.parametrize("backend", ["ref", "cpu"])

BATCH, SQ, SK, HQ, HKV, D, DV = 2, 37, 51, 6, 2, 24, 16


@pytest.fixture
def qkv(random):
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    return {"q": normal(BATCH, SQ, HQ, D), "k": normal(BATCH, SK, HKV, D), "v": normal(BATCH, SK, HKV, DV)}


def expect(qkv, o, lse, tol=2e-5, **options):
    for b in range(len(o)):
        mine = {key: value[b] if key == "per_batch" else value for key, value in options.items()}
        want_o, want_lse, _ = attention(qkv["q"][b], qkv["k"][b], qkv["v"][b], **mine)
        np.testing.assert_allclose(o[b], want_o, atol=tol)
        np.testing.assert_allclose(lse[b], want_lse, atol=tol)


@pytest.mark.parametrize(
    "options, reference",
    [
        ([], {}),
        (["--causal"], {"allowed": band(SQ, SK, right=0)}),
        (["--window", "5,3"], {"allowed": band(SQ, SK, 5, 3)}),
        (["--window=-1,0"], {"allowed": band(SQ, SK, right=0)}),
        (["--causal", "--window", "7,-1"], {"allowed": band(SQ, SK, 7, 0)}),
        (["--scale", "-0.3"], {"scale": -0.3}),
        (["--scale", "0"], {"scale": 0.0}),
        (["--softcap", "1.5"], {"softcap": 1.5}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options(files, qkv, backend, options, reference):
    o, lse = files.run(qkv, "--backend", backend, *options)
    assert o.dtype == np.float32 and o.shape == (BATCH, SQ, HQ, DV) and lse.shape == (BATCH, HQ, SQ)
    expect(qkv, o, lse, **reference)


def test_f64_is_exact_to_its_precision(files, qkv, backend):
    wide = {name: array.astype(np.float64) for name, array in qkv.items()}
    o, lse = files.run(wide, "--backend", backend, "--causal")
    assert o.dtype == lse.dtype == np.float64
    expect(wide, o, lse, tol=1e-13, allowed=band(SQ, SK, right=0))


def test_f16(files, qkv, backend):
    half = {name: array.astype(np.float16) for name, array in qkv.items()}
    o, lse = files.run(half, "--backend", backend)
    assert o.dtype == np.float16
    expect(half, o, lse, tol=2e-3)


def test_bf16_is_uint16_with_a_flag(files, qkv, backend):
    stored = {name: to_bf16(array) for name, array in qkv.items()}
    o, lse = files.run(stored, "--backend", backend, "--bf16")
    assert o.dtype == np.uint16
    expect({name: from_bf16(array) for name, array in stored.items()}, from_bf16(o), lse, tol=2e-2)
    o, _ = files.run(stored, "--backend", backend, "--bf16", "--out-dtype", "f32")
    assert o.dtype == np.float32
    expect({name: from_bf16(array) for name, array in stored.items()}, o, lse)


def test_fp8_keys_with_descale(files, qkv, backend, random):
    # e5m2 is the upper byte of f16.
    k8, v8 = (random.integers(0, 0x7C, (BATCH, SK, HKV, d)).astype(np.uint8) // 3 for d in (D, DV))
    decode = lambda x: (x.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    k_scale = random.uniform(0.5, 2, (BATCH, HKV)).astype(np.float32)
    v_scale = random.uniform(0.5, 2, (BATCH, HKV))  # float64, as numpy makes it
    inputs = {"q": qkv["q"], "k": k8, "v": v8, "k_descale": k_scale, "v_descale": v_scale}
    o, lse = files.run(inputs, "--backend", backend, "--fp8", "e5m2")
    plain = {"q": qkv["q"], "k": decode(k8) * k_scale[:, None, :, None], "v": decode(v8) * v_scale[:, None, :, None]}
    expect(plain, o, lse)


def test_factors_of_pages(files, qkv, backend, random):
    size = 5
    each = -(-SK // size)
    table = random.permutation(BATCH * each + 2)[: BATCH * each].reshape(BATCH, each).astype(np.int32)
    pages = {name: random.integers(-127, 128, (BATCH * each + 2, size, HKV, d)).astype(np.int8) for name, d in (("k", D), ("v", DV))}
    factors = {name: random.uniform(0.005, 0.02, (BATCH * each + 2, HKV)).astype(np.float32) for name in pages}
    plain = {"q": qkv["q"]}
    for name, x in pages.items():
        wide = x * factors[name][:, None, :, None]
        plain[name] = wide[table].reshape(BATCH, each * size, HKV, -1)[:, :SK].astype(np.float32)
        factors[name][np.setdiff1d(np.arange(len(x)), table)] = np.nan
    inputs = {"q": qkv["q"], **pages, "page_table": table, "k_descale": factors["k"], "v_descale": factors["v"]}
    o, lse = files.run(inputs, "--backend", backend, "--descale-pages", "--max-kv", str(SK))
    expect(plain, o, lse)
    scale = random.uniform(0.5, 2, (BATCH, HKV)).astype(np.float32)
    scaled = qkv["q"] * np.repeat(scale, HQ // HKV, 1)[:, None, :, None]
    for b in (slice(None), slice(0, 1)):  # one sequence alone has a factor of its own, too
        some = {**inputs, "q": qkv["q"][b], "page_table": table[b], "q_descale": scale[b]}
        o, lse = files.run(some, "--backend", backend, "--descale-pages", "--max-kv", str(SK))
        expect({"q": scaled[b], "k": plain["k"][b], "v": plain["v"][b]}, o, lse)
    arguments = [word for name in inputs for word in (f"--{name.replace('_', '-')}", f"{name}.npy")]
    assert "batch would be" in files.refused("run", "--backend", backend, "--max-kv", str(SK), "--o", "x.npy", *arguments)


def test_alibi_bias_and_sink(files, qkv, backend, random):
    slopes = random.uniform(0, 1, HQ).astype(np.float32)
    bias = random.standard_normal((HQ, 1, SK)).astype(np.float32)  # no batch, one row for all
    sink = random.standard_normal(HQ).astype(np.float32)
    distance = np.abs(np.arange(SQ)[:, None] + SK - SQ - np.arange(SK)[None, :])
    o, lse = files.run({**qkv, "alibi": slopes}, "--backend", backend)
    expect(qkv, o, lse, bias=-slopes[:, None, None] * distance)
    o, lse = files.run({**qkv, "bias": bias}, "--backend", backend)
    expect(qkv, o, lse, bias=bias)
    o, lse = files.run({**qkv, "sink": sink}, "--backend", backend)
    expect(qkv, o, lse, sink=sink)


@pytest.mark.parametrize("causal, vectors", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_flashmask(files, qkv, backend, random, causal, vectors):
    mask = random.integers(0, SQ + 1, (BATCH, HKV, SK, vectors))
    o, lse = files.run({**qkv, "flashmask": mask}, "--backend", backend, *(["--causal"] if causal else []))
    row = np.arange(SQ)[:, None]
    for b in range(BATCH):
        heads = []
        for h in range(HKV):
            v = [mask[b, h, :, n][None, :] for n in range(vectors)]
            if causal:
                masked = (row >= v[0]) & (row < v[1] if vectors == 2 else True)
            elif vectors == 2:
                masked = (row >= v[0]) | (row < v[1])
            else:
                masked = ((row >= v[0]) & (row < v[1])) | ((row >= v[2]) & (row < v[3]))
            heads += [~masked & band(SQ, SK, right=0 if causal else -1)] * (HQ // HKV)
        want_o, want_lse, _ = attention(qkv["q"][b], qkv["k"][b], qkv["v"][b], allowed=np.stack(heads))
        np.testing.assert_allclose(o[b], want_o, atol=2e-5)
        np.testing.assert_allclose(lse[b], want_lse, atol=2e-5)


def test_probabilities_and_dropout(files, qkv, backend):
    o, lse, p = files.run(
        qkv, "--backend", backend, "--dropout", "0.25", "--seed", "99", "--offset", "3", outputs=("o", "lse", "probs")
    )
    dropped = np.signbit(p)
    assert 0.2 < dropped.mean() < 0.3
    for b in range(BATCH):
        _, want_lse, want_p = attention(qkv["q"][b], qkv["k"][b], qkv["v"][b])
        np.testing.assert_allclose(np.abs(p[b]), want_p, atol=1e-5)
        np.testing.assert_allclose(lse[b], want_lse, atol=2e-5)
        kept = np.where(dropped[b], 0, want_p) / 0.75
        v = np.repeat(qkv["v"][b], HQ // HKV, axis=1)
        np.testing.assert_allclose(o[b], np.einsum("hij,jhd->ihd", kept, v), atol=2e-5)


def test_packed_sequences(files, backend, random):
    cu_q, cu_kv = np.array([0, 5, 5, 30]), np.array([0, 9, 20, 64])  # int64, as numpy makes them
    q, k = random.standard_normal((30, HQ, D)), random.standard_normal((64, HKV, D))
    v = random.standard_normal((64, HKV, DV))
    o, lse = files.run({"q": q, "k": k, "v": v, "cu_q": cu_q, "cu_kv": cu_kv}, "--backend", backend, "--causal")
    assert o.shape == (30, HQ, DV) and lse.shape == (HQ, 30)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        sq, sk = rows.stop - rows.start, keys.stop - keys.start
        if sq:
            want_o, want_lse, _ = attention(q[rows], k[keys], v[keys], allowed=band(sq, sk, right=0))
            np.testing.assert_allclose(o[rows], want_o, atol=1e-12)
            np.testing.assert_allclose(lse[:, rows], want_lse, atol=1e-12)


def test_lengths_and_leftpad(files, qkv, backend):
    used_q, used_kv, leftpad = np.array([37, 20]), np.array([40, 51]), np.array([3, 0])
    o, lse = files.run({**qkv, "used_q": used_q, "used_kv": used_kv, "leftpad": leftpad}, "--backend", backend)
    for b in range(BATCH):
        keys, n = slice(leftpad[b], used_kv[b]), used_q[b]
        want_o, want_lse, _ = attention(qkv["q"][b, :n], qkv["k"][b, keys], qkv["v"][b, keys])
        np.testing.assert_allclose(o[b, :n], want_o, atol=2e-5)
        np.testing.assert_allclose(lse[b, :, :n], want_lse, atol=2e-5)
        assert (o[b, n:] == 0).all() and (lse[b, :, n:] == -np.inf).all()


def test_pages_and_batch_index(files, qkv, backend, random):
    page, per = 16, 4
    pages = random.permutation(20)[: 3 * per].reshape(3, per).astype(np.int32)
    index, used = np.array([2, 0], np.int32), np.array([51, 33], np.int32)
    pool = {name: np.full((20, page, HKV, qkv[name].shape[-1]), np.nan, np.float32) for name in "kv"}
    for b in range(BATCH):
        for j in range(used[b]):
            for name in "kv":
                pool[name][pages[index[b], j // page], j % page] = qkv[name][b, j]
    inputs = {"q": qkv["q"], **pool, "page_table": pages, "batch_index": index, "used_kv": used}
    o, lse = files.run(inputs, "--backend", backend, "--page-size", page)
    for b in range(BATCH):
        want_o, want_lse, _ = attention(qkv["q"][b], qkv["k"][b, : used[b]], qkv["v"][b, : used[b]])
        np.testing.assert_allclose(o[b], want_o, atol=2e-5)
        np.testing.assert_allclose(lse[b], want_lse, atol=2e-5)


def rotate(x, cos, sin, position):
    """Half-split rotary of x [rows][heads][dim] with row 0 at `position`."""
    half = cos.shape[1]
    c, s = (t[position : position + len(x), None, :] for t in (cos, sin))
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("op", ["forward", "append"])
def test_append_with_rotary(files, qkv, backend, random, op):
    new, used = 4, np.array([20, 11])
    angle = np.outer(np.arange(64), 0.3 ** np.arange(8))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    k_new = random.standard_normal((BATCH, new, HKV, D)).astype(np.float32)
    v_new = random.standard_normal((BATCH, new, HKV, DV)).astype(np.float32)
    q = qkv["q"][:, :new]
    inputs = {"k": qkv["k"], "v": qkv["v"], "used_kv": used, "k_new": k_new, "v_new": v_new}
    inputs |= {"rotary_cos": cos, "rotary_sin": sin}
    if op == "forward":
        inputs["q"] = q
    results = ("k_out", "v_out") + (("o", "lse") if op == "forward" else ())
    out = files.run(inputs, "--backend", backend, "--op", op, *(["--causal"] if op == "forward" else []), outputs=results)
    k, v = qkv["k"].copy(), qkv["v"].copy()
    for b in range(BATCH):
        k[b, used[b] : used[b] + new] = rotate(k_new[b], cos, sin, used[b])
        v[b, used[b] : used[b] + new] = v_new[b]
    np.testing.assert_allclose(out[0], k, atol=1e-6)
    np.testing.assert_array_equal(out[1], v)
    np.testing.assert_array_equal(files.load("k"), qkv["k"])  # the input file is left alone
    for b in range(BATCH if op == "forward" else 0):
        n = used[b] + new
        want, want_lse, _ = attention(rotate(q[b], cos, sin, used[b]), k[b, :n], v[b, :n], allowed=band(new, n, right=0))
        np.testing.assert_allclose(out[2][b], want, atol=2e-5)
        np.testing.assert_allclose(out[3][b], want_lse, atol=2e-5)


def test_backward(files, qkv, backend, random):
    allowed = band(SQ, SK, right=0)
    bias = random.standard_normal((1, 1, SQ, SK)).astype(np.float32)
    sink = random.standard_normal(HQ).astype(np.float32)
    d_o = random.standard_normal((BATCH, SQ, HQ, DV)).astype(np.float32)
    d_lse = random.standard_normal((BATCH, HQ, SQ)).astype(np.float32)
    inputs = {**qkv, "bias": bias, "sink": sink}
    forward = dict(zip(("o", "lse"), files.run(inputs, "--backend", backend, "--causal")))
    gradients = ("d_q", "d_k", "d_v", "d_bias", "d_sink")
    options = ["--op", "backward", "--backend", backend, "--causal"]
    with_forward = files.run({**inputs, **forward, "d_o": d_o, "d_lse": d_lse}, *options, outputs=gradients)
    without = files.run({**inputs, "d_o": d_o, "d_lse": d_lse}, *options, outputs=gradients)
    for one, other in zip(with_forward, without):
        np.testing.assert_array_equal(one, other)  # the forward pass that it makes itself is the same
    group, scale = HQ // HKV, D**-0.5
    d_bias, d_sink = np.zeros(bias.shape), np.zeros(HQ)
    for b in range(BATCH):
        o, lse, p = attention(qkv["q"][b], qkv["k"][b], qkv["v"][b], allowed=allowed, bias=bias[0, 0], sink=sink)
        k, v = (np.repeat(qkv[n][b].astype(np.float64), group, axis=1) for n in "kv")
        d_p = np.einsum("ihd,jhd->hij", d_o[b], v)
        row = np.einsum("ihd,ihd->hi", d_o[b], o) - d_lse[b]
        d_s = p * (d_p - row[..., None])
        d_bias[0, 0] += d_s.sum(axis=0)
        d_sink -= (np.exp(sink[:, None] - lse) * row).sum(axis=1)
        fold = lambda x: x.reshape(SK, HKV, group, -1).sum(axis=2)
        np.testing.assert_allclose(without[0][b], scale * np.einsum("hij,jhd->ihd", d_s, k), atol=1e-4)
        np.testing.assert_allclose(without[1][b], fold(scale * np.einsum("hij,ihd->jhd", d_s, qkv["q"][b])), atol=1e-4)
        np.testing.assert_allclose(without[2][b], fold(np.einsum("hij,ihd->jhd", p, d_o[b])), atol=1e-4)
    np.testing.assert_allclose(without[3], d_bias, atol=1e-4)
    np.testing.assert_allclose(without[4], d_sink, atol=1e-3)


def test_empty_batch(files, backend):
    empty = {"q": np.zeros((0, 5, 2, 8), "f4"), "k": np.zeros((0, 7, 2, 8), "f4"), "v": np.zeros((0, 7, 2, 8), "f4")}
    o, lse = files.run(empty, "--backend", backend)
    assert o.shape == (0, 5, 2, 8) and lse.shape == (0, 2, 5)


def test_refusals_name_file_and_shape(files, qkv, backend):
    files.save(**qkv, bad=qkv["k"][..., :-1], three=qkv["k"][0], whole=np.zeros((2, 2), "i4"), u=to_bf16(qkv["q"]))
    base = ["run", "--backend", backend, "--o", "o.npy", "--q", "q.npy", "--v", "v.npy"]
    text = files.refused(*base, "--k", "bad.npy")
    assert "bad.npy" in text and "(2, 51, 2, 23)" in text and "dim_qk" in text and "q.npy says 24" in text
    text = files.refused(*base, "--k", "three.npy")
    assert "three.npy: shape (51, 2, 24)" in text and "[batch][max_kv][heads_kv][dim_qk]" in text
    assert "missing.npy" in files.refused(*base, "--k", "missing.npy")
    assert "i4" in files.refused(*base, "--k", "k.npy", "--sink", "whole.npy")
    assert "--bf16" in files.refused(*base[:5], "--q", "u.npy", "--k", "k.npy", "--v", "v.npy")
    assert "--k is wanted" in files.refused(*base)
    assert "nothing to write" in files.refused("run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy")
    assert "dropout" in files.refused(*base, "--k", "k.npy", "--dropout", "1")
    assert "--op forward" in files.refused(*base, "--k", "k.npy", "--d-q", "dq.npy")


def test_threads_do_not_change_a_bit(files, qkv, backend):
    results = [files.run(qkv, "--backend", backend, "--causal", "--threads", n) for n in (1, 2, 7)]
    for o, lse in results[1:]:
        np.testing.assert_array_equal(o, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


def test_unwritable_result_is_a_runtime_failure(files, qkv, backend):
    files.save(**qkv)
    done = call("run", "--backend", backend, "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--o", "no/o.npy", cwd=files.folder)
    assert done.returncode == 3 and "no/o.npy" in done.stderr
