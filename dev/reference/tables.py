"""tables.py -- reads the tables of the C trainers from their headers: presets, peaks of GPUs, flags. Python has no copies."""
import json
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def source(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def version():
    return re.search(r'LLMC_VERSION "(.*)"', source("llmc/base/utils.h"))[1]


def c_table(path, name):
    """Returns the rows of the table `name` in a header. A row begins with a string; inner braces become lists."""
    body = re.search(rf"\b{name}\[\] = {{\n(.*?)^}};", source(path), re.S | re.M)[1]
    rows = re.findall(r'^ *{(".*)},$', body, re.M)
    return [json.loads("[" + row.replace("{", "[").replace("}", "]") + "]") for row in rows]


def c_strings(path, start, end):
    """Returns the strings of C between two marks in a header."""
    body = source(path).partition(start)[2].partition(end)[0]
    return [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', body)]


def c_numbers(path, prefix):
    """Returns {name: number} of the numbers that a header defines by #define PREFIX_NAME."""
    return {name: float(number) for name, number in re.findall(rf"^#define {prefix}_(\w+) \(?([-\d.e]+)", source(path), re.M)}


def gpu_peak(name):
    """Returns the dense bf16 peak in TFLOP/s of the device with this name, by gpu_peak_flops() of llmc/train/mfu.h. 0: unknown,
    or no bf16 units."""
    if any(other in name for other in ("Laptop", "Max-Q", "MIG")):
        return 0.0
    for key, (*_, bf16) in c_table("llmc/train/mfu.h", "gpu_peaks"):
        words = iter(name.lower().translate(str.maketrans("-_/()", "     ")).split())
        if all(word in words for word in key.lower().split()):
            return bf16
    return 0.0


def flag_value(kind, text):
    """Returns the number of an INT, LONG or FLOAT flag, by the rules of option_set() in llmc/run/cli/options.h, or None."""
    try:
        if kind == "FLOAT":
            return float(text) if re.fullmatch(r"[-+.0-9eE]+", text) else None
        return int(text) if re.fullmatch(r"-?[0-9]+", text) else None
    except ValueError:
        return None


def c_flags():
    """Returns {name: (kind, aliases, default, min, max, value, help)} of every flag in llmc/run/cli/options.def."""
    flags = {}
    for body in re.findall(r"^OPTION\((.*?)\)$", source("llmc/run/cli/options.def"), re.S | re.M):
        body = re.sub(r'"\n\s*"', "", body)  # adjacent strings are one
        words = [word or text.replace('\\"', '"') for text, word in re.findall(r'"((?:[^"\\]|\\.)*)"|([\w.+-]+)', body)]
        kind, field, aliases, default, low, high, _, _, _, value, text = words
        aliases = ["-" * (1 + (len(a) > 2)) + a for a in aliases.split()]
        default = None if default == "NULL" else default
        flags[field.strip("_").replace("_", "-")] = (kind, aliases, default, float(low), float(high), value, text)
    return flags
