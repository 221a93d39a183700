"""lab.py -- shared by the crash tests: a small run and its unbroken reference, ways to run it with a fault, and the verdict.

The run is the same each time: a fault may cost time, never bits. So a checkpoint is whole if it equals the reference's
checkpoint of that step: the same weights, state and configuration byte for byte, and the same numbers in trainer_state.json.
The run id is left out, since it is drawn; so are the files that a run may lose with a warning."""
import atexit, concurrent.futures, json, os, re, shutil, signal, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
SIDE_FILES = re.compile(r"run\.flags|tokenizer|special_tokens|generation_config|chat_template")
DRAWN = ("crc32c", "files", "run", "parent_run", "parent_step")  # members of trainer_state.json that two equal runs differ in
STEP = re.compile(r"step_\d{8}$")


def scratch():
    path = os.path.realpath(tempfile.mkdtemp(prefix="llama3_crash_", dir=os.environ.get("TEST_TMP", "/tmp")))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    return path


def build_shim(folder):
    """Returns the path of the shim; None where this machine cannot use it."""
    path = os.path.join(folder, "shim.so")
    source = os.path.join(ROOT, "dev/test/crash/shim.c")
    if os.uname().machine != "x86_64":
        return None
    subprocess.run([os.environ.get("CC", "cc"), "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-o", path, source], check=True)
    works = subprocess.run(["true"], env=dict(os.environ, LD_PRELOAD=path), capture_output=True).returncode == 0
    return path if works else None


class Result:
    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    def cut_short(self):
        """The step at which an error of log or data ended the run, once its weights were saved; None without such an error."""
        told = re.search(r"^  hint: step (\d+) is saved", self.err, re.M)
        return int(told[1]) if self.status == 1 and told else None

    def bad_form(self):
        """stderr of a failed run holds one error line, and otherwise hints and warnings."""
        lines = self.err.splitlines()
        strange = [l for l in lines if not l.startswith(("error: ", "  hint: ", "warning: "))]
        errors = sum(l.startswith("error: ") for l in lines)
        return self.status == 1 and (errors != 1 or strange) or self.status == 0 and (errors or strange)


def read(path):
    with open(path, "rb") as f:
        return f.read()


def checkpoint(folder):
    """{name: content} of a checkpoint's files; of trainer_state.json the numbers that must be equal."""
    files = {name: read(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
    state = json.loads(files.get("trainer_state.json", b"null") or b"null")
    if state:
        listed = {f["name"]: f["size"] for f in state["files"]}
        present = {name: len(data) for name, data in files.items() if name != "trainer_state.json"}
        files["listed"] = b"as it is" if listed == present else b"otherwise"
        for member in ("validation", "owed"):
            files[member] = json.dumps(state.pop(member, None)).encode()
        files["trainer_state.json"] = json.dumps({k: v for k, v in state.items() if k not in DRAWN}).encode()
    return files


def steps_of_log(path):
    """The steps, validations, samples and tasks of a log, without times; None if a line is no event."""
    try:
        events = [json.loads(line) for line in read(path).decode("utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    return [{k: v for k, v in e.items() if k not in ("ms", "tok_s", "seconds", "memory")} for e in events
            if e["event"] in ("step", "val", "sample", "task")]


class Run:
    """A small run: base holds it at step `first`, ref the same run continued to step `last`."""

    def __init__(self, trainer, work, flags=(), jobs=2, limit=60):
        self.trainer, self.work, self.jobs, self.limit = os.path.abspath(trainer), work, jobs, limit
        self.first, self.last = 2, 4
        self.base, self.ref = os.path.join(work, "base/out"), os.path.join(work, "ref/out")
        self.flags = ("--model d1 --train ../data.bin --val ../data.bin --val-every 2 --val-batches 1 --batch 1 --seq 32 "
                      "--threads 1 --sample-every 2 --sample-tokens 4 --steps 100 --schedule constant --checkpoint-every 1 "
                      "--keep 2 --out out").split() + list(flags)
        self.make_data()
        self.whole = {}  # {step's folder: its content}
        for folder, extra in ((self.base, ["--stop-after", str(self.first)]), (self.ref, self.goes_on())):
            os.makedirs(os.path.dirname(folder))
            if folder == self.ref:
                shutil.copytree(self.base, self.ref)
            made = self.start(os.path.dirname(folder), extra)
            if made.status != 0:
                sys.exit("error: the run without faults fails: %s" % made.err)
            self.whole.update({s: checkpoint(os.path.join(folder, s)) for s in os.listdir(folder) if STEP.match(s)})

    def make_data(self):
        words = "the a cat dog sat on mat and saw little bird fly over house then it said hello to moon".split()
        text = os.path.join(self.work, "text.txt")
        with open(text, "w") as f:
            f.write(" ".join(words[i * i * 7919 % 1009 % len(words)] for i in range(900)))
        tokenize = os.path.join(os.path.dirname(self.trainer), "tokenize")
        subprocess.run([tokenize, "-o", os.path.join(self.work, "data.bin"), text], check=True, stdout=subprocess.DEVNULL)

    def goes_on(self):
        return ["--resume", "--stop-after", str(self.last)]

    def start(self, folder, extra, fault=None):
        """Runs the trainer in a folder, under the shim if `fault` holds its variables."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("FAULT_")}
        try:
            p = subprocess.run([self.trainer, *self.flags, *extra], cwd=folder, env=dict(env, **(fault or {})),
                               stdin=subprocess.DEVNULL, capture_output=True, timeout=self.limit)
            return Result(p.returncode, p.stdout, p.stderr)
        except subprocess.TimeoutExpired as e:
            return Result("hang", e.stdout or b"", e.stderr or b"")

    def lost(self, out, warned, cut_short=None):
        """Returns what a folder's checkpoints lack; "" if all are whole. Side files may be missing where a warning says so, and
        the work that was due at step `cut_short`, which a resumed run makes."""
        steps = [s for s in os.listdir(out) if STEP.match(s)] if os.path.isdir(out) else []
        for s in steps:
            got, wanted = checkpoint(os.path.join(out, s)), self.whole.get(s, {})
            for name in sorted(set(got) | set(wanted)):
                missing = warned and name not in got and SIDE_FILES.search(name)
                to_come = name in ("validation", "owed") and s == "step_%08d" % (cut_short or 0)
                if got.get(name) != wanted.get(name) and not missing and not to_come:
                    return "%s/%s" % (s, name)
        return "" if steps else "every checkpoint"

    def same_end(self, out, warned=False, cut_short=None):
        """Returns what differs from the unbroken run; "" if nothing does. The log may lack lines of step `cut_short`."""
        last = "step_%08d" % self.last
        if not os.path.isdir(os.path.join(out, last)):
            return last
        got, wanted = (steps_of_log(os.path.join(folder, "log.jsonl")) for folder in (out, self.ref))
        if got is None or got != [e for e in wanted if e in got or e["step"] != cut_short]:
            return "log.jsonl"
        return self.lost(out, warned)


def in_parallel(jobs, work, items):
    """Yields work(item) of each item in their order; `jobs` at once."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(work, items)


def sample(items, count):
    """`count` of the items, evenly spread; all if count is 0."""
    return items if not count or count >= len(items) else [items[i * len(items) // count] for i in range(count)]


def report(title, columns, rows, wanted):
    """Prints a table and one line for each column of `wanted`. These columns must be 0 in every row. Returns how many are
    not."""
    print("\n%-10s" % title + "".join("%12s" % c for c in columns))
    for name, row in rows.items():
        print("%-10s" % name + "".join("%12d" % row.get(c, 0) for c in columns))
    failed = 0
    for c in wanted:
        total = sum(row.get(c, 0) for row in rows.values())
        print("ok   %s: none %s" % (title, c) if total == 0 else "FAIL %s: %d %s" % (title, total, c))
        failed += total != 0
    print("%d passed, %d failed, 0 skipped" % (len(wanted) - failed, failed))
    return failed
