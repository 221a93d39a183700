#!/usr/bin/env python3
"""gpu_pairs.py -- writes larger pairs of model and debug state than the committed ones from seeds, and checks them.

    python3 dev/test/gpu/gpu_pairs.py --trainer ./test_llama3cu [--trainer ./test_llama3 ...] [--cases WORD ...] [--seeds N ...]
                                 [--out DIR]
    python3 dev/test/gpu/gpu_pairs.py --gap MODEL PROMPT A.txt B.txt      do two greedy texts first differ at a tie?

The cases cover every head_dim with its own kernel (and odd ones), all group sizes, odd vocabulary sizes, and T of one token,
one tile and many tiles. They also cover tied and untied heads, RoPE without scaling and with factors 8 and 32, and rows of
documents. The seeds are fixed, not selected: each case is written for seeds 1, 2 and 3, with the default learning rate. PyTorch
computes in fp32 on the CPU, where TF32 is impossible. Its 16-bit runs use a GPU where one exists. Prints "ok" or "FAIL" for
each pair and program; exits with 0 if all pass. --out without --trainer only writes.
"""
import argparse
import concurrent.futures as futures
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.insert(0, ROOT)
import dev.errors  # noqa: E402, F401  first: see there
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import train_llama3 as ref  # noqa: E402
from dev.reference import oracles  # noqa: E402
from dev.reference.config import Config  # noqa: E402

# name: heads, kv heads, head_dim, vocabulary, width, ffn, layers, B, T, tied, RoPE factor (0: unscaled)
CASES = {
    "hd10_groups1": (2, 2, 10, 97, 32, 136, 1, 3, 17, False, 0),
    "hd12_groups2_tied": (4, 2, 12, 301, 40, 64, 2, 2, 200, True, 8),
    "hd16_groups4": (8, 2, 16, 97, 32, 88, 2, 2, 256, False, 32),
    "hd64_all_heads_share": (4, 1, 64, 301, 64, 136, 2, 1, 1000, True, 32),
    "hd64_large_vocabulary": (2, 2, 64, 50257, 64, 136, 1, 1, 200, False, 0),
    "hd64_groups2": (4, 2, 64, 97, 48, 136, 2, 3, 256, False, 8),
    "hd64_many_tokens": (8, 2, 64, 97, 64, 136, 1, 5, 1000, False, 0),
    "hd96_all_heads_share": (4, 1, 96, 97, 48, 136, 2, 2, 200, True, 0),
    "hd128_groups2": (4, 2, 128, 301, 64, 136, 2, 2, 256, False, 8),
    "hd128_groups1_tied": (4, 4, 128, 97, 40, 136, 1, 1, 1000, True, 32),
    "hd128_groups4_large_vocabulary": (12, 3, 128, 50257, 48, 88, 1, 3, 17, True, 8),
    "hd128_all_heads_share": (8, 1, 128, 97, 64, 136, 2, 3, 17, False, 0),
    "hd256_groups2": (2, 1, 256, 97, 64, 136, 2, 1, 200, False, 8),
    "hd256_groups1_tied": (4, 4, 256, 301, 64, 136, 1, 2, 17, True, 0),
    "one_token_hd64": (2, 1, 64, 301, 48, 136, 2, 4, 1, True, 32),
    "one_token_hd16": (4, 4, 16, 97, 32, 136, 1, 4, 1, False, 0),
    "hd64_fp8": (4, 2, 64, 301, 64, 144, 2, 2, 256, False, 8),  # these three fit --fp8
    "hd128_fp8": (4, 1, 128, 97, 96, 176, 2, 2, 200, True, 0),
    "hd64_fp8_head": (4, 2, 64, 304, 64, 144, 2, 2, 256, False, 8),  # and --fp8-head
    "hd12_documents": (4, 2, 12, 97, 40, 64, 2, 3, 200, False, 8),
    "hd64_documents": (4, 2, 64, 301, 48, 136, 2, 2, 1000, False, 8),
    "hd128_documents": (4, 1, 128, 97, 64, 136, 2, 2, 400, True, 0),
    "tiny_hd12": (2, 1, 12, 97, 40, 72, 1, 1, 70, False, 8),
    "tiny_hd64": (2, 1, 64, 97, 40, 72, 1, 1, 70, False, 8),
    "tiny_hd128": (2, 1, 128, 97, 40, 72, 1, 1, 70, True, 8),
}
LONGEST = {"hd12_documents": 60, "hd64_documents": 300, "hd128_documents": 130}  # document of a row
STEPS = 4


def config(case):
    heads, kv, hd, vocab, width, ffn, layers, _, T, tied, factor = case
    c = Config(vocab_size=vocab, hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers,
                   num_attention_heads=heads, num_key_value_heads=kv, head_dim=hd, rms_norm_eps=1e-5, tie_word_embeddings=tied)
    if factor:  # the original length below T, so that the factor shows
        c.rope_type, c.factor, c.rope_theta = "llama3", float(factor), 500000.0
        c.original_max_position_embeddings = max(8, T // 4)
    return c


def documents(name, B, T, seed):
    """Returns the lengths of random documents that fill each of B rows of T tokens; None if the case has none."""
    if name not in LONGEST:
        return None
    generator, rows = random.Random(seed), []
    for _ in range(B):
        row = []
        while sum(row) < T:
            row.append(min(generator.randint(1, LONGEST[name]), T - sum(row)))
        rows.append(row)
    return rows


def make_exact_zeros(path):
    """Zeroes the gradients of q and k, which at T = 1 are rounding errors: a softmax over one key does not depend on them."""
    with safe_open(path, framework="pt") as f:
        tensors, meta = {name: f.get_tensor(name) for name in f.keys()}, f.metadata()
    for name in tensors:
        if name.startswith("grad.") and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name].zero_()
            meta = {k: v for k, v in meta.items() if not k.endswith("_error." + name[5:])}
    save_file(tensors, path, metadata=meta)


def write_case(out, name, seed):
    """Writes the pair NAME_sSEED and returns its name."""
    torch.set_num_threads(1)
    B, T = CASES[name][7:9]
    pair = f"{name}_s{seed}"
    model = ref.make_model(config(CASES[name]))
    oracles.init_telling(model, seed, embedding_std=0.1)
    ref.save_model(model, os.path.join(out, pair))
    path = os.path.join(out, pair + ".state.safetensors")
    # a weight decay large enough to show
    oracles.write_state(model, path, B, T, 1 if name.startswith("tiny") else STEPS, seed, weight_decay=2.0,
                    device_16bit="cuda" if torch.cuda.is_available() else "cpu", documents=documents(name, B, T, seed))
    if T == 1:
        make_exact_zeros(path)
    return pair


def check_pair(out, pair, trainer, limit):
    command = [trainer, os.path.join(out, pair), os.path.join(out, pair + ".state.safetensors")]
    try:
        r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                           timeout=limit)
    except subprocess.TimeoutExpired:
        return [f"no end after {limit} s"]
    lines = r.stdout.splitlines()
    if r.returncode == 0 and lines and " 0 failed" in lines[-1]:
        return []
    wrong, heading = [], ""
    for line in lines:
        if line.startswith("  FAIL"):
            wrong += [heading] * (heading not in wrong) + [line]
        elif not line.startswith("  "):
            heading = line.replace(out + os.sep, "").split(",")[0]
    return wrong or [f"exit code {r.returncode}"] + lines[-4:]


def gap(model_dir, prompt, a_path, b_path):
    """Checks two greedy texts, byte tokenizer: where they first differ, the two best logits must differ by less than 1e-4."""
    a, b = (open(p, "rb").read() for p in (a_path, b_path))
    at = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), None)
    if at is None:
        sys.exit(f"error: one text has {len(a)} bytes and the other {len(b)}" if len(a) != len(b) else 0)
    start = b"" if a.startswith(prompt.encode()) else prompt.encode()
    model = ref.load_model(model_dir)
    ids = torch.tensor([[256, *start, *a[:at]]])
    with torch.no_grad():
        best = model.set_context(ids.shape[1], torch.device("cpu")).logits(ids)[0, -1].topk(2)
    distance = (best.values[0] - best.values[1]).item()
    print(f"the texts differ from byte {at} on, where the two best logits differ by {distance:.2e}")
    sys.exit(0 if distance < 1e-4 else 1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trainer", action="append", default=[], help="test program to check; may be repeated")
    p.add_argument("--cases", nargs="+", default=[""], metavar="WORD", help="only cases whose name contains a WORD")
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="seeds of weights and tokens (1 2 3)")
    p.add_argument("--out", help="folder to write to; default: a temporary folder")
    p.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="number of pairs in parallel")
    p.add_argument("--limit", type=int, default=120, help="time limit in seconds for one pair and program")
    p.add_argument("--gap", nargs=4, metavar=("MODEL", "PROMPT", "A", "B"))
    a = p.parse_args()
    if a.gap:
        gap(*a.gap)
    names = [n for n in CASES if any(word in n for word in a.cases)]
    if not names:
        sys.exit(f"error: --cases: no case matches {' '.join(a.cases)}, wanted part of one of {', '.join(CASES)}")
    temporary = None if a.out else tempfile.TemporaryDirectory()
    out = os.path.abspath(a.out or temporary.name)
    os.makedirs(out, exist_ok=True)
    failed = 0
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with futures.ProcessPoolExecutor(a.jobs, spawn) as writers, futures.ThreadPoolExecutor(a.jobs) as checkers:
        written = [writers.submit(write_case, out, name, seed) for name in names for seed in a.seeds]
        checks = {}
        for w in futures.as_completed(written):
            pair = w.result()
            for trainer in a.trainer:
                checks[checkers.submit(check_pair, out, pair, os.path.abspath(trainer), a.limit)] = pair, trainer
        for c in futures.as_completed(checks):
            pair, trainer = checks[c]
            wrong = c.result()
            failed += bool(wrong)
            print(f"{'FAIL' if wrong else 'ok  '} {pair}: {trainer}", flush=True)
            for line in wrong[:12]:
                print(f"    {line}")
    print(f"{len(checks) - failed} passed, {failed} failed, 0 skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
