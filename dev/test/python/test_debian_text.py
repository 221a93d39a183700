"""Tests dev/data/debian_text.py on made-up packages, without a network: the test's own apt-get copies the packages."""
import gzip
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOKENIZE = ROOT / "tokenize"
pytestmark = [pytest.mark.skipif(not TOKENIZE.exists(), reason="./tokenize has not been built"),
              pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")]

DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
OUTPUTS = ["train.jsonl", "val.jsonl", "tokenizer.json", "train.bin", "val.bin"]


def entry(i):
    return f"word{i}\n   {i}. The caf\u00e9 of word {i * i}.\n      [Made {i}]" + f"\n      See {{word{i * 7}}}." * (i % 9)


def page(i):
    return f"Chapter {i}\n=========\n\nThe driver {i} has {i * 31} registers.\n\n" + f"* bit {i}: on\n" * (i % 30)


def number(n):
    return (number(n // 64) if n >= 64 else "") + DIGITS[n % 64]


def dictionary(folder, count, broken=False):
    """Writes a dictionary of dictd. Some headwords share an entry, the first entry describes the dictionary, and one headword
    is no UTF-8."""
    data, lines = b"00-database-info\n   This was converted.\n\n", ["00-database-info\tA\tp\n"]
    for i in range(count):
        text = entry(i).encode("latin-1" if i == 5 else "utf-8")
        lines += [f"{word}\t{number(len(data))}\t{number(len(text) + 1)}\n" for word in (f"word{i}", f"alias{i}")[: 1 + i % 2]]
        data += text + b"\n\n"
    folder.mkdir(parents=True)
    (folder / "made.dict.dz").write_bytes(gzip.compress(data)[: 500 if broken else None])
    (folder / "made.index").write_text("".join(sorted(lines)))


def documentation(folder, count):
    """Writes pages, packed or not, each also below html, and files that are no text or no document."""
    (folder / "html").mkdir(parents=True)
    for i in range(count):
        packed = i % 2 == 0
        name = f"page{i}.{'rst' if i % 3 else 'txt'}" + ".gz" * packed
        (folder / name).write_bytes(gzip.compress(page(i).encode(), mtime=0) if packed else page(i).encode())
        (folder / "html" / f"page{i}.rst.txt").write_text(page(i) + "\n")
    (folder / "latin.txt").write_bytes("caf\u00e9".encode("latin-1") * 30)
    (folder / "image.txt").write_bytes(b"\0" * 100)
    (folder / "blank.rst").write_bytes(b"\n \n")
    (folder / "style.css").write_text("this is no document")
    os.symlink("page1.rst", folder / "again.rst")


def package(folder, name, fill=None, depends=""):
    """Builds a package of the files that fill(folder) writes. Returns its path."""
    tree = folder / f"tree-{name}"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: Me <me@example.org>\n"
                                         + (f"Depends: {depends}\n" if depends else "") + "Description: made up\n")
    if fill:
        fill(tree / "usr/share" / name)
    deb = folder / f"{name}_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", tree, deb], check=True, capture_output=True)
    return deb


def run(folder, *flags, path=None):
    """Runs the script with its own folder for temporary files, which must be empty at the end."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary), "PATH": f"{path or ''}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, str(ROOT / "dev/data/debian_text.py"), "--vocab-size", "300", *map(str, flags)],
                          capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert list(temporary.iterdir()) == []
    return done


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes two packages, and runs the script on them."""
    folder = tmp_path_factory.mktemp("made")
    debs = [package(folder, "dict-made", lambda tree: dictionary(tree, 900)),
            package(folder, "linux-made", lambda tree: documentation(tree, 80))]
    done = run(folder, *debs, "-o", "out/it", "--val-fraction", 0.25, "--archive", "packed/it.tar.xz")
    assert done.returncode == 0, done.stderr
    return folder, debs, done.stdout


def test_every_text_is_there_once_on_one_side(made):
    folder, _, printed = made
    train, val = texts(folder / "out/it/train.jsonl"), texts(folder / "out/it/val.jsonl")
    assert len(set(train + val)) == len(train + val) and len(train) > len(val) > 10
    runs = [text for text in train + val if text.startswith("word")]
    assert sorted("\n\n".join(sorted(runs, key=lambda text: int(text[4 : text.index("\n")]))).split("\n\n")) == sorted(
        entry(i) for i in range(900) if i != 5)
    assert len(runs) > 10 and sorted(len(text.encode()) >= 4000 for text in runs)[1:] == [True] * (len(runs) - 1)
    assert sorted(set(train + val) - set(runs)) == sorted(page(i).rstrip() for i in range(80))
    for side, documents in (("train", train), ("val", val)):
        assert f"{side}{len(documents):{20 - len(side)},}" in printed
    assert "dict-made 1.0: " in printed and "left out: 0 duplicates, 1 that are not text" in printed
    assert "linux-made 1.0: 80 documents, " in printed and "left out: 80 duplicates, 3 that are not text" in printed
    assert "note: val.bin has " in printed and "raise --val-fraction" in printed


def test_the_hash_of_a_text_decides_its_side(made):
    folder = made[0]
    for side in ("train", "val"):
        for text in texts(folder / f"out/it/{side}.jsonl"):
            assert (int(hashlib.sha256(text.encode()).hexdigest()[:4], 16) < 0x4000) == (side == "val"), text


def test_the_tokens_are_those_of_the_documents(made):
    folder = made[0]
    for side in ("train", "val"):
        data = (folder / f"out/it/{side}.bin").read_bytes()
        count, vocabulary = struct.unpack_from("<2i", data, 8)
        assert vocabulary == 300
        ids, documents = struct.unpack_from(f"<{count}H", data, 1024), []
        for token in ids:
            if token == 298:
                documents.append([])
            else:
                documents[-1].append(token)
        lines = "".join(json.dumps({"ids": document}) + "\n" for document in documents)
        done = subprocess.run([TOKENIZE, "--tokenizer", folder / "out/it/tokenizer.json", "--decode"], input=lines.encode(),
                              capture_output=True, check=True)
        assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == texts(folder / f"out/it/{side}.jsonl")


def test_the_tokenizer_has_seen_the_training_text_alone(made, tmp_path):
    train = made[0] / "out/it/train.jsonl"
    subprocess.run([TOKENIZE, "--train-bpe", "300", "-o", tmp_path / "tokenizer.json", train], check=True, capture_output=True)
    assert (tmp_path / "tokenizer.json").read_bytes() == (made[0] / "out/it/tokenizer.json").read_bytes()


def test_the_archive_holds_what_a_run_needs(made):
    folder = made[0]
    with tarfile.open(folder / "packed/it.tar.xz", "r:xz") as archive:
        assert archive.getnames() == ["tokenizer.json", "train.bin", "val.bin"]
        for member in archive:
            assert archive.extractfile(member).read() == (folder / "out/it" / member.name).read_bytes()
            assert (member.mtime, member.uid, member.uname) == (0, 0, "")


def test_a_second_run_writes_the_same_bytes_and_other_packages_move_nothing(made, tmp_path):
    folder, debs, _ = made
    done = run(tmp_path, *debs, "-o", "same", "--val-fraction", 0.25, "--archive", "same.tar.xz")
    assert done.returncode == 0, done.stderr
    for name in OUTPUTS:
        assert (tmp_path / "same" / name).read_bytes() == (folder / "out/it" / name).read_bytes(), name
    assert (tmp_path / "same.tar.xz").read_bytes() == (folder / "packed/it.tar.xz").read_bytes()
    assert sorted(p.name for p in (tmp_path / "same").iterdir()) == sorted(OUTPUTS)
    more = package(tmp_path, "linux-more", lambda tree: documentation(tree, 100))
    done = run(tmp_path, more, *debs, "-o", "same", "--val-fraction", 0.25)
    assert done.returncode == 0, done.stderr
    for name in ("train.jsonl", "val.jsonl"):
        old, new = set(texts(folder / "out/it" / name)), set(texts(tmp_path / "same" / name))
        assert old < new and all(text.startswith("Chapter ") for text in new - old)


def damaged(made, tmp_path, kind):
    folder, debs, _ = made
    deb, data = tmp_path / "bad.deb", debs[1].read_bytes()
    if kind == "half":
        deb.write_bytes(data[: len(data) // 2])
    elif kind == "text":
        deb.write_bytes(b"this is no package\n")
    elif kind == "empty":
        deb.write_bytes(b"")
    elif kind == "nothing in it":
        return package(tmp_path, "linux-name"), "no documents, wanted a dictionary"
    elif kind == "half a dictionary":
        deb = package(tmp_path, "dict-half", lambda tree: dictionary(tree, 900, broken=True))
        return deb, "made.dict.dz: cannot be read: "
    elif kind == "index":
        def fill(tree):
            dictionary(tree, 9)
            (tree / "made.index").write_text("word1\tA\tB\nword2\tA\n")
        return package(tmp_path, "dict-index", fill), "made.index:2: wanted a headword, a place and a length"
    no_package = "is no whole Debian package: dpkg-deb: error: "
    return deb, {"half": no_package, "text": no_package, "empty": "is empty", "missing": "is missing"}[kind]


@pytest.mark.parametrize("kind", ["half", "text", "empty", "missing", "half a dictionary", "index", "nothing in it"])
def test_a_broken_package_is_one_line_and_leaves_nothing(made, tmp_path, kind):
    deb, words = damaged(made, tmp_path, kind)
    done = run(tmp_path, *([] if kind == "nothing in it" else [made[1][0]]), deb, "-o", "out")
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[0].startswith("error: ") and words in lines[0], done.stderr
    assert [line for line in lines[1:] if not line.startswith("  hint: ")] == [], done.stderr
    assert not (tmp_path / "out").exists()


def test_flags_that_leave_nothing_to_do_or_nowhere_to_write_are_refused(made, tmp_path):
    for fraction, side in ((1e-9, "val"), (1 - 1e-9, "train")):
        done = run(tmp_path, *made[1], "-o", "out", "--val-fraction", fraction)
        assert done.returncode == 1 and f"leaves none for {side}.bin" in done.stderr, done.stderr
    done = run(tmp_path, *made[1], "-o", made[1][0])
    assert done.returncode == 1 and done.stderr == f"error: {made[1][0]}: File exists\n", done.stderr
    for fraction in (0, 1, -1, "nan"):
        done = run(tmp_path, *made[1], "-o", "out", "--val-fraction", fraction)
        assert done.returncode == 2 and "--val-fraction must be between 0 and 1" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


APT_GET = """#!/bin/sh
echo "$*" >>"$CALLS"
lists=/dev/null
while [ "$1" = -o ]; do case $2 in Dir::State::lists=*) lists=${2#*=} ;; esac; shift 2; done
if [ "$1" = update ]; then : >"$lists/made"; exit; fi
if [ -n "$WANTED" ] && [ ! -e "$lists/made" ] || [ ! -e "$DEBS/$2_1.0_all.deb" ]; then
    echo "E: Unable to locate package $2" >&2
    exit 100
fi
cp "$DEBS/$2_1.0_all.deb" .
"""


def test_packages_are_fetched_also_by_another_s_name_and_with_lists_of_its_own(made, tmp_path, monkeypatch):
    program = tmp_path / "bin/apt-get"
    program.parent.mkdir()
    program.write_text(APT_GET)
    program.chmod(0o755)
    debs = tmp_path / "debs"
    debs.mkdir()
    package(debs, "dict-gcide", lambda tree: dictionary(tree, 900))
    package(debs, "linux-doc", depends="linux-doc-6.1 (= 1.0), other")
    monkeypatch.setenv("DEBS", str(debs))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("WANTED", "")
    done = run(tmp_path, "-o", "out", "--val-fraction", 0.25, path=program.parent)
    assert done.returncode == 1 and not (tmp_path / "out").exists(), done.stderr
    assert done.stderr == ("error: linux-doc-6.1: cannot download: E: Unable to locate package linux-doc-6.1\n"
                           "  hint: give the .deb files of dict-gcide and linux-doc as arguments\n")
    package(debs, "linux-doc-6.1", lambda tree: documentation(tree, 80))
    for wanted, updates in (("", 0), ("lists", 1)):
        monkeypatch.setenv("WANTED", wanted)
        (tmp_path / "calls").unlink()
        done = run(tmp_path, "-o", "out", "--val-fraction", 0.25, path=program.parent)
        assert done.returncode == 0, done.stderr
        calls = (tmp_path / "calls").read_text().splitlines()
        assert sum(call.endswith("update") for call in calls) == updates and len(calls) == 3 + 2 * updates, calls
        assert not any(call.endswith(" other") for call in calls)
        for name in ("train.jsonl", "val.jsonl", "train.bin"):  # the files of the two packages given by name
            assert (tmp_path / "out" / name).read_bytes() == (made[0] / "out/it" / name).read_bytes(), name
