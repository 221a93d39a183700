#!/usr/bin/env python3
"""power_cut.py [--trainer PATH] [--resumes N] [--jobs N] -- cuts the power after each change that a run makes on disk.

shim.c records every change below --out of a run that writes four checkpoints and prunes two. A power cut may come after each
change of the record. The disk may then hold:
  kept     all of it
  dropped  only fsynced changes: a file's data by fsync of the file, a name (made, renamed, removed) by fsync of its folder
  one      all but one change that was not fsynced, each in turn
  torn     of the last write only the pages before a boundary of 4 KiB, or only the pages behind it
This model assumes no more than POSIX: fsync of a file doesn't keep its name, and changes that were not fsynced may come in any
order. ext4 (ordered) and xfs give more: they journal names in their order and write a new file's name with its data. The model
assumes that fsync tells the truth (disks that lie about their cache are not promised). It also assumes that a rename is whole
or not at all, and so is a page of 4 KiB of the last write.

Wanted of each such disk: a folder step_N without .tmp is whole. Once a checkpoint is sealed (renamed, its folder fsynced), it
stays until it is pruned. On N disks, evenly spread over the different ones, --resume must end in the bits of the unbroken run.
The log is no part of the promise: lines that were not fsynced may be lost ("log lost").

The other paths that promise an fsync are cut, too: an export to a folder and to a GGUF file, two token files and --train-bpe
over older files, and a resumed run whose log has a second name. At each moment a target is as it was before or as it is at the
end. After the end it is as at the end, even if all that was not fsynced is lost."""
import argparse, os, re, shutil, subprocess, sys
import lab

PAGE, NEVER = 4096, sys.maxsize
OUT = "runs/out"  # two new folders: the names of both must survive


class Disk:
    """Names and contents. A content is the list of changes that made it: equal lists are equal bytes."""

    def __init__(self):
        self.names, self.contents = {}, {}  # {(folder's number, name): number}, {number: [(change, part)]}

    def apply(self, i, op, part="all"):
        kind = op[0]
        if kind == "link":
            self.names[op[1]] = op[2]
        elif kind == "unlink":
            self.names.pop(op[1], None)
        elif kind == "rename" and op[1] in self.names:
            self.names[op[2]] = self.names.pop(op[1])
        elif kind == "exchange" and op[1] in self.names and op[2] in self.names:
            self.names[op[1]], self.names[op[2]] = self.names[op[2]], self.names[op[1]]
        elif kind in ("write", "truncate"):
            self.contents[op[1]] = self.contents.get(op[1], ()) + ((i, part),)

    def tree(self, folder=0, prefix=""):
        """{path: content, None for a folder}"""
        found = {}
        for (parent, name), number in self.names.items():
            if parent == folder:
                is_folder = number < 0 or number == 0
                found[prefix + name] = None if is_folder else self.contents.get(number, ())
                if is_folder:
                    found.update(self.tree(number, prefix + name + "/"))
        return found


class Record:
    """The recorded changes. ops[i]: a change. It names files by number, so that it stays the same when an earlier name is lost.
    synced[i]: the index of the last fsync that it needs to be kept, NEVER without. Folders have numbers below 1; 0 is the
    folder that the run starts in."""

    def __init__(self, path, root, there=()):
        """there: what the root held before, as existing() returns it."""
        self.ops, self.synced, self.data, self.disk = [], [], {}, Disk()
        self.waiting = {}  # {file or folder: changes that wait for its next fsync}
        self.needs = []  # how many fsyncs each change waits for: a rename into another folder needs two
        self.next = 1
        numbers = {}
        for name, inode, data in there:
            number = numbers.setdefault(inode, -self.next if data is None else self.next)
            self.next += abs(number) == self.next
            self.push(("link", self.place(name)[0], number), [])
            if data is not None:
                self.push(("truncate", number, 0, 0), [])
                self.push(("write", number, 0, len(data)), [])
                self.data[len(self.ops) - 1] = data
        self.start = len(self.ops)
        self.synced = [-1] * self.start
        with open(path, "rb") as f:
            while line := f.readline():
                kind, first, second, offset, length = line.decode().split(" ")
                data = f.read(int(length))
                places = [self.place(os.path.relpath(p, root)) for p in (first, second) if p != "-"]
                self.add(kind, places, int(offset), data)

    def place(self, path):
        """(folder's number, name), and the number that this name has; None if it has none."""
        folder, parts = 0, path.split("/")
        if path == ".":
            return None, 0
        for part in parts[:-1]:
            folder = self.disk.names.get((folder, part))
        return (folder, parts[-1]), self.disk.names.get((folder, parts[-1]))

    def add(self, kind, places, offset, data):
        (name, number), other = places[0], places[1][0] if len(places) > 1 else None
        folders = [name[0]] + ([other[0]] if other else []) if name else []
        if kind == "fsync":
            for i in self.waiting.pop(number, []):
                self.needs[i] -= 1
                self.synced[i] = len(self.ops) if self.needs[i] == 0 else NEVER
            self.push(("fsync",), [])
        elif kind in ("create", "mkdir") and number is None:
            self.push(("link", name, self.next if kind == "create" else -self.next), folders)
            self.next += 1
        elif kind == "unlink":
            self.push(("unlink", name), folders)
        elif kind in ("rename", "exchange"):
            self.push((kind, name, other), sorted(set(folders)))
        elif kind in ("write", "truncate") and number is not None:
            self.push((kind, number, offset, len(data)), [number])
            self.data[len(self.ops) - 1] = data

    def push(self, op, kept_by):
        self.disk.apply(len(self.ops), op)
        self.ops.append(op)
        self.synced.append(NEVER)
        self.needs.append(len(kept_by))
        for number in kept_by:
            self.waiting.setdefault(number, []).append(len(self.ops) - 1)

    def bytes_of(self, content):
        out = bytearray()
        for i, part in content:
            _, _, offset, length = self.ops[i]
            if self.ops[i][0] == "truncate":
                out[offset:] = bytes(max(0, offset - len(out)))
                continue
            cut = self.boundary(i)
            first, last = {"all": (0, length), "head": (0, cut), "tail": (cut, length)}[part]
            out.extend(bytes(max(0, offset + last - len(out))))
            out[offset + first:offset + last] = self.data[i][first:last]
        return bytes(out)

    def boundary(self, i):
        """Where write i is torn: the page boundary nearest to its middle, as a distance from its start; 0 if it has none."""
        _, _, offset, length = self.ops[i]
        cut = (offset + length // 2 + PAGE // 2) // PAGE * PAGE - offset
        return cut if 0 < cut < length else 0

    def after(self, count, dropped=(), parts=None):
        disk = Disk()
        for i, op in enumerate(self.ops[:count]):
            if i not in dropped:
                disk.apply(i, op, (parts or {}).get(i, "all"))
        return disk.tree()

    def cuts(self, count):
        """Yields (model, tree) of each disk that a power cut after the first `count` changes may leave."""
        loose = [i for i in range(count) if self.ops[i][0] != "fsync" and self.synced[i] >= count]
        yield "kept", self.after(count)
        yield "dropped", self.after(count, set(loose))
        for i in loose:
            yield "one", self.after(count, {i})
        last = count - 1
        if last >= 0 and self.ops[last][0] == "write" and self.boundary(last):
            yield "torn", self.after(count, parts={last: "head"})
            yield "torn", self.after(count, parts={last: "tail"})


def steps_in(tree):
    """{name of a checkpoint's folder: {file: content}}"""
    found = {}
    for path, content in tree.items():
        step = re.fullmatch(OUT + r"/(step_\d{8})(?:/(.*))?", path)
        if step:
            found.setdefault(step[1], {}).update({step[2]: content} if step[2] else {})
    return found


def promises(record):
    """whole: {step: its files, as they were when it got its name}. sealed[k]: the steps that must stand after k changes."""
    whole, sealed, stands = {}, [set()], set()
    for k in range(1, len(record.ops) + 1):
        now = set(steps_in(record.after(k)))
        for step in now - set(whole):
            whole[step] = steps_in(record.after(k))[step]
        if record.ops[k - 1][0] == "fsync":
            out_synced = any(record.synced[i] == k - 1 and record.ops[i][0] in ("rename", "exchange") for i in range(k))
            stands |= now if out_synced else set()
        stands &= now
        sealed.append(set(stands))
    return whole, sealed


def lay_out(record, tree, folder):
    for path, content in sorted(tree.items()):
        full = os.path.join(folder, path)
        if content is None:
            os.makedirs(full, exist_ok=True)
        else:
            with open(full, "wb") as f:
                f.write(record.bytes_of(content))


def existing(root):
    """Lists what a folder holds, a folder before what is in it: (path, inode, content or None for a folder)."""
    paths = sorted(os.path.join(at, name) for at, folders, files in os.walk(root) for name in folders + files)
    return [(os.path.relpath(p, root), os.stat(p).st_ino, None if os.path.isdir(p) else lab.read(p)) for p in paths]


def at_target(tree, targets):
    return {p: c for p, c in tree.items() if any(p == t or p.startswith(t + "/") for t in targets)}


def cut_path(run, shim, name, command, targets, prepare=None, log=None):
    """Records a command in a folder of its own, and returns a row of the table. log: a log that must begin as it was up to the
    step from which the run resumes, while the target, its other name, keeps all of it."""
    folder, trace = os.path.join(run.work, name), os.path.join(run.work, name + ".trace")
    os.makedirs(folder)
    if prepare:
        prepare(folder)
    there = existing(folder)
    env = dict(os.environ, LD_PRELOAD=shim, FAULT_BELOW=folder, FAULT_TRACE=trace)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=run.limit)
    if done.returncode != 0:
        sys.exit("error: %s fails: %s" % (name, done.stderr))
    record, row = Record(trace, folder, there), {"changes": 0}
    last = len(record.ops)
    before, after = at_target(record.after(record.start), targets), at_target(record.after(last), targets)
    kept = dict((path, data) for path, _, data in there)

    def stands(tree, at_end):
        if log:
            found = [record.bytes_of(tree[p]) if tree.get(p) is not None else b"" for p in (log, targets[0])]
            return found[0].startswith(kept[log].split(b'{"event":"end"')[0]) and found[1] == kept[targets[0]]
        of = [[at_target(state, [t]) for state in (tree, before, after)] for t in targets]
        if at_end:
            return all(now == new for now, _, new in of)
        # an old file of validation may be gone, but never lies beside a new training file: it may have the same text
        mixed = len(of) > 1 and of[0][0] == of[0][2] and of[1][0] == of[1][1] != {}
        return not mixed and all(now in (old, new) or (i > 0 and now == {}) for i, (now, old, new) in enumerate(of))

    for k in range(record.start, last + 1):
        row["changes"] += 1
        for model, tree in record.cuts(k):
            row["disks"] = row.get("disks", 0) + 1
            if not stands(tree, k == last):
                column = "lost" if k == last else "damaged"
                row[column] = row.get(column, 0) + 1
                if row[column] <= 3:
                    moment = "after %d changes, the last %s" % (k - record.start, record.ops[k - 1][:3])
                    print("    %s, %s: %s" % (name, model, moment))
    return row


def cut_paths(run, shim):
    trainer, tokenize = run.trainer, os.path.join(os.path.dirname(run.trainer), "tokenize")
    model, text = os.path.join(run.base, "step_%08d" % run.first), os.path.join(run.work, "text.txt")

    def old_files(folder):
        for name in ("t.json", "d_train.bin", "d_val.bin"):
            with open(os.path.join(folder, name), "w") as f:
                f.write("an older file")

    def linked_log(folder):
        shutil.copytree(run.base, os.path.join(folder, "out"))
        os.link(os.path.join(folder, "out/log.jsonl"), os.path.join(folder, "other"))

    rows = {
        "export": cut_path(run, shim, "export", [trainer, "--model", model, "--export", "new"], ["new"]),
        "gguf": cut_path(run, shim, "gguf", [trainer, "--model", model, "--export", "new.gguf"], ["new.gguf"]),
        "tokens": cut_path(run, shim, "tokens", [tokenize, "--val-fraction", "0.5", "-o", "d.bin", text, text],
                           ["d_train.bin", "d_val.bin"], old_files),
        "bpe": cut_path(run, shim, "bpe", [tokenize, "--train-bpe", "300", "-o", "t.json", text], ["t.json"], old_files),
        "linked log": cut_path(run, shim, "log", [trainer, *run.flags[:-2], "--resume", "--stop-after", str(run.first + 1)],
                               ["other"], linked_log, "out/log.jsonl"),
    }
    return lab.report("paths", ("changes", "disks", "damaged", "lost"), rows, ("damaged", "lost"))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--trainer", default=os.path.join(os.environ.get("BIN", "."), "train_llama3"))
    p.add_argument("--resumes", type=int, default=400)
    p.add_argument("--jobs", type=int, default=int(os.environ.get("JOBS") or os.cpu_count()))
    args = p.parse_args()
    work = lab.scratch()
    shim = lab.build_shim(work)
    if not shim:
        print("skip power cut: the shim needs x86-64 Linux with seccomp filters\n0 passed, 0 failed, 1 skipped")
        return 0
    run = lab.Run(args.trainer, work, jobs=args.jobs)
    run.flags += ["--out", OUT]
    folder = os.path.join(work, "recorded")
    os.makedirs(folder)
    trace = os.path.join(work, "trace")
    made = run.start(folder, ["--stop-after", str(run.last)], {"LD_PRELOAD": shim, "FAULT_BELOW": folder, "FAULT_TRACE": trace})
    if made.status != 0:
        sys.exit("error: the recorded run fails: %s" % made.err)
    record = Record(trace, folder)
    whole, sealed = promises(record)
    rows = {m: {} for m in ("kept", "dropped", "one", "torn")}
    disks = {}

    def count(model, column, text=""):
        rows[model][column] = rows[model].get(column, 0) + 1
        if text and rows[model][column] <= 5:
            print("    %s, %s: %s" % (model, column, text), flush=True)

    for k in range(len(record.ops) + 1):
        for model, tree in record.cuts(k):
            count(model, "disks")
            steps = steps_in(tree)
            standing = {step for step, files in steps.items() if files == whole.get(step)}
            moment = "after %d changes, the last %s" % (k, record.ops[k - 1][:3])
            for step in sorted(set(steps) - standing):
                count(model, "damaged", "%s %s" % (step, moment))
            if not sealed[k] <= standing:
                count(model, "lost", "%s %s" % (", ".join(sorted(sealed[k] - standing)), moment))
            disks.setdefault((model, *sorted((path, content or ()) for path, content in tree.items())), (model, k, tree))

    def resume(disk):
        model, k, tree = disk
        folder = os.path.join(work, "cut-%s-%d-%d" % (model, k, id(tree)))
        os.makedirs(folder)
        lay_out(record, tree, folder)
        again = run.start(folder, run.goes_on())
        left = again.err if again.status != 0 else run.same_end(os.path.join(folder, OUT), "warning: " in again.err)
        shutil.rmtree(folder)
        return left

    chosen = [d for model in rows for d in lab.sample([d for d in disks.values() if d[0] == model], args.resumes // len(rows))]
    for disk, left in zip(chosen, lab.in_parallel(args.jobs, resume, chosen)):
        count(disk[0], "resumed")
        if left:
            column = "log lost" if left == "log.jsonl" else "changed"
            count(disk[0], column, "after %d changes: %s" % (disk[1], left.strip()[-160:]))
    print("%d changes, %d different disks" % (sum(op[0] != "fsync" for op in record.ops), len(disks)))
    columns = ("disks", "damaged", "lost", "resumed", "changed", "log lost")
    failed = lab.report("power cut", columns, rows, ("damaged", "lost", "changed"))
    return 1 if failed + cut_paths(run, shim) else 0


if __name__ == "__main__":
    sys.exit(main())
