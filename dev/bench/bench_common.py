"""bench_common.py -- what the benchmarks of a training step share: token files, and commands that run to their end. Standard
library only, so that our side can be measured where PyTorch is not installed."""
import array
import random
import subprocess
import sys
import tempfile
import time


def write_tokens(path, count, vocab):
    """Writes a token file, without a mask, of uniformly random tokens."""
    wide = vocab > 1 << 16
    head = array.array("i", [20240801, 7, count, vocab] if wide else [20240520, 1, count, vocab])
    tokens = array.array("I" if wide else "H", random.Random(0).choices(range(vocab), k=count))
    with open(path, "wb") as f:
        f.write(head.tobytes() + bytes(1024 - 4 * len(head)) + tokens.tobytes())


def largest_size(pid):
    """Returns the peak resident size of a process in bytes (the figure of wait() includes the size of the parent)."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as f:
            return next((int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM")), 0)
    except OSError:
        return 0


def run(command, env=None):
    """Runs a command to its end. Returns (output, peak resident size in bytes)."""
    with tempfile.TemporaryFile("w+") as screen:
        p, size = subprocess.Popen(command, stdout=screen, stderr=subprocess.STDOUT, env=env), 0
        while p.poll() is None:
            size = max(size, largest_size(p.pid))
            time.sleep(0.02)
        screen.seek(0)
        output = screen.read()
    if p.returncode != 0:
        sys.exit(f"error: {' '.join(command)} ended with exit code {p.returncode}\n{output}")
    return output, size
