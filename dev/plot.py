#!/usr/bin/env python3
"""plot.py LOG... -o out.png -- plots the loss (training as lines, validation as dots) and the throughput of runs.

LOG is a run's folder or its log.jsonl; the folder's name labels the run. --smooth N averages the training loss over N steps.
--tokens shows tokens instead of steps, to compare runs with different batch sizes."""
import argparse
import json
import os
import sys

try:
    import matplotlib
except ImportError:
    sys.exit("error: matplotlib is missing\n  hint: pip install matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def read_log(path):
    """Returns (label, step events, val events) of a run. Later lines replace earlier ones of the same step."""
    path = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
    events = {"step": {}, "val": {}}
    try:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if not line.endswith("\n"):
                    continue  # a running trainer is still writing this line
                try:
                    e = json.loads(line)
                except ValueError as error:
                    sys.exit(f"error: {path}:{number}: {error}")
                if e.get("event") in events and e.get("loss") is not None:
                    events[e["event"]][e["step"]] = e
    except OSError as error:
        sys.exit(f"error: {path}: {error.strerror}")
    if not events["step"]:
        sys.exit(f"error: {path}: has no step events")
    label = os.path.basename(os.path.dirname(os.path.abspath(path)))
    return label, *([e for _, e in sorted(kind.items())] for kind in events.values())


def running_mean(values, n):
    """Returns for each value the mean over the n values around it, fewer at the ends."""
    sums = [0.0]
    for v in values:
        sums.append(sums[-1] + v)
    spans = [(max(0, i - n // 2), min(len(values), i - n // 2 + n)) for i in range(len(values))]
    return [(sums[hi] - sums[lo]) / (hi - lo) for lo, hi in spans]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("logs", nargs="+", metavar="LOG")
    p.add_argument("-o", "--out", default="loss.png", help="output file; its suffix selects the format (loss.png)")
    p.add_argument("--smooth", type=int, default=1, metavar="N", help="average the training loss over N steps (1)")
    p.add_argument("--tokens", action="store_true", help="show tokens instead of steps on the horizontal axis")
    p.add_argument("--log-scale", action="store_true", help="logarithmic loss axis")
    a = p.parse_args()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 1), layout="constrained")
    for i, path in enumerate(a.logs):
        label, steps, vals = read_log(path)
        color = f"C{i % 10}"
        # tokens per step, from speed and time; validation events have none
        tokens = steps[-1]["tok_s"] * steps[-1]["ms"] / 1e3 if a.tokens else 1
        x = [e["step"] * tokens for e in steps]
        loss = [e["loss"] for e in steps]
        if a.smooth > 1:
            top.plot(x, loss, color=color, alpha=0.2, linewidth=0.8)
        top.plot(x, running_mean(loss, max(1, a.smooth)), color=color, linewidth=1.3, label=label)
        if vals:
            top.plot([e["step"] * tokens for e in vals], [e["loss"] for e in vals], "o", color=color, markersize=5,
                     markeredgecolor="white", label=f"{label}, validation")
        bottom.plot(x, [e["tok_s"] / 1e3 for e in steps], color=color, linewidth=1)
    top.set_ylabel("loss")
    if a.log_scale:
        top.set_yscale("log")
    top.legend(frameon=False)
    bottom.set_ylabel("thousand tokens / s")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("tokens" if a.tokens else "step")
    for axis in (top, bottom):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(a.out, dpi=120)
    except (OSError, ValueError) as error:  # a missing folder, or an unknown suffix
        sys.exit(f"error: {a.out}: {getattr(error, 'strerror', None) or error}")
    print(f"wrote {a.out}")


if __name__ == "__main__":
    main()
