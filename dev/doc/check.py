#!/usr/bin/env python3
"""check.py [NAME...] -- runs the `python` blocks of the lessons in this folder, or of the named ones (rmsnorm, rope ...): each
derivation is checked against differences in double, to 1e-8, and the C code of llmc against the formulas, to 1e-6.

The blocks of a page run one after the other and see these names:
  np, rng                  numpy, and its generator with a fixed seed
  near(got, want, most)    fails unless the largest error, relative to the largest wanted value, is at most `most` (1e-8)
  slope(f, x)              the gradient of the number f(x) by each element of x, from differences of fourth order
  c.NAME(...)              a function of llmc/*.h: numpy arrays become pointers, ints size_t, floats float
  shape(B, T, NH, NKV, HD) an AttentionShape
  rows(N, C, pitch)        a RowShape
  adamw(lr, beta1, beta2, eps, weight_decay, grad_scale, step)

The indented formulas are checked, too: a comment <!-- formulas 4 of a row of x: out, r = forward(x, w) --> after them says how many
of those since the last such comment must hold, and binds the names that no block has. `out_i` is an element, `x_t` a row, or
with `of a row` an element of each of its rows in turn; Σ_n adds up over n, and neighbors are multiplied.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import errors  # noqa: F401 -- first: it names missing packages

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np

DOC = Path(__file__).resolve().parent
ROOT = DOC.parents[1]
LESSONS = "rmsnorm matmul rope attention swiglu crossentropy step bugs".split()
HEADERS = "rmsnorm matmul quantise rope attention swiglu crossentropy embedding optim/adamw optim/muon".split()
FUNCTIONS = """rmsnorm_forward rmsnorm_backward rope_forward rope_backward attention_forward_plain attention_backward_plain
swiglu_forward swiglu_backward crossentropy_fused muon_orthogonalize
matmul_forward_plain matmul_backward_input_plain matmul_backward_weight_plain
embedding_forward embedding_backward adamw_update quantise_rows""".split()


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("B", "T", "NH", "NKV", "HD")]


class Rows(ctypes.Structure):
    _fields_ = [("N", ctypes.c_size_t), ("C", ctypes.c_int), ("pitch", ctypes.c_size_t)]


class AdamW(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")] + [
        ("grad_scale", ctypes.c_float), ("step", ctypes.c_int64)]


class Oracle:
    """The functions of llmc/*.h, built as a library."""

    def __init__(self):
        code = "".join(f'#include "llmc/{name}.h"\n' for name in HEADERS)
        code += "const void* const functions[] = {" + ", ".join(FUNCTIONS) + "};\n"
        (ROOT / "build").mkdir(exist_ok=True)
        source, library = ROOT / "build/lessons.c", ROOT / "build/lessons.so"
        source.write_text(code)
        subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-march=native", "-fPIC", "-shared", "-I.",
                        "-w", str(source), "-o", str(library), "-lm"], cwd=ROOT, check=True)
        table = (ctypes.c_void_p * len(FUNCTIONS)).in_dll(ctypes.CDLL(str(library)), "functions")
        self.functions = dict(zip(FUNCTIONS, table))

    def __getattr__(self, name):
        def call(*arguments):
            def passed(a):
                if isinstance(a, np.ndarray):
                    assert a.flags.c_contiguous and a.dtype in (np.float32, np.int32, np.uint8), f"{name} takes packed float32, int32 or uint8"
                    return ctypes.c_void_p(a.ctypes.data)
                if isinstance(a, (int, np.integer)):
                    return ctypes.c_size_t(a)
                return ctypes.c_float(a) if isinstance(a, float) else a

            ctypes.CFUNCTYPE(None)(self.functions[name])(*[passed(a) for a in arguments])

        return call


def near(got, want, most=1e-8):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.max(np.abs(got - want)) / np.max(np.abs(want))
    if not error <= most:
        raise AssertionError(f"wrong by {error:.2e}, at most {most:.0e} is allowed")


def slope(f, x, h=1e-3):
    x = np.array(x, np.float64)
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        at, values = x[i], []
        for step in (-2, -1, 1, 2):
            x[i] = at + step * h
            values.append(f(x))
        x[i] = at
        gradient[i] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
    return gradient


class Formula:
    """Evaluates a formula of a page, such as `dout_j w_j r - x_j r³ mean(dout w x)`, for one value of each index."""
    TOKEN = re.compile(r"\s*(Σ_[a-z]|[A-Za-zθ]+'?(?:_[a-z]+)?|\d+(?:\.\d+)?|[-+/·()\[\]=^²³])")
    FUNCTIONS = {"sqrt": np.sqrt, "log": np.log, "cos": np.cos, "sin": np.sin, "max": np.max,
                 "mean": lambda x: x.mean(-1, keepdims=x.ndim > 1)}

    def __init__(self, text, names, row=None):
        self.tokens, self.names, self.row, self.sizes = self.TOKEN.findall(text), names, row, {}
        if "".join(self.tokens) != re.sub(r"\s", "", text):
            raise KeyError(text)  # prose
        for name, letters in (t.split("_") for t in self.tokens if "_" in t and t[0] != "Σ" and t not in names):
            shape = np.shape(names[name])
            while len(shape) > len(letters) and shape[-1] == 1:
                shape = shape[:-1]
            if letters not in names:
                self.sizes.update(zip(letters, shape if row is None else shape[-len(letters) :]))

    def at(self, index):
        self.index, self.p = dict(index), 0
        value = self.sum()
        if self.p < len(self.tokens):
            raise KeyError(self.tokens[self.p])
        return value

    def next(self):
        return self.tokens[self.p] if self.p < len(self.tokens) else ""

    def take(self):
        self.p += 1
        return self.tokens[self.p - 1]

    def sum(self):
        value = self.product()
        while self.next() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self):
        value = self.power()
        while self.next() and self.next() not in "+-)]=":
            sign = self.take() if self.next() in ("/", "·") else ""
            other = self.power()
            value = value / other if sign == "/" else value @ other if sign == "·" and np.ndim(value) == 1 else value * other
        return value

    def power(self):
        if self.next() == "-":
            self.take()
            return -self.power()
        value = self.atom()
        while self.next() in ("^", "²", "³"):
            sign = self.take()
            value = value ** (2 if sign == "²" else 3 if sign == "³" else self.power())
        return value

    def atom(self):
        word = self.take()
        if word in ("(", "["):
            value = self.sum()
            if word == "[":  # [i = j]
                self.take()
                value = float(value == self.sum())
            self.take()
            return value
        if word[0] == "Σ":
            begin, total = self.p, 0
            for self.index[word[2]] in range(self.sizes[word[2]]):
                self.p = begin
                total = total + self.product()
            return total
        if word in self.FUNCTIONS:
            return self.FUNCTIONS[word](self.power())
        return float(word) if word[0].isdigit() else np.e if word == "e" else self.look_up(
            *([word] if word in self.names else word.split("_")))

    def look_up(self, name, letters=""):
        if not letters and name in self.index:
            return self.index[name]
        value = np.asarray(self.names[name])
        if not letters:  # in a row's formula, integers are one a row
            return value[self.row] if self.row is not None and (value.ndim > 1 or value.dtype.kind == "i" and value.ndim) else value
        at = [int(self.names[letters][self.row])] if letters in self.names else [self.index[i] for i in letters]
        while value.ndim > len(at) and value.shape[-1] == 1:
            value = value[..., 0]
        return (value[self.row] if self.row is not None and value.ndim > len(at) else value)[tuple(at)]


def check_formulas(text, names, by_rows):
    """Checks the formulas of a page's indented lines whose names are all known; returns how many. Any inequality raises."""
    count = 0
    for line in re.findall(r"^    (\S.*)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        for part in re.split(r"\s{2,}", re.sub(r"\s*=\s*", " = ", line)):
            sides = re.split(r" = (?![^\[]*\])", part)
            try:
                rows = [None] if not by_rows else range(len(names[by_rows]))
                for row in rows if "_" in part or by_rows else [None]:
                    sizes = Formula(" ".join(sides), names, row).sizes
                    left = re.fullmatch(r"\S+?(?:_([a-z]+))?", sides[0])
                    for values in np.ndindex(*[sizes[i] for i in left[1] or ""]):
                        index = dict(zip(left[1] or "", values))
                        got = [Formula(side, names, row).at(index) for side in sides]
                        for side in got[1:]:
                            if np.all(np.isfinite(got[0])) and not np.allclose(got[0], side, 1e-8, 1e-12):
                                raise AssertionError(f"{part}: {got[0]} is not {side}")
                count += len(sides) > 1
            except (KeyError, TypeError, IndexError, ValueError):
                pass  # prose, a step of a derivation, or a name that the page has not bound
    return count


def main():
    names = sys.argv[1:] or LESSONS
    unknown = [n for n in names if not (DOC / f"{n}.md").exists()]
    if unknown:
        sys.exit(f"error: {unknown[0]}: no such lesson, wanted one of: {' '.join(LESSONS)}")
    oracle, failed, passed = Oracle(), 0, 0
    for name in names:
        text = (DOC / f"{name}.md").read_text()
        scope = {"np": np, "rng": np.random.default_rng(1), "near": near, "slope": slope, "c": oracle, "shape": Shape,
                 "rows": Rows, "adamw": lambda *of: ctypes.byref(AdamW(*of))}
        since = 0
        for block in re.finditer(r"^(?:```python\n(.*?)^```|<!-- formulas (\d+)(?: of a row of (\w+))?: (.*?) -->)", text, re.M | re.S):
            line = text[: block.start()].count("\n") + 2
            try:
                if block.group(2):
                    exec(block.group(4), scope)
                    holds = check_formulas(text[since : block.start()], scope, block.group(3))
                    since = block.end()
                    if holds != int(block.group(2)):
                        raise AssertionError(f"{holds} formulas hold, wanted {block.group(2)}")
                    continue
                exec(compile("\n" * (line - 1) + block.group(1), f"dev/doc/{name}.md", "exec"), scope)
            except Exception as e:
                at = e.__traceback__
                of_page = at.tb_next and at.tb_next.tb_frame.f_code.co_filename.endswith(f"{name}.md")
                while at.tb_next and at.tb_next.tb_frame.f_code.co_filename.endswith(f"{name}.md"):
                    at = at.tb_next
                where = at.tb_lineno if of_page else line
                print(f"FAIL {name}, line {where}: {type(e).__name__}: {e}")
                failed += 1
                break
            passed += 1
            print(f"ok   {name}, line {line}")
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
