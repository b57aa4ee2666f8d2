"""Heartbeats: ranks exchange reports through the store, in a thread with its own connection."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from typing import Any

from torch.distributed import Store

from trainer.resilience.hang_detection import Peer, RankReport
from trainer.storage import processes
from trainer.telemetry.step_timing import StepTiming


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    pid: int
    started: int | None
    host: str


class Heartbeats:
    """Sends this rank's report at each tick, and reads those of the others while `listening`. Its
    thread may block for ever in the store (a separate connection, `store.clone()`) if the store's
    host is stopped; `silent_s` is the duration so far. Other threads never wait for it."""

    def __init__(
        self, store: Store, *, rank: int, size: int, report: RankReport, tick_s: float
    ) -> None:
        self.report = report
        self.listening = False
        self.alarm: dict[str, Any] | None = None  # of the first rank that found a hang
        self.times: StepTiming | None = None  # collected by rank 0, one tick late, without waiting
        own = os.getpid()
        self.identities = {rank: ProcessIdentity(
            pid=own, started=processes.start_time(own), host=processes.host())}
        """Rank → its process, as far as known."""
        self._store, self._rank, self._tick_s = store, rank, tick_s
        self._peers = [peer for peer in range(size) if peer != rank]
        self._own_alarm: dict[str, Any] | None = None
        # Peer → its last tick, when it or the listening began, its last report.
        self._seen: dict[int, tuple[int, float, RankReport | None]] = {}
        self._count = 0
        self._round_s = time.monotonic()
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def peers(self) -> dict[int, Peer]:
        now = time.monotonic()
        seen = {peer: self._seen.get(peer, (0, now, None)) for peer in self._peers}
        return {peer: Peer(report=report, silent_s=now - since_s)
                for peer, (_, since_s, report) in seen.items()}

    def on_this_host(self) -> dict[int, ProcessIdentity]:
        """The known ranks of this host."""
        known = dict(self.identities)  # the thread adds to them
        return {rank: who for rank, who in known.items() if who.host == known[self._rank].host}

    def update(self, report: RankReport, *, listening: bool) -> None:
        self.report, self.listening = report, listening

    def gather(self, times: StepTiming) -> None:
        """Let rank 0 collect these times."""
        self.times = times

    def note_alive(self, peer: int) -> None:
        """Record a sign of life other than a heartbeat."""
        if peer in self._seen:
            tick, _, report = self._seen[peer]
            self._seen[peer] = (tick, time.monotonic(), report)

    def reset_silence(self) -> None:
        """Count the others' silence from now on: this process itself was stopped for a while."""
        for peer in self._peers:
            self.note_alive(peer)
        self._round_s = max(self._round_s, time.monotonic())

    @property
    def silent_s(self) -> float:
        """For how long the store has not answered, in seconds."""
        return max(0.0, time.monotonic() - self._round_s - self._tick_s)

    def raise_alarm(self, alarm: dict[str, Any], timeout_s: float) -> bool:
        """Raise an alarm on all ranks. False: another rank was first, and `self.alarm` is its."""
        self._own_alarm = alarm
        self._wake.set()
        deadline_s = time.monotonic() + timeout_s
        while self.alarm is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self.alarm = self.alarm or alarm  # the store may not answer
        return bool(self.alarm == alarm)

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        try:
            own = dataclasses.asdict(self.identities[self._rank])
            self._store.set(f"who/{self._rank}", json.dumps(own))
            while not self._stopped:
                self._round()
                self._round_s = time.monotonic()
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
                who = json.loads(self._store.get(f"who/{peer}"))
                self.identities[peer] = ProcessIdentity(**who)
        if self.alarm is None and (self._own_alarm or self._store.check(["alarm"])):
            first = self._store.compare_set("alarm", "", json.dumps(self._own_alarm))
            self.alarm = json.loads(first)
        if self.times is not None:
            try:
                self._gather(self.times)
            except (OSError, TypeError, ValueError):  # the console is closed
                self.times = None  # the record of times ends, not the heartbeat
        if not self.listening:
            self._seen = {}
            return
        for peer in self._peers:
            last, _, _ = self._seen.setdefault(peer, (0, time.monotonic(), None))
            if self._store.check([f"beat/{peer}"]):
                fields = json.loads(self._store.get(f"beat/{peer}"))
                if (tick := fields.pop("tick")) != last:
                    self._seen[peer] = (tick, time.monotonic(), RankReport(**fields))

    def _gather(self, times: StepTiming) -> None:
        keys = [f"times/{peer}" for peer in self._peers]
        if self._rank:
            self._store.set(f"times/{self._rank}", json.dumps(times.message()))
        elif times.due and self._store.check(keys):
            times.collect([times.message(), *map(json.loads, self._store.multi_get(keys))])
