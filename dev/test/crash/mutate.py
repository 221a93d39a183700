#!/usr/bin/env python3
"""mutate.py [--count N] [--state] [--jobs N] -- feeds damaged and hostile files to train_llama3 and tokenize.

Each case takes one good input, changes one file of it and runs the program. The cases are the same on every run. --state
changes the numbers of a checkpoint's trainer_state.json instead and makes its checksum right, as a hostile author would.
BIN=DIR tests the programs of another build, such as one with sanitizers. Wanted of each case:
  crash    0  exit 0 or 1 (2 where a saved flag is out of range), no signal, no sanitizer report
  form     0  exit 1 comes with one line "error: ...", and no line is of another kind
  unnamed  0  and that line names the changed file
  slow     0  less than 2 s of processor time, and an end within 30 s
  memory   0  a peak below 200 MiB (400 with sanitizers) and 30 times the file
  wrong    0  a damaged checkpoint that is accepted continues with the good one's bits; weights that are not finite are refused
  litter   0  no output is left by a run that failed"""
import argparse, concurrent.futures, json, multiprocessing, os, random, re, resource, shutil, struct, subprocess, sys, tarfile
import threading
import lab

COLUMNS = ("cases", "refused", "accepted", "crash", "form", "unnamed", "slow", "memory", "wrong", "litter")
BIN = os.path.abspath(os.environ.get("BIN", lab.ROOT))
SANITIZED = "sanitize" in BIN
NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
MEMBER = re.compile(rb'"[^"]*"\s*:\s*(?:"[^"]*"|-?[\d.]+|true|false|null)\s*,')
HUGE = (b"1e999", b"99999999999999999999", b"-1", b"1.5", b"2147483648", b"9223372036854775807", b"9223372036854775808",
        b"18446744073709551616", b"1e18", b"0", b"-0", b"NaN", b"0x10", b"007", b"4294967297")

# --- changes of a file's bytes: change(r, b) returns the new bytes, or None where it doesn't apply ----------------------------


def at(r, b):
    return r.randrange(len(b) + 1)


def truncate(r, b): return b[:at(r, b[:-1])]
def cut_at_edge(r, b): return b[:r.choice((0, 1, 7, 8, 9, 1023, 1024, len(b) - 1))]
def extend(r, b): return b + r.randbytes(1 + r.randrange(4096))
def pad_with_zeros(r, b): return b + bytes(r.choice((1, 2, 4, 8, 4096)))
def empty(r, b): return b""
def noise(r, b): return r.randbytes(r.randrange(5000))


def block(r, b):
    i = at(r, b)
    return b[:i], b[i:i + 1 + r.randrange(64)], b[i:]


def delete(r, b):
    before, some, after = block(r, b)
    return before + after[len(some):]


def double(r, b):
    before, some, after = block(r, b)
    return before + some + after


def zero(r, b):
    before, some, after = block(r, b)
    return before + bytes(len(some)) + after[len(some):]


def flip(r, b, end=None):
    i = r.randrange(max(1, min(len(b), end or len(b))))
    return b[:i] + bytes([b[i] ^ 1 << r.randrange(8)]) + b[i + 1:]


def flip_head(r, b): return flip(r, b, 4096)
def another(r, b): return None  # Lab.damaged() takes the file of another target


ANY = (truncate, cut_at_edge, extend, pad_with_zeros, empty, noise, delete, double, zero, flip, flip_head, another)

# --- changes of text: JSON, or the header of a safetensors file --------------------------------------------------------------


def replace(pattern, r, b, make):
    found = list(pattern.finditer(b))
    m = r.choice(found) if found else None
    return b[:m.start()] + make(m[0]) + b[m.end():] if m else None


def digit(r, b): return replace(re.compile(rb"\d"), r, b, lambda _: b"%d" % r.randrange(10))
def huge(r, b): return replace(NUMBER, r, b, lambda _: r.choice(HUGE))
def other_type(r, b): return replace(NUMBER, r, b, lambda _: r.choice((b'"x"', b"null", b"true", b"[]", b"{}", b"[1]")))
def doubled_member(r, b): return replace(MEMBER, r, b, lambda m: m + m)
def lost_member(r, b): return replace(MEMBER, r, b, lambda _: b"")
def nested(r, b): return replace(NUMBER, r, b, lambda _: r.choice((b"[", b'{"a":')) * r.choice((100, 1000, 100000)))
def long_text(r, b): return replace(re.compile(rb'"'), r, b, lambda m: m + b"A" * r.choice((300, 5000, 70000, 3000000)))
def insert(r, b, pieces): i = at(r, b); return b[:i] + r.choice(pieces) + b[i:]
def bad_utf8(r, b): return insert(r, b, (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"))
def control(r, b): return insert(r, b, (b"\0", b"\\u0000", b"\x1b[2J", b"\r"))


TEXT = (digit, huge, huge, other_type, doubled_member, lost_member, nested, long_text, bad_utf8, control)


def safetensors(header, data):
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def in_header(change):
    def of_file(r, b):
        n = 8 + struct.unpack("<Q", b[:8])[0]
        header = change(r, b[8:n])
        return header if header is None else safetensors(header, b[n:])
    return of_file


def tensor(r, b, change):
    n = 8 + struct.unpack("<Q", b[:8])[0]
    header = json.loads(b[8:n])
    change(header[r.choice([k for k in header if k != "__metadata__"])])
    return safetensors(json.dumps(header, separators=(",", ":")).encode(), b[n:])


def moved(r, b): d = r.choice((-4, 4)); return tensor(r, b, lambda t: t.update(data_offsets=[x + d for x in t["data_offsets"]]))
def overflowing(r, b): return tensor(r, b, lambda t: t.update(shape=[r.choice((1 << 32, 1 << 61, 1 << 63)), 1 << 32]))
def many_sizes(r, b): return tensor(r, b, lambda t: t.update(shape=[1] * r.choice((8, 9, 1000, 100000)) + t["shape"]))
def other_dtype(r, b): return tensor(r, b, lambda t: t.update(dtype=r.choice(("F64", "BF16", "F16", "I8", "f32", ""))))
def header_length(r, b): return struct.pack("<Q", r.choice((0, 1, 1 << 32, (1 << 64) - 1, 100000001, len(b) - 8))) + b[8:]


def not_finite(r, b):
    n = 8 + struct.unpack("<Q", b[:8])[0]
    i = n + r.randrange((len(b) - n) // 4) * 4
    return b[:i] + r.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff")) + b[i + 4:]


TENSORS = tuple(in_header(change) for change in TEXT) + (moved, overflowing, many_sizes, other_dtype, header_length, not_finite)


def header_word(r, b):
    i = 4 * r.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100, 255))
    return b[:i] + struct.pack("<i", r.choice((0, -1, 1, 2, 7, 256, 257, 20240801, (1 << 31) - 1, -(1 << 31)))) + b[i + 4:]


def high_id(r, b): i = 1024 + r.randrange((len(b) - 1024) // 2) * 2; return b[:i] + b"\xff\xff" + b[i + 2:]


TOKENS = (header_word,) * 4 + (high_id,)

# --- other kinds of files in its place: make(path, b) ------------------------------------------------------------------------


def broken_link(path, b): os.symlink("/nonexistent/x", path)
def link_to_itself(path, b): os.symlink(os.path.basename(path), path)
def folder(path, b): os.mkdir(path)
def pipe(path, b): os.mkfifo(path)
def endless(path, b): os.symlink("/dev/zero", path)
def sparse(path, b): open(path, "wb").write(b); os.truncate(path, 1 << 40)


PLACES = (broken_link, link_to_itself, folder, pipe, endless, sparse)


class Case:
    def __init__(self, target, change, content):
        self.target, self.change, self.content = target, change, content


class Lab:
    def __init__(self, work, jobs):
        self.work, self.good = work, os.path.join(work, "good")
        # A program's peak of memory counts from before exec, when its memory is its parent's. So small processes, which hold no
        # cases, start the programs.
        self.starters = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
        os.makedirs(self.good)
        self.make_inputs()
        small = ["--batch", "1", "--seq", "16", "--total-batch", "16", "--threads", "1", "--sample-tokens", "0"]
        self.train, self.tokenize = os.path.join(BIN, "train_llama3"), os.path.join(BIN, "tokenize")
        subprocess.run([self.tokenize, "-o", "bytes.bin", "text.txt"], cwd=self.good, check=True, stdout=subprocess.DEVNULL)
        first = [self.train, "--model", "d1", "--train", "bytes.bin", "--steps", "9", *small]
        subprocess.run([*first, "--stop-after", "3", "--out", "run"], cwd=self.good, check=True, stdout=subprocess.DEVNULL)
        with_model = lambda m: [self.train, "--model", m, "--train", "low.bin", "--steps", "1", "--out", "new", *small]
        with_text = lambda t: [self.tokenize, "-o", "new.bin", t]
        self.resume = [*first, "--resume", "--stop-after", "5", "--out", "run"]
        reads = lambda t: [self.tokenize, "--tokenizer", t, "-o", "new.bin", "text.txt"]
        saved = "run/step_00000003/"
        self.targets = {
            "config": ("one/config.json", TEXT, with_model("one")),
            "weights": ("one/model.safetensors", TENSORS, with_model("one")),
            "index": ("two/model.safetensors.index.json", TEXT, with_model("two")),
            "shard": ("two/model-00002-of-00002.safetensors", TENSORS, with_model("two")),
            "tokens": ("bytes.bin", TOKENS, [*first, "--stop-after", "2", "--out", "new"]),
            "ranks": ("words/ranks.model", TEXT, reads("words/ranks.model")),
            "tokenizer": ("words/tokenizer.json", TEXT, reads("words/tokenizer.json")),
            "text": ("text.txt", TEXT, with_text("text.txt")), "jsonl": ("docs.jsonl", TEXT, with_text("docs.jsonl")),
            "saved.numbers": (saved + "trainer_state.json", TEXT, self.resume),
            "saved.config": (saved + "config.json", TEXT, self.resume),
            "saved.moments": (saved + "state_rank00000.safetensors", TENSORS, self.resume),
            "saved.weights": (saved + "model.safetensors", TENSORS, self.resume),
            "saved.words": (saved + "tokenizer.json", TEXT, self.resume),
            "log": ("run/log.jsonl", TEXT, self.resume), "lock": ("run/.lock", TEXT, self.resume),
        }
        whole = os.path.join(work, "whole")
        shutil.copytree(self.good, whole)
        subprocess.run(self.resume, cwd=whole, check=True, stdout=subprocess.DEVNULL)
        self.end = self.bits(whole)

    def make_inputs(self):
        words = "the a cat dog sat on mat and saw little bird fly over house then it said hello to moon".split()
        r = random.Random(1)
        some = lambda n: " ".join(r.choice(words) for _ in range(n))
        with open(os.path.join(self.good, "text.txt"), "w") as f:
            f.write(some(2000))
        with open(os.path.join(self.good, "docs.jsonl"), "w") as f:
            f.writelines(json.dumps({"text": some(30) + " \u20ac\U0001f600"}) + "\n" for _ in range(40))
        ids = [r.randrange(40) for _ in range(2000)]
        with open(os.path.join(self.good, "low.bin"), "wb") as f:
            f.write(struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + struct.pack("<%dH" % len(ids), *ids))
        test = os.path.join(lab.ROOT, "dev/test")
        os.makedirs(os.path.join(self.good, "words"))  # a separate folder: the trainer takes the tokenizer beside its data
        with tarfile.open(os.path.join(test, "fuzz/seeds.tar")) as seeds:
            for name, source in (("ranks.model", "tokenizer/ranks.model"), ("tokenizer.json", "tokenizer/llama3.json")):
                with open(os.path.join(self.good, "words", name), "wb") as f:
                    f.write(seeds.extractfile(source).read())
        pair = os.path.join(test, "pairs/gqa2_untied_rope8")
        shutil.copytree(pair, os.path.join(self.good, "one"))
        self.split(pair, os.path.join(self.good, "two"))

    def split(self, pair, folder):
        """Writes the pair's weights as two shards with an index."""
        os.makedirs(folder)
        shutil.copy(os.path.join(pair, "config.json"), folder)
        b = lab.read(os.path.join(pair, "model.safetensors"))
        start = 8 + struct.unpack("<Q", b[:8])[0]
        tensors = [(k, v) for k, v in json.loads(b[8:start]).items() if k != "__metadata__"]
        where = {}
        for i, part in enumerate((tensors[::2], tensors[1::2])):
            name, header, data = "model-%05d-of-00002.safetensors" % (i + 1), {"__metadata__": {"format": "pt"}}, b""
            for k, v in part:
                some = b[start + v["data_offsets"][0]:start + v["data_offsets"][1]]
                header[k] = dict(v, data_offsets=[len(data), len(data) + len(some)])
                data, where[k] = data + some, name
            with open(os.path.join(folder, name), "wb") as f:
                f.write(safetensors(json.dumps(header).encode(), data))
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {"total_size": len(b) - start}, "weight_map": where}, f, indent=1)

    def bits(self, folder):
        """The weights and moments at the end of a resumed run; None if the run left none."""
        files = [os.path.join(folder, "run/step_00000005", f) for f in ("model.safetensors", "state_rank00000.safetensors")]
        return [lab.read(f) for f in files] if all(map(os.path.exists, files)) else None

    def damaged(self, count):
        cases, i = [], 0
        names = list(self.targets)
        while len(cases) < count:
            target = names[i % len(names)]
            path, changes, _ = self.targets[target]
            r = random.Random("%s %d" % (target, i))
            b = lab.read(os.path.join(self.good, path))
            change = r.choice(ANY + changes * 2 + PLACES)
            i += 1
            if change is sparse and target in ("text", "jsonl"):
                continue  # a valid input: reading 1 TiB may take its time
            content = None if change in PLACES else change(r, b)
            if change is another:
                content = lab.read(os.path.join(self.good, self.targets[r.choice(names)][0]))
            if change in PLACES or content not in (None, b):
                cases.append(Case(target, change, content))
        return cases

    def hostile(self, count):
        """Cases of trainer_state.json with one other number and the right checksum."""
        b = lab.read(os.path.join(self.good, self.targets["saved.numbers"][0]))
        tail = b',\n  "crc32c": '
        body = b[:b.rindex(tail)]
        assert int(b[b.rindex(tail) + len(tail):].split()[0]) == crc32c(body)
        numbers = list(re.finditer(rb"(?<=[:\[ ])-?\d[\d.e+-]*", body[:body.index(b'"files"')]))
        cases = []
        for i in range(count):
            r = random.Random("number %d" % i)
            m = r.choice(numbers)
            other = r.choice(HUGE[:10] + (b"null", b'"x"', b"[]", b"1e308", b"1e-300", b"0.5"))
            new = body[:m.start()] + other + body[m.end():]
            cases.append(Case("saved.numbers", huge, new + tail + b"%d\n}\n" % crc32c(new)))
        return cases

    def judge(self, numbered):
        i, case, hostile = numbered
        path, _, command = self.targets[case.target]
        here = os.path.join(self.work, "case%d" % i)
        shutil.copytree(self.good, here)
        file = os.path.join(here, path)
        b = lab.read(file)
        os.remove(file)
        if case.change in PLACES:
            case.change(file, b)
        else:
            with open(file, "wb") as f:
                f.write(case.content)
        result, cpu, peak = self.starters.submit(measure, command, here).result()
        size, found, wrong = len(case.content or b""), ["cases"], []

        def bad(column, text):
            found.append(column)
            wrong.append("%s (%s)" % (column, str(text).strip()[-200:].replace("\n", " | ")))

        if result.status not in (0, 1, 2) or "Sanitizer" in result.err or "runtime error" in result.err:
            bad("slow" if result.status == "hang" else "crash", "status %s %s" % (result.status, result.err))
        if result.bad_form():
            bad("form", result.err)
        diverged = hostile and " is not finite, first in " in result.err  # the run trained with a learning rate of 1e308
        if result.status == 1 and os.path.basename(path) not in result.err and not diverged:
            bad("unnamed", result.err)
        if cpu > 2:
            bad("slow", "%.1f s" % cpu)
        if peak > ((400 if SANITIZED else 200) << 20) + 30 * size:
            bad("memory", "%d MiB" % (peak >> 20))
        if result.status == 0 and command == self.resume and not hostile and self.bits(here) != self.end:
            bad("wrong", result.err or result.out)
        if result.status == 0 and case.change is not_finite:
            bad("wrong", "weights that are not finite")
        if result.status == 1 and [f for f in os.listdir(here) if f.startswith("new.bin")]:
            bad("litter", os.listdir(here))
        found.append("accepted" if result.status == 0 else "refused")
        shutil.rmtree(here)
        return case, found, ", ".join(wrong)


def crc32c(data):
    c = 0xFFFFFFFF
    for byte in data:
        c ^= byte
        for _ in range(8):
            c = c >> 1 ^ (0x82F63B78 if c & 1 else 0)
    return c ^ 0xFFFFFFFF


def measure(command, folder):
    """Runs a command; returns its result, processor seconds and peak memory in bytes."""
    env = dict(os.environ, ASAN_OPTIONS="exitcode=99:allocator_may_return_null=1", OMP_NUM_THREADS="1")
    with open(os.path.join(folder, "stdout"), "w+b") as out, open(os.path.join(folder, "stderr"), "w+b") as err:
        p = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        if not SANITIZED:  # limits memory, so that a program that reads without end cannot bring the machine down
            resource.prlimit(p.pid, resource.RLIMIT_AS, (2 << 30, 2 << 30))
        late = threading.Event()
        timer = threading.Timer(30, lambda: (late.set(), p.kill()))
        timer.start()
        _, status, used = os.wait4(p.pid, 0)
        timer.cancel()
        p.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        result = lab.Result("hang" if late.is_set() else p.returncode, out.read(), err.read())
    return result, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--count", type=int, default=1200)
    p.add_argument("--state", action="store_true")
    p.add_argument("--jobs", type=int, default=int(os.environ.get("JOBS") or os.cpu_count()))
    args = p.parse_args()
    laboratory = Lab(lab.scratch(), args.jobs)
    cases = laboratory.hostile(args.count) if args.state else laboratory.damaged(args.count)
    rows = {}
    for case, found, wrong in lab.in_parallel(args.jobs, laboratory.judge, [(i, c, args.state) for i, c in enumerate(cases)]):
        row = rows.setdefault(case.target, {})
        for column in found:
            row[column] = row.get(column, 0) + 1
        if wrong:
            print("    %s, %s: %s" % (case.target, case.change.__name__, wrong), flush=True)
    return 1 if lab.report("hostile" if args.state else "damaged", COLUMNS, rows, COLUMNS[3:]) else 0


if __name__ == "__main__":
    sys.exit(main())
