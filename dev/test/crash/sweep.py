#!/usr/bin/env python3
"""sweep.py [error] [kill] [malloc] [--trainer PATH] [--sample N] [--jobs N] [--card] -- each call of a run fails once.

A resumed run of two steps that writes and prunes two checkpoints is repeated under shim.c:
  error   each system call fails once
  kill    kill -9 before each system call that changes a file
  malloc  each allocation fails: alone, or with all after it
Then the run is resumed without a fault. Wanted of each:
  damaged  0  every checkpoint that stands is whole, and one stands
  signals  0  none but the kill -9 that was planted
  silent   0  exit 0 means that nothing is lost
  form     0  exit 1 comes with one line "error: ...", and no line is of another kind
  changed  0  the resumed run ends in the bits of the run without a fault. If an error of log or data ended the run, the run
              says which step is saved. The log may then lack lines of that step, and its checkpoint the validation, which the
              resumed run makes
--sample N takes N faults of each sweep, evenly spread. --card is for the GPU trainer: faults hit only calls on files below
--out, from the first checkpoint on, since earlier calls are the CUDA driver's."""
import argparse, errno, os, shutil, sys
import lab

ERRORS = {"write": (errno.ENOSPC, errno.EIO), "fsync": (errno.EIO,), "rename": (errno.EIO,),
          "open": (errno.EMFILE, errno.EACCES), "close": (errno.EIO,), "unlink": (errno.EIO,), "mkdir": (errno.ENOSPC,),
          "list": (errno.EIO,), "truncate": (errno.EIO,),
          "lock": (errno.ENOLCK,), "read": (errno.EIO,), "stat": (errno.EIO,), "seek": (errno.EINVAL,), "mmap": (errno.ENOMEM,)}
ON_A_CARD = ("write", "fsync", "rename")
CHANGES = ("write", "fsync", "rename", "open", "close", "unlink", "mkdir", "truncate")
COLUMNS = ("faults", "errors", "passed", "resumed", "damaged", "signals", "silent", "form", "changed")
WANTED = ("damaged", "signals", "silent", "form", "changed")


def faults(sweep, counts, card):
    """Returns all faults of a sweep: (class, which call, action, whether all later calls fail too)."""
    if sweep == "malloc":
        return [("malloc", k, "12", once) for once in ("", "1") for k in range(1, counts["malloc"] + 1)]
    if sweep == "kill":
        return [(c, k, "kill", "") for c in CHANGES for k in range(1, counts[c] + 1)]
    classes = ON_A_CARD if card else ERRORS
    return [(c, k, str(e), "") for c in classes for e in ERRORS[c] for k in range(1, counts[c] + 1)]


class Sweeper:
    def __init__(self, run, shim, card):
        self.run, self.shim, self.card = run, shim, card

    def variables(self, folder, **more):
        env = {"LD_PRELOAD": self.shim, **more}
        if self.card:
            env.update(FAULT_ARM=".tmp", FAULT_BELOW=os.path.join(folder, "out/"))
        return env

    def count(self):
        folder = os.path.join(self.run.work, "count")
        shutil.copytree(os.path.dirname(self.run.base), folder)
        file = os.path.join(folder, "counts")
        made = self.run.start(folder, self.run.goes_on(), self.variables(folder, FAULT_COUNTS=file))
        left = self.run.same_end(os.path.join(folder, "out"))
        if made.status != 0 or left:
            sys.exit("error: the run under the shim without a fault differs: %s" % (made.err or left))
        return {line.split()[0]: int(line.split()[1]) for line in open(file)}

    def judge(self, fault):
        """Runs one fault; returns the columns to count and a line that describes what is wrong."""
        kind, k, action, from_there_on = fault
        folder = os.path.join(self.run.work, "-".join(map(str, ("x",) + fault)))
        out = os.path.join(folder, "out")
        shutil.copytree(os.path.dirname(self.run.base), folder)
        env = self.variables(folder, FAULT_CLASS=kind, FAULT_AT=str(k), FAULT_DO=action)
        if from_there_on:
            env["FAULT_FROM"] = "1"
        broken = self.run.start(folder, self.run.goes_on(), env)
        found, wrong = ["faults"], []

        def bad(column, text):
            found.append(column)
            wrong.append("%s (%s)" % (column, text.strip()[-160:].replace("\n", " | ")))

        warned = "warning: " in broken.err
        killed = action == "kill" and broken.status == -9
        if not killed and broken.status not in (0, 1):
            bad("signals", "status %s %s" % (broken.status, broken.err))
        if broken.bad_form():
            bad("form", broken.err)
        if self.run.lost(out, warned, broken.cut_short()):
            bad("damaged", self.run.lost(out, warned, broken.cut_short()))
        if broken.status == 0 and self.run.same_end(out, warned):
            bad("silent", self.run.same_end(out, warned))
        found.append("errors" if broken.status == 1 else "passed" if broken.status == 0 else "killed")
        again = self.run.start(folder, self.run.goes_on())
        left = self.run.same_end(out, warned or "warning: " in again.err, broken.cut_short())
        if again.status != 0 or left:
            bad("changed", again.err if again.status != 0 else left)
        else:
            found.append("resumed")
        shutil.rmtree(folder)
        return found, ", ".join(wrong)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("sweeps", nargs="*", choices=["error", "kill", "malloc", []])
    p.add_argument("--trainer", default=os.path.join(os.environ.get("BIN", "."), "train_llama3"))
    p.add_argument("--sample", type=int, action="append", default=[])
    p.add_argument("--jobs", type=int, default=int(os.environ.get("JOBS") or os.cpu_count()))
    p.add_argument("--card", action="store_true")
    args = p.parse_args()
    sweeps = args.sweeps or ["error", "kill", "malloc"]
    samples = dict(zip(sweeps, args.sample * len(sweeps) if len(args.sample) == 1 else args.sample))
    work = lab.scratch()
    shim = lab.build_shim(work)
    if not shim:
        print("skip sweeps: the shim needs x86-64 Linux with seccomp filters\n0 passed, 0 failed, %d skipped" % len(sweeps))
        return 0
    run = lab.Run(args.trainer, work, jobs=args.jobs, flags=["--model", "d2"] if args.card else [])
    sweeper = Sweeper(run, shim, args.card)
    counts = sweeper.count()
    rows = {}
    for sweep in sweeps:
        rows[sweep] = {}
        chosen = lab.sample(faults(sweep, counts, args.card), samples.get(sweep, 0))
        for fault, (found, wrong) in zip(chosen, lab.in_parallel(args.jobs, sweeper.judge, chosen)):
            for column in found:
                rows[sweep][column] = rows[sweep].get(column, 0) + 1
            if wrong:
                how = " from there on" if fault[3] else ""
                print("    %s %s, action %s%s: %s" % (fault[0], fault[1], fault[2], how, wrong), flush=True)
    return 1 if lab.report("sweep", COLUMNS, rows, WANTED) else 0


if __name__ == "__main__":
    sys.exit(main())
