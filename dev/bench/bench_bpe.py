#!/usr/bin/env python3
"""bench_bpe.py -- trains tokenizers with ./tokenize --train-bpe, `tokenizers` and `rustbpe`, in turns, and prints the table.

    python3 dev/bench/bench_bpe.py data/debian/train.jsonl                # any .jsonl with a field `text`, or a text
    python3 dev/bench/bench_bpe.py --make made.txt                        # writes 2e9 characters: see made_text()
    python3 dev/bench/bench_bpe.py made.txt --sizes 32768 --threads 2 --ours

All get the same documents, pattern, vocabulary size and threads; each turn is a process of its own. Theirs are timed inside,
from documents in memory on; ours is the whole program, file to file. `cpu` adds up the processor seconds of all threads, which
other work on the machine changes least; `wall` counts on a quiet machine alone. The table has the least of all turns, and the
highest peak memory of the process; theirs holds the documents, which are subtracted. A trainer that is not installed is skipped
and named.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
from dev.errors import fail  # noqa: E402

WORDS, CHARACTERS = 8_000_000, 2_000_000_000
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def made_text(path, characters):
    """Writes words of syllables; rank r occurs in proportion to 1 / r. 2e9 characters have 11.6 million distinct pieces."""
    import numpy as np
    syllables = np.array([list((c + v).encode()) for c in "bcdfghjklmnpqrstvwxyz" for v in "aeiou"], np.uint8)
    words = np.zeros((WORDS, 10), np.uint8)  # up to four syllables, then a space, or a full stop and a newline
    ranks = np.arange(WORDS)
    for column in range(0, 8, 2):
        words[ranks > 0, column:column + 2] = syllables[ranks[ranks > 0] % len(syllables)]
        ranks //= len(syllables)
    words[:, 8] = ord(" ")
    rng, written = np.random.default_rng(1), 0
    with open(path, "wb") as f:
        while written < characters:
            some = words[(WORDS ** rng.random(1_200_000)).astype(np.int64)]
            some[11::12, 8:] = list(b".\n")
            written += f.write(some[some > 0].tobytes()[:characters - written])


def documents(path):
    with open(path, encoding="utf-8-sig", newline="") as f:
        return [json.loads(line)["text"] for line in f if line.strip()] if path.endswith(".jsonl") else [f.read()]


def peak(who):
    return resource.getrusage(who).ru_maxrss / 1024


def train_theirs(name, path, size):
    """Trains in this process. Prints wall seconds, processor seconds and MiB."""
    if name == "tokenizers":
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        trainer = trainers.BpeTrainer(vocab_size=size - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                      show_progress=False)

        def train(texts):
            tok.train_from_iterator(texts, trainer)
    else:
        import rustbpe

        def train(texts):
            rustbpe.Tokenizer().train_from_iterator(iter(texts), size - 2, pattern=PATTERN)
    texts = documents(path)
    before, start, cpu = peak(resource.RUSAGE_SELF), time.perf_counter(), time.process_time()
    train(texts)
    print(time.perf_counter() - start, time.process_time() - cpu, peak(resource.RUSAGE_SELF) - before)


def one_turn(name, path, size, threads):
    """Trains once in a process of its own; returns (wall, cpu, MiB)."""
    env = {**os.environ, "RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    if name != "tokenize":
        done = subprocess.run([sys.executable, __file__, path, "--theirs", name, "--sizes", str(size)], env=env, check=True,
                              stdout=subprocess.PIPE)
        return tuple(map(float, done.stdout.split()))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        p = subprocess.Popen([os.path.join(ROOT, "tokenize"), "--train-bpe", str(size), "--threads", str(threads), "-o",
                              os.path.join(folder, "tokenizer.json"), path], env=env, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
        if p.returncode:
            fail("./tokenize failed")
        return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def installed(name):
    if name == "tokenize":
        return os.path.exists(os.path.join(ROOT, "tokenize")) or fail("./tokenize is missing", "make tokenize")
    code = f"from importlib.metadata import version; import {name}; print(version({name!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    print(f"{name} {done.stdout.strip()}" if done.returncode == 0 else f"skip {name}: it is not installed", flush=True)
    return done.returncode == 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("text", nargs="?", help="a text, or a .jsonl with a field `text`")
    p.add_argument("--sizes", type=int, nargs="+", default=[1000, 8192, 32768], metavar="N", help="vocabulary sizes")
    p.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each trainer (default %(default)s)")
    p.add_argument("--turns", type=int, default=3, metavar="N", help="turns of each trainer and size (default %(default)s)")
    p.add_argument("--ours", action="store_true", help="measure ./tokenize alone")
    p.add_argument("--make", metavar="FILE", help="write the made text and end")
    p.add_argument("--characters", type=int, default=CHARACTERS, metavar="N", help="of the made text (default %(default)s)")
    p.add_argument("--theirs", help=argparse.SUPPRESS)
    args = p.parse_intermixed_args()
    if args.make:
        return made_text(args.make, args.characters)
    if not args.text:
        p.error("wanted a text, or --make FILE")
    if args.theirs:
        return train_theirs(args.theirs, args.text, args.sizes[0])
    names = [name for name in (["tokenize"] if args.ours else ["tokenize", "tokenizers", "rustbpe"]) if installed(name)]
    print(f"{args.text}: {os.path.getsize(args.text):,} bytes, {args.threads} threads, {args.turns} turns, load "
          f"{os.getloadavg()[0]:.1f}\n{'tokens':>8} {'trainer':<11} {'wall s':>8} {'cpu s':>8} {'MiB':>7} {'cpu / ours':>11}")
    for size in args.sizes:
        turns = {name: [] for name in names}
        for _ in range(args.turns):
            for name in names:
                turns[name].append(one_turn(name, args.text, size, args.threads))
        for name in names:
            wall, cpu, _ = map(min, zip(*turns[name]))
            ratio = cpu / min(turn[1] for turn in turns["tokenize"])
            most = max(turn[2] for turn in turns[name])
            print(f"{size:8,} {name:<11} {wall:8.2f} {cpu:8.2f} {most:7,.0f} {ratio:11.1f}", flush=True)


if __name__ == "__main__":
    main()
