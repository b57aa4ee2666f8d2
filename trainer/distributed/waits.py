"""Markers of waits: a thread marks what it waits for, so that another thread can look it up."""

from __future__ import annotations

import sys
import threading
from enum import Enum
from types import CodeType, FrameType

from trainer.storage.files import display_path


class WaitsFor(Enum):
    """What a thread waits for."""

    NOBODY = "nobody"
    PEERS = "peers"  # other ranks
    DEVICE = "device"  # which waits for other ranks; no user code runs meanwhile
    WRITER = "writer"  # the thread that writes checkpoints
    PERSON = "person"  # at a debugger's prompt


_COLLECTIVES = ("torch.distributed.", "torch.nn.parallel.")
"""Packages of torch in which a thread waits for other ranks, also when user code calls them."""
_OWN = ("torch", "trainer", "threading", "concurrent")
"""Top-level packages whose frames are skipped in the search for user code."""
_markers: dict[int, list[tuple[WaitsFor, CodeType]]] = {}
"""Thread → (wait, code that marked it), the innermost last."""


class waiting_for:
    """Context in which the calling thread waits, unless it runs user code (a hook, an autograd
    function) there: see `waits_for`. Each step has two of them."""

    def __init__(self, whom: WaitsFor) -> None:
        self._whom = whom

    def __enter__(self) -> None:
        _markers.setdefault(threading.get_ident(), []).append(
            (self._whom, sys._getframe(1).f_code))

    def __exit__(self, *error: object) -> None:
        _markers[threading.get_ident()].pop()


def waits_for(thread: int, frame: FrameType | None) -> WaitsFor:
    """What the thread with this innermost frame waits for. A marker counts unless user code runs
    below it: outwards from the innermost frame, one of the trainer, or of the code that marked the
    wait, comes before any of user code. Without a marker a thread waits for its peers inside
    torch's collectives, which user code may call, and for a person if a debugger has control
    (`bdb.Bdb`, from which pdb and IPython's derive)."""
    if frame is None:
        return WaitsFor.NOBODY
    if f"{_module(frame)}.".startswith(_COLLECTIVES):
        return WaitsFor.PEERS
    inner: FrameType | None = frame
    if stack := _markers.get(thread):
        whom, code = stack[-1]
        if whom is WaitsFor.DEVICE:
            return whom
        while inner is not None:
            package = _module(inner).partition(".")[0]
            if package == "trainer" or inner.f_code is code:
                return whom
            if package not in _OWN:
                break
            inner = inner.f_back
    debugger = sys.modules.get("bdb")
    while debugger is not None and frame is not None:
        if isinstance(frame.f_locals.get("self"), debugger.Bdb):
            return WaitsFor.PERSON
        frame = frame.f_back
    return WaitsFor.NOBODY


def collective_of_user(frame: FrameType | None) -> str:
    """The collective of torch in which the thread with this innermost frame waits, with the line of
    user code that has called it; "" if the trainer has, or if it waits elsewhere."""
    name = ""
    while frame is not None and _module(frame).partition(".")[0] == "torch":
        if f"{_module(frame)}.".startswith(_COLLECTIVES) and frame.f_code.co_name != "wrapper":
            name = frame.f_code.co_name
        frame = frame.f_back
    if frame is None or not name or _module(frame).partition(".")[0] == "trainer":
        return ""
    code = frame.f_code
    return f"{name} ({display_path(code.co_filename)}:{frame.f_lineno} in {code.co_name})"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
