#!/usr/bin/env python3
"""make_pairs.py [OUT] -- writes the models and debug states of PAIRS in train_llama3.py to OUT (dev/test/pairs)."""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.insert(0, ROOT)
import train_llama3  # noqa: E402

train_llama3.write_pairs(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "dev", "test", "pairs"))
