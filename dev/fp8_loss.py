#!/usr/bin/env python3
"""fp8_loss.py -- trains twice from each seed, in BF16 and with --fp8, and writes a page of how far the losses are apart.

    make train_llama3cu tokenize && python dev/data/debian_text.py -o data/debian
    python dev/fp8_loss.py --train data/debian/train.bin --val data/debian/val.bin
    python dev/fp8_loss.py --train data/debian/train.bin --val data/debian/val.bin --model llama3.2-1b --seq 2048 \\
        --steps 500 --val-every 50 --seeds 1 --out out/fp8-1b

Both runs of a seed start from the same weights and see the same tokens in the same order. With L the loss of the validation
after the last step, the difference is 100 (L(fp8) / L(bf16) - 1), in per cent. The goals:

    each seed  |fp8 - bf16| is at most 0.5 % of bf16's loss
    mean       |fp8 - bf16| of the mean losses over the seeds is at most 0.25 % of bf16's mean, or what the bf16 seeds differ by
               themselves (largest - smallest), if that is more

OUT/loss.md holds these, the largest shares of values that --fp8 flushed to zero or made subnormal (the log's "quantised"), and
a picture of the losses and their difference (dev/plot.py). It is written at the start and whenever a run has ended. Exits with
1 if a run failed: its last lines are printed, and the others still run.

OUT/NAME-SEED keeps a run's log.jsonl, to which this script adds the commit, and what it printed; its checkpoint is deleted.
Nothing starts where another checkpoint lies. A run that is there whole, by the same command and commit, is not run again. Each
visible card (CUDA_VISIBLE_DEVICES, else all) has one run at a time. A signal ends the trainers, too, within a minute.

--sides compares other flags. This tries the script without a card, in seconds:

    make train_llama3 && python dev/fp8_loss.py --trainer ./train_llama3 --sides fp32= other=--eps=1e-3 --model d2 --batch 2 \\
        --seq 32 --steps 20 --train data/debian/train.bin --val data/debian/val.bin --out out/try
"""
import argparse
import glob
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "dev", "data"))
from data_common import check_input, fail, token_count  # noqa: E402

SEED_LIMIT, MEAN_LIMIT = 0.5, 0.25  # per cent
PROGRESS, STOP_SECONDS = 10, 60  # between lines of progress; that trainers have to save and end
SHAPE = {"model": "d12", "batch": 16, "seq": 1024, "steps": 5000, "lr": 6e-4, "warmup": 200, "val-every": 250,
         "val-batches": 64}  # the trainer's flags, and what they are here unless they are given
FIXED = ["--sample-tokens", "0", "--checkpoint-minutes", "0"]


def output(*command):
    """Returns what a command prints, without the last newline; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- runs -----------------------------------------------------------------------------------------------------------------


class Run:
    """A run of the trainer in a folder of its own. error: how it failed, or None."""

    def __init__(self, a, side, seed):
        self.name, self.seed, self.error, self.process = f"{side}-{seed}", seed, None, None
        self.folder, self.commit = os.path.join(a.out, self.name), a.commit
        self.screen, self.log = (os.path.join(self.folder, name) for name in ("screen.txt", "log.jsonl"))
        shape = [word for key in SHAPE for word in (f"--{key}", str(getattr(a, key.replace("-", "_"))))]
        self.command = [a.trainer, *shape, "--train", a.train, "--val", a.val, "--seed", str(seed), *FIXED,
                        *a.sides[side], "--out", self.folder]

    def events(self, kind):
        """Returns the events of a kind in its log, as far as that is written; none where there is no log."""
        try:
            with open(self.log, encoding="utf-8") as f:
                return [e for e in (json.loads(line) for line in f if line.endswith("\n")) if e["event"] == kind]
        except FileNotFoundError:
            return []

    def loss(self):
        """Returns the loss of the validation after the last step; None where that is none, or this log is not whole."""
        config, ends, vals, commits = (self.events(kind) for kind in ("config", "end", "val", "commit"))
        whole = config and config[0]["argv"] == self.command and ends and ends[-1]["reason"] == "done"
        return vals[-1]["loss"] if whole and vals and commits and commits[-1]["commit"] == self.commit else None

    def checkpoints(self):
        return set(glob.glob(os.path.join(glob.escape(self.folder), "step_*")))

    def start(self, card):
        os.makedirs(self.folder, exist_ok=True)
        self.others = self.checkpoints()
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": card} if card else {})}
        with open(self.screen, "w", encoding="utf-8") as screen:
            self.process = subprocess.Popen(self.command, env=environment, stdout=screen, stderr=subprocess.STDOUT)

    def finish(self):
        """Deletes the checkpoints that a run which has ended wrote, logs its commit, and returns how it ended."""
        for checkpoint in self.checkpoints() - self.others:
            shutil.rmtree(checkpoint)
        if self.process.returncode == 0:
            with open(self.log, "a", encoding="utf-8") as f:
                f.write(json.dumps({"event": "commit", "commit": self.commit}) + "\n")
        loss = self.loss()
        if loss is not None:
            return f"{self.name}: validation {loss:.4f}"
        with open(self.screen, encoding="utf-8", errors="replace") as f:
            last = [line.rstrip() for line in f][-5:]
        self.error = "\n".join([f"{self.name}: failed with status {self.process.returncode}", *last])
        return self.error

    def progress(self):
        last = (self.events("step") or [None])[-1]
        return f"{self.name}: " + (f"step {last['step']:,}, loss {last['loss'] or math.nan:.4f}" if last else "no step yet")


def visible_cards():
    """Returns the names of the cards, or [None] where none is known: one run at a time, with the environment as it is."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")  # [""] where it is empty, which stays as it is, too
    return output("nvidia-smi", "--query-gpu=index", "--format=csv,noheader").split() or [None]


def end(processes, seconds):
    """Tells all processes to end at once, waits for them, and kills those that are left after these seconds."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.1)
    for process in processes:
        process.kill()  # does nothing to one that has ended
        process.wait()


def run_all(runs, cards, ended, signals):
    """Runs them in their order, one on each card at a time, until signals has one. Calls ended() after each."""
    waiting, running, last = list(runs), {}, time.monotonic()
    try:
        while (waiting or running) and not signals:
            for card in cards:
                if waiting and card not in running:
                    run = waiting.pop(0)
                    run.start(card)
                    running[card] = run
                    print(f"{run.name}: starts{f' on card {card}' if card else ''}", flush=True)
            time.sleep(0.2)
            for card in [card for card, run in running.items() if run.process.poll() is not None]:
                print(running.pop(card).finish(), flush=True)
                ended()
            if time.monotonic() - last > PROGRESS:
                last = time.monotonic()
                print("".join(run.progress() + "\n" for run in running.values()), end="", flush=True)
    finally:  # a signal, or an error here
        end([run.process for run in running.values()], STOP_SECONDS)
        print("".join(run.finish() + "\n" for run in running.values()), end="", flush=True)  # a closed stdout hinders no other


# --- the page -------------------------------------------------------------------------------------------------------------


def percent(value, base):
    return 100 * (value / base - 1)


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows), ""]


def verdicts(base, bases, others):
    """Returns a line for each goal, by the losses of the two sides. One seed has no mean."""
    farthest = max(abs(percent(*pair)) for pair in zip(others, bases))
    found = [(farthest <= SEED_LIMIT, f"by seed: at most {farthest:.3f} %, wanted at most {SEED_LIMIT} %")]
    if len(bases) > 1:
        mean, own = percent(sum(others), sum(bases)), 100 * (max(bases) - min(bases)) / statistics.mean(bases)
        found.append((abs(mean) <= max(MEAN_LIMIT, own), f"mean: {mean:+.3f} %, wanted at most {max(MEAN_LIMIT, own):.3f} % "
                      f"(the larger of {MEAN_LIMIT} % and {own:.3f} %, by which the seeds of {base} are apart)"))
    return [f"- {'reached' if reached else '**missed**'}, {text}" for reached, text in found]


def losses(sides, pairs):
    """Returns the table of the last validations of pairs of runs, and what it says of the goals."""
    base, other = sides
    found = [[run.loss() for run in pair] for pair in pairs]
    if len(pairs) > 1:
        found.append([statistics.mean(side) for side in zip(*found)])
    names = [str(run.seed) for run, _ in pairs] + ["mean"]
    rows = [[name, f"{a:.4f}", f"{b:.4f}", f"{percent(b, a):+.3f} %"] for name, (a, b) in zip(names, found)]
    times = [f"{name} {statistics.median(e['ms'] for e in run.events('step')):.2f}" for name, run in zip(sides, pairs[0])]
    return [*table(["seed", base, other, "difference"], rows), *verdicts(base, *zip(*found[:len(pairs)])),
            f"- ms a step, median of seed {names[0]}, of runs that share the host: {', '.join(times)}", ""]


def shares(runs):
    """Returns the table of the values that lost all or some of their bits, by kind of tensor; nothing without --fp8."""
    steps = [e for run in runs for e in run.events("step") if "quantised" in e]
    rows = []
    for kind in dict.fromkeys(kind for e in steps for kind in e["quantised"]):  # the head's only of runs with --fp8-head
        row = [kind]
        for lost in (0, 1):
            values = [(e["quantised"][kind][lost], e["step"]) for e in steps if kind in e["quantised"]]
            largest, step = max(values)
            row += [f"{100 * largest:.4f} %", f"{step:,}", f"{100 * statistics.mean(value for value, _ in values):.4f} %"]
        rows.append(row)
    head = ["kind", "became zero, at most", "at step", "mean", "subnormal, at most", "at step", "mean"]
    return table(head, rows) if rows else []


def setting(a, pairs):
    """Returns what the runs had in common, by their logs, and when they were started (UTC)."""
    config, tokens = pairs[0][0].events("config")[0], a.batch * a.seq
    dates = sorted({run.events("config")[0]["time"][:10] for pair in pairs for run in pair})
    held_out = min(a.val_batches * a.batch, (token_count(a.val)[0] - 1) // a.seq) * a.seq
    return [f"- {', '.join(dates)}, commit {a.commit}", f"- {config['machine']}",
            f"- {a.model}, {config['model']['parameters']:,} parameters; {a.steps:,} steps of {a.batch} x {a.seq:,} tokens, "
            f"{a.steps * tokens / config['train_tokens']:.2f} epochs; validation on {held_out:,} tokens", ""]


def write_page(a, runs):
    """Writes the page of the seeds whose two runs are whole, if there are any, and names the runs that failed."""
    pairs = [pair for pair in zip(runs[::2], runs[1::2]) if None not in [run.loss() for run in pair]]
    picture = os.path.splitext(a.page)[0] + ".png"
    page = [f"# {' and '.join(a.sides)}: losses", "", f"- `python {shlex.join(sys.argv)}`"]
    page += [*setting(a, pairs), *losses(a.sides, pairs), *shares([other for _, other in pairs]),
             f"![Losses, and their difference in per cent]({os.path.basename(picture)})"] if pairs else ["- no seed is whole"]
    for run in runs:
        page += ["", "```", run.error, "```"] if run.error else []
    with open(a.page, "w", encoding="utf-8") as f:
        f.write("\n".join(page) + "\n")
    print(f"wrote {a.page}: {len(pairs)} of {len(a.seeds)} seeds", flush=True)
    if pairs:
        bases, others = ([run.folder for run in side] for side in zip(*pairs))
        drawn = subprocess.run([sys.executable, os.path.join(ROOT, "dev", "plot.py"), *others, "--base", *bases, "-o", picture],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if drawn.returncode:  # the page and the runs do without it
            print(f"{picture}: not drawn: {' '.join(drawn.stderr.split())[-200:]}", flush=True)


# --- the command line -----------------------------------------------------------------------------------------------------


def side(text):
    name, equals, flags = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.]+", name):
        raise argparse.ArgumentTypeError(f"{text}, wanted NAME=FLAGS")
    return name, shlex.split(flags)  # its ValueError is wrong usage


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trainer", default=os.path.join(ROOT, "train_llama3cu"), help="the trainer (./train_llama3cu)")
    p.add_argument("--train", required=True, metavar="FILE", help="token file for training, its tokenizer beside it")
    p.add_argument("--val", required=True, metavar="FILE", help="token file for validation")
    for key, default in SHAPE.items():
        p.add_argument(f"--{key}", type=type(default), default=default, help="as of the trainer (%(default)s)")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="(1 2)")
    p.add_argument("--sides", type=side, nargs=2, default=[("bf16", []), ("fp8", ["--fp8"])], metavar="NAME=FLAGS",
                   help="names of the two sides, and their own flags (bf16= fp8=--fp8)")
    p.add_argument("--out", default="out/fp8", metavar="DIR", help="folder for the runs (%(default)s)")
    p.add_argument("--page", metavar="FILE", help="the page; its picture lies beside it (OUT/loss.md)")
    a = p.parse_args()
    a.sides = dict(a.sides)
    if len(a.sides) < 2 or len(set(a.seeds)) < len(a.seeds):
        p.error("--sides, --seeds: one is there twice")
    a.trainer, a.page = os.path.abspath(a.trainer), a.page or os.path.join(a.out, "loss.md")
    a.commit = output("git", "rev-parse", "--short", "HEAD") or "unknown"
    return a


def main():
    signals = []  # that came; they interrupt nothing, so that a second one does not keep a trainer from being ended
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda number, _: signals.append(number))
    a = parse()
    check_input(a.train)
    check_input(a.val)
    if not (os.path.isfile(a.trainer) and os.access(a.trainer, os.X_OK)):
        fail(f"{a.trainer}: is no program", "make train_llama3cu")
    runs = [Run(a, name, seed) for seed in a.seeds for name in a.sides]
    missing = [run for run in runs if run.loss() is None]
    for checkpoint in sorted(set().union(*(run.checkpoints() for run in missing))):
        fail(f"{checkpoint}: is there already, by another run", "give another --out, or move it away")
    os.makedirs(os.path.dirname(a.page) or ".", exist_ok=True)
    write_page(a, runs)
    run_all(missing, visible_cards(), lambda: write_page(a, runs), signals)
    sys.exit(128 + signals[0] if signals else 1 if any(run.error for run in runs) else 0)


if __name__ == "__main__":
    try:
        main()
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # if stdout is closed, Python's last flush fails, too
        fail(": ".join(filter(None, [problem.filename, problem.strerror])))
