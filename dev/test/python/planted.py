"""Builds a program with faults. In the planted code, planted(N) is true where the environment variable PLANTED is N."""
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HEADER = """char* getenv(const char*);
int atoi(const char*);
static inline int planted(int n) { return getenv("PLANTED") && atoi(getenv("PLANTED")) == n; }
"""


def build(folder, source, faults):
    """Plants (file, regular expression, replacement) into copies and builds the program. Returns its path."""
    for name in {source, *(name for name, _, _ in faults)}:
        text = (ROOT / name).read_text()
        for _, old, new in (fault for fault in faults if fault[0] == name):
            text, count = re.subn(old, new, text)
            assert count == 1, f"{old} is {count} times in {name}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "planted.h").write_text(HEADER)
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O0", "-w", "-include", folder / "planted.h", "-I", folder, "-I", ROOT,
                    folder / source, "-o", folder / "program", "-lm", "-lpthread"], check=True)
    return str(folder / "program")
