"""Tests dev/track.py: the values that TensorBoard reads from its event files, and the values that W&B keeps offline. Tests the
pictures that dev/plot.py draws of logs, and its comparisons of runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forks
import pytest

forks.preload("matplotlib.pyplot")
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
    (tmp_path / "secret").write_text(json.dumps(step(1, 4.0)) + "\n")
    (tmp_path / "log.jsonl").symlink_to("secret")
    done = track(tmp_path, "--tensorboard", tmp_path / "tb")
    assert done.stderr == f"error: {tmp_path}/log.jsonl: is a link or no file, wanted the log of a run\n"


def plot(folder, *flags):
    return forks.run(TRACK.parent / "plot.py", folder, *flags)


def test_plot_draws_several_runs_and_names_a_broken_log(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        step = dict(event="step", loss=3.0, gnorm=1.0, lr=1e-3, ms=10.0, tok_s=5e4)
        lines = [dict(event="config"), *(dict(step, step=i) for i in range(1, 9)), dict(event="val", step=8, loss=2.9, bpb=1.1)]
        (tmp_path / name / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"event":"st')
    flags = ["first", "second/log.jsonl", "--smooth", "3", "-o", "a.png"]
    assert plot(tmp_path, *flags).returncode == 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert plot(tmp_path, *flags, "--bpb", "--tokens", "-o", "b.png").returncode == 0
    assert (tmp_path / "b.png").read_bytes() != (tmp_path / "a.png").read_bytes()
    r = plot(tmp_path, *flags, "-o", "nowhere/a.png")
    assert r.returncode == 1 and r.stderr.startswith("error: nowhere/a.png: ")
    for line in (b"nonsense", b'{"event":"step","loss":1,"step":"x"}', b'{"event":"step","loss":1,"step":1}', b"\xff"):
        (tmp_path / "first" / "log.jsonl").write_bytes(line + b"\n")
        r = plot(tmp_path, *flags)
        assert r.returncode == 1 and "log.jsonl:1" in r.stderr and "Traceback" not in r.stderr
    r = plot(tmp_path, *flags, "--smooth", "-3")
    assert r.returncode == 2 and "--smooth: is -3, wanted 0 or more" in r.stderr


def test_plot_names_each_kind_of_line_and_draws_many_validations_as_a_line(tmp_path):
    pytest.importorskip("matplotlib")
    for name, every in (("few", 5), ("many", 2)):
        write(tmp_path / name / "log.jsonl", *(step(i, 3.0) for i in range(1, 201)),
              *(dict(event="val", step=i, loss=2.9) for i in range(every, 201, every)))
    for flags, kinds, drawn in ((["few"], ["each step", "mean of 1 % of the steps", "validation"], 40),
                                (["many"], ["validation"], 0),
                                (["few", "--base", "few"], ["few (base)", "validation of the base"], 40)):
        assert plot(tmp_path, *flags, "-o", "a.svg").returncode == 0
        picture = (tmp_path / "a.svg").read_text()
        assert all(f"<!-- {kind} -->" in picture for kind in kinds)  # of the legend
        assert picture.split('id="validation"')[1].split("</g>")[0].count("<use") == drawn


@pytest.mark.skipif(not (TRACK.parents[1] / "train_llama3").exists(), reason="train_llama3 is not built")
def test_a_sweep_continues_trains_nothing_twice_and_refuses_other_flags(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "bytes.bin").write_bytes(b"".join(n.to_bytes(4, "little") for n in [20240520, 1, 3000] + [0] * 253) +
                                         b"".join((i * i % 61).to_bytes(2, "little") for i in range(3000)))
    flags = ["--model", "d1", "--train", "bytes.bin", "--seq", 16, "--batch", 1, "--sample-tokens", 0, "--grad-clip", 0,
             "--weight-decay", 1000, "--threads", 1]

    def sweep(out, *own, more=()):
        r = forks.run(TRACK.parent / "sweep.py", tmp_path, "--total-batch", 16, 32, "--tokens", 640, "-o", out, *own, "--",
                      *flags, *more)
        return r.returncode, r.stdout.splitlines(), r.stderr
    code, whole, errors = sweep("whole", "--lr", 1000, 1e-4)
    assert code == 0 and whole.pop(0) == "rates 0.0001, 1000; 16, 32 tokens a step", errors
    assert whole[0].startswith("rate 0.0001, 16 tokens a step, 40 steps: ")
    assert whole[7].startswith("| 0.0001 | ") and whole[7].count("**") == 2 and whole[8] == "| 1000 | not finite | not finite |"
    subprocess.run([TRACK.parents[1] / "train_llama3", *map(str, flags), *"--lr 0.0001 --total-batch 16 --steps 40 --warmup 2 "
                    "--val-every 0 --val-batches 1000000 --stop-after 9 --out part/lr_0.0001_batch_16".split()], cwd=tmp_path,
                   check=True)
    assert sweep("part", "--lr", 1e-4)[1][1:3] == whole[0:3:2]
    logs = {path: path.read_text() for path in tmp_path.glob("part/*/log.jsonl")}
    assert sweep("part", "--lr", 1e-4, 1000)[1][1:-1] == whole[:-1]
    assert all(path.read_text().count('"event":"step"') == text.count('"event":"step"') for path, text in logs.items())
    assert sweep("part", "--lr", 1e-4, more=["--seed", 3])[2].startswith("error: --seed: is 3, was 42 in part/lr_0.0001_batch_16")
    low, rate, high = map(float, re.search("rates (.*), (.*), (.*); 16, 32 ", sweep("chosen")[1][0]).groups())
    assert rate > 0 and low == pytest.approx(rate / 2, rel=0.05) and high == pytest.approx(2 * rate, rel=0.05)
    assert "--nonsense: is no flag of the sweep" in sweep("part", "--nonsense")[2]
    assert "--steps: the sweep sets this flag" in sweep("part", "--lr", 1e-4, more=["--steps", 3])[2]


def test_plot_lists_its_flags_without_matplotlib(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    done = subprocess.run([sys.executable, TRACK.parent / "plot.py", "--help"], capture_output=True, text=True, check=False,
                          env=dict(os.environ, PYTHONPATH=str(tmp_path)), timeout=60)
    assert done.returncode == 0 and "--log-scale" in done.stdout and not done.stderr


def test_plot_draws_a_run_whose_losses_are_not_finite(tmp_path):
    pytest.importorskip("matplotlib")
    for name, finite in (("some", 3), ("none", 0), ("whole", 8)):
        (tmp_path / name).mkdir()
        steps = [dict(event="step", step=i, loss=3.0 if i <= finite else None, gnorm=1.0 if i <= finite else None, lr=1e-3,
                      ms=10.0, tok_s=5e4) for i in range(1, 9)]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in steps))
    for flags in (["none"], ["none", "--log-scale", "--smooth", 3], ["some", "--tokens"], ["some", "none", "whole"]):
        r = plot(tmp_path, *flags, "-o", "n.png")
        assert r.returncode == 0 and (tmp_path / "n.png").stat().st_size > 10000, r.stderr
    assert plot(tmp_path, "some", "--base", "whole", "-o", "c.png").returncode == 0
    r = plot(tmp_path, "none", "--base", "whole", "-o", "d.png")
    assert r.returncode == 1 and "error: the runs have no steps in common" in r.stderr


def test_plot_compares_runs_with_others_of_the_same_seed(tmp_path):
    pytest.importorskip("matplotlib")
    for name, factor, last in (("bf16-1", 1, 40), ("bf16-2", 1, 40), ("fp8-1", 1.004, 30), ("fp8-2", 0.99, 40), ("late", 1, 0)):
        (tmp_path / name).mkdir()
        steps = range(1, last + 1) if last else range(50, 60)
        lines = [dict(event="step", step=i, loss=factor * (3 - i / 99), gnorm=1, lr=1e-3, ms=10, tok_s=5e4) for i in steps]
        lines += [dict(event="val", step=i, loss=factor * (4 - i / 99)) for i in steps if i % 10 == 0]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    r = plot(tmp_path, "fp8-1", "fp8-2", "--base", "bf16-1", "bf16-2", "-o", "a.png")
    assert r.returncode == 0 and (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG", r.stderr
    assert r.stdout.splitlines() == ["fp8-1: validation 3.7118 at step 30, bf16-1 3.6970: +0.400 %",
                                     "fp8-2: validation 3.5600 at step 40, bf16-2 3.5960: -1.000 %", "wrote a.png"]
    assert plot(tmp_path, "fp8-1", "fp8-1", "--base", "bf16-1", "bf16-1", "-o", "b.png").returncode == 0
    assert (tmp_path / "b.png").read_bytes() != (tmp_path / "a.png").read_bytes()
    for code, flags, words in ((2, ("fp8-1", "fp8-2", "--base", "bf16-1"), "1 runs, wanted one for each of the 2 LOGs"),
                               (1, ("late", "--base", "bf16-1"), "error: the runs have no steps in common")):
        r = plot(tmp_path, *flags, "-o", "c.png")
        assert r.returncode == code and words in r.stderr and "Traceback" not in r.stderr, r.stderr
    assert not (tmp_path / "c.png").exists()
