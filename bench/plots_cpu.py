"""Pictures of what bench/peers_cpu.py has measured, one PNG for each kind of case; from its results, or its lines of JSON:

    python bench/plots_cpu.py cpu.jsonl plots/
"""

from __future__ import annotations

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

NAMES = {"libattn": "libattn", "torch": "torch", "ort": "ONNX Runtime"}
COLOURS = {"libattn": "#1b6ca8", "torch": "#d1642e", "ort": "#6a8f3c"}
KINDS = {
    "prefill": ("rows", "GFLOP/s", "peak_gflops"),
    "backward": ("rows", "GFLOP/s", "peak_gflops"),
    "decode": ("keys", "GB/s", "read_gb_per_s"),
}


def panels(results):
    """Results that share a picture's panel, by its title."""
    found = {}
    for r in results:
        title = f"batch {r['batch']}" if r["kind"] == "decode" else f"d{r['dim']} {'causal' if r['causal'] else 'full'}"
        found.setdefault((r["dtype"], title), []).append(r)
    return found


def line_of(rows, who, axis):
    """(sizes, rates) of libattn, or of the best variant of a peer."""
    points = [(r[axis], r["rate"].get(who if who == "libattn" else r["variant"].get(who))) for r in rows]
    points = sorted((x, y) for x, y in points if y is not None)
    return [x for x, _ in points], [y for _, y in points]


def powers_of_two(panel, sizes):
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(set(sizes)), [f"{n // 1024}k" if n >= 1024 else str(n) for n in sorted(set(sizes))])


def draw_kind(kind, results, floors, folder):
    axis, unit, floor = KINDS[kind]
    found = panels(results)
    dtypes = list(dict.fromkeys(dtype for dtype, _ in found))
    titles = list(dict.fromkeys(title for _, title in found))
    figure, axes = pyplot.subplots(
        len(dtypes), len(titles), figsize=(3.4 * len(titles), 2.7 * len(dtypes)), squeeze=False, sharey="row"
    )
    for (dtype, title), rows in found.items():
        panel = axes[dtypes.index(dtype)][titles.index(title)]
        for who, name in NAMES.items():
            sizes, rates = line_of(rows, who, axis)
            if sizes:
                panel.plot(sizes, rates, "o-", label=name, color=COLOURS[who], markersize=4)
        if floors.get(floor) and (dtype == "f32" or kind == "decode"):  # 16 bits may have units of their own
            panel.axhline(floors[floor], color="grey", linestyle="--", linewidth=1, label="measured peak")
        panel.set_title(f"{dtype}, {title}", fontsize=9)
        panel.set_xlabel(axis, fontsize=8)
        panel.set_ylabel(unit, fontsize=8)
        panel.tick_params(labelsize=7)
        powers_of_two(panel, [r[axis] for r in rows])
    for row in axes:
        row[0].set_ylim(bottom=0)  # last: panels of a row share it, and from here on it stays as it is
    axes[0][0].legend(fontsize=7)
    return save(figure, f"{kind}, {results[0]['threads']} threads", folder / f"{kind}.png")


def draw_length(results, floors, folder):
    """Nanoseconds that a pair of query and key takes, by length."""
    figure, panel = pyplot.subplots(figsize=(5, 3.4))
    for who, name in NAMES.items():
        sizes, rates = line_of(results, who, "rows")
        if sizes:
            cost = [4 * results[0]["dim"] / rate for rate in rates]
            panel.plot(sizes, cost, "o-", label=name, color=COLOURS[who], markersize=4)
    powers_of_two(panel, [r["rows"] for r in results])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("rows")
    panel.set_ylabel("ns for each pair of query and key")
    panel.legend(fontsize=8)
    return save(figure, f"causal, d{results[0]['dim']}, f32, {results[0]['threads']} threads", folder / "length.png")


def save(figure, title, path):
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def draw(results, floors, folder):
    """The paths of what was drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for kind in KINDS:
        if rows := [r for r in results if r["kind"] == kind]:
            made.append(draw_kind(kind, rows, floors, folder))
    if rows := [r for r in results if r["kind"] == "length"]:
        made.append(draw_length(rows, floors, folder))
    return made


def main(argv):
    if len(argv) != 2:
        sys.exit("usage: plots_cpu.py FILE.jsonl FOLDER")
    header, *lines = map(json.loads, pathlib.Path(argv[0]).read_text().splitlines())
    for path in draw([line for line in lines if "case" in line], header, pathlib.Path(argv[1])):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
