#!/usr/bin/env python3
"""learn.py [N [--hint|--solution]] -- the exercises of exercises.cuh. Alone it lists them. With a number it writes the exercise to
build/learn/N.cuh, unless that is there, and checks what you wrote in it: a kernel on the card that the CPU emulates, as any version
of the zoo, and a prediction against the measured time. learn.py --check [FILE...] is for the exercises themselves: each must fail
as it begins, and pass with its solution; FILE is rmsnorm, softmax ... or predict."""
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE, DONE = ROOT / "build/learn", ROOT / "build/learn/solved"
HEAD = re.compile(r"^// ==== (\d+) (\w+) (\w+) ([^:]*): (.*)\n((?:// (?!hint).*\n)*)// hint: ((?:.*\n)(?:// .*\n)*)", re.M)
BEGINS = re.compile(r"^( *)(.*)\n *// begins: (.*)\n", re.M)
REGION = re.compile(r"^#ifdef SOLVED\n(.*?)(?:#else\n(.*?))?#endif\n", re.M | re.S)


class Exercise:
    def __init__(self, head, code):
        self.number, self.kind, self.file, self.of, self.title, task, hint = head.groups()
        self.task, self.hint = (re.sub(r"^// ", "", text, flags=re.M).strip() for text in (task, hint))
        code = BEGINS.sub(r"#ifdef SOLVED\n\1\2\n#else\n\1\3\n#endif\n", code)
        self.begin = REGION.sub(lambda m: m[2] or "    // here\n" * (self.kind == "finish"), code).strip() + "\n"
        if self.kind == "predict":
            self.begin = "const double ms = 0;\n"
        self.solution = REGION.sub(lambda m: m[1], code).strip() + "\n"
        self.path = MADE / f"{self.number}.cuh"

    def text(self):
        task = "".join(f"// {line}\n" for line in [f"{self.number}: {self.title}", *self.task.split("\n")])
        return f"{task}// make -C dev/cuda learn N={self.number} checks this file; HINT=1 helps, SOLUTION=1 tells.\n\n{self.begin}"


def exercises():
    text = (ROOT / "dev/cuda/exercises.cuh").read_text()
    heads = list(HEAD.finditer(text))
    return [Exercise(h, text[h.end() : n.start() if n else len(text)]) for h, n in zip(heads, [*heads[1:], None])]


def measured(e):
    """Returns the ms of the stored row that an exercise names."""
    ladder, version, *precision, sizes = e.of.split()
    for row in map(json.loads, (ROOT / "dev/results/zoo.json").read_text().splitlines()):
        if (row["file"], row.get("ladder"), row.get("version"), row.get("sizes"), row["precision"], row["arch"]) == (
                e.file, ladder, int(version), sizes, *(precision or ["BF16"]), 90):
            return row["ms"]
    sys.exit(f"error: exercise {e.number}: zoo.json has no such row")


def judge_prediction(e, text):
    """Returns whether the text's ms are within 20 % of the measured ones, and a line about it."""
    found = re.search(r"^const double ms = ([-+*/(). 0-9e]+);", text, re.M)
    try:
        ms = float(eval(found[1], {"__builtins__": {}}))
    except (TypeError, SyntaxError, ZeroDivisionError):
        return False, "wanted: const double ms = a number, or a product or quotient of numbers;"
    want = measured(e)
    if ms <= 0:
        return False, "it has no number yet"
    return abs(ms / want - 1) <= 0.2, f"{ms:.4g} ms, measured {want:.4g} ms: {100 * (ms / want - 1):+.0f} %"


def build(file, source):
    """Builds a file of the zoo with the reader's file; returns the program, or exits with the compiler's words."""
    program = f"build/emulated/FP32_90/zoo/{file}"
    done = subprocess.run(["make", "-s", "PRECISION=FP32", "EMULATED_ARCH=90", f"MINE={source.relative_to(ROOT)}", program],
                          cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(done.stdout)
    return ROOT / program


def numbers(program, ladder):
    """Returns {idea: number} of the exercises in a program."""
    listed = subprocess.run([program, "--predict", "H100", ladder, "--shape", "classic"], cwd=ROOT, text=True, capture_output=True)
    return {m[2]: m[1] for m in re.finditer(r"^ ?(\d+) (exercise(?: \w+)*)", listed.stdout, re.M)}


def run(program, ladder, number):
    """Returns whether a version passes, and what was printed."""
    try:
        done = subprocess.run([program, ladder, number], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=300)
    except subprocess.TimeoutExpired:
        return False, "it did not end within five minutes\n"
    stopped = f"the emulated card stopped: signal {-done.returncode}, a store outside its tensor?\n" if done.returncode < 0 else ""
    return done.returncode == 0, done.stdout + stopped


def work(e):
    MADE.mkdir(parents=True, exist_ok=True)
    here = e.path.relative_to(ROOT)
    if not e.path.exists():
        e.path.write_text(e.text())
        print(f"{here} is yours now: {e.title}\n{e.task}\nEdit it, then run this again.")
        return 0
    if e.kind == "predict":
        good, said = judge_prediction(e, e.path.read_text())
    else:
        program = build(e.file, e.path)
        good, said = run(program, e.of, numbers(program, e.of)["exercise"])
    print(said.rstrip())
    if good:
        with DONE.open("a") as f:
            f.write(f"{e.number}\n")
    print(f"{here}: " + ("solved" if good else "not yet; HINT=1 helps"))
    return 0 if good else 1


def check(everything, files):
    """Every exercise fails as it begins and passes solved. One program has all of a file's: in namespaces."""
    failed, passed = 0, 0

    def count(e, what, good, said):
        nonlocal failed, passed
        right = good == (what == "solved")
        failed, passed = failed + (not right), passed + right
        print(f"{'ok  ' if right else 'FAIL'} exercise {e.number} {what} {'passes' if good else 'fails'}" + ("" if right else "\n" + said))
    for file in dict.fromkeys("predict" if e.kind == "predict" else e.file for e in everything):
        these = [e for e in everything if file in (e.kind, e.file) and (e.kind == "predict") == (file == "predict")]
        if files and file not in files:
            continue
        if file == "predict":
            for e in these:
                for what, text in (("begun", e.begin), ("solved", e.solution)):
                    count(e, what, *judge_prediction(e, text))
            continue
        MADE.mkdir(parents=True, exist_ok=True)
        source = MADE / f"all_{file}.cuh"
        source.write_text("".join(f"namespace exercise_{e.number}_{what} {{\n" +
                                  code.replace('"exercise"', f'"exercise {e.number} {what}"') + "}\n"
                                  for e in these for what, code in (("begun", e.begin), ("solved", e.solution))))
        program = build(file, source)
        for e in these:
            for what in ("begun", "solved"):
                count(e, what, *run(program, e.of, numbers(program, e.of)[f"exercise {e.number} {what}"]))
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return failed > 0


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    everything, words = exercises(), sys.argv[1:]
    if {"-h", "--help"} & set(words):
        sys.exit(print(__doc__))
    if words[:1] == ["--check"]:
        sys.exit(check(everything, words[1:]))
    if not words:
        done = set(DONE.read_text().split()) if DONE.exists() else set()
        for e in everything:
            state = "solved" if e.number in done else "begun" if e.path.exists() else ""
            print(f"{e.number:>2} {e.kind:<8}{e.file + ' ' + e.of.split()[0]:<20}{e.title:<48}{state}")
        return print("make -C dev/cuda learn N=1 begins; HINT=1 helps; SOLUTION=1 tells")
    found = [e for e in everything if e.number == words[0]]
    if not found:
        sys.exit(f"error: {words[0]}: no such exercise, wanted 1 to {len(everything)}")
    if "--hint" in words or "--solution" in words:
        return print(found[0].hint if "--hint" in words else found[0].solution)
    sys.exit(work(found[0]))


if __name__ == "__main__":
    main()
