"""Tests how a run uses its validation losses: it keeps and names the best checkpoint, --checkpoint-best writes it, and
--patience ends the run. At learning rate 0 all losses are equal, so the first validation stays the best."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def train(folder, *flags):
    done = subprocess.run([ROOT / "train_llama3", "--threads", "1", *map(str, flags)], cwd=folder, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    (folder / "text.txt").write_text("the cat sat on the mat and the bird flew over the moon. " * 40, encoding="utf-8")
    subprocess.run([ROOT / "tokenize", "-o", "data.bin", "text.txt"], cwd=folder, check=True, capture_output=True)
    return folder


FLAGS = ["--model", "d1", "--train", "data.bin", "--val", "data.bin", "--batch", 2, "--seq", 16, "--val-batches", 2,
         "--sample-tokens", 0, "--steps", 20, "--val-every", 2]


def kept(out):
    return sorted(p.name for p in out.glob("step_*"))


def last_event(out):
    return json.loads((out / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])


def state(out, step):
    return json.loads((out / f"step_{step:08}/trainer_state.json").read_text(encoding="utf-8"))["validation"]


def test_patience_ends_the_run_and_the_best_checkpoint_is_kept_and_named(work):
    text = train(work, *FLAGS, "--lr", 0, "--patience", 2, "--checkpoint-every", 2, "--keep", 1, "--out", "a")
    assert kept(work / "a") == ["step_00000002", "step_00000006"]
    assert last_event(work / "a")["reason"] == "patience" and last_event(work / "a")["step"] == 6
    assert "best    a/step_00000002, validation" in text and "2 validations in a row" in text
    assert state(work / "a", 6)["best_step"] == 2 and state(work / "a", 6)["since_best"] == 2


def test_what_is_due_at_the_step_of_the_last_patience_is_done(work):
    (work / "task.jsonl").write_text('{"ctx": "the cat", "choices": ["sat", "flew"], "label": 0}\n', encoding="utf-8")
    text = train(work, *FLAGS, "--lr", 0, "--patience", 2, "--tasks", "task.jsonl", "--eval-every", 6, "--sample-every", 6,
                 "--sample-tokens", 4, "--out", "due")
    events = [json.loads(line) for line in (work / "due/log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [e["event"] for e in events if e.get("step") == 6] == ["step", "val", "task", "sample", "checkpoint", "end"]
    assert text.index("acc_norm") < text.index("sample  ") < text.index("2 validations in a row")


def test_a_resumed_run_has_the_patience_of_one_that_never_stopped(work):
    flags = [*FLAGS, "--lr", 0, "--patience", 3]
    train(work, *flags, "--out", "whole")
    train(work, *flags, "--out", "parts", "--stop-after", 5)  # also validates there, but this validation does not count
    train(work, "--resume", "--out", "parts")
    assert last_event(work / "whole")["step"] == last_event(work / "parts")["step"] == 8
    assert state(work / "whole", 8) == state(work / "parts", 8)


def test_a_run_out_of_patience_goes_on_only_with_more(work):
    train(work, *FLAGS, "--lr", 0, "--patience", 2, "--out", "over")
    text = train(work, "--resume", "--out", "over")
    assert kept(work / "over") == ["step_00000006"] and last_event(work / "over")["reason"] == "patience"
    assert "done    0 steps" in text and "2 validations in a row" in text
    train(work, "--resume", "--out", "over", "--patience", 3)
    assert last_event(work / "over")["step"] == 8


def test_each_new_best_is_written_with_checkpoint_best(work):
    text = train(work, *FLAGS, "--lr", 0, "--steps", 7, "--checkpoint-best", "--out", "b")
    assert kept(work / "b") == ["step_00000002", "step_00000007"] and "best    b/step_00000002" in text
    text = train(work, *FLAGS, "--lr", 1e-3, "--steps", 6, "--checkpoint-best", "--keep", 1, "--out", "c")
    assert kept(work / "c") == ["step_00000006"] and "best    c/step_00000006" in text  # each replaced the last one
    assert last_event(work / "c")["reason"] == "done"


def test_a_new_best_stays_where_one_by_time_is_due_too(work):
    train(work, *FLAGS, "--lr", 1e-3, "--steps", 3, "--val-every", 1, "--checkpoint-best", "--checkpoint-minutes", 1e-6, "--out", "d")
    assert kept(work / "d") == ["step_00000001", "step_00000002", "step_00000003"]
