"""Runs scripts of Python for tests. Each run is a process of its own, forked from a server that has imported what preload() names:
such imports take more CPU time than the little that a test wants."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = []
TRAINER = Path(__file__).resolve().parents[3] / "train_llama3.py"


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
