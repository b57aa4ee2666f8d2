"""Paths for the tests' own modules, and for `benchmarks`, which isn't installed; how hypothesis
draws."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

for folder in ("..", "support", "ranks"):
    path = str((Path(__file__).parent / folder).resolve())
    if path not in sys.path:
        sys.path.insert(0, path)

# The same examples each time, however long one takes: neither luck nor a busy machine fails a test.
settings.register_profile("tests", deadline=None, derandomize=True, database=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
