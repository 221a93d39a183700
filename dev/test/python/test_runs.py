"""Tests that train_llama3.py writes over no run, of its own or of the C trainer, and that each trainer names the other's runs.
Also tests that its numbers are checked as in C."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
import python_trainer  # noqa: E402  packages that are missing skip the file before
from train_llama3 import parse_arguments  # noqa: E402

FLAGS = ["--model", "d1", "--train", "data.bin", "--batch", "1", "--seq", "16", "--sample-tokens", "0", "--threads", "1",
         "--checkpoint-every", "1"]


def run(folder, program, *flags):
    return subprocess.run([*program, *map(str, flags)], cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def torch_run(folder, *flags):
    return python_trainer.run(folder, *FLAGS, *flags)


def c_run(folder, *flags):
    return run(folder, [ROOT / "train_llama3"], *flags)


def refused(done, *texts):
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") <= 2, done.stderr
    for text in texts:
        assert text in done.stderr, done.stderr


def contents(folder):
    """Returns the bytes of all files below a folder. Hidden ones are of locks."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name[0] != "."}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Makes token files, and a run of each trainer: `torch` and `c`."""
    folder = tmp_path_factory.mktemp("runs")
    ids = [(7 * i * i + 3 * i) % 250 for i in range(2000)]
    data = struct.pack("<256i", 20240520, 1, len(ids), 256, *[0] * 252) + struct.pack(f"<{len(ids)}H", *ids)
    (folder / "data.bin").write_bytes(data)
    assert torch_run(folder, "--steps", 2, "--out", "torch").returncode == 0
    assert c_run(folder, *FLAGS, "--steps", 2, "--out", "c").returncode == 0
    return folder


@pytest.mark.parametrize("out", ["torch", "c"])
def test_a_finished_run_is_not_written_over(work, out):
    before = contents(work / out)
    text = f"--out: {out} holds the checkpoints of another run, up to step 2"
    refused(torch_run(work, "--steps", 3, "--out", out), text, "--resume")
    assert contents(work / out) == before


def test_a_living_run_of_the_c_trainer_is_left_alone_and_leaves_this_one_alone(work):
    flags = [*FLAGS, "--steps", 1000000, "--out", "live", "--schedule", "constant", "--keep", 2]
    with subprocess.Popen([ROOT / "train_llama3", *map(str, flags)], cwd=work, stdout=subprocess.DEVNULL) as c:
        try:
            while not list((work / "live").glob("step_*[0-9]")):
                time.sleep(0.05)
            text = f"live: another run (process {c.pid}) is writing into this folder"
            refused(torch_run(work, "--out", "live", "--resume"), text)
            assert c.poll() is None
        finally:
            c.kill()
    flags = [*FLAGS, "--steps", 1000000, "--out", "live2", "--keep", 2]
    mine = python_trainer.start(work, *flags)
    try:
        while not list((work / "live2").glob("step_*[0-9]")):
            time.sleep(0.05)
        refused(c_run(work, *FLAGS, "--out", "live2", "--resume"), f"another run (process {mine.pid}) is writing")
        owner = (work / "live2/.owner").read_text(encoding="utf-8").split()
        assert owner[1] == str(mine.pid) and len(owner) == 4
    finally:
        mine.kill()
        mine.join()
    assert torch_run(work, "--out", "live2", "--resume", "--stop-after", 2).returncode in (0, 2)  # its lock died with it
    assert not (work / "live2/.owner").exists()


def claim(out, age):
    """Lets a process of another host have claimed `out` so many seconds ago."""
    out.mkdir(exist_ok=True)
    (out / ".owner").write_text("host-b 4711 0123456789abcdef 00000000-0000-0000-0000-000000000000\n", encoding="utf-8")
    os.utime(out / ".owner", (time.time() - age,) * 2)


def test_a_run_on_another_host_is_refused_and_a_dead_one_replaced(work):
    for age in (20, -3600):
        claim(work / "theirs", age)
        refused(torch_run(work, "--steps", 1, "--out", "theirs"), "a run on host host-b (process 4711)", "its claim ends in 1")
        assert {p.name for p in (work / "theirs").iterdir()} == {".lock", ".owner"}
    assert time.time() - (work / "theirs/.owner").stat().st_mtime < 100  # it is no longer of the future
    claim(work / "theirs", 200)
    assert torch_run(work, "--steps", 1, "--out", "theirs").returncode == 0
    assert not (work / "theirs/.owner").exists()


def test_links_are_not_written_through(work):
    precious = work / "precious"
    for name in ("log.jsonl", ".lock"):
        for link in (os.symlink, os.link):
            out = work / f"{name}.{link.__name__}"
            out.mkdir()
            precious.write_text("precious\n", encoding="utf-8")
            link(precious, out / name)
            done = torch_run(work, "--steps", 1, "--out", out)
            if link is os.symlink or name == ".lock":
                refused(done, f"{name}: wanted a regular file")
            else:
                assert done.returncode == 0, done.stderr
            assert precious.read_text(encoding="utf-8") == "precious\n"


def test_a_set_back_run_keeps_the_later_checkpoints_under_another_name(work):
    assert torch_run(work, "--steps", 2, "--out", "back").returncode == 0
    later = contents(work / "back/step_00000002")
    assert torch_run(work, "--out", "back", "--resume", "back/step_00000001", "--steps", 2, "--lr", 1).returncode == 0
    assert contents(work / "back/step_00000002.set_back") == later != contents(work / "back/step_00000002")
    assert torch_run(work, "--resume", "back/step_00000001", "--steps", 2).returncode == 0  # without --out, in its own folder
    assert (work / "back/step_00000002.set_back2").is_dir() and not (work / "out").exists()


def test_each_trainer_names_the_runs_of_the_other_and_takes_their_models(work):
    refused(c_run(work, "--out", "torch", "--resume"), "is a checkpoint of train_llama3.py", "--model torch/step_00000002")
    refused(c_run(work, "--resume", "torch/step_00000002", "--out", "new"), "is a checkpoint of train_llama3.py")
    refused(torch_run(work, "--out", "c", "--resume"), "c/step_00000002: is a checkpoint of the C trainer")
    for out in ("torch", "c"):
        assert torch_run(work, "--steps", 1, "--out", f"from_{out}", "--model", out).returncode == 0
    assert c_run(work, *FLAGS, "--steps", 1, "--out", "from", "--model", "torch/step_00000002").returncode == 0


@pytest.mark.parametrize("flag, text", [
    ("--lr", "nan"), ("--lr", "1_000"), ("--beta1", "2"), ("--eps", "nan"), ("--threads", "-3"), ("--grad-clip", "-1"),
    ("--weight-decay", "-1"), ("--warmup", "-5"), ("--steps", "-7"), ("--temperature", "nan"), ("--seq", "1e3"), ("--seed", "x"),
    ("--train", ""), ("--tokenizer", "")])
def test_wrong_values_are_those_of_the_c_trainer(work, flag, text, capsys):
    theirs = c_run(work, *FLAGS, flag, text)
    with pytest.raises(SystemExit) as end:
        parse_arguments([*FLAGS, flag, text])
    assert end.value.code == theirs.returncode == 2
    assert capsys.readouterr().err.splitlines()[0] == theirs.stderr.splitlines()[0]


def test_weights_that_f16_cannot_hold_are_written_in_f32(work):
    from safetensors.torch import load_file, save_file
    assert torch_run(work, "--steps", 1, "--out", "large").returncode == 0
    path = work / "large/step_00000001/model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][0, 0] = 70000
    save_file(tensors, path, metadata={"format": "pt"})
    done = torch_run(work, "--model", "large", "--steps", 2, "--lr", "1e-5", "--out", "wide", "--export-dtype", "f16")
    assert done.returncode == 0 and "model.embed_tokens.weight is infinite in F16" in done.stderr
    assert json.loads((work / "wide/step_00000002/config.json").read_text(encoding="utf-8"))["dtype"] == "float32"
    assert c_run(work, "--model", "wide/step_00000002", "--generate", "5", "--tokens", 1).returncode == 0


def test_a_run_that_exports_16_bits_resumes_with_exact_weights(work):
    flags = ["--steps", 3, "--export-dtype", "bf16", "--out"]
    assert torch_run(work, *flags, "whole").returncode == 0
    assert torch_run(work, *flags, "parts", "--stop-after", 1).returncode == 0
    assert torch_run(work, *flags, "parts", "--resume").returncode == 0
    name = "step_00000003/model.safetensors"
    assert (work / "whole" / name).read_bytes() == (work / "parts" / name).read_bytes()
