"""Tests how dev/bench/bench_gpu.py measures: it finds the number of blocks that a side must recompute, and it ends in time."""
import argparse
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "dev/bench"))
import bench_gpu  # noqa: E402

# a trainer that needs `least` blocks recomputed, and with exactly so many waits for memory in each step
STUB = """
import os, sys, time
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
least, blocks = int(sys.argv[1]), int(flags.get("--recompute-blocks", 0))
if blocks < least:
    sys.exit("CUDA out of memory")
os.makedirs(flags["--out"])
with open(flags["--out"] + "/log.jsonl", "w") as log:
    print('{"event":"config","options":{"recompute":"%s"}}' % "ffn:3", file=log)
    while True:
        print('{"event":"step","ms":%d}' % (100 + blocks + 50 * (blocks == least > 0)), file=log, flush=True)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("least, blocks, tries", [(0, 0, []), (1, 2, [32, 16, 8, 4, 2, 1]), (11, 12, [32, 16, 8, 12, 10, 11]),
                                                  (32, 32, [32, 16, 24, 28, 30, 31]), (33, None, [32])])
def test_the_fastest_number_of_blocks_that_fits_is_found(tmp_path, capsys, least, blocks, tries):
    side = bench_gpu.Side("PyTorch", [sys.executable, "-c", STUB, str(least)], 8, "bf16, recompute auto", 32)
    monitor = bench_gpu.Monitor()
    for _ in range(2):
        side.turn(str(tmp_path), monitor, 0.5, 2)
    monitor.close()
    screen = capsys.readouterr().out
    assert [n for n in range(33) if f"--recompute-blocks {n}: " in screen] == sorted(tries)
    if blocks is None:
        assert "out of memory" in side.error
    else:
        assert not side.error and side.blocks == blocks and len(side.ms) > 8 and side.note == "bf16, recompute ffn:3"
        assert side.ms == [100 + blocks + 50 * (blocks == least > 0)] * len(side.ms)


def test_another_error_ends_the_side(tmp_path):
    side = bench_gpu.Side("PyTorch", [sys.executable, "-c", "raise SystemExit('no card')"], 8, "bf16", 32)
    side.turn(str(tmp_path), bench_gpu.Monitor(), 0.5, 2)
    assert "no card" in side.error and side.blocks == 0


@pytest.mark.parametrize("together, unlike", [("ffn:3", False), ("norm+swiglu,ffn:1", True)])
def test_the_page_of_several_cards_says_when_their_work_is_unlike(tmp_path, together, unlike):
    trainer = tmp_path / "trainer"
    code = STUB.replace('"ffn:3"', f'("{together}" if "--gpus" in flags else "ffn:3")')
    trainer.write_text(f"#!{sys.executable}\nimport sys\nsys.argv.insert(1, '0')\n{code}")
    trainer.chmod(0o755)
    a = argparse.Namespace(ours={}, gpus=2, trainer=str(trainer), precision="BF16", together=[], rounds=1, seconds=0.1, warm=1,
                           gpu="none", torch_dist=None)
    monitors = [bench_gpu.Monitor(), bench_gpu.Monitor()]
    page, _ = bench_gpu.compare_gpus("tiny", ("d1", 512, 2, 32, "--recompute auto", ""), a, monitors, str(tmp_path))
    line = f"Unlike work: alone the cards recompute ffn:3, ffn:3; together {together}. "
    assert [entry.startswith(line) for entry in page].count(True) == unlike
    assert f"| BF16, recompute {together}, master fp32, moments fp32 |" in page[6]


def test_what_runs_over_the_time_is_killed_with_all_that_it_started():
    ours, theirs = os.pipe()
    begin = time.monotonic()
    assert bench_gpu.in_time(["sh", "-c", "sleep 60 & wait"], begin + 0.5, stdout=theirs) is None
    os.close(theirs)
    assert select.select([ours], [], [], 20)[0] and not os.read(ours, 1)  # nothing holds the other end
    os.close(ours)


def test_a_page_says_that_its_profile_ran_over_the_time():
    assert bench_gpu.profile("sh", ["-c", "sleep 60"], time.monotonic() + 0.1) == ["No profile: the time was over.", ""]


def test_what_ends_in_time_gives_its_output():
    result = bench_gpu.in_time(["sh", "-c", "echo done; exit 3"], time.monotonic() + 60, stdout=subprocess.PIPE)
    assert (result.stdout, result.returncode) == ("done\n", 3)
