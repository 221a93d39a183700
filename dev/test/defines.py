#!/usr/bin/env python3
"""defines.py -- checks the comments beside includes: in `#include "llmc/x.h" // defines: a, b` the file defines a and b, and
the includer uses them. No file includes a header twice. Prints what is wrong; exit 1 if anything is. Run from the project's
root."""
import re
import subprocess
import sys


def definitions(path):
    """The names that a header defines at its outermost level."""
    text = re.sub(r"^LLMC_\w+(?: LLMC_PRINTF)?(?:\([^)]*\))? |^__attribute__\(\([^()]*\)\) ", "", open(path).read(), flags=re.M)  # attributes of functions
    names = set(re.findall(r"^#define (\w+)", text, re.M)) | set(re.findall(r"^(?:typedef enum \{.*)?} (\w+);", text, re.M))
    names |= set(re.findall(r"^(?:typedef )?(?:struct|union|enum) (\w+)", text, re.M))
    names |= set(re.findall(r"^typedef [^;{]*?\(\*(\w+)\)", text, re.M))
    names |= set(re.findall(r"^typedef [^;{(]*\b(\w+);", text, re.M))
    names |= set(re.findall(r"^[A-Za-z_][^;=#(]*?\b(\w+)\(", text, re.M))  # functions
    names |= set(re.findall(r"^(?:static|constexpr)[^;(]*?\b(\w+)(?:\[[^\]]*\])* =", text, re.M))  # constants and tables
    for body in re.findall(r"\benum(?: \w+)? \{(.*?)\}", text, re.S):
        names |= set(re.findall(r"\b([A-Za-z_]\w*)\s*(?:=|,|$)", re.sub(r"//.*", "", body) + ","))
    return names


def main():
    files = [f for f in subprocess.check_output(["git", "ls-files"], text=True).split() if re.search(r"\.(h|cuh|c|cu)$", f)]
    known, wrong = {}, 0
    for path in files:
        text = open(path).read()
        code = re.sub(r"//.*|/\*.*?\*/", "", text)
        included = re.findall(r'^#include "((?:llmc|dev)/[^"]+h)"', text, re.M)
        for header in {h for h in included if included.count(h) > 1}:
            print(f"{path}: includes {header} twice")
            wrong += 1
        for header, listed in re.findall(r'^#include "((?:llmc|dev)/[^"]+)"\s*// defines: (.*)$', text, re.M):
            known.setdefault(header, definitions(header))
            for name in re.findall(r"\b[A-Za-z_]\w+\b", re.sub(r"\.\.\.|\band\b.*", "", listed)):
                problem = "defines no" if name not in known[header] else "is included for, but nothing uses,"
                if name in known[header] and re.search(rf"\b{name}\b", code):
                    continue
                print(f"{path}: {header} {problem} {name}")
                wrong += 1
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
