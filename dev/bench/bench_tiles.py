#!/usr/bin/env python3
"""bench_tiles.py -- tables of attention's tiles on cards with less shared memory, beside FlashAttention 2, on the GPU at hand.

    python3 dev/bench/bench_tiles.py [--out FILE.md] PROGRAM...

PROGRAM: build/bench_tiles_cu of a build for sm_80, and of one for sm_75 (dev/bench/bench_tiles.cu). Each runs before and after
PyTorch's flash backend, which is FlashAttention 2, in bf16; a time is the mean of both medians. Backward is our three kernels:
statistics, dK and dV, dQ. `deterministic` is flash under torch.use_deterministic_algorithms. Flash always has this card's memory.

A cell has a number for each T, 512 to 32768. Above 1.00 the tiles are faster than before, or than flash."""
import argparse
import re
import subprocess
import sys

import bench_attention

LINE = re.compile(r"^ *(\d+) +(\d+) +(\d+) +(\d+) +(\d+) \| (\S+) +\| (.*?) +\| +(\d+) KB \| (\d+ x \d+) \| +([\d.]+) \|(.*)")


class Line:
    """A tile's time on a kind of card: shape, part, tiles, KB, warps, marks."""

    def __init__(self, m):
        self.T, self.HD, *self.rest = map(int, m.group(1, 2, 3, 4, 5))
        self.part, self.tiles, self.KB, self.warps = m[6], m[7], int(m[8]), m[9]
        self.ms, self.marks = float(m[10]), m[11].split()
        self.key = (self.T, self.HD, self.part, self.tiles, self.KB)

    def shape(self):
        B, NH, NKV = self.rest
        return "", self.T, self.HD, B, NH, NKV


def ours(program):
    """Returns the title and the lines of a run."""
    out = subprocess.run([program], capture_output=True, text=True, check=False)
    if out.returncode != 0:
        sys.exit(f"{program}:\n{out.stdout}{out.stderr}")
    title, *rest = out.stdout.splitlines()
    return title, [Line(m) for m in map(LINE.match, rest) if m]


def pick(lines, part, mark):
    return next(x for x in lines if x.part == part and mark in x.marks)


def numbers(values):
    return " ".join(f"{x:.2f}" if x else "-" for x in values)


def passes(lines, mark):
    """Returns {T: ms of forward and backward} with the tiles of before, or of now."""
    times = {}
    for T in sorted({x.T for x in lines}):
        row = [x for x in lines if x.T == T]
        forward, kv, q = (pick(row, part, mark).ms for part in ("forward", "dK_dV", "dQ"))
        times[T] = forward, kv + q + next(x.ms for x in row if x.part == "statistics")
    return times


def tables(title, lines, flash):
    """Returns the lines of the two tables of a program: the tiles of each kernel, and both passes beside flash."""
    tiles = [f"{title}: each kernel", "", "| head_dim | KB | kernel | tiles | warps | ms | times as fast as before |",
             "|---|---|---|---|---|---|---|"]
    short = [f"{title}: both passes, times as fast as before and as flash", "",
             "| head_dim | KB | backward, now | forward, now | backward, flash | backward, deterministic | forward, flash |",
             "|---|---|---|---|---|---|---|"]
    for HD, KB in sorted({(x.HD, x.KB) for x in lines if x.KB}, key=lambda c: (c[0], -c[1])):
        rows = [x for x in lines if x.HD == HD and x.KB in (KB, 0)]
        for part in ("forward", "dK_dV", "dQ"):
            before = {x.T: x.ms for x in rows if x.part == part and "before" in x.marks}
            for name in dict.fromkeys(x.tiles for x in rows if x.part == part):
                own = [x for x in rows if x.part == part and x.tiles == name]
                mark = " **now**" if "now" in own[0].marks else ""
                ratios = numbers(before[x.T] / x.ms if before.get(x.T) else 0 for x in own)
                ms = " ".join(f"{x.ms:.3f}" for x in own)
                tiles.append(f"| {HD} | {KB} | {part} | {name}{mark} | {own[0].warps} | {ms} | {ratios} |")
        old, new = passes(rows, "before"), passes(rows, "now")
        beside = [numbers(times[kind][i] / new[T][i] if times[kind] else 0 for T in new for times in [flash[T, HD]])
                  for kind, i in ((0, 1), (1, 1), (0, 0))]
        short.append(f"| {HD} | {KB} | {numbers(old[T][1] / new[T][1] for T in new)} | "
                     f"{numbers(old[T][0] / new[T][0] for T in new)} | {' | '.join(beside)} |")
    return tiles, short


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("programs", metavar="PROGRAM", nargs="+")
    p.add_argument("--out", help="also write the tables to this file")
    a = p.parse_args()
    bench_attention.need_gpu()
    print("our tiles", file=sys.stderr)
    runs = {program: [ours(program)] for program in a.programs}
    flash = {}
    for shape in dict.fromkeys(x.shape() for _, lines in (r[0] for r in runs.values()) for x in lines):
        print(f"flash, T {shape[1]} head_dim {shape[2]}", file=sys.stderr)
        flash[shape[1:3]] = [bench_attention.flash(shape, deterministic) for deterministic in (False, True)]
    print("our tiles again", file=sys.stderr)
    long, last = [], []
    for program, both in runs.items():
        both.append(ours(program))
        again = {x.key: x.ms for x in both[1][1]}
        for x in both[0][1]:
            x.ms = (x.ms + again[x.key]) / 2
        tiles, short = tables(*both[0], flash)
        long += tiles + [""]
        last += short + [""]
    print("\n".join(long + last))
    bench_attention.write(a.out, long + last)


if __name__ == "__main__":
    main()
