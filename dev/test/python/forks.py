"""Runs scripts of Python for tests. Each run is a process of its own, forked from a server that has imported what preload() names:
such imports take more CPU time than the little that a test wants. Builds the programs of C that several tests ask, and a program
with faults: in its code, planted(N) is true where the environment variable PLANTED is N."""

import atexit
import fcntl
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = []
ROOT = Path(__file__).resolve().parents[3]
TRAINER = ROOT / "train_llama3.py"
PLANTED = """char* getenv(const char*);
int atoi(const char*);
static inline int planted(int n) { return getenv("PLANTED") && atoi(getenv("PLANTED")) == n; }
"""


def preload(*modules):
    """Adds modules. The server begins with the first run, in the environment of that moment."""
    PRELOADED.extend(module for module in modules if module not in PRELOADED)
    FORKS.set_forkserver_preload(PRELOADED)


def _main(script, folder, flags, streams, environment):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for fd, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), fd)
    sys.path.insert(0, os.path.dirname(script))
    sys.argv = [script, *flags]
    try:  # a process of multiprocessing would neither call sys.excepthook nor run what atexit has
        runpy.run_path(script, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def run(script, folder, *flags, timeout=300):
    """Runs the script in `folder` to its end and returns a subprocess.CompletedProcess with texts."""
    with tempfile.NamedTemporaryFile("r+") as out, tempfile.NamedTemporaryFile("r+") as err:
        process = FORKS.Process(target=_main, args=(str(script), str(folder), [str(f) for f in flags], [out.name, err.name],
                                                    dict(os.environ)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(script, timeout)
        return subprocess.CompletedProcess(flags, process.exitcode, out.read(), err.read())


def train(folder, *flags):
    """Runs train_llama3.py."""
    preload("torch", "safetensors.torch", "torch._dynamo")  # the last: an optimizer's first step imports it
    return run(TRAINER, folder, *flags)


def built(name):
    """Returns the program build/NAME, which make builds of dev/test/python/NAME.c. Tests run side by side: one make at a time."""
    program = ROOT / "build" / name
    program.parent.mkdir(exist_ok=True)
    with open(f"{program}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", f"build/{name}"], cwd=ROOT, check=True)
    return program


def build_planted(folder, source, faults):
    """Plants (file, regular expression, replacement) into copies and builds the program. Returns its path."""
    for name in {source, *(name for name, _, _ in faults)}:
        text = (ROOT / name).read_text()
        for _, old, new in (fault for fault in faults if fault[0] == name):
            text, count = re.subn(old, new, text)
            assert count == 1, f"{old} is {count} times in {name}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "planted.h").write_text(PLANTED)
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O0", "-w", "-include", folder / "planted.h", "-I", folder, "-I", ROOT,
                    folder / source, "-o", folder / "program", "-lm", "-lpthread"], check=True)
    return str(folder / "program")
