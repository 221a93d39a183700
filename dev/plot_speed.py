#!/usr/bin/env python3
"""plot_speed.py [PAGE...] [-o out.png] -- draws the training speed beside compiled PyTorch, for the first page.
plot_speed.py --sweep FILE -o out.png -- draws attention's backward pass at every length, from `bench_attention_cu sweep`.

A PAGE of dev/results has a Markdown table whose first cell is "ours / compiled PyTorch". Its head names the models, and its row
"tokens/s" holds the two speeds of each. All figures come from there: without arguments, from the pages of H200 and H100."""
import argparse
import os

from errors import fail  # first: see there
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

DEV = os.path.dirname(os.path.abspath(__file__))
PAGES = [os.path.join(DEV, "results", page) for page in ("nvidia-h200.md", "nvidia-h100.md")]
HEAD = "ours / compiled PyTorch"
OURS, THEIRS, INK = "#1f6feb", "#9aa4b0", "#24292f"  # on white, so that a dark page shows it as well


def read_speeds(path):
    """Returns (machine, [(model, our tokens/s, PyTorch's tokens/s)]) of a page."""
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = f.read().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = next((i for i, row in enumerate(rows) if row[0] == HEAD), None)
    speeds = next((row for row in rows[head:] if row[0] == "tokens/s"), None) if head is not None else None
    if not speeds:
        fail(f'{path}: no table "{HEAD}" with a row "tokens/s"')
    pairs = [[float(number.replace(",", "")) for number in cell.split("/")] for cell in speeds[1:]]
    machine = lines[0].lstrip("# ").split(",")[0]
    return machine, [(model, *pair) for model, pair in zip(rows[head][1:], pairs)]


def draw(axis, machine, speeds):
    """Draws a machine's models from top to bottom: for each, a bar of ours above a bar of PyTorch, whose length is 1."""
    for row, (_, ours, theirs) in enumerate(speeds):
        ratio = ours / theirs
        for y, length, speed, color in ((row - 0.2, ratio, ours, OURS), (row + 0.2, 1, theirs, THEIRS)):
            axis.barh(y, length, height=0.38, color=color)
            axis.text(0.02, y, f"{speed:,.0f}", color="white" if color == OURS else INK, va="center", fontsize=9)
        axis.text(ratio + 0.02, row - 0.2, f"{ratio:.2f} ×", color=OURS, va="center", fontsize=11, fontweight="bold")
    axis.set_yticks(range(len(speeds)), [model for model, _, _ in speeds], fontsize=10)
    axis.set_ylim(len(speeds) - 0.5, -0.5)
    axis.set_xlim(0, 1.45)
    axis.set_xticks([])
    axis.tick_params(length=0, colors=INK)
    axis.spines[:].set_visible(False)
    axis.set_title(machine, pad=8, fontsize=12, fontweight="bold", color=INK, loc="left")


def draw_sweep(axis, rows, HD):
    """Draws, for a head dimension, how fast each kernel is beside the fastest of all at each length, and the one that is taken."""
    names = ["mma", "wgmma", "pairs", "walk"]
    rows = sorted((int(row[1]), [float(ms) for ms in row[4:8]], row[13]) for row in rows if int(row[0]) == HD)
    lengths = [T for T, _, _ in rows]
    best = [min(ms for ms in times if ms == ms) for _, times, _ in rows]
    for i, name in enumerate(names):
        axis.plot(lengths, [b / times[i] for b, (_, times, _) in zip(best, rows)], linewidth=1, label=name)
    axis.plot(lengths, [b / times[names.index(taken)] for b, (_, times, taken) in zip(best, rows)], "o", markersize=3, color=INK,
              label="taken")
    axis.axhline(0.97, color=THEIRS, linewidth=0.8, linestyle="--")
    axis.set_title(f"head_dim {HD}", fontsize=11, color=INK, loc="left")
    axis.set_ylim(0.5, 1.02)
    axis.set_xlabel("tokens of a row")


def sweep_rows(path):
    """Returns the cells of the lines of a file of `bench_attention_cu sweep`."""
    try:
        with open(path, encoding="utf-8") as f:
            rows = [line.replace("|", " | ").split() for line in f]
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    rows = [row for row in rows if len(row) == 17 and row[3] == "|"]
    if not rows:
        fail(f"{path}: no lines of `bench_attention_cu sweep`")
    return rows


def save(figure, path):
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:  # an unknown suffix
        fail(f"{path}: {error}")
    print(f"wrote {path}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE")
    p.add_argument("-o", "--out", default=os.path.join(DEV, "doc", "speed.png"), help="output file (dev/doc/speed.png)")
    p.add_argument("--sweep", metavar="FILE", help="draw attention's backward pass from this file instead")
    a = p.parse_args()
    if a.sweep:
        rows = sweep_rows(a.sweep)
        figure, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
        for axis, HD in zip(axes, (64, 128)):
            draw_sweep(axis, rows, HD)
        axes[0].legend(ncols=5, frameon=False, fontsize=9)
        figure.suptitle("Attention's backward pass: the time of the fastest kernel / the time of each", fontsize=12, color=INK)
        return save(figure, a.out)
    figure, axes = plt.subplots(1, len(a.pages), figsize=(9, 3.5), squeeze=False, layout="constrained")
    for axis, page in zip(axes[0], a.pages):
        draw(axis, *read_speeds(page))
    figure.suptitle("Tokens a second in training, BF16; bars relative to PyTorch", fontsize=12, color=INK)
    keys = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (OURS, THEIRS)]
    figure.legend(keys, ["llama3.c", "PyTorch, torch.compile"], loc="outside lower center", ncols=2, frameon=False,
                  labelcolor=INK)
    save(figure, a.out)


if __name__ == "__main__":
    main()
