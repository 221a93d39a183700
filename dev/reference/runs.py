"""runs.py -- the folder of a run: finds its checkpoints, and keeps other runs out of it by the rules of the C trainers.

The kernel's lock of OUT/.lock decides on one host (llmc/files/checkpoint.h), OUT/.owner among hosts, by its age on the file
server (llmc/run/session/owner.h). So runs of all three trainers exclude each other. A folder that holds the checkpoints of
another run is refused, and nothing is written through a link. Standard library only.
"""
import atexit
import fcntl
import glob
import os
import secrets
import shutil
import socket
import stat
import sys
import threading
import time
import zlib

from dev.errors import fail

RENEW_SECONDS, FRESH_SECONDS, SETTLE_SECONDS = 60, 180, 2


def checkpoints(out):
    """Returns the checkpoints of a run, the oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(out), "step_" + "[0-9]" * 8)))


def is_model(folder):
    return any(os.path.exists(os.path.join(folder, name)) for name in ("config.json", "adapter_config.json"))


def model_of(name):
    """Returns the folder of the model that --model names: in the folder of a run, its newest checkpoint."""
    models = [] if is_model(name) else [path for path in checkpoints(name) if is_model(path)]
    return models[-1] if models else name


def to_resume(out, path):
    """Returns the checkpoint that --resume PATH, or without PATH --out, names."""
    folder = path or (checkpoints(out) or [None])[-1]
    if folder and os.path.exists(os.path.join(folder, "trainer_state.json")):
        fail(f"{folder}: is a checkpoint of the C trainer, which can resume it", f"--model {folder} starts from its weights")
    if not folder or not os.path.exists(os.path.join(folder, "optimizer.pt")):
        fail(f"{folder or out}: no checkpoint to resume from")
    return folder


def refuse_other(out, resumed):
    """Ends the program if `out` holds the checkpoints of another run than the checkpoint `resumed` (None: a new run)."""
    found = checkpoints(out)
    if found and not (resumed and os.path.realpath(os.path.dirname(os.path.abspath(resumed))) == os.path.realpath(out)):
        fail(f"--out: {out} holds the checkpoints of another run, up to step {int(found[-1][-8:])}",
             "continue that run with --resume (without PATH), or give another --out")


def set_aside(out, step):
    """Gives checkpoints after `step`, of a run that was set back, the name step_N.set_back."""
    for path in checkpoints(out):
        if int(path[-8:]) > step:
            number = ""
            while os.path.lexists(f"{path}.set_back{number}"):
                number = int(number or 1) + 1
            os.rename(path, f"{path}.set_back{number}")
            print(f"aside   {path} is now {path}.set_back{number}")


def read_text(path):
    """Returns the text and the time of a regular file; ("", None) if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return "", None
    except OSError:
        return "", os.lstat(path).st_mtime_ns
    with open(fd, encoding="utf-8", errors="replace") as f:
        return f.read(256), os.fstat(fd).st_mtime_ns


class Out:
    """Holds --out for this process until it ends. `waits`: waits to see whether an owner on another host is alive."""

    def __init__(self, out, waits=False):
        self.out, self.lock_path, self.path = out, os.path.join(out, ".lock"), os.path.join(out, ".owner")
        host = "".join("_" if c <= " " else c for c in socket.gethostname()[:71]) or "unknown"
        self.boot = (read_text("/proc/sys/kernel/random/boot_id")[0].strip() or host)[:39]
        self.token, self.mine = f"{secrets.randbits(64) | 1:016x}", os.getpid()
        self.text = f"{host} {self.mine} {self.token} {self.boot}\n"
        self.temporary = os.path.join(out, f".owner.{zlib.crc32(self.boot.encode()):08x}")
        self.take(waits)
        atexit.register(self.release)
        threading.Thread(target=self.renew, daemon=True).start()

    def take(self, waits):
        try:
            os.makedirs(self.out, exist_ok=True)
        except OSError as error:
            fail(f"{self.out}: cannot make the folder: {error.strerror}")
        while not self.lock():
            pass
        self.claim(waits)

    def lock(self):
        """Locks OUT/.lock. Returns False if its file was replaced meanwhile, or shares a name with a backup."""
        path, regular = self.lock_path, f"{self.lock_path}: wanted a regular file of this folder alone, or none"
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            fail(regular)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = os.pread(self.fd, 31, 0).decode(errors="replace").strip() or "0"
            fail(f"{self.out}: another run (process {process}) is writing into this folder, wanted a folder of its own",
                 "wait for it to end, or choose another --out")
        text, alone = os.pread(self.fd, 31, 0), os.fstat(self.fd).st_nlink <= 1
        if not self.locked() or not alone:
            if not alone and text and not (text.endswith(b"\n") and text[:-1].isdigit()):
                fail(regular)
            if self.locked():
                os.unlink(path)  # a backup of hard links has the other name: it keeps its file
            os.close(self.fd)
            return False
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, b"%d\n" % self.mine, 0)
        return True

    def locked(self):
        """Returns whether the locked file still has its name."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.lstat(self.lock_path))
        except OSError:
            return False

    def owner(self):
        """Returns host, process, token, boot and time of OUT/.owner. Time None: there is none; token "0": unknown."""
        text, when = read_text(self.path)
        words = text.split()
        return (*(words if len(words) == 4 else ("unknown", "0", "0", "")), when)

    def refuse(self, age):
        host, process, *_ = self.owner()
        fail(f"{self.out}: a run on host {host} (process {process}) is writing into this folder: it said so {age:.0f} s ago",
             "wait for it to end, or choose another --out; if it was killed, its claim ends in "
             f"{FRESH_SECONDS - age:.0f} s")

    def claim(self, waits):
        """Makes OUT/.owner this process's."""
        if os.path.lexists(self.path) and not stat.S_ISREG(os.lstat(self.path).st_mode):
            fail(f"{self.path}: wanted a regular file or none")
        if os.path.lexists(self.temporary):
            os.unlink(self.temporary)
        with open(self.temporary, "x", encoding="utf-8") as f:
            f.write(self.text)
        try:
            os.link(self.temporary, self.path)
        except OSError:  # it is there, or the file system has no links
            self.replace(waits)
        finally:
            if os.path.lexists(self.temporary):
                os.unlink(self.temporary)

    def replace(self, waits):
        host, process, _, boot, when = self.owner()
        if when is None or boot == self.boot:  # the kernel's lock was free: a process of this host is dead
            os.replace(self.temporary, self.path)
            return
        os.utime(self.temporary)
        age = (os.lstat(self.temporary).st_mtime_ns - when) * 1e-9
        if age < 0:  # from the future: alive, but for three minutes at most by the file server's clock
            os.utime(self.path)
            age, when = 0, self.owner()[4]
        if age < FRESH_SECONDS and not waits:
            self.refuse(age)
        if age < FRESH_SECONDS:
            print(f"owner   {self.path} is of host {host} (process {process}), {age:.0f} s old: waiting up to "
                  f"{FRESH_SECONDS - age:.0f} s to see whether it is alive", flush=True)
            until = time.monotonic() + FRESH_SECONDS - age
            while when is not None and time.monotonic() < until:
                time.sleep(min(5, max(0.01, until - time.monotonic())))
                now = self.owner()[4]
                if now not in (None, when):
                    self.refuse(0)
                when = now
        os.replace(self.temporary, self.path)
        time.sleep(SETTLE_SECONDS)
        self.check_owner()

    def check_owner(self):
        host, process, token, _, when = self.owner()
        if when is not None and token not in ("0", self.token):
            fail(f"{self.out}: a run on host {host} (process {process}) has taken this folder over")

    def keep(self):
        """Checks before a checkpoint that OUT still belongs to this run. If it was moved or removed, makes it again."""
        if self.locked():
            self.check_owner()
            return
        if os.path.lexists(self.lock_path):
            fail(f"{self.out}: is another run's folder now: the one that this run locked was moved or removed")
        print(f"warning: {self.out}: it, or .lock in it, was moved or removed while this run uses it: it is made again",
              file=sys.stderr)
        os.close(self.fd)
        self.take(waits=False)

    def renew(self):
        while True:
            time.sleep(RENEW_SECONDS)
            if self.owner()[2] == self.token:
                os.utime(self.path)

    def release(self):
        if os.getpid() == self.mine and self.owner()[2] == self.token:
            os.unlink(self.path)


def remove_old(out, keep, major_every):
    """Removes all but the newest `keep` checkpoints (0: all stay). Multiples of `major_every` stay, too."""
    for path in checkpoints(out)[:-keep] if keep else []:
        if not (major_every and int(path[-8:]) % major_every == 0):
            shutil.rmtree(path)
