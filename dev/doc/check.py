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
LESSONS = "rmsnorm matmul rope attention swiglu crossentropy bugs".split()
FUNCTIONS = """rmsnorm_forward rmsnorm_backward rope_forward rope_backward attention_forward_plain attention_backward_plain
swiglu_forward swiglu_backward crossentropy_fused muon_orthogonalize
matmul_forward_plain matmul_backward_input_plain matmul_backward_weight_plain""".split()


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("B", "T", "NH", "NKV", "HD")]


class Rows(ctypes.Structure):
    _fields_ = [("N", ctypes.c_size_t), ("C", ctypes.c_int), ("pitch", ctypes.c_size_t)]


class Oracle:
    """The functions of llmc/*.h, built as a library."""

    def __init__(self):
        code = "".join(f'#include "llmc/{name}.h"\n' for name in [*LESSONS[:-1], "optim/muon"])
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
                    assert a.flags.c_contiguous and a.dtype in (np.float32, np.int32), f"{name} takes packed float32 and int32"
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


def main():
    names = sys.argv[1:] or LESSONS
    unknown = [n for n in names if not (DOC / f"{n}.md").exists()]
    if unknown:
        sys.exit(f"error: {unknown[0]}: no such lesson, wanted one of: {' '.join(LESSONS)}")
    oracle, failed, passed = Oracle(), 0, 0
    for name in names:
        text = (DOC / f"{name}.md").read_text()
        scope = {"np": np, "rng": np.random.default_rng(1), "near": near, "slope": slope, "c": oracle, "shape": Shape,
                 "rows": Rows}
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
            line = text[: block.start(1)].count("\n") + 1
            try:
                exec(compile("\n" * (line - 1) + block.group(1), f"dev/doc/{name}.md", "exec"), scope)
            except Exception as e:
                at = e.__traceback__
                while at.tb_next and at.tb_next.tb_frame.f_code.co_filename.endswith(f"{name}.md"):
                    at = at.tb_next
                where = at.tb_next.tb_lineno if at.tb_next else line
                print(f"FAIL {name}, line {where}: {type(e).__name__}: {e}")
                failed += 1
                break
            passed += 1
            print(f"ok   {name}, line {line}")
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
