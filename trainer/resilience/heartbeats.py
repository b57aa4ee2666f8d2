"""Heartbeats: ranks exchange reports through the store, in a thread with its own connection."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed import Store

from trainer.resilience import processes
from trainer.resilience.hang_detection import Peer, RankReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """The process behind a rank."""

    pid: int
    started: int | None
    host: str


class Times(Protocol):
    """Step times that the ranks send to rank 0 with their heartbeats."""

    @property
    def due(self) -> bool:
        """Whether it is time for rank 0 to collect."""
        ...

    def message(self) -> Any:
        """Times of this rank, as a JSON value."""
        ...

    def collect(self, messages: Any) -> None:
        """Rank 0: take the times of all ranks."""
        ...


class Heartbeats:
    """Sends this rank's report at each tick, and reads those of the others while `listening`.

    Its thread may block in the store for ever if the store's host is stopped; `silent_s` is the
    duration so far. Other threads never wait for it.

    Args:
        store: a separate connection (`store.clone()`).
        identity: this process.
        tick_s: time between two heartbeats.

    Attributes:
        report: what to send.
        listening: read the reports of the others at each tick.
        alarm: raised by the first rank that found a hang; None before.
        identities: processes of the other ranks, as far as they are known.
        times: collected by rank 0, one tick late; no rank waits for it.
    """

    def __init__(
        self, store: Store, *, rank: int, size: int, identity: ProcessIdentity, report: RankReport,
        tick_s: float, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.report = report
        self.listening = False
        self.alarm: dict[str, Any] | None = None
        self.identities: dict[int, ProcessIdentity] = {}
        self.times: Times | None = None
        self._store, self._rank, self._tick_s, self._clock = store, rank, tick_s, clock
        self._peers = [peer for peer in range(size) if peer != rank]
        self._identity = identity
        self._own_alarm: dict[str, Any] | None = None
        self._seen: dict[int, tuple[int, float, RankReport]] = {}  # tick, since when, report
        self._since: dict[int, float] = {}  # peer → when this rank began to listen to it
        self._count = 0
        self._round_s = clock()
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def peers(self) -> dict[int, Peer]:
        """State of the other ranks, from the reports received so far."""
        now, found = self._clock(), {}
        for peer in self._peers:
            _, since_s, report = self._seen.get(peer, (0, self._since.get(peer, now), None))
            found[peer] = Peer(report=report, silent_s=now - since_s)
        return found

    def update(self, report: RankReport, *, listening: bool) -> None:
        """Send this report from now on, and read those of the others if `listening`."""
        self.report, self.listening = report, listening

    def gather(self, times: Times) -> None:
        """Let rank 0 collect these times."""
        self.times = times

    def note_alive(self, peer: int) -> None:
        """Record that a rank is alive, by a sign other than its heartbeat."""
        if peer in self._seen:
            tick, _, report = self._seen[peer]
            self._seen[peer] = (tick, self._clock(), report)

    def reset_silence(self) -> None:
        """Count the others' silence from now on: this process itself was stopped for a while."""
        now = self._clock()
        seen = list(self._seen.items())  # a copy: the thread of heartbeats adds to it
        self._seen = {peer: (tick, now, report) for peer, (tick, _, report) in seen}
        self._since = dict.fromkeys(self._since, now)
        self._round_s = max(self._round_s, now)

    @property
    def silent_s(self) -> float:
        """For how long the store has not answered, in seconds."""
        return max(0.0, self._clock() - self._round_s - self._tick_s)

    def raise_alarm(self, alarm: dict[str, Any], timeout_s: float) -> bool:
        """Raise an alarm on all ranks. If another rank was first, `alarm` is its alarm.

        Returns:
            whether this rank was first, or the store does not answer.
        """
        self._own_alarm = alarm
        self._wake.set()
        deadline_s = self._clock() + timeout_s
        while self.alarm is None and self._clock() < deadline_s:
            time.sleep(0.01)
        if self.alarm is None:
            self.alarm = alarm
        return bool(self.alarm == alarm)

    def stop(self) -> None:
        """Stop the heartbeats."""
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        try:
            self._store.set(f"who/{self._rank}", json.dumps(dataclasses.asdict(self._identity)))
            while not self._stopped:
                self._round()
                self._round_s = self._clock()
                self._wake.wait(self._tick_s)
                self._wake.clear()
        except RuntimeError:
            return  # the store is gone; others notice the end of its host, or the silence

    def _round(self) -> None:
        self._count += 1
        message = {"tick": self._count, **dataclasses.asdict(self.report)}
        self._store.set(f"beat/{self._rank}", json.dumps(message))
        for peer in self._peers:
            if peer not in self.identities and self._store.check([f"who/{peer}"]):
                self.identities[
                    peer] = ProcessIdentity(**json.loads(self._store.get(f"who/{peer}")))
        if self._own_alarm is not None and self.alarm is None:
            own = json.dumps(self._own_alarm)
            self.alarm = json.loads(self._store.compare_set("alarm", "", own))
        elif self.alarm is None and self._store.check(["alarm"]):
            self.alarm = json.loads(self._store.get("alarm"))
        if self.times is not None:
            try:
                self._gather(self.times)
            except (OSError, TypeError, ValueError):  # the console is closed
                self.times = None  # the record of times ends, not the heartbeat
        if self.listening:
            self._listen()
        else:
            self._seen, self._since = {}, {}

    def _gather(self, times: Times) -> None:
        if self._rank:
            self._store.set(f"times/{self._rank}", json.dumps(times.message()))
        elif times.due:
            keys = [f"times/{peer}" for peer in self._peers]
            if self._store.check(keys):
                messages = self._store.multi_get(keys)
                times.collect([times.message(), *map(json.loads, messages)])

    def _listen(self) -> None:
        for peer in self._peers:
            self._since.setdefault(peer, self._clock())
            if not self._store.check([f"beat/{peer}"]):
                continue
            fields = json.loads(self._store.get(f"beat/{peer}"))
            tick = fields.pop("tick")
            if peer not in self._seen or self._seen[peer][0] != tick:
                self._seen[peer] = (tick, self._clock(), RankReport(**fields))


def own_identity(pid: int) -> ProcessIdentity:
    """Identity of a process on this host."""
    return ProcessIdentity(pid=pid, started=processes.start_time(pid), host=processes.host())
