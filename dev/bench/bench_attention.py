#!/usr/bin/env python3
"""bench_attention.py -- compares our attention kernels with PyTorch's, or with another build's, on the same GPU.

    make build/bench_attention_cu && python3 dev/bench/bench_attention.py [--before PROGRAM] [--out FILE.md]

Times our kernels (build/bench_attention_cu) before and after PyTorch's scaled_dot_product_attention at the same shapes: causal,
bf16, grouped heads, random data; medians. PyTorch runs its flash backend, which is FlashAttention 2, and cuDNN's. TFLOP/s count
the causal half of the square: two products in the forward pass, 2.5 times as much in the backward pass. Our backward pass and
flash's deterministic one give the same bits each time; plain flash and cuDNN add up in any order. A second table compares our
times for rows of documents with our times for whole rows.

--before PROGRAM: another build's bench_attention_cu. The table then compares ours with its times instead of PyTorch's. Four
runs take turns: before, ours, ours, before. Each runs only the kernels that a launcher would choose. PyTorch is not needed."""
import argparse
import os
import re
import statistics
import subprocess
import sys

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:  # --before does without
    torch = None

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
from dev.errors import fail, pip_command  # noqa: E402

ROW = re.compile(r"^(\w+)\s+(\w+)\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+) \|\s*([\d.]+)\s+[\d.]+ \|\s*([\d.]+)\s+[\d.]+")


def ours(program, *kernels):
    """Returns {(model, T, HD, B, NH, NKV): ms of forward and backward} of our fastest kernels; 1B_500 has documents of 500
    tokens."""
    times = {}
    for line in subprocess.run([program, *kernels], capture_output=True, text=True, check=True).stdout.splitlines():
        row = ROW.match(line)
        if row:
            shape = (row[2], *map(int, row.group(3, 4, 5, 6, 7)))
            ms = tuple(map(float, row.group(8, 9)))
            times[shape] = tuple(map(min, ms, times.get(shape, ms)))
    return times


def median_ms(run, repeats=15):
    """Returns the median time on the GPU, after three warm-up runs."""
    ms = []
    for i in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            ms.append(begin.elapsed_time(end))
    return statistics.median(ms)


def theirs(shape, backend, deterministic):
    """Returns (forward ms, backward ms) of PyTorch; None if it refuses the shape."""
    _, T, HD, B, NH, NKV = shape
    q, k, v = (torch.randn(B, h, T, HD, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (NH, NKV, NKV))
    torch.use_deterministic_algorithms(deterministic)
    try:
        with sdpa_kernel(backend):
            forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
            out = forward()
            grad = torch.randn_like(out)
            return median_ms(forward), median_ms(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    except RuntimeError as e:
        print(f"{backend}: {str(e).splitlines()[0]}", file=sys.stderr)
        return None
    finally:
        torch.use_deterministic_algorithms(False)


def flash(shape, deterministic=False):
    """Returns the times of FlashAttention 2."""
    return theirs(shape, SDPBackend.FLASH_ATTENTION, deterministic)


def need_gpu():
    """Ends the program without PyTorch, or where PyTorch finds no GPU."""
    if not torch:
        fail("torch is not installed", pip_command("torch"))
    if not torch.cuda.is_available():
        fail("PyTorch finds no GPU here")


def documents(times):
    """Returns the lines of a table of rows of documents beside whole rows."""
    lines = ["", "| T | head_dim | B | documents of | whole rows, ms forward / backward | documents | times as fast |",
             "|---|---|---|---|---|---|---|"]
    for shape, (forward, backward) in times.items():
        model, _, length = shape[0].partition("_")
        if length:
            whole = times[(model, *shape[1:])]
            lines.append(f"| {shape[1]} | {shape[2]} | {shape[3]} | {length} | {whole[0]:.3f} / {whole[1]:.3f} | "
                         f"{forward:.3f} / {backward:.3f} | {whole[0] / forward:.2f} / {whole[1] / backward:.2f} |")
    return lines


def mean(x, y):
    """Returns the mean times of two runs, for the shapes of both."""
    return {shape: [(a + b) / 2 for a, b in zip(x[shape], y[shape])] for shape in x if shape in y}


def between_builds(before, program):
    """Returns the lines of a table of two builds' times at the shapes that both know."""
    runs = [ours(p, "auto") for p in (before, program, program, before)]
    old, new = mean(runs[0], runs[3]), mean(runs[1], runs[2])
    lines = ["| T | head_dim | B | heads | documents of | before, us forward / backward | now | TFLOP/s now | "
             "times as fast |", "|---|---|---|---|---|---|---|---|---|"]
    for shape in (shape for shape in new if shape in old):
        model, T, HD, B, NH, NKV = shape
        length = model.partition("_")[2]
        (f0, b0), (f1, b1), tflop = old[shape], new[shape], 2e-9 * B * NH * HD * T * T
        rate = "-" if length else f"{tflop / f1:.0f} / {2.5 * tflop / b1:.0f}"
        lines.append(f"| {T} | {HD} | {B} | {NH} / {NKV} | {length or '-'} | {f0 * 1e3:.0f} / {b0 * 1e3:.0f} | "
                     f"{f1 * 1e3:.0f} / {b1 * 1e3:.0f} | {rate} | {f0 / f1:.3f} / {b0 / b1:.3f} |")
    return lines


def write(path, lines):
    if path:
        with open(path, "w", encoding="utf-8") as f:
            f.write("\n".join(lines) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", default=os.path.join(ROOT, "build/bench_attention_cu"))
    p.add_argument("--before", metavar="PROGRAM", help="compare with this program of another build")
    p.add_argument("--out", help="also write the table to this file")
    a = p.parse_args()
    if not os.path.exists(a.program):
        sys.exit(f"error: {a.program}: not found\n  hint: make build/bench_attention_cu")
    if a.before:
        lines = between_builds(a.before, a.program)
        print("\n".join(lines))
        return write(a.out, lines)
    need_gpu()
    lines = [f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, TFLOP/s forward / backward, bf16", "",
             "| T | head_dim | B | heads | ours | flash | flash, deterministic | cuDNN | ours / flash | ours / deterministic |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    before = ours(a.program)
    others = {}
    for shape in [shape for shape in before if "_" not in shape[0]]:
        others[shape] = [flash(shape), flash(shape, deterministic=True), theirs(shape, SDPBackend.CUDNN_ATTENTION, False)]
        torch.cuda.empty_cache()
    after = ours(a.program)
    means = mean(before, after)
    for shape in others:
        _, T, HD, B, NH, NKV = shape
        own = means[shape]
        tflop = 2e-9 * B * NH * HD * T * T
        rates = [f"{tflop / t[0]:.0f} / {2.5 * tflop / t[1]:.0f}" if t else "-" for t in [own, *others[shape]]]
        ratios = [f"{t[0] / own[0]:.2f} / {t[1] / own[1]:.2f}" if t else "-" for t in others[shape][:2]]
        lines.append("| " + " | ".join([str(T), str(HD), str(B), f"{NH} / {NKV}", *rates, *ratios]) + " |")
        print(lines[-1], flush=True)
    lines += documents(means)
    print("\n".join(lines[len(others) + 4:]))
    write(a.out, lines)


if __name__ == "__main__":
    main()
