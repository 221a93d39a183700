"""Turns the text of two Debian packages, 68 MB of mostly English, into token files: a dictionary (dict-gcide) and the kernel's
documentation (linux-doc).

    python3 dev/data/debian_text.py -o data/debian --archive data/debian.tar.xz
    python3 dev/data/debian_text.py dict-gcide_0.48.5+nmu2_all.deb linux-doc-6.1_6.1.192-2_all.deb -o data/debian

Without .deb files it downloads the packages with `apt-get download`, which needs no root. A document is a run of about 4 KB of
the dictionary's entries, or a .rst or .txt file. A document that is not UTF-8 text is dropped, and each text is kept once. The
hash of a document's text decides whether it is for validation. So the split needs no seed, and a document stays on its side
when others come or go. train.jsonl and val.jsonl hold the documents, and train.bin and val.bin the tokens. tokenizer.json is a
byte-level BPE, trained on the training text alone. --archive packs the last three for a machine without a network. The same
packages give the same bytes.

Needs dpkg-deb and ./tokenize (`make tokenize`).
"""
import argparse
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import string
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib

from data_common import ROOT, check_input, copy_with_progress, fail, shown, token_count, tokenize

PACKAGES = ["dict-gcide", "linux-doc"]
RUN_BYTES = 4096  # bytes of dictionary entries in a document: about a row of 1,024 tokens
VAL_TOKENS = 1 << 20  # wanted for validation: 64 batches of 16 x 1,024
STEPS, STEP_TOKENS = 5000, 16 * 1024  # steps, and tokens a step, of the run that reads the text


# --- the packages ---------------------------------------------------------------------------------------------------------


def run(command, **more):
    """Runs a command. Returns (status, stdout, the last line of stderr)."""
    done = subprocess.run(command, **{"stdout": subprocess.PIPE, **more}, stderr=subprocess.PIPE, text=True, errors="replace",
                          check=False)
    return done.returncode, done.stdout, (done.stderr.strip().splitlines() or ["no message"])[-1]


def field(deb, name):
    """Returns a field of a package's description."""
    check_input(deb)
    code, value, error = run(["dpkg-deb", "-f", deb, name])
    if code:
        fail(f"{shown(deb)}: is no whole Debian package: {error}")
    return value.strip()


def download_package(name, folder):
    """Fetches a package into the folder. Returns its path. If apt's lists of packages are missing or old, it fetches lists
    of its own, into the folder. apt-get shows its progress."""
    lists = os.path.join(folder, "lists")
    apt = ["apt-get", "-o", "APT::Sandbox::User="]  # no other user can write to the folder
    own = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={folder}"]
    sys.stdout.flush()
    code, _, error = run([*apt, *(own if os.path.exists(lists) else []), "download", name], cwd=folder, stdout=None)
    if code and not os.path.exists(lists):
        print(f"{name}: {error}: looks for it with new lists of packages", flush=True)
        os.makedirs(os.path.join(lists, "partial"))
        run([*apt, *own, "update"], stdout=None)
        code, _, _ = run([*apt, *own, "download", name], cwd=folder, stdout=None)
    found = glob.glob(os.path.join(folder, f"{name}_*.deb"))
    if code or not found:
        fail(f"{name}: cannot download: {error}", f"give the .deb files of {' and '.join(PACKAGES)} as arguments")
    return found[0]


def download_packages(folder):
    """Fetches the packages, and any package that only has a general name here (linux-doc stands for linux-doc-6.1)."""
    debs, names = [], list(PACKAGES)
    for name in names:
        debs.append(download_package(name, folder))
        needed = [part.split()[0] for part in field(debs[-1], "Depends").split(",") if part.strip()]
        names += [other for other in needed if other.startswith(name + "-") and other not in names]
    return debs


# --- documents ------------------------------------------------------------------------------------------------------------


def text_of(data):
    """Returns the text of bytes, without blanks around it; None if they are not UTF-8 text."""
    try:
        return None if 0 in data else data.decode("utf-8-sig").rstrip().strip("\n")
    except UnicodeDecodeError:
        return None


def read_maybe_packed(path):
    """Reads a file. It is unpacked with gzip if its name ends in .gz or .dz (dictzip, whose blocks can be found one by one)."""
    try:
        with (gzip.open if path.endswith((".gz", ".dz")) else open)(path, "rb") as f:
            return f.read()
    except (OSError, EOFError, zlib.error) as e:
        fail(f"{os.path.basename(path)}: cannot be read: {e}")


DIGITS = {c: i for i, c in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")}


def number(word):
    """Reads a number of dictd's index: base 64, the highest digit first."""
    value = 0
    for c in word:
        value = value * 64 + DIGITS[c]
    return value


def dictionary_documents(index):
    """Yields the texts of a dictionary of dictd in runs of entries, in the order of the file; None for an entry that is not
    text. A line of the index has a headword, and the start and length of its entry; several headwords may share an entry.
    Headwords 00-... describe the dictionary itself."""
    entries = set()
    with open(index, encoding="utf-8", errors="replace") as f:
        for count, line in enumerate(f, 1):
            try:
                word, start, length = line.rstrip("\n").split("\t")[:3]
                if not word.startswith("00-"):
                    entries.add((number(start), number(length)))
            except (ValueError, KeyError):
                fail(f"{os.path.basename(index)}:{count}: wanted a headword, a place and a length with tabs between them")
    data = read_maybe_packed(index[: -len(".index")] + ".dict.dz")
    texts, size = [], 0
    for start, length in sorted(entries):
        text = text_of(data[start : start + length])
        if not text:
            yield None
            continue
        texts.append(text)
        size += length
        if size >= RUN_BYTES:
            yield "\n\n".join(texts)
            texts, size = [], 0
    if texts:
        yield "\n\n".join(texts)


def folder_documents(folder):
    """Yields the texts of a folder's dictionaries and files; None for a file that is not text."""
    for here, below, names in os.walk(folder):
        below.sort()
        for name in sorted(names):
            path = os.path.join(here, name)
            if os.path.islink(path):
                continue
            if name.endswith(".index") and os.path.exists(path[: -len(".index")] + ".dict.dz"):
                yield from dictionary_documents(path)
            elif name.endswith((".rst", ".txt", ".rst.gz", ".txt.gz")):
                yield text_of(read_maybe_packed(path)) or None


def is_for_validation(key, fraction):
    """Returns whether a document is for validation, by the SHA-256 of its text."""
    return int.from_bytes(key[:8], "big") < fraction * 2**64


def read_package(deb, fraction, work, sides, seen):
    """Adds the documents of a package to {"train": [...], "val": [...]}, unless their hashes are in `seen`."""
    title, folder = f"{field(deb, 'Package')} {field(deb, 'Version')}", tempfile.mkdtemp(dir=work)
    print(f"{title}: unpacks it and reads its text", flush=True)
    code, _, error = run(["dpkg-deb", "-x", deb, folder])
    if code:
        fail(f"{shown(deb)}: is no whole Debian package: {error}")
    size = kept = twice = no_text = 0
    last = time.monotonic()
    for text in folder_documents(folder):
        if sys.stderr.isatty() and time.monotonic() - last > 0.2:
            last = time.monotonic()
            print(f"\r{size / 1e6:,.1f} MB   \r", end="", file=sys.stderr, flush=True)
        if text is None:
            no_text += 1
            continue
        data = text.encode()
        key = hashlib.sha256(data).digest()
        if key in seen:
            twice += 1
            continue
        seen.add(key)
        sides["val" if is_for_validation(key, fraction) else "train"].append(text)
        kept, size = kept + 1, size + len(data)
    shutil.rmtree(folder)
    print(f"{title}: {kept:,} documents, {size:,} bytes; left out: {twice:,} duplicates, "
          f"{no_text:,} that are not text")


def read_packages(debs, fraction, work):
    """Returns the documents {"train": [...], "val": [...]} of the packages, each text once."""
    sides, seen = {"train": [], "val": []}, set()
    for deb in debs:
        field(deb, "Package")  # a file that is not a package is refused before any is unpacked
    for deb in debs:
        read_package(deb, fraction, work, sides, seen)
    if not seen:
        fail(f"{' '.join(map(shown, debs))}: no documents, wanted a dictionary of dictd, or files .rst or .txt",
             "linux-doc has only the name of the package that holds its files: linux-doc-6.1")
    for side, texts in sides.items():
        if not texts:
            fail(f"--val-fraction: {fraction:g} of {len(seen):,} documents leaves none for {side}.bin")
    return sides


# --- token files ----------------------------------------------------------------------------------------------------------


def write_lines(texts, path):
    with open(path + ".part", "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    os.replace(path + ".part", path)


def write_archive(path, files):
    """Packs files with tar and xz, without times and owners."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as t:
        for file in files:
            info = tarfile.TarInfo(os.path.basename(file))
            info.size = os.path.getsize(file)
            with open(file, "rb") as f:
                t.addfile(info, f)
    tar.seek(0)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with lzma.open(path + ".part", "wb") as f:
        copy_with_progress(tar, f, len(tar.getbuffer()), path)
    os.replace(path + ".part", path)
    print(f"{shown(path)}: {os.path.getsize(path):,} bytes")


def print_table(sides, folder):
    """Prints the documents, bytes and tokens of each side, and how often the run reads its training tokens."""
    tokens = {side: token_count(os.path.join(folder, side + ".bin"))[0] for side in sides}
    print(f"{'':8}{'documents':>12}{'bytes':>14}{'tokens':>14}{'bytes/token':>13}{'share':>9}")
    for side, texts in sides.items():
        size = sum(len(text.encode()) for text in texts)
        print(f"{side:8}{len(texts):12,}{size:14,}{tokens[side]:14,}{size / tokens[side]:13.2f}"
              f"{100 * tokens[side] / sum(tokens.values()):7.2f} %")
    print(f"{STEPS:,} steps of {STEP_TOKENS:,} tokens read the training text {STEPS * STEP_TOKENS / tokens['train']:.2f} times")
    if tokens["val"] < VAL_TOKENS:
        print(f"note: val.bin has {tokens['val']:,} tokens, fewer than {VAL_TOKENS:,}: raise --val-fraction")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("debs", nargs="*", metavar="DEB", help="use these packages instead of the download")
    parser.add_argument("-o", "--out", default=os.path.join(ROOT, "data", "debian"), metavar="DIR",
                        help="folder to write to (default: data/debian)")
    parser.add_argument("--val-fraction", type=float, default=0.06, metavar="F",
                        help="fraction of the documents to validate on (default: %(default)s, which is a million tokens)")
    parser.add_argument("--vocab-size", type=int, default=32768, metavar="N",
                        help="number of tokens, including the special ones (default: %(default)s)")
    parser.add_argument("--archive", metavar="FILE", help="also pack train.bin, val.bin and tokenizer.json as FILE (.tar.xz)")
    args = parser.parse_args()
    if not 0 < args.val_fraction < 1:
        parser.error("--val-fraction must be between 0 and 1")
    for program in ("dpkg-deb", *([] if args.debs else ["apt-get"])):
        if not shutil.which(program):
            fail(f"{program} is not installed", "wanted a Debian or a relative of it")
    if not os.path.exists(os.path.join(ROOT, "tokenize")):
        fail("./tokenize is missing", "build it with `make tokenize`")

    with tempfile.TemporaryDirectory() as work:
        sides = read_packages(args.debs or download_packages(work), args.val_fraction, work)
    os.makedirs(args.out, exist_ok=True)
    lines = {side: os.path.join(args.out, side + ".jsonl") for side in sides}
    tokenizer = os.path.join(args.out, "tokenizer.json")
    files = [tokenizer, *(os.path.join(args.out, side + ".bin") for side in sides)]
    for file in files:  # the files of an earlier text must not mix with this one
        if os.path.exists(file):
            os.remove(file)
    for side, texts in sides.items():
        write_lines(texts, lines[side])
    print("trains the tokenizer", flush=True)
    code = subprocess.run([os.path.join(ROOT, "tokenize"), "--train-bpe", str(args.vocab_size), "-o", shown(tokenizer),
                           shown(lines["train"])], check=False).returncode
    if code:
        sys.exit(code)
    for side in sides:
        tokenize(tokenizer, lines[side], os.path.join(args.out, side + ".bin"))
    print_table(sides, args.out)
    if args.archive:
        write_archive(args.archive, files)
    print(f"train on it:\n  ./train_llama3 --model d12 --tokenizer {shown(tokenizer)} --train {shown(files[1])} "
          f"--val {shown(files[2])} --out out")


if __name__ == "__main__":
    try:
        main()
    except OSError as e:  # such as a full disk
        fail(f"{shown(e.filename)}: {e.strerror}" if e.filename else f"cannot write: {e.strerror}")
