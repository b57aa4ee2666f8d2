"""Heartbeats: what the ranks tell each other through the store, by a thread and connection of its
own."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed import Store

from trainer import processes
from trainer.hang import Peer, Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """The process behind a rank."""

    pid: int
    started: int | None
    host: str


class Times(Protocol):
    """What the ranks tell rank 0 beside their reports (`timing`)."""

    @property
    def due(self) -> bool:
        """Whether rank 0 is to collect."""
        ...

    def told(self) -> Any:
        """Of this rank: JSON."""
        ...

    def collect(self, told: Any) -> None:
        """Of all ranks, on rank 0."""
        ...


class Heartbeats:
    """Tells this rank's report with each tick, and listens to the others when asked to.

    The thread may be held up in the store for ever, where its host is stopped: `silent_s` tells
    for how long, and nobody else waits with it.

    Args:
        store: a connection that nobody else uses (`store.clone()`).
        identity: of this process.
        tick_s: between two heartbeats.

    Attributes:
        report: what to tell; set by the caller.
        listening: whether to ask for the others' reports at each tick.
        alarm: what the first rank that found a hang has told; None as long as there is none.
        identities: of the other ranks, as far as they are known.
        times: gathered by rank 0, which is late by a tick and holds nobody up.
    """

    def __init__(
        self, store: Store, *, rank: int, size: int, identity: Identity, report: Report,
        tick_s: float, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.report = report
        self.listening = False
        self.alarm: dict[str, Any] | None = None
        self.identities: dict[int, Identity] = {}
        self.times: Times | None = None
        self._store, self._rank, self._tick_s, self._clock = store, rank, tick_s, clock
        self._peers = [peer for peer in range(size) if peer != rank]
        self._identity = identity
        self._cry: dict[str, Any] | None = None
        self._seen: dict[int, tuple[int, float, Report]] = {}  # tick, since when, report
        self._since: dict[int, float] = {}  # when this rank began to listen to one
        self._count = 0
        self._round_s = clock()
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def peers(self) -> dict[int, Peer]:
        """The other ranks, as far as this one has listened."""
        now, found = self._clock(), {}
        for peer in self._peers:
            _, since_s, report = self._seen.get(peer, (0, self._since.get(peer, now), None))
            found[peer] = Peer(report=report, silent_s=now - since_s)
        return found

    def lives(self, peer: int) -> None:
        """Another sign than its heartbeat tells that a rank isn't dead."""
        if peer in self._seen:
            tick, _, report = self._seen[peer]
            self._seen[peer] = (tick, self._clock(), report)

    def forgive(self) -> None:
        """This process itself hasn't run for a while: what it hasn't heard says nothing."""
        now = self._clock()
        seen = list(self._seen.items())  # at once: the thread of heartbeats adds to it
        self._seen = {peer: (tick, now, report) for peer, (tick, _, report) in seen}
        self._since = dict.fromkeys(self._since, now)
        self._round_s = max(self._round_s, now)

    @property
    def silent_s(self) -> float:
        """How long the store hasn't answered."""
        return max(0.0, self._clock() - self._round_s - self._tick_s)

    def raise_alarm(self, alarm: dict[str, Any], timeout_s: float) -> bool:
        """Tell all ranks, unless another one was first; `alarm` is the first one's then.

        Returns:
            whether this rank was the first, or the store doesn't answer.
        """
        self._cry = alarm
        self._wake.set()
        deadline_s = self._clock() + timeout_s
        while self.alarm is None and self._clock() < deadline_s:
            time.sleep(0.01)
        if self.alarm is None:
            self.alarm = alarm
        return bool(self.alarm == alarm)

    def stop(self) -> None:
        """No more heartbeats."""
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
            return  # the store is gone; its host's end is seen elsewhere, or by the silence

    def _round(self) -> None:
        self._count += 1
        told = {"tick": self._count, **dataclasses.asdict(self.report)}
        self._store.set(f"beat/{self._rank}", json.dumps(told))
        for peer in self._peers:
            if peer not in self.identities and self._store.check([f"who/{peer}"]):
                self.identities[peer] = Identity(**json.loads(self._store.get(f"who/{peer}")))
        if self._cry is not None and self.alarm is None:
            self.alarm = json.loads(self._store.compare_set("alarm", "", json.dumps(self._cry)))
        elif self.alarm is None and self._store.check(["alarm"]):
            self.alarm = json.loads(self._store.get("alarm"))
        if self.times is not None:
            try:
                self._gather(self.times)
            except (OSError, TypeError, ValueError):  # a console that is closed, when it tells
                self.times = None  # the record of times ends, not the heartbeat
        if self.listening:
            self._listen()
        else:
            self._seen, self._since = {}, {}

    def _gather(self, times: Times) -> None:
        if self._rank:
            self._store.set(f"times/{self._rank}", json.dumps(times.told()))
        elif times.due:
            keys = [f"times/{peer}" for peer in self._peers]
            if self._store.check(keys):
                told = self._store.multi_get(keys)
                times.collect([times.told(), *map(json.loads, told)])

    def _listen(self) -> None:
        for peer in self._peers:
            self._since.setdefault(peer, self._clock())
            if not self._store.check([f"beat/{peer}"]):
                continue
            fields = json.loads(self._store.get(f"beat/{peer}"))
            tick = fields.pop("tick")
            if peer not in self._seen or self._seen[peer][0] != tick:
                self._seen[peer] = (tick, self._clock(), Report(**fields))


def own_identity(pid: int) -> Identity:
    """Of a process of this host."""
    return Identity(pid=pid, started=processes.start_time(pid), host=processes.host())
