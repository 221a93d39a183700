"""coverage.py READERS LCOV... -- adds up the lines that fuzz targets reached, for the functions named in READERS.

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


def main():
    readers, failures = [], []
    for line in Path(sys.argv[1]).read_text().splitlines():
        kind, *rest = line.split("#")[0].split() or [""]
        if kind == "failed":
            failures.append(re.compile(line.split(None, 1)[1]))
        elif kind:
            readers += [(kind, name) for name in rest]
    counts = read_counts(sys.argv[2:])
    reached = missed = 0
    apart, table, unknown = [], [], []
    for file, name in readers:
        source = Path(file).read_text().splitlines()
        try:
            lines = [n for n in function_lines(source, name) if n in counts[file]]
        except StopIteration:
            unknown.append(f"{file} has no function {name}, but readers.txt names it")
            continue
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
    for text in unknown:
        print(f"FAIL {text}")
    failed = int(percent < FLOOR or bool(unknown))
    print(f"{1 - failed} passed, {failed} failed, 0 skipped")
    sys.exit(failed)


if __name__ == "__main__":
    main()
