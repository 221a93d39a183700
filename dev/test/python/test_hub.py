"""Tests dev/data/model.py and tasks.py without a network, through the calls of the hub's libraries: a server that speaks the
hub's protocol for one model, and local copies of data sets."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
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
    pytest.importorskip("huggingface_hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def run(script, *flags, **env):
    return subprocess.run([sys.executable, DATA / script, *map(str, flags)], capture_output=True, text=True, check=False,
                          env={**os.environ, **env})


def test_a_model_is_downloaded_without_what_no_trainer_reads(hub, tmp_path):
    done = run("model.py", "owner/small", "-o", tmp_path / "m", HF_ENDPOINT=hub, HF_HOME=str(tmp_path / "home"),
               HF_HUB_DISABLE_XET="1")
    assert done.returncode == 0, done.stderr
    found = {str(p.relative_to(tmp_path / "m")) for p in (tmp_path / "m").rglob("*") if p.is_file() and ".cache" not in p.parts}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert (tmp_path / "m/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "next  ./train_llama3" in done.stdout


@pytest.mark.parametrize("repo, word", [("owner/gated", "gated"), ("owner/none", "no such model"), ("a b", "no such model")])
def test_a_model_that_cannot_be_had_is_told_in_one_line(hub, tmp_path, repo, word):
    done = run("model.py", repo, "-o", tmp_path / "m", HF_ENDPOINT=hub, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1")
    error = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(error) == 1 and word in error[0], done.stderr


def tasks(tmp_path, task, split, rows):
    pytest.importorskip("datasets")
    folder = tmp_path / task
    folder.mkdir()
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    done = run("tasks.py", task, "--from", folder, "-o", tmp_path / "out", HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
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
