"""Paths for the tests' own modules."""

import sys
from pathlib import Path

for folder in ("support", "ranks"):
    path = str(Path(__file__).parent / folder)
    if path not in sys.path:
        sys.path.insert(0, path)
