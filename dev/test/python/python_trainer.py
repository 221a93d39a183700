"""Runs train_llama3.py for tests. Each run is a process of its own, forked from a server that has imported PyTorch: an import
takes more CPU time than the few steps of a test."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "safetensors.torch", "torch._dynamo"])  # the last: an optimizer's first step imports it


def _main(folder, flags, streams):
    os.chdir(folder)
    for fd, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), fd)
    sys.path.insert(0, str(ROOT))
    sys.argv = [str(ROOT / "train_llama3.py"), *flags]
    try:  # ends as the interpreter does: a process of multiprocessing knows neither of the two
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def start(folder, *flags, streams=(os.devnull, os.devnull)):
    """Starts the trainer in `folder` and returns its multiprocessing.Process. streams: files that take its stdout and stderr"""
    process = FORKS.Process(target=_main, args=(str(folder), [str(f) for f in flags], [str(s) for s in streams]))
    process.start()
    return process


def run(folder, *flags, timeout=300):
    """Runs the trainer in `folder` to its end and returns a subprocess.CompletedProcess with texts."""
    with tempfile.NamedTemporaryFile("r+") as out, tempfile.NamedTemporaryFile("r+") as err:
        process = start(folder, *flags, streams=(out.name, err.name))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired("train_llama3.py", timeout)
        return subprocess.CompletedProcess(flags, process.exitcode, out.read(), err.read())
