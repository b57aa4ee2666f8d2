"""Paths for the tests' own modules, and for `benchmarks`, which isn't installed."""

import sys
from pathlib import Path

for folder in ("..", "support", "ranks"):
    path = str((Path(__file__).parent / folder).resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
