"""test_lessons.py -- the Python blocks of the lessons in dev/doc, and that a block which is wrong fails."""
import subprocess
import sys
from pathlib import Path

import pytest

DOC = Path(__file__).resolve().parents[3] / "dev/doc"


def check(name, folder=DOC):
    return subprocess.run([sys.executable, folder / "check.py", name], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["rmsnorm", "rope", "attention", "swiglu", "crossentropy", "bugs"])
def test_lesson(name):
    got = check(name)
    assert got.returncode == 0, got.stdout + got.stderr


def test_a_wrong_derivation_fails(tmp_path):
    page = DOC / "wrong.md"  # beside the others, where check.py looks
    page.write_text((DOC / "rmsnorm.md").read_text().replace("r**3 *", "r**2 *"))
    try:
        got = check("wrong")
    finally:
        page.unlink()
    assert got.returncode == 1 and "FAIL wrong, line" in got.stdout, got.stdout


def test_an_unknown_lesson_is_one_line():
    got = check("nothing")
    assert got.returncode == 1 and got.stderr.startswith("error: nothing: no such lesson") and got.stderr.count("\n") == 1
