#!/usr/bin/env python3
"""make_pairs.py [OUT] -- writes the models and debug states of dev/reference/oracles.py to OUT (dev/test/pairs)."""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.insert(0, ROOT)
import dev.errors  # noqa: E402, F401  first: see there
from dev.reference import oracles  # noqa: E402

oracles.write_pairs(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "dev", "test", "pairs"))
