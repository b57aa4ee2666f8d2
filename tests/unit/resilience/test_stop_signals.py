"""Which signals ask a rank to stop, and what a request does while the main thread is busy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """\
import os, signal
from trainer.resilience.stop_signals import StopSignals
signal.signal(signal.SIGHUP, signal.{before})
stop = StopSignals()
stop.install()
os.kill(os.getpid(), signal.{number})
print(stop.requested, stop.reason)
"""


@pytest.mark.parametrize(("before", "number", "told"), [
    ("SIG_IGN", "SIGHUP", "False "), ("SIG_DFL", "SIGHUP", "True SIGHUP")])
def test_a_hangup_asks_for_a_stop_unless_nohup_has_it_ignored(before, number, told):
    done = subprocess.run([sys.executable, "-c", CODE.format(before=before, number=number)],
                          capture_output=True, text=True, timeout=200, check=True)

    assert done.stdout == f"{told}\n"


LOOK = """\
import os, signal, threading
from trainer.resilience.stop_signals import StopSignals
stop = StopSignals()
stop.install()
{before}
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
os.kill(os.getpid(), signal.SIGTERM)
print(stop.requested, stop.reason)
"""


@pytest.mark.parametrize("before", ["", "stop.shield()"])
def test_a_look_after_a_signal_sees_it_however_busy_other_threads_are(before):
    done = subprocess.run([sys.executable, "-c", LOOK.format(before=before)],
                          capture_output=True, text=True, timeout=200, check=True)

    assert done.stdout == "True SIGTERM\n"


BUSY = """\
import hashlib, os, resource, signal, sys, threading
from trainer.resilience.stop_signals import StopSignals
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1025)]  # as a program may have opened
stop = StopSignals()
stop.install()
{before}
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)  # minutes in C, where no handler of Python runs
"""


@pytest.mark.parametrize(("before", "code"), [
    ("stop.limit(0.2, lambda: 3)", 3),
    ("stop.limit(1e9, lambda: 3); stop.leave_when(lambda: True, lambda: 75)", 75),
    ("stop.shield(); stop.leave_when(lambda: stop.only_from(os.getpid()), lambda: 75)", 75),
    ("os.kill(os.getpid(), signal.SIGTERM); stop.leave_when(lambda: True, lambda: 75)", 75)])
def test_a_request_counts_though_the_main_thread_is_in_c(before, code):
    done = subprocess.run([sys.executable, "-c", BUSY.format(before=before)], timeout=200,
                          check=False)

    assert done.returncode == code


SHIELDED = """\
import os, signal, subprocess, sys
from trainer.resilience.stop_signals import StopSignals
stop = StopSignals()
stop.install()
os.setpgid(0, 0)
{before}
child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
os.killpg(0, signal.SIGTERM)
child.communicate(b"end")
while not stop.requested: pass
print(child.returncode, stop.only_from(os.getpid()))
"""


@pytest.mark.parametrize(("before", "told"), [("", "-15 False\n"), ("stop.shield()", "0 True\n")])
def test_what_a_shielded_process_starts_outlives_a_signal_to_its_group(before, told):
    done = subprocess.run([sys.executable, "-c", SHIELDED.format(before=before)], timeout=200,
                          capture_output=True, text=True, check=True)

    assert done.stdout == told


ORPHAN = """\
import os, signal, subprocess, sys, time
from trainer.resilience import stop_signals as stop
if sys.argv[1:]:
    print("begun", flush=True)
    stop.ORPHAN_LIMIT_S, parent = 0, int(sys.argv[1])
    {first}
    {second}
    time.sleep(20)  # an import
    print("still there", flush=True)
else:
    subprocess.Popen([sys.executable, "-c", sys.orig_argv[2], str(os.getpid())]).wait()
"""
KILLED = "os.kill(parent, signal.SIGKILL)"
ADOPTED = f"""\
{KILLED}
    while os.getppid() == parent: pass
    if os.getppid() != 1 or not stop._is_init(): os._exit(0)  # nobody can tell
"""


@pytest.mark.parametrize(("first", "second"), [
    ("stop.attend()", KILLED), (ADOPTED, "stop.attend()"),
], ids=["while-it-imports", "before-its-first-line"])
def test_a_rank_of_torchruns_notices_that_torchrun_is_killed(first, second):
    started = subprocess.Popen([sys.executable, "-c", ORPHAN.format(first=first, second=second)],
                               env={**os.environ, "TORCHELASTIC_RUN_ID": "none"},
                               stdout=subprocess.PIPE, text=True)

    assert started.communicate(timeout=100)[0] == "begun\n"
