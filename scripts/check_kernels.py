#!/usr/bin/env python3
"""Checks what the compiler said of the GPU kernels against their budget, a line per kernel and architecture.

    scripts/check_kernels.py [FOLDER]      FOLDER holds the fatbins and logs of `make kernels`; build/kernels

Exit 1 when a kernel spills, takes more registers than its blocks can have, more shared memory than its architecture has, was
compiled with a warning ("serialized" among them: wgmma that waits for itself), or is missing; or when one of Hopper's kernels
(FWD90, BWD90, DECODE90), which know no other architecture, was compiled for anything but sm_90a. src/cuda/budget.txt lists what
is allowed beyond that, each with its reason. Exit 0 with a word when there is no nvcc, and so nothing to check.
"""

import fnmatch
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
REGISTERS = 65536  # of a multiprocessor
SHARED = {80: 99 << 10, 90: 227 << 10}  # most that a block can have; sm_86 and 89, which have the rows of sm_80, have 99 KB
SHARED_A100 = 163 << 10  # sm_80 itself
LIBRARY_BYTES = 19 << 20  # most that all images together may have
PIECE_THREADS = 128
SINK_THREADS = 256
ANY_REALS = 4 * 4 * 576 + 32 * 33  # ATTN_BWD_ANY_REALS of src/cuda/args.h
NOTES = int(re.search(r"ATTN_HOPPER_NOTES = (\d+)", (ROOT / "src/cuda/args.h").read_text())[1])
NOTES_DECODE = int(re.search(r"ATTN_DECODE_NOTES = (\d+)", (ROOT / "src/cuda/args.h").read_text())[1])
NOTES_DECODE90 = int(re.search(r"ATTN_DECODE90_NOTES = (\d+)", (ROOT / "src/cuda/args.h").read_text())[1])
NOTES_BWD80 = int(re.search(r"ATTN_BWD_NOTES = (\d+)", (ROOT / "src/cuda/args.h").read_text())[1])
NOTES_BWD = int(re.search(r"ATTN_BWD90_NOTES = (\d+)", (ROOT / "src/cuda/args.h").read_text())[1])
BYTES = {"F16": 2, "BF16": 2, "F32": 4}


def read_table():
    """{entry: (image, threads, dynamic shared memory, its limit, blocks on a multiprocessor, arch)} from variants.def."""
    entries = {}
    for line in (ROOT / "src/cuda/variants.def").read_text().splitlines():
        match = re.match(r"(FWD|FWD90|BWD|BWD90|DECODE|DECODE90|PIECE)\((.*)\)", line)
        if not match:
            continue
        words = [word.strip() for word in match[2].split(",")]
        if match[1] == "PIECE":
            shared = ANY_REALS * 8 if words[1] == "bwd_any.cu" else 0
            threads = SINK_THREADS if words[0] == "bwd_sink" else PIECE_THREADS
            entries[words[0]] = (words[1].rsplit(".", 1)[0], threads, shared, SHARED[80], 1, None)
            continue
        if match[1] == "BWD":
            dim, own, others, warps, blocks, stages = map(int, words[4:10])
            rows = (2 if words[2] == "BOTH" else stages) * others * 8 if words[2] != "ROWS" else 0
            weights = 4 * own * others if words[2] == "BOTH" else 0
            shared = 2 * (own + stages * others) * dim * 2 + rows + weights + NOTES_BWD80  # ATTN_BWD_BYTES of cuda.h
            limit = SHARED[80] if words[2] != "BOTH" else SHARED_A100  # others have the line before
            entries[words[0]] = (words[0], 32 * warps, shared, limit, blocks, None)
            continue
        if match[1] == "DECODE":
            dim, rows, bn, stages, blocks, pages = map(int, words[3:9])
            rows = stages * bn + (8 if dim > 128 else 16) * rows if words[2] == "I8" else stages * 2 * bn
            shared = rows * dim + pages * 8 * stages * bn + NOTES_DECODE  # ATTN_DECODE_BYTES of cuda.h
            entries[words[0]] = (words[0], 128, shared, SHARED[80], blocks, None)
            continue
        if match[1] == "DECODE90":
            dim, _, bn, stages = map(int, words[2:6])
            shared = 2 * (64 + stages * bn) * dim + 2 * 64 * bn + NOTES_DECODE90  # ATTN_DECODE90_BYTES of cuda.h
            entries[words[0]] = (words[0], 384, shared, SHARED[90], 1, "90a")
            continue
        if match[1] == "BWD90":
            dim, rows, keys, blocks, buffers = map(int, words[2:7])
            if blocks:  # ATTN_BWD90_WIDE_BYTES
                keys //= blocks
                shared = (2 * keys + (3 if dim > 192 else 4) * rows) * dim * 2 + (blocks - 1) * keys * dim + 8 * keys * rows
                shared += buffers * rows * (64 if dim == 192 else 32) * 4
            else:  # ATTN_BWD90_NARROW_BYTES
                shared = 2 * (keys + 2 * rows) * dim * 2 + keys * rows * 2 + buffers * rows * dim * 4
            entries[words[0]] = (words[0], 512 if blocks else 384, shared + NOTES_BWD, SHARED[90], 1, "90a")
            continue
        if match[1] == "FWD90":
            dim, _, dim_v, bn, consumers, stages, qbuf = map(int, words[2:9])
            dim, dim_v = -(-dim // 64) * 64, -(-dim_v // 64) * 64
            out = 64 * consumers * dim_v if qbuf == 1 and dim_v > dim else 0
            shared = (qbuf * 64 * consumers * dim + out + stages * bn * (dim + dim_v)) * 2 + NOTES  # ATTN_HOPPER_BYTES of cuda.h
            entries[words[0]] = (words[0], 128 * (consumers + 1), shared, SHARED[90], 1, "90a")
            continue
        name, arch, dtype = words[0], int(words[1]), words[2]
        dim, dim_v, bm, bn, warps, blocks, _, eager = map(int, words[3:11])
        stages = 2 if eager == 2 else 1  # ATTN_TILE_BYTES of src/cuda/cuda.h
        shared = (bm * dim + stages * bn * (dim + dim_v)) * BYTES[dtype]
        limit = max(size for least, size in SHARED.items() if least <= arch)
        entries[name] = (name, 32 * warps, shared, limit, blocks, None)
    return entries


def read_budget():
    """[(pattern, spill bytes)]: the last line whose pattern fits a kernel counts."""
    rows = []
    for line in (ROOT / "src/cuda/budget.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, spills, _reason = line.split(maxsplit=2)
            rows.append((pattern, int(spills)))
    return rows


def read_log(path):
    """({(entry, arch): [registers, static shared memory, spilled bytes]}, warnings) from what ptxas -v said."""
    found, warnings, key = {}, [], None
    for line in path.read_text().splitlines():
        if re.search(r"\bwarning\b|serialized", line, re.IGNORECASE):
            warnings.append(line.strip())
        entry = re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        used = re.search(r"Used (\d+) registers", line)
        if entry:
            key = (entry[1], entry[2])
            found[key] = [0, 0, 0]
        elif key and spills:
            found[key][2] += int(spills[1]) + int(spills[2])
        elif key and used:
            shared = re.search(r"(\d+) bytes smem", line)
            found[key][:2] = int(used[1]), int(shared[1]) if shared else 0
    return found, warnings


def check(entry, row, numbers, budget):
    """Prints the line of one kernel on one architecture; returns how much is wrong with it."""
    _, threads, dynamic, most_shared, blocks, arch = row
    registers, static, spills = numbers
    allowed = 0
    for pattern, some_spills in budget:
        if fnmatch.fnmatch(entry[0], pattern):
            allowed = some_spills
    most_registers = min(255, REGISTERS // (threads * blocks) // 8 * 8)  # a thread has a multiple of 8
    wrong = []
    if registers > most_registers:
        wrong.append("registers")
    if static + dynamic > most_shared:
        wrong.append("shared memory")
    if spills > allowed:
        wrong.append("spills")
    if arch and entry[1] != arch:
        wrong.append("arch")
    print(
        f"{entry[0]:28} sm_{entry[1]:<3} {threads:7} {registers:5}/{most_registers:<4} {static + dynamic:7}/{most_shared:<7}"
        f" {spills:6}/{allowed:<5} {', '.join(wrong) or 'ok'}"
    )
    return len(wrong)


def are_compiled():
    cache = ROOT / "build/CMakeCache.txt"
    return cache.exists() and re.search("^ATTN_KERNELS:.*=compiled$", cache.read_text(), re.MULTILINE)


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/kernels"
    if len(sys.argv) == 1 and not are_compiled():
        print("check-kernels: skipped, no kernels were compiled in build/ (nvcc is not found, or ATTN_CUDA=OFF)")
        return 0
    table, budget, bad, lines, size = read_table(), read_budget(), 0, 0, 0
    print(f"{'kernel':28} {'arch':6} {'threads':>7} {'registers':>10} {'shared memory':>15} {'spills':>12}")
    for image in sorted({row[0] for row in table.values()}):
        log, fatbin = folder / f"{image}.log", folder / f"{image}.fatbin"
        if not log.exists() or not fatbin.exists():
            print(f"{image}: {log} or {fatbin} is missing; make kernels compiles them")
            bad += 1
            continue
        size += fatbin.stat().st_size
        found, warnings = read_log(log)
        for line in warnings:
            print(f"{image}: {line}")
        bad += len(warnings)
        for name in [name for name, row in table.items() if row[0] == image]:
            entries = [entry for entry in found if entry[0] == name]
            if not entries:
                print(f"{name}: the compiler did not speak of it; is it an entry of {image}?")
                bad += 1
            for entry in entries:
                bad += check(entry, table[name], found[entry], budget)
                lines += 1
    print(f"all images: {size} bytes of at most {LIBRARY_BYTES}")
    bad += size > LIBRARY_BYTES
    print(f"{lines} passed" if not bad else f"{bad} violations: {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
