"""Runs train_llama3.py for tests, in processes forked from a server that has imported PyTorch (forks.py)."""

from pathlib import Path

import forks

SCRIPT = Path(__file__).resolve().parents[3] / "train_llama3.py"
forks.preload("torch", "safetensors.torch", "torch._dynamo")  # the last: an optimizer's first step imports it


def start(folder, *flags, **streams):
    return forks.start(SCRIPT, folder, *flags, **streams)


def run(folder, *flags):
    return forks.run(SCRIPT, folder, *flags)
