"""Tests dev/data/hf.py, tasks.py and model.py without a network: on local copies of data sets, and with a server that speaks the
hub's protocol for one model."""

import csv
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(Path(__file__).parent))
import forks  # noqa: E402

HF = ROOT / "dev/data/hf.py"
TOKENIZE = ROOT / "tokenize"
TALES = ROOT / "dev/data/tinytales"
pytest.importorskip("datasets")
pytestmark = pytest.mark.skipif(not TOKENIZE.exists(), reason="./tokenize has not been built")


def texts(file, count=40):
    return [f"In file {file}, story {i} says:\n\"caf\u00e9 \U0001F600\"" for i in range(count)]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """No run asks the hub. Runs are forked from a server, which imports `datasets` in this environment, as hf.py does."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("USE_TORCH", "USE_TF", "USE_JAX"):
            patch.setenv(name, "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        forks.preload("datasets")
        yield


def run(tmp_path, *flags):
    return forks.run(HF, tmp_path, *flags)


def write_parquet(path, rows, **columns):
    import pyarrow
    import pyarrow.parquet
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, **columns}), path)


def direct(tmp_path, rows, *flags):
    """Returns the token file that ./tokenize makes of the texts without this script."""
    lines, out = tmp_path / "direct.jsonl", tmp_path / "direct.bin"
    lines.write_text("".join(json.dumps({"text": t}) + "\n" for t in rows), encoding="utf-8")
    subprocess.run([TOKENIZE, *flags, "-o", out, lines], check=True, capture_output=True)
    return out.read_bytes() if out.exists() else None


def test_parquet_files_become_shards_and_only_what_changed_is_made_again(tmp_path):
    for file in range(3):
        write_parquet(tmp_path / f"set/{file:03d}.parquet", texts(file), id=list(range(40)))
    flags = ["set", "--tokenizer", TALES, "-o", "out/mine"]
    done = run(tmp_path, *flags, "--jobs", 2)
    assert done.returncode == 0, done.stderr
    names = ["mine_val_000.bin", "mine_train_000.bin", "mine_train_001.bin"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([*names, "mine_manifest.json"])
    for file, name in enumerate(names):
        assert (tmp_path / "out" / name).read_bytes() == direct(tmp_path, texts(file), "--tokenizer", TALES), name
    shards = {s["file"]: s for s in json.loads((tmp_path / "out/mine_manifest.json").read_text())["shards"]}
    assert set(shards) == set(names) and all(s["rows"] == 40 and s["tokens"] > 400 for s in shards.values())
    assert f"--tokenizer {TALES} --train 'out/mine_train_*.bin' --val 'out/mine_val_*.bin'" in done.stdout.splitlines()[-1]

    write_parquet(tmp_path / "set/002.parquet", texts(7, 50))  # another size, so this file is another source
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names}
    done = run(tmp_path, *flags)
    assert done.returncode == 0 and "2 of 3 shards exist already" in done.stdout, done.stderr
    after = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names}
    assert [name for name in names if before[name] != after[name]] == names[2:]
    assert (tmp_path / "out" / names[2]).read_bytes() == direct(tmp_path, texts(7, 50), "--tokenizer", TALES)

    for other, words in ((["--val-files", "2"], "val_files is 1, but this run has 2"),
                         (["--tokenizer", tmp_path / "none"], "none")):
        done = run(tmp_path, *flags, *other)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and words in done.stderr, done.stderr


def test_a_killed_run_goes_on(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "set").mkdir()
    for file in range(4):
        lines = "".join(json.dumps({"body": t, "n": i}) + "\n" for i, t in enumerate(texts(file, 3000)))
        (tmp_path / f"set/{file}.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    flags = ["set", "--column", "body", "-o", "out/z", "--val-files", 0]
    with subprocess.Popen([sys.executable, str(HF), *map(str, flags)], cwd=tmp_path, start_new_session=True,
                          stdout=subprocess.DEVNULL) as killed:
        until = time.monotonic() + 200
        while not (tmp_path / "out/z_manifest.json").exists() and killed.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL, "it was killed on its way"
    finished = [s["file"] for s in json.loads((tmp_path / "out/z_manifest.json").read_text())["shards"]]
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished}
    assert 1 <= len(finished) < 4
    done = run(tmp_path, *flags)
    assert done.returncode == 0 and f"{len(finished)} of 4 shards exist already" in done.stdout, done.stderr
    assert before == {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished}
    for file in range(4):
        assert (tmp_path / f"out/z_train_{file:03d}.bin").read_bytes() == direct(tmp_path, texts(file, 3000)), file
    assert not [p.name for p in (tmp_path / "out").iterdir() if ".part" in p.name]


@pytest.mark.parametrize("kind", ["arrow", "csv", "parquet"])
def test_rows_of_each_format_are_printed_as_lines(tmp_path, kind):
    import datasets
    data = datasets.Dataset.from_dict({"text": texts(1), "n": list(range(40))})
    if kind == "arrow":
        data.save_to_disk(tmp_path / "it")
    else:
        getattr(data, f"to_{kind}")(tmp_path / f"it.{kind}")
    done = run(tmp_path, "--rows", "it" if kind == "arrow" else f"it.{kind}")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"text": t} for t in texts(1)]
    if kind == "arrow":
        datasets.DatasetDict({"train": data, "test": data.select([3])}).save_to_disk(tmp_path / "both")
        done = run(tmp_path, "--rows", "both", "--split", "test")
        assert printed(done) == [{"text": texts(1)[3]}] and "not read: the splits train" in done.stderr
        assert "hint: --split takes train, test" in run(tmp_path, "--rows", "both", "--split", "val").stderr


def test_a_single_file_is_split(tmp_path):
    write_parquet(tmp_path / "set/0.parquet", texts(0, 200))
    flags = ["set/0.parquet", "--tokenizer", TALES, "-o", "out/one"]
    done = run(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    names = ["one_train_000.bin", "one_val_000.bin"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["one_manifest.json", *names]
    direct(tmp_path, texts(0, 200), "--tokenizer", TALES, "--val-fraction", "0.05")
    for name, side in zip(names, ("train", "val")):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / f"direct_{side}.bin").read_bytes(), name
    assert "--train 'out/one_train_*.bin' --val 'out/one_val_*.bin'" in done.stdout.splitlines()[-1]

    assert "1 of 1 shards exist already" in run(tmp_path, *flags).stdout
    (tmp_path / "out" / names[1]).unlink()  # half of a shard is none
    done = run(tmp_path, *flags)
    assert done.returncode == 0 and "exist already" not in done.stdout and (tmp_path / "out" / names[1]).exists()
    for more, words in ((["--val-fraction", 0.2], "val_fraction is 0.05, but this run has 0.2"),
                        (["--val-files", 0, "--val-fraction", 0.2], "--val-fraction: splits a single file, but "),
                        (["--val-files", 2], "has 1 file of split train, wanted more than --val-files 2")):
        done = run(tmp_path, *flags, *more)
        assert done.returncode == 1 and words in done.stderr, done.stderr
    assert run(tmp_path, *flags[:-1], "out/all", "--val-files", 0).returncode == 0
    assert not (tmp_path / "out/all_val_000.bin").exists()


def test_an_error_names_its_file_once(tmp_path):
    write_parquet(tmp_path / "whole.parquet", texts(0))
    write_parquet(tmp_path / "numbers.parquet", list(range(40)))
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:500])
    for name, words in (("numbers.parquet", "column text holds values of type int, wanted text"),
                        ("cut.parquet", "cannot be read: ")):
        done = run(tmp_path, name, "-o", "out/bad")
        assert done.returncode == 1 and done.stderr.startswith(f"error: {name}: {words}"), done.stderr
        assert len(done.stderr.splitlines()) == 1, "no hint: the same command would fail again"
    for name in ("pointer.parquet", "pointer.csv"):  # InertExpert2911/Mutual_Fund_Data#1, policy-gradient/GRPO-Zero#1
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", encoding="utf-8")
        assert f"error: {name}: is a Git LFS pointer, wanted" in run(tmp_path, name, "-o", "out/bad").stderr, name
    done = run(tmp_path, "missing.jsonl.gz", "-o", "out/bad")
    assert done.returncode == 1 and done.stderr == "error: missing.jsonl.gz: no such file\n", "the hub is not asked"


def test_a_damaged_file_leaves_no_shard(tmp_path):
    write_parquet(tmp_path / "set/0.parquet", texts(0))
    lines = [json.dumps({"text": t}) for t in texts("1" * 1000, 20000)]  # the library reads 10 MB at a time
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/0.jsonl").write_text("\n".join(lines) + "\n{broken\n", encoding="utf-8")
    done = run(tmp_path, "lines", "-o", "out/bad", "--val-files", 0)
    assert done.returncode == 1 and "0.jsonl: cannot be read: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert list((tmp_path / "out").iterdir()) == []
    for flags, words in ((["set", "--val-files", 2], "wanted more than --val-files 2"), (["no/where"], "no/where: cannot be read"),
                         (["set", "--val-files", 0, "--column", "body"], "has no column body\n  hint: --column takes text"),
                         (["set", "--split", "test"], "no files of a split test\n  hint: --split takes train")):
        done = run(tmp_path, *flags, "-o", "out/bad")
        assert done.returncode == 1 and done.stderr.startswith("error: ") and words in done.stderr, done.stderr


def printed(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name, cells", [("a.csv", ","), ("A.TSV", "\t")])
def test_a_cell_is_text_whatever_it_looks_like(tmp_path, name, cells):
    # huggingface/datasets#4467: pandas reads NA and null as missing, 007 as 7
    words = ["NA", "null", "None", "nan", "", "007", "1e5", "2024-01-01", "True", f'"one{cells} two\nthree ""four"""']
    (tmp_path / name).write_text(f"id{cells}text\n" + "".join(f"{i}{cells}{w}\n" for i, w in enumerate(words)) + "short\n")
    done = run(tmp_path, "--rows", name)
    assert printed(done) == [{"text": t} for t in [*words[:-1], f'one{cells} two\nthree "four"']]
    assert done.returncode == 0 and "rows 10, and 1 without a value in the column text" in done.stderr
    (tmp_path / name).write_text(f"id{cells}text\n0{cells}a{cells}b\n")
    done = run(tmp_path, "--rows", name)
    assert done.returncode == 1 and "line 2 has more cells than the first line" in done.stderr, "no text is cut short"


def test_lines_of_json_are_read_as_python_reads_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"n": NaN, "text": "2024-01-01"}\n{"text": null}\n{"n": 1}\n{"text": "12:30:00"}\n')
    (tmp_path / "b.json").write_text('[{"text": "of"},\n {"text": "a list"}]\n')
    for name, wanted, note in (("a.jsonl", ["2024-01-01", "12:30:00"], "rows 2, and 2 without"),
                               ("b.json", ["of", "a list"], "rows 2")):
        done = run(tmp_path, "--rows", name)
        assert done.returncode == 0 and printed(done) == [{"text": t} for t in wanted] and note in done.stderr, done.stderr


def test_every_file_of_a_folder_is_read_or_named(tmp_path):
    # huggingface/datasets#6410, #7650: the library takes the files of the commonest format alone
    write_parquet(tmp_path / "set/A.PARQUET", ["parquet"])
    for name, text in (("b.jsonl", '{"text": "jsonl"}'), ("deep/train-c.csv", "text\ncsv"), ("deep/README.md", "# card"),
                       ("data/test-0.csv", "text\nof another split"), ("contest.tsv", "text\ntsv")):
        (tmp_path / "set" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "set" / name).write_text(text + "\n")
    done = run(tmp_path, "--rows", "set")
    assert done.returncode == 0 and sorted(r["text"] for r in printed(done)) == ["csv", "jsonl", "parquet", "tsv"]
    assert "not read, since of another split than train: data/test-0.csv" in done.stderr and "README" not in done.stderr
    assert printed(run(tmp_path, "--rows", "set", "--split", "test")) == [{"text": "of another split"}]
    (tmp_path / "set/deep/notes.xlsx").write_text("no table")
    done = run(tmp_path, "--rows", "set")
    assert done.returncode == 1 and len(printed(done)) == 4, "the others are read all the same"
    assert done.stderr.splitlines()[-2].endswith("these files were not read: deep/notes.xlsx")


def test_a_source_file_without_rows_makes_no_shard(tmp_path):
    # huggingface/datasets#8397
    for file, rows in enumerate((texts(0), [], texts(2), [None])):
        write_parquet(tmp_path / f"set/{file}.parquet", rows)
    (tmp_path / "set/4.jsonl").write_text("")
    for again in ("", "5 of 5 shards exist already"):
        done = run(tmp_path, "set", "--tokenizer", TALES, "-o", "out/x")
        assert done.returncode == 0 and again in done.stdout, done.stderr
        assert sorted(p.name for p in (tmp_path / "out").glob("*.bin")) == ["x_train_001.bin", "x_val_000.bin"]
    done = run(tmp_path, "set/3.parquet", "-o", "out/none")
    assert done.returncode == 1 and "column text holds no value in set/3.parquet" in done.stderr


@pytest.mark.parametrize("key, role, content", [("messages", "role", "content"), ("conversations", "from", "value")])
def test_a_column_of_conversations_becomes_a_token_file_in_one_command(tmp_path, key, role, content):
    # a table gives every message all members: null where it has none
    names = ("user", "assistant") if role == "role" else ("human", "gpt")
    talks = [[{role: names[0], content: f"How many is {i}?", "weight": None}, {role: names[1], content: f"{i}.", "weight": 1}]
             for i in range(30)]
    write_parquet(tmp_path / "it.parquet", ["x"] * 30, **{key: talks})
    done = run(tmp_path, "--rows", "it.parquet", "--column", key)
    assert printed(done)[7] == {key: [{role: names[0], content: "How many is 7?"}, talks[7][1]]}, done.stderr
    made = run(tmp_path, "it.parquet", "--column", key, "--tokenizer", TALES, "-o", "out/talks", "--val-files", 0)
    assert made.returncode == 0, made.stderr
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({key: t}) + "\n" for t in talks))
    subprocess.run([TOKENIZE, "--chat", "--tokenizer", TALES, "-o", "direct.bin", "talks.jsonl"], cwd=tmp_path, check=True,
                   capture_output=True)
    assert (tmp_path / "out/talks_train_000.bin").read_bytes() == (tmp_path / "direct.bin").read_bytes()
    with open(tmp_path / "it.csv", "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows([[key], *([json.dumps(talk)] for talk in talks)])
    assert run(tmp_path, "--rows", "it.csv", "--column", key).stdout == done.stdout
    refused = subprocess.run([TOKENIZE, "--chat", "--tokenizer", TALES, "-o", "x.bin", "it.parquet"], cwd=tmp_path,
                             capture_output=True, text=True)
    assert "dev/data/hf.py --rows it.parquet --column messages | ./tokenize" in refused.stderr
    (tmp_path / "no.jsonl").write_text(json.dumps({key: talks[0]}) + "\n")
    assert f"hint: it holds conversations: --column {key}" in run(tmp_path, "--rows", "no.jsonl").stderr


def test_columns_of_questions_and_answers_become_conversations(tmp_path):
    # tatsu-lab/alpaca has a row as text, too; trl's pairs are lists of messages
    ask = [[{"role": "user", "content": t, "name": None}] for t in texts(2)]
    write_parquet(tmp_path / "it.parquet", texts(0), instruction=texts(1), input=["", None] * 20, output=texts(2), prompt=ask)
    names = "--column", "instruction,input,output"
    rows = [{"instruction": a, **({} if i % 2 else {"input": ""}), "output": b} for i, (a, b) in enumerate(zip(texts(1), texts(2)))]
    done = run(tmp_path, "--rows", "it.parquet", *names)
    assert printed(done) == rows, done.stderr
    both = printed(run(tmp_path, "--rows", "it.parquet", "--column", "prompt,output"))
    assert both[3] == {"prompt": [{"role": "user", "content": texts(2)[3]}], "output": texts(2)[3]}
    made = run(tmp_path, "it.parquet", *names, "--tokenizer", TALES, "-o", "out/pairs", "--val-files", 0)
    assert made.returncode == 0, made.stderr
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run([TOKENIZE, "--chat", "--tokenizer", TALES, "-o", "direct.bin", "pairs.jsonl"], cwd=tmp_path, check=True,
                   capture_output=True)
    assert (tmp_path / "out/pairs_train_000.bin").read_bytes() == (tmp_path / "direct.bin").read_bytes()
    for name, text in (("it.csv", "instruction,output\na,b\n"), ("it.jsonl", '{"instruction": "a", "output": "b"}\n')):
        (tmp_path / name).write_text(text)
        assert printed(run(tmp_path, "--rows", name, "--column", "instruction,output")) == [{"instruction": "a", "output": "b"}]
        assert "hint: --column takes instruction, output, or several: A,B" in run(tmp_path, "--rows", name).stderr
        assert "has no column input" in run(tmp_path, "--rows", name, *names).stderr


# the files of the one model of the hub
FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "tokenizer.json": b"{}", "pytorch_model.bin": b"no",
         "onnx/model.onnx": b"no", "README.md": b"# card"}


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves FILES as owner/small at one commit; owner/gated is gated, everything else is missing."""
    commit = "0123456789abcdef0123456789abcdef01234567"

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if "gated" in parts:
            return self.answer(403, X_Error_Code="GatedRepo")
        if "small" not in parts:
            return self.answer(404, X_Error_Code="RepoNotFound")
        if parts[0] == "api":
            listed = [{"rfilename": name, "type": "file", "path": name, "size": len(body),
                       "oid": hashlib.sha1(body).hexdigest()}
                      for name, body in FILES.items()]
            if "tree" in parts:
                return self.answer(200, json.dumps(listed).encode(), Content_Type="application/json")
            info = {"id": "owner/small", "sha": self.commit, "siblings": listed}
            return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        name = "/".join(parts[4:])
        body = FILES.get(name)
        if body is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        return self.answer(200, body, X_Repo_Commit=self.commit, ETag=f'"{hashlib.sha1(body).hexdigest()}"')

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(name="hub")
def serve():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def run_script(script, *flags, **env):
    return subprocess.run([sys.executable, ROOT / "dev/data" / script, *map(str, flags)], capture_output=True, text=True, check=False,
                          env={**os.environ, **env})


def download(hub, repo, tmp_path):
    return run_script("model.py", repo, "-o", tmp_path / "m", HF_ENDPOINT=hub, HF_HOME=str(tmp_path / "home"),
                      HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1")


def test_a_model_is_downloaded_without_what_no_trainer_reads(hub, tmp_path):
    done = download(hub, "owner/small", tmp_path)
    assert done.returncode == 0, done.stderr
    found = {str(p.relative_to(tmp_path / "m")) for p in (tmp_path / "m").rglob("*") if p.is_file() and ".cache" not in p.parts}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert (tmp_path / "m/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "next  ./train_llama3" in done.stdout


@pytest.mark.parametrize("repo, word", [("owner/gated", "gated"), ("owner/none", "no such model"), ("a b", "no such model")])
def test_a_model_that_cannot_be_had_is_told_in_one_line(hub, tmp_path, repo, word):
    done = download(hub, repo, tmp_path)
    error = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(error) == 1 and word in error[0], done.stderr


def tasks(tmp_path, task, split, rows):
    folder = tmp_path / task
    folder.mkdir()
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    done = run_script("tasks.py", task, "--from", folder, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (tmp_path / f"out/{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_tasks_are_worded_as_lm_eval_words_them(tmp_path):
    got = tasks(tmp_path, "hellaswag", "validation", [
        {"activity_label": "Roof", "ctx_a": "A man sits [header] on a roof.", "ctx_b": "he", "label": "2",
         "endings": ["is  up.", "a [title] b", "[x] falls.", "d"]}])
    assert got == [{"ctx": "Roof: A man sits on a roof. He", "choices": ["is up.", "a. b", " falls.", "d"], "label": 2}]
    got = tasks(tmp_path, "arc_easy", "test", [
        {"question": "Why?", "choices": {"text": ["no", "yes"], "label": ["1", "2"]}, "answerKey": "2"}])
    assert got == [{"ctx": "Question: Why?\nAnswer:", "choices": ["no", "yes"], "label": 1}]
    got = tasks(tmp_path, "piqa", "validation", [{"goal": "Open", "sol1": "push", "sol2": "pull", "label": 0}])
    assert got == [{"ctx": "Question: Open\nAnswer:", "choices": ["push", "pull"], "label": 0}]
    got = tasks(tmp_path, "mmlu", "test", [
        {"subject": "high_school_physics", "question": " Fast? ", "choices": ["a", "b", "c", "d"], "answer": 3}])
    assert got == [{"ctx": "The following are multiple choice questions (with answers) about high school physics.\n\nFast?\n"
                           "A. a\nB. b\nC. c\nD. d\nAnswer:", "choices": ["A", "B", "C", "D"], "label": 3}]
