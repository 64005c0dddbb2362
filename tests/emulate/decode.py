#!/usr/bin/env python3
"""Decode on the emulated GPU: contexts of several supers, and the same bits however many multiprocessors share the work.

    ATTN_CUDA_DRIVER=... tests/emulate/decode.py ATTN      ATTN: the command line's program

Each case runs with several EMULATE_SMS, and each sequence of it by itself and with its keys in pages; all must agree to the last bit,
and with the reference to what float16 allows. Then infinities and NaN in V, of keys that some rows see and others do not.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ATTN = str(pathlib.Path(sys.argv[1]).resolve())
# (used lengths, rows, query heads, KV heads, dim, options)
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
]


def save(folder, **arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def run(folder, backend, sms, options):
    env = dict(os.environ, EMULATE_SMS=str(sms), EMULATE_ORDER="random")
    command = [ATTN, "run", "--backend", backend, "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--o", "o.npy",
               "--lse", "lse.npy", *options]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return np.load(folder / "o.npy"), np.load(folder / "lse.npy")


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b))


def check(folder, number, case):
    used, rows, heads, heads_kv, dim, options = case
    rng, batch, most = np.random.default_rng(number), len(used), max(used)
    q = rng.standard_normal((batch, rows, heads, dim)).astype(np.float16)
    k = rng.standard_normal((batch, most, heads_kv, dim)).astype(np.float16)
    v = rng.standard_normal((batch, most, heads_kv, dim)).astype(np.float16)
    for b, length in enumerate(used):
        k[b, length:] = v[b, length:] = np.nan
    save(folder, q=q, k=k, v=v, used=np.array(used, np.int32))
    with_lengths = [*options, "--used-kv", "used.npy"]
    first = run(folder, "cuda", 1, with_lengths)
    for sms in (2, 3, 13, 50):
        assert same(first, run(folder, "cuda", sms, with_lengths)), f"{sms} multiprocessors"
    reference = run(folder, "ref", 1, with_lengths)
    for x, y in zip(first, reference):
        x, y = x.astype(float), y.astype(float)
        full = np.isfinite(y)
        assert np.array_equal(full, np.isfinite(x)) and np.abs(x[full] - y[full]).max() < 3e-3, "reference"
    for size in (16, 3):  # eight rows in one page, or each by itself
        pages = -(-most // size)
        table = rng.permutation(batch * pages + 3)[: batch * pages].reshape(batch, pages).astype(np.int32)
        paged = []
        for x in (k, v):
            flat = np.full((batch, pages * size, heads_kv, dim), np.nan, np.float16)
            flat[:, :most] = x
            store = np.full((batch * pages + 3, size, heads_kv, dim), np.nan, np.float16)
            store[table.reshape(-1)] = flat.reshape(batch * pages, size, heads_kv, dim)
            paged.append(store)
        save(folder, k=paged[0], v=paged[1], table=table)
        paged_options = [*with_lengths, "--page-table", "table.npy", "--max-kv", str(most)]
        assert same(first, run(folder, "cuda", 7, paged_options)), f"pages of {size}"
    for b, length in enumerate(used):
        if length == 0:
            continue
        save(folder, q=q[b : b + 1], k=k[b : b + 1, :length], v=v[b : b + 1, :length])
        alone = run(folder, "cuda", 5, options)
        assert same([x[b : b + 1] for x in first], alone), f"sequence {b} alone"


def check_nonfinite(folder, dim):
    rng = np.random.default_rng(dim)
    q = rng.standard_normal((1, 5, 4, dim)).astype(np.float16)
    k, v = (rng.standard_normal((1, 333, 2, dim)).astype(np.float16) for _ in range(2))
    for n in range(6):
        v[0, 332 - n % 4, n % 2, rng.integers(0, dim, 5)] = [np.inf, -np.inf, np.nan, np.inf, -np.inf]
    k[0, 332] = np.nan
    save(folder, q=q, k=k, v=v)
    x, y = (run(folder, backend, 3, ["--causal"])[0].astype(float) for backend in ("cuda", "ref"))
    full = np.isfinite(y)
    assert np.array_equal(x[~full], y[~full], equal_nan=True) and np.abs(x[full] - y[full]).max() < 3e-3, "reference"


def main():
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(CASES):
            check(pathlib.Path(name), number, case)
            print("decode", *case[:5], *case[5], "ok", flush=True)
        for dim in (64, 96, 128, 136, 192, 248, 256):
            check_nonfinite(pathlib.Path(name), dim)
            print("decode, infinities", dim, "ok", flush=True)


if __name__ == "__main__":
    main()
