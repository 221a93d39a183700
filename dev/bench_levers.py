#!/usr/bin/env python3
"""bench_levers.py -- measures on one GPU what decides the next steps towards speed, and writes a page of results.

    make train_llama3cu build/bench_levers_cu && python dev/bench_levers.py [--parts power fp8 ...] [--out FOLDER]

power      watts of each kind of work alone (build/bench_levers_cu), and the constants of a model of them by least squares:
           W = static + pJ/FLOP (products) * TFLOP/s + pJ/FLOP (attention) * TFLOP/s + pJ/B * TB/s
fp8        cuBLASLt's fp8 products at the blocks' shapes in every way to scale, beside bf16
adamw      AdamW on a few multiprocessors beside products, against one after the other
launches   chains of kernels in a graph whose next one starts before the one before has ended, against after its end
attention  stall reasons and tensor-core share of the attention kernels, by ncu where it is installed
tune       training steps with --tune against those without, in turns A B B A of 10 s (dev/bench_gpu.py), and what --tune chose:
           --parts tune --seconds 450 gives it the time that it needs

A program that does not run here is built first. Each part has a time limit, and so have all together; a part that fails or
runs out of time leaves what it had printed. FOLDER ($OUT, else dev/results) gets GPU-levers.md, written again after each part,
levers.log with every line as it came, and ncu's numbers as levers-ncu.csv.
"""
import argparse
import csv
import datetime
import glob
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM, TRAINER = os.path.join(ROOT, "build", "bench_levers_cu"), os.path.join(ROOT, "train_llama3cu")
LIMITS = dict(power=130, fp8=160, adamw=75, launches=45, attention=75, tune=440)  # seconds; of tune, 170 choose the plans
PEAKS = {"bf16": 989.4, "fp8": 1978.9, "GB/s": 4800}  # H200's data sheet: TFLOP/s, GB/s


class Log:
    """Prints lines and keeps them in a file, flushed, so that a killed run leaves what it had."""

    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8")

    def line(self, text):
        print(text, flush=True)
        self.file.write(text + "\n")
        self.file.flush()


def run(command, limit, log):
    """Runs a command for at most `limit` seconds. Returns its lines, and what went wrong or None."""
    log.line("$ " + " ".join(command))
    try:
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=ROOT,
                             start_new_session=True)
    except OSError as e:
        return [], str(e)
    late = threading.Event()

    def stop():
        late.set()
        os.killpg(p.pid, signal.SIGINT)  # bench_gpu.py then ends its trainer
        time.sleep(5)
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)
    timer = threading.Timer(limit, stop)
    timer.daemon = True
    timer.start()
    lines = []
    for line in p.stdout:
        lines.append(line.rstrip("\n"))
        log.line(lines[-1])
    code = p.wait()
    timer.cancel()
    return lines, f"stopped after {limit:.0f} s" if late.is_set() else f"exit code {code}" if code else None


def make_runnable(program, usage, log):
    """Builds a program unless it runs here: one that was built elsewhere may need another processor or other libraries."""
    try:
        code = subprocess.run([program, *usage], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode
    except OSError:
        code = -1
    if code not in (0, 2):
        run(["make", "-B", os.path.relpath(program, ROOT)], 300, log)


def rows(lines, kind, *counts):
    """Returns the fields of the lines that begin with `kind` and have as many more fields as one of `counts`."""
    split = [[field.strip() for field in line.split(" | ")] for line in lines if line.startswith(kind + " | ")]
    return [fields[1:] for fields in split if len(fields) - 1 in counts]


def number(field):
    return float(field.split()[0])


def table(head, body):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in body), ""]


def checked(text, value, peak):
    """Returns the text, marked if a value above the hardware's peak shows that the measurement is wrong."""
    return text if not value > peak else f"{text} (above the peak of {peak}: a bug)"


# ---------------------------------------------------------------------------------------------------------------------
# each part: run(limit) -> lines of the page, lines of the summary

def power_fit(measured):
    """Fits the power model to [name, TFLOP/s products, TFLOP/s attention, GB/s, W]. Returns its constants and the watts that
    it gives each row."""
    factors = np.array([[1, products, attention, gb * 1e-3] for _, products, attention, gb, _ in measured])
    watts = np.array([m[-1] for m in measured])
    constants = np.linalg.lstsq(factors, watts, rcond=None)[0]
    return constants, factors @ constants


def power(limit, log, _):
    lines, error = run([PROGRAM, "power"], limit, log)
    measured, body = [], []
    for name, ms, products, attention, gb, watts, mhz, tensor in rows(lines, "power", 8):
        p, a, b, w = map(number, (products, attention, gb, watts))
        if name != "idle" and not math.isnan(w):  # idle, the memory sleeps, too
            measured.append([name, p, a, b, w])
        flops = f"{p + a:.0f}" if p + a else "-"
        body.append([name, f"{number(ms):.3f}", checked(flops, p + a, PEAKS["bf16"]), checked(f"{b:.0f}", b, PEAKS["GB/s"]),
                     f"{w:.0f}", f"{number(mhz):.0f}", tensor.split()[0] + " %" if p + a else "-",
                     f"{w / (p + a):.3f}" if p + a else "-"])
    page, brief = [], []
    if len(measured) > 4:
        (static, products, attention, memory), fitted = power_fit(measured)
        model = dict(zip((m[0] for m in measured), fitted))
        for row in body:
            row.append(f"{model[row[0]]:.0f}" if row[0] in model else "-")
        brief = [f"power model: static {static:.0f} W, products {products:.3f} pJ/FLOP, attention {attention:.3f} pJ/FLOP, "
                 f"memory {memory:.1f} pJ/B"]
        page = [f"Least squares over the rows but `idle`: **W = {static:.0f} + {products:.3f} · TFLOP/s of products + "
                f"{attention:.3f} · TFLOP/s of attention + {memory:.1f} · TB/s** (W, pJ/FLOP, pJ/FLOP, pJ/B).", ""]
    head = ["work", "ms", "TFLOP/s", "GB/s", "W", "SM MHz", "of the tensor cores at that clock", "J/TFLOP"]
    return table(head + ["W by the fit"] * bool(page), body) + page, brief, error


def fp8_sums(found, ways, products, model, kind):
    """Adds up a model's products of one kind ("": all). Returns {way: (ms, J)} of the ways that ran all of them."""
    own = [p for p in products if p.startswith(model + " ") and p.endswith(kind)]
    runs = {way: [found[p, way] for p in own if (p, way) in found] for way in ways}
    return {way: (sum(ms for ms, _, _ in run), sum(ms * rate * joules * 1e-3 for ms, rate, joules in run))
            for way, run in runs.items() if len(run) == len(own)}


def fp8(limit, log, _):
    lines, error = run([PROGRAM, "fp8"], limit, log)
    found, others = {}, []  # (product, way): (ms, TFLOP/s, J/TFLOP)
    for product, shape, way, *rest in rows(lines, "fp8", 4, 9):
        if len(rest) == 6:
            found[product, way] = tuple(number(rest[i]) for i in (0, 1, 4))
        else:
            others.append(f"- `{way}` at {product} ({shape}): {' '.join(rest)}")
    products, ways = list(dict.fromkeys(k[0] for k in found)), list(dict.fromkeys(k[1] for k in found))
    rare = [way for way in ways if len(products) > 1 and sum(k[1] == way for k in found) == 1]
    ways = [way for way in ways if way not in rare]
    body, brief = [], []
    for product in products:
        cells = []
        for way in ways:
            _, rate, joules = found.get((product, way), (0, 0, 0))
            peak = PEAKS["bf16" if way == "bf16" else "fp8"]
            cells.append(checked(f"{rate:.0f} · {joules:.3f}", rate, peak) if rate else "-")
        body.append([product, *cells])
    for model in dict.fromkeys(p.split()[0] for p in products):
        sums = {kind: fp8_sums(found, ways, products, model, kind) for kind in ("forward", "dx", "dw", "")}
        for kind, by_way in sums.items():
            body.append([f"**{model}: all {kind}**".replace(" **", "**"),
                         *(f"{by_way[way][0]:.3f} ms · {by_way[way][1]:.3f} J" if way in by_way else "-" for way in ways)])
        for way in ways:
            gains = []
            for kind, by_way in sums.items():
                if way != "bf16" and way in by_way and "bf16" in by_way:
                    (ms, joules), (plain_ms, plain_joules) = by_way[way], by_way["bf16"]
                    gains.append(f"{kind or 'all'} {plain_ms / ms:.2f} x ({joules / plain_joules:.2f} of the J)")
            brief += [f"fp8 {model} {way}: {', '.join(gains)}"] if gains else []
    others += [f"- `{way}` at {p}: runs, {found[p, way][1]:.0f} · {found[p, way][2]:.3f}" for p, way in found if way in rare]
    page = ["TFLOP/s · J/TFLOP; sums in ms · J. `fast`: sums stay in the tensor cores' own precision until the end.", ""]
    return page + table(["product", *ways], body) + [*others, ""], brief, error


def adamw(limit, log, _):
    lines, error = run([PROGRAM, "adamw"], limit, log)
    body, best = [], {}
    for fields in rows(lines, "adamw", 7, 9):
        model, on = fields[:2]
        if on == "all SMs":
            update, products, after, watts, joules = fields[2:]
            body.append([model, "all, in turn", update.split()[1], products.split()[1], "-",
                         f"{number(after.split('other ')[1]):.3f}", "100", watts.split()[0], joules.split()[0]])
            continue
        update, products, beside, together, share, watts, joules = fields[2:]
        body.append([model, on.split()[0], update.split()[1], products.split("rest ")[1].split()[0], beside.split(" layers")[0],
                     together.split()[1], share.split()[0], watts.split()[0], joules.split()[0]])
        best[model] = min(best.get(model, (math.inf, "")), (number(share), on))
    head = ["model", "SMs of AdamW", "AdamW ms a layer", "products ms a layer", "layers beside", "both ms a layer",
            "% of one after the other", "W", "J a layer"]
    brief = [f"adamw {m}: best on {on}, {share:.1f} % of one after the other" for m, (share, on) in best.items()]
    return table(head, body), brief, error


def launches(limit, log, _):
    lines, error = run([PROGRAM, "launches"], limit, log)
    body = [[what, *(field.split()[-2] for field in fields)] for what, *fields in rows(lines, "launches", 6)]
    head = ["link of a chain", "ordinary, us", "programmatic, us", "early, us", "programmatic gains, us", "early gains, us"]
    return table(head, body), [f"launches, {r[0]}: {r[1]} us, programmatic gains {r[4]}, early {r[5]}" for r in body], error


STALL = re.compile(r"issue_stalled_(\w+?)_per_(?:warp|issue)_active")


def find_ncu():
    return shutil.which("ncu") or next(iter(sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"), reverse=True)), None)


def profile_rows(lines):
    """Returns what ncu printed as CSV: a dictionary for each kernel, and one of units."""
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return [], {}
    units, *kernels = csv.DictReader(line for line in lines[start:] if line.startswith('"'))
    return kernels, units


def attention(limit, log, folder):
    ncu = find_ncu()
    if not ncu:
        return ["ncu is not installed here: see the shares of the tensor cores under *power*.", ""], [], None
    sections = [word for s in ("SpeedOfLight", "WarpStateStats", "ComputeWorkloadAnalysis") for word in ("--section", s)]
    lines, error = run([ncu, "--clock-control", "none", "--csv", "--page", "raw", *sections, "-k", "regex:attention", PROGRAM,
                        "attention"], limit, log)
    kernels, units = profile_rows(lines)
    scale = {"ns": 1e-3, "us": 1, "ms": 1e3}.get(units.get("gpu__time_duration.sum"), math.nan)  # to us
    with open(os.path.join(folder, "levers-ncu.csv"), "w", encoding="utf-8") as f:
        f.write("\n".join(line for line in lines if line.startswith('"')))
    models, body = [line[1] for line in (line.split(" | ") for line in lines) if line[0] == "attention"], []
    for i, kernel in enumerate(kernels):
        values = {column: float(text.replace(",", "")) for column, text in kernel.items()
                  if text and re.fullmatch(r"[\d,]+\.?\d*", text)}
        stalls = {m.group(1): v for column, v in values.items() if (m := STALL.search(column)) and "not_issued" not in column}
        tensor = max((v for column, v in values.items() if "pipe_tensor" in column and "pct" in column), default=math.nan)
        cycles = max(values.get("gpc__cycles_elapsed.max", 0), values.get("sm__cycles_elapsed.max", 0))
        name = re.search(r"attention_\w+", kernel.get("Kernel Name", "")) or re.search("", "")
        top = ", ".join(f"{k} {v:.2f}" for k, v in sorted(stalls.items(), key=lambda s: -s[1])[:5])
        body.append([models[i // 4] if len(kernels) == 4 * len(models) else "", name.group(),
                     f"{values.get('gpu__time_duration.sum', math.nan) * scale:,.1f}",
                     f"{cycles:,.0f}", f"{tensor:.1f}", top])
    head = ["model", "kernel", "us", "cycles", "tensor pipe busy, %", "stall reasons (warps stalled at each issue)"]
    return table(head, body), [f"attention {r[0]} {r[1]}: tensor pipe {r[4]} %, {r[5]}" for r in body], error


def tune(limit, log, folder):
    path = os.path.join(folder, "levers-tune.md")
    lines, error = run([sys.executable, "-u", "dev/bench_gpu.py", "--shapes", "126M", "1B-2k", "--tune", "--ours-b", "",
                        "--seconds", "10", "--out", path], limit, log)
    chosen = [line.strip() for line in lines if re.match(r"  tuned? ", line)]
    page = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            page = f.read().split("### ", 1)[-1:]
        os.remove(path)
        page = ["`ours` is tuned, `ours b` is not.", "", "```", *chosen, "```", "", "### " + page[0], ""]
    return page, chosen + [line for line in lines if line.startswith(("### ", "| ours", "**Ratio"))], error


PARTS = dict(power=("Watts by kind of work", power), fp8=("fp8 products", fp8), adamw=("AdamW beside products", adamw),
             launches=("Earlier starts of kernels", launches), attention=("Attention kernels", attention),
             tune=("Tuned against untuned", tune))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    p.add_argument("--seconds", type=float, default=470, help="for all parts together (470)")
    p.add_argument("--out", default=os.environ.get("OUT") or os.path.join(ROOT, "dev", "results"), help="folder")
    a = p.parse_args()
    begin = time.monotonic()
    os.makedirs(a.out, exist_ok=True)
    log = Log(os.path.join(a.out, "levers.log"))
    card, _ = run(["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"], 20, log)
    gpu = card[0].split(",")[0] if card else "GPU"
    make_runnable(PROGRAM, [], log)
    if "tune" in a.parts:
        make_runnable(TRAINER, ["--help"], log)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    page = [f"# {gpu}: levers", "", f"{card[0] if card else gpu} (name, driver, power limit), {datetime.date.today()}, commit "
            f"{commit.stdout.strip() or '-'}: `make train_llama3cu build/bench_levers_cu && python {' '.join(sys.argv)}`", ""]
    path = os.path.join(a.out, re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + "-levers.md")
    summary = []
    for name in a.parts:
        title, part = PARTS[name]
        start = time.monotonic()
        limit = min(LIMITS[name], a.seconds - (start - begin))
        try:
            lines, brief, error = part(limit, log, a.out) if limit > 5 else ([], [], "no time left")
        except Exception as e:  # what the part printed is in the log; the next parts still run
            lines, brief, error = [], [], f"{type(e).__name__}: {e}"
        summary += brief + ([f"{name}: {error}"] if error else [])
        page += [f"## {title}", "", *lines] + ([f"Incomplete: {error}.", ""] if error else [])
        with open(path, "w", encoding="utf-8") as f:
            f.write("\n".join(page))
        log.line(f"{name}: {time.monotonic() - start:.0f} s")
    log.line("\n" + "\n".join(summary) + f"\nwrote {path}")


if __name__ == "__main__":
    main()
