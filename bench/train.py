#!/usr/bin/env python3
"""A small GPT, trained with libattn's attention and with torch's: do they learn the same, and what does a step take?

    python bench/train.py                                  two layers, 12 heads of 64, 2048 tokens, 200 steps
    python bench/train.py --json train.jsonl --png train.png
    python bench/train.py --draw train.jsonl train.png     the picture alone, from what another machine has measured
    python bench/train.py --device cpu --quick             tiny, on the host

Three copies of one model see the same batches in the same order: one with libattn.flash_attn_func, one with torch's
scaled_dot_product_attention through FlashAttention-2 and one through cuDNN (on the host: through its plain algorithm). They
take turns, step by step, in one process. Parameters are float32, what the layers compute is bf16 by autocast (on the host
float32 all through: without units for it bf16 takes a hundred times as long).

Rounding makes any two of these drift apart; how far torch's two are from each other is what "within noise" means here. A
curve of libattn's may be off by at most NOISE times that, on the average over steps, from each of torch's; exit status 1
means that it is not, or that nothing was learned.

The text is made up: a chain of tokens, of which each has few successors, with stretches that repeat what stood a distance
before, another in each sequence. The former can be learned from the last token, the latter by attention alone.

Times are medians over steps, from the first kernel of a forward to the last of the optimizer, by CUDA events. Peak memory
is what torch's allocator had given out at most within a step beyond what lay there before: activations, gradients,
workspace.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import statistics
import sys
import time
from typing import NamedTuple

import torch
from measure import Report, libattn, turns
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

NOISE = 3.0  # times torch's own difference; what is wrong makes hundreds
LEARNED = 0.8  # of the first loss, at most, is left at the end
WARM = 0.1  # of the steps come before those that are timed
SUCCESSORS = (0.5, 0.25, 0.15, 0.1)  # how likely each follows
RATE = 1e-3  # of learning; narrower models learn faster
STRETCH = 64  # tokens that are new, or repeated
SEED = 1


class Sizes(NamedTuple):
    layers: int = 2
    heads: int = 12
    dim: int = 64
    context: int = 2048
    batch: int = 8
    steps: int = 200
    tokens: int = 256  # that there are

    @property
    def width(self):
        return self.heads * self.dim


QUICK = Sizes(heads=2, dim=16, context=32, batch=8, steps=40, tokens=8)


# ---- text ----


def make_text(sizes, device):
    """[steps][batch][context + 1] tokens."""
    draw = torch.Generator().manual_seed(SEED)
    count, length = sizes.steps * sizes.batch, sizes.context + 1
    follows = torch.randint(sizes.tokens, (sizes.tokens, len(SUCCESSORS)), generator=draw)
    choice = torch.multinomial(torch.tensor(SUCCESSORS), count * length, True, generator=draw).view(count, length)
    least = min(STRETCH, sizes.context // 4)
    distance = torch.randint(least, max(sizes.context // 2, least + 1), (count,), generator=draw)
    every = torch.arange(count)
    text = torch.empty(count, length, dtype=torch.int64)
    text[:, 0] = torch.randint(sizes.tokens, (count,), generator=draw)
    for n in range(1, length):
        text[:, n] = follows[text[:, n - 1], choice[:, n]]
        if n // least % 2:
            back = n - distance
            text[:, n] = torch.where(back >= 0, text[every, back.clamp_min(0)], text[:, n])
    return text.view(sizes.steps, sizes.batch, length).to(device)


# ---- the model ----


def libattn_attention(q, k, v):
    return libattn.flash_attn_func(q, k, v, causal=True)


def torch_attention(backend):
    def attention(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attention


def attentions(device):
    """Who trains; the first one is libattn, the others are torch's."""
    other = ("math", SDPBackend.MATH) if device == "cpu" else ("cudnn", SDPBackend.CUDNN_ATTENTION)
    return {
        "libattn": libattn_attention,
        "fa2": torch_attention(SDPBackend.FLASH_ATTENTION),
        other[0]: torch_attention(other[1]),
    }


class Block(torch.nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x, attention):
        batch, rows, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, rows, 3, self.heads, -1).unbind(2)
        x = x + self.out(attention(q, k, v).reshape(batch, rows, width))
        return x + self.mlp(x)


class Model(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        width = sizes.width
        self.token = torch.nn.Embedding(sizes.tokens, width)
        self.place = torch.nn.Embedding(sizes.context, width)
        self.blocks = torch.nn.ModuleList(Block(sizes.heads, width) for _ in range(sizes.layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, sizes.tokens, bias=False)
        for embedding in (self.token, self.place):
            torch.nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text, attention):
        """The loss: how badly each token is foreseen from those before it."""
        x = self.token(text[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x, attention)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), text[:, 1:].flatten())


# ---- training ----


class Clock:
    """Times and memory of one run's steps."""

    def __init__(self, device):
        self.gpu, self.marks, self.peaks = device == "cuda", [], []

    def mark(self):
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self):
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        self.began = self.mark()

    def end(self):
        self.marks.append((self.began, self.mark()))
        if self.gpu:
            self.peaks.append(torch.cuda.max_memory_allocated() - self.before)

    def ms(self):
        """Of a step, the median of those after the first; wait for the GPU before."""
        times = [a.elapsed_time(b) if self.gpu else 1e3 * (b - a) for a, b in self.marks]
        return statistics.median(times[int(WARM * len(times)) :])


class Run:
    """One copy of the model and its optimizer."""

    def __init__(self, model, rate, attention, device):
        self.model, self.rate, self.attention, self.device = copy.deepcopy(model), rate, attention, device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), fused=device == "cuda")
        self.clock, self.losses = Clock(device), []

    def step(self, text, share):
        """share: of the steps, how many are done; the rate rises over the first tenth and falls in the end."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, 10 * share + 0.05, 2 * (1 - share) + 0.1)
        self.clock.begin()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(text, self.attention)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.clock.end()
        self.losses.append(loss.detach())

    def result(self, name):
        peaks = self.clock.peaks
        return {
            "name": name,
            "ms": self.clock.ms(),
            "peak_bytes": statistics.median(peaks) if peaks else None,
            "losses": torch.stack(self.losses).tolist(),
        }


def train(sizes, device):
    """A result for each."""
    torch.manual_seed(SEED)
    model = Model(sizes).to(device)
    rate = RATE * Sizes().width / sizes.width
    runs = {name: Run(model, rate, attention, device) for name, attention in attentions(device).items()}
    text = make_text(sizes, device)
    for n in range(sizes.steps):
        if sys.stderr.isatty():
            print(f"\rstep {n + 1}/{sizes.steps}\r", end="", file=sys.stderr, flush=True)
        for name in turns(list(runs), n):
            runs[name].step(text[n], n / sizes.steps)
    if device == "cuda":
        torch.cuda.synchronize()
    return [run.result(name) for name, run in runs.items()]


# ---- output ----


def difference(a, b):
    gaps = [abs(x - y) for x, y in zip(a["losses"], b["losses"])]
    return {"between": [a["name"], b["name"]], "mean": statistics.fmean(gaps), "largest": max(gaps)}


def differences(results):
    """libattn against each of torch's, then these against each other."""
    ours, one, other = results
    return [difference(ours, one), difference(ours, other), difference(one, other)]


def faults(results):
    """What is not as it should be, in words."""
    *ours, noise = differences(results)
    found = [
        f"{' and '.join(x['between'])} differ by {x['mean']:.2e}, more than {NOISE:g} times the noise, {noise['mean']:.2e}"
        for x in ours
        if not x["mean"] <= NOISE * noise["mean"]
    ]
    return found + [
        f"{r['name']} has not learned: a loss of {r['losses'][-1]:.3f}, after {r['losses'][0]:.3f} at first"
        for r in results
        if not r["losses"][-1] <= LEARNED * r["losses"][0]
    ]


def print_results(results):
    print(f"{'':10}{'ms a step':>12}{'peak MiB':>12}{'first loss':>12}{'last loss':>12}")
    for r in results:
        peak = f"{r['peak_bytes'] / 2**20:.1f}" if r["peak_bytes"] else "-"
        print(f"{r['name']:10}{r['ms']:12.3f}{peak:>12}{r['losses'][0]:12.4f}{r['losses'][-1]:12.4f}")
    print(f"\n{'losses':20}{'mean gap':>12}{'largest':>12}{'/ noise':>12}")
    noise = differences(results)[-1]["mean"]
    for x in differences(results):
        over = x["mean"] / max(noise, 1e-30)
        print(f"{' - '.join(x['between']):20}{x['mean']:12.2e}{x['largest']:12.2e}{over:12.2f}")


def draw(results, title, path):
    """Losses, and how far apart they are."""
    import matplotlib  # only who draws needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, gaps) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for r, style in zip(results, ("-", "--", ":")):
        losses.plot(r["losses"], style, label=f"{r['name']}, {r['ms']:.2f} ms a step")
    for a, b in ((0, 1), (0, 2), (1, 2)):
        apart = [max(abs(x - y), 1e-8) for x, y in zip(results[a]["losses"], results[b]["losses"])]
        gaps.semilogy(apart, label=f"{results[a]['name']} - {results[b]['name']}", linewidth=1)
    for panel, name in ((losses, "loss"), (gaps, "difference of losses")):
        panel.set_xlabel("step")
        panel.set_ylabel(name)
        panel.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def title_of(header):
    return (
        f"{header['layers']} layers, {header['heads']} heads of {header['dim']}, {header['batch']} x {header['context']} "
        f"tokens, {header['device']}"
    )


def draw_file(lines, path):
    header, *rest = map(json.loads, pathlib.Path(lines).read_text().splitlines())
    print(draw([x for x in rest if "losses" in x], title_of(header), path))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where (default cuda)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps: does it work at all?")
    for name in Sizes._fields:
        parser.add_argument(f"--{name}", type=int, help=f"default {getattr(Sizes(), name)}")
    parser.add_argument("--json", metavar="FILE", help="write a line of JSON for each run and difference there")
    parser.add_argument("--png", metavar="FILE", help="draw the curves; wants matplotlib")
    parser.add_argument("--draw", nargs=2, metavar=("LINES", "PNG"), help="draw those of a file of --json, no more")
    arguments = parser.parse_args(argv)
    if arguments.draw:
        draw_file(*arguments.draw)
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("train.py: torch sees no GPU here; --device cpu --quick tries it out without")
    given = {name: getattr(arguments, name) for name in Sizes._fields if getattr(arguments, name) is not None}
    sizes = (QUICK if arguments.quick else Sizes())._replace(**given)
    began = time.monotonic()
    report = Report(arguments, **sizes._asdict())
    results = train(sizes, arguments.device)
    for line in results + differences(results):
        report.write(line)
    print_results(results)
    wrong = faults(results)
    print(*(f"WRONG: {fault}" for fault in wrong), sep="\n", end="\n" if wrong else "")
    if arguments.png:
        header = {"device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu", **sizes._asdict()}
        try:
            print(draw(results, title_of(header), arguments.png))
        except ImportError as error:
            print(f"no picture: {error}; --draw makes it elsewhere from the file of --json", file=sys.stderr)
    print(f"{time.monotonic() - began:.0f} s; {'WRONG' if wrong else 'the curves are within noise, and have learned'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
