"""errors.py -- ends a script with one line where its user can mend the cause. A script imports it before other packages.

A package that is not installed is named, with the pip command for it and for the other packages of this script: requirements.txt
says which. A file that cannot be opened is named, too. Ctrl-C prints "stopped". Any other exception is a mistake in the script,
and shows its traceback. --help needs no package: without it, or without argparse, the script's own text is shown.
Standard library only.
"""
import fnmatch
import importlib.util
import os
import re
import sys
import sysconfig

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
PIP_NAMES = {"llama_cpp": "llama-cpp-python"}  # of modules that have another name than their package


def fail(message, hint=None):
    sys.exit(f"error: {message}" + (f"\n  hint: {hint}" if hint else ""))


def run_log(path):
    """Returns the log of a run's folder, or the file that was named. A link in a folder, which may come from elsewhere, could
    lead to any file of the user's."""
    log = os.path.join(path, "log.jsonl")
    if not os.path.isdir(path):
        return path
    if os.path.islink(log) or (os.path.exists(log) and not os.path.isfile(log)):
        fail(f"{log}: is a link or no file, wanted the log of a run")
    return log


def packages_of(script):
    """Lists the packages whose lines of requirements.txt name a script, given by its path in the tree. A * stands for names."""
    with open(os.path.join(ROOT, "requirements.txt"), encoding="utf-8") as f:
        lines = [re.match(r"([\w-]+).*?# (.*)", line) for line in f]
    return [line[1] for line in lines if line and any(fnmatch.fnmatch(script, name) for name in line[2].split(", "))]


def pip_command(module):
    """Returns the command that installs a missing module, and the other missing packages of this script."""
    script = os.path.relpath(os.path.realpath(sys.argv[0] or "-"), ROOT)
    packages = [package for package in packages_of(script) if not importlib.util.find_spec(package)]
    if module not in packages:
        packages.append(PIP_NAMES.get(module, module))
    # Debian's own Python refuses pip outside of a virtual environment
    managed = os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
    venv = "python3 -m venv .venv && . .venv/bin/activate && " if managed and sys.prefix == sys.base_prefix else ""
    return f"{venv}pip install {' '.join(packages)}"


def one_line(kind, error, trace):
    """Is called for an exception that nobody catches."""
    module = (getattr(error, "name", None) or "").split(".")[0]
    missing = issubclass(kind, ModuleNotFoundError) and module not in {"dev", *sys.stdlib_module_names}
    if missing and wants_help:
        print(f"{about}\n\nThe flags are listed where {module} is installed: {pip_command(module)}", flush=True)
        os._exit(0)  # sys.exit() has no effect here
    if missing:
        text = f"error: {module} is not installed\n  hint: {pip_command(module)}"
    elif issubclass(kind, BrokenPipeError):  # the reader of a pipe has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    elif issubclass(kind, OSError) and error.filename is not None:
        text = f"error: {os.fsdecode(error.filename2 or error.filename)}: {error.strerror}"
    elif issubclass(kind, KeyboardInterrupt):
        text = "error: stopped"
    else:
        sys.__excepthook__(kind, error, trace)
        return
    print(text, file=sys.stderr)


sys.excepthook = one_line
wants_help, about = {"-h", "--help"} & set(sys.argv[1:]), (sys.modules["__main__"].__doc__ or "").strip()
if wants_help and about and "argparse" not in sys.modules:  # a script with argparse imports it before this file
    print(about)
    sys.exit(0)
