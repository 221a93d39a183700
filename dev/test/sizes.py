#!/usr/bin/env python3
"""sizes.py -- checks that files and functions of the product are short enough to be read. Prints each file and function above
its limit; exit 1 if any is. Run from the project's root."""
import re
import sys
from pathlib import Path

LIMITS = {"train_llama3.c": 620, "train_llama3.cu": 940, "test_llama3.cu": 789, "train_llama3.py": 800}
FILE, FUNCTION = 800, 80  # lines of any other file; of a function. Kernels may be longer, and so may tables of Unicode


def functions(lines):
    """The functions of a file, each as its first line's number and text, and its lines."""
    start = 0
    for number, line in enumerate(lines, 1):
        if re.match(r"[A-Za-z_].*\(", line):
            start = number
        elif line == "}" and start:
            yield start, lines[start - 1], number - start + 1
            start = 0


def main():
    long = []
    files = [*map(Path, LIMITS), *(p for p in sorted(Path("llmc").rglob("*")) if p.suffix in (".h", ".cuh", ".def"))]
    for path in files:
        lines = path.read_text().splitlines()
        if len(lines) > LIMITS.get(str(path), FILE) and path.name != "unicode.h":
            long.append(f"{path}: {len(lines)} lines, at most {LIMITS.get(str(path), FILE)} are wanted")
        for number, head, length in functions(lines) if path.suffix != ".py" else []:
            if length > FUNCTION and not re.search("__global__|__device__", head):
                long.append(f"{path}:{number}: a function of {length} lines, at most {FUNCTION} are wanted")
    print("\n".join(long))
    return len(long) > 0


if __name__ == "__main__":
    sys.exit(main())
