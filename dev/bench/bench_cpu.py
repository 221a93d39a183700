#!/usr/bin/env python3
"""bench_cpu.py -- compares a training step of ./train_llama3 with PyTorch's (train_llama3.py, eager and compiled) on this CPU.

    make train_llama3 && python3 dev/bench/bench_cpu.py [--torch-cpu OTHER_BASELINE.py]

Both start from the same model folder (dN, tied) and read the same random tokens; fp32, AdamW and clipping included. They
run in turns, in alternating order, so that a machine that warms up or slows down affects both. Step times come from each
run's log.jsonl, without the first three; memory is the peak resident size of the process (VmHWM).
sgemm is torch.mm in fp32 at the shapes of the model's products, on the same threads. It shows a library's matrix products
without the rest of a step. Its rates are GFLOP/s per core.
`ratio` divides our tokens/s by the faster PyTorch mode's, both medians. The ratio of the best steps depends least on other load
of the machine."""
import argparse
import dataclasses
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [ROOT, os.path.dirname(os.path.abspath(__file__))]
import dev.errors  # noqa: E402, F401  first: see there
import train_llama3 as ref  # noqa: E402
from dev.reference.config import preset  # noqa: E402
from bench_common import run, write_tokens  # noqa: E402


def step_times(out):
    """Returns the milliseconds of every step in OUT/log.jsonl."""
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as f:
        return [e["ms"] for e in map(json.loads, f) if e["event"] == "step"]


def sgemm(threads, c, tokens, seconds):
    """Returns the FLOPs of a step's matrix products and the seconds torch.mm takes, each product's best time in `seconds`."""
    def best(a, b):
        times, end = [], time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            ref.torch.mm(a, b)
            times.append(time.perf_counter() - start)
        return min(times)

    ref.torch.set_num_threads(threads)
    C, F, q, kv = c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    flop, total = 0, 0.0
    for times, width, out in ((c.num_hidden_layers, C, q + 2 * kv), (c.num_hidden_layers, q, C),
                              (c.num_hidden_layers, C, 2 * F), (c.num_hidden_layers, F, C), (1, C, c.vocab_size)):
        x, w, y = (ref.torch.randn(s) for s in ((tokens, width), (out, width), (tokens, out)))
        total += times * (best(x, w.T) + best(y, w) + best(y.T, x))  # forward, dx, dw
        flop += times * 6 * tokens * width * out
    return flop, total


class Side:
    """One contestant: its command and its measurements."""

    def __init__(self, name, command, env=None):
        self.name, self.command, self.env, self.ms, self.rss = name, command, env, [], 0

    def turn(self, folder, skip):
        out = os.path.join(folder, "out")
        shutil.rmtree(out, ignore_errors=True)
        _, rss = run(self.command + ["--out", out], self.env)
        self.ms += step_times(out)[skip:]
        self.rss = max(self.rss, rss)

    def median(self):
        return statistics.median(self.ms)


class Baseline(Side):
    """Another baseline script; it prints its best step as `min N ms`."""

    def turn(self, folder, skip):
        output, rss = run(self.command, self.env)
        self.ms.append(float(re.search(r"min ([\d.]+) ms", output).group(1)))
        self.rss = max(self.rss, rss)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--depth", type=int, nargs="+", default=[4, 6], help="depths N of the models dN (4 6)")
    p.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}),
                   help="numbers of threads (1 and all cores)")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--vocab", type=int, default=4096)
    p.add_argument("--steps", type=int, default=13, help="steps per turn; the first three do not count")
    p.add_argument("--turns", type=int, default=2, help="turns of each contestant")
    p.add_argument("--trainer", default=os.path.join(ROOT, "train_llama3"))
    p.add_argument("--torch-cpu", metavar="PATH", help="another PyTorch baseline that train_llama3.py must reach within 3 %%")
    a = p.parse_args()
    if not os.path.exists(a.trainer):
        sys.exit(f"error: {a.trainer}: not found\n  hint: make train_llama3")
    rows, fair, work = [], [], tempfile.mkdtemp()
    try:
        tokens = os.path.join(work, "tokens.bin")
        write_tokens(tokens, max(100_000, 4 * a.steps * a.batch * a.seq), a.vocab)
        for depth in a.depth:
            folder = os.path.join(work, f"d{depth}")
            c = dataclasses.replace(preset(f"d{depth}", a.vocab), tie_word_embeddings=True)
            model = ref.make_model(c)
            ref.init_weights(model, 42)
            ref.save_model(model, folder)
            flops, ntok = c.flops_per_token(a.seq) * a.batch * a.seq, a.batch * a.seq
            for threads in a.threads:
                flags = ["--model", folder, "--train", tokens, "--batch", a.batch, "--seq", a.seq, "--steps", a.steps,
                         "--threads", threads, "--warmup", 0, "--sample-tokens", 0]
                flags = [str(f) for f in flags]
                env = dict(os.environ, OMP_NUM_THREADS=str(threads), CUDA_VISIBLE_DEVICES="")
                script = [sys.executable, os.path.join(ROOT, "train_llama3.py")]
                sides = [Side("ours", [a.trainer] + flags, env), Side("eager", script + flags, env),
                         Side("compiled", script + flags + ["--compile"], env)]
                if a.torch_cpu:
                    other = [sys.executable, a.torch_cpu, "--depth", depth, "-T", a.seq, "-B", a.batch, "-V", a.vocab,
                             "--threads", threads, "--steps", a.steps]
                    other = [str(f) for f in other]
                    sides += [Baseline("other eager", other, env), Baseline("other compiled", other + ["--compile"], env)]
                for turn in range(a.turns):
                    for side in sides if turn % 2 == 0 else sides[::-1]:
                        side.turn(work, 3)
                ours, torch_best = sides[0], min(sides[1:3], key=Side.median)
                flop, seconds = sgemm(threads, c, ntok, 0.2)
                gemm, step = flop / seconds / 1e9 / threads, flops / min(ours.ms) / 1e6 / threads
                print(f"d{depth}, {threads} threads: our best step {step:.0f} GFLOP/s a core, sgemm alone {gemm:.0f} "
                      f"(torch.mm, fp32), ratio {step / gemm:.2f}", flush=True)
                rows.append([f"d{depth}", str(threads)])
                for side in sides:
                    ms = side.median() if not isinstance(side, Baseline) else min(side.ms)
                    cells = [f"{ms:.0f}", f"{ntok / ms * 1e3:,.0f}", f"{flops / ms / 1e6:.0f}", f"{side.rss / 2**20:.0f}"]
                    print(f"d{depth}, {threads} threads, {side.name:>14}: {cells[0]} ms (min {min(side.ms):.0f}), "
                          f"{cells[1]} tok/s, {cells[2]} GFLOP/s, {cells[3]} MiB", flush=True)
                    if side in (ours, torch_best):
                        rows[-1] += cells
                rows[-1] += [torch_best.name, f"{torch_best.median() / ours.median():.2f}",
                             f"{min(min(s.ms) for s in sides[1:3]) / min(ours.ms):.2f}", f"{step:.0f}", f"{gemm:.0f}"]
                if a.torch_cpu:
                    # ratio of the best steps, which depends least on other load of the machine
                    ratio = min(min(s.ms) for s in sides[3:]) / min(min(s.ms) for s in sides[1:3])
                    fair.append((depth, threads, ratio))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"\nB={a.batch}, T={a.seq}, V={a.vocab}, fp32, tied, AdamW and clipping included; PyTorch {ref.torch.__version__}\n")
    print("| model | threads | ours ms | tok/s | GFLOP/s | MiB | PyTorch ms | tok/s | GFLOP/s | MiB | its mode | ratio "
          "| of best steps | ours a core | sgemm a core |")
    print("|---" * 15 + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    for depth, threads, ratio in fair:
        print(f"train_llama3.py at d{depth}, {threads} threads: {ratio:.3f} x the speed of {os.path.basename(a.torch_cpu)}"
              + ("" if ratio >= 0.97 else ": more than 3 % behind"))


if __name__ == "__main__":
    main()
