"""The command line itself: help, manual, exit codes, info, bench, plan, and the memory of `attn run`."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from conftest import ATTN, ROOT, call

COMMANDS = ["info", "run", "check", "bench", "plan", "tune"]


def test_version_is_that_of_the_header():
    text = (ROOT / "include" / "attn.h").read_text()
    numbers = [re.search(rf"ATTN_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH")]
    assert call("--version").stdout == f"attn {'.'.join(numbers)}\n"


def test_help_names_every_command():
    for args in (["help"], ["--help"]):
        done = call(*args)
        assert done.returncode == 0
        for command in COMMANDS:
            assert re.search(rf"^  {command} ", done.stdout, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples(command):
    done = call(command, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "Examples:" in done.stdout
    assert re.search(rf"^  attn {command}", done.stdout.split("Examples:")[1], re.M)
    assert call("help", command).stdout == done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_manual_has_every_option(command):
    manual = (ROOT / "docs" / "attn.1").read_text().replace("\\-", "-")
    options = re.findall(r"^  (--[a-z0-9-]+)", call(command, "--help").stdout, re.M)
    assert options
    missing = [option for option in options if not re.search(re.escape(option) + r"(?![a-z0-9-])", manual)]
    assert not missing


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "Usage"),
        (["nonsense"], "no such command 'nonsense'"),
        (["bench", "--nonsense"], "no such option '--nonsense'"),
        (["bench", "word"], "unexpected argument 'word'"),
        (["bench", "--threads"], "--threads wants N"),
        (["bench", "--threads", "two"], "--threads 'two': a whole number is wanted"),
        (["bench", "--causal=yes"], "--causal takes no value"),
        (["bench", "--heads", "4/3"], "heads_q"),
        (["bench", "--dim", "577"], "577"),
        (["bench", "--seqlen", "-5"], "-5"),
        (["bench", "--seqlen", "1,,2"], "a number, a pair"),
        (["bench", "--seqlen", "1,2,"], "a number, a pair"),
        (["bench", "--seqlen", "99999999999"], "a number, a pair"),
        (["bench", "--batch", "2/3"], "a number"),
        (["bench", "--dtype", "f31"], "f32"),
        (["bench", "--suite", "nonsense"], "demo"),
        (["bench", "--backend", "tpu"], "ref, cpu or"),
        (["plan", "--window", "3"], "two whole numbers"),
        (["plan", "--flashmask-pattern", "nonsense"], "no pattern 'nonsense'"),
        (["plan", "--flashmask-pattern", "document", "--causal"], "without --causal"),
        (["plan", "--seqlen", "1,2"], "one problem at a time"),
        (["run", "--op", "sideways"], "forward, backward or append"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_exits_with_2(args, message):
    done = call(*args)
    assert done.returncode == 2
    assert message in done.stderr


def test_full_disk_is_reported():
    with open("/dev/full", "w") as full:
        done = subprocess.run([ATTN, "info"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 3 and "standard output" in done.stderr


def test_info_json_agrees_with_the_text():
    info = json.loads(call("info", "--json").stdout)
    text = call("info").stdout
    assert info["version"] in text and info["cpu"] in text and {"ref", "cpu"} <= set(info["backends"])
    assert len(info["kernels"]) == len(re.findall(r" (?:forward|backward|append) .* (?:yes|no) ", text))
    assert info["cuda"].get("why", "driver for CUDA") in text
    assert ("cuda" in info["backends"]) == info["cuda"]["usable"]
    for op in ("forward", "backward"):
        assert any(k["op"] == op and k["backend"] == "cpu" and k["available"] for k in info["kernels"])


KEYS = (
    "op backend kernel dtype kv_dtype batch heads_q heads_kv dim seqlen_q seqlen_kv causal threads ms gflops gb_per_s "
    "peak_gflops peak_fraction read_gb_per_s read_fraction"
)


def test_bench_json_has_exactly_the_keys():
    args = ["--heads", "4/2", "--dim", "32", "--seqlen", "64,1/128", "--causal", "--threads", "2", "--seconds", "0.01"]
    done = call("bench", "--json", "--backend", "cpu", *args)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert list(line) == KEYS.split()
        assert line["heads_q"] == 4 and line["heads_kv"] == 2 and line["causal"] is True and line["threads"] == 2
        assert line["ms"] > 0 and 0 < line["peak_fraction"] < 1.5
        assert line["peak_fraction"] == pytest.approx(line["gflops"] / line["peak_gflops"], rel=1e-4)
        # No machine reads a terabyte a second with two threads, and none that runs this less than 0.1 GB.
        assert 0.1 < line["read_gb_per_s"] < 1000
        assert line["read_fraction"] == pytest.approx(line["gb_per_s"] / line["read_gb_per_s"], rel=1e-4)
    assert (lines[1]["seqlen_q"], lines[1]["seqlen_kv"]) == (1, 128)
    # Work is counted by pairs that the mask allows: 64*65/2 of them, and one row of 128.
    for line, pairs in zip(lines, (64 * 65 / 2, 128)):
        assert line["gflops"] * line["ms"] * 1e6 == pytest.approx(4 * 32 * 4 * pairs, rel=1e-4)


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_bench_check_adds_an_error(op):
    args = ["--op", op, "--heads", "2", "--dim", "32", "--seqlen", "96", "--causal", "--repeat", "1"]
    done = call("bench", "--json", "--check", "--dtype", "f32,f16,bf16,f64", "--backend", "cpu", *args)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["dtype"] for line in lines] == ["f32", "f16", "bf16", "f64"]
    bar = 2.5e-3 if op == "forward" else 3e-3  # as in tools/workload.c
    for line in lines:
        assert list(line) == KEYS.split() + ["error"] and 0 <= line["error"] < bar


def test_bench_kv_dtype_counts_its_bytes():
    args = ["--heads", "4/2", "--dim", "32", "--seqlen", "3/256", "--repeat", "3", "--cold", "--check", "--backend", "cpu"]
    done = call("bench", "--json", "--dtype", "f32,bf16", "--kv-dtype", "f32,f16,i8", *args)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(x["dtype"], x["kv_dtype"]) for x in lines] == [(a, b) for a in ("f32", "bf16") for b in ("f32", "f16", "i8")]
    size = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
    for line in lines:
        assert line["cold"] is True and line["error"] < 2.5e-3
        rows, keys = 3 * 4 * 32, 256 * 2 * 32  # q and o, and lse; k and v
        wanted = 2 * rows * size[line["dtype"]] + 2 * keys * size[line["kv_dtype"]] + 4 * 3 * 4
        assert line["gb_per_s"] * line["ms"] * 1e6 == pytest.approx(wanted, rel=1e-4)
    done = call("bench", "--op", "backward", "--kv-dtype", "bf16", "--check", "--seqlen", "64", "--repeat", "1")
    assert done.returncode == 0 and " f32/bf16 " in done.stdout, done.stderr


def test_bench_table_says_what_the_shares_are_of():
    done = call("bench", "--heads", "2", "--seqlen", "64", "--repeat", "1", "--threads", "1", "--backend", "cpu")
    assert done.returncode == 0, done.stderr
    head, row, floors = done.stdout.splitlines()
    assert head.split()[-4:] == ["GFLOP/s", "peak", "GB/s", "read"]
    gflops, peak, rate, read = row.split()[-4:]
    found = re.fullmatch(r"measured here, 1 thread: ([0-9.]+) GFLOP/s f32, ([0-9.]+) GB/s read", floors)
    assert abs(float(gflops) / float(found[1]) - int(peak[:-1]) / 100) < 0.01
    assert abs(float(rate) / float(found[2]) - int(read[:-1]) / 100) < 0.02
    done = call("bench", "--heads", "2", "--seqlen", "64", "--repeat", "1", "--threads", "2", "--backend", "cpu", "--dtype", "f32,f64")
    assert done.returncode == 0, done.stderr
    for floors, threads in zip(done.stdout.splitlines()[-2:], ("2 threads", "1 thread"), strict=True):
        assert re.fullmatch(rf"measured here, {threads}: [0-9.]+ GFLOP/s f32, [0-9.]+ GFLOP/s f64, [0-9.]+ GB/s read", floors)


def test_bench_overhead():
    done = call("bench", "--suite", "overhead", "--json", "--threads", "2")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["what"].split()[0] for line in lines[:3]] == ["first", "first", "a"]
    assert all(line["us"] > 0 and line["threads"] == (1 if "one thread" in line["what"] else 2) for line in lines)
    assert [line["what"] for line in lines if "parallel_for" in line["what"]]
    assert (lines[2]["rows"], lines[2]["keys"], lines[2]["heads"], lines[2]["dim"]) == (1, 1, 1, 64)
    assert len(call("bench", "--suite", "overhead").stdout.splitlines()) == len(lines)
    assert call("bench", "--suite", "overhead", "--backend", "cuda").returncode == 2


def test_demo_suite_is_a_table_over_backends():
    done = call("bench", "--suite", "demo", "--check")
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert "error" in head and len(rows) >= 12
    assert {row.split(" ref ")[0] == row for row in rows} == {True, False}


def test_plan_says_what_it_will_do():
    done = call("plan", "--heads", "8/2", "--dim", "64", "--seqlen", "1024", "--causal", "--backend", "cpu")
    assert done.returncode == 0, done.stderr
    total, skipped, full, partial = map(
        int, re.search(r": (\d+), (\d+) skipped .*?, (\d+) full .*?, (\d+) partial", done.stdout).groups()
    )
    assert total == skipped + full + partial and skipped > 0 and full > 0 and partial > 0


def svg_colours(path):
    """Area of each colour in the map."""
    area = {}
    for rect in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("width", "").endswith("%") or rect.get("stroke"):
            continue
        area[rect.get("fill")] = area.get(rect.get("fill"), 0) + float(rect.get("width")) * float(rect.get("height"))
    return area


@pytest.mark.parametrize(
    "options",
    [
        ["--seqlen", "1024", "--causal"],
        ["--seqlen", "1000/1500", "--window", "100,50"],
        ["--seqlen", "1/32768"],
        ["--seqlen", "65536", "--causal", "--window", "4095,0"],
        ["--seqlen", "3/5"],
    ],
    ids=" ".join,
)
def test_plan_draws(tmp_path, options):
    picture = tmp_path / "tiles.svg"
    done = call("plan", "--backend", "cpu", "--svg", picture, *options)
    assert done.returncode == 0, done.stderr
    assert f"picture: {picture}" in done.stdout
    assert os.listdir(tmp_path) == ["tiles.svg"] and picture.stat().st_size < 300_000
    text = picture.read_text()
    assert "query rows i" in text and "keys j" in text and "order" in text and "partial:" in text
    assert svg_colours(picture)


PATTERNS = "causal-document document share-question sliding-window global-window two-way-window prefix-lm prefix-document random-eviction"


@pytest.mark.parametrize("pattern", PATTERNS.split())
def test_plan_knows_flashmask_patterns(tmp_path, pattern):
    assert pattern in call("plan", "--help").stdout
    done = call("plan", "--backend", "cpu", "--seqlen", "2048", "--flashmask-pattern", pattern, "--svg", tmp_path / "p.svg")
    assert done.returncode == 0, done.stderr
    skipped = int(re.search(r"(\d+) skipped", done.stdout)[1])
    assert skipped > 0


def test_plan_reads_flashmask_and_lengths(tmp_path):
    """A FlashMask file that says causal documents is the pattern of that name."""
    n, ends = 1000, [300, 450, 750, 850, 1000]
    column = np.array([min(end for end in ends if end > j) for j in range(n)], np.int32)
    np.save(tmp_path / "mask.npy", column.reshape(1, 1, n, 1))
    args = ["plan", "--backend", "cpu", "--seqlen", n]
    from_file = call(*args, "--causal", "--flashmask", tmp_path / "mask.npy")
    named = call(*args, "--flashmask-pattern", "causal-document")
    assert from_file.returncode == 0 and from_file.stdout == named.stdout
    np.save(tmp_path / "used.npy", np.array([100, 1000]))
    tiles = []
    for sequence in (0, 1):
        done = call(*args, "--batch", 2, "--used-kv", tmp_path / "used.npy", "--sequence", sequence)
        assert done.returncode == 0, done.stderr
        tiles.append(int(re.search(r"head 0: (\d+)", done.stdout)[1]))
    assert tiles[0] < tiles[1]


MEASURE = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(child.pid, 0)
print(status, usage.ru_maxrss * 1024)
"""


def test_run_needs_little_memory_beside_inputs_and_results(tmp_path, random):
    """1 x 65536 x 8 x 64: at most 64 MB above q, k, v, o and lse. A window makes it quick; what is kept is the same."""
    shape = (1, 65536, 8, 64)
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", random.standard_normal(shape, np.float32))
    args = [ATTN, "run", "--backend", "cpu", "--causal", "--window", "63,0"]
    for name in ("q", "k", "v", "o", "lse"):
        args += [f"--{name}", str(tmp_path / f"{name}.npy")]
    # A small process in between: this one's memory would count as the child's.
    done = subprocess.run([sys.executable, "-c", MEASURE, *args], capture_output=True, text=True, timeout=300)
    status, peak = map(int, done.stdout.split())
    assert status == 0, done.stderr
    tensors = 4 * 4 * int(np.prod(shape)) + 4 * 8 * 65536
    assert peak - tensors <= 64 * 1024 * 1024, peak - tensors
