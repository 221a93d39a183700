"""coverage.py READERS [LCOV...] -- adds up the lines that fuzz targets reached, for the functions named in READERS. Without an
LCOV file it only checks that each function exists.

A line of READERS is "FILE FUNCTION...", or "failed PATTERN": a line of code that matches such a regular expression is reached
only when a call of the system fails. These lines are listed apart and count as neither reached nor missed. Exits with 1 below
the floor.
"""
import re
import sys
from collections import defaultdict
from pathlib import Path

FLOOR = 90  # percent of all readers' lines


def read_counts(paths):
    """Returns {file: {line: times reached}} over all targets. llvm-cov gives absolute paths."""
    counts = defaultdict(lambda: defaultdict(int))
    for path in paths:
        for line in Path(path).read_text().splitlines():
            if line.startswith("SF:"):
                file = line[3:].replace(str(Path.cwd()) + "/", "").removeprefix("./")
            elif line.startswith("DA:"):
                number, times = line[3:].split(",")[:2]
                counts[file][int(number)] += int(times)
    return counts


def function_lines(source, name):
    """Returns the numbers of a function's lines: from its name at the start of a definition to the brace in column 1."""
    start = next(i for i, s in enumerate(source) if re.match(rf"static .*\b{name}\(", s) and not s.rstrip().endswith(";"))
    end = start if source[start].rstrip().endswith("}") else next(i for i in range(start, len(source)) if source[i][0:1] == "}")
    return range(start + 1, end + 2)


def read_readers(path):
    """Returns the patterns of failures, [(file, function, lines)], and a complaint for each function that does not exist."""
    failures, readers, unknown = [], [], []
    for line in Path(path).read_text().splitlines():
        kind, *rest = line.split("#")[0].split() or [""]
        if kind == "failed":
            failures.append(re.compile(line.split(None, 1)[1]))
            continue
        source = Path(kind).read_text().splitlines() if Path(kind).is_file() else []
        for name in rest:
            try:
                readers.append((kind, name, function_lines(source, name)))
            except StopIteration:
                unknown.append(f"FAIL {kind} has no function {name}, but {path} names it")
    return failures, readers, unknown


def main():
    failures, readers, unknown = read_readers(sys.argv[1])
    if not sys.argv[2:]:
        sys.exit("\n".join(unknown) or 0)
    counts = read_counts(sys.argv[2:])
    reached = missed = 0
    apart, table = [], []
    for file, name, numbers in readers:
        source = Path(file).read_text().splitlines()
        lines = [n for n in numbers if n in counts[file]]
        open_lines = [n for n in lines if counts[file][n] == 0]
        failed = [n for n in open_lines if any(p.search(source[n - 1]) for p in failures)]
        apart += [(file, n, source[n - 1].strip()) for n in failed]
        open_lines = [n for n in open_lines if n not in failed]
        hit, total = len(lines) - len(open_lines) - len(failed), len(lines) - len(failed)
        reached, missed = reached + hit, missed + len(open_lines)
        table.append((hit / total if total else 0, file, name, hit, total, open_lines))
    for share, file, name, hit, total, open_lines in sorted(table):
        places = " ".join(str(n) for n in open_lines[:12]) + (" ..." if len(open_lines) > 12 else "")
        print(f"{100 * share:5.1f} %  {hit:3d} of {total:3d}  {file}: {name}{'  not reached: ' + places if places else ''}")
    print(f"\nlines that only a failed call reaches ({len(apart)}):")
    for file, n, text in apart:
        print(f"    {file}:{n}: {text}")
    percent = 100 * reached / (reached + missed)
    print(f"\n{percent:.1f} % of {reached + missed} lines in {len(readers)} functions that read input, wanted {FLOOR} %")
    print("".join(text + "\n" for text in unknown), end="")
    failed = int(percent < FLOOR or bool(unknown))
    print(f"{1 - failed} passed, {failed} failed, 0 skipped")
    sys.exit(failed)


if __name__ == "__main__":
    main()
