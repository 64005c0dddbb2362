"""scripts/check_kernels.py: each kind of violation is seen, in made-up logs of the compiler."""

import re
import subprocess
import sys

import pytest

from conftest import ROOT

HOPPER = "fwd_sm90_bf16_"
LINES = [re.match(r"(FWD|FWD90|BWD|BWD90|DECODE|DECODE90|PIECE)\(\s*(\w+)\s*,\s*(?:(\w+)\.cu)?", line)
         for line in (ROOT / "src/cuda/variants.def").read_text().splitlines()]
ENTRIES = {match[2]: match[3] or match[2] for match in LINES if match}  # entry: its image


def log_of(entry, registers=32, shared=0, spills=0, extra="", arch=None):
    arch = arch or ("90a" if "sm90" in entry else "80")
    return (
        f"ptxas info    : Compiling entry function '{entry}' for 'sm_{arch}'\n"
        f"    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers, {shared} bytes smem, 1240 bytes cmem[0]\n{extra}"
    )


def check(folder, which="append", **changed):
    """Logs of all kernels, that of one as given; the exit status and the text."""
    for image in set(ENTRIES.values()):
        (folder / f"{image}.fatbin").write_bytes(b"image")
        (folder / f"{image}.log").write_text(
            "".join(log_of(e, **(changed if e == which else {})) for e, i in ENTRIES.items() if i == image)
        )
    return run(folder)


def run(folder):
    done = subprocess.run([sys.executable, ROOT / "scripts/check_kernels.py", folder], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_kernels_within_their_budget_pass(tmp_path):
    code, text = check(tmp_path)
    assert code == 0 and f"{len(ENTRIES)} passed" in text


@pytest.mark.parametrize(
    "changed, word",
    [
        (dict(registers=256), "registers"),
        (dict(shared=(99 << 10) + 1), "shared memory"),
        (dict(spills=4), "spills"),
        (dict(extra="wgmma.mma_async instructions are serialized due to ...\n"), "serialized"),
        (dict(extra="append.cu(3): warning #177-D: declared but never referenced\n"), "warning"),
    ],
)
def test_violations_are_seen(tmp_path, changed, word):
    code, text = check(tmp_path, **changed)
    assert code == 1 and word in "\n".join(line for line in text.splitlines() if line.startswith("append")), text
    assert text.endswith("1 failed\n")


@pytest.mark.parametrize(
    "kernel, changed, word",
    [
        ("d128", dict(registers=168), None),
        ("d128", dict(registers=169), "registers"),  # 384 threads
        ("d64", dict(registers=128), None),
        ("d64", dict(registers=129), "registers"),  # 512: three consumers
        ("d96_all", dict(registers=168), None),
        ("d128", dict(shared=33792), None),  # 198,656 bytes of tiles and notes besides
        ("d128", dict(shared=33793), "shared memory"),
        ("d96", dict(shared=33792), None),  # columns come in blocks of 64
        ("d96", dict(shared=33793), "shared memory"),
        ("d128", dict(spills=4), "spills"),
        ("d128", dict(arch="90"), "arch"),
        ("d64_all", dict(arch="80"), "arch"),
        ("d128", dict(extra="(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n"), "serialized"),
    ],
)
def test_violations_of_hoppers_kernels_are_seen(tmp_path, kernel, changed, word):
    entry = HOPPER + kernel
    code, text = check(tmp_path, entry, **changed)
    lines = "\n".join(line for line in text.splitlines() if re.match(entry + r"\b", line))
    assert code == (1 if word else 0) and (word or "ok") in lines, text


def test_a_missing_kernel_is_seen(tmp_path):
    check(tmp_path)
    (tmp_path / "append.log").write_text("")
    assert run(tmp_path)[0] == 1
    (tmp_path / "append.log").unlink()
    code, text = run(tmp_path)
    assert code == 1 and "missing" in text


def test_images_that_are_too_large_together_are_seen(tmp_path):
    check(tmp_path)
    most = re.search(r"^LIBRARY_BYTES = (\d+) << (\d+)", (ROOT / "scripts/check_kernels.py").read_text(), re.M)
    (tmp_path / "append.fatbin").write_bytes(b"x" * (int(most[1]) << int(most[2])))
    assert run(tmp_path)[0] == 1
