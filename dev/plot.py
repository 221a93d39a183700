#!/usr/bin/env python3
"""plot.py LOG... -o out.png -- plots the loss (training as lines, validation as edged dots, or as a darker line if there are
many), the learning rate and the gradient's norm, and the throughput of runs.
plot.py LOG... --base LOG... -o out.png -- compares each run with a base run, such as FP8 with BF16 at the same seed. Plots the
loss, and below it the difference in per cent of the base run's loss. Prints the losses of the last validation that both have.

LOG is a run's folder or its log.jsonl; the folder's name labels the run. --smooth N averages the training loss over N steps
(by default 1 % of the run); the raw line is faint. --tokens shows tokens instead of steps, to compare runs with different batch
sizes. --bpb shows bits per byte of the validations, to compare runs with different tokenizers."""
import argparse
import json
import math
import os

from errors import fail, run_log  # see there

MOST_DOTS = 60  # validations of a run that are drawn as dots: more would hide the loss

NUMBERS = {"step": ("step", "loss", "lr", "ms", "tok_s"), "val": ("step", "loss")}  # of the events that are drawn


def check_event(e):
    """Returns the kind of an event that is drawn, else None. Raises ValueError if it lacks a number."""
    kind = e.get("event") if isinstance(e, dict) else None
    if kind not in NUMBERS or (kind == "val" and e.get("loss") is None):
        return None
    if e.get("loss") is None:  # a loss that is not finite is null: a gap in the line
        e["loss"] = math.nan
    for key in NUMBERS[kind]:
        if not isinstance(e.get(key), (int, float)):
            raise ValueError(f"{key} is {json.dumps(e.get(key))}, wanted a number")
    return kind


def read_log(path):
    """Returns (label, step events, val events) of a run. Later lines replace earlier ones of the same step."""
    path = run_log(path)
    events = {"step": {}, "val": {}}
    with open(path, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            if not line.endswith("\n"):
                continue  # a running trainer is still writing this line
            try:
                e = json.loads(line)
                kind = check_event(e)
            except ValueError as error:
                fail(f"{path}:{number}: {error}")
            if kind:
                events[kind][e["step"]] = e
    if not events["step"]:
        fail(f"{path}: has no step events")
    label = os.path.basename(os.path.dirname(os.path.abspath(path)))
    return label, *([e for _, e in sorted(kind.items())] for kind in events.values())


def running_mean(values, n):
    """Returns for each value the mean over the finite ones of the n values around it, fewer at the ends; NaN: there is none."""
    sums, counts = [0.0], [0]
    for v in values:
        sums.append(sums[-1] + (0.0 if math.isnan(v) else v))
        counts.append(counts[-1] + (not math.isnan(v)))
    spans = [(max(0, i - n // 2), min(len(values), i - n // 2 + n)) for i in range(len(values))]
    return [(sums[hi] - sums[lo]) / (counts[hi] - counts[lo]) if counts[hi] > counts[lo] else math.nan for lo, hi in spans]


def tokens_of(steps):
    """Returns the tokens that were trained on at each step: the log's, or for older logs by speed and time."""
    return [e["tokens"] if "tokens" in e else e["step"] * e["tok_s"] * e["ms"] / 1e3 for e in steps]


def smoothing(a, steps):
    return a.smooth or max(1, len(steps) // 100)


def places(a, steps):
    """Returns the place of each step on the horizontal axis."""
    return dict(zip([e["step"] for e in steps], tokens_of(steps) if a.tokens else [e["step"] for e in steps]))


def draw_vals(axis, x, y, color, base=False, **more):
    """Draws validations: dots, or a darker line if there are many."""
    dots = dict(marker="s" if base else "o", linestyle="", markersize=4.5, markeredgecolor="black", markeredgewidth=0.7)
    line = dict(linewidth=1.1, color=[0.55 * c for c in matplotlib.colors.to_rgb(color)])
    style = line if len(x) > MOST_DOTS else dict(color=color, **dots)
    kind = "validation of the base" if base else "validation"
    axis.plot(x, y, **style | more, gid=None if "label" in more else kind)


def draw_loss(axis, run, color, a, base=False):
    """Draws a run's loss. A base's is a pale band, so that a run that coincides with it is seen. Returns whether the run has
    validations."""
    label, steps, vals = run
    label += " (base)" if base else ""
    place, smooth = places(a, steps), smoothing(a, steps)
    style = dict(linewidth=5, alpha=0.35) if base else dict(linewidth=1.4)
    mean = f"mean of {a.smooth or '1 % of the'} steps" if smooth > 1 and not base else None
    if all(math.isnan(e["loss"]) for e in steps):
        label += " (no loss is finite)"
    if not a.bpb:
        loss = [e["loss"] for e in steps]
        if smooth > 1:
            axis.plot(place.values(), loss, color=color, alpha=0.18, linewidth=0.7, gid="each step")
        axis.plot(place.values(), running_mean(loss, smooth), color=color, label=label, gid=mean, **style,
                  marker="." if len(steps) < 20 else None)  # so that a run of two steps is seen beside a long one
    key = "bpb" if a.bpb else "loss"
    dots = [(place[e["step"]], e[key]) for e in vals if e["step"] in place and e.get(key) is not None]
    if dots:
        joined = dict(linestyle="--" if base else "-", linewidth=1, label=label) if a.bpb else {}
        draw_vals(axis, *zip(*dots), color, base, **joined)
    return bool(dots)


def draw_run(axes, run, color, a):
    """Draws a run into the panels (loss, learning rate, its twin for the norm, throughput)."""
    loss_axis, rate_axis, norm_axis, speed_axis = axes
    steps = run[1]
    x, smooth = places(a, steps).values(), smoothing(a, steps)
    rate_axis.plot(x, [e["lr"] for e in steps], color=color, linewidth=1.2)
    norms = [float("nan") if e.get("gnorm") is None else e["gnorm"] for e in steps]
    norm_axis.plot(x, running_mean(norms, smooth), color=color, linewidth=0.8, linestyle=":")
    speed_axis.plot(x, running_mean([e["tok_s"] / 1e3 for e in steps], smooth), color=color, linewidth=1)
    return draw_loss(loss_axis, run, color, a)


def scale_by_log(axis):
    """Makes the scale logarithmic, unless its numbers lie within a factor of 3, or none is positive."""
    numbers = [y for line in axis.lines for y in line.get_ydata() if y > 0]
    if numbers and max(numbers) > 3 * min(numbers):
        axis.set_yscale("log")
        close = max(numbers) < 30 * min(numbers)
        axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if close else (1,)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")


def draw_runs(a):
    """Draws each run by itself. Returns the figure and whether a run has validations."""
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 8.5), sharex=True, height_ratios=(4, 1.2, 1.2),
                                                 layout="constrained")
    twin = middle.twinx()
    drawn = [draw_run((top, middle, twin, bottom), read_log(path), f"C{i % 10}", a) for i, path in enumerate(a.logs)]
    middle.set_ylabel("learning rate")
    middle.set_ylim(bottom=0)
    twin.set_ylabel("gradient norm (dotted)")
    scale_by_log(twin)
    twin.spines["top"].set_visible(False)
    bottom.set_ylabel("thousand tokens / s")
    bottom.set_ylim(bottom=0)
    return figure, any(drawn)


def shared(events, base, key):
    """Returns [(step, value, the base's value)] of the steps that both lists of events have."""
    finite = [[e for e in some if not math.isnan(e.get(key, math.nan))] for some in (events, base)]
    values = {e["step"]: e[key] for e in finite[0]}
    return [(e["step"], values[e["step"]], e[key]) for e in finite[1] if e["step"] in values]


def draw_difference(axis, run, base, color, a):
    """Draws by how much a run's loss is above the base's. Returns the absolute differences in per cent, without the first tenth
    of the steps."""
    place, key, late = places(a, base[1]), "bpb" if a.bpb else "loss", []
    for events, base_events, is_val in ((run[1], base[1], False), (run[2], base[2], True)):
        both = [row for row in shared(events, base_events, key) if row[0] in place]
        if not both:
            continue
        steps, values, base_values = zip(*both)
        smooth = 1 if is_val else smoothing(a, steps)
        percent = [100 * (v / b - 1) for v, b in zip(running_mean(values, smooth), running_mean(base_values, smooth))]
        x = [place[step] for step in steps]
        if is_val:
            draw_vals(axis, x, percent, color)
            print(f"{run[0]}: validation {values[-1]:.4f} at step {steps[-1]}, {base[0]} {base_values[-1]:.4f}: "
                  f"{100 * (values[-1] / base_values[-1] - 1):+.3f} %")
        else:
            axis.plot(x, percent, color=color, linewidth=1.2)
        late += [abs(p) for step, p in zip(steps, percent) if step > 0.1 * steps[-1]]
    return late


def draw_comparison(a):
    """Draws each run over its run of --base, and their difference. Returns the figure and whether a run has validations."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, height_ratios=(3, 2), layout="constrained")
    drawn, late = [], []
    for i, pair in enumerate(zip(a.logs, a.base)):
        run, base = map(read_log, pair)
        drawn += [draw_loss(top, base, f"C{i % 10}", a, True), draw_loss(top, run, f"C{i % 10}", a)]
        late += draw_difference(bottom, run, base, f"C{i % 10}", a)
    if not late:
        fail("the runs have no steps in common")
    bottom.axhline(0, color="black", linewidth=0.8)
    bottom.set_ylim(-1.15 * max(late) - 0.01, 1.15 * max(late) + 0.01)  # the first steps may leave the picture
    bottom.set_ylabel("difference, % of the base")
    return figure, any(drawn)


def name_lines(axis):
    """Draws the legend: the runs, then in grey the kinds of lines, which are the gids."""
    handles, labels = axis.get_legend_handles_labels()
    for (kind, _), line in {(line.get_gid(), line.get_marker()): line for line in axis.lines if line.get_gid()}.items():
        handles.append(matplotlib.lines.Line2D([], []))
        handles[-1].update_from(line)
        dark = kind.startswith("val") and line.get_marker() == "None"
        handles[-1].set(color="0.3" if dark else "grey", alpha=line.get_alpha() and 0.5)
        labels.append(kind)
    axis.legend(handles, labels, frameon=False, loc="upper right")


def main():
    global matplotlib, plt
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("logs", nargs="+", metavar="LOG")
    p.add_argument("--base", nargs="+", metavar="LOG", help="runs to compare with, one for each LOG")
    p.add_argument("-o", "--out", default="loss.png", help="output file; its suffix selects the format (loss.png)")
    p.add_argument("--smooth", type=int, default=0, metavar="N",
                   help="average over N steps; 1: not at all (default: 1 %% of the run)")
    p.add_argument("--tokens", action="store_true", help="show tokens instead of steps on the horizontal axis")
    p.add_argument("--bpb", action="store_true", help="show bits per byte of the validations instead of the loss")
    p.add_argument("--log-scale", action="store_true", help="logarithmic loss axis")
    a = p.parse_args()
    if a.base and len(a.base) != len(a.logs):
        p.error(f"--base: {len(a.base)} runs, wanted one for each of the {len(a.logs)} LOGs")
    if a.smooth < 0:
        p.error(f"--smooth: is {a.smooth}, wanted 0 or more")
    import matplotlib  # here, since --help needs none
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, has_vals = draw_comparison(a) if a.base else draw_runs(a)
    if a.bpb and not has_vals:
        fail("no log has bits per byte", "they are logged with each validation of a run that has a tokenizer")
    top, bottom = figure.axes[0], figure.axes[1 if a.base else 2]
    top.set_ylabel("bits per byte, validation" if a.bpb else "loss")
    if a.log_scale:
        scale_by_log(top)
    name_lines(top)
    bottom.set_xlabel("tokens" if a.tokens else "step")
    for axis in figure.axes[:3]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(a.out, dpi=120)
    except ValueError as error:  # an unknown suffix
        fail(f"{a.out}: {error}")
    print(f"wrote {a.out}")


if __name__ == "__main__":
    main()
