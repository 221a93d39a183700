"""./tokenize --train-bpe against `tokenizers` (bpe_oracle.py): the parsed files are equal. Also: the bytes do not depend on
threads, on stdin or on the order of files, and tiktoken's rule and transformers give the ids of ./tokenize.

TEST_DATA names a folder with tinyshakespeare.txt. With FULL=1, the oracle also learns from the text of two Debian packages, of
which DEBIAN_TEXT names the train.jsonl; without it, debian_text.py downloads them. TRAIN_BPE: another ./tokenize to test.
"""
import json
import os
import platform
import random
import signal
import subprocess
import sys
import unicodedata

import pytest

pytest.importorskip("tokenizers")
import bpe_oracle  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TOKENIZE = os.environ.get("TRAIN_BPE", os.path.join(ROOT, "tokenize"))
SHAKESPEARE = os.path.join(os.environ.get("TEST_DATA", ""), "tinyshakespeare.txt")
FULL = os.environ.get("FULL") == "1"

pytestmark = pytest.mark.skipif(not os.path.exists(TOKENIZE), reason=f"{TOKENIZE} is not built (make tokenize)")


def run(out, vocab_size, *arguments, **options):
    return subprocess.run([TOKENIZE, "--train-bpe", str(vocab_size), "-o", out, *map(str, arguments)], capture_output=True,
                          **options)


def trained(out, vocab_size, *arguments, **options):
    """Trains and returns the bytes of the file."""
    done = run(out, vocab_size, *arguments, **options)
    assert done.returncode == 0, done.stderr.decode()
    return out.read_bytes()


def check(tmp_path, documents, vocab_size, *arguments, chat=False):
    """Trains on files and compares the result with the oracle's for these documents. Returns the number of tokens."""
    got = json.loads(trained(tmp_path / "tokenizer.json", vocab_size, *(["--chat"] if chat else []), *arguments))
    want = bpe_oracle.tokenizer_json(documents, vocab_size, chat)
    if got != want:
        for a, b in zip(got["model"]["vocab"].items(), want["model"]["vocab"].items()):
            assert a == b, f"{vocab_size} tokens of {arguments}"
    assert got == want
    return len(got["model"]["vocab"]) + len(got["added_tokens"])


def write_lines(path, documents, field="text"):
    path.write_text("".join(json.dumps({"id": i, field: d}) + "\n" for i, d in enumerate(documents)))
    return path


def every_script():
    """A document a script: words of its characters, of which most repeat."""
    scripts = {}
    for c in map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x20000), *range(0x30000, 0x30100), *range(0xE0100, 0xE01F0)]):
        name = unicodedata.name(c, "")
        if name:
            scripts.setdefault(name.split()[0], []).append(c)
    rng = random.Random(3)
    documents = []
    for letters in scripts.values():
        words = ["".join(rng.choices(letters, k=rng.randrange(1, 9))) for _ in range(12)]
        documents.append("".join(rng.choice(words) + rng.choice([" ", " ", "  ", "\n", ""]) for _ in range(60)))
    return documents


@pytest.mark.skipif(not os.path.exists(SHAKESPEARE), reason="TEST_DATA names no folder with tinyshakespeare.txt")
@pytest.mark.parametrize("vocab_size", [258, 259, 1024, 8192])
def test_tinyshakespeare_gives_the_oracles_file(tmp_path, vocab_size):
    with open(SHAKESPEARE, encoding="utf-8", newline="") as f:
        assert check(tmp_path, [f.read()], vocab_size, SHAKESPEARE) == vocab_size


def test_tinytales_give_the_committed_tokenizer_of_the_oracle(tmp_path):
    program, lines = tmp_path / "tinytales", tmp_path / "tinytales.jsonl"
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O1", "-I", ROOT, os.path.join(ROOT, "dev/data/tinytales.c"), "-o",
                    program, "-lm"], check=True)
    subprocess.run([program, "-o", lines], check=True, stdout=subprocess.DEVNULL)
    documents = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    assert check(tmp_path, documents, 2048, lines, chat=True) == 2048
    with open(os.path.join(ROOT, "dev/data/tinytales/tokenizer.json"), encoding="utf-8") as f:
        assert json.load(f)["model"]["vocab"] == json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]


def test_every_script_of_unicode_gives_the_oracles_file(tmp_path):
    documents = every_script()
    assert len(documents) > 250 and check(tmp_path, documents, 6000, write_lines(tmp_path / "scripts.jsonl", documents)) == 6000


@pytest.mark.skipif(not FULL, reason="the text of Debian belongs to make test-full")
@pytest.mark.parametrize("vocab_size", [1024, 32768])
def test_the_text_of_debian_gives_the_oracles_file(tmp_path, vocab_size):
    lines = os.environ.get("DEBIAN_TEXT")
    if not lines:
        script = os.path.join(ROOT, "dev/data/debian_text.py")
        done = subprocess.run([sys.executable, script, "-o", tmp_path / "debian"], capture_output=True, cwd=tmp_path)
        if done.returncode:
            pytest.skip(f"debian_text.py fails here: {done.stderr.decode().splitlines()[-1:]}")
        lines = tmp_path / "debian/train.jsonl"
    with open(lines, encoding="utf-8") as f:
        documents = [json.loads(line)["text"] for line in f]
    assert sum(map(len, documents)) > 30e6 and check(tmp_path, documents, vocab_size, lines) == vocab_size


# ---------------------------------------------------------------------------------------------------------------------
# seeded texts

PARTS = ["a", "b", "ab", "aaa", "A", "s", "ll", "'", "'s", "'LL", "\u017f", " ", "  ", "\t", "\n", "\r\n", "\r", "\n\n", "1", "42",
         "12345", "\u00bd", "\u0663", "!", "...", "?!", "\u2026", "\u3002", "\u00e9", "e\u0301", "\u4f60\u597d", "\u0416", "\u05d0",
         "\u0939\u093f", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u00a0", "\u2003",
         "\u200b", "\ufeff", "\x00", "\x7f", "\x1c", "<|eot_id|>", "<|begin_of_text|>", "<|", "|>", "\"", "\\", "\u0120", "\u010a",
         "\u212a"]


def adversarial_text(rng):
    """A short text of few different parts, each with a probability of its own; sometimes one letter repeated."""
    if rng.random() < 0.1:
        return rng.choice(["a", "!", " ", "\n", "7", "\u4f60"]) * rng.choice([1, 2, 3, 7, 64, 1000, 4097])
    parts = rng.sample(PARTS, rng.choice([1, 2, 3, 5, 12, len(PARTS)]))
    weights = [rng.random() ** 3 for _ in parts]
    return "".join(rng.choices(parts, weights, k=rng.choice([0, 1, 5, 40, 300, 2000])))


@pytest.mark.parametrize("block", [pytest.param(i, marks=pytest.mark.skipif(
    i % 2 and not FULL, reason="the other half of the seeds belongs to make test-full")) for i in range(10)])
def test_adversarial_texts_give_the_oracles_files(tmp_path, block):
    """Twenty seeds each: one to four files, texts or lines of JSON."""
    compared = 0
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        documents, files = [], []
        for i in range(rng.choice([1, 1, 2, 4])):
            texts = [adversarial_text(rng) for _ in range(rng.choice([1, 3, 30]) if rng.random() < 0.4 else 1)]
            path = tmp_path / f"{seed}-{i}.{'jsonl' if len(texts) > 1 else 'txt'}"
            if len(texts) > 1:
                write_lines(path, texts)
            elif texts[0].strip(" \t\r\n\f\v"):
                mark = rng.random() < 0.2
                path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + texts[0].encode())
                texts[0] = texts[0] if mark else texts[0].removeprefix("\ufeff")
            else:  # a blank file is refused
                continue
            documents += texts
            files.append(path)
        if not any(documents):
            continue
        check(tmp_path, documents, rng.choice([264, 270, 300, 500, 5000]), *files, chat=rng.random() < 0.3)
        compared += 1
    assert compared > 12


def test_one_long_piece_gives_the_oracles_file(tmp_path):
    rng = random.Random(5)
    text = "".join(rng.choices("etaoinshr", [9, 8, 7, 6, 5, 4, 3, 2, 1], k=100_000))
    (tmp_path / "piece.txt").write_text(text)
    check(tmp_path, [text], 1500, tmp_path / "piece.txt")


# ---------------------------------------------------------------------------------------------------------------------
# the same bytes

def mixed_text(size):
    """A text that is cut for threads: prose, a long line without a border, and characters of three bytes without newlines."""
    rng = random.Random(9)
    words = ["".join(rng.choices("abcdefghij\u00e9\u4e00\u4e8c\u4e09", k=rng.randrange(1, 8))) for _ in range(3000)]
    prose = " ".join(rng.choices(words, k=size // 8))
    return "".join([prose, "0123456789" * (size // 40), "!?" * (size // 40), "\u4e00\u3002\u4e8c" * (size // 40),
                    prose.replace(" ", "\n")])


def test_threads_and_stdin_give_the_same_bytes(tmp_path):
    text, out = mixed_text(2_000_000 if FULL else 700_000), tmp_path / "tokenizer.json"
    source = tmp_path / "text.txt"
    source.write_text(text)
    documents = text.split("\n\n") + ["", "\n", "x"]
    lines = write_lines(tmp_path / "lines.jsonl", documents, "body")
    want = trained(out, 3000, "--threads", 1, source)
    assert json.loads(want) == bpe_oracle.tokenizer_json([text], 3000)
    for threads in (2, 8):
        assert trained(out, 3000, "--threads", threads, source) == want
    with open(source, "rb") as f:
        assert trained(out, 3000, "-", stdin=f) == want
    assert trained(out, 3000, "-", input=text.encode()) == want
    from_lines = trained(out, 3000, "--threads", 1, "--field", "body", lines)
    assert trained(out, 3000, "--threads", 8, "--field", "body", lines) == from_lines
    assert trained(out, 3000, "--field", "body", "-", input=lines.read_bytes()) == from_lines
    assert trained(out, 3000, source, lines, "--field", "body") == trained(out, 3000, lines, source, "--field", "body")


def test_a_stream_longer_than_a_batch_gives_the_bytes_of_one_document(tmp_path):
    """The digits make pieces of three from the start of the run on, and the run has no place where it could be cut blindly."""
    rng = random.Random(2)
    digits = "".join(rng.choices("0123456789", k=1_000_000))
    text = "x" + digits * 20 + "\n" * 3 + "y"
    out = tmp_path / "tokenizer.json"
    whole = trained(out, 700, write_lines(tmp_path / "one.jsonl", [text]))
    assert trained(out, 700, "-", input=text.encode()) == whole


def test_a_piece_never_spans_two_documents(tmp_path):
    for i, half in enumerate(["ab" * 40 + " c", "c" * 80]):
        (tmp_path / f"{i}.txt").write_text(half)
    check(tmp_path, ["ab" * 40 + " c", "c" * 80], 300, tmp_path / "0.txt", tmp_path / "1.txt")
    halves = ["x", "y"] * 50 + ["zw"]
    check(tmp_path, halves, 300, write_lines(tmp_path / "halves.jsonl", halves))


def test_tiktoken_and_transformers_give_the_ids_of_tokenize(tmp_path):
    documents = every_script()[:120]
    path = tmp_path / "tokenizer.json"
    model = json.loads(trained(path, 3000, write_lines(tmp_path / "scripts.jsonl", documents)))["model"]
    done = subprocess.run([TOKENIZE, "--tokenizer", path, "--jsonl"], capture_output=True, check=True,
                          input="".join(json.dumps({"text": d}) + "\n" for d in documents).encode())
    ids = [json.loads(line)["ids"] for line in done.stdout.splitlines()]
    tiktoken, transformers = pytest.importorskip("tiktoken"), pytest.importorskip("transformers")
    stand_ins = bytes_of()
    ranks = {bytes(stand_ins[c] for c in token): i for token, i in model["vocab"].items()}
    other = tiktoken.Encoding("trained", pat_str=bpe_oracle.LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert [other.encode_ordinary(d) for d in documents] == ids
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert [fast(d, add_special_tokens=False)["input_ids"] for d in documents] == ids


def bytes_of():
    """GPT-2's stand-in for each byte: the byte itself if it is printable, else the next character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def test_a_token_of_five_thousand_bytes_is_read_by_all(tmp_path):
    word = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=5000))
    (tmp_path / "word.txt").write_text(word + " " + word)
    size = check(tmp_path, [word + " " + word], 1 << 20, tmp_path / "word.txt")
    done = subprocess.run([TOKENIZE, "--tokenizer", tmp_path / "tokenizer.json", "--jsonl"], capture_output=True, check=True,
                          input=json.dumps({"text": word}).encode())
    ids = json.loads(done.stdout)["ids"]
    assert len(ids) == 1 and ids[0] < size
    back = subprocess.run([TOKENIZE, "--tokenizer", tmp_path / "tokenizer.json", "--decode"], capture_output=True, check=True,
                          input=json.dumps({"ids": ids}).encode())
    assert json.loads(back.stdout)["text"] == word


# ---------------------------------------------------------------------------------------------------------------------
# refusals and failures

@pytest.mark.parametrize("flags, status, words", [
    (["--train-bpe", "257"], 2, "--train-bpe is 257, wanted at least 258: 256 bytes and 2 special tokens"),
    (["--train-bpe", "263", "--chat"], 2, "--train-bpe is 263, wanted at least 264: 256 bytes and 8 special tokens"),
    (["--train-bpe", "many"], 2, "wanted a number of tokens"),
    (["--train-bpe", "300.5"], 2, "wanted a number of tokens"),
    (["--train-bpe", "2147483648"], 2, "wanted a number of tokens, at most 1073741824"),
    (["--train-bpe", "300", "--chat", "--field", "body", "good.txt"], 2,
     "hint: cat good.txt | ./tokenize --train-bpe 300 --chat --field body -o tokenizer.json -"),
    (["--train-bpe", "300", "--val-fraction", "0.1"], 2, "--train-bpe goes without --val-fraction"),
    (["--train-bpe", "300", "--bytes"], 2, "--train-bpe goes without --bytes"),
    (["--train-bpe", "300", "--tokenizer", "."], 2, "--train-bpe goes without --tokenizer"),
    (["--train-bpe", "300", "--jsonl"], 2, "--jsonl goes without --train-bpe"),
    (["--train-bpe", "300", "blank.txt"], 1, "blank.txt: holds no text"),
    (["--train-bpe", "300", "nothing.jsonl"], 1, "nothing.jsonl: holds no text"),
    (["--train-bpe", "300", "good.txt", "latin.txt"], 1, "latin.txt: byte 0xe9 at offset 70003 is no UTF-8"),
    (["--train-bpe", "300", "cut.txt"], 1, "cut.txt: byte 0xe4 at offset 4 is no UTF-8"),
    (["--train-bpe", "300", "bad.jsonl"], 1, "bad.jsonl:2"),
    (["--train-bpe", "300", "tokenizer.json"], 1, "would be overwritten")])
def test_what_cannot_train_a_tokenizer_is_refused_in_one_line(tmp_path, flags, status, words):
    (tmp_path / "good.txt").write_text("the cat sat on the mat")
    (tmp_path / "blank.txt").write_text(" \n\t")
    (tmp_path / "nothing.jsonl").write_text('{"text": ""}\n\n')
    (tmp_path / "latin.txt").write_bytes(b"the cat " * 8750 + b"caf\xe9 au lait" + b" the cat" * 8750)
    (tmp_path / "cut.txt").write_bytes("cat \u4f60".encode()[:-1])
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    (tmp_path / "tokenizer.json").write_text("the old file")
    done = subprocess.run([TOKENIZE, "-o", "tokenizer.json", *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status and words in done.stderr and done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1 or "\n  hint: " in done.stderr
    assert (tmp_path / "tokenizer.json").read_text() == "the old file" and not (tmp_path / "tokenizer.json.tmp").exists()


def test_a_file_is_replaced_and_a_vocabulary_that_stays_small_says_so(tmp_path):
    out = tmp_path / "new" / "tokenizer.json"
    (tmp_path / "text.txt").write_text("aaa aaa")
    done = run(out, 300, tmp_path / "text.txt")
    assert b"new/tokenizer.json: 261 tokens (2 special) from 2 distinct pieces" in done.stdout.replace(b"\n  ", b" "), done.stdout
    assert b"no more pairs to merge: 39 tokens fewer than asked for" in done.stdout
    assert trained(out, 259, tmp_path / "text.txt") == out.read_bytes() and len(json.loads(out.read_text())["model"]["vocab"]) == 257


def test_after_ctrl_c_there_is_no_half_file(tmp_path):
    rng = random.Random(4)
    (tmp_path / "text.txt").write_text(" ".join("".join(rng.choices("abcdefghijklmnop", k=8)) for _ in range(60_000)))
    out, temporary, hit = tmp_path / "tokenizer.json", tmp_path / "tokenizer.json.tmp", 0

    def written():
        try:
            return temporary.stat().st_size > 0
        except FileNotFoundError:
            return False

    for wait_for_file in (True, False, True):
        out.write_text("the old file")
        with subprocess.Popen([TOKENIZE, "--train-bpe", "90000", "-o", out, tmp_path / "text.txt"], stdout=subprocess.DEVNULL) as p:
            while wait_for_file and p.poll() is None and not written():
                pass
            hit += p.poll() is None
            p.send_signal(signal.SIGINT)
        assert p.returncode in (0, -signal.SIGINT) and not (tmp_path / "tokenizer.json.tmp").exists()
        assert p.returncode == 0 or out.read_text() == "the old file"
    assert hit > 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="shim.c is for x86-64")
@pytest.mark.parametrize("kind, cause", [("malloc", "12"), ("write", "28"), ("fsync", "5"), ("rename", "28"), ("open", "24"),
                                         ("close", "5"), ("read", "5")])
def test_a_failed_call_leaves_the_old_file_or_the_new_one(tmp_path, kind, cause):
    """Each call below the folder, or allocation, fails once; later also all calls after it. 28: the disk is full."""
    shim, out = tmp_path / "shim.so", tmp_path / "work" / "tokenizer.json"
    subprocess.run([os.environ.get("CC", "cc"), "-O1", "-w", "-shared", "-fPIC", os.path.join(ROOT, "dev/test/crash/shim.c"), "-o",
                    shim, "-ldl", "-lpthread"], check=True)
    out.parent.mkdir()
    text = out.parent / "text.txt"
    text.write_text("the cat sat on the mat, and that was that. " * 3)
    new = trained(out, 300, text)
    faults = {"LD_PRELOAD": str(shim), "FAULT_CLASS": kind, "FAULT_BELOW": str(out.parent)}

    def with_fault(**more):
        out.write_text("the old file")
        return run(out, 300, "--threads", 1, text, env={**os.environ, **faults, **more})

    with_fault(FAULT_COUNTS=str(tmp_path / "counts"))
    calls = dict(line.split() for line in (tmp_path / "counts").read_text().splitlines())
    count, failures = int(calls[kind]), 0
    assert count > 0
    for at in range(1, count + 1, max(1, count // 60)):
        for after in ("0", "1"):
            done = with_fault(FAULT_AT=str(at), FAULT_DO=cause, FAULT_FROM=after)
            left = sorted(os.listdir(out.parent))
            failures += done.returncode == 1
            whole = out.read_bytes() == (new if done.returncode == 0 else b"the old file")
            named = b"cannot flush the folder" in done.stderr  # after the rename
            assert whole or (named and out.read_bytes() == new), f"{kind} {at}: {done}"
            assert left == ["text.txt", "tokenizer.json"], f"{kind} {at}: {left}"
            assert done.returncode == 0 or (done.returncode == 1 and done.stderr.startswith(b"error: ")), f"{kind} {at}: {done}"
    assert failures > 0
