#!/usr/bin/env python3
"""floors.py -- checks the floors of llmc: a file includes only files of its own room or of rooms on lower floors. Rooms on one
floor may include each other in one direction, gpu and run not at all. The folders of run have their own floors. Prints each
include that climbs; exit 1 if there is one. Run from the project's root."""
import re
import sys
from pathlib import Path

FLOORS = ["base", "cuda", "layers", "optim", "files dist", "text", "train", "gpu run/cli"]  # layers: the files of llmc itself
FLOORS += ["run/screen", "run/session", "run/loop", "run/jobs"]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}


def room(path):
    return str(Path(path).parent.relative_to("llmc")) if path.count("/") > 1 else "layers"


def main():
    arrows = {}  # {(room, included room): its includes}
    for path in sorted(str(p) for p in Path("llmc").rglob("*") if p.suffix in (".h", ".cuh", ".def")):
        for number, line in enumerate(open(path), 1):
            found = re.match(r'\s*#\s*include\s+"(llmc/[^"]+)"', line)
            if found and room(path) != room(found[1]):
                arrows.setdefault((room(path), room(found[1])), []).append(f"{path}:{number} includes {found[1]}")
    climbs = []
    for (a, b), includes in arrows.items():
        if not {a, b} <= set(FLOOR) or FLOOR[a] < FLOOR[b] or a[:3] + b[:3] in ("gpurun", "rungpu") or (b, a) in arrows:
            climbs += [f"{i}: {a} stands on floor {FLOOR.get(a)}, {b} on floor {FLOOR.get(b)}" for i in includes]
    print("\n".join(climbs))
    return len(climbs) > 0


if __name__ == "__main__":
    sys.exit(main())
