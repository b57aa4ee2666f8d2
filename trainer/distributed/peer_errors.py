"""Recognise errors that the end of another rank causes, and code that is not the trainer's."""

from __future__ import annotations

import dis
import os
import sysconfig

import trainer

TRAINER_FOLDER = os.path.dirname(os.path.abspath(str(trainer.__file__))) + os.sep
_LAUNCH = os.path.join(os.path.dirname(TRAINER_FOLDER[:-1]), "launch") + os.sep
_TASKS = os.path.join(TRAINER_FOLDER, "tasks", "")
_LOSSES = os.path.join(_TASKS, "losses.py")  # not counted as the user's code, unlike the tasks
_STDLIB = sysconfig.get_path("stdlib") + os.sep


def lost_peer(error: BaseException) -> bool:
    """Whether an error is secondary: a collective broke or timed out because another rank ended.
    Gloo and NCCL raise plain RuntimeErrors, which differ from others only in the message. One that
    begins with a rank is reported by `World.raise_on_all_ranks` and not secondary. Nor is one that
    user code raises, unless it handles a secondary one."""
    words = ("connection closed by peer", "connection reset by peer", "broken pipe",
             "socket closed", "remote process exited", "ncclremoteerror", "timed out waiting",
             "application timeout caused")
    kinds = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError")
    text = text_of(error).lower()
    if (type(error).__name__ not in kinds or text.startswith("rank ")
            or not any(word in text for word in words)):
        return False
    behind = error.__cause__ or error.__context__
    return not _raised_by_others(error) or (behind is not None and lost_peer(behind))


def _raised_by_others(error: BaseException) -> bool:
    """Whether a `raise` statement of user code raised it; a collective raises from C."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    by_statement = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return by_statement and foreignness(code.co_filename) < 2


def text_of(error: BaseException) -> str:
    """Text of an exception, also if its `__str__` fails; of a group, with those of its members."""
    try:
        if not isinstance(error, BaseExceptionGroup):
            return str(error)
        inside = [": ".join(filter(None, (type(e).__name__, text_of(e)))) for e in error.exceptions]
        return f"{error.message} ({'; '.join(inside)})"
    except Exception as problem:
        return f"(its text is not available: {type(problem).__name__})"


def foreignness(path: str) -> int:
    """0: the user's own file; 1: a library's; 2: the trainer's, torch's or Python's."""
    if path.startswith(TRAINER_FOLDER):
        return 0 if path.startswith(_TASKS) and path != _LOSSES else 2
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return 2 if "torch" in parts else 1
    return 2 if path.startswith(("<", _STDLIB, _LAUNCH)) else 0
