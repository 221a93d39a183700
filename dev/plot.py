#!/usr/bin/env python3
"""plot.py LOG... -o out.png -- plots the loss (training as lines, validation as edged dots), the learning rate and the
gradient's norm, and the throughput of runs.

LOG is a run's folder or its log.jsonl; the folder's name labels the run. --smooth N averages the training loss over N steps
(by default 1 % of the run), with the raw line faint behind it. --tokens shows tokens instead of steps, to compare runs with
different batch sizes; --bpb bits per byte of the validations, to compare runs with different tokenizers."""
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


def tokens_of(steps):
    """Returns the tokens that were trained on at each step: the log's, or for older logs by speed and time."""
    return [e["tokens"] if "tokens" in e else e["step"] * e["tok_s"] * e["ms"] / 1e3 for e in steps]


def draw_run(axes, run, color, a):
    """Draws a run into the panels (loss, learning rate, its twin for the norm, throughput)."""
    loss_axis, rate_axis, norm_axis, speed_axis = axes
    label, steps, vals = run
    x = tokens_of(steps) if a.tokens else [e["step"] for e in steps]
    place = dict(zip([e["step"] for e in steps], x))
    smooth = a.smooth or max(1, len(steps) // 100)
    if not a.bpb:
        loss = [e["loss"] for e in steps]
        if smooth > 1:
            loss_axis.plot(x, loss, color=color, alpha=0.18, linewidth=0.7)
        loss_axis.plot(x, running_mean(loss, smooth), color=color, linewidth=1.4, label=label)
    key = "bpb" if a.bpb else "loss"
    dots = [(place[e["step"]], e[key]) for e in vals if e["step"] in place and e.get(key) is not None]
    if dots:
        loss_axis.plot(*zip(*dots), "-o" if a.bpb else "o", color=color, markersize=4.5, markeredgecolor="black",
                       markeredgewidth=0.7, linewidth=1, label=label if a.bpb else None)
    rate_axis.plot(x, [e["lr"] for e in steps], color=color, linewidth=1.2)
    norms = [e["gnorm"] if e["gnorm"] is not None else float("nan") for e in steps]
    norm_axis.plot(x, running_mean(norms, smooth), color=color, linewidth=0.8, linestyle=":")
    speed_axis.plot(x, running_mean([e["tok_s"] / 1e3 for e in steps], smooth), color=color, linewidth=1)
    return bool(dots)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("logs", nargs="+", metavar="LOG")
    p.add_argument("-o", "--out", default="loss.png", help="output file; its suffix selects the format (loss.png)")
    p.add_argument("--smooth", type=int, default=0, metavar="N",
                   help="average over N steps; 1: not at all (default: 1 %% of the run)")
    p.add_argument("--tokens", action="store_true", help="show tokens instead of steps on the horizontal axis")
    p.add_argument("--bpb", action="store_true", help="show bits per byte of the validations instead of the loss")
    p.add_argument("--log-scale", action="store_true", help="logarithmic loss axis")
    a = p.parse_args()
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 8.5), sharex=True, height_ratios=(4, 1.2, 1.2),
                                                 layout="constrained")
    twin = middle.twinx()
    drawn = [draw_run((top, middle, twin, bottom), read_log(path), f"C{i % 10}", a) for i, path in enumerate(a.logs)]
    if a.bpb and not any(drawn):
        sys.exit("error: no log has bits per byte\n  hint: they are logged with each validation of a run that has a tokenizer")
    top.set_ylabel("bits per byte, validation" if a.bpb else "loss" + ("  (dots: validation)" if any(drawn) else ""))
    if a.log_scale:
        top.set_yscale("log")
    top.legend(frameon=False)
    middle.set_ylabel("learning rate")
    middle.set_ylim(bottom=0)
    twin.set_ylabel("gradient norm (dotted)")
    twin.set_yscale("log")
    bottom.set_ylabel("thousand tokens / s")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("tokens" if a.tokens else "step")
    for axis in (top, middle, bottom):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    twin.spines["top"].set_visible(False)
    try:
        figure.savefig(a.out, dpi=120)
    except (OSError, ValueError) as error:  # a missing folder, or an unknown suffix
        sys.exit(f"error: {a.out}: {getattr(error, 'strerror', None) or error}")
    print(f"wrote {a.out}")


if __name__ == "__main__":
    main()
