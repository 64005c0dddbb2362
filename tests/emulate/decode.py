#!/usr/bin/env python3
"""Decode on the emulated GPU: contexts of several supers, and the same bits however many multiprocessors share the work.

    ATTN_CUDA_DRIVER=... tests/emulate/decode.py ATTN      ATTN: the command line's program

Each case runs with several EMULATE_SMS, and each sequence of it by itself and with its keys in pages, and, if it is causal,
its last row by itself; all must agree to the last bit, and with the reference to what float16 allows. Then infinities and
NaN in V, of keys that some rows see and others do not.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ATTN = str(pathlib.Path(sys.argv[1]).resolve())
# (used lengths, rows, query heads, KV heads, dim, options, dtypes of q and of k and v: f16 both if they are not there)
CASES = [
    ([20000], 1, 4, 1, 64, []),
    ([8193, 1, 300, 0, 8192], 1, 2, 1, 40, ["--softcap", "20"]),
    ([513, 16500, 5], 3, 6, 2, 64, ["--causal"]),
    ([9000, 700], 2, 3, 1, 64, ["--causal", "--window", "8400,0"]),
    ([700, 257, 256, 1025], 16, 8, 2, 128, ["--causal"]),
    ([600, 300, 513], 1, 16, 1, 256, []),
    ([1150], 5, 4, 1, 192, ["--window", "500,3"]),
    ([900, 40, 512], 1, 4, 1, 96, []),
    ([1800, 769, 1024], 4, 4, 1, 128, ["--causal", "--window", "600,0"]),
    ([8300, 1, 0, 513], 1, 4, 2, 64, ["--causal"], "f16", "e4m3"),
    ([1030, 700], 3, 8, 2, 128, ["--causal", "--softcap", "20"], "bf16", "e4m3"),
    ([600, 300, 513], 1, 16, 1, 256, [], "bf16", "e5m2"),
    ([700, 257, 1025], 2, 4, 1, 128, ["--window", "500,3"], "f16", "e5m2"),
    ([900, 40, 512], 1, 4, 1, 96, ["--scale", "-0.1"], "bf16", "i8"),
    ([650, 1100], 16, 4, 2, 192, ["--causal"], "f16", "i8"),
    ([520, 17], 1, 2, 1, 37, [], "bf16", "e4m3"),
    ([1300], 1, 8, 1, 64, [], "bf16", "i8"),
    # From key 16384 on, spans of 512 keys are worked two by two: windows that begin in the second of two; keys that end, and
    # windows that begin, where pairs and supers do; rows that see from different pairs on (of 18709 keys, from 17407 and
    # 17408).
    ([28192, 20192, 17492], 1, 4, 1, 64, ["--causal", "--window", "200,0"]),
    ([8191, 8192, 8193, 8492, 8493], 1, 2, 1, 64, ["--causal", "--window", "300,0"]),
    ([16383, 16384, 16385, 17400, 24577], 1, 2, 1, 64, ["--causal", "--window", "1300,0"]),
    ([18709, 25877], 2, 3, 1, 64, ["--causal", "--window", "1300,0"]),
    ([18709, 17492], 2, 4, 1, 64, ["--causal", "--window", "1300,0"], "f16", "e4m3"),
]
# Of k and v: their dtype in files, options, and a number that must not matter, not a finite one where there is such a one.
KINDS = {
    "f16": (np.float16, [], np.nan),
    "e4m3": (np.uint8, ["--fp8", "e4m3"], 0x7F),
    "e5m2": (np.uint8, ["--fp8", "e5m2"], 0x7E),
    "i8": (np.int8, [], 77),
}


def make_keys(rng, shape, kind):
    """Numbers of about 1; of i8 with a descale of 1/60."""
    if kind == "i8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    if kind == "e4m3":  # below 2, small ones among them
        return (rng.integers(0, 2, shape) << 7 | rng.integers(0, 64, shape)).astype(np.uint8)
    x = rng.standard_normal(shape).astype(np.float16)
    return x if kind == "f16" else (x.view(np.uint16) >> 8).astype(np.uint8)


def make_queries(rng, shape, dtype):
    """In float16, or in bfloat16 with rows of all sizes."""
    if dtype == "f16":
        return rng.standard_normal(shape).astype(np.float16)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 2, (*shape[:-1], 1))
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def make_descales(rng, batch, heads, kind):
    size = 1 / 60 if kind == "i8" else 1
    return {f"{name}_descale": (size * rng.uniform(0.5, 1.5, (batch, heads))).astype(np.float32) for name in "kv"}


def save(folder, **arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def run(folder, backend, sms, options):
    env = dict(os.environ, EMULATE_SMS=str(sms), EMULATE_ORDER="random")
    command = [ATTN, "run", "--backend", backend, "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--o", "o.npy",
               "--lse", "lse.npy", *options]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return np.load(folder / "o.npy"), np.load(folder / "lse.npy")


def as_numbers(x):
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(float)


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b))


def check(folder, number, case):
    used, rows, heads, heads_kv, dim, options = case[:6]
    dtype, kind = case[6:] or ("f16", "f16")
    stored, kind_options, bad = KINDS[kind]
    rng, batch, most = np.random.default_rng(number), len(used), max(used)
    q = make_queries(rng, (batch, rows, heads, dim), dtype)
    k, v = (make_keys(rng, (batch, most, heads_kv, dim), kind) for _ in range(2))
    descales = make_descales(rng, batch, heads_kv, kind) if kind != "f16" else {}
    for b, length in enumerate(used):
        k[b, length:] = v[b, length:] = bad
    save(folder, q=q, k=k, v=v, used=np.array(used, np.int32), **descales)
    options = [*options, *kind_options, *(["--bf16"] if dtype == "bf16" else [])]
    for name in descales:
        options += [f"--{name.replace('_', '-')}", f"{name}.npy"]
    with_lengths = [*options, "--used-kv", "used.npy"]
    first = run(folder, "cuda", 1, with_lengths)
    for sms in (2, 3, 13, 50):
        assert same(first, run(folder, "cuda", sms, with_lengths)), f"{sms} multiprocessors"
    if rows > 1 and "--causal" in options:
        save(folder, q=q[:, -1:])
        last = run(folder, "cuda", 6, with_lengths)
        save(folder, q=q)
        assert same([first[0][:, -1:], first[1][:, :, -1:]], last), "the last row alone"
    reference = run(folder, "ref", 1, with_lengths)
    for x, y, name in zip(first, reference, ("o", "lse")):
        x, y = as_numbers(x), as_numbers(y)
        full = np.isfinite(y)
        allowed = 1e-4 if name == "lse" else 3e-3 if dtype == "f16" else 1e-3 + np.abs(y[full]) / 128
        assert np.array_equal(full, np.isfinite(x)) and np.all(np.abs(x[full] - y[full]) < allowed), "reference"
    for size in (16, 3):  # eight rows in one page, or each by itself
        pages = -(-most // size)
        table = rng.permutation(batch * pages + 3)[: batch * pages].reshape(batch, pages).astype(np.int32)
        paged = []
        for x in (k, v):
            flat = np.full((batch, pages * size, heads_kv, dim), bad, stored)
            flat[:, :most] = x
            store = np.full((batch * pages + 3, size, heads_kv, dim), bad, stored)
            store[table.reshape(-1)] = flat.reshape(batch * pages, size, heads_kv, dim)
            paged.append(store)
        save(folder, k=paged[0], v=paged[1], table=table)
        paged_options = [*with_lengths, "--page-table", "table.npy", "--max-kv", str(most)]
        assert same(first, run(folder, "cuda", 7, paged_options)), f"pages of {size}"
    for b, length in enumerate(used):
        if length == 0:
            continue
        own = {name: x[b : b + 1] for name, x in descales.items()}
        save(folder, q=q[b : b + 1], k=k[b : b + 1, :length], v=v[b : b + 1, :length], **own)
        alone = run(folder, "cuda", 5, options)
        assert same([x[b : b + 1] for x in first], alone), f"sequence {b} alone"


def check_nonfinite(folder, dim, kind="f16"):
    rng = np.random.default_rng(dim)
    q = rng.standard_normal((1, 5, 4, dim)).astype(np.float16)
    k, v = (make_keys(rng, (1, 333, 2, dim), kind) for _ in range(2))
    _, options, nan = KINDS[kind]
    plus, minus = {"f16": (np.inf, -np.inf), "e5m2": (0x7C, 0xFC), "e4m3": (0x7F, 0xFF)}[kind]
    for n in range(6):
        v[0, 332 - n % 4, n % 2, rng.integers(0, dim, 5)] = [plus, minus, nan, plus, minus]
    k[0, 332] = nan
    save(folder, q=q, k=k, v=v)
    x, y = (run(folder, backend, 3, ["--causal", *options])[0].astype(float) for backend in ("cuda", "ref"))
    full = np.isfinite(y)
    assert np.array_equal(x[~full], y[~full], equal_nan=True) and np.abs(x[full] - y[full]).max() < 3e-3, "reference"


def check_factors(folder, used, rows, heads, heads_kv, dim, size, options, dtype, kind):
    """Factors of pages, of v up to 2^40 apart: against the reference; the same bits with other multiprocessors, other places of pages, and alone."""
    rng, batch, pages = np.random.default_rng(dim + size), len(used), -(-max(used) // size)
    q = make_queries(rng, (batch, rows, heads, dim), dtype)
    k, v = (make_keys(rng, (batch * pages + 2, size, heads_kv, dim), kind) for _ in range(2))
    table = rng.permutation(batch * pages + 2)[: batch * pages].reshape(batch, pages).astype(np.int32)
    factors = [np.full((batch * pages + 2, heads_kv), np.nan, np.float32) for _ in range(2)]
    for b, length in enumerate(used):
        seen = table[b, : -(-length // size)]
        factors[0][seen] = rng.choice([-1, 1], (len(seen), heads_kv)) * rng.uniform(0.2, 1.5, (len(seen), heads_kv)) / (60 if kind == "i8" else 1)
        factors[1][seen] = rng.choice([-1, 1], (len(seen), heads_kv)) * 2.0 ** rng.uniform(-40, 0, (len(seen), heads_kv))
    options = [*options, *KINDS[kind][1], *(["--bf16"] if dtype == "bf16" else []), "--out-dtype", "f32", "--descale-pages", "--used-kv", "used.npy",
               "--page-table", "table.npy", "--k-descale", "k_descale.npy", "--v-descale", "v_descale.npy"]

    def put(order, b=slice(None)):
        store = {name: np.empty_like(x) for name, x in (("k", k), ("v", v), ("k_descale", factors[0]), ("v_descale", factors[1]))}
        for x, y in zip(store.values(), (k, v, *factors)):
            x[order] = y
        save(folder, q=q[b], table=order[table[b]].astype(np.int32), used=np.array(used, np.int32)[b], **store)

    same_places = np.arange(len(k))
    put(same_places)
    first, reference = run(folder, "cuda", 1, options), run(folder, "ref", 1, options)
    for sms in (3, 50):
        assert same(first, run(folder, "cuda", sms, options)), f"{sms} multiprocessors"
    full = np.isfinite(reference[1])
    assert np.array_equal(full, np.isfinite(first[1])) and np.abs(first[1][full] - reference[1][full]).max() < 1e-4, "reference, lse"
    put(same_places)
    sizes = np.minimum(np.abs(v.astype(np.int16)), 127).astype(np.int8) if kind == "i8" else v & 0x7F
    save(folder, v=sizes, v_descale=np.abs(factors[1]))
    size_of = np.abs(run(folder, "ref", 1, options)[0]).max(-1, keepdims=True)
    assert np.all(np.abs(first[0] - reference[0]) <= 3e-3 * size_of), "reference, o"
    put(rng.permutation(len(k)))
    assert same(first, run(folder, "cuda", 7, options)), "other places"
    for b in range(batch):
        put(same_places, slice(b, b + 1))
        assert same([x[b : b + 1] for x in first], run(folder, "cuda", 5, options)), f"sequence {b} alone"


def check_append(folder, used, rows, heads, heads_kv, dim, new, rotated):
    """The last keys of all sequences are new: the kernel brings them into the cache, or, with few multiprocessors, another before it."""
    rng, batch, most = np.random.default_rng(dim + new), len(used), max(used)
    q = rng.standard_normal((batch, rows, heads, dim)).astype(np.float16)
    k, v = (rng.standard_normal((batch, most, heads_kv, dim)).astype(np.float16) for _ in range(2))
    before = np.array(used, np.int32) - new
    fresh = {}
    for name, x in (("k", k), ("v", v)):
        fresh[f"{name}_new"] = np.stack([x[b, length : length + new] for b, length in enumerate(before)])
        for b, length in enumerate(before):
            x[b, length:] = np.nan
    angles = rng.uniform(0, 6, (most, rotated // 2))
    save(folder, q=q, k=k, v=v, used=before, cos=np.cos(angles).astype(np.float32), sin=np.sin(angles).astype(np.float32), **fresh)
    options = ["--causal", "--used-kv", "used.npy", "--k-new", "k_new.npy", "--v-new", "v_new.npy", "--k-out", "k_out.npy", "--v-out", "v_out.npy"]
    if rotated:
        options += ["--rotary-cos", "cos.npy", "--rotary-sin", "sin.npy"]
    results = []
    for backend, sms in (("cuda", 1), ("cuda", 50), ("cuda", 7), ("cpu", 1)):
        results.append([*run(folder, backend, sms, options), np.load(folder / "k_out.npy"), np.load(folder / "v_out.npy")])
    assert same(results[0], results[1]) and same(results[0], results[2]), "the same bits"
    assert same(results[0][2:], results[3][2:]), "the cache"
    assert np.abs(results[0][0].astype(float) - results[3][0]).max() < 3e-3, "reference"


def main():
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(CASES):
            check(pathlib.Path(name), number, case)
            print("decode", *case[:5], *case[5], *case[6:], "ok", flush=True)
        for case in (([8300, 1, 0, 513], 1, 4, 2, 64, 16, [], "f16", "e4m3"), ([1030, 700], 3, 8, 2, 128, 7, ["--causal", "--softcap", "20"], "bf16", "e4m3"),
                     ([600, 300], 1, 16, 1, 256, 64, ["--causal", "--window", "400,0"], "bf16", "e5m2"), ([900, 40, 2500], 1, 4, 1, 96, 1, ["--scale", "-0.1"], "bf16", "i8"),
                     ([17000], 2, 4, 1, 128, 16, ["--causal"], "f16", "i8")):
            check_factors(pathlib.Path(name), *case)
            print("decode, factors of pages", *case[:6], *case[6], *case[7:], "ok", flush=True)
        for case in (([700, 40, 513], 1, 4, 2, 64, 1, 64), ([9000, 8195], 2, 4, 2, 128, 3, 96), ([300, 16], 16, 8, 2, 192, 16, 0)):
            check_append(pathlib.Path(name), *case)
            print("decode, append", *case, "ok", flush=True)
        for dim, kind in ((64, "e4m3"), (128, "e5m2"), (256, "e4m3"), (200, "e5m2")):
            check_nonfinite(pathlib.Path(name), dim, kind)
            print("decode, infinities", dim, kind, "ok", flush=True)
        for dim in (64, 96, 128, 136, 192, 248, 256):
            check_nonfinite(pathlib.Path(name), dim)
            print("decode, infinities", dim, "ok", flush=True)


if __name__ == "__main__":
    main()
