#!/usr/bin/env python3
"""table.py [--check] -- makes dev/results/zoo.md and the lessons' tables and pictures from dev/results/zoo-*.json, files that
`make -C dev/cuda bench` wrote: a JSON object a line, a line a version and shape. The first of COLUMNS is shown whole, of the others
the time and the share. In a lesson, the lines between <!-- zoo: FILE LADDER --> and <!-- end --> become a table of that ladder, and
zoo-FILE.svg is its picture. --check writes nothing and exits with 1 if a file is stale."""
import json
import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOC = ROOT / "dev/results", ROOT / "dev/doc"
FILES = "rmsnorm rope swiglu layout softmax attention_forward attention_backward matmul crossentropy embedding adamw overlap".split()
COLUMNS = [(90, "BF16"), (90, "FP32"), (80, "BF16"), (75, "FP16")]
HEAD = """# The kernel zoo, measured

{about}. Made by `python3 dev/cuda/table.py`. [The zoo](../cuda/README.md#a-row) says what the columns mean.
Times are in ms. A bold version is the trainer's own kernel. A predicted time in brackets was corrected after the measurement.
Not run: the file leaves the version out at this shape. Measured at 70aed2d. Since then these versions were written anew, without
another idea, and not measured again: RoPE rotate 2 and 3, SwiGLU forward 2 and 3, cross-entropy forward 1 and 2, backward 2 and 3.
"""


def read():
    """Returns {(file, ladder): {version: {column: {large: [rows]}}}} in the order of the files and runs."""
    zoo, gpus = {}, {}
    for path in sorted(RESULTS.glob("zoo-*.json")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            column = (row["arch"], row["precision"])
            gpus[column] = row["gpu"]
            of = zoo.setdefault((row["file"], row["ladder"]), {}).setdefault(row["version"], {}).setdefault(column, {})
            of.setdefault(row["large"], []).append(row)
    return zoo, gpus


def order(columns):
    return sorted(columns, key=lambda c: COLUMNS.index(c) if c in COLUMNS else len(COLUMNS))


def first(of, large):  # the rows of a version in its first column
    return of[order(of)[0]].get(large, [])


def digits(x):
    return f"{x:.4g}" if x else "–"


def predicted(row):
    return digits(row["predicted"]) + (f" ({digits(row['corrected'])})" if row["corrected"] else "")


def shapes(versions, column, large):
    """The sizes at which versions of a ladder ran in a column, in the order of the runs."""
    return list(dict.fromkeys(r["sizes"] for of in versions.values() for r in of.get(column, {}).get(large, [])))


def at(of, sizes, large):
    """The rows of a version at these sizes; None where the file leaves it out."""
    return [next((r for r in first(of, large) if r["sizes"] == size), None) for size in sizes]


def gain(row, before):  # times as fast as the version before, if both ran in the same way
    same = before and all(before[key] == row[key] for key in ("sizes", "arch", "precision"))
    return f"{before['ms'] / row['ms']:.2f}" if same else ""


def cells(of, before, classic, large):
    """The cells of a version: idea, error, same bits, classic, large, x; and the row that x compares."""
    small, big = at(of, classic, 0), at(of, large, 1)
    row = next(r for r in big + small if r)
    checked = next(r for r in small + big if r)
    error = f"{checked['error']:.0e} of {checked['allowed']:.0e}" if checked["allowed"] else ""
    rate = f"{row['rate'] * (1e-12 if row['products'] else 1e-9):.0f} {'TFLOP/s' if row['products'] else 'GB/s'}"
    return [row["idea"], error, "yes" if checked["same"] else "no",
            "; ".join(f"{predicted(r)}, {digits(r['ms'])}, {r['share']:.2f}" if r else "not run" for r in small),
            "; ".join(f"{predicted(r)}, {digits(r['ms'])}, {rate}, {r['share']:.2f}, {digits(r['joules'])} J" if r else "not run" for r in big),
            gain(row, before)], row


def page(zoo, gpus):
    others = order(gpus)[1:]
    text = HEAD.format(about="; ".join(f"{gpus[c]}, code of sm_{c[0]}, {c[1]}" for c in order(gpus)))
    for file in [f for f in FILES if any(f == k[0] for k in zoo)]:
        more = "".join(f" sm_{a} {p} |" for a, p in others)
        text += f"\n## {file}\n\n| | idea | error | same bits | classic: predicted, ms, share | large: predicted, ms, rate, share, J "
        text += f"| x |{more}\n|---|---|---|---|---|---|---|{'---|' * len(others)}\n"
        for (_, ladder), versions in [(k, v) for k, v in zoo.items() if k[0] == file]:
            name, before, said = ladder + " ", None, None
            for number, of in sorted(versions.items()):
                classic, large = (shapes(versions, order(of)[0], kind) for kind in (0, 1))
                row, before = cells(of, before, classic, large)
                if said != (said := classic + large):  # the sizes, where they are others than in the line above
                    name += "; ".join(said) + ":"
                bold = "**" if before["bold"] else ""
                rest = [(of.get(c, {}).get(1) or of.get(c, {}).get(0) or [None])[0] for c in others]
                row += [f"{digits(r['ms'])}, {r['share']:.2f}" if r else "" for r in rest]
                text += f"| {name} {bold}{number}{bold} | " + " | ".join(row) + " |\n"
                name = ""
    return text


def lesson_table(versions):
    large = any(first(of, 1) for of in versions.values())
    text, before = "| version | predicted ms | ms | share | x |\n|---|---|---|---|---|\n", None
    for number, of in sorted(versions.items()):
        row = (first(of, large) or [None])[0]
        idea = (row or first(of, 0)[0])["idea"]
        text += f"| {number} {idea} | " + (f"{predicted(row)} | {digits(row['ms'])} | {row['share']:.2f} | {gain(row, before)} |\n"
                                           if row else "| not run | | |\n")
        before = row or before
    return text


def picture(ladders):
    """An SVG of bars: a version's share of the limit. A line marks the share that was predicted."""
    bars, y = [], 8
    for (file, ladder), versions in ladders:
        bars.append(f'<text x="8" y="{(y := y + 20) - 8}" font-weight="bold">{file} {ladder}</text>')
        for number, of in sorted(versions.items()):
            row = (first(of, 1) or first(of, 0))[0]
            small = " (classic shape)" if any(first(v, 1) for v in versions.values()) and not row["large"] else ""
            width, guess = 300 * row["share"], 300 * row["share"] * row["ms"] / row["predicted"]
            bars.append(f'<text x="8" y="{y + 12}">{number} {escape(row["idea"] + small)}</text><rect x="300" y="{y}" width="{width:.1f}" '
                        f'height="14" fill="{"#1f6feb" if row["bold"] else "#9aa4b0"}"/><path d="M{300 + min(guess, 360):.1f} {y - 1}v16" '
                        f'stroke="#cf222e" stroke-width="2"/><text x="{306 + width:.1f}" y="{y + 12}">{row["share"]:.2f}</text>')
            y += 20
        y += 8
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="700" height="{y}" font-family="sans-serif" font-size="12">'
            f'<rect width="700" height="{y}" fill="#fff"/>' + "\n".join(bars) + "</svg>\n")


def main():
    zoo, gpus = read()
    made = {RESULTS / "zoo.md": page(zoo, gpus)} if zoo else {}
    for path in sorted(DOC.glob("*.md")):
        text = path.read_text()
        made[path] = re.sub(r"(<!-- zoo: (\w+) (\w+) -->\n).*?(<!-- end -->)",
                            lambda m: m[1] + lesson_table(zoo[m[2], m[3]]) + m[4] if (m[2], m[3]) in zoo else m[0], text, flags=re.S)
        for name in re.findall(r"\(zoo-(\w+)\.svg\)", text) if zoo else []:
            made[DOC / f"zoo-{name}.svg"] = picture([(k, v) for k, v in zoo.items() if k[0].startswith(name)])
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    check = "--check" in sys.argv
    for path in stale:
        print(f"{path.relative_to(ROOT)} is {'stale: python3 dev/cuda/table.py' if check else 'made anew'}")
        if not check:
            path.write_text(made[path])
    return check and len(stale) > 0


if __name__ == "__main__":
    sys.exit(main())
