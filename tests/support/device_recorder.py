"""Emulated CUDA streams and events, which note what each piece of work comes after for sure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch


class Stream:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.known = recorder, set[str]()

    def wait_stream(self, other: Stream) -> None:
        self.recorder.learn("wait_stream", self.known, other.known)

    def wait_event(self, event: Event) -> None:
        self.recorder.learn("wait_event", self.known, event.known)


class Event:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.known = recorder, set[str]()

    def record(self, stream: Stream | None = None) -> None:
        self.known = set((stream or self.recorder.current()).known)

    def synchronize(self) -> None:
        self.recorder.learn("synchronize", self.recorder.host(), self.known)


class Recorder:
    """`before` has, for each piece of work, what is complete when it begins. `without` names a kind
    of wait that has no effect, so that a test shows what depends on it."""

    def __init__(self, patch: pytest.MonkeyPatch, without: str = "") -> None:
        self.before: dict[str, set[str]] = {}
        self.main = Stream(self)
        self._without, self._local = without, threading.local()
        patch.setattr(torch.cuda, "Stream", lambda device=None: Stream(self))
        patch.setattr(torch.cuda, "Event", lambda **options: Event(self))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current())
        patch.setattr(torch.cuda, "stream", self._on)

    def current(self) -> Stream:
        return getattr(self._local, "stream", self.main)

    def host(self) -> set[str]:
        """What this thread knows to be complete."""
        if not hasattr(self._local, "known"):
            self._local.known = set()
        return self._local.known

    def learn(self, wait: str, known: set[str], more: set[str]) -> None:
        if wait != self._without:
            known |= more

    def queue(self, work: str) -> None:
        """Queue work on the current stream."""
        stream = self.current()
        stream.known |= self.host()
        self.before[work] = set(stream.known)
        stream.known.add(work)

    def do(self, work: str) -> None:
        """Work of this thread itself."""
        self.before[work] = set(self.host())

    def before_each(self, function: Callable, note: Callable[[], None]) -> Callable:
        def noted(*arguments, **options):
            note()
            return function(*arguments, **options)

        return noted

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        outer, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = outer
