"""Tests --tasks: each question's answer, by likelihood and by likelihood a character, equals the answer of transformers under
lm-eval's rules. Where lm-eval is installed, it equals lm-eval's own answer, too. Also the errors of a task file, --eval-every
in training, bits per byte."""

import itertools
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "dev/data/tinytales"
CONTEXT = 40  # max_position_embeddings of the model: short, so that some questions are cut
WORDS = "the a cat dog sat on mat and saw little bird fly over house then it said hello to moon".split()


def run(program, *flags):
    return subprocess.run([ROOT / program, *map(str, flags)], capture_output=True, text=True, check=False)


def sentence(r, low, high):
    return " ".join(r.choice(WORDS) for _ in range(r.randint(low, high)))


def questions():
    """Returns questions of all kinds: white space at the context's end, no context, long ones, special names, no ASCII,
    ties."""
    r = random.Random(5)
    ends = itertools.cycle(["", " ", "\n", "  \t", "\u00a0", "\u3000 ", "\x1f", "."])
    rows = [{"ctx": sentence(r, 1, 20) + end, "choices": [sentence(r, 1, 6) for _ in range(r.randint(2, 5))]}
            for end, _ in zip(ends, range(48))]
    rows += [{"ctx": "", "choices": [sentence(r, 1, 4) for _ in range(4)]} for _ in range(4)]
    rows += [{"ctx": sentence(r, 30, 60), "choices": [sentence(r, 1, 20) for _ in range(3)]} for _ in range(6)]
    rows += [{"ctx": "<|begin_of_text|>" + sentence(r, 2, 5), "choices": ["the cat<|end_of_text|>", "moon", "a bird"]},
             {"ctx": " ", "choices": ["naïve café", "the 猫 sat", "🙂"]},
             {"ctx": "the cat", "choices": ["sat", "sat", "sat"]},
             {"ctx": "one", "choices": ["only"]},
             {"ctx": "the\ncat", "choices": [" two blanks", "\nline", "."]}]
    for i, row in enumerate(rows):
        row["label"] = i % len(row["choices"])
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with data.bin and a trained model, whose context is CONTEXT tokens."""
    folder = tmp_path_factory.mktemp("tasks")
    r = random.Random(1)
    (folder / "text.txt").write_text("".join(sentence(r, 4, 12) + ".\n" for _ in range(400)), encoding="utf-8")
    assert run("tokenize", "--tokenizer", TOKENIZER, "-o", folder / "data.bin", folder / "text.txt").returncode == 0
    done = run("train_llama3", "--model", "d1", "--tokenizer", TOKENIZER, "--train", folder / "data.bin", "--seq", 32,
               "--steps", 30, "--batch", 4, "--lr", "3e-3", "--sample-tokens", 0, "--threads", 1, "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "out/step_00000030", folder / "model")
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        text = json.loads((folder / "model" / name).read_text(encoding="utf-8"))
        (folder / "model" / name).write_text(json.dumps({**text, key: CONTEXT}), encoding="utf-8")
    return folder


def answers(folder, rows, *flags):
    """Returns for each question (acc, acc_norm), each from a file of its own."""
    tasks = folder / "one"
    shutil.rmtree(tasks, ignore_errors=True)
    tasks.mkdir()
    for i, row in enumerate(rows):
        write(tasks / f"{i:03}.jsonl", [row])
    done = run("train_llama3", "--model", folder / "model", "--eval", "--tasks", f"{tasks}/*.jsonl", "--threads", 1, *flags)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("acc ")]
    assert [line[6] for line in lines] == [f"{tasks}/{i:03}.jsonl" for i in range(len(rows))]
    return [(float(line[1]), float(line[3])) for line in lines]


def argmax(values):
    return values.index(max(values))


class Oracle:
    """lm-eval's rules over transformers."""

    def __init__(self, folder):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=not text.startswith(self.tokenizer.bos_token))

    def likelihood(self, ctx, choice):
        kept = ctx.rstrip()
        text = ctx[len(kept):] + " " + choice
        if kept:
            context = self.encode(kept)
            scored = self.encode(kept + text)[len(context):]
        else:
            context, scored = [self.tokenizer.bos_token_id], self.tokenizer.encode(text, add_special_tokens=False)
        ids = (context + scored)[-(CONTEXT + 1):]
        with torch.no_grad():
            logp = self.model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        return sum(logp[len(ids) - 1 - len(scored) + i, token].item() for i, token in enumerate(scored))

    def answer(self, row):
        values = [self.likelihood(row["ctx"], c) for c in row["choices"]]
        norms = [v / len(c) for v, c in zip(values, row["choices"])]
        return float(argmax(values) == row["label"]), float(argmax(norms) == row["label"])


def test_each_answer_is_that_of_transformers(work):
    rows, oracle = questions(), Oracle(work / "model")
    want = [oracle.answer(row) for row in rows]
    assert 5 < sum(acc for acc, _ in want) < len(rows) - 5 and any(a != n for a, n in want)
    assert answers(work, rows) == want
    assert answers(work, rows, "--batch", 7) == want
    # the mean of a whole file
    write(work / "all.jsonl", rows)
    done = run("train_llama3", "--model", work / "model", "--eval", "--tasks", work / "all.jsonl")
    acc, norm = (sum(w[i] for w in want) / len(want) for i in range(2))
    assert f"acc {acc:.4f}  acc_norm {norm:.4f}  questions {len(rows)}  {work}/all.jsonl\n" in done.stdout
    assert "they lose the start of their context" in done.stdout


def test_each_answer_is_that_of_a_tokenizer_without_bos(work):
    path = work / "model/tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(json.dumps({**json.loads(text), "post_processor": None}), encoding="utf-8")
    try:
        rows = [row for row in questions() if row["ctx"].strip()]
        oracle = Oracle(work / "model")
        t = oracle.tokenizer
        assert oracle.encode("the") != [t.bos_token_id, *t.encode("the", add_special_tokens=False)]
        assert answers(work, rows) == [oracle.answer(row) for row in rows]
    finally:
        path.write_text(text, encoding="utf-8")


def test_each_answer_is_that_of_lm_eval(work, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    rows = [row for row in questions() if row["ctx"] != " "]  # lm-eval takes no context of white space alone
    folder = work / "lm_eval"
    folder.mkdir()
    write(folder / "rows.jsonl", rows)
    (folder / "local.yaml").write_text(f"""task: local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""", encoding="utf-8")
    model = HFLM(pretrained=str(work / "model"), device="cpu", dtype="float32", batch_size=1)
    result = lm_eval.simple_evaluate(model=model, tasks=["local"], log_samples=True,
                                     task_manager=TaskManager(include_path=str(folder), include_defaults=False))
    samples = sorted(result["samples"]["local"], key=lambda s: s["doc_id"])
    assert answers(work, rows) == [(s["acc"], s["acc_norm"]) for s in samples]


@pytest.mark.parametrize(("line", "message"), [
    ("[1]", "is no object"),
    ("nonsense", "found 'n', wanted a value"),
    ('{"ctx": "a", "label": 0}', "choices is missing, wanted an array"),
    ('{"ctx": "a", "choices": [], "label": 0}', "choices is"),
    ('{"ctx": "a", "choices": ["b", ""], "label": 0}', '"choices" holds what is no text or empty'),
    ('{"ctx": "a", "choices": ["b", 3], "label": 0}', '"choices" holds what is no text or empty'),
    ('{"ctx": "a", "choices": ["b"]}', "label is missing"),
    ('{"ctx": "a", "choices": ["b", "c"], "label": 2}', "label is 2, wanted an integer from 0 to 1"),
    ('{"choices": ["b"], "label": 0}', "ctx is missing"),
    ('{"ctx": "a", "choices": ["' + "cat " * 60 + '"], "label": 0}', "tokens, wanted at most 40"),
])
def test_a_line_that_is_no_question_is_refused_by_its_number(work, line, message):
    path = work / "bad.jsonl"
    path.write_text('{"ctx": "a", "choices": ["b"], "label": 0}\n' + line + "\n", encoding="utf-8")
    done = run("train_llama3", "--model", work / "model", "--eval", "--tasks", path)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {path}:2:"), done.stderr
    assert message in done.stderr and done.stderr.count("\n") <= 2


def test_wrong_use_is_told(work):
    (work / "empty.jsonl").write_text("\n", encoding="utf-8")
    done = run("train_llama3", "--model", work / "model", "--eval", "--tasks", work / "empty.jsonl")
    assert done.returncode == 1 and "holds no question" in done.stderr
    done = run("train_llama3", "--model", work / "model", "--eval", "--tasks", work / "none*.jsonl")
    assert done.returncode == 1 and "is missing" in done.stderr
    done = run("train_llama3", "--model", work / "model", "--eval", "--tasks", work / "all.jsonl", "--val", work / "data.bin")
    assert done.returncode == 2 and "--val or --tasks" in done.stderr


def test_training_answers_tasks_as_eval_does(work):
    """The run and its checkpoint have the same weights, so the same answers. The run reports questions longer than --seq."""
    write(work / "some.jsonl", questions())
    flags = ["--threads", 1, "--tasks", work / "some.jsonl"]
    done = run("train_llama3", "--model", "d1", "--tokenizer", TOKENIZER, "--train", work / "data.bin", "--seq", 32,
               "--steps", 6, "--eval-every", 4, "--checkpoint-every", 4, "--sample-tokens", 0, "--out", work / "run", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("longer than 32 tokens: they lose the start of their context") == 1
    events = [json.loads(line) for line in (work / "run/log.jsonl").read_text(encoding="utf-8").splitlines()]
    tasks = [e for e in events if e["event"] == "task"]
    assert [e["step"] for e in tasks] == [4, 6]
    for e in tasks:
        line = f"acc {e['acc']:.4f}  acc_norm {e['acc_norm']:.4f}  questions {e['questions']}  "
        assert f"task    {line}some.jsonl at step {e['step']}\n" in done.stdout
        shown = run("train_llama3", "--model", work / f"run/step_{e['step']:08}", "--eval", "--seq", 32, *flags)
        assert f"{line}{work}/some.jsonl\n" in shown.stdout, (shown.stdout, shown.stderr)


def test_bits_per_byte_count_the_raw_bytes_of_the_targets(work):
    """Tokens may hold parts of characters, whose decoded text would count as U+FFFD. A special token has no bytes."""
    text, data = work / "bytes.txt", work / "bytes.bin"
    documents = [f"{sentence(random.Random(i), 2, 9)} 猫🙂é" for i in range(60)]
    text.with_suffix(".jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents), encoding="utf-8")
    assert run("tokenize", "--tokenizer", TOKENIZER, "-o", data, text.with_suffix(".jsonl")).returncode == 0
    ids = memoryview(data.read_bytes()[1024:]).cast("H").tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "model")
    rows = (len(ids) - 1) // 32 // 3 * 3 - 1  # not a multiple of the batch
    count = 0
    for i in ids[1:rows * 32 + 1]:  # a byte-level token has a character a byte
        count += 0 if i in tokenizer.all_special_ids else len(tokenizer.convert_ids_to_tokens(i))
    cut = work / "cut.bin"  # exactly these rows
    header = bytearray(1024)
    header[:12] = b"".join(n.to_bytes(4, "little") for n in (20240520, 1, rows * 32 + 1))
    cut.write_bytes(bytes(header) + b"".join(i.to_bytes(2, "little") for i in ids[:rows * 32 + 1]))
    done = run("train_llama3", "--model", work / "model", "--eval", "--val", cut, "--seq", 32, "--batch", 3)
    bpb = float(re.search(r"  bits per byte (\S+)  rows of 32 tokens\n", done.stdout)[1])

    def wanted(folder):  # karpathy/nanochat#693: special tokens are no text, and count neither loss nor bytes
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        x, y = (torch.tensor(ids[at:at + rows * 32]).view(rows, 32) for at in (0, 1))
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(x).logits.transpose(1, 2), y, reduction="none")
        text = ~torch.isin(y, torch.tensor(tokenizer.all_special_ids))
        assert 0 < (~text).sum() < 200
        return losses[text].double().sum().item() / (math.log(2) * count)
    assert abs(bpb - wanted(work / "model")) < 1e-4
    # in training, on screen and in the log
    done = run("train_llama3", "--resume", work / "out/step_00000030", "--steps", 31, "--val", cut, "--batch", 3,
               "--out", work / "bpb")
    event = [json.loads(line) for line in (work / "bpb/log.jsonl").read_text(encoding="utf-8").splitlines()
             if '"val"' in line[:20]][-1]
    assert abs(event["bpb"] - wanted(work / "bpb/step_00000031")) < 1e-4
    assert f"validation loss {event['loss']:.4f}, {event['bpb']:.4f} bits per byte, at step 31" in done.stdout
    # without a tokenizer the bytes are unknown
    shutil.copytree(work / "model", work / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (work / "bare" / name).unlink()
    done = run("train_llama3", "--model", work / "bare", "--eval", "--val", cut, "--seq", 32)
    assert done.returncode == 0 and "loss " in done.stdout and "bits" not in done.stdout
