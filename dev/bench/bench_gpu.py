#!/usr/bin/env python3
"""bench_gpu.py -- compares ./train_llama3cu with compiled PyTorch on one GPU and writes build/<gpu>.md.

    python3 dev/bench/bench_gpu.py --minutes 10    one page about this card, to be sent: builds, measures, and ends in time
    make train_llama3cu && python3 dev/bench/bench_gpu.py [--torch-step OTHER_BASELINE.py] [--shapes 126M 1B-2k 1B-8k 8B]
    python3 dev/bench/bench_gpu.py --trainer-before OLD/train_llama3cu    compares two builds of ours; --torch: PyTorch, too
    python3 dev/bench/bench_gpu.py --ours-b="FLAGS"                      compares ours with ours and more flags
    python3 dev/bench/bench_gpu.py --also="--fp8" --also="--fp8 --fp8-head"  has ours under more flags beside it
    python3 dev/bench/bench_gpu.py --gpus N [--torch-dist BASELINE.py]   compares N GPUs of this host with each of them alone

PyTorch is train_llama3.py --compile: blocks compiled one by one, the fastest attention backend for the shape, the head in
chunks, fused AdamW. It keeps every activation. If memory runs out, it recomputes some blocks. The smallest number that fits is
found by bisection, the fastest of the numbers tried counts, and the table names it.
Ours also runs lean, with 10 bytes per parameter; PyTorch all in bf16 has 8. With --also="--master none --moments bf16" ours
has 8 as well.

All sides start from the same random weights, read the same random tokens, and run in turns A B B A of at least --seconds
each. A turn is killed when it has enough steps, so that it writes no checkpoint. Step times come from each run's log.jsonl,
without the first --warm steps. nvidia-smi gives clock, power and memory ten times a second while the counted steps run;
memory counts the whole GPU. --eval times the forward pass alone (with loss, no gradients, B=4, T=1024, 12 layers), over few and
over many batches: the difference of both times excludes the start-up.

--minutes: builds the trainer for this card, asks it for flags with which d12 fits, and runs ours and PyTorch in turns until the
time is over. PyTorch is left out where it is not installed, and on cards without bfloat16. The page ends with our --profile.

--gpus: first each card trains alone, all at the same time; then the cards train together, each rank with the batch of a single
card. The figures are a card's, and the bar is the slowest card. --together adds a way to train together: flags, after
environment variables, such as "NCCL_MAX_CTAS=4 --zero 3". --torch-dist is a script for torchrun that trains a shape (the flags
of TORCH_MODES) and prints "RESULT {json}" with tok_s_gpu; its fastest mode counts, and also runs on the first card alone.
"""
import argparse
import concurrent.futures
import dataclasses
import datetime
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
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [ROOT, os.path.dirname(os.path.abspath(__file__))]
from dev.errors import fail  # noqa: E402  first: see there
from dev.reference import tables  # noqa: E402
from dev.reference.config import preset  # noqa: E402
from bench_common import run, write_tokens  # noqa: E402
try:
    import train_llama3 as ref  # noqa: E402
    from dev.reference import oracles  # noqa: E402
except ModuleNotFoundError as error:  # --minutes does without PyTorch
    ref, lacks = None, error

TRAINER = os.path.join(ROOT, "train_llama3cu")
# name: model, vocabulary, batch, seq, our flags, arguments of --torch-step
SHAPES = {
    "126M": ("d12", 32768, 64, 1024, "", "--preset tiny"),
    "1B-2k": ("llama3.2-1b", 128256, 16, 2048, "", "--preset 1b --seqlen 2048 --batch 16"),
    "1B-8k": ("llama3.2-1b", 128256, 4, 8192, "", "--preset 1b"),
    "8B": ("llama3.1-8b", 128256, 1, 8192, "--master split --moments bf16 --recompute auto", "--preset 8b"),
    "1B-3k": ("llama3.2-1b", 128256, 10, 3072, "", ""),
    "1B-24k": ("llama3.2-1b", 128256, 1, 24576, "", ""),
    "8B-12k": ("llama3.1-8b", 128256, 1, 12288, "--master split --moments bf16 --recompute auto", ""),
    "8B-24k": ("llama3.1-8b", 128256, 1, 24576, "--master split --moments bf16 --recompute auto", ""),
}
USUAL = ["126M", "1B-2k", "1B-8k", "8B"]  # without --shapes: the others have lengths that are no powers of two
# PyTorch's allocator then loses less memory: at 8B in 80 GB it recomputes 7 blocks instead of 9
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
SMALL = "d12:32768:16:1024"  # the shape of --minutes: its steps are short on a small card
LEAN = ["--master", "split", "--moments", "bf16"]

# ways of --torch-dist
TORCH_MODES = ("--mode ddp --params bf16", "--mode ddp", "--mode zero1", "--mode fsdp --keep", "--mode fsdp",
               "--mode fsdp --keep --reduce bf16", "--mode fsdp --params bf16", "--mode fsdp --keep --params bf16")


class Monitor:
    """Samples (time, SM clock MHz, power W, memory used MiB) with nvidia-smi; no samples if it is not installed."""

    def __init__(self, gpu=None):
        self.samples, self.process = [], None
        if not shutil.which("nvidia-smi"):
            return
        gpu = gpu or os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        self.process = subprocess.Popen(
            ["nvidia-smi", "-i", gpu, "--query-gpu=clocks.sm,power.draw,memory.used", "--format=csv,noheader,nounits",
             "-lms", "100"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            try:
                self.samples.append((time.monotonic(), *map(float, line.split(","))))
            except ValueError:  # "[N/A]", or a line cut at the end
                pass

    def between(self, begin, end):
        return [s[1:] for s in self.samples if begin <= s[0] <= end]

    def close(self):
        if self.process:
            self.process.terminate()


class Side:
    """One contestant at one shape, with its measurements. `layers`: how many blocks may recompute when memory runs out; earlier
    measurements are then dropped."""

    def __init__(self, name, command, state_bytes, note, layers=0):
        self.name, self.command, self.state_bytes, self.note = name, command, state_bytes, note
        self.flags, self.blocks, self.layers = [], 0, layers
        self.ms, self.samples, self.error, self.took = [], [], None, 0

    def turn(self, work, monitor, seconds, warm, until=math.inf):
        """Runs steps until they have taken `seconds` seconds. Starts no turn that could not end by the time `until`."""
        begin = time.monotonic()
        if self.ms and begin + self.took > until:
            print(f"  {self.name}: no time for another turn", flush=True)
            return
        while not self.error:
            ms, samples, error = self.run(work, monitor, seconds, warm, until)
            self.took = time.monotonic() - begin
            if not error:
                self.ms += ms
                self.samples += samples
                print(f"  {self.name}: {len(ms)} steps, median {statistics.median(ms):.2f} ms", flush=True)
                return
            print(f"  {self.name} {' '.join(self.flags)}: {error}")
            if "out of memory" not in error or not self.recompute(work, monitor, warm, until):
                self.error = error

    def recompute(self, work, monitor, warm, until):
        """Finds how many blocks to recompute, more than now: bisects for the smallest number that fits, and takes the fastest of
        all that were tried, because a number that only just fits may wait for memory. Returns whether there is one."""
        too_few, tried, fits = self.blocks, self.layers, {}  # fits: {blocks: ms}
        while tried > too_few:
            self.flags = ["--recompute-blocks", str(tried)]
            ms, _, error = self.run(work, monitor, 0, warm, until)
            print(f"  {self.name} {' '.join(self.flags)}: {error or f'{statistics.median(ms):.2f} ms'}", flush=True)
            if not error:
                fits[tried] = statistics.median(ms)
            elif "out of memory" in error:
                too_few = tried
            else:
                return False
            tried = (too_few + min(fits, default=too_few)) // 2
        self.blocks, self.ms, self.samples = min(fits, key=fits.get, default=0), [], []
        self.flags = ["--recompute-blocks", str(self.blocks)]
        return bool(fits)

    def run(self, work, monitor, seconds, warm, until=math.inf):
        """Runs one turn. Returns the times of the counted steps, the monitor's samples during them, and an error or None."""
        out = os.path.join(work, re.sub(r"[^\w.=-]+", "_", self.name))
        shutil.rmtree(out, ignore_errors=True)
        with open(out + ".screen", "w+", encoding="utf-8") as screen:
            p = subprocess.Popen(self.command + self.flags + ["--out", out], stdout=screen, stderr=subprocess.STDOUT, cwd=ROOT,
                                 env={**ALLOCATOR, **os.environ}, start_new_session=True)
            begin, ms = None, []
            try:
                while p.poll() is None and time.monotonic() < until:
                    time.sleep(0.02)
                    ms = read_steps(out)
                    if begin is None and len(ms) > warm:
                        begin = time.monotonic()
                    if len(ms) > warm + 4 and sum(ms[warm:]) >= seconds * 1e3:
                        break
            finally:  # an interrupted benchmark leaves no trainer running
                end, ended = time.monotonic(), p.poll()
                if ended is None:
                    os.killpg(p.pid, signal.SIGKILL)
                p.wait()
            if ended is None and len(ms) <= warm:
                return [], [], f"the time was over after {len(ms)} steps"
            if ended is None:
                self.note = self.note.replace("recompute auto", "recompute " + logged(out, "recompute"))
                return ms[warm:], monitor.between(begin, end), None
            screen.seek(0)
            text = [line.strip() for line in screen.read().splitlines() if line.strip()]
        cause = [line[:400] for line in text if "out of memory" in line][-1:] or [" / ".join(text[-3:])[-400:]]
        return [], [], f"exit code {ended}: {cause[0]}"

    def mean(self, column):
        return statistics.fmean(s[column] for s in self.samples) if self.samples else math.nan

    def memory(self):
        return max((s[2] for s in self.samples), default=math.nan) / 1024


def read_steps(out):
    try:
        with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as f:
            return [json.loads(line)["ms"] for line in f if line.endswith("\n") and '"step"' in line[:20]]
    except FileNotFoundError:
        return []


def logged(out, option):
    """Returns the value of an option by the log, which holds what --recompute auto chose."""
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as f:
        return json.loads(f.readline())["options"].get(option, "")


def word(flags, name, default):
    """Returns the value of `name` in a list of flags: the last one, as the trainer does."""
    values = [value for flag, value in zip(flags, flags[1:]) if flag == name]
    return values[-1] if values else default


def bytes_per_parameter(flags, precision):
    """Returns our bytes per parameter: weights, gradients, master weights and moments."""
    if precision == "FP32":
        return 16
    grads = 4 if word(flags, "--grad-dtype", "param") == "fp32" else 2
    master = {"fp32": 4, "split": 2, "none": 0}[word(flags, "--master", "fp32")]
    moments = 4 if word(flags, "--moments", "fp32") == "bf16" else 8
    return 2 + grads + master + moments


TORCH_BYTES = dict(fp32=16, autocast=16, master=20, bf16=8)


def ours(name, trainer, flags, ours_flags, a):
    return Side(name, [trainer, *flags, *ours_flags], bytes_per_parameter(ours_flags, a.precision),
                f"{a.precision}, recompute {word(ours_flags, '--recompute', 'none')}, "
                f"master {word(ours_flags, '--master', 'fp32')}, moments {word(ours_flags, '--moments', 'fp32')}")


def level(side):
    """Returns what a side of ours recomputes."""
    return re.search(r"recompute (\S+),", side.note)[1]


def unlike_work(name, alone, together):
    """Returns lines for the page if the cards do not recompute the same alone and together."""
    if len({level(side) for side in (*alone, *together)}) == 1:
        return []
    return [f"Unlike work: alone the cards recompute {', '.join(map(level, alone))}; together {', '.join(map(level, together))}. "
            f"`--ours \"{name}=--recompute LEVEL ...\"` compares like work.", ""]


def table(sides, tokens, flops, gpu):
    """Returns the lines of the table, and tokens/s by side. `tokens` in a step, `flops` of each token."""
    peak = tables.gpu_peak(gpu) or math.nan
    speed, lines = {}, ["| | tokens/s | ms a step (min … max) | TFLOP/s | at SM MHz | MFU | memory GiB | bytes a parameter | W "
                        "| J/1000 tokens | mode |",
                        "|---|---|---|---|---|---|---|---|---|---|---|"]
    for side in sides:
        if side.error:
            error = side.error.replace("|", "/")
            lines.append(f"| {side.name} | failed | {error} | | | | | {side.state_bytes} | | | {side.note} |")
            continue
        ms = statistics.median(side.ms)
        speed[side.name] = tok_s = tokens / ms * 1e3
        tflops = tok_s * flops / 1e12
        lines.append(f"| {side.name} | {tok_s:,.0f} | {ms:.2f} ({min(side.ms):.2f} … {max(side.ms):.2f}) | {tflops:.1f} | "
                     f"{side.mean(0):.0f} | {100 * tflops / peak:.1f}% | {side.memory():.1f} | {side.state_bytes} | "
                     f"{side.mean(1):.0f} | {1000 * side.mean(1) / tok_s:.3f} | {' '.join([side.note, *side.flags])} |")
    return [line.replace(" nan% ", " - ").replace(" nan ", " - ") for line in lines], speed  # unknown values


def same_run(model, vocab, batch, seq, gpus, work):
    """Writes random tokens and returns the flags of an endless run over them."""
    tokens = os.path.join(work, "tokens.bin")
    write_tokens(tokens, max(50 * gpus * batch * (seq + 1), 1_000_000), vocab)
    return ["--model", model, "--train", tokens, "--batch", str(batch), "--seq", str(seq), "--steps", "1000000",
            "--lr", "1e-4", "--schedule", "constant", "--sample-tokens", "0"]


def visible_card(i):
    """Returns the number, or name, of the i-th card that this process may use."""
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(i + 1)))).split(",")[i]


def torch_way(a, step_args, mode, gpus):
    """Runs --torch-dist in one way. Returns its result, or why there is none."""
    command = [*a.torchrun, "--standalone", "--nproc_per_node", str(gpus), a.torch_dist, *shlex.split(step_args)]
    command += shlex.split(mode)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as p:
        try:
            screen, _ = p.communicate(timeout=a.torch_seconds)
        except BaseException as end:  # an interrupted benchmark leaves no worker running
            p.terminate()  # torchrun ends its workers, which have their own sessions
            try:
                p.communicate(timeout=40)
            except subprocess.TimeoutExpired:
                p.kill()
            if not isinstance(end, subprocess.TimeoutExpired):
                raise
            return None, f"no end after {a.torch_seconds} s"
    found = re.search(r"^RESULT (.*)$", screen, re.M)
    cause = [line for line in screen.splitlines() if "out of memory" in line or "Error" in line][:1]
    return json.loads(found.group(1)) if found else None, " ".join(cause)


def torch_dist(a, step_args):
    """Runs --torch-dist in each of its modes, and in the fastest mode on one card. Returns a line for each, the most tokens/s
    of a card together, and the tokens/s of the one card."""
    lines, rates = ["| PyTorch | tokens/s of a card | memory GiB | |", "|---|---|---|---|"], {}
    for mode in [*a.torch_modes, None]:
        if mode is None and not rates:
            break
        gpus, way = (a.gpus, mode) if mode else (1, max(rates, key=rates.get))
        result, cause = torch_way(a, step_args, way, gpus)
        name = way if mode else f"{way}, one card"
        if result:
            rates[name] = result["tok_s_gpu"]
            lines.append(f"| {name} | {rates[name]:,.0f} | {result.get('peak_gib', '')} | |")
        else:
            lines.append(f"| {name} | - | | {cause[:120].replace('|', '/')} |")
        print(f"  PyTorch {name}: {rates.get(name, cause)}", flush=True)
    most = max((rates[mode] for mode in a.torch_modes if mode in rates), default=math.nan)
    return lines, most, next((rate for name, rate in rates.items() if name.endswith(", one card")), math.nan)


def compare_gpus(name, shape, a, monitors, work):
    """Runs one shape on each card alone and on all together, in turns. Returns the lines to write, and each card's speed
    together as a share of the slowest card's speed alone."""
    model, vocab, batch, seq, ours_flags, step_args = shape
    ours_flags = shlex.split(a.ours.get(name, ours_flags))
    flags = same_run(model, vocab, batch, seq, a.gpus, work)
    print(f"{name}: {model}, V={vocab}, B={batch} a card, T={seq}, {a.gpus} cards", flush=True)
    alone = [ours(f"card {i} alone", a.trainer, flags, ours_flags, a) for i in range(a.gpus)]
    for i, side in enumerate(alone):
        side.command = ["env", f"CUDA_VISIBLE_DEVICES={visible_card(i)}", *side.command]
    together = []
    for way in ["", *a.together]:
        variables = re.match(r"(\w+=\S* *)*", way)[0]
        side = ours(f"{a.gpus} cards {way}".strip(), a.trainer,
                    [*flags, "--gpus", str(a.gpus), *shlex.split(way[len(variables):])], ours_flags, a)
        side.command = ["env", *shlex.split(variables), *side.command]
        together.append(side)
    turns = [alone, *([side] for side in together)]
    for sides in (*turns, *reversed(turns)) * a.rounds:
        with concurrent.futures.ThreadPoolExecutor() as at_once:
            list(at_once.map(lambda side, monitor: side.turn(work, monitor, a.seconds, a.warm), sides, monitors))
    lines, speed = table([*alone, *together], batch * seq, preset(model, vocab).flops_per_token(seq), a.gpu)
    slowest = min(speed[side.name] for side in alone) if all(side.name in speed for side in alone) else math.nan
    shares = [100 * speed.get(side.name, math.nan) / slowest for side in together]
    counts = ", ".join(f"{side.name} {len(side.ms)}" for side in (*alone, *together))
    lines = [f"### {name}: {model}, vocabulary {vocab}, T={seq}, B={batch} a card", "", *lines, "",
             f"**{shares[0]:.1f} %** of the slowest card alone"
             + "".join(f", {share:.1f} % with {way}" for way, share in zip(a.together, shares[1:]))
             + f" (figures are per card; clock, power and memory of the {a.gpus} are card 0's; steps counted: {counts})",
             "", *unlike_work(name, alone, together)]
    if a.torch_dist and step_args:
        theirs, most, one = torch_dist(a, step_args)
        lines += [*theirs, "", f"**Ratio {speed.get(together[0].name, math.nan) / most:.3f}** (ours, recompute "
                  f"{level(together[0])}, ÷ the fastest of PyTorch's ways above; "
                  f"on one card {speed.get(alone[0].name, math.nan) / one:.3f})", ""]
    print("\n".join(lines))
    return lines, shares[0] / 100


def compare(name, shape, a, monitor, work):
    """Runs one shape in turns: ours, our lean or other variants as asked, and PyTorch. Returns the lines to write, and the
    ratio of our speed to that of the last side."""
    model, vocab, batch, seq, ours_flags, step_args = shape
    ours_flags = shlex.split(a.ours.get(name, ours_flags))
    flags = same_run(model, vocab, batch, seq, 1, work)
    print(f"{name}: {model}, V={vocab}, B={batch}, T={seq}", flush=True)

    also = [ours(f"ours {more}", a.trainer, flags, ours_flags + shlex.split(more), a) for more in a.also]
    if a.trainer_before:
        also.append(ours("ours before", a.trainer_before, flags, ours_flags, a))
    if a.ours_b is not None:
        also.append(ours("ours b", a.trainer, flags, ours_flags + shlex.split(a.ours_b), a))
    sides = [ours("ours", a.trainer, flags, ours_flags, a), *also]
    if a.torch:
        if a.precision == "BF16" and ours_flags[:len(LEAN)] != LEAN and not also and not a.minutes:
            sides.append(ours("ours, lean", a.trainer, flags, ours_flags + LEAN, a))
        script = [sys.executable, os.path.join(ROOT, "train_llama3.py"), *flags, "--compile", "--dtype", a.torch_dtype]
        sides.append(Side("PyTorch", script + shlex.split(a.torch_flags), TORCH_BYTES[a.torch_dtype],
                          f"{a.torch_dtype}, compiled", preset(model, vocab).num_hidden_layers))
    for side in (*sides, *reversed(sides)) * a.rounds:
        side.turn(work, monitor, a.seconds, a.warm, a.until)
    lines, speed = table(sides, batch * seq, preset(model, vocab).flops_per_token(seq), a.gpu)
    other = sides[-1].name
    ratio = speed["ours"] / speed[other] if "ours" in speed and other in speed else math.nan
    counts = ", ".join(f"{side.name} {len(side.ms)}" for side in sides)
    of_other = f"**Ratio {ratio:.3f}** (ours ÷ {other}; steps counted: {counts})" if len(sides) > 1 else f"Steps counted: {counts}"
    lines = [f"### {name}: {model}, vocabulary {vocab}, T={seq}, B={batch}", "", *lines, "", of_other, ""]
    if "ours, lean" in speed and other in speed:
        lines[-2] += f"; lean {speed['ours, lean'] / speed[other]:.3f}"
    for side in sides[1:-1]:
        if side in also and "ours" in speed and side.name in speed:
            lines[-2] += f"; ours ÷ {side.name} {speed['ours'] / speed[side.name]:.3f}"
    if a.torch_step and "PyTorch" in speed and step_args:
        output, _ = run([sys.executable, a.torch_step, *shlex.split(step_args), "--precision", a.torch_dtype])
        theirs = json.loads(re.search(r"^RESULT (.*)$", output, re.M).group(1))["tokens_per_s"]
        share = speed["PyTorch"] / theirs
        lines += [f"train_llama3.py reaches {share:.3f} of {os.path.basename(a.torch_step)} ({theirs:,.0f} tokens/s)"
                  + ("" if share >= 0.97 else ": more than 3 % behind, the ratio above flatters us"), ""]
    print("\n".join(lines))
    return lines, ratio


def forward_alone(a, work):
    """Times forward pass and loss, without gradients, of a tied d12 with GPT-2's vocabulary. Returns the lines to write."""
    batch, seq, vocab = 4, 1024, 50257
    c = dataclasses.replace(preset("d12", vocab), tie_word_embeddings=True)
    device = ref.torch.device(a.device)
    times, cuda = {}, device.type == "cuda"
    x, y = (t.to(device) for t in oracles.random_tokens(c, batch, seq, 1))
    for name, dtype, compiled in (("PyTorch bf16, eager", "bf16", False), ("PyTorch bf16, compiled", "bf16", True),
                                  ("PyTorch TF32, eager", "fp32", False), ("PyTorch TF32, compiled", "fp32", True)):
        flags = ref.parse_arguments(["--dtype", dtype])
        kind = ref.torch.bfloat16 if dtype == "bf16" else ref.torch.float32
        ref.pick_sdpa(c, batch, seq, device, kind)
        model = ref.make_model(c, device, kind)
        ref.init_weights(model, 42)
        model.set_context(seq, device)
        engine = ref.Engine(model, flags, device)
        ref.torch.set_float32_matmul_precision("high")
        forward = ref.torch.compile(engine.loss_sum) if compiled else engine.loss_sum
        ms = []
        with ref.torch.no_grad():
            for _ in range(5 + a.forward_steps):
                begin = time.perf_counter()
                forward(x, y)
                if cuda:
                    ref.torch.cuda.synchronize()
                ms.append((time.perf_counter() - begin) * 1e3)
        times[name] = statistics.median(ms[5:])
        del engine, model, forward
    folder, data = os.path.join(work, "forward"), os.path.join(work, "forward.bin")
    model = ref.make_model(c)
    ref.init_weights(model, 42)
    ref.save_model(model, folder)
    few, many = 10, 10 + 10 * a.forward_steps
    write_tokens(data, many * batch * seq + 1, vocab)
    for name, trainer, flags in ((f"ours {a.precision}", a.trainer, []), ("ours TF32", a.trainer_fp32, ["--tf32"])):
        if not trainer:
            continue
        walls = {}
        for batches in (few, many, few, many):
            begin = time.perf_counter()
            run([trainer, "--eval", "--model", folder, "--val", data, "--batch", str(batch), "--seq", str(seq), "--val-batches",
                 str(batches), *flags])
            walls[batches] = min(walls.get(batches, math.inf), time.perf_counter() - begin)
        times[name] = (walls[many] - walls[few]) / (many - few) * 1e3
    count = sum(w.numel() for _, w in ref.hf_tensors(model))
    lines = [f"### forward pass alone: {count / 1e6:.0f}M, B={batch}, T={seq}, with the loss", "",
             "| | ms | tokens/s |", "|---|---|---|"]
    lines += [f"| {name} | {ms:.2f} | {batch * seq / ms * 1e3:,.0f} |" for name, ms in times.items()]
    print("\n".join(lines))
    return lines + [""]


def text_of(command):
    r = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return r.stdout.strip()


def page_head(gpu, device, how):
    """Returns the first lines of a page of results: the machine, the commit, this command, and `how` it was measured."""
    driver = "-"
    if device == "cuda":
        driver = text_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
    return [f"# {gpu}", "", f"- {datetime.date.today()}, commit {text_of(['git', 'rev-parse', '--short', 'HEAD'])}"
            + ("" if not text_of(["git", "status", "--porcelain", "-uno"]) else " with changes"),
            f"- `python3 {' '.join(map(shlex.quote, sys.argv))}`",
            f"- {f'PyTorch {ref.torch.__version__}, CUDA {ref.torch.version.cuda}' if ref else f'PyTorch did not run: {lacks}'}, "
            f"driver {driver}", f"- {how}", ""]


def asked(field):
    """Returns what nvidia-smi says of this card, such as its name."""
    return text_of(["nvidia-smi", "-i", visible_card(0), f"--query-gpu={field}", "--format=csv,noheader"])


def in_time(command, end, **streams):
    """Runs a command until it ends, or kills it and what it started at the time `end`. Returns its result, or None if killed."""
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, text=True, **streams) as p:
        try:
            output, errors = p.communicate(timeout=max(0, end - time.monotonic()))
        except BaseException as why:  # an interrupted benchmark leaves nothing running
            os.killpg(p.pid, signal.SIGKILL)
            if not isinstance(why, subprocess.TimeoutExpired):
                raise
            return None
    return subprocess.CompletedProcess(command, p.returncode, output, errors)


def flags_that_fit(trainer, flags):
    """Returns the flags that the trainer itself names if a run does not fit into the card, and the trainer's precision."""
    more = []
    for _ in range(2):
        r = subprocess.run([trainer, *flags, *more, "--dry-run"], capture_output=True, text=True, check=False)
        hint = re.search("^  hint: these flags fit: (.*)$", r.stderr, re.M)
        if r.returncode == 0:
            return more, re.search(r"^model .*, (\w+)$", r.stdout, re.M)[1]
        more += shlex.split(hint[1]) if hint else []
    fail((r.stderr.strip().splitlines() or ["no message"])[0].removeprefix("error: "))


def profile(trainer, flags, end):
    """Returns the lines of a page for the trainer's --profile; none if there is no such table."""
    r = in_time([trainer, *flags, "--profile", "3"], end, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if r is None:
        return ["No profile: the time was over.", ""]
    at = r.stdout.find("profile of one step")
    return ["```", r.stdout[at:].rstrip(), "```", ""] if at >= 0 else []


def one_page(a):
    """--minutes: one page about this card. The profile has the last tenth of the time."""
    begin, cuda = time.monotonic(), a.device == "cuda"
    a.until, end = begin + 54 * a.minutes, begin + 60 * a.minutes
    if cuda and not shutil.which("nvidia-smi"):
        fail("no GPU: nvidia-smi is not installed")
    a.gpu, capability = (asked("name"), asked("compute_cap")) if cuda else ("CPU", "none")
    if a.trainer == TRAINER:
        print("make train_llama3cu, which takes some minutes", flush=True)
        made = in_time(["make", "train_llama3cu"], a.until)
        if made is None:
            fail("make train_llama3cu: no end within --minutes", "run it alone first, then this script again")
        if made.returncode:
            fail("make train_llama3cu failed", "its lines above say why; see dev/doc/installing.md")
    a.torch = ref is not None and not capability.startswith("7.")
    name = (a.shapes or [SMALL])[0]
    model, vocab, batch, seq = name.split(":")
    shape, work, monitor = (model, int(vocab), int(batch), int(seq), "", ""), tempfile.mkdtemp(), Monitor(visible_card(0))
    try:
        flags = same_run(*shape[:4], 1, work)
        more, a.precision = flags_that_fit(a.trainer, flags)
        a.ours[name] = shlex.join(more)
        lines = page_head(a.gpu, a.device, "random tokens and weights, optimizer step included, turns A B B A")
        lines[-1:] = [f"- compute capability {capability}" + (", which PyTorch's side is left out for: it needs bfloat16"
                      if ref and not a.torch else ""), ""]
        lines += compare(name, shape, a, monitor, work)[0]
        lines += profile(a.trainer, [*flags, *more], end)
    finally:
        monitor.close()
        shutil.rmtree(work, ignore_errors=True)
    write_page(page_path(a), lines)
    print("Send this page to the project, please: it has no figures of this card yet.")


def page_path(a, suffix=""):
    return a.out or os.path.join(ROOT, "build", re.sub(r"[^a-z0-9]+", "-", a.gpu.lower()).strip("-") + suffix + ".md")


def write_page(path, lines):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join(lines))
    print(f"wrote {path}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, help="one page about this card, in at most so many minutes")
    p.add_argument("--shapes", nargs="+", help=f"among {', '.join(SHAPES)}, or MODEL:VOCAB:BATCH:SEQ")
    p.add_argument("--trainer", default=TRAINER)
    p.add_argument("--trainer-before", metavar="PATH", help="an older build to compare with, instead of PyTorch")
    p.add_argument("--trainer-fp32", help="an FP32 build, for the forward pass in TF32")
    p.add_argument("--precision", default="BF16", help="precision of --trainer (BF16)")
    p.add_argument("--ours", action="append", default=[], metavar="SHAPE=FLAGS", help='such as --ours "8B=--recompute ffn"')
    p.add_argument("--ours-b", metavar="FLAGS", help='compare with ours under these flags, too, instead of PyTorch; "": none')
    p.add_argument("--also", action="append", default=[], metavar="FLAGS", help='ours under more flags, too ("--fp8")')
    p.add_argument("--torch", action="store_true", help="PyTorch, too, with --trainer-before or --ours-b")
    p.add_argument("--gpus", type=int, default=0, metavar="N", help="compare N cards of this host with each of them alone")
    p.add_argument("--together", action="append", default=[], metavar="FLAGS", help='with --gpus: more ways ("--zero 3")')
    p.add_argument("--torch-dist", metavar="PATH", help="with --gpus: a PyTorch baseline for torchrun")
    p.add_argument("--torch-modes", nargs="+", default=TORCH_MODES, metavar="FLAGS", help="ways of --torch-dist (all)")
    p.add_argument("--torch-seconds", type=float, default=200, help="limit of each way of --torch-dist (200)")
    p.add_argument("--torch-dtype", default="bf16", choices=list(TORCH_BYTES), help="--dtype of train_llama3.py (bf16)")
    p.add_argument("--torch-flags", default="", help="more flags of train_llama3.py")
    p.add_argument("--torch-step", metavar="PATH", help="another PyTorch baseline that train_llama3.py must reach within 3 %%")
    p.add_argument("--seconds", type=float, default=4.0, help="seconds of counted steps per turn (4)")
    p.add_argument("--rounds", type=int, default=1, help="repetitions of A B B A (1)")
    p.add_argument("--warm", type=int, default=6, help="uncounted first steps of each turn (6)")
    p.add_argument("--forward-steps", type=int, default=40, help="steps of the forward pass alone (40); 0: none")
    p.add_argument("--device", default="cuda", help="cuda, or cpu to try this script")
    p.add_argument("--out", help="file to write (build/GPU.md)")
    a = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like an interrupt: ends what runs
    a.trainer = os.path.abspath(a.trainer)  # the sides run in the project's root
    a.trainer_before = a.trainer_before and os.path.abspath(a.trainer_before)
    a.torch_dist = a.torch_dist and os.path.abspath(a.torch_dist)
    a.torchrun = [shutil.which("torchrun")] if shutil.which("torchrun") else [sys.executable, "-m", "torch.distributed.run"]
    a.ours = dict(entry.split("=", 1) for entry in a.ours)
    a.torch_flags += f" --device {a.device}"
    if a.minutes:
        one_page(a)
        return
    if ref is None:
        raise lacks
    if a.device == "cuda" and not ref.torch.cuda.is_available():
        sys.exit("error: PyTorch finds no GPU")
    for trainer in filter(None, (a.trainer, a.trainer_before)):
        if not os.path.exists(trainer):
            sys.exit(f"error: {trainer}: not found\n  hint: make train_llama3cu")
    a.torch |= not a.trainer_before and a.ours_b is None
    a.gpu, a.until = ref.torch.cuda.get_device_name() if a.device == "cuda" else "CPU", math.inf
    lines = page_head(a.gpu, a.device, "random tokens and weights, optimizer step included, turns A B B A; MFU by 6·(matmul "
                      "weights) + 6·L·H·hd·T against the dense bf16 peak")
    summary, work = [], tempfile.mkdtemp()
    monitors = [Monitor(visible_card(i)) for i in range(a.gpus)] or [Monitor()]
    other = f"slowest card alone, {a.gpus} cards" if a.gpus else "PyTorch" if a.torch else \
        "ours b" if a.ours_b is not None else "ours before"
    suffix = f"-x{a.gpus}" if a.gpus else {"ours before": "-before", "ours b": "-b"}.get(other, "")
    path = page_path(a, suffix)
    try:
        for name in a.shapes or USUAL:
            shape = SHAPES.get(name)
            if not shape:
                model, vocab, batch, seq = name.split(":")
                shape = (model, int(vocab), int(batch), int(seq), "", "")
            part, ratio = compare_gpus(name, shape, a, monitors, work) if a.gpus else compare(name, shape, a, monitors[0], work)
            summary.append(f"{name} {ratio:.3f}")
            lines += part
            write_page(path, lines)  # after each shape, so that an interrupted run keeps its results
        if a.forward_steps and other == "PyTorch":
            lines += forward_alone(a, work)
            write_page(path, lines)
    finally:
        for monitor in monitors:
            monitor.close()
        shutil.rmtree(work, ignore_errors=True)
    print(f"ours / {other}: {', '.join(summary)}")


if __name__ == "__main__":
    main()
