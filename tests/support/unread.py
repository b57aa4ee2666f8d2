"""Run programs whose output pipe has no reader."""

from __future__ import annotations

import os
import subprocess
import sys


def ended(*command: str, unbuffered: bool = False) -> tuple[int, str]:
    """Exit code and stderr of a program whose stdout has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *command], stdout=writer, stderr=subprocess.PIPE,
                          text=True, check=False,
                          env={**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""})
    os.close(writer)
    return done.returncode, done.stderr
