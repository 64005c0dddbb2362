#!/usr/bin/env python3
"""A small transformer for example-generate: random weights in a file, and the same model in plain numpy, in double.

    model.py make FILE.npz                            weights; --layers, --width ... say the sizes
    model.py run FILE.npz --prompt 5,17,2 --tokens 9  the likeliest tokens, by a model without a cache

run prints a line of tokens for each prompt and, to standard error, how far apart the two largest logits were at least.
"""

import argparse
import sys

import numpy as np

SIZES = {"vocab": 512, "width": 256, "layers": 4, "heads": 8, "heads_kv": 2, "dim": 32, "mlp": 704}


def make(path, sizes, seed):
    """Variances that keep that of the numbers; queries and keys larger, so that attention prefers some keys to others."""
    random = np.random.default_rng(seed)
    width, q, kv, mlp = sizes["width"], sizes["heads"] * sizes["dim"], sizes["heads_kv"] * sizes["dim"], sizes["mlp"]

    def matrix(rows, cols, gain=1.0):
        return (gain / np.sqrt(cols) * random.standard_normal((rows, cols))).astype(np.float32)

    def norm():
        return random.uniform(0.8, 1.2, width).astype(np.float32)

    arrays = {"shape": np.array([sizes[name] for name in SIZES], dtype=np.int32)}
    arrays["embed"] = matrix(sizes["vocab"], width, np.sqrt(width))
    arrays["norm"], arrays["head"] = norm(), matrix(sizes["vocab"], width)
    for n in range(sizes["layers"]):
        layer = {"attention_norm": norm(), "q": matrix(q, width, 1.5), "k": matrix(kv, width, 1.5), "v": matrix(kv, width)}
        layer |= {"o": matrix(width, q), "mlp_norm": norm(), "gate": matrix(mlp, width), "up": matrix(mlp, width)}
        layer["down"] = matrix(width, mlp)
        arrays |= {f"layer{n}.{name}": array for name, array in layer.items()}
    np.savez(path, **arrays)  # not compressed, which is what npz.c reads


class Model:
    def __init__(self, path):
        self.weights = {name: array.astype(np.float64) for name, array in np.load(path).items() if name != "shape"}
        self.sizes = dict(zip(SIZES, np.load(path)["shape"].tolist()))

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.weights[name]

    def rotate(self, x):
        """x[token][head][dim], each for its own position: the first half of the dims with the second."""
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(half) / half)
        left, right = x[..., :half], x[..., half:]
        return np.concatenate(
            [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)], -1
        )

    def attention(self, h, layer):
        heads, heads_kv, dim = self.sizes["heads"], self.sizes["heads_kv"], self.sizes["dim"]
        q, k, v = (h @ self.weights[layer + name].T for name in "qkv")
        q = self.rotate(q.reshape(len(h), heads, dim))
        k = self.rotate(k.reshape(len(h), heads_kv, dim)).repeat(heads // heads_kv, 1)
        v = v.reshape(len(h), heads_kv, dim).repeat(heads // heads_kv, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(dim)
        scores = np.where(np.tri(len(h), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)
        return o.reshape(len(h), heads * dim) @ self.weights[layer + "o"].T

    def logits(self, tokens):
        """Of what follows the last token."""
        x = self.weights["embed"][tokens]
        for n in range(self.sizes["layers"]):
            layer = f"layer{n}."
            x = x + self.attention(self.norm(x, layer + "attention_norm"), layer)
            h = self.norm(x, layer + "mlp_norm")
            gate = h @ self.weights[layer + "gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ self.weights[layer + "up"].T)) @ self.weights[layer + "down"].T
        return self.weights["head"] @ self.norm(x[-1], "norm")

    def generate(self, prompt, count):
        """The tokens, and the least distance of two largest logits."""
        tokens, margin = list(prompt), np.inf
        for _ in range(count):
            logits = self.logits(tokens)
            second, first = np.sort(logits)[-2:]
            tokens.append(int(logits.argmax()))
            margin = min(margin, first - second)
        return tokens[len(prompt) :], margin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker, runner = commands.add_parser("make"), commands.add_parser("run")
    for command in (maker, runner):
        command.add_argument("file", metavar="FILE.npz")
    maker.add_argument("--seed", type=int, default=1)
    for name, size in SIZES.items():
        maker.add_argument("--" + name.replace("_", "-"), type=int, default=size, metavar="N", help=f"(default {size})")
    runner.add_argument("--prompt", action="append", required=True, metavar="IDS", help="as 5,17,2; several times")
    runner.add_argument("--tokens", type=int, default=32, metavar="N")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.file, {name: getattr(arguments, name) for name in SIZES}, arguments.seed)
        return
    model, least = Model(arguments.file), np.inf
    for prompt in arguments.prompt:
        tokens, margin = model.generate([int(token) for token in prompt.split(",")], arguments.tokens)
        print(*tokens, flush=True)
        least = min(least, margin)
    print(f"the two largest logits were at least {least:.3g} apart", file=sys.stderr)


if __name__ == "__main__":
    main()
