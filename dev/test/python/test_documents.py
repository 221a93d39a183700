"""Compares ./train_llama3 with train_llama3.py on data with documents and masks, step by step in each --documents mode. Also
compares micro-batches of unequal rows with one large batch. Run: pytest dev/test/python/test_documents.py"""
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "..", "..", ".."))
sys.path.insert(0, ROOT)
import forks  # noqa: E402
import train_llama3 as ref  # noqa: E402
from dev.reference import tokenfiles  # noqa: E402
from dev.reference.config import Config  # noqa: E402

TRAINER = os.path.join(ROOT, "train_llama3")
BOS, VOCAB, T = 1, 97, 32
pytestmark = pytest.mark.skipif(not os.path.exists(TRAINER), reason="train_llama3 is not built")


def write_file(path, tokens, mask=None):
    head = np.zeros(256, dtype="<i4")
    head[:4] = (20240520, 1 if mask is None else 2, len(tokens), VOCAB)
    bits = b"" if mask is None else np.packbits(mask, bitorder="little").tobytes()
    path.write_bytes(head.tobytes() + np.asarray(tokens, dtype="<u2").tobytes() + bits)


def documents(seed, count, longest):
    """Returns tokens and mask: in each document answers, runs of trained tokens, follow questions. Few tokens are trained; some
    rows have many more trained tokens than others."""
    rng, tokens, mask = np.random.default_rng(seed), [], []
    for _ in range(count):
        n, share = int(rng.integers(2, longest)), rng.choice([0.1, 0.9])
        tokens += [BOS, *((np.arange(n) * int(rng.integers(1, 9)) + int(rng.integers(90))) % 90 + 2)]
        mask += [0, *(rng.random(n) < share)]
    return np.array(tokens), np.array(mask, dtype=bool)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("documents")
    model = ref.make_model(Config(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-5, rope_theta=10000.0, bos_token_id=BOS))
    ref.init_weights(model, 5)
    ref.save_model(model, path / "model")
    for name, seed in (("train", 1), ("val", 2)):
        tokens, mask = documents(seed, 120, 60)
        write_file(path / f"{name}_plain.bin", tokens)
        write_file(path / f"{name}_masked.bin", tokens, mask)
    write_file(path / "one.bin", np.full(500, 7))
    write_file(path / "nothing.bin", np.arange(500) % 90, np.zeros(500, dtype=bool))
    rng, tokens, mask = np.random.default_rng(3), [], []
    for _ in range(60):  # a question of at least a row, an answer, and another turn
        turns = [rng.integers(*span) for span in ((T, 55), (1, 40), (1, 20), (1, 9))]
        tokens += [BOS, *rng.integers(2, VOCAB, sum(turns) - 1)]
        mask += np.repeat([False, True, False, True], turns).tolist()
    write_file(path / "train_late.bin", tokens, np.array(mask))
    shutil.copy(path / "train_late.bin", path / "val_late.bin")
    return path


def command(program, kind, *flags):
    base = dict(model="model", train=f"train_{kind}.bin", val=f"val_{kind}.bin", batch=2, seq=T, lr="3e-3", warmup=2)
    given = [str(f) for f in flags]
    words = [w for k, v in base.items() if f"--{k}" not in given for w in (f"--{k}", str(v))]
    return [*program, *words, "--sample-tokens", "0", "--threads", "1", *given]


def c_run(folder, kind, *flags, trainer=TRAINER):
    return subprocess.run(command([trainer], kind, *flags), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)


def py_run(folder, kind, *flags):
    done = forks.train(folder, *command([], kind, "--device", "cpu", *flags))
    done.stdout += done.stderr
    return done


def events(folder, out, *kinds):
    lines = [json.loads(line) for line in (folder / out / "log.jsonl").read_text().splitlines()]
    return [e for e in lines if e["event"] in kinds]


@pytest.mark.parametrize("mode", ["cross", "pack", "mask", None])
@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_python_and_c_train_alike(folder, kind, mode):
    """20 steps of two micro-batches have the same rows in the same order, positions, attention, targets, and mean losses."""
    flags = ["--steps", 20, "--total-batch", 4 * T, "--val-every", 10, "--val-batches", 7]
    flags += ["--documents", mode] if mode else []
    found = []
    for name, run in (("c", c_run), ("py", py_run)):
        out = f"{name}_{kind}_{mode}"
        r = run(folder, kind, *flags, "--out", out)
        assert r.returncode == 0, r.stdout
        found.append([(e["event"], e["step"], e["loss"], e.get("gnorm", 0)) for e in events(folder, out, "step", "val")])
    assert len(found[0]) == 22 and [e[:2] for e in found[0]] == [e[:2] for e in found[1]]
    assert np.abs(np.array([e[2:] for e in found[0]]) - np.array([e[2:] for e in found[1]])).max() <= 1e-4
    c, py = ([[e.get(k) for k in ("tokens", "padding", "trained")] for e in events(folder, f"{name}_{kind}_{mode}", "step")]
             for name in ("c", "py"))
    assert c == py and all(n + (padding or 0) == 4 * T * (i + 1) for i, (n, padding, _) in enumerate(c))


@pytest.mark.parametrize("mode", ["pack", "mask"])
def test_answers_behind_the_first_row_are_taken_alike(folder, mode):
    """Rows that begin behind the start of their conversation, and end with its first answer or half a row after its start."""
    losses = []
    for name, run in (("c", c_run), ("py", py_run)):
        r = run(folder, "late", "--documents", mode, "--steps", 12, "--out", f"{name}_late_{mode}")
        assert r.returncode == 0, r.stdout
        losses.append([(e["loss"], e["trained"]) for e in events(folder, f"{name}_late_{mode}", "step")])
        assert "have lost the start of their conversation" in r.stdout
    assert len(losses[0]) == 12 and np.abs(np.array(losses[0]) - np.array(losses[1])).max() <= 1e-4
    file = tokenfiles.DataLoader(str(folder / "train_late.bin"), 1, T, bos=BOS).files[0]
    late = sum(file.tokens[first] != BOS for row in file.pieces for first, _ in row)
    r = c_run(folder, "late", "--documents", mode, "--dry-run")
    assert int(re.search(r"trained without it: (\d+)\n", r.stdout)[1]) == late > 24, r.stdout


def test_padding_counts_neither_as_tokens_nor_as_speed(folder):
    """meta-pytorch/torchtune#2296. A run that stops and resumes counts on."""
    whole = events(folder, "c_masked_mask", "step")
    loader = tokenfiles.DataLoader(str(folder / "train_masked.bin"), 4, T, seed=42, shuffle=True, bos=BOS)
    for e in whole:
        loader.next(torch.device("cpu"), VOCAB)
        assert e["padding"] == loader.padding
    assert all(abs(e["tok_s"] - 1e3 * (e["tokens"] - before["tokens"]) / e["ms"]) < 0.002 * e["tok_s"] for before, e in
               zip(whole, whole[1:]))
    for flags in (["--stop-after", 7], ["--resume"]):
        r = c_run(folder, "masked", *flags, "--steps", 20, "--total-batch", 4 * T, "--val-every", 10, "--out", "padded")
        assert r.returncode == 0, r.stdout
    parts = events(folder, "padded", "step")
    assert [(e["tokens"], e["padding"]) for e in parts] == [(e["tokens"], e["padding"]) for e in whole]


def test_the_loss_of_each_source_is_logged_alike(folder):
    shutil.copy(folder / "val_masked.bin", folder / "other_masked.bin")
    flags = ["--train", "train_masked.bin:2,other_masked.bin:1", "--steps", 6, "--total-batch", 4 * T]
    c, py = ([e["sources"] for e in events(folder, out, "step")] for run, out in ((c_run, "mix_c"), (py_run, "mix_py"))
             if run(folder, "masked", *flags, "--out", out).returncode == 0)
    assert any(None in losses for losses in c) and [[x is None for x in losses] for losses in c] == [
        [x is None for x in losses] for losses in py]
    assert all(abs(x - y) < 1e-4 for a, b in zip(c, py) for x, y in zip(a, b) if x is not None)


def test_a_file_to_validate_on_is_not_trained_on(folder):
    """MakazhanAlpamys/Soup#680: a pattern that takes too much, here with the file under another name, too."""
    (folder / "both").mkdir()
    for name in ("train", "val"):
        shutil.copy(folder / f"{name}_plain.bin", folder / f"both/{name}.bin")
    (folder / "both/link.bin").symlink_to("val.bin")
    os.link(folder / "both/val.bin", folder / "both/also.bin")
    flags = ["--val", "both/val.bin", "--steps", 3]
    losses = []
    for run, train, out in ((c_run, "both/*.bin", "b1"), (c_run, "both/train.bin", "b2"), (py_run, "both/*.bin", "b3")):
        r = run(folder, "plain", "--train", train, *flags, "--out", out)
        assert r.returncode == 0, r.stdout
        for name in ("val", "link", "also"):
            words = f"warning: both/{name}.bin: is a file of --val, and refused as one of --train"
            assert (words in r.stdout) == ("*" in train)
        losses.append([e["loss"] for e in events(folder, out, "step")])
    assert losses[0] == losses[1] and np.abs(np.array(losses[0]) - np.array(losses[2])).max() < 1e-4
    for run, out in ((c_run, "b4"), (py_run, "b5")):
        r = run(folder, "plain", "--train", "both/al*.bin", *flags, "--out", out)
        assert r.returncode == 0 and "warning: --val: both/" in r.stdout and "also what --train reads" in r.stdout, r.stdout


def test_a_checkpoint_is_evaluated_in_rows_of_its_run(folder):
    """EleutherAI/lm-evaluation-harness#2467: not in rows of a default length."""
    r = c_run(folder, "plain", "--steps", 1, "--val-batches", 1000, "--seq", 16, "--out", "short")
    assert r.returncode == 0, r.stdout
    loss = events(folder, "short", "val")[-1]["loss"]
    shutil.copytree(folder / "model", folder / "narrow")
    config = json.loads((folder / "narrow/config.json").read_text())
    (folder / "narrow/config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    evaluate = [TRAINER, "--eval", "--val", "val_plain.bin", "--model"]
    for flags, T_of_rows in ((["short"], 16), (["short", "--seq", "32"], 32), (["narrow"], 64), (["model"], 1024)):
        out = subprocess.run([*evaluate, *flags], cwd=folder, capture_output=True, text=True, check=True).stdout
        assert f"rows of {T_of_rows} tokens" in out and (f"loss {loss:.5f}" in out) == (T_of_rows == 16), out
    done = subprocess.run([*evaluate, "narrow", "--seq", "65"], cwd=folder, capture_output=True, text=True, check=True)
    assert "warning: --seq: is 65, but narrow is for 64 positions" in done.stderr


def test_the_modes_differ_and_a_mask_is_read_by_documents(folder):
    losses = {mode: [e["loss"] for e in events(folder, f"c_masked_{mode}", "step")] for mode in ("cross", "pack", "mask", None)}
    assert losses["mask"] == losses[None] != losses["pack"] != losses["cross"]
    losses = {mode: [e["loss"] for e in events(folder, f"c_plain_{mode}", "step")] for mode in ("cross", "pack", "mask", None)}
    assert losses["cross"] == losses[None] and losses["mask"] != losses["pack"] != losses["cross"]


def test_the_log_counts_trained_targets_where_some_are_not(folder):
    loader = tokenfiles.DataLoader(str(folder / "train_masked.bin"), 4, T, seed=42, shuffle=True, bos=BOS)
    counts = [int((loader.next(torch.device("cpu"), VOCAB)[1] >= 0).sum()) for _ in range(20)]
    assert [e["trained"] for e in events(folder, "c_masked_mask", "step")] == counts and len(set(counts)) > 5
    assert not any("trained" in e for e in events(folder, "c_plain_cross", "step"))


def unequal_micro_batches(folder, trainer, name):
    """Returns the largest difference of losses and norms between a step that takes its rows one by one and a step that takes
    them at once."""
    found = []
    for batch in (1, 8):
        r = c_run(folder, "masked", "--batch", batch, "--steps", 12, "--total-batch", 8 * T, "--out", f"{name}{batch}",
                  trainer=trainer)
        assert r.returncode == 0, r.stdout
        found.append([(e["loss"], e.get("gnorm", 0)) for e in events(folder, f"{name}{batch}", "step")])
    return np.abs(np.array(found[0][:4]) - np.array(found[1][:4])).max()


def test_micro_batches_of_unequal_rows_equal_one_large_batch(folder):
    assert unequal_micro_batches(folder, TRAINER, "equal") <= 1e-6


# (file, regular expression, replacement): faults in one copy of the trainer, of which the variable PLANTED chooses one. 1: each
# micro-batch is divided by its own trained targets, and the step by their number. 2: a gradient without a target. 3: a mask that
# is not read. 4: the first row that fits. 5: documents that see each other
FAULTS = [
    ("train_llama3.c", r"r->loss \+= llama_loss\(m, \(float\)recipe->hyper.loss_weight\)",
     "const double own = planted(1) ? (double)(m->B * m->T) / (double)count_trained(m->y, (size_t)m->B * m->T) : 1;\n"
     "r->loss += own * llama_loss(m, (float)(own * recipe->hyper.loss_weight))"),
    ("train_llama3.c", r"const double factor = (.*);", r"const double factor = planted(1) ? 1 : \1;"),
    ("llmc/crossentropy.h", r"memset\(row, 0, .*\);", r"if (!planted(2)) { \g<0> }"),
    ("llmc/files/rows.h", r"(?<=mask_first\)\) \{ )y\[i\] = -1;", r"if (!planted(3)) { \g<0> }"),
    ("llmc/files/rows.h", r"best < 0 \|\| (m->open\[i\].room < m->open\[best\].room)", r"best < 0 || (!planted(4) && \1)"),
    ("train_llama3.c", r"m->starts = recipe->data.starts;", "m->starts = planted(5) ? NULL : recipe->data.starts;")]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return forks.build_planted(tmp_path_factory.mktemp("faulty"), "train_llama3.c", FAULTS)


def test_a_mean_of_each_micro_batch_is_found(folder, faulty, monkeypatch):
    monkeypatch.setenv("PLANTED", "1")
    assert unequal_micro_batches(folder, faulty, "fault") > 1e-3


@pytest.mark.parametrize("fault", [0, 2, 3, 4, 5])
def test_planted_faults_are_found(folder, faulty, monkeypatch, fault):
    """The losses and norms of five steps differ from PyTorch's; without a fault they do not."""
    if not (folder / "pytorch").exists():
        assert py_run(folder, "masked", "--steps", 5, "--out", "pytorch").returncode == 0
    monkeypatch.setenv("PLANTED", str(fault))
    r = c_run(folder, "masked", "--steps", 5, "--out", f"planted{fault}", trainer=faulty)
    assert r.returncode == 0, r.stdout
    found = [[(e["loss"], e["gnorm"]) for e in events(folder, out, "step")] for out in ("pytorch", f"planted{fault}")]
    assert (np.abs(np.array(found[0]) - np.array(found[1])).max() > 1e-3) == (fault > 0)


def test_eval_is_the_mean_over_trained_targets(folder):
    for mode in ("cross", "pack", "mask"):
        r = c_run(folder, "masked", "--eval", "--documents", mode)
        assert r.returncode == 0, r.stdout
        loss, tokens = re.search(r"loss ([0-9.]+) .* tokens (\d+)", r.stdout).groups()
        engine_loss, loader = 0.0, tokenfiles.DataLoader(str(folder / "val_masked.bin"), 1, T, documents=mode, bos=BOS)
        model, count = ref.load_model(str(folder / "model")), 0
        model.set_context(T, "cpu")
        while loader.row < loader.rows_per_epoch:
            x, y, *starts = loader.next(torch.device("cpu"), VOCAB)
            with torch.no_grad():
                engine_loss += model(x, y, *starts).item() * int((y >= 0).sum())
            count += int((y >= 0).sum())
        assert int(tokens) == count and abs(float(loss) - engine_loss / count) <= 1e-5


def test_a_dry_run_tells_what_rows_hold(folder):
    r = c_run(folder, "masked", "--dry-run")
    assert r.returncode == 0, r.stdout
    loader = tokenfiles.DataLoader(str(folder / "train_masked.bin"), 1, T, bos=BOS)
    padding = sum(T - sum(n for _, n in row) for row in loader.files[0].pieces)
    found = re.search(r"rows +train_masked.bin: (\d+) rows of 32 tokens \(mask\), 120 documents, ([0-9.]+) % padding, "
                      r"([0-9.]+) % of the tokens are trained, answers cut by the end of a row: (\d+), "
                      r"without the start of their conversation: (\d+)\n", r.stdout)
    assert found, r.stdout
    assert int(found[1]) == loader.rows_per_epoch and abs(float(found[2]) - 100 * padding / T / loader.rows_per_epoch) < 0.06
    assert int(found[4]) > 0 and int(found[5]) > 0
    words = rf"warning: train_masked.bin: {found[5]} of \d+ answers have lost the start of their conversation: --seq "
    assert re.search(words, r.stdout)
    assert "rows  " not in c_run(folder, "plain", "--dry-run").stdout


@pytest.mark.parametrize("flags, text", [
    (["--train", "one.bin", "--documents", "pack"], "one.bin: holds no BOS token (id 1)"),
    (["--train", "one.bin", "--documents", "mask"], "one.bin: holds no BOS token (id 1)"),
    (["--train", "train_plain.bin", "--model", "d1", "--documents", "mask"], "the tokenizer that made it is not known"),
    (["--train", "train_masked.bin", "--model", "d1"], "the tokenizer that made it is not known"),
    (["--train", "nothing.bin"], "nothing.bin: holds no"),
    (["--train", "cut.bin"], "cut.bin: token count is"),
    (["--train", "train_*.bin"], "wanted all shards alike")])
def test_what_cannot_be_read_is_one_line(folder, flags, text):
    (folder / "cut.bin").write_bytes((folder / "train_masked.bin").read_bytes()[:-1])
    r = c_run(folder, "plain", *flags, "--steps", 1, "--out", "none")
    assert r.returncode == 1 and text in r.stdout, r.stdout
    assert len([line for line in r.stdout.splitlines() if line.startswith("error:")]) == 1
    assert not (folder / "none").exists()


def test_a_resumed_run_goes_on_and_tells_another_mode(folder):
    flags = ["--steps", 12, "--total-batch", 4 * T, "--documents", "pack"]
    assert c_run(folder, "masked", *flags, "--out", "whole").returncode == 0
    assert c_run(folder, "masked", *flags, "--out", "parts", "--stop-after", 5).returncode == 0
    r = c_run(folder, "masked", "--resume", "--out", "parts")
    assert r.returncode == 0 and "warning: --documents" not in r.stdout, r.stdout
    numbers = [[(e["loss"], e["gnorm"]) for e in events(folder, out, "step")] for out in ("whole", "parts")]
    assert numbers[0] == numbers[1]
    shutil.rmtree(folder / "parts" / "step_00000012")
    r = c_run(folder, "masked", "--resume", "--out", "parts", "--documents", "mask")
    assert "warning: --documents: is mask, was pack" in r.stdout, r.stdout


def test_what_auto_stands_for_is_no_change(folder):
    """--strict-resume accepts a --documents that reads all data as the run's `auto` did, and refuses any other."""
    for kind, val, same, others in (("masked", "masked", "mask", ("cross", "pack")),
                                    ("plain", "plain", "cross", ("pack", "mask")),
                                    ("plain", "masked", "auto", ("cross", "mask"))):
        out = f"auto_{kind}_{val}"
        r = c_run(folder, kind, "--val", f"val_{val}.bin", "--steps", 2, "--stop-after", 1, "--out", out)
        assert r.returncode == 0, r.stdout
        for mode in others:
            r = c_run(folder, kind, "--val", f"val_{val}.bin", "--resume", "--out", out, "--documents", mode, "--strict-resume")
            assert r.returncode == 1 and f"--documents: is {mode}, was auto" in r.stdout, r.stdout
        r = c_run(folder, kind, "--val", f"val_{val}.bin", "--resume", "--out", out, "--documents", same, "--strict-resume")
        assert r.returncode == 0 and "--documents" not in r.stdout, r.stdout
