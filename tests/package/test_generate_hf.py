"""bench/generate_hf.py on the host: it says what it shall, and finds other tokens out."""

import json
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import generate_hf  # noqa: E402

QUICK = ["--device", "cpu", "--quick"]


def test_generation(capsys, monkeypatch, tmp_path):
    lines = tmp_path / "generate.jsonl"
    assert generate_hf.main([*QUICK, "--json", str(lines)]) == 0
    _, *results = map(json.loads, lines.read_text().splitlines())
    tokens, timed = ([r for r in results if (r["case"] == "tokens") == want] for want in (True, False))
    assert len(tokens) == 4 and all(r["same"] and r["margin"] > 0 for r in tokens)
    assert [r["case"] for r in timed] == list(generate_hf.CASES)
    for r in timed:
        assert set(r["ms_per_token"]) == set(r["ms_to_first"]) == {"libattn", "sdpa"}
        assert all(n == r["rounds"] * 4 for n in r["tokens"].values())  # of 5, the first one apart
        assert r["calls"]["quick"] > 0 and r["calls"]["operator"] == 0
    assert "DIFFER" not in capsys.readouterr().out
    forward = generate_hf.libattn.transformers._quick.forward
    other = lambda q, k, v, options, **rest: forward(q, k, v, options._replace(scale=1.0), **rest)  # noqa: E731
    monkeypatch.setattr(generate_hf.libattn.transformers._quick, "forward", other)
    assert generate_hf.main([*QUICK, "--cases", "none"]) == 1
    assert "DIFFER from eager's" in capsys.readouterr().out
