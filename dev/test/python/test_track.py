"""Tests dev/track.py: the values that TensorBoard reads from its event files, and the values that W&B keeps offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRACK = Path(__file__).resolve().parents[2] / "track.py"
START = {"event": "config", "time": "2026-01-02T03:04:05Z", "options": {"lr": 1e-3}, "model": {}, "precision": "FP32",
         "machine": "m"}


def step(n, loss):
    return {"event": "step", "step": n, "loss": loss, "gnorm": 1.0, "lr": 1e-3, "ms": 5.0, "tok_s": 100.0, "seconds": 2.0 * n,
            "tokens": 64 * n}


def write(log, *events):
    log.parent.mkdir(exist_ok=True)
    log.write_text("".join(json.dumps(e) + "\n" for e in events), encoding="utf-8")


def track(*flags, **env):
    return subprocess.run([sys.executable, TRACK, *map(str, flags)], capture_output=True, text=True, check=False,
                          env={**os.environ, **env})


def test_tensorboard_gets_each_step_once_also_after_a_set_back(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = tmp_path / "mine/log.jsonl"

    def losses():
        a = accumulator.EventAccumulator(str(tmp_path / "tb/mine"), {"scalars": 0, "tensors": 0})
        a.Reload()
        return a, [(e.step, round(e.value, 4), e.wall_time) for e in a.Scalars("train/loss")]
    t0 = 1767323045.0  # the time in START
    val, sample = {"event": "val", "step": 2, "loss": 3.5, "bpb": 1.5}, {"event": "sample", "step": 2, "text": "Once"}
    task = {"event": "task", "step": 2, "file": "arc.jsonl", "acc": 0.5, "acc_norm": 0.25, "questions": 4}
    write(log, START, step(1, 4.0), step(2, 3.0), val, task, sample)
    assert track(log, "--tensorboard", tmp_path / "tb").returncode == 0
    a, got = losses()
    assert got == [(1, 4.0, t0 + 2), (2, 3.0, t0 + 4)]
    assert [e.value for e in a.Scalars("val/loss")] == [3.5] and [e.value for e in a.Scalars("train/tokens")] == [64, 128]
    assert [e.value for e in a.Scalars("task/arc.jsonl/acc")] == [0.5] and a.Scalars("val/bpb")[0].value == 1.5
    assert a.Tensors("sample")[0].tensor_proto.string_val[0] == b"Once"
    # nothing new, then one step more
    track(log, "--tensorboard", tmp_path / "tb")
    write(log, START, step(1, 4.0), step(2, 3.0), val, task, sample, step(3, 2.0))
    track(log.parent, "--tensorboard", tmp_path / "tb")
    assert [g[:2] for g in losses()[1]] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    # the run was set back to step 1: its later lines are cut, and other lines follow
    write(log, START, step(1, 4.0), {"event": "resume", "step": 1, "time": "2026-01-02T04:00:00Z"}, step(2, 2.5))
    track(log, "--tensorboard", tmp_path / "tb")
    assert [g[:2] for g in losses()[1]] == [(1, 4.0), (2, 2.5)]


def test_what_is_no_log_is_named(tmp_path):
    pytest.importorskip("tensorboard")
    log = tmp_path / "log.jsonl"
    for text in ("[1]\n", "nonsense\n", '{"step":1}\n'):
        log.write_text(text)
        r = track(log, "--tensorboard", tmp_path / "tb")
        assert r.returncode == 1 and r.stderr == f"error: {log}:1: is no event of a run's log\n", r.stderr
    for text in ("", "no newline"):
        log.write_text(text)
        r = track(log, "--tensorboard", tmp_path / "tb")
        assert r.returncode == 1 and r.stderr == f"error: {log}: has no event of a run\n", r.stderr
    (tmp_path / "track-tensorboard.json").write_text("{")
    r = track(log, "--tensorboard", tmp_path / "tb")
    assert r.returncode == 1 and "track-tensorboard.json: is damaged" in r.stderr and "Traceback" not in r.stderr, r.stderr


def test_wandb_keeps_a_run_offline(tmp_path):
    pytest.importorskip("wandb")
    log = tmp_path / "mine/log.jsonl"
    write(log, START, step(1, 4.0), {"event": "val", "step": 1, "loss": 3.5}, step(2, 3.0),
          {"event": "sample", "step": 2, "text": "<a>"})
    done = track(log, "--wandb", "p", WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 1 and b"train/loss" in files[0].read_bytes() and b"val/loss" in files[0].read_bytes()
    assert track(log, "--wandb", "p", WANDB_MODE="offline", WANDB_DIR=str(tmp_path)).stdout == ""


def test_wrong_use_is_told(tmp_path):
    done = track(tmp_path / "none", "--tensorboard", tmp_path / "tb")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "log.jsonl" in done.stderr
    assert track(tmp_path).returncode == 2
