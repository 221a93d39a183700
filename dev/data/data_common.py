"""Shared by the scripts of this folder: fetches a file and checks its size; runs ./tokenize on a text.

Standard library only. A script that fails prints an error to stderr (one line, maybe a hint) and exits with status 1: fail()
and dev/errors.py see to it.
"""
import http.client
import os
import struct
import subprocess
import sys
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DATA = os.path.join(ROOT, "dev", "data")
sys.path.insert(0, ROOT)
from dev.errors import fail  # noqa: E402

# the start of a token file (llmc/files/tokenfile.h): magic, version, tokens, vocabulary, tokens, fingerprint
HEADER = struct.Struct("<4iQQ")


def shown(path):
    """Returns the path as the user would type it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def copy_with_progress(source, target, total, path):
    got, last = 0, 0.0
    while block := source.read(1 << 20):
        target.write(block)
        got += len(block)
        if sys.stderr.isatty() and time.monotonic() - last > 0.2:
            last = time.monotonic()
            share = f" of {total / 1e6:,.1f} MB ({100 * got / total:.0f} %)" if total else " MB"
            print(f"\r{shown(path)}: {got / 1e6:,.1f}{share}   ", end="", file=sys.stderr, flush=True)
    if last:
        print(file=sys.stderr)
    return got


def download(url, path, size=None, hint=None):
    """Fetches url to path, unless a file of the right size exists. Checks the `size` in bytes, if it is known."""
    if os.path.exists(path) and (size is None or os.path.getsize(path) == size):
        print(f"{shown(path)}: already there ({os.path.getsize(path):,} bytes)")
        return
    partial = path + ".part"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            total = size or int(answer.headers.get("Content-Length") or 0)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(partial, "wb") as f:
                got = copy_with_progress(answer, f, total, path)
    except (OSError, http.client.HTTPException) as e:  # no network, no such page, disk full, lost connection
        if os.path.exists(partial):
            os.remove(partial)
        fail(f"{url}: cannot download: {getattr(e, 'reason', None) or e}", hint)
    if total and got != total:
        os.remove(partial)
        fail(f"{url}: sent {got:,} bytes, wanted {total:,}", hint)
    os.replace(partial, path)
    print(f"{shown(path)}: downloaded, {got:,} bytes")


def token_count(path):
    """Returns (tokens, vocabulary) of a token file that ./tokenize wrote."""
    with open(path, "rb") as f:
        _, _, _, vocab, count, _ = HEADER.unpack(f.read(HEADER.size))
    return count, vocab


def check_input(path):
    if not os.path.isfile(path):
        fail(f"{shown(path)}: is {'a folder' if os.path.isdir(path) else 'missing'}, wanted a file")
    if not os.path.getsize(path):
        fail(f"{shown(path)}: is empty, wanted text")


def tokenizer_or_bytes(given, folder):
    """Returns the tokenizer that is given, else folder/tokenizer.json, else None: the tokens are then bytes."""
    own = os.path.join(folder, "tokenizer.json")
    if given or os.path.exists(own):
        return given or own
    print("no --tokenizer given: every byte is a token")
    return None


def tokenize(tokenizer, source, target, val_fraction=None):
    """Runs ./tokenize on one file. Its messages go straight to the user."""
    program = os.path.join(ROOT, "tokenize")
    if not os.path.exists(program):
        fail(f"{shown(program)}: is missing", "build it with `make tokenize`")
    arguments = ["--tokenizer", tokenizer] if tokenizer else []
    if val_fraction is not None:
        arguments += ["--val-fraction", str(val_fraction)]
    sys.stdout.flush()
    code = subprocess.run([program, *arguments, "-o", target, source]).returncode
    if code != 0:
        sys.exit(code)


def report(shards, val, tokenizer):
    """Prints the names of the files, and the command that trains on them."""
    for path in [*shards, val]:
        count, vocab = token_count(path)
        print(f"{shown(path)}: {count:,} tokens of a vocabulary of {vocab:,}, {os.path.getsize(path):,} bytes")
    train = shown(shards[0]) if len(shards) == 1 else f"'{shown(shards[0])[: -len('000.bin')]}*.bin'"
    with_tokenizer = f" --tokenizer {shown(tokenizer)}" if tokenizer else ""
    print(f"train on it:\n  ./train_llama3 --model d4{with_tokenizer} --train {train} --val {shown(val)} --out out")
