"""log.py -- what a run prints: errors, the table of steps, and the events of OUT/log.jsonl."""
import json
import math
import os
import sys
import time


def counted(n, noun):
    """Returns "1 layer" or "2 layers"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def die(message, code=1):
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def warn(message):
    print(f"warning: {message}", file=sys.stderr, flush=True)


class Log:
    """OUT/log.jsonl, one event a line, with the members of llmc/files/logger.h. Makes the folder OUT. A new file takes the
    place of an earlier log, since that may have other names (links)."""

    def __init__(self, out):
        try:
            os.makedirs(out, exist_ok=True)
        except OSError as error:
            die(f"{out}: cannot make the folder: {error.strerror}")
        self.path = os.path.join(out, "log.jsonl")
        if os.path.lexists(self.path):
            os.unlink(self.path)

    def add(self, event, **values):
        with open(self.path, "a", encoding="utf-8") as f:
            values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            f.write(json.dumps(dict(event=event, **values)) + "\n")


def peak_memory(device):
    if device.type == "cuda":
        import torch  # here and below, so that scripts without PyTorch have the errors above
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status", encoding="ascii") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def mark(device):
    """Returns a point in time for milliseconds(). On a GPU the point comes after all work queued so far."""
    if device.type != "cuda":
        return time.perf_counter()
    import torch
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin, end):
    """Returns the time between two marks; on a GPU, waits for the second."""
    if isinstance(end, float):
        return (end - begin) * 1e3
    end.synchronize()
    return begin.elapsed_time(end)


def clock(seconds):
    s = int(seconds + 0.5)
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


def flop_rate(rate):
    return f"{rate / 1e9:.3g}G" if rate < 1e12 else f"{rate / 1e12:.3g}T"


class StepTable:
    """Prints and logs the steps of a run, which ends at step `last`. tokens, flops: of one step. peak: the device's FLOP/s; 0
    shows the rate instead of MFU."""

    def __init__(self, log, device, steps, last, tokens, flops, peak):
        self.log, self.device, self.steps, self.last = log, device, steps, last
        self.tokens, self.flops, self.peak = tokens, flops, peak
        self.times, self.loss, self.begun, self.padding = [], None, time.perf_counter(), 0

    def add(self, step, numbers, counts, lr, begin, end):
        """Reports a step. numbers: loss and gradient norm, which a GPU has copied to the host by the mark `end`. counts: the
        step's trained targets, or None; the padding of all steps so far, which counts neither as tokens nor as speed; and the
        losses by source, or None."""
        ms = milliseconds(begin, end)
        self.loss, norm = numbers.tolist()
        width = len(str(self.steps))
        if len(self.times) % 40 == 0:
            print(f"{'step':>{2 * width + 1}} {'loss':>9} {'gnorm':>8} {'lr':>9} {'ms':>8} {'tok/s':>9} "
                  f"{'MFU' if self.peak else 'flop/s':>6} {'mem':>7} {'eta':>8}")
        self.times.append(ms)
        trained, padding, sources = counts
        real = self.tokens - (padding - self.padding)
        self.padding, rate, tok_s = padding, self.flops * real / self.tokens / ms * 1e3, real / ms * 1e3
        mfu = f"{100 * rate / self.peak:.1f}%" if self.peak else flop_rate(rate)
        recent = sorted(self.times[-20:])[len(self.times[-20:]) // 2]
        print(f"{step:>{width}}/{self.steps} {self.loss:9.4f} {norm:8.3f} {lr:9.2e} {ms:8.1f} {tok_s:9,.0f} {mfu:>6} "
              f"{peak_memory(self.device) / 2**30:6.2f}G {clock((self.last - step) * recent / 1e3):>8}", flush=True)
        some = dict(padding=padding or None, trained=trained, sources=sources)
        some = {key: value for key, value in some.items() if value is not None}
        self.log.add("step", step=step, loss=self.loss, gnorm=norm, lr=lr, ms=round(ms, 3), tok_s=round(tok_s, 1),
                     seconds=round(time.perf_counter() - self.begun, 3), memory=peak_memory(self.device),
                     tokens=step * self.tokens - padding, **some)
        if not math.isfinite(self.loss) or not math.isfinite(norm):
            self.log.add("end", step=step, reason="not finite", seconds=round(time.perf_counter() - self.begun, 3))
            die(f"step {step}: loss is {self.loss} and the gradient's norm {norm}")

    def close(self, validation, path, reason):
        """Prints and logs the end of a run. validation: its last loss, or None. path: the model folder."""
        median, peak = sorted(self.times)[len(self.times) // 2], peak_memory(self.device)
        seconds = time.perf_counter() - self.begun
        self.log.add("end", step=self.last, reason=reason, seconds=round(seconds, 3))
        print(f"done    {self.last} step{'' if self.last == 1 else 's'} in {clock(seconds)}, loss {self.loss:.4f}"
              + ("" if validation is None else f", validation {validation:.4f}")
              + f", median {median:.1f} ms a step, {self.tokens / median * 1e3:,.0f} tokens/s, peak memory "
              f"{peak / 2**30:.2f} GiB\nsaved   {path}")
