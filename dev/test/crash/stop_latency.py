#!/usr/bin/env python3
"""stop_latency.py [TRIES] -- measures how long after SIGTERM a d6 run (B = 4, T = 256, 4,096 tokens of vocabulary) begins to
save. Each try starts the run anew, sends the signal at a random moment of a later step, and waits for the checkpoint's
temporary folder. Prints a line a try, then the smallest, median and largest time; ends with 1 if one is above 500 ms. Other
load changes the times, so run it on an idle machine. TRAINER: the program under test. Run from the project's root after
`make`."""
import os, random, signal, struct, subprocess, sys, tempfile, time

TRIES = int(sys.argv[1]) if len(sys.argv) > 1 else 20
TRAINER = os.path.abspath(os.environ.get("TRAINER", "train_llama3"))
VOCAB, LIMIT_MS = 4096, 500.0


def write_tokens(path, rng):
    """A token file of random ids."""
    ids = [rng.randrange(VOCAB) for _ in range(100_001)]
    words = [20240520, 1, len(ids), VOCAB] + [0] * 252
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", *words) + struct.pack(f"<{len(ids)}H", *ids))


def wait_for(found, what, seconds=120.0):
    end = time.monotonic() + seconds
    while not found():
        if time.monotonic() > end:
            sys.exit(f"error: waited {seconds:.0f} s for {what}")
        time.sleep(0.0005)


def step_ms(log):
    """The milliseconds of the last step in the log; 0 before there are three."""
    steps = [line for line in open(log) if '"event":"step"' in line] if os.path.exists(log) else []
    return float(steps[-1].split('"ms":')[1].split(",")[0].rstrip("}\n")) if len(steps) >= 3 else 0.0


def one_try(folder, rng):
    """Returns (ms from the signal to the start of the checkpoint, ms of a step)."""
    out = os.path.join(folder, f"out{rng.randrange(10**9)}")
    args = "--model d6 --batch 4 --seq 256 --steps 1000 --checkpoint-minutes 0 --sample-tokens 0 --val-every 0".split()
    run = subprocess.Popen([TRAINER, *args, "--train", os.path.join(folder, "data.bin"), "--out", out],
                           stdout=subprocess.DEVNULL, cwd=folder)
    log = os.path.join(out, "log.jsonl")
    wait_for(lambda: step_ms(log) > 0, "three steps")
    ms = step_ms(log)
    time.sleep(rng.random() * ms / 1000)
    start = time.monotonic()
    run.send_signal(signal.SIGTERM)
    wait_for(lambda: any(name.startswith("step_") for name in os.listdir(out)), "the checkpoint")
    latency = (time.monotonic() - start) * 1000
    if run.wait() != 0:
        sys.exit(f"error: the run ended with {run.returncode}")
    return latency, ms


def main():
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(os.path.join(folder, "data.bin"), rng)
        times = []
        for i in range(TRIES):
            latency, ms = one_try(folder, rng)
            times.append(latency)
            print(f"try {i + 1:3d}   step {ms:7.0f} ms   saving begins after {latency:6.0f} ms", flush=True)
    times.sort()
    print(f"{len(times)} tries: {times[0]:.0f} to {times[-1]:.0f} ms, median {times[len(times) // 2]:.0f} ms")
    return times[-1] > LIMIT_MS


if __name__ == "__main__":
    sys.exit(main())
