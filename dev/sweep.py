#!/usr/bin/env python3
"""sweep.py --tokens N [--lr F...] [--total-batch N...] [--warmup F] [-o DIR] -- FLAGS: trains once for each rate and number of
tokens a step, with the trainer's other FLAGS and all on as many tokens. Prints the table of the losses at the end and draws it:

  dev/sweep.py --tokens 1e6 -- --model d3
  dev/sweep.py --tokens 1e6 --lr 5e-4 1e-3 2e-3 --total-batch 512 1024 2048 -- --model d3 --seq 256

Without --lr or --total-batch it takes half, once and twice of what a run of N tokens would have. DIR has a run in a folder of its
own for each place of the grid, with its screen.txt, and the picture sweep.png. The same command again continues after Ctrl-C or
a crash, and trains nothing twice; rates and batches may be added. It refuses other FLAGS, since the losses would not be
comparable. A loss is that of all of --val at the end, or without it the mean of the last tenth of the steps. FLAGS may change
that, with samples, too. A run whose loss is not finite has none."""
import argparse
import json
import math
import os
import re
import subprocess
import sys

from errors import ROOT  # see there

# before FLAGS: the dial's micro-batches differ, so --val-batches would count other rows in each run
PLAIN = "--val-every 0 --val-batches 1000000 --sample-tokens 0".split()
OWN = "--lr --total-batch --steps --epochs --minutes --warmup --out --resume --stop-after --patience".split()


def train(command, folder):
    """Trains to the end, or continues a run that stopped. Returns the loss, None if it is not finite."""
    os.makedirs(folder, exist_ok=True)
    if any(e["event"] == "end" and e["reason"] == "not finite" for e in read(folder)[-1:]):
        return None
    with open(os.path.join(folder, "screen.txt"), "a", encoding="utf-8") as screen:
        process = subprocess.Popen([*command, "--out", folder, "--resume", "--strict-resume"], stdin=subprocess.DEVNULL,
                                   stdout=screen, stderr=subprocess.PIPE, text=True)
        try:
            errors = process.communicate()[1]
        except KeyboardInterrupt:  # the trainer gets it, too, and saves its last step
            process.wait()
            raise
        screen.write(errors)
    events = read(folder)
    reason = events[-1]["reason"] if events and events[-1]["event"] == "end" else None
    if process.returncode < 0 or reason not in ("done", "not finite") or (reason == "done" and process.returncode):
        text = errors[errors.rfind("error: "):].strip() if "error: " in errors else f"error: {folder}: the run ended early"
        sys.exit(text.replace("without --strict-resume this is a warning", "-o takes another folder for other flags"))
    return None if reason == "not finite" else loss_of(events)


def chosen(command, tokens):
    """Returns the rate and the tokens of a step that a run of so many tokens would have."""
    def plan(epochs):
        done = subprocess.run([*command, "--epochs", f"{epochs:.9g}", "--dry-run"], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr.strip())
        batch, epoch = re.search(r"^plan .* of ([\d,]+) tokens \(.* of ([\d,]+) tokens$", done.stdout, re.M).groups()
        return float(re.search(r"\blr=(\S+)", done.stdout)[1]), int(batch.replace(",", "")), int(epoch.replace(",", ""))
    return plan(tokens / plan(1)[2])[:2]


def read(folder):
    path = os.path.join(folder, "log.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def loss_of(events):
    vals = [e["loss"] for e in events if e["event"] == "val"]
    steps = [e["loss"] for e in events if e["event"] == "step"]
    last = vals[-1:] or steps[-max(1, len(steps) // 10):]
    return sum(last) / len(last) if None not in last else None


def table(rates, batches, losses):
    """Returns a Markdown table: a rate a row, the tokens of a step a column. The lowest loss is bold."""
    best = min((loss for loss in losses.values() if loss is not None), default=math.inf)
    def cell(loss):
        return "not finite" if loss is None else f"**{loss:.4f}**" if loss == best else f"{loss:.4f} (+{loss / best - 1:.1%})"
    rows = [["rate", *(f"{batch:,} tokens" for batch in batches)], ["---"] * (1 + len(batches))]
    rows += [[f"{rate:g}", *(cell(losses[rate, batch]) for batch in batches)] for rate in rates]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def draw(rates, batches, losses, path):
    """Draws the loss by the rate, a line for each number of tokens a step."""
    import matplotlib  # here, since training needs none
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
    for i, batch in enumerate(batches):
        dots = [(rate, losses[rate, batch]) for rate in rates if losses[rate, batch] is not None]
        color, label = plt.cm.viridis(i / len(batches)), f"{batch:,} tokens a step"
        axis.plot([x for x, _ in dots], [y for _, y in dots], marker="o", color=color, label=label)
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.minorticks_off()
    axis.set_xlabel("highest learning rate")
    axis.set_ylabel("loss at the end")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lr", nargs="+", type=float, metavar="F", help="rates")
    p.add_argument("--total-batch", nargs="+", type=int, metavar="N", help="tokens of a step")
    p.add_argument("--tokens", type=float, required=True, metavar="N", help="tokens that each run trains on")
    p.add_argument("--warmup", type=float, default=0.05, metavar="F", help="fraction of the steps (0.05)")
    p.add_argument("-o", "--out", default="out/sweep", metavar="DIR", help="folder of the runs (out/sweep)")
    p.add_argument("--trainer", default=os.path.join(ROOT, "train_llama3"), metavar="PATH", help="./train_llama3 or another build")
    p.add_argument("flags", nargs="*", metavar="FLAGS", help="flags of the trainer, after --")
    a, other = p.parse_known_args()
    if other:
        p.error(f"{other[0]}: is no flag of the sweep; those of the trainer stand after --")
    taken = [flag for flag in a.flags if flag.split("=")[0].replace("_", "-") in OWN]
    if taken:
        p.error(f"{taken[0]}: the sweep sets this flag for each run")
    command, losses = [a.trainer, *PLAIN, *a.flags], {}
    lr, step = (0, 0) if a.lr and a.total_batch else chosen(command, a.tokens)
    rates = sorted(set(a.lr or [float(f"{lr * f:.2g}") for f in (0.5, 1, 2)]))
    batches = sorted(set(a.total_batch or [step // 2, step, 2 * step]))
    print(f"rates {', '.join(f'{rate:g}' for rate in rates)}; {', '.join(f'{batch:,}' for batch in batches)} tokens a step")
    if min(rates) <= 0 or min(batches) <= 0 or not 0 <= a.warmup <= 1 or a.tokens < max(batches):
        p.error("wanted rates and batches above 0, --warmup from 0 to 1, and --tokens for a step of each batch")
    for batch in batches:
        steps = int(a.tokens // batch)
        for rate in rates:
            own = f"--lr {rate:g} --total-batch {batch} --steps {steps} --warmup {round(a.warmup * steps)}".split()
            folder = os.path.join(a.out, f"lr_{rate:g}_batch_{batch}")
            print(f"rate {rate:g}, {batch:,} tokens a step, {steps:,} steps: ", end="", flush=True)
            losses[rate, batch] = loss = train([*command, *own], folder)  # the last of two flags counts
            print("not finite" if loss is None else f"{loss:.4f}", flush=True)
    text = table(rates, batches, losses)
    print("\n" + text)
    draw(rates, batches, losses, os.path.join(a.out, "sweep.png"))
    print(f"wrote {os.path.join(a.out, 'sweep.png')}")


if __name__ == "__main__":
    main()
