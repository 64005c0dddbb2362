"""example-generate against a model in plain numpy, from the same file of weights; and files that are not in order."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import ATTN, ROOT

sys.path.insert(0, str(ROOT / "examples" / "generate"))
import model  # noqa: E402

PROGRAM = pathlib.Path(ATTN).parent / "example-generate"
SMALL = {"vocab": 61, "width": 24, "layers": 2, "heads": 6, "heads_kv": 2, "dim": 10, "mlp": 37}
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], list(range(50, 0, -1)), [7, 7, 7]]
COUNT = 16


def generate(*options, prompts=PROMPTS):
    words = [word for prompt in prompts for word in ("--prompt", ",".join(map(str, prompt)))]
    return subprocess.run([PROGRAM, *options, "--tokens", str(COUNT), *words], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module", params=["small", "larger"])
def weights(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / f"{request.param}.npz"
    model.make(path, SMALL if request.param == "small" else model.SIZES, seed=3)
    return path


@pytest.fixture(scope="module")
def expected(weights):
    """Tokens by numpy; logits that decide are far enough apart for float32 to find the same."""
    found = [model.Model(weights).generate(prompt, COUNT) for prompt in PROMPTS]
    assert min(margin for _, margin in found) > 1e-3
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize("options", [[], ["--page", "3", "--chunk", "8"], ["--backend", "ref", "--threads", "1"]])
def test_tokens_of_numpy(weights, expected, options):
    done = generate("--model", weights, *options)
    assert done.returncode == 0, done.stderr
    assert [list(map(int, line.split())) for line in done.stdout.splitlines()] == expected
    assert "tokens/s; attention" in done.stderr and "the two largest logits were at least" in done.stderr


def test_bad_files(tmp_path):
    """Cut short or changed anywhere: refused with a message, or read as something else, but never a crash."""
    path = tmp_path / "model.npz"
    model.make(path, SMALL | {"layers": 1}, seed=1)
    whole = path.read_bytes()
    assert generate("--model", path).returncode == 0
    for size in [1, 21, 22, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        done = generate("--model", path)
        assert done.returncode == 1 and "model.npz: " in done.stderr, (size, done)
    random = np.random.default_rng(2)
    end = whole.rindex(b"PK\x05\x06")
    directory = int.from_bytes(whole[end + 16 : end + 20], "little")
    for n in range(40):  # in the directory, and in the beginning of a member
        changed = bytearray(whole)
        for _ in range(3):
            at = random.integers(directory, len(whole)) if n % 2 else random.integers(0, 200)
            changed[at] = random.integers(256)
        path.write_bytes(changed)
        done = generate("--model", path)
        assert done.returncode in (0, 1) and (done.returncode == 0) == bool(done.stdout), (n, done)


def test_other_arrays(tmp_path):
    path = tmp_path / "model.npz"
    model.make(path, SMALL, seed=1)
    arrays = dict(np.load(path))
    np.savez_compressed(path, **arrays)
    assert "shape is compressed; use numpy.savez" in generate("--model", path).stderr
    for name, array, words in (
        ("layer1.up", arrays["layer1.up"].T, "layer1.up is not of the shape (37, 24), dtype <f4"),
        ("layer0.q", arrays["layer0.q"].astype(np.float64), "layer0.q is not of the shape (60, 24), dtype <f4"),
        ("norm", np.ones((1, 24), np.float32), "norm is not of the shape (24,),"),
        ("shape", arrays["shape"] * [1, 1, 1, 1, 2, 1, 1], "shape is not of the shape (7,), dtype <i4"),
        ("shape", np.array([61, 24, 2, 6, 4, 10, 37], np.int32), "heads-kv=4: want a divisor of heads=6"),
        ("shape", np.array([61, 24, -2, 6, 2, 10, 37], np.int32), "layers=-2: want 1 to"),
    ):
        np.savez(path, **{**arrays, name: array})
        done = generate("--model", path)
        assert done.returncode == 1 and not done.stdout and words in done.stderr, (name, done)
    del arrays["head"]
    np.savez(path, **arrays)
    assert "there is no array head in it" in generate("--model", path).stderr
