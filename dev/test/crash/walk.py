#!/usr/bin/env python3
"""walk.py [--count N] [--kills N] [--seed S] [--only K] [--trainer PATH] [--jobs N] -- a random walk over the flags.

Each combination of flags trains a tiny model twice: in one piece, and in random pieces. A piece ends at a random --stop-after,
or by kill -9 or a signal that stops a run, at a random moment; SIGUSR1 or SIGUSR2 comes before some. The next one resumes with
all flags, or with --resume alone, on another number of threads. Wanted of each combination:
  signals  0  no process ends by a signal that it was not sent
  form     0  exit 1 comes with one line "error: ...", and no line is of another kind
  stuck    0  every piece resumes
  changed  0  the last piece ends as the whole run: the same exit status, log, last checkpoint, and every other checkpoint that
              both keep, byte for byte. --stop-after may add the validation, sample and tasks of its step to the log
--kills N takes one run instead, which saves each step, and kills it N times with -9: at starting, training, writing, renaming and
pruning. Each time it must go on, with no checkpoint lost. A combination that the trainer refuses is no run; its error must have the right form. Every saved flag of the CPU trainer has an
entry in VALUES, or else the walk ends at once. The combinations follow from --seed; the moments of signals do not."""
import argparse, json, os, random, re, shutil, signal, subprocess, sys, time
import lab

PAIRS = os.path.join(lab.ROOT, "dev/test/pairs")
TALES = ["--tokenizer", os.path.join(lab.ROOT, "dev/data/tinytales")]
# the values of each saved flag; those of GIVEN get theirs in combination()
VALUES = {
    "documents": "auto cross pack mask", "export-dtype": "auto f32 bf16 f16", "lr": "1e-4 1e-3 1e-2 1", "warmup": "0 1 2 4",
    "schedule": "cosine linear constant wsd", "final-lr-frac": "0 0.1 1", "decay": "1 2 4",
    "decay-shape": "linear cosine 1-sqrt", "optimizer": "adamw muon", "muon-momentum": "0 0.95", "muon-lr-scale": "0.1 0.2",
    "weight-decay": "0 0.1 10", "beta1": "0 0.9", "beta2": "0 0.95 0.999", "eps": "1e-30 1e-8 1e-3", "grad-clip": "0 1 1e-20", "skip-loss-z": "0 0.1 3",
    "skip-norm-z": "0 0.1 3", "lora-alpha": "0 3", "lora-on": "qkvo ffn all", "seed": "0 7 4294967303 9000000000000000000",
    "val-every": "0 1 2 3", "val-batches": "1 2 20", "eval-every": "0 1 2", "sample-every": "0 1 2 3",
    "sample-tokens": "0 1 6", "checkpoint-every": "0 1 2 3", "checkpoint-minutes": "0 1e-4 10", "keep": "0 1 2",
    "major-every": "0 2 3", "patience": "0 1 2", "temperature": "0 0.8 2", "top-k": "0 1 5", "top-p": "0.5 0.95 1",
    "system": "kind", "tokens": "9"}
# of the CUDA trainer: LD_LIBRARY_PATH=build/emulated walk.py --trainer build/emulated/BF16_90/train_llama3cu
GPU_VALUES = {"recompute": "auto norm+swiglu ffn:1 ffn norm+swiglu:2,block:1 block ffn:3", "moments": "fp32 bf16",
              "offload": "off optimizer gradients weights auto"}
PLAN = "matmul_plan.json"  # of the CUDA trainer
SWITCHES = ("checkpoint-best",)
GIVEN = ("model", "tokenizer", "train", "val", "tasks", "steps", "batch", "seq", "total-batch", "lora", "prompt")
LIMIT = 120  # seconds of a run
COLUMNS = ("runs", "refused", "fail", "pieces", "killed", "stopped", "at a step", "same", "signals", "form", "stuck", "changed")
WANTED = ("signals", "form", "stuck", "changed")


def saved_flags():
    """The saved flags of the CPU trainer, by options.def."""
    text = lab.read(os.path.join(lab.ROOT, "llmc/run/cli/options.def")).decode()
    flags = re.findall(r"^OPTION\(\w+, (\w+),[^)]*?(?:CPU|BOTH), SAVED,", text, re.M)
    return {name.strip("_").replace("_", "-") for name in flags}


def add_mask(path, tokens):
    """Turns a token file into one whose mask leaves out a third of the tokens; see llmc/files/tokenfile.h."""
    data = bytearray(tokens)
    count = len(data) // 2 - 512
    data[4:8] = (2).to_bytes(4, "little")
    trained = [int(i // 7 % 3 > 0) if i < count else 0 for i in range(count + -count % 8)]
    with open(path, "wb") as f:
        f.write(data + bytes(sum(trained[i + b] << b for b in range(8)) for i in range(0, len(trained), 8)))


def make_data(work, tokenize):
    """Writes token files of bytes, of another tokenizer and of small ids, one with a mask, and questions."""
    r = random.Random(1)
    words = "the a cat dog sat on mat and saw little bird fly over house then it said hello to moon".split()
    for name, documents, tokenizer in (("text", 60, []), ("more", 40, []), ("val", 8, []), ("tales", 200, TALES),
                                       ("tales_val", 30, TALES)):
        lines = [json.dumps({"text": " ".join(r.choice(words) for _ in range(r.randint(2, 20)))}) for _ in range(documents)]
        with open(os.path.join(work, name + ".jsonl"), "w") as f:
            f.write("\n".join(lines))
        subprocess.run([tokenize, *tokenizer, "-o", os.path.join(work, name + ".bin"), f.name], check=True,
                       stdout=subprocess.DEVNULL)
    add_mask(os.path.join(work, "masked.bin"), lab.read(os.path.join(work, "text.bin")))
    for name, count in (("ids", 3000), ("ids_val", 300)):
        with open(os.path.join(work, name + ".bin"), "wb") as f:
            f.write(b"".join(n.to_bytes(4, "little") for n in [20240520, 1, count] + [0] * 253))
            f.write(b"".join(r.randrange(61).to_bytes(2, "little") for _ in range(count)))
    with open(os.path.join(work, "tasks.jsonl"), "w") as f:
        for i in range(3):
            f.write(json.dumps({"ctx": "the", "choices": [r.choice(words) for _ in range(3)], "label": i}) + "\n")


def combination(r, work, gpu):
    """Returns the flags of a random run, all but --out; with `gpu`, also flags of the CUDA trainer."""
    def at(name):
        return os.path.join(work, name + ".bin")
    kind, batch, seq = r.choice(("bytes", "bytes", "tales", "pair", "pair")), r.randint(1, 3), r.randint(8, 40)
    flags = {"batch": batch, "seq": seq, "total-batch": batch * seq * r.choice((0, 1, 2, 3))}
    flags |= {name: r.choice(values.split()) for name, values in VALUES.items() if r.random() < 0.4}
    if gpu:
        flags |= {name: r.choice(values.split()) for name, values in GPU_VALUES.items() if r.random() < 0.7}
    if kind == "pair":
        pair = r.choice([name for name in sorted(os.listdir(PAIRS)) if "." not in name])
        flags |= {"model": os.path.join(PAIRS, pair), "train": at("ids"), "val": at("ids_val"), "prompt": r.choice(("3 4", ""))}
        flags |= {"documents": "cross"}  # without a tokenizer the start of a document is not known
        if not pair.startswith("lora"):
            flags |= {"lora": r.choice((0, 2, 5))}
    else:
        mix = "%s:0.7,%s:0.3" % (at("text"), at("more"))
        train = at("tales") if kind == "tales" else r.choice((at("text"), at("masked"), mix))
        flags |= {"model": "d1", "train": train, "val": at("tales_val" if kind == "tales" else "val"),
                  "prompt": r.choice(("the", "")), "tasks": os.path.join(work, "tasks.jsonl")}
        flags |= {"tokenizer": TALES[1]} if kind == "tales" else {}
    if r.random() < 0.1:
        flags |= {"lr": 1000, "weight-decay": 1000}  # ends with numbers that are not finite
    for name in ("val", "tasks", "prompt"):
        if r.random() < 0.3:
            flags.pop(name, None)
    if not int(flags.get("lora", 0)):
        flags = {name: value for name, value in flags.items() if not name.startswith("lora-")}
    if flags.get("schedule") not in ("constant", "wsd"):
        flags = {name: value for name, value in flags.items() if not name.startswith("decay")}
    steps, tokens = r.randint(3, 10), os.path.getsize(flags["train"].split(":")[0]) // 2 - 512
    epochs = "%.4f" % (steps * (flags["total-batch"] or batch * seq) / tokens)
    flags |= {"epochs": epochs} if r.random() < 0.2 else {"steps": steps}
    flags.setdefault("sample-tokens", "2")
    return ["--" + name for name in SWITCHES if r.random() < 0.4] + [
        word for name, value in flags.items() for word in ("--" + name, str(value))]


class Case:
    """One combination of flags: its runs, what they count as, and what is wrong."""

    def __init__(self, trainer, work, r):
        self.trainer, self.r, self.gpu = trainer, r, trainer.endswith("cu")
        self.flags = combination(r, work, self.gpu)
        self.folder = os.path.join(work, "%016x" % r.getrandbits(64))
        self.whole, self.parts = os.path.join(self.folder, "whole"), os.path.join(self.folder, "parts")
        self.found, self.wrong, self.story = ["runs"], [], []
        self.stops = set()  # the steps at which --stop-after ended a piece

    def bad(self, column, text):
        self.found.append(column)
        self.wrong.append("%s: %s" % (column, text.strip()[-400:].replace("\n", " | ")))

    def start(self, flags, folder, moments=()):
        """Runs the trainer on a number of threads; sends the signals of `moments`, each (seconds, signal)."""
        command = [self.trainer, *flags, "--threads", str(self.r.randint(1, 3)), "--out", folder]
        p = subprocess.Popen(command, cwd=lab.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        begin = time.monotonic()
        for moment, number in moments:
            try:
                p.wait(max(0, begin + moment - time.monotonic()))
            except subprocess.TimeoutExpired:
                p.send_signal(number)
        try:
            out, err = p.communicate(timeout=LIMIT)
            result = lab.Result(p.returncode, out, err)
        except subprocess.TimeoutExpired:
            p.kill()
            result = lab.Result("hang", *p.communicate())
        sent = [-number for _, number in moments]  # one that comes before the handlers are set ends the process
        if result.bad_form():
            self.bad("form", result.err)
        if result.status not in (0, 1, *sent):
            self.bad("signals", "status %s %s" % (result.status, result.err))
        return result

    def moved(self):
        """Returns flags that move the state of a GPU's run to the host, or back; at times none."""
        moves = self.gpu and self.r.random() < 0.7
        return ["--offload", self.r.choice(GPU_VALUES["offload"].split())] if moves else []

    def resume(self):
        """Returns the flags to resume with: all of them, or --resume alone if a checkpoint holds the others. --resume at times
        names the newest checkpoint. Without a name a run goes back before steps that are not finite, with one it does not."""
        r, steps = self.r, steps_in(self.parts)
        newest = os.path.join(self.parts, "step_%08d" % max(steps, default=0))
        finite = steps and b'"not_finite": false' in lab.read(os.path.join(newest, "trainer_state.json"))
        flags = ["--resume"] if steps and r.random() < 0.6 else [*self.flags, "--resume"]
        flags += [newest] if finite and r.random() < 0.2 else []
        return flags + self.moved() + (["--strict-resume"] if r.random() < 0.3 else [])

    def piece(self, span):
        """Runs a piece that ends early, if the run has not ended before."""
        r, flags, moments = self.r, self.resume(), []
        kind, at = r.choice(("killed", "stopped", "at a step")), r.uniform(0, 1.1 * span)
        if r.random() < 0.2:
            moments.append((r.uniform(0, at), r.choice((signal.SIGUSR1, signal.SIGUSR2))))
        if kind == "at a step":
            stop = max(steps_in(self.parts), default=0) + r.randint(1, 3)
            self.stops.add(stop)
            flags += ["--stop-after", str(stop)]
        else:
            stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
            moments.append((at, signal.SIGKILL if kind == "killed" else r.choice(stops)))
        self.start(flags, self.parts, moments)
        sent = ", ".join("%s after %.3f s" % (signal.Signals(number).name, moment) for moment, number in moments)
        self.story.append("%s %s -> %s" % (" ".join(flags[flags.index("--resume"):]), sent, steps_in(self.parts)))
        self.found += ["pieces", kind]

    def judge(self):
        """Runs the combination whole and in parts. Returns the columns to count and lines that describe what is wrong."""
        begin = time.monotonic()
        whole = self.start(self.flags, self.whole)
        span = time.monotonic() - begin
        if not steps_in(self.whole):
            self.found.append("refused")
        else:
            for _ in range(self.r.randint(1, 5)):
                self.piece(span)
            flags = self.resume()
            self.story.append(" ".join(flags[flags.index("--resume"):]))
            last = self.start(flags, self.parts)
            left = differs(self.whole, self.parts, self.stops, not {"--keep", "--checkpoint-minutes"} & set(self.flags))
            self.found += ["fail"] if whole.status else []  # its last step is not finite
            if last.status != whole.status:
                self.bad("stuck", "status %s, not %s: %s" % (last.status, whole.status, last.err))
            elif left:
                self.bad("changed", left + " " + last.err)
            else:
                self.found.append("same")
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.wrong:
            self.wrong += ["flags: " + " ".join(self.flags), "pieces: " + "; ".join(self.story)]
        return self.found, ["    " + line for line in self.wrong]


class Killed(Case):
    """One run that is killed many times, at moments spread over the time of about six steps."""

    def __init__(self, trainer, work, r, kills):
        super().__init__(trainer, work, r)
        text, more, val = (os.path.join(work, name + ".bin") for name in ("text", "more", "val"))
        self.kills, self.flags = kills, (
            f"--model d1 --train {text}:0.7,{more}:0.3 --val {val} --val-every 3 --val-batches 2 --batch 2 --seq 32 --sample-tokens 0 "
            "--total-batch 128 --steps 1000000 --schedule constant --checkpoint-every 1 --keep 3 --export-dtype bf16").split()

    def judge(self):
        begin, last = time.monotonic(), 0
        self.start([*self.flags, "--stop-after", "6"], os.path.join(self.folder, "timed"))
        span = time.monotonic() - begin
        for _ in range(self.kills):
            self.found += ["pieces", "killed"]
            result = self.start([*self.flags, "--resume", *self.moved()], self.parts,
                                [(self.r.uniform(0.005, span), signal.SIGKILL)])
            now = max(steps_in(self.parts), default=0)
            if result.status != -signal.SIGKILL:
                self.bad("stuck", "status %s before the kill: %s" % (result.status, result.err))
            if now < last:
                self.bad("changed", "step %d was saved, then only %d" % (last, now))
            last = now
        ends = [self.start([*self.flags, "--resume", "--stop-after", str(last + 2)], out).status for out in (self.whole, self.parts)]
        left = "" if ends == [0, 0] else "the last pieces end with status %s" % ends
        left = left or differs(self.whole, self.parts, (), True) or [
            name for name in os.listdir(self.parts) if name.endswith(".tmp")]
        self.bad("changed", str(left)) if left else self.found.append("same")
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.found, ["    " + line for line in self.wrong]


def steps_in(out):
    """The steps of a folder's checkpoints."""
    return sorted(int(name[5:]) for name in os.listdir(out) if lab.STEP.match(name)) if os.path.isdir(out) else []


def settled(files, added):
    """Takes out of a checkpoint what follows from the piece that wrote it: whether --checkpoint-minutes did, what its step
    still owed, and --offload. With `added` also its last validation, which --stop-after added."""
    state, validation = (json.loads(files[name]) for name in ("trainer_state.json", "validation"))
    for drawn in ("kind", "owed"):
        state.pop(drawn, None)
    state.get("options", {}).pop("offload", None)
    flags = re.sub(rb"--offload \w+\n", b"", files.get("run.flags", b""))
    if validation and added:
        del validation["step"], validation["loss"]
    return files | {"trainer_state.json": json.dumps(state).encode(), "validation": json.dumps(validation).encode(),
                    "run.flags": flags}


def same_plans(a, b):
    """Whether both plan files are there and agree. Each lists the products that its process has made, also those of samples."""
    if a is None or b is None:
        return False
    a, b = json.loads(a), json.loads(b)
    ours, theirs = ({tuple(v for name, v in plan.items() if name != "algo"): plan["algo"] for plan in file.pop("plans")}
                    for file in (a, b))
    return a == b and all(ours[product] == theirs[product] for product in ours.keys() & theirs)


def differs(whole, parts, stops, all_stay):
    """Returns in what the run in parts differs from the whole run; "" if in nothing."""
    wanted, got = (lab.steps_of_log(os.path.join(out, "log.jsonl")) for out in (whole, parts))
    if wanted is None or got is None:
        return "log.jsonl: a line is no event"
    got = [e for e in got if e["event"] == "step" or e["step"] not in stops or e in wanted]
    if got != wanted:
        i = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
        return "log.jsonl, event %d: %s in parts, %s in the whole run" % (i, got[i:i + 2], wanted[i:i + 2])
    there, here = steps_in(whole), steps_in(parts)
    if not here or here[-1] != there[-1] or (all_stay and set(there) - set(here)):
        return "checkpoints %s, wanted %s" % (here, there)
    for step in set(there) & set(here):
        name = "step_%08d" % step
        a, b = (lab.checkpoint(os.path.join(out, name)) for out in (whole, parts))
        added = (json.loads(b["validation"]) or {}).get("step") in stops
        a, b = settled(a, added), settled(b, added)
        for file in sorted(set(a) | set(b)):
            if a.get(file) != b.get(file) and not (file == PLAN and same_plans(a.get(file), b.get(file))):
                return "%s/%s: %s" % (name, file, ours(a.get(file), b.get(file)))
    return ""


def ours(a, b):
    """Shows where two contents part."""
    if a is None or b is None:
        return "is only in %s" % ("parts" if a is None else "the whole run")
    i = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return "whole %r, parts %r" % (a[max(0, i - 40):i + 40], b[max(0, i - 40):i + 40])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--count", type=int, default=200)
    p.add_argument("--kills", type=int, help="kills one run so often")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--only", type=int, help="this combination alone")
    p.add_argument("--trainer", default=os.path.join(os.environ.get("BIN", "."), "train_llama3"))
    p.add_argument("--jobs", type=int, default=int(os.environ.get("JOBS") or os.cpu_count()))
    args = p.parse_args()
    other = saved_flags() ^ {*VALUES, *SWITCHES, *GIVEN}
    if other:
        sys.exit("error: VALUES and the saved flags of options.def differ in " + ", ".join(sorted(other)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    work, trainer = lab.scratch(), os.path.abspath(args.trainer)
    make_data(work, os.path.join(os.environ.get("BIN", "."), "tokenize"))
    numbers = range(args.count) if args.only is None else [args.only]
    cases = [Case(trainer, work, random.Random("%d %d" % (args.seed, k))) for k in numbers]
    if args.kills:
        numbers, cases = [0], [Killed(trainer, work, random.Random(args.seed), args.kills)]
    row = {}
    for k, (found, wrong) in zip(numbers, lab.in_parallel(args.jobs, type(cases[0]).judge, cases)):
        for column in found:
            row[column] = row.get(column, 0) + 1
        if wrong:
            print("  --seed %d --only %d" % (args.seed, k), *wrong, sep="\n", flush=True)
    return 1 if lab.report("walk", COLUMNS, {"flags": row}, WANTED) else 0


if __name__ == "__main__":
    sys.exit(main())
