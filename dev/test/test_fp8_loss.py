"""Tests dev/fp8_loss.py on logs that a trainer of the test's own writes, and once with ./train_llama3."""

import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "dev" / "fp8_loss.py"
sys.path.insert(0, str(ROOT / "dev"))
import fp8_loss  # noqa: E402

STEPS = 20
# Writes a log and a checkpoint; --fp8 makes the loss of seed N 1 + FACTORS[N] times as high. Fails where another run has its
# card. At SIGTERM with SAVE seconds it takes these for a checkpoint.
TRAINER = f"""#!{sys.executable}
import json, os, signal, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seed, out, fp8 = int(flags["--seed"]), sys.argv[sys.argv.index("--out") + 1], "--fp8" in sys.argv
card = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
def save(*_):
    time.sleep(float(os.environ["SAVE"]))
    os.makedirs(out + "/step_00000003")
    sys.exit(0)
if "SAVE" in os.environ:
    signal.signal(signal.SIGTERM, save)
lock = os.open(f"{{os.environ['CARDS']}}/card{{card}}", os.O_CREAT | os.O_EXCL)
with open(os.environ["CARDS"] + "/runs.txt", "a") as f:
    f.write(f"{{os.path.basename(out)}} {{card}} {{os.getpid()}}\\n")
time.sleep(float(os.environ["SECONDS"]))
os.remove(f"{{os.environ['CARDS']}}/card{{card}}")
os.makedirs(out + "/step_00000020")
ratio = 1 + json.loads(os.environ["FACTORS"])[str(seed)] if fp8 else 1
def event(f, **fields):
    f.write(json.dumps(fields) + "\\n")
with open(out + "/log.jsonl", "w") as f:
    event(f, event="config", time="2026-01-02T03:04:05Z", argv=sys.argv, machine="a card",
          model=dict(parameters=1234567), train_tokens=1280)
    for step in range(1, {STEPS} + 1):
        of_head = dict(dlogits=[0.002, 0]) if seed == 2 else dict()
        more = dict(quantised=dict(weight=[0.001, 0.5], dh=[step / 1000, 0], **of_head)) if fp8 else dict()
        event(f, event="step", step=step, loss=ratio * 4.0, gnorm=1.0, lr=1e-3, ms=float(step), tok_s=100.0, **more)
        if step % 10 == 0:
            event(f, event="val", step=step, loss=ratio * (2.0 + seed / 100 + {STEPS} - step))
    if seed == 9 and fp8:
        print("first line", "error: no room", sep="\\n", file=sys.stderr)
        sys.exit(3)
    event(f, event="end", step={STEPS}, reason="done", seconds=1.0)
"""


COMMIT = fp8_loss.output("git", "rev-parse", "--short", "HEAD") or "unknown"


@pytest.fixture
def compare(tmp_path):
    """Returns a function that runs the script with flags and factors by seed, and returns its process."""
    trainer = tmp_path / "trainer"
    trainer.write_text(TRAINER, encoding="utf-8")
    trainer.chmod(trainer.stat().st_mode | stat.S_IXUSR)
    for name in ("train.bin", "val.bin"):  # 101 tokens
        (tmp_path / name).write_bytes(struct.pack("<4iQQ", 20240520, 1, 101, 0, 101, 0).ljust(1024, b"\0") + bytes(202))
    (tmp_path / "cards").mkdir()

    def call(*flags, before=(), cards="0", seconds=0.3, start=subprocess.run, more=(), **factors):
        where = {"CARDS": str(tmp_path / "cards"), "CUDA_VISIBLE_DEVICES": cards, "SECONDS": str(seconds), **dict(more),
                 "FACTORS": json.dumps({seed[1:]: factor for seed, factor in factors.items()})}
        where = {name: value for name, value in {**os.environ, **where}.items() if value is not None}
        return start([*before, sys.executable, SCRIPT, "--trainer", trainer, "--train", "train.bin", "--val", "val.bin",
                      "--batch", "4", "--seq", "16", "--steps", str(STEPS), "--out", "out", *flags], cwd=tmp_path, env=where,
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return call


def page(tmp_path):
    return (tmp_path / "out/loss.md").read_text(encoding="utf-8")


def started(tmp_path):
    """Returns a line for each run that the trainer started: its folder, card and process."""
    path = tmp_path / "cards/runs.txt"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def wait_for(process, tmp_path, runs):
    """Waits until the trainer has been started so often."""
    while len(started(tmp_path)) < runs:
        assert process.poll() is None
        time.sleep(0.05)


def assert_all_have_ended(tmp_path):
    for line in started(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[2]), 0)


def test_the_page_has_losses_goals_shares_and_a_picture(compare, tmp_path):
    done = compare(s1=0.001, s2=-0.003)
    assert done.returncode == 0, done.stderr
    assert "bf16-1: validation 2.0100\n" in done.stdout and "wrote out/loss.md: 2 of 2 seeds" in done.stdout
    text = page(tmp_path)
    for line in ("# bf16 and fp8: losses", f"- 2026-01-02, commit {COMMIT}", "- a card",
                 "- d12, 1,234,567 parameters; 20 steps of 4 x 16 tokens, 1.00 epochs; validation on 96 tokens",
                 "| 1 | 2.0100 | 2.0120 | +0.100 % |", "| 2 | 2.0200 | 2.0139 | -0.300 % |",
                 "| mean | 2.0150 | 2.0130 | -0.100 % |",
                 "- reached, by seed: at most 0.300 %, wanted at most 0.5 %",
                 "- reached, mean: -0.100 %, wanted at most 0.496 % (the larger of 0.25 % and 0.496 %, by which the seeds of "
                 "bf16 are apart)",
                 "- ms a step, median of seed 1, of runs that share the host: bf16 10.50, fp8 10.50",
                 "| weight | 0.1000 % | 20 | 0.1000 % | 50.0000 % | 20 | 50.0000 % |",
                 "| dh | 2.0000 % | 20 | 1.0500 % | 0.0000 % | 20 | 0.0000 % |",
                 "| dlogits | 0.2000 % | 20 | 0.2000 % | 0.0000 % | 20 | 0.0000 % |",
                 "![Losses, and their difference in per cent](loss.png)"):
        assert line in text.splitlines(), (line, text)
    assert (tmp_path / "out/loss.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in (tmp_path / "out/fp8-2").iterdir()) == ["log.jsonl", "screen.txt"]


def test_a_goal_that_is_missed_is_told(compare, tmp_path):
    compare(s1=0.0051, s2=-0.005)
    assert "- **missed**, by seed: at most 0.510 %" in page(tmp_path) and "- reached, mean: +0.00" in page(tmp_path)
    compare("--lr", "1", s1=0.00498, s2=0.00498)
    assert "- reached, by seed: " in page(tmp_path) and "- **missed**, mean: +0.498 %, wanted at most 0.496 %" in page(tmp_path)


def test_one_seed_has_no_mean(compare, tmp_path):
    compare("--seeds", "1", s1=0.004)
    assert "- reached, by seed: at most 0.400 %" in page(tmp_path) and "mean:" not in page(tmp_path)
    assert re.findall(r"^\| (1|mean) ", page(tmp_path), re.M) == ["1"]


def test_each_card_has_one_run_at_a_time_and_whole_runs_are_kept(compare, tmp_path):
    done = compare("--seeds", "1", "2", "3", cards="4,7", s1=0, s2=0, s3=0)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = started(tmp_path)
    assert sorted(line.split()[0] for line in ran) == ["bf16-1", "bf16-2", "bf16-3", "fp8-1", "fp8-2", "fp8-3"]
    assert {line.split()[1] for line in ran} == {"4", "7"}
    (tmp_path / "out/fp8-2/log.jsonl").write_text("")  # torn
    (tmp_path / "out/loss.md").unlink()
    assert compare("--seeds", "1", "2", "3", s1=0, s2=0, s3=0).returncode == 0 and "| mean |" in page(tmp_path)
    assert [line.split()[0] for line in started(tmp_path)[len(ran):]] == ["fp8-2"]
    compare("--seeds", "1", "--warmup", "3", s1=0)  # another command
    assert len(started(tmp_path)) == len(ran) + 1 + 2


def test_a_run_of_another_commit_is_run_again(compare, tmp_path):
    assert compare("--seeds", "1", s1=0).returncode == 0
    log = tmp_path / "out/fp8-1/log.jsonl"
    assert log.read_text().endswith(json.dumps({"event": "commit", "commit": COMMIT}) + "\n")
    log.write_text(log.read_text().replace(f'"commit": "{COMMIT}"', '"commit": "fffffff"'))
    assert compare("--seeds", "1", s1=0.001).returncode == 0 and "+0.100 %" in page(tmp_path)
    assert [line.split()[0] for line in started(tmp_path)] == ["bf16-1", "fp8-1", "fp8-1"]


def test_a_checkpoint_of_another_run_stays(compare, tmp_path):
    (tmp_path / "out/fp8-2/step_00000007").mkdir(parents=True)
    (tmp_path / "out/fp8-2/screen.txt").write_text("mine")
    done = compare(s1=0, s2=0)
    assert done.returncode == 1 and done.stderr.startswith("error: out/fp8-2/step_00000007: is there already"), done.stderr
    assert sorted(path.name for path in tmp_path.glob("out/**/*")) == ["fp8-2", "screen.txt", "step_00000007"]
    assert (tmp_path / "out/fp8-2/screen.txt").read_text() == "mine" and not started(tmp_path)


def test_a_picture_that_cannot_be_drawn_is_told(compare, tmp_path):
    (tmp_path / "out/loss.png").mkdir(parents=True)
    done = compare(s1=0, s2=0)
    assert done.returncode == 0 and "out/loss.png: not drawn: error: out/loss.png: Is a directory\n" in done.stdout
    assert len(started(tmp_path)) == 4 and "| mean |" in page(tmp_path)


def test_nvidia_smi_names_the_cards_if_it_works(compare, tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/nvidia-smi"
    where = {"PATH": str(tmp_path / "bin")}  # no git there, either
    for visible, text, status, cards in ((None, r"4\n7\n", 0, {"4", "7"}), (None, "NVIDIA-SMI has failed", 9, {"none"}),
                                         ("", "4", 0, {""})):
        program.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
        program.chmod(0o755)
        assert compare("--out", f"out{visible}{status}", cards=visible, more=where, s1=0, s2=0).returncode == 0
        assert {line.split(" ")[1] for line in started(tmp_path)[-4:]} == cards
    assert "commit unknown" in (tmp_path / "outNone9/loss.md").read_text()


def test_a_run_that_fails_is_named_with_its_last_lines(compare, tmp_path):
    done = compare("--seeds", "9", "1", s9=0, s1=0)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    failed = "fp8-9: failed with status 3\nfirst line\nerror: no room\n"
    assert failed in done.stdout and f"```\n{failed}```" in page(tmp_path)
    assert re.findall(r"^\| (\d|mean) ", page(tmp_path), re.M) == ["1"] and not list(tmp_path.glob("out/*/step_*"))
    compare("--seeds", "9", s9=0)
    assert "- no seed is whole\n" in page(tmp_path) and "| 1 |" not in page(tmp_path) and failed in page(tmp_path)


@pytest.fixture(autouse=True)
def signals_as_at_a_terminal():
    """A shell without job control, such as that of run.sh, starts what runs in the background with SIGINT ignored, and so
    would be the programs that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_trainers_end_when_it_is_ended(compare, tmp_path, number):
    process = compare(cards="0,1", seconds=60, start=subprocess.Popen)
    wait_for(process, tmp_path, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert "bf16-1: failed with status -15" in out and err == "" and process.returncode == 128 + number
    assert_all_have_ended(tmp_path)


def test_a_second_ctrl_c_waits_for_trainers_that_save(compare, tmp_path):
    process = compare(cards="0,1", seconds=60, more={"SAVE": "1"}, start=subprocess.Popen)
    wait_for(process, tmp_path, 2)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and len(re.findall("failed with status 0", out)) == 2
    assert_all_have_ended(tmp_path)
    assert not list(tmp_path.glob("out/*/step_*"))


def test_trainers_end_when_stdout_is_closed(compare, tmp_path):
    process = compare(cards="0,1", seconds=60, more={"SAVE": "0"}, start=subprocess.Popen)
    wait_for(process, tmp_path, 2)
    process.stdout.close()
    process.terminate()
    assert process.wait(timeout=30) == 1 and process.stderr.read() == "error: Broken pipe\n"
    assert_all_have_ended(tmp_path)
    assert not list(tmp_path.glob("out/*/step_*"))


def test_nohup_keeps_it_running(compare, tmp_path):
    process = compare("--seeds", "1", before=["nohup"], seconds=1, start=subprocess.Popen, s1=0)
    wait_for(process, tmp_path, 1)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 0 and len(started(tmp_path)) == 2


def test_a_trainer_that_does_not_end_is_killed():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        fp8_loss.end([process], 0.5)
        assert process.returncode == -signal.SIGKILL


def test_other_flags_are_compared_by_name(compare, tmp_path):
    assert compare("--seeds", "1", "--sides", "plain=--eps 1e-8", "other=--fp8 --zero 1", s1=0.002).returncode == 0
    assert "| seed | plain | other | difference |" in page(tmp_path) and "+0.200 %" in page(tmp_path)
    argv = json.loads((tmp_path / "out/other-1/log.jsonl").read_text().split("\n")[0])["argv"]
    assert argv[-5:] == ["--fp8", "--zero", "1", "--out", "out/other-1"]


def test_wrong_use_is_told(compare, tmp_path):
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "binary").write_bytes(bytes(8))
    (tmp_path / "binary").chmod(0o755)
    for code, words, flags in ((2, "wanted NAME=FLAGS", ("--sides", "a", "b=")), (2, "there twice", ("--seeds", "1", "1")),
                               (2, "there twice", ("--sides", "a=", "a=--fp8")), (1, "is empty", ("--val", "empty.bin")),
                               (2, "argument --sides: invalid", ("--sides", 'a=--eps "1', "b=")),
                               (1, "nowhere: is no program", ("--trainer", "nowhere")),
                               (1, "val.bin: is no program", ("--trainer", "val.bin")),
                               (1, "error: val.bin", ("--out", "val.bin")), (1, "error: val.bin/out", ("--out", "val.bin/out")),
                               (1, "error: /proc/nowhere", ("--out", "/proc/nowhere"))):
        done = compare(*flags)
        assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()
    done = compare("--trainer", "binary")
    assert done.returncode == 1 and done.stderr == f"error: {tmp_path}/binary: Exec format error\n"


def test_the_trainer_of_the_cpu_is_compared(tmp_path):
    if not (ROOT / "train_llama3").exists() or not (ROOT / "tokenize").exists():
        pytest.skip("the programs are not built (make train_llama3 tokenize)")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the bird flew over the moon. " * 40, encoding="utf-8")
    subprocess.run([ROOT / "tokenize", "-o", "data.bin", "text.txt"], cwd=tmp_path, check=True, capture_output=True)
    command = [sys.executable, SCRIPT, "--trainer", ROOT / "train_llama3", "--train", "data.bin", "--val", "data.bin",
               "--seeds", "1", "--model", "d1", "--batch", "2", "--seq", "16", "--steps", "6", "--warmup", "1", "--out", "out",
               "--sides", "same=--threads 1", "again=--threads 1"]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "starts" not in done.stdout
    assert re.search(r"^\| 1 \| (\d\.\d{4}) \| \1 \| \+0\.000 % \|$", page(tmp_path), re.M), page(tmp_path)
    assert not list(tmp_path.glob("out/*/step_*"))
