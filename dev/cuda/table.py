#!/usr/bin/env python3
"""table.py [--check|BENCH.json] -- makes dev/results/zoo.md and the lessons' tables and pictures from dev/results/zoo.json: a
JSON object a line, the rates of a run and then a line a version and shape. BENCH.json, which `make -C dev/cuda bench` wrote,
goes into it first, and replaces what the same card, build and files had there. The first of COLUMNS is shown whole, of the
others the time and the share. In a lesson, the lines between <!-- zoo: FILE LADDER --> or <!-- zoo: FILE LADDER FP32 --> and
<!-- end --> become a table of that ladder, and zoo-FILE.svg is its picture. --check writes nothing and exits with 1 if a file
is stale, or a file of the zoo has no lesson in README.md or a ladder is not in it, or a version leaps, or a lesson's prose has a
figure that none of its blocks computes."""
import json
import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOC = ROOT / "dev/results", ROOT / "dev/doc"
ROWS = RESULTS / "zoo.json"
FILES = "rmsnorm rope swiglu layout softmax attention_forward attention_backward matmul crossentropy embedding adamw muon overlap".split()
RATES = {"copy": ("copy, GB/s", 1e-9), "product": ("products, TFLOP/s", 1e-12), "lanes": ("instructions of threads, G/s", 1e-9),
         "trip": ("a trip, ns", 1e9), "launch": ("a launch, us", 1e6)}
CARD = "NVIDIA H100 80GB HBM3"  # which the lessons speak of; tables name others
COLUMNS = [(90, "BF16"), (90, "FP32"), (80, "BF16"), (75, "FP16")]
HEAD = """# The kernel zoo, measured

{about}. Made by `python3 dev/cuda/table.py`. [The zoo](../cuda/README.md#a-row) says what the columns mean.
Times are in ms. A bold version is the trainer's own kernel. A predicted time in brackets was corrected after the measurement.
Not run: the file leaves the version out at this shape. An empty cell: that code lacks the version, or it was not measured.
Measured at commit 3522223. At e1a4cfa: softmax and rmsnorm; layout, crossentropy and embedding in FP32; code of sm_80 and sm_75.
At 47cfef9: layout of sm_90 in BF16; rmsnorm, rope, swiglu, crossentropy and embedding of sm_75. There rmsnorm's dx was 7.3e-4 off
where 4.9e-4 was allowed: in fp16, roundings of terms that cancel show. Since then its limit counts them, as adamw's.
Its 27 tests passed at 4160e0c.
The rates of a run stand before its rows in zoo.json. Those of these runs were not kept: a trip and a launch are solved from the
predictions that they made. [predict.cuh](../cuda/predict.cuh) makes every prediction again, to 0.1 %.
matmul's version 14 in code of sm_80 with 4, 3 and 2 buffers had a share of 0.61, 0.63 and 0.52 at the large shape (47cfef9).
"""


def add(path):
    def run(line):
        return tuple(json.loads(line)[key] for key in ("gpu", "arch", "precision", "file"))
    if not Path(path).exists():
        sys.exit(f"error: {path}: there is no such file")
    old, new = (p.read_text().splitlines(keepends=True) if p.exists() else [] for p in (ROWS, Path(path)))
    again = set(map(run, new))
    ROWS.write_text("".join([line for line in old if run(line) not in again] + new))


def read():
    """Returns {file: {ladder: {version: {column: [rows in the order of the runs]}}}}, {column: gpu} by the order of COLUMNS, and
    {column: {rate: [values]}}."""
    rows, rates = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else [], {}
    for row in rows:
        row["column"] = (row["arch"], row["precision"], row["gpu"])
        of = rates.setdefault(row["column"], {})
        for rate in [r for r in RATES if r in row]:
            of.setdefault(rate, []).append(row[rate])
        if row.get("version") == 0 and row["large"] and row["ms"]:
            of.setdefault("product", []).append(row["rate"])
    rows = [row for row in rows if "ladder" in row]
    zoo, gpus = {}, {}
    for row in rows:
        row["shape"] = (row["large"], row["sizes"])
    for row in sorted(rows, key=lambda r: [*COLUMNS, r["column"][:2]].index(r["column"][:2])):  # of several cards, the first one
        gpus[row["column"]] = row["gpu"]
        ladders = zoo.setdefault(row["file"], {})
        ladders.setdefault(row["ladder"], {}).setdefault(row["version"], {}).setdefault(row["column"], []).append(row)
    return zoo, gpus, rates


def rates_table(gpus, rates):
    """The rates by which times are predicted: medians over the runs of a column."""
    text = "\n| code | " + " | ".join(name for name, _ in RATES.values()) + " |\n|---|" + "---|" * len(RATES) + "\n"
    for column in [c for c in gpus if "lanes" in rates[c]]:
        of = rates[column]
        text += f"| {named(column)} | " + " | ".join(
            f"{sorted(of[key])[len(of[key]) // 2] * unit:.4g}" if key in of else "" for key, (_, unit) in RATES.items()) + " |\n"
    return text


def named(column):
    arch, precision, gpu = column
    return f"sm_{arch} {precision}" + f", {gpu}" * (gpu != CARD)


def main_row(rows):
    return max(rows, key=lambda row: row["large"])


def digits(x):
    return f"{x:.4g}" if x else "–"


def predicted(row):
    return digits(row["predicted"]) + (f" ({digits(row['corrected'])})" if row["corrected"] else "")


def gain(row, before):  # times as fast as the version before, if both ran in the same way
    same = before and before["ms"] and row["ms"] and all(before[key] == row[key] for key in ("sizes", "column"))
    return f"{before['ms'] / row['ms']:.2f}" if same else ""


def measured(row):
    """A version's cell at a shape: at a large one also the rate and the energy."""
    if not row["ms"]:
        return f"{predicted(row)}, not measured"
    rate = f"{row['rate'] * (1e-12 if row['products'] else 1e-9):.0f} {'TFLOP/s' if row['products'] else 'GB/s'}, "
    joules = f", {digits(row['joules'])} J"
    return f"{predicted(row)}, {digits(row['ms'])}, {rate * row['large']}{row['share']:.2f}{joules * row['large']}"


def page(zoo, gpus, rates):
    others = list(gpus)[1:]
    text = HEAD.format(about="; ".join(f"{gpu}, code of sm_{arch}, {precision}" for arch, precision, gpu in gpus))
    text += rates_table(gpus, rates)
    more = "".join(f" {named(column)} |" for column in others)
    for file in [f for f in FILES if f in zoo]:
        text += f"\n## {file}\n\n| | idea | error | same bits | classic: predicted, ms, share | large: predicted, ms, rate, share, J "
        text += f"| x |{more}\n|---|---|---|---|---|---|---|{'---|' * len(others)}\n"
        for ladder, versions in zoo[file].items():
            name, before, said = ladder + " ", None, None
            for number, of in sorted(versions.items()):
                rows, *_ = of.values()  # of the first column
                row, checked, ran = main_row(rows), rows[0], {r["shape"]: r for r in rows}
                shapes = dict.fromkeys(r["shape"] for v in versions.values() for r in v.get(row["column"], []))
                shapes = sorted(shapes, key=lambda shape: shape[0])
                if said != shapes:  # they are others than in the line above
                    name += "; ".join(sizes for _, sizes in shapes) + ":"
                at = ["; ".join(measured(ran[s]) if s in ran else "not run" for s in shapes if s[0] == large) for large in (0, 1)]
                rest = [main_row(of[c]) if c in of else None for c in others]
                cells = [f"{name} **{number}**" if row["bold"] else f"{name} {number}", row["idea"],
                         f"{checked['error']:.0e} of {checked['allowed']:.0e}" if checked["allowed"] else "",
                         "" if not checked["ms"] else "yes" if checked["same"] else "no", *at, gain(row, before)]
                text += "| " + " | ".join(cells + [f"{digits(r['ms'])}, {r['share']:.2f}" if r and r["ms"] else "" for r in rest]) + " |\n"
                name, before, said = "", row, shapes
    return text


def shown(versions):
    """The rows for a lesson, [(version, idea, row)], of the card that ran the most versions, at the shape that most versions ran at,
    the large one if it can be; or None."""
    def ran_on(column):
        return sum(any(r["ms"] for r in of.get(column, [])) for of in versions.values())
    rows = {}
    for number, of in sorted(versions.items()):
        first = next(iter(of))[:2]
        rows[number] = of[max((c for c in of if c[:2] == first), key=ran_on)]
    ran = [r["shape"] for of in rows.values() for r in of]
    shape = max(dict.fromkeys(ran), key=lambda s: (ran.count(s), s[0]))
    return [(number, of[0]["idea"], next((r for r in of if r["shape"] == shape), None)) for number, of in rows.items()]


def lesson_table(versions, precision):
    versions = {v: {c: rows for c, rows in of.items() if c[1] == precision or not precision} for v, of in versions.items()}
    versions = {v: of for v, of in versions.items() if of}
    rows, before = shown(versions), None
    other = {row["gpu"] for *_, row in rows if row} - {CARD}
    text = f"| version{''.join(', ' + gpu for gpu in other)} | predicted ms | ms | share | x |\n|---|---|---|---|---|\n"
    for number, idea, row in rows:
        ran = f"{digits(row['ms'])} | {row['share']:.2f}" if row and row["ms"] else "not measured |"
        text += f"| {number} {idea} | " + (f"{predicted(row)} | {ran} | {gain(row, before)} |\n" if row else "not run | | |\n")
        before = row or before
    return text


GREY, LIGHT, BLUE, ORANGE, LINE = "#9aa4b0", "#e6eaef", "#1f6feb", "#e8912d", ' stroke="#59636e" stroke-width="0.5"'


def word(x, y, text, more=""):
    return f'<text x="{x:.1f}" y="{y}"{more}>{escape(text)}</text>'


def box(x, y, width, height, color):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"{LINE}/>'


def grid(x, y, rows, columns, side, color, label=lambda r, c: ""):
    """Cells of `side`, with color(row, column), and a label in each."""
    return [part for r in range(rows) for c in range(columns)
            for part in [box(x + c * side, y + r * side, side, side, color(r, c))] +
            ([word(x + c * side + side / 2, y + r * side + side / 2 + 4, label(r, c), ' text-anchor="middle" font-size="10"')]
             if label(r, c) else [])]


def lines(x, y, *texts):
    return [word(x, y + 15 * i, text, ' font-weight="bold"' if i == 0 else "") for i, text in enumerate(texts)]


def draw_access(y):
    """The sectors that one load of a warp touches."""
    shown = [*lines(8, y + 14, "a thread a row", "A cell is a sector of 32 bytes.", "Lane i reads row i (orange): 32", "sectors, an element of each.",
                    "Here are 8 of the 32 lanes."),
             *lines(358, y + 14, "a warp a row", "Lane i reads element i. In fp32", "the 32 lanes read 4 sectors", "(blue), and use all of them.")]
    shown += grid(220, y + 6, 8, 8, 14, lambda r, c: ORANGE if c == 0 else LIGHT, lambda r, c: "" if c else str(r))
    return shown + grid(570, y + 6, 8, 8, 14, lambda r, c: BLUE if r == 0 and c < 4 else LIGHT), 132


def draw_tiles(y):
    """A block's tile and its factors; a swizzle; a ring of buffers in time."""
    def dark(i):
        return "#b8660f" if i == 3 else ORANGE
    parts = lines(8, y + 14, "a tile", "Orange: a block's rows of", "x and w, read by parts", "(dark). Blue: its sums.")
    parts += grid(40, y + 140, 2, 8, 12, lambda r, c: dark(c)) + [word(16, y + 156, "x")]
    parts += grid(180, y + 36, 8, 2, 12, lambda r, c: dark(r)) + [word(208, y + 84, "w^T")]
    parts += grid(180, y + 140, 2, 2, 12, lambda r, c: BLUE) + [word(208, y + 156, "out")]
    parts += lines(244, y + 14, "a swizzle", "Chunk c of row r lies at c XOR r.", "Then a column (blue) meets all banks.")
    for x, name, mask in ((244, "as it is", 0), (352, "swizzled", 7)):
        parts += grid(x, y + 56, 8, 8, 12, lambda r, c, m=mask: BLUE if c ^ (r & m) == 2 else LIGHT, lambda r, c, m=mask: str(c ^ (r & m)))
        parts.append(word(x, y + 168, name))
    parts += lines(490, y + 14, "a ring of four buffers", "Time runs right. Orange: a part", "comes. Blue: it is multiplied.")
    for buffer in range(4):
        parts.append(word(490, y + 70 + 22 * buffer, str(buffer)))
        for turn in range(2):
            x = 506 + 17 * buffer + 68 * turn
            parts += [box(x, y + 58 + 22 * buffer, 46, 16, ORANGE), box(x + 46, y + 58 + 22 * buffer, 17, 16, BLUE)]
    return parts, 180


def draw_walk(y):
    """The tiles of a causal square, in the order in which blocks take them."""
    order = {}
    for row in reversed(range(6)):
        for column in range(row + 1):
            order[row, column] = len(order) + 1
    return (lines(8, y + 14, "the walk over a causal square", "A tile is queries (a row) by keys (a column).", "White: above the diagonal, skipped.",
                  "Orange: on it, masked. Blue: no mask.", "The longest row of tiles comes first, so that no block", "begins a long one at the end.") +
            grid(440, y + 6, 6, 6, 20, lambda r, c: "#fff" if c > r else ORANGE if c == r else "#8fb8f5", lambda r, c: str(order.get((r, c), ""))), 136)


DRAWN = {"rmsnorm": draw_access, "matmul": draw_tiles, "attention": draw_walk}


def picture(ladders, drawn=None):
    """An SVG of an idea, and of bars: a version's share of the limit. A line marks the share that was predicted."""
    def bar(y, width, color):
        return f'<rect x="300" y="{y}" width="{width:.1f}" height="14" fill="{color}"/>'

    def mark(x, y):
        return f'<path d="M{x:.1f} {y - 1}v16" stroke="#cf222e" stroke-width="2"/>'
    above, top = drawn(0) if drawn else ([], 0)
    grey, blue, bold, y = GREY, BLUE, ' font-weight="bold"', 28
    parts = [bar(8, 14, grey), word(320, 20, "share, measured"), mark(442, 8), word(450, 20, "predicted"),
             bar(8, 14, blue).replace("300", "526"), word(546, 20, "the trainer's own kernel")]
    for file, ladder, versions in ladders:
        rows = [each for each in shown(versions) if each[2] and each[2]["ms"]]
        if not rows:
            continue
        unit = "version 0" if rows[0][2]["products"] else "a copy of as many bytes"
        parts += [word(8, y + 14, f"{file} {ladder}", bold),
                  word(608, y + 14, f"1.00: {unit}", ' text-anchor="end" fill="#59636e"')]
        y += 20
        parts += [word(296, y - 6, "0", ' fill="#59636e"'), f'<path d="M300 {y}v{20 * len(rows)}M600 {y}v{20 * len(rows)}" stroke="#d1d9e0"/>']
        for number, idea, row in rows:
            share, guess = row["share"], min(row["share"] * row["ms"] / row["predicted"], 1.2)
            at = 306 + 300 * max(share, guess)
            at = 606 if 570 < at < 606 else at  # the axis at 1.00 strikes no number
            parts += [word(8, y + 12, f"{number} {idea}"), bar(y, 300 * share, blue if row["bold"] else grey),
                      mark(300 + 300 * guess, y),
                      word(at, y + 12, f"{share:.2f}" if share >= 0.01 else f"{share:.3f}")]
            y += 20
        y += 8
    if drawn:
        parts, y = [*above, f'<g transform="translate(0 {top})">', *parts, "</g>"], y + top
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="700" height="{y}" font-family="sans-serif" font-size="12">'
            f'<rect width="700" height="{y}" fill="#fff"/>' + "\n".join(parts) + "</svg>\n")


def untaught():
    """Returns what lacks a lesson: each file's row in README.md must link one, and the lesson must name each ladder's kernels."""
    rows = (ROOT / "dev/cuda/README.md").read_text().split("\n") if (ROOT / "dev/cuda/README.md").exists() else []
    for file in sorted((ROOT / "dev/cuda").glob("*.cu")):
        lessons = [m for row in rows if f"`{file.name}`" in row for m in re.findall(r"\]\(\.\./doc/([\w.]+)", row)]
        text = "".join((DOC / lesson).read_text() for lesson in lessons)
        if not text:
            yield f"dev/cuda/{file.name}: README.md names no lesson of it"
        elif file.name not in text and not re.search(rf"<!-- zoo: {file.stem} ", text):
            yield f"dev/cuda/{file.name}: {lessons[0]} says nothing of it"
        for ladder in re.findall(r'Ladder \w+\(\s*"(\w+)"', file.read_text()):
            if text and not re.search(rf"<!-- zoo: {file.stem} {ladder}\b|\b{ladder}\b", text):
                yield f"dev/cuda/{file.name}: {lessons[0]} says nothing of its ladder {ladder}"


def unbacked():
    """Returns the figures of a lesson's prose that none of its blocks has: a measured one belongs into a table."""
    for path in [p for p in DOC.glob("*.md") if "<!-- zoo:" in p.read_text()]:
        text = path.read_text()
        blocks = "".join(re.findall(r"^```python\n.*?^```", text, re.M | re.S))
        prose = re.sub(r"^(?:```.*?^```|    [^\n]*|[|<][^\n]*)|`[^`\n]*`|Llama \d\.\d|\([^)\n]*\)", "", text, flags=re.M | re.S)
        for figure in re.findall(r"\d+\.\d+(?:e-?\d+)?|\d+ (?:%|times as (?:long|fast))", prose):
            if figure not in blocks:
                yield f"dev/doc/{path.name}: {figure} is in no block of the page"


def functions(text):
    """Returns {name: text} of a file's functions; of two with a name the first, since the others are stubs of another precision."""
    found = {}
    for m in re.finditer(r"^(?:template <[^;]*?>\n)?(?:static|__global__|__device__) [^;=]*?(?:\{[^\n]*\}$|\{\n.*?^\})", text, re.M | re.S):
        name = re.search(r"(\w+)\((?!\d)", re.sub(r"__launch_bounds__\([^)]*\)", "", m[0]))
        if name:
            found.setdefault(name[1], m[0])
    return found


def leaps(most=85):
    """Returns the versions with more than `most` lines that the version before lacks, unless both are instances of a template. The
    trainer's kernels, from llmc, do not count."""
    for file in sorted((ROOT / "dev/cuda").glob("*.cu")):
        text = file.read_text()
        known = functions(text)

        def lines_of(name, seen, known=known):
            words = [w for w in dict.fromkeys(re.findall(r"\w+", known.get(name, ""))) if w in known and w not in seen]
            seen.update(words, [name])
            own = [line for line in known.get(name, "").split("\n") if line.strip() and not line.strip().startswith("//")]
            return own + [line for w in words for line in lines_of(w, seen, known)]
        for ladder in re.finditer(r'Ladder \w+\(\s*"(\w+)"(.*?\}\})\);', text, re.S):
            before, code = None, []
            for number, call in re.findall(r'\{(\d+), "[^"]*",\s*[\w| ]+,\s*(.*?), (?:predict_\w+|NULL)', ladder[2], re.S):
                name = ([w for w in re.findall(r"\w+", call) if w in known] or [None])[-1]
                was, code = set(code), lines_of(name, set()) if name else []
                new = [line for line in code if line not in was]
                if before and name != before and len(new) > most:
                    yield f"dev/cuda/{file.name}: {ladder[1]} {number} has {len(new)} lines that the version before lacks, {most} is the limit"
                before = name


def main():
    check = "--check" in sys.argv
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    if sys.argv[1:] and not check:
        add(sys.argv[1])
    zoo, gpus, rates = read()
    made = {RESULTS / "zoo.md": page(zoo, gpus, rates)} if zoo else {}
    for path in sorted(DOC.glob("*.md")):
        text = path.read_text()
        made[path] = re.sub(r"(<!-- zoo: (\w+) (\w+)(?: (\w+))? -->\n).*?(<!-- end -->)",
                            lambda m: m[1] + lesson_table(zoo[m[2]][m[3]], m[4]) + m[5] if m[2] in zoo else m[0], text, flags=re.S)
        for name in re.findall(r"\(zoo-(\w+)\.svg\)", text) if zoo else []:
            made[DOC / f"zoo-{name}.svg"] = picture([(f, l, v) for f in zoo if f.startswith(name) for l, v in zoo[f].items()],
                                                   DRAWN.get(name))
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is {'stale: python3 dev/cuda/table.py' if check else 'made anew'}")
        if not check:
            path.write_text(made[path])
    missing = [*untaught(), *unbacked(), *leaps()]
    for what in missing:
        print(what)
    return (check and len(stale) > 0) or len(missing) > 0


if __name__ == "__main__":
    sys.exit(main())
