"""Which signals ask a rank to stop."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """\
import os, signal
from trainer.stop import StopRequest
signal.signal(signal.SIGHUP, signal.{before})
stop = StopRequest()
stop.install()
os.kill(os.getpid(), signal.{number})
print(stop.requested, stop.reason)
"""


@pytest.mark.parametrize(("before", "number", "told"), [
    ("SIG_IGN", "SIGHUP", "False "), ("SIG_DFL", "SIGHUP", "True SIGHUP"),
    ("SIG_IGN", "SIGTERM", "True SIGTERM"),
])  # fmt: skip
def test_a_hangup_asks_for_a_stop_unless_nohup_has_it_ignored(before, number, told):
    done = subprocess.run([sys.executable, "-c", CODE.format(before=before, number=number)],
                          capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == f"{told}\n"
