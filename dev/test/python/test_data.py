"""Tests the data sets: the stories of tinytales.c (same bytes everywhere, sound sentences, a tokenizer that fits them). Also
tests the scripts that download and tokenize: from a file, from a server in this test, without a network. Standard library and
pytest."""
import glob
import hashlib
import http.server
import json
import os
import pty
import re
import struct
import subprocess
import sys
import threading
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
DATA = os.path.join(ROOT, "dev", "data")
TOKENIZE = os.path.join(ROOT, "tokenize")
sys.path.insert(0, DATA)
import data_common  # noqa: E402

STORIES_SHA256 = "b5beca2c0c78601d18bff2cb04be0474a37304a4a609a437a7f0880474040d2a"
needs_tokenize = pytest.mark.skipif(not os.path.exists(TOKENIZE), reason="./tokenize has not been built")


def read_tokens(path):
    with open(path, "rb") as f:
        data = f.read()
    magic, _, count = struct.unpack_from("<3i", data)
    width = {20240520: 2, 20240801: 4}[magic]
    tokens = list(struct.unpack_from(f"<{count}{'H' if width == 2 else 'I'}", data, 1024))
    assert len(data) == 1024 + count * width
    return tokens


def run_script(name, *arguments, **environment):
    return subprocess.run([sys.executable, os.path.join(DATA, name), *arguments], capture_output=True, text=True,
                          env={**os.environ, **environment})


def build(source, program):
    """Compiles a C program. Returns its path."""
    command = [os.environ.get("CC", "cc"), "-std=c11", "-O1", "-w", "-I", ROOT, source, "-o", program, "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    return program


def write_zeros(path, count):
    """Writes a token file of `count` zeros."""
    path.write_bytes(struct.pack("<256i", 20240520, 1, count, *[0] * 253) + bytes(2 * count))


# --- tinytales ---


@pytest.fixture(scope="module")
def tinytales(tmp_path_factory):
    return build(os.path.join(DATA, "tinytales.c"), str(tmp_path_factory.mktemp("tales") / "tinytales"))


@pytest.fixture(scope="module")
def stories(tinytales):
    out = subprocess.run([tinytales], capture_output=True, check=True).stdout
    return out, [json.loads(line)["text"] for line in out.splitlines()]


def test_the_stories_are_the_same_bytes_everywhere(stories):
    assert hashlib.sha256(stories[0]).hexdigest() == STORIES_SHA256, (
        "the stories changed: was that meant? then train their tokenizer again (dev/data/README.md) and note the new sum here")


def test_no_two_stories_are_alike_and_seeds_differ(tinytales, stories):
    assert len(set(stories[1])) == len(stories[1]) == 8000
    other = subprocess.run([tinytales, "--seed", "2", "--stories", "50"], capture_output=True, check=True).stdout
    assert not set(json.loads(line)["text"] for line in other.splitlines()) & set(stories[1])


def test_what_ends_a_story_is_written_behind_each(tinytales, stories):
    for flag in ([], ["--text"]):
        out = subprocess.run([tinytales, "--stories", "3", "--end", '<|eot_id|>"\\', *flag], capture_output=True, text=True,
                             check=True).stdout
        told = out.rstrip("\n").split("\n\n") if flag else [json.loads(line)["text"] for line in out.splitlines()]
        assert told == [text + '<|eot_id|>"\\' for text in stories[1][:3]]


def test_text_and_file_output_hold_the_same_stories(tinytales, stories, tmp_path):
    path = tmp_path / "stories.txt"
    subprocess.run([tinytales, "--stories", "20", "--text", "-o", str(path)], check=True)
    assert path.read_text().rstrip("\n").split("\n\n") == stories[1][:20]


def test_no_template_shows_and_punctuation_is_sound(stories):
    wrong = re.compile(r"[][{}|^_]|  | [.,!?]|[.,!?][.,]|,\"? ?$|\"\"|\bnull\b|\n\n|^ | $| \n|\n ")
    for text in stories[1]:
        found = wrong.search(text)
        assert not found, (found, text)
        assert text[-1] in '."', text
        for paragraph in text.split("\n"):
            assert paragraph.count('"') % 2 == 0, paragraph


def test_sentences_begin_with_capitals_and_articles_fit(stories):
    lower_start = re.compile(r"(^|[.]\"? |\n)\"?[a-z]")
    article = re.compile(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]")
    twice = re.compile(r"\b(\w+) \1\b")
    for text in stories[1]:
        for pattern in (lower_start, article, twice):
            found = pattern.search(text)
            assert not found, (found, text)


def test_a_name_belongs_to_one_kind_and_one_pronoun(stories):
    kinds, pronouns = {}, {}
    for text in stories[1]:
        for kind, name in re.findall(r"(\w+) named (\w+)", text):
            assert kinds.setdefault(name, kind) == kind, name
        for name, pronoun in re.findall(r"(\w+) was so happy that (he|she) danced", text):
            assert pronouns.setdefault(name, pronoun) == pronoun, name
    assert len(kinds) == 16 and len(pronouns) == 8


def test_the_hero_keeps_one_name_and_pronoun(stories):
    """Checks sentences whose subject must be the hero of the first sentence, and the plot about a birthday."""
    seen = 0
    for text in stories[1]:
        hero = re.search(r"named (\w+)", text).group(1)
        for name in re.findall(r"(\w+) was so happy that (?:he|she) danced", text):
            assert name == hero, text
            seen += 1
        subject = re.search(r"Today was (his|her) birthday\. (He|She) was so excited", text)
        assert not subject or {"his": "He", "her": "She"}[subject.group(1)] == subject.group(2), text
    assert seen > 100


def test_wrong_usage_ends_with_status_2(tinytales, tmp_path):
    for arguments in (["--stories"], ["--stories", "0"], ["--stories", "x"], ["--seed", "-1"], ["--wrong"], ["-o"]):
        done = subprocess.run([tinytales, *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and arguments[0] in done.stderr, arguments
    done = subprocess.run([tinytales, "-o", str(tmp_path / "no" / "such" / "folder")], capture_output=True, text=True)
    assert done.returncode == 1 and "cannot write" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_told(tinytales):
    done = subprocess.run([tinytales, "-o", "/dev/full"], capture_output=True, text=True)
    assert done.returncode == 1 and "writing failed: No space left" in done.stderr


@needs_tokenize
def test_the_committed_tokenizer_fits_the_stories(stories, tmp_path):
    """Checks that a word is one token, apart from punctuation. A tokenizer made from other stories would need more tokens."""
    (tmp_path / "stories.jsonl").write_bytes(stories[0])
    out = tmp_path / "stories.bin"
    subprocess.run([TOKENIZE, "--tokenizer", os.path.join(DATA, "tinytales"), "-o", str(out), str(tmp_path / "stories.jsonl")],
                   check=True, capture_output=True)
    tokens = read_tokens(out)
    assert max(tokens) < 2048
    assert tokens.count(2040) == 8000 and tokens[0] == 2040, "one <|begin_of_text|> before each story"
    pieces = sum(len(re.findall(r"\w+|[^\w\s]+|\n", text)) for text in stories[1])
    assert len(tokens) - 8000 < 1.01 * pieces


@pytest.mark.skipif(not os.path.exists(os.path.join(ROOT, ".git")), reason="not a clone")
def test_what_the_pages_commands_write_is_ignored_or_committed():
    outputs = {}
    for page in ("README.md", os.path.join("dev", "data", "README.md"), *glob.glob(os.path.join("dev", "doc", "*.md"), root_dir=ROOT)):
        with open(os.path.join(ROOT, page), encoding="utf-8") as f:
            outputs |= dict.fromkeys(re.findall(r"^[^#\n]* (?:-o|--out|--export) ([\w./-]+)", f.read(), re.MULTILINE), page)
    assert len(outputs) >= 20
    for output, page in outputs.items():
        known = [subprocess.run(["git", *command], cwd=ROOT, capture_output=True).returncode == 0 for command in (
            ["check-ignore", "-q", output], ["check-ignore", "-q", output + "/file"], ["ls-files", "--error-unmatch", output])]
        assert output == "-" or any(known), f"{page}: git status would show {output}"


@pytest.mark.parametrize("name, start, words", [
    ("x.parquet", b"PAR1\x15\x04", "a Parquet file"), ("x.jsonl.gz", b"\x1f\x8b\x08", "zcat"),
    ("x.zst", b"\x28\xb5\x2f\xfd", "zstdcat"), ("x.arrow", b"ARROW1\0\0", "an Arrow file"),
    ("x.json", b'[\n {"text": "a"}]', "jq -c"), ("x.txt", "\ufeffab".encode("utf-16-le"), "UTF-16"),
    ("x.jsonl", b'{"text": "a \\ud800"}', "x.jsonl:1:"), ("n.jsonl", b'{"text": 5}', "n.jsonl:1: "),
    ("y.txt", "abcd".encode("utf-16-le"), "UTF-16"), ("empty.txt", b"", "is empty"), ("missing.txt", None, "cannot open")])
@needs_tokenize
def test_what_is_no_text_trains_no_tokenizer(tmp_path, name, start, words):
    if start is not None:
        (tmp_path / name).write_bytes(start)
    done = subprocess.run([TOKENIZE, "--train-bpe", "300", "-o", tmp_path / "tokenizer.json", tmp_path / name],
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and words in done.stderr, done.stderr
    assert name in done.stderr and not (tmp_path / "tokenizer.json").exists()


@needs_tokenize
def test_a_byte_order_mark_is_no_text_for_a_tokenizer(tmp_path):
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / f"{name}.txt").write_bytes(mark + "the cat \ufeff sat. ".encode() * 50)
        subprocess.run([TOKENIZE, "--train-bpe", "280", "-o", tmp_path / f"{name}.json", tmp_path / f"{name}.txt"], check=True,
                       capture_output=True)
    assert (tmp_path / "plain.json").read_bytes() == (tmp_path / "marked.json").read_bytes()


# --- tinyshakespeare.py, tinystories.py ---


@needs_tokenize
def test_tinyshakespeare_from_a_file_keeps_every_byte(tmp_path):
    text = ("ROMEO:\nO, speak again, bright angel! \u2014 caf\u00e9\n\n" * 400).encode()
    (tmp_path / "input.txt").write_bytes(text)
    done = run_script("tinyshakespeare.py", "--input", str(tmp_path / "input.txt"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    train, val = (read_tokens(tmp_path / "out" / f"tinyshakespeare_{part}.bin") for part in ("train", "val"))
    tokens = [t for t in train + val if t != 256]  # 256 begins a document
    assert bytes(tokens) == text
    assert 0.05 < len(val) / len(train + val) < 0.15
    assert "./train_llama3" in done.stdout and "tinyshakespeare_val.bin" in done.stdout


def documents(tokens):
    text = bytes(t if t != 256 else 0 for t in tokens).decode()
    assert text[0] == "\0"
    return text[1:].split("\0")


@needs_tokenize
def test_tinystories_from_text_and_from_json_lines_agree(tmp_path):
    wanted = [f"Story {i}.\n\nIt is about {i * i} cats." for i in range(300)]
    separated = "\n<|endoftext|>\n".join(wanted)
    (tmp_path / "a.txt").write_text("\n" + separated + "\n<|endoftext|>\n")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"story" if i % 2 else "text": s}) + "\n"
                                              for i, s in enumerate(wanted)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tinystories_train_007.bin").write_bytes(b"left over from a longer set")
    for name in ("a.txt", "b.jsonl"):
        done = run_script("tinystories.py", "--input", str(tmp_path / name), "--out", str(tmp_path / "out"),
                          "--shard-mb", "0.003", "--val-fraction", "0.1")
        assert done.returncode == 0, done.stderr
        files = sorted(os.listdir(tmp_path / "out"))
        assert len(files) >= 3 and files[-1] == "tinystories_val.bin" and "tinystories_train_007.bin" not in files, files
        got = [documents(read_tokens(tmp_path / "out" / f)) for f in files]
        assert [s for part in got for s in part] == wanted
        assert 20 <= len(got[-1]) <= 45
        assert "*.bin'" in done.stdout


@needs_tokenize
def test_a_file_to_validate_on_is_used_whole(tmp_path):
    (tmp_path / "train.txt").write_text("one\n<|endoftext|>\ntwo\n")
    (tmp_path / "val.txt").write_text("three\n<|endoftext|>\n")
    done = run_script("tinystories.py", "--input", str(tmp_path / "train.txt"), "--val-input", str(tmp_path / "val.txt"),
                      "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert documents(read_tokens(tmp_path / "tinystories_train_000.bin")) == ["one", "two"]
    assert documents(read_tokens(tmp_path / "tinystories_val.bin")) == ["three"]


@pytest.mark.parametrize("script", ["tinyshakespeare.py", "tinystories.py"])
def test_without_a_network_one_line_and_a_hint(script, tmp_path):
    dead = "http://127.0.0.1:9"  # nothing listens on the discard port
    done = run_script(script, "--out", str(tmp_path / "out"), https_proxy=dead, http_proxy=dead, no_proxy="")
    lines = done.stderr.strip().split("\n")
    assert done.returncode == 1 and len(lines) == 2, done.stderr
    assert lines[0].startswith("error: https://") and "cannot download" in lines[0]
    assert lines[1].startswith("  hint: ") and "--input FILE" in lines[1]
    assert not os.path.exists(tmp_path / "out")


@pytest.mark.parametrize("script", ["tinyshakespeare.py", "tinystories.py"])
def test_bad_input_is_refused_by_name(script, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"other": 1}\n')
    cases = [("missing.txt", "is missing"), ("empty.txt", "is empty"), (".", "is a folder")]
    if script == "tinystories.py" and os.path.exists(TOKENIZE):
        cases.append(("bad.jsonl", "bad.jsonl:2: wanted a JSON object"))
    for name, words in cases:
        done = run_script(script, "--input", str(tmp_path / name), "--out", str(tmp_path / "out"))
        assert done.returncode == 1 and done.stderr.startswith("error: ") and words in done.stderr, (name, done.stderr)
        assert "Traceback" not in done.stderr


class Server(http.server.BaseHTTPRequestHandler):
    body = b"x" * 3_000_000

    def do_GET(self):
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body[: 1_000_000 if self.path == "/broken" else None])

    def log_message(self, *_):
        pass


def test_downloads_are_whole_or_not_there(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        path = str(tmp_path / "folder" / "file")
        for url, size, words in ((base + "/missing", None, "cannot download: Not Found"),
                                 (base + "/broken", None, "1,000,000 bytes"),
                                 (base + "/file", 5, "sent 3,000,000 bytes, wanted 5")):
            with pytest.raises(SystemExit) as stop:
                data_common.download(url, path, size, "a hint")
            assert words in str(stop.value) and "hint: a hint" in str(stop.value), stop.value
            assert not os.path.exists(path) and not os.path.exists(path + ".part")
        data_common.download(base + "/file", path, len(Server.body))
        with open(path, "rb") as f:
            assert f.read() == Server.body
        before = os.stat(path).st_mtime_ns
        data_common.download(base + "/missing", path, len(Server.body))  # the file exists already: no request is sent
        assert os.stat(path).st_mtime_ns == before
    finally:
        server.shutdown()


# --- the order of rows, in C and in the PyTorch reference: of each source, and of all ---

MIX_PROGRAM = r"""
#include "llmc/files/mix.h"
int main(int argc, char** argv) {
    Mix m;
    DataLoader stream;
    const RowRule cross = {DOCUMENTS_CROSS, -1, 0, false, NULL, NULL};
    Error e = NO_ERROR;
    if (argc < 2 || !mix_open(&m, &stream, argv[1], (BatchShare){1, 16, 0, 1}, 1234567890123ull, &cross, &e)) { die("%s", e.msg); }
    for (uint64_t row = 0; row < 9000; row++) {
        int shard;
        uint64_t position, in_shard;
        DataLoader* source = m.sources[mix_locate(&m, m.caller_block, row, &position)].data;
        dataloader_locate(source, position, &shard, &in_shard);
        printf("%s %llu\n", source->shards[shard].path, (unsigned long long)in_shard);
    }
    mix_close(&m);
    return 0;
}
"""


def test_the_python_reference_mixes_the_same_rows(tmp_path):
    pytest.importorskip("torch")
    sys.path.insert(0, ROOT)
    from dev.reference import tokenfiles
    for name, n in (("a0", 1000), ("a1", 5000), ("b,c", 333), ("d:1", 17)):
        write_zeros(tmp_path / f"{name}.bin", n)
    (tmp_path / "mix.c").write_text(MIX_PROGRAM)
    program = build(tmp_path / "mix.c", tmp_path / "mix")
    for weights in (("0.6", "0.3", "0.1"), ("1", "1", "1"), ("1e-3", "2", ".5")):
        text = ",".join(f"{tmp_path}/{name}:{weight}" for name, weight in zip(("a*.bin", "b,c.bin", "d:1.bin"), weights))
        out = subprocess.run([program, text], capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
        loader = tokenfiles.MixLoader(tokenfiles.mix_parts(text), 1, 16, 1234567890123)
        places = (loader.locate(row) for row in range(9000))
        assert len(out) == 9000 and [f"{f.path} {row}" for f, row in places] == out


def test_the_python_reference_refuses_what_makes_no_mix(tmp_path, capsys):
    pytest.importorskip("torch")
    sys.path.insert(0, ROOT)
    from dev.reference import tokenfiles
    path = str(tmp_path / "a.bin")
    open(path, "w").close()
    assert tokenfiles.mix_parts(path) == [[path, 0]]
    for tail, words in ((":x", "weight"), (":0", "weight"), (":-1", "weight"), (":inf", "weight"), (":nan", "weight"),
                        (f",{path}:1", "has no weight"), (":1,", "empty")):
        with pytest.raises(SystemExit) as stop:
            tokenfiles.mix_parts(path + tail)
        assert stop.value.code == 1 and words in capsys.readouterr().err


# --- ./tokenize at a terminal ---


@needs_tokenize
def test_progress_goes_to_the_terminal_of_stdout_and_not_to_stderr(tmp_path):
    screen, other = pty.openpty()
    done = subprocess.Popen([TOKENIZE, "-o", str(tmp_path / "x.bin"), "-"], stdin=subprocess.PIPE, stdout=other,
                            stderr=subprocess.PIPE)
    os.close(other)
    time.sleep(2.2)  # progress that takes less than two seconds is not shown
    _, errors = done.communicate(b"a text\n" * 200000)
    text = b""
    while not text.endswith(b"x.bin\r\n"):
        text += os.read(screen, 4096)
    os.close(screen)
    assert done.returncode == 0 and errors == b""
    assert re.fullmatch(rb"\rread    1\.4 MB, \d\.\d MB/s\r +\r1 document, 1,400,001 tokens.*\r\n", text), text
