"""Shared by the tests of the command line: where the program is, how it is called, and attention in plain numpy."""

import os
import pathlib
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ATTN = os.environ.get("ATTN", str(ROOT / "build" / "attn"))


def call(*args, cwd=None, **options):
    """Runs attn; the caller looks at returncode, stdout and stderr."""
    return subprocess.run([ATTN, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=300, **options)


class Files:
    """A folder of .npy files, and `attn run` in it."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, **arrays):
        for name, array in arrays.items():
            np.save(self.folder / f"{name}.npy", array)

    def load(self, name):
        return np.load(self.folder / f"{name}.npy")

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())

    def run(self, inputs, *options, outputs=("o", "lse")):
        """Saves the inputs under the names of their options, runs, and returns the outputs."""
        self.save(**inputs)
        args = ["run", *options]
        for name in [*inputs, *outputs]:
            args += ["--" + name.replace("_", "-"), f"{name}.npy"]
        done = call(*args, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return [self.load(name) for name in outputs]

    def refused(self, *args):
        """Runs what must be refused as bad usage or input; returns the message."""
        before = self.names()
        done = call(*args, cwd=self.folder)
        assert done.returncode == 2, (done.returncode, done.stderr)
        assert self.names() == before
        return done.stderr


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@pytest.fixture
def random():
    return np.random.default_rng(7)


def attention(q, k, v, allowed=None, scale=None, softcap=0.0, bias=0.0, sink=None):
    """One sequence in float64: q [sq][hq][d], k and v [sk][hkv][...]; returns o, lse [hq][sq], p [hq][sq][sk]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * np.einsum("ihd,jhd->hij", q, k)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    s = s + bias
    if allowed is not None:
        s = np.where(allowed, s, -np.inf)
    seen = np.isfinite(s).any(axis=-1)
    with np.errstate(divide="ignore"):
        top = np.where(seen, s.max(axis=-1), 0)
        total = np.exp(s - top[..., None]).sum(axis=-1)
        if sink is not None:
            total = total + np.exp(np.asarray(sink, np.float64)[:, None] - top)
        lse = np.where(seen, top + np.log(np.where(seen, total, 1)), -np.inf)
    p = np.where(seen[..., None], np.exp(s - np.where(seen, lse, 0)[..., None]), 0)
    return np.einsum("hij,jhd->ihd", p, v), lse, p


def band(sq, sk, left=-1, right=-1):
    """The pairs of a window; causal is right = 0."""
    distance = np.arange(sk)[None, :] - (np.arange(sq)[:, None] + sk - sq)
    return (distance >= -left if left >= 0 else True) & (distance <= right if right >= 0 else np.full((sq, sk), True))


def to_bf16(x):
    """float32 to bf16 in uint16, round to nearest even."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)
