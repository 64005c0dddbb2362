"""The scripts of bench/, on the host, those for GPUs too: what they compare is the same, and what is wrong is seen."""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import ROOT
from test_masks import masked_rows

sys.path.insert(0, str(ROOT / "bench"))
import features  # noqa: E402
import gradients  # noqa: E402
import masks  # noqa: E402
import measure  # noqa: E402
import peers  # noqa: E402
import peers_cpu  # noqa: E402
import plots_cpu  # noqa: E402
import train  # noqa: E402

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
    every = json.loads((ROOT / "bench/peers/h200.json").read_text())["cases"]
    for op in ("fwd", "bwd"):
        cases = [case for case in every if case["op"] == op]
        names = [peers.name_of(case) for case in peers.more_cases(cases)]
        assert len(names) == len(set(names))
        grid = [case for case in cases if case["head_dim"] in peers.GRID]
        assert len(grid) == 3 * 2 * 4 and all(case["best_over_cudnn"] >= 1 for case in grid)


def test_peers_backward(capsys, monkeypatch):
    """Gradients are held against torch's; a backward that is not the same problem's is found out."""
    assert peers.main([*QUICK, "--backward", "--cases", "d64"]) == 0
    assert "op backward" in capsys.readouterr().out
    assert peers.main([*QUICK, "--backward", "--unordered", "--cases", "d64"]) == 0
    out = capsys.readouterr().out
    assert "op backward, unordered" in out and "ordered / fast" in out
    run = peers.torch_run
    monkeypatch.setattr(peers, "torch_run", lambda backend, q, k, v, causal: run(backend, q, k, v, not causal))
    assert peers.main([*QUICK, "--backward", "--cases", "d64,causal"]) == 1
    assert "d64-causal-s64: WRONG: libattn and fa2 differ" in capsys.readouterr().out


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


# ---- gradients ----


@pytest.mark.parametrize("causal", [False, True])
def test_exact_gradients(causal):
    q, k, v = (torch.randn(1, 40, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    d_o = torch.randn(1, 40, 2, 16, dtype=torch.float64)
    o = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    o.transpose(1, 2).backward(d_o)
    for found, x in zip(gradients.exact(q.detach(), k.detach(), v.detach(), d_o, causal), (q, k, v)):
        torch.testing.assert_close(found, x.grad)


def test_gradients(capsys, monkeypatch, tmp_path):
    lines = tmp_path / "gradients.jsonl"
    small = [*QUICK, "--rows", "96", "--heads", "1", "--dim", "32"]
    status = gradients.main([*small, "--json", str(lines)])
    out = capsys.readouterr().out
    _, *results = map(json.loads, lines.read_text().splitlines())
    assert {(r["dtype"], r["inputs"]) for r in results} == {
        (dtype, kind) for dtype in ("bfloat16", "float16") for kind in gradients.KINDS
    }
    assert {r["name"] for r in results} == {"libattn", "fa2", "math", "least"}
    for r in results:
        assert r["name"] != "least" or all(1e-4 < rms < 3e-3 for rms, _ in r["error"].values())
    # CPUs that multiply bf16 round p to it: they are up to a tenth above FlashAttention-3's d_v of outliers, and nothing else.
    rounds_p = any(re.search("_(amx|neonbf16|avx512bf16)_bf16", r.get("kernel", "")) for r in results)
    missed = re.findall("^MISSED: (.*)$", out, re.M)
    assert status == (1 if missed else 0) and ("every bar is met" in out) == (not missed)
    assert not missed or (rounds_p and all(re.match(r"bfloat16 outliers d_v 2\.[123]\de-03,", words) for words in missed))

    def off(*words):
        run, kernel = right(*words)
        return lambda: tuple(x * y for x, y in zip(run(), (1, 1.01, 1))), kernel

    right = gradients.libattn_backward_run
    monkeypatch.setattr(gradients, "libattn_backward_run", off)
    assert gradients.main(small) == 1
    out = capsys.readouterr().out
    assert "MISSED: bfloat16 normal d_k" in out and "MISSED: float16 normal d_k" in out and "normal d_q 1" not in out


def test_outliers():
    plain, some, more = (gradients.make_inputs(kind, 512, 2, 64, torch.float32, "cpu") for kind in gradients.KINDS)
    for n, (x, y, z) in enumerate(zip(plain, some, more)):
        changed = (x != z).float().mean().item()
        assert 5e-4 < changed < 2e-3 and (z - x)[x != z].std().item() == pytest.approx(10, rel=0.3)
        assert torch.equal(y, x if n == 3 else z)


# ---- training ----


def test_training(capsys, tmp_path):
    lines, picture = tmp_path / "train.jsonl", tmp_path / "train.png"
    assert train.main([*QUICK, "--json", str(lines)]) == 0
    header, *rest = map(json.loads, lines.read_text().splitlines())
    assert header["device"] == "cpu" and header["steps"] == 40 and len(rest) == 6
    assert [r["name"] for r in rest[:3]] == ["libattn", "fa2", "math"]
    assert all(len(r["losses"]) == 40 and r["ms"] > 0 for r in rest[:3])
    assert [x["between"] for x in rest[3:]] == [["libattn", "fa2"], ["libattn", "math"], ["fa2", "math"]]
    assert all(0 < x["mean"] < x["largest"] < 1e-3 for x in rest[3:])
    assert "within noise" in capsys.readouterr().out
    assert train.main(["--draw", str(lines), str(picture)]) == 0 and picture.stat().st_size > 1000


def test_training_with_gradients_that_are_wrong(capsys, monkeypatch):
    """A forward without a fault, and a d_v that is a hundredth too large: losses stay close, and are not within noise."""

    class Slightly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 1.01 * gradient

    right = train.libattn_attention
    monkeypatch.setattr(train, "libattn_attention", lambda q, k, v: right(q, k, Slightly.apply(v)))
    assert train.main([*QUICK, "--steps", "12"]) == 1
    assert "WRONG: libattn and fa2 differ" in capsys.readouterr().out


def test_training_text():
    """Half of it says again what stood a distance before; the rest is made of pairs that the chain has."""
    sizes = train.Sizes(context=256, batch=4, steps=3, tokens=50)
    text = train.make_text(sizes, "cpu").view(-1, 257)
    assert torch.equal(text, train.make_text(sizes, "cpu").view(-1, 257)) and text.max() < 50
    for row in text:
        again = max((row[n:] == row[:-n]).float().mean() for n in range(64, 128))
        assert again > 0.4
    assert len(set(map(tuple, torch.stack([text[:, :-1].flatten(), text[:, 1:].flatten()], 1).tolist()))) < 600


# ---- peers on the host ----


@pytest.fixture
def small(monkeypatch):
    """Sizes that take no time, with every kind of case."""
    made = [
        case._replace(rows=min(case.rows, 64), keys=64 if case.rows > 16 else 256, batch=case.batch)
        for case in peers_cpu.all_cases()
        if (case.rows in (1024, 16) or (case.rows == 1 and case.keys == 4096)) and case.dim == 128
    ]
    monkeypatch.setattr(peers_cpu, "all_cases", lambda: made)
    monkeypatch.setattr(peers_cpu, "is_quick", lambda case: True)
    monkeypatch.setattr(measure, "PAUSE", 0)
    monkeypatch.setattr(peers_cpu, "find_floors", lambda threads: {"peak_gflops": 1e3, "read_gb_per_s": 50.0})
    return made


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_turns_of_builds(op):
    """In a process of its own, for it loads the package again for every variant."""
    library = measure._lib.library._name
    words = [f"a={library}", f"plain={library}:c", "torch", "--op", op, "--dim", "16", "--seqlen", "24", "--seconds", "0"]
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "turns_cpu.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[1:]
    assert [line.split()[:3] for line in lines] == [["dim", "16", "24"]] * 2 and "causal" in lines[1]
    assert all(" x1.000 " in line and all(f" {name} " in line for name in ("a", "plain", "torch")) for line in lines)


def test_turns_of_builds_wants_libraries():
    script = str(ROOT / "bench" / "turns_cpu.py")
    done = subprocess.run([sys.executable, script, "new=nowhere.so"], capture_output=True, text=True)
    assert done.returncode == 2 and "new=nowhere.so: want torch, or" in done.stderr


def test_cpu_peers(small, capsys, tmp_path):
    lines = tmp_path / "cpu.jsonl"
    words = ["--quick", "--threads", "1", "--peers", "torch", "--json", str(lines)]
    assert peers_cpu.main([*words, "--cases", "prefill|backward|decode|verify|length"]) == 0
    header, *results = map(json.loads, lines.read_text().splitlines())
    assert header["threads"] == 1 and [r["case"] for r in results] == [case.name for case in small]
    assert {r["kind"] for r in results} == {"prefill", "backward", "decode", "verify", "length"}
    for r in results:
        names = {"libattn", "torch"} | ({"torch-grouped"} if r["kind"] == "decode" else set())
        assert set(r["ms"]) == names and not r["wrong"] and r["ratio"]["best"] == r["ratio"]["torch"] > 0
        floor = 50 if r["kind"] == "decode" else 1e3
        assert r["share"] == pytest.approx(r["rate"]["libattn"] / floor)
        fastest = min(ms for name, ms in r["ms"].items() if name != "libattn")
        assert r["ratio"]["torch"] == pytest.approx(fastest / r["ms"]["libattn"])
    assert "WRONG" not in capsys.readouterr().out


def test_cpu_peers_that_differ_or_are_missing(small, capsys, monkeypatch):
    monkeypatch.setattr(peers_cpu, "onnx_run", None)
    monkeypatch.setattr(peers_cpu, "NO_ORT", "No module named 'onnxruntime'", raising=False)
    run = peers_cpu.torch_run
    monkeypatch.setattr(peers_cpu, "torch_run", lambda q, k, v, causal: run(q, k, v, False))
    assert peers_cpu.main(["--quick", "--threads", "1", "--cases", "verify.*bf16"]) == 1
    out, err = capsys.readouterr()
    assert "no ONNX Runtime: No module named 'onnxruntime'" in err
    assert "verify-q16-k256-bf16: WRONG: libattn and torch differ" in out and "torch is off by" in out
    # A little less exact than libattn, by the word of ref, is not wrong.
    monkeypatch.setattr(peers_cpu, "torch_run", lambda *x: lambda: run(*x)() * 1.00001)
    assert peers_cpu.main(["--quick", "--threads", "1", "--cases", "verify.*-f32"]) == 0
    assert "torch is off by" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no case matches 'nonsense'"):
        peers_cpu.main(["--cases", "nonsense"])


def test_cpu_counts():
    """By brute force."""
    for case in peers_cpu.all_cases():
        if case.rows * case.keys > 1 << 20 or case.batch > 1:
            continue
        allowed = torch.ones(case.rows, case.keys)
        pairs = int((allowed.tril(case.keys - case.rows) if case.causal else allowed).sum())
        times = 2.5 if case.kind == "backward" else 1
        assert case.flops == times * 2 * 2 * case.dim * pairs * case.heads
    names = [case.name for case in peers_cpu.all_cases()]
    assert len(names) == len(set(names)) and "decode-k32768-b8-bf16" in names and "prefill-d64-s512-full-f16" in names


def test_onnx_runtime(small, capsys, tmp_path):
    lines = tmp_path / "ort.jsonl"
    words = ["--quick", "--threads", "1", "--peers", "ort", "--json", str(lines), "--cases", "prefill|decode|verify"]
    assert peers_cpu.main(words) == 0
    _, *results = map(json.loads, lines.read_text().splitlines())
    assert all(("ort" in r["ratio"]) == (r["dtype"] != "bf16") for r in results)
    assert {name for r in results for name in r["ms"]} == {"libattn", "ort-gqa", "ort-mha"}
    assert "cases without ort: " in capsys.readouterr().out


def test_cpu_plots(tmp_path):
    results = [
        {
            **case._asdict(),
            "threads": 2,
            "rate": {"libattn": 9.0, "torch-grouped": 5.0},
            "variant": {"torch": "torch-grouped"},
        }
        for case in peers_cpu.all_cases()
    ]
    made = plots_cpu.draw(results, {"peak_gflops": 10.0}, tmp_path)
    assert [path.name for path in made] == ["prefill.png", "backward.png", "decode.png", "length.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_cpu_verdicts(capsys):
    """From made-up results."""

    def result(kind, dtype, ms, share, **ratio):
        case = next(c for c in peers_cpu.all_cases() if c.kind == kind and c.dtype == dtype and c.keys >= 4096)
        return {"case": case.name, **case._asdict(), "ms": {"libattn": ms}, "share": share, "ratio": ratio}

    results = [
        result("prefill", "f32", 10.0, 0.7, best=1.3),
        result("prefill", "f16", 8.0, 0.8, best=1.1),
        result("decode", "f32", 4.0, 0.5, best=2.6),
        result("decode", "f16", 2.0, 0.5, ort=1.5, best=1.5),
        result("verify", "f32", 1.0, 0.61),
    ]
    results[2]["ms"]["torch"] = 9.0
    peers_cpu.print_verdicts(results, [{"what": "first call", "us": 900.0}, {}, {"what": "a call", "us": 2.5}])
    lines = capsys.readouterr().out.splitlines()
    assert "prefill d64 f32, share of peak: MISSED: met in 0 of 1 cases, least 0.70" in "\n".join(lines)
    for start in (
        "prefill f32 / better peer: met in 1 of 1",
        "prefill f16 / better peer: MISSED: met in 0 of 1",
        "prefill f16 / f32: met in 1 of 1 cases, least 1.25",
        "decode f16 / f32: met in 1 of 1 cases, least 2.00",
        "decode f32 batch 1, of the lower bar: met in 1 of 1 cases, least 1.04",
        "decode f32 batch 8, of the lower bar: not measured",
        "decode / torch with enable_gqa: MISSED: met in 0 of 1 cases, least 2.25",
        "decode f16 / ONNX Runtime: met",
        "verify, share of peak: met",
        "first call: met, 900.00 us",
        "a call: MISSED, 2.50 us",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, start


# ---- timing ----


def test_turns_of_several_runs(monkeypatch):
    """The first run of a turn does not count, and each run takes the next set, whoever had the one before."""
    clock, order = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(measure.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: order.append("pause"))

    def runs(name, first, later):
        def work(n):
            woken = order and order[-1] != "pause"
            order.append((name, n))
            clock[0] += 1e-3 * (later if woken else first)

        return [lambda n=n: work(n) for n in range(4)]

    runners = {"a": runs("a", 9.0, 2.0), "b": runs("b", 30.0, 30.0)}
    arguments = argparse.Namespace(device="cpu", seconds=0.0, quick=False, turn_ms=12)
    times = measure.measure(runners, arguments)
    assert times.ms == pytest.approx({"a": 2.0, "b": 30.0}) and times.rounds == measure.LEAST_LONG_ROUNDS
    sets = [x[1] for x in order if x != "pause"][2:]  # two to begin with
    assert sets == [n % 4 for n in range(len(sets))] and order.count("pause") == 2 * times.rounds


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
