"""test_lessons.py -- the lessons in dev/doc: their Python blocks, and that a block which is wrong fails; and the table of the
kernel zoo in them: a version that left out a shape is marked, never compared across shapes, and a table that its results did
not make is stale."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOC = Path(__file__).resolve().parents[3] / "dev/doc"


def check(name, folder=DOC):
    return subprocess.run([sys.executable, folder / "check.py", name], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["rmsnorm", "matmul", "rope", "attention", "swiglu", "crossentropy", "step", "bugs"])
def test_lesson(name):
    got = check(name)
    assert got.returncode == 0, got.stdout + got.stderr


@pytest.mark.parametrize("right, wrong", [("r**3 *", "r**2 *"), ("x_j r³ mean", "x_j r² mean"), ("x_ni r_n", "x_ni")])
def test_a_wrong_derivation_or_formula_fails(right, wrong):
    page = DOC / "wrong.md"  # beside the others, where check.py looks
    text = (DOC / "rmsnorm.md").read_text()
    assert right in text
    page.write_text(text.replace(right, wrong))
    try:
        got = check("wrong")
    finally:
        page.unlink()
    assert got.returncode == 1 and "FAIL wrong, line" in got.stdout, got.stdout


def test_an_unknown_lesson_is_one_line():
    got = check("nothing")
    assert got.returncode == 1 and got.stderr.startswith("error: nothing: no such lesson") and got.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------------
# the table of the kernel zoo

TABLE = Path(__file__).resolve().parents[3] / "dev/cuda/table.py"
ROW = {"gpu": "a card", "arch": 90, "precision": "BF16", "file": "softmax", "ladder": "forward", "bold": 0, "error": 1e-3,
       "allowed": 4e-3, "same": 1, "predicted": 1, "corrected": 0, "products": 0, "rate": 1e12, "share": 0.5, "joules": 1, "copy": 1}


def row(version, sizes, large, ms, **more):
    return {**ROW, "version": version, "idea": f"idea {version}", "sizes": sizes, "large": large, "ms": ms, **more}


@pytest.fixture
def zoo(tmp_path):
    """Returns a function that writes results and runs table.py on a project of its own; it returns (exit status, page, lesson)."""
    for folder in ("cuda", "results", "doc"):
        (tmp_path / "dev" / folder).mkdir(parents=True)
    shutil.copy(TABLE, tmp_path / "dev/cuda")
    lesson, page = tmp_path / "dev/doc/lesson.md", tmp_path / "dev/results/zoo.md"
    lesson.write_text("<!-- zoo: softmax forward -->\n<!-- end -->\n")

    def run(rows, *flags):
        if rows:
            (tmp_path / "dev/results/zoo.json").write_text("".join(json.dumps(r) + "\n" for r in rows))
        done = subprocess.run([sys.executable, tmp_path / "dev/cuda/table.py", *flags], capture_output=True, text=True, timeout=60)
        assert not done.stderr, done.stderr
        return done.returncode, page.read_text() if page.exists() else "", lesson.read_text()
    return run


def line(text, version):
    return next(x for x in text.splitlines() if f"idea {version}" in x)


def test_a_version_that_left_out_a_shape_is_not_run(zoo):
    _, page, lesson = zoo([row(1, "N=8", 0, 4), row(1, "N=9", 0, 4), row(2, "N=8", 0, 2), row(2, "N=99", 1, 200)])
    assert "not run" in line(page, 1).split("|")[6] and "not run" in line(page, 2).split("|")[5]
    assert "| 4 |" in line(lesson, 1) and "| 2 |" in line(lesson, 2)  # the shape at which both ran


def test_times_at_different_sizes_are_not_compared(zoo):
    _, page, lesson = zoo([row(1, "N=8", 0, 4), row(2, "N=8", 0, 2), row(2, "N=99", 1, 200), row(3, "N=99", 1, 100)])
    assert [line(page, v).split("|")[7].strip() for v in (1, 2, 3)] == ["", "", "2.00"]
    assert "not run" in line(lesson, 1) and [line(lesson, v).split("|")[5].strip() for v in (2, 3)] == ["", "2.00"]


def test_a_precision_that_ran_other_sizes_says_so(zoo):
    _, page, _ = zoo([row(1, "N=8", 0, 4), row(2, "N=7", 0, 2, precision="FP32"), row(3, "N=7", 0, 1)])
    assert "N=8" in line(page, 1) and "N=7" in line(page, 2)
    assert [line(page, v).split("|")[7].strip() for v in (2, 3)] == ["", ""]


def test_a_stale_table_fails_and_none_is_no_fault(zoo):
    assert zoo([], "--check") == (0, "", "<!-- zoo: softmax forward -->\n<!-- end -->\n")
    assert zoo([row(1, "N=8", 0, 4)], "--check")[0] == 1
    assert zoo([row(1, "N=8", 0, 4)])[0] == 0 and zoo([], "--check")[0] == 0


def test_a_measured_figure_in_prose_fails(zoo, tmp_path):
    lesson = tmp_path / "dev/doc/lesson.md"
    lesson.write_text(lesson.read_text() + "It takes 2.3 times its prediction: Llama 3.1, `0.5`.\n")
    assert zoo([row(1, "N=8", 0, 4)])[0] == 1
    lesson.write_text(lesson.read_text() + "```python\nnear(x, 2.3)\n```\n")
    assert zoo([])[0] == 0


def test_a_picture_says_its_units_and_puts_each_number_right_of_its_bar_and_mark(zoo, tmp_path):
    (tmp_path / "dev/doc/lesson.md").write_text("![](zoo-softmax.svg)\n")
    zoo([row(1, "N=8", 0, 4, share=0.004, predicted=2), row(2, "N=8", 0, 2, share=0.5, predicted=1.6, bold=1),
         row(0, "N=8", 0, 2, ladder="product", products=1)])
    svg = (tmp_path / "dev/doc/zoo-softmax.svg").read_text()
    assert all(f">{word}</text>" in svg for word in ("predicted", "1.00: a copy of as many bytes", "1.00: version 0", "0.50"))
    for text in ("0.004", "0.50"):
        before = svg.split(f">{text}<")[0]
        begin, *ends = (float(x) for x in re.findall(r'(?:x=|width=|M)"?([\d.]+)', before.split("<text")[-1] +
                                                     before.split("<rect")[-1].split("<text")[0]))
        assert begin > ends[0] + ends[1] and begin > ends[2] + 1, (begin, ends)


def test_a_version_that_no_card_has_run_shows_its_prediction_alone(zoo):
    _, page, lesson = zoo([row(1, "N=8", 1, 4), row(2, "N=8", 1, 0, predicted=3), row(3, "N=8", 1, 2)])
    assert "3, not measured" in line(page, 2) and "| 3 | not measured | |" in line(lesson, 2) and line(lesson, 3).endswith("|  |")


def test_a_lesson_takes_the_card_that_ran_most_versions(zoo):
    _, page, lesson = zoo([row(1, "N=8", 1, 4), row(2, "N=8", 1, 0), *(row(v, "N=8", 1, v, gpu="new") for v in (1, 2))])
    assert lesson.count("| version, new |") == 1 and "| 2 |" in line(lesson, 2) and "sm_90 BF16, new |" in page


def test_the_rates_of_a_run_are_shown_and_no_row(zoo):
    rates = {"gpu": "a card", "arch": 90, "precision": "BF16", "file": "softmax", "lanes": 3e13, "trip": 3.5e-7, "launch": 8e-7}
    _, page, _ = zoo([rates, row(1, "N=8", 0, 4, copy=3e12)])
    assert "| sm_90 BF16, a card | 3000 |  | 3e+04 | 350 | 0.8 |" in page and line(page, 1)


def test_a_ladder_without_a_lesson_fails(zoo, tmp_path):
    (tmp_path / "dev/cuda/softmax.cu").write_text('Ladder l("forward", Ladder m(\n    "other",')
    readme = tmp_path / "dev/cuda/README.md"
    readme.write_text("| `softmax.cu` | forward | |\n")
    assert zoo([row(1, "N=8", 0, 4)])[0] == 1
    readme.write_text("| `softmax.cu` | forward | [lesson](../doc/lesson.md) |\n")
    assert zoo([])[0] == 1  # nothing about `other`
    (tmp_path / "dev/doc/lesson.md").write_text("<!-- zoo: softmax forward -->\n<!-- end -->\nthe other ladder\n")
    zoo([])
    assert zoo([], "--check")[0] == 0


def test_new_results_replace_those_of_the_same_build_and_file(zoo, tmp_path):
    new = tmp_path / "bench.json"
    new.write_text(json.dumps(row(1, "N=8", 0, 3)) + "\n")
    kept = [row(1, "N=8", 0, 5, precision="FP32"), row(1, "N=8", 0, 6, file="rope")]
    _, page, lesson = zoo([row(1, "N=8", 0, 4), row(2, "N=8", 0, 2), *kept], new)
    assert "| 3 |" in line(lesson, 1) and "idea 2" not in page
    assert (tmp_path / "dev/results/zoo.json").read_text().splitlines() == [json.dumps(r) for r in kept] + new.read_text().splitlines()
