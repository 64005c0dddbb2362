"""The scripts of bench/, which are for GPUs, on the host: what they compare is the same, and what is wrong is seen."""

import argparse
import contextlib
import json
import sys
import types

import pytest
import torch
from conftest import ROOT
from test_masks import masked_rows

sys.path.insert(0, str(ROOT / "bench"))
import features  # noqa: E402
import masks  # noqa: E402
import measure  # noqa: E402
import peers  # noqa: E402

QUICK = ["--device", "cpu", "--quick"]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of torch and of libattn would wait for each other's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- masks ----


@pytest.mark.parametrize("n", [64, 200, 1000])
@pytest.mark.parametrize("name", masks.PATTERNS)
def test_patterns_are_the_same_written_either_way(name, n):
    made = masks.PATTERNS[name](n, "cpu")
    allowed = ~masked_rows(made.vectors[None], made.causal, n)[0]
    if made.causal:
        allowed = allowed.tril()
    assert torch.equal(masks.dense(made.mod, n, "cpu"), allowed)
    assert allowed.any(-1).all() and (name == "causal" or not torch.equal(allowed, torch.ones(n, n).tril().bool()))
    assert (made.starts is not None) == name.startswith("causal-document")


@pytest.mark.parametrize("name", masks.PATTERNS)
def test_patterns_through_the_library(name):
    q, k, v = (torch.randn(2, 128, 2, 32) for _ in range(3))
    made = masks.PATTERNS[name](128, "cpu")
    mask = masks.dense(made.mod, 128, "cpu")
    found = masks.flashmask_run(q, k, v, made)[0]()
    wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask)
    assert measure.agree(measure.difference(found, wanted.transpose(1, 2)), torch.float32)
    if made.starts:
        packed = masks.varlen_run(q, k, v, made.starts)[0]().view(q.shape)
        assert measure.agree(measure.difference(packed, wanted.transpose(1, 2)), torch.float32)


def test_masks_and_a_mask_that_is_not_the_same(capsys, monkeypatch, tmp_path):
    """FlexAttention on the host traces each mask anew, so there are two here."""
    lines = tmp_path / "masks.jsonl"
    assert masks.main([*QUICK, "--patterns", "causal-document-even", "--json", str(lines)]) == 0
    header, line = map(json.loads, lines.read_text().splitlines())
    assert header["device"] == "cpu" and set(line["ms"]) == {"libattn", "flex", "varlen"} and not line["wrong"]
    assert line["allowed"] == pytest.approx(8 * (16 * 17 / 2) / 128**2)

    masks.print_verdicts([line | {"over_flex": 1.6, "over_varlen": 1.2}], "cpu")
    verdicts = capsys.readouterr().out
    assert "FlexAttention's speed, met (want 1.5)" in verdicts and "packed sequences, MISSED (want 1.15)" in verdicts

    def off_by_one(n, device):
        made = masks.qk_sparse(n, device)
        made.vectors[n // 8] += 1
        return made

    monkeypatch.setitem(masks.PATTERNS, "qk-sparse", off_by_one)
    assert masks.main([*QUICK, "--patterns", "qk-sparse"]) == 1
    assert "WRONG: libattn and flex differ" in capsys.readouterr().out


# ---- features ----


def sizes(rows=64):
    return features.Sizes(2, rows, 4, 16, torch.float32, "cpu")


def test_features(capsys, monkeypatch, tmp_path):
    lines = tmp_path / "features.jsonl"
    assert features.main([*QUICK, "--dims", "32", "--json", str(lines)]) == 0
    _, *results = map(json.loads, lines.read_text().splitlines())
    assert [r["feature"] for r in results] == list(features.FEATURES) and results[0]["cost_percent"] == 0
    assert " cost more than wanted: " in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setattr(features, "on_host", lambda case: ((case.q, case.k, case.v), case.options._replace(softcap=0.0)))
    assert features.main([*QUICK, "--dims", "32", "--features", "softcap"]) == 1
    assert "softcap: WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in features.FEATURES if name not in ("gqa", "bias")])
def test_pairs_of_features(name):
    """Counted by brute force: a kernel that gives each allowed pair the same weight knows how many there are."""
    case = features.FEATURES[name](sizes(rows=256 if name == "paged-256" else 64))
    plain = case.options._replace(alibi=None, sink=None, dropout=0.0, seed=None)
    call = measure._core.forward(measure._torch, torch.zeros_like(case.q), case.k, case.v, plain)
    assert round(call[1].double().exp().sum().item()) == case.pairs


@pytest.mark.parametrize("name", ["softcap", "alibi", "window", "dropout", "sink", "bias"])
def test_features_change_the_result(name):
    """By more than what a kernel in bf16 may be off."""
    case = features.FEATURES[name](sizes())
    with_it = measure.libattn_run(case.q, case.k, case.v, case.options)[0]()
    without = measure.libattn_run(case.q, case.k, case.v, features.Options(causal=True))[0]()
    assert not measure.agree(measure.difference(with_it, without), torch.bfloat16)


# ---- peers ----


def test_peers(capsys, monkeypatch, tmp_path):
    lines = tmp_path / "peers.jsonl"
    assert peers.main([*QUICK, "--hopper", "--cases", "causal", "--json", str(lines)]) == 0
    _, *results = map(json.loads, lines.read_text().splitlines())
    assert {r["head_dim"] for r in results} == {32, 64, 96, 128, 192, 256}
    assert all(set(r["ms"]) >= {"libattn", "float16", "math"} for r in results)
    assert [r["dim_v"] for r in results if "dim_v" in r] == [128, 512]
    capsys.readouterr()
    run = peers.torch_run
    monkeypatch.setattr(peers, "torch_run", lambda backend, q, k, v, causal: run(backend, q, k, v, not causal))
    assert peers.main([*QUICK, "--cases", "d64,causal"]) == 1
    assert "d64-causal-s64: WRONG: libattn and fa2 differ" in capsys.readouterr().out


def test_grid():
    """What the ratios are taken over: the grid of head dims 64, 128, 256, each case once, with the best peer's figure."""
    cases = json.loads((ROOT / "bench/peers/h200.json").read_text())["cases"]
    names = [peers.name_of(case) for case in peers.more_cases(cases)]
    assert len(names) == len(set(names))
    grid = [case for case in cases if case["head_dim"] in peers.GRID]
    assert len(grid) == 3 * 2 * 4 and all(case["best_over_cudnn"] >= 1 for case in grid)


def test_verdicts(capsys):
    """The means and the least, from made-up results."""
    shape = {"causal": True, "seqlen": 512}
    results = [
        {"head_dim": 64, **shape, "ratio": {"cudnn": 2.0, "best": 1.0, "float16": 1.0}, "kernels": {}},
        {"head_dim": 128, **shape, "ratio": {"cudnn": 0.5, "best": 0.25, "float16": 0.97}, "kernels": {}},
        {"head_dim": 96, **shape, "ratio": {"cudnn": 1.01, "float16": 0.5}, "kernels": {}},
    ]
    peers.print_verdicts(results, "cpu")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "grid / best peer: mean 0.500, least 0.250 d128-causal-s512 MISSED (want 1.00, 0.95), 2 cases"
    assert lines[-3].startswith("fp16 / bf16: mean 0.985, least 0.970 d128-causal-s512 MISSED")
    assert lines[-4] == "d96, d192 / cuDNN: mean 1.010, least 1.010 d96-causal-s512 met (want 1.00, 1.00), 1 cases"


# ---- timing ----


def test_nobody_always_follows_the_same_one():
    names = ["a", "b", "c"]
    rounds = [measure.turns(names, n) for n in range(12)]
    assert all(sorted(order) == names for order in rounds)
    assert {order[0] for order in rounds} == set(names)
    assert len({tuple(order) for order in rounds}) == 6


class Cuda:
    """As much of torch.cuda as is needed for timing: a queue of work that takes `now` from one millisecond to the next."""

    def __init__(self):
        self.now, self.slept, self.recording = 0.0, 0, None

    def work(self, ms, capturable=True):
        def run():
            if self.recording is None:
                self.now += ms
            elif capturable:
                self.recording.append(ms)
            else:
                raise RuntimeError("operation not permitted when stream is capturing")

        return run

    def Event(self, enable_timing):
        event = types.SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def CUDAGraph(self):
        graph = types.SimpleNamespace(nodes=[])
        graph.replay = lambda: setattr(self, "now", self.now + sum(graph.nodes))
        return graph

    @contextlib.contextmanager
    def graph(self, graph):
        self.recording = graph.nodes
        try:
            yield
        finally:
            self.recording = None

    def synchronize(self):
        pass

    def _sleep(self, cycles):
        self.slept += 1


@pytest.mark.parametrize("capturable", [True, False])
def test_timing_on_a_made_up_gpu(capturable, monkeypatch, capsys):
    cuda = Cuda()
    monkeypatch.setattr(measure.torch, "cuda", cuda)
    runners = {
        "short": [cuda.work(0.05), cuda.work(0.07)],
        "long": [cuda.work(9.0, capturable)],
        "tiny": [cuda.work(1e-4)] * 3,
    }
    times = measure.measure(runners, argparse.Namespace(device="cuda", seconds=0.0, no_graphs=False, quick=True))
    assert times.ms == pytest.approx({"short": 0.06, "long": 9.0, "tiny": 1e-4})
    assert times.rounds == measure.LEAST_ROUNDS and times.how == ("graph" if capturable else "with launch")
    assert ("no graphs: operation not permitted" in capsys.readouterr().err) == (not capturable)
    assert measure.launches_for(runners["short"]) == 34 and measure.launches_for(runners["tiny"]) == 48
    assert cuda.slept > (measure.LEAST_ROUNDS if not capturable else measure.LEAST_ROUNDS // 4)


def test_differences():
    x = torch.randn(5, 7)
    assert measure.difference(x, x) == (0, 0)
    y = x.clone()
    y[3] = 0
    rms, worst = measure.difference(y, x)
    assert worst == 1 and 0 < rms < 1 and not measure.agree((rms, worst), torch.bfloat16)
    y[3, 3] = torch.nan
    assert not measure.agree(measure.difference(y, x), torch.bfloat16)
