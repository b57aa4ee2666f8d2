"""Freed memory stays in the process until `give_back`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from trainer.distributed import allocator

GLIBC = platform.libc_ver()[0] == "glibc"

PLAIN = {name: value for name, value in os.environ.items()
         if not name.startswith(("MALLOC_", "LD_PRELOAD")) and name != "GLIBC_TUNABLES"}

STEPS = """
import json, resource, torch
from trainer.distributed import allocator
from trainer.telemetry.step_timing import resident_mb

def step():  # 30 tensors of 8 MB, held until its end
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2_000_000) for _ in range(30)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
before = resident_mb()
step(), step()
kept = allocator.keep_freed()
step(), step(), step()  # depending on the first block's address, the heap may grow once more
# The minimum of several: the kernel causes faults too, as when it moves pages between sockets.
faults, resident = min(step() for _ in range(3)), resident_mb()
allocator.give_back()
print(json.dumps([kept, faults, resident - before, resident - resident_mb()]))
"""


@pytest.mark.skipif(not GLIBC, reason="another C library's allocator")
def test_a_step_reuses_the_memory_freed_by_the_previous_one():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True,
                          env=PLAIN)
    kept, faults, kept_mb, given_back_mb = json.loads(done.stdout)

    assert kept
    assert faults < 100  # of 58,600 pages
    assert kept_mb > 200  # of 240
    assert given_back_mb > 200


@pytest.mark.parametrize(("name", "value"), [
    ("MALLOC_TRIM_THRESHOLD_", "100000000"),
    ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1000000")])
def test_settings_of_the_user_are_respected(name, value, monkeypatch):
    monkeypatch.setattr(allocator, "_set", lambda *_: True)
    monkeypatch.setattr(os, "environ", {**PLAIN})
    assert allocator.keep_freed()
    os.environ[name] = value
    assert not allocator.keep_freed()
