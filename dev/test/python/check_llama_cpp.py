#!/usr/bin/env python3
"""check_llama_cpp.py FOLDER TEXT... -- compares --export with llama.cpp. Run it by hand: it needs `pip install
llama-cpp-python`, which compiles.

    python3 dev/test/python/check_llama_cpp.py out/mine some.txt     prints a table; exits with 1 if a line of it fails

Exports FOLDER as F32 and as Q8_0 and opens both with llama.cpp. Checks that
  - llama.cpp cuts each text file into the ids of ./tokenize,
  - F32 continues a prompt greedily by the same 80 tokens, or up to the first near tie (two logits within 1e-4),
  - F32 gives the loss of --eval within 1e-3 of it, and Q8_0 within 1 %, over the first rows of the texts.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.insert(0, ROOT)
import dev.errors  # noqa: E402, F401  first: see there
import numpy as np  # noqa: E402
from llama_cpp import Llama  # noqa: E402

TRAINER, TOKENIZE = os.path.join(ROOT, "train_llama3"), os.path.join(ROOT, "tokenize")
TIE = 1e-4


def run(*command, text=None):
    r = subprocess.run([str(c) for c in command], input=text, capture_output=True, check=False)
    if r.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {r.stderr.decode()}")
    return r.stdout


def open_model(path, context, batch):
    return Llama(model_path=path, n_ctx=context, n_batch=batch, n_ubatch=batch, logits_all=True, verbose=False)


def ids_of(folder, text):
    line = json.dumps({"text": text}) + "\n"
    return json.loads(run(TOKENIZE, "--tokenizer", folder, "--jsonl", text=line.encode()))["ids"]


def check_ids(model, folder, paths):
    """Returns (ids compared, first difference or None)."""
    count = 0
    for path in paths:
        with open(path, encoding="utf-8") as f:
            text = f.read()
        ours = ids_of(folder, text)
        theirs = model.tokenize(text.encode(), add_bos=False, special=False)
        count += len(ours)
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            return count, f"{path}: id {at} is {ours[at:at + 3]}, llama.cpp has {theirs[at:at + 3]}"
    return count, None


def check_greedy(model, folder, prompt, tokens=80):
    """Returns (what happened, whether it is right)."""
    ours = run(TRAINER, "--model", folder, "--generate", prompt, "--temperature", 0, "--tokens", tokens)
    ids = model.tokenize(prompt.encode(), add_bos=True, special=False)
    model.reset()
    text, gap = b"", 0.0
    for step in range(tokens):
        model.eval(ids if step == 0 else ids[-1:])
        logits = model.scores[model.n_tokens - 1]
        first, second = np.sort(logits)[[-1, -2]]
        best, gap = int(np.argmax(logits)), first - second
        if best == model.token_eos():
            break
        ids = ids + [best]
        piece = model.detokenize([best], special=True)
        if not (prompt.encode() + text + piece == ours[:len(prompt.encode() + text + piece)]):
            return f"differs at token {step}, where two logits are {gap:.1e} apart", gap <= TIE
        text += piece
    return f"{step + 1} tokens equal", True


def loss_of(model, path, seq, rows):
    """Returns the mean loss over the first rows of a token file."""
    words = np.fromfile(path, dtype=np.int32, count=256)
    tokens = np.fromfile(path, dtype=np.uint16 if words[0] == 20240520 else np.uint32, offset=1024).astype(np.int64)
    total = 0.0
    for r in range(rows):
        row = tokens[r * seq:r * seq + seq + 1]
        model.reset()
        model.eval(row[:-1].tolist())
        logits = model.scores[:seq].astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        total += (log_sum - logits[np.arange(seq), row[1:]]).sum()
    return total / (rows * seq)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", help="a model folder, or a folder of checkpoints")
    p.add_argument("texts", nargs="+", help="text files")
    p.add_argument("--prompt", default="Once upon a time")
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--rows", type=int, default=16)
    a = p.parse_args()
    work = tempfile.mkdtemp()
    plain, small, clean, data = (os.path.join(work, n) for n in ("f32.gguf", "q8.gguf", "clean", "data.bin"))
    run(TRAINER, "--model", a.folder, "--export", clean, "--export-dtype", "f32")
    run(TRAINER, "--model", clean, "--export", plain)
    run(TRAINER, "--model", clean, "--export", small, "--export-dtype", "q8_0")
    run(TOKENIZE, "--tokenizer", clean, "-o", data, *a.texts)
    lines = []
    model = open_model(plain, 2 * a.seq, a.seq)
    count, difference = check_ids(model, clean, a.texts)
    lines.append((difference is None, f"ids      {difference or f'{count} equal'}"))
    happened, good = check_greedy(model, clean, a.prompt)
    lines.append((good, f"greedy   {happened}"))
    screen = run(TRAINER, "--model", clean, "--eval", "--val", data, "--batch", 1, "--seq", a.seq, "--val-batches", a.rows)
    ours = float(screen.decode().split("loss ")[1].split()[0])
    # Q8_0 runs token by token: on a CPU with AMX llama-cpp-python 0.3.36 crashed on Q8_0 products of several rows
    for name, limit, m in (("F32", 1e-3, model), ("Q8_0", 1e-2, open_model(small, 2 * a.seq, 1))):
        theirs = loss_of(m, data, a.seq, a.rows)
        lines.append((abs(theirs / ours - 1) <= limit,
                      f"loss     {name} {theirs:.6f}, --eval {ours:.6f}: {theirs / ours - 1:+.1e}"))
    print(f"{a.folder}, {os.path.getsize(plain):,} and {os.path.getsize(small):,} bytes as F32 and Q8_0")
    for good, line in lines:
        print(("ok   " if good else "FAIL ") + line)
    sys.exit(not all(good for good, _ in lines))


if __name__ == "__main__":
    main()
