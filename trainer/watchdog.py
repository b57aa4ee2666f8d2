"""The watchdog of a rank: no progress → stacks on disk, the culprit named and ended, all leave.

A thread of its own looks at where the main thread and the checkpoint's writer are (`pulse`), tells
it to the other ranks (`heartbeats`), judges (`hang`), and acts:

1. the first rank that finds a hang raises the alarm, upon which each rank that runs writes its
   stacks;
2. a culprit that runs ends itself; one that is stopped is killed by another rank of its host;
3. that breaks the collectives of the others, whose main threads save and leave; where a main
   thread can't, because it computes or sits in a kernel that never ends, this thread does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from trainer import processes, stacks, waiting
from trainer.errors import EXIT_FAILURE
from trainer.hang import Patience, Report, Verdict, judge, patience, saving_patience
from trainer.heartbeats import Heartbeats, own_identity
from trainer.log import Log
from trainer.pace import Pace
from trainer.pulse import Pulse, read
from trainer.world import World

TICK_S = 1.0
LEAST_SILENCE_S = 2.0
"""A rank whose heartbeat is missing for less may just not have had its turn."""

LEAVE_S = 1.5
"""From a peer's end until this thread saves and leaves in the main thread's place."""

LATE_S = 25.0
"""From then until it leaves without having saved; launchers give 30 in all."""

DUMP_S = 5.0
"""How long writing stacks may take: the disk may be what hangs."""


class Watchdog:
    """Watches this rank from `with` to `stop`; made and left by the main thread.

    Args:
        limit_s: inside of steps; None: learnt.
        clock: seconds, monotonic, of the host.

    Attributes:
        rescue: saves the last boundary beside a main thread that can't; whether it could.
        in_flight: the step that this rank's checkpoint writer is at, or None.
    """

    def __init__(
        self, world: World, log: Log, *, limit_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.pulse = Pulse(clock)
        self.rescue: Callable[[], bool] = lambda: False
        self.in_flight: Callable[[], int | None] = lambda: None
        self._world, self._log, self._clock = world, log, clock
        self._pace = Pace(limit_s)
        self._tick_s = TICK_S if limit_s is None else min(TICK_S, max(0.05, limit_s / 5))
        self._main = threading.get_ident()
        self._identity = own_identity(os.getpid())
        self._beats: Heartbeats | None = None
        self._woken, self._wake = os.pipe()
        self._leaving = threading.Lock()
        self._stopped = False
        self._resumed_s = -math.inf
        self._lost_s = math.inf
        self._alarmed_s = math.inf
        self._dumped = False
        self._doing = waiting.Doing(self._main, clock)
        self._writing = waiting.Writing(clock)
        self._others: dict[int, processes.Activity] = {}

    def __enter__(self) -> Watchdog:
        if self._world.store is not None:
            self._beats = Heartbeats(
                self._world.store.clone(), rank=self._world.rank, size=self._world.size,
                identity=self._identity, report=self._look(self._clock()), tick_s=self._tick_s,
                clock=self._clock,
            )  # fmt: skip
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """The main thread leaves by itself from here. While this thread saves and leaves in its
        place, there is no return."""
        with self._leaving:
            if not self._stopped:
                self._stopped = True
                os.write(self._wake, b"!")
        if self._beats is not None:
            self._beats.stop()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:
            self._log.error(f"the watchdog has failed, the run goes on without it:\n"
                            f"{traceback.format_exc()}")

    def _watch(self) -> None:
        poll, connections = select.poll(), self._world.connections()
        for found in connections:
            poll.register(found, select.POLLRDHUP)
        poll.register(self._woken, select.POLLIN)
        last_s = self._clock()
        try:
            while not self._stopped:
                events = poll.poll(1000 * self._tick_s)
                now = self._clock()
                if self._lost_s == math.inf and any(fd != self._woken for fd, _ in events):
                    for found in connections:
                        poll.unregister(found)
                    self._lost_s = now
                    self.pulse.lost = True
                if now - last_s > 3 * self._tick_s + 1:
                    self._resume(now)  # this process was stopped, or the whole host
                last_s = now
                if not self._stopped:
                    self._tick(now)
        finally:
            for found in connections:
                os.close(found)

    def _resume(self, now: float) -> None:
        self._resumed_s = now
        if self._beats is not None:
            self._beats.forgive()

    def _tick(self, now: float) -> None:
        if now - min(self._lost_s, self._alarmed_s + self._tick_s + DUMP_S) > LEAVE_S:
            self._leave(late=now - self._lost_s > LATE_S)
            return
        if self._alarmed_s < math.inf or self._lost_s < math.inf:
            return
        own, limit_s = self._look(now), self._pace.limit_s
        beats, peers, silent_s = self._beats, {}, 0.0
        if beats is not None:
            beats.report = own
            beats.listening = own.waits and own.idle_s > limit_s / 2
            if beats.alarm is not None:
                self._follow(beats.alarm)
                return
            self._listen(beats)
            peers, silent_s = beats.peers(), beats.silent_s
        verdict = judge(
            self._world.rank, own, peers, limit_s=max(limit_s, LEAST_SILENCE_S),
            store_silent_s=silent_s,
            store_host=0 if self._world.launch.hosts_store else None,
        )  # fmt: skip
        if verdict is not None and not self._stopped:
            self._raise(verdict, own)

    def _look(self, now: float) -> Report:
        """What this rank does."""
        phase, main = self._log.phase, self.pulse.main
        limit_s = self._pace.see(main, phase, now)
        step = self.in_flight()
        if step is not None:
            place, quiet_s = self._writing.look(self.pulse.writer, step, limit_s)
            if _is_over(saving_patience(limit_s), now - place.at_s, quiet_s):
                return Report(phase=place.point, step=step, idle_s=round(now - place.at_s, 1),
                              waits=False, over=True)  # fmt: skip
        idle_s = now - main.at_s
        whom, busy_s = self._doing.look(main, idle_s > limit_s / 4)
        quiet_s = now - max(main.at_s, busy_s, self._resumed_s)
        idle_s = now - max(main.at_s, self._resumed_s)
        over = whom not in (waiting.WRITER, waiting.PERSON) and _is_over(
            patience(phase, main.point, limit_s), idle_s, quiet_s)
        return Report(
            phase=_shown(phase, main.point), step=main.step, idle_s=round(idle_s, 1), over=over,
            waits=whom == waiting.PEERS and self._world.size > 1,
        )  # fmt: skip

    def _listen(self, beats: Heartbeats) -> None:
        """A rank of this host whose heartbeat is missing may compute all the same: some code keeps
        all other threads from running."""
        if not beats.listening:
            self._others = {}
            return
        for peer, who in beats.identities.items():
            if who.host != self._identity.host:
                continue
            if peer not in self._others:
                self._others[peer] = processes.Activity(who.pid, clock=self._clock)
            elif self._others[peer].seen() and processes.state(who.pid) not in "Tt":
                beats.lives(peer)

    def _raise(self, verdict: Verdict, own: Report) -> None:
        """Raise the alarm, unless another rank was first."""
        rank, why = self._world.rank, verdict.why
        blamed = self._dump(own)
        if rank in verdict.culprits:
            why = "; ".join([why, *blamed])
        places = {str(culprit): own if culprit == rank else self._place_of(culprit)
                  for culprit in verdict.culprits}
        alarm = {"by": rank, "why": why, "run": verdict.run, "limit_s": self._pace.limit_s,
                 "culprits": {name: dataclasses.asdict(r) for name, r in places.items()}}
        if self._beats is None or self._beats.raise_alarm(alarm, 3 * self._tick_s + 1):
            self._tell(alarm)
        else:
            alarm = self._beats.alarm or alarm
        self._follow(alarm)

    def _place_of(self, culprit: int) -> Report:
        """Where a rank that doesn't run is: its own memory tells, else its last heartbeat."""
        assert self._beats is not None
        last = self._beats.peers()[culprit].report
        last = last or Report(phase="unknown", step=-1, idle_s=0.0, waits=False, over=True)
        who = self._beats.identities.get(culprit)
        if who is None or who.host != self._identity.host:
            return last
        places = read(who.pid)
        if places is None:
            return last
        main, writer = places
        place = max(places, key=lambda p: p.at_s) if writer.point else main
        inside = last.phase if place is main and last.phase in ("evaluate", "restore") else None
        return dataclasses.replace(last, phase=inside or _shown("train", place.point),
                                   step=place.step, idle_s=round(self._clock() - place.at_s, 1))

    def _tell(self, alarm: dict[str, Any]) -> None:
        where = "stderr" if self._log.folder is None else f"{self._log.folder / stacks.FOLDER}"
        close = f"(--watchdog.limit-s {alarm['limit_s']:g}); the stacks of all ranks are in {where}"
        for culprit, place in alarm["culprits"].items():
            self._log.event(
                "hang", culprit=int(culprit), at_phase=place["phase"], at_step=place["step"],
                idle_s=place["idle_s"], why=alarm["why"], limit_s=alarm["limit_s"])
            self._log.error(
                f"hang: rank {culprit} {alarm['why']}: {place['phase']} of step {place['step']}, "
                f"for {place['idle_s']:.1f} s {close}")
        if not alarm["culprits"]:
            self._log.event("hang", culprit=None, why=alarm["why"], limit_s=alarm["limit_s"])
            self._log.error(f"hang: {alarm['why']} {close}")

    def _follow(self, alarm: dict[str, Any]) -> None:
        """There is an alarm: write the stacks, then do what is this rank's part."""
        self._alarmed_s, rank = self._clock(), self._world.rank
        self._dump(self._look(self._alarmed_s))
        culprits = {int(culprit) for culprit in alarm["culprits"]}
        others = set(range(self._world.size)) - culprits - {rank}
        self._await_stacks(others)
        if self._stopped:
            return
        if rank in culprits:
            if not others:
                self._rescue()  # nobody else is left to save
            self._exit()
        ends = alarm["run"] or all([self._end(culprit, others | {rank}) for culprit in culprits])
        if not culprits or not ends:
            self._world.abandon()
            self._lost_s = self._clock()

    def _await_stacks(self, others: set[int]) -> None:
        """Wait, not for long, until the other ranks have written theirs."""
        beats = self._beats
        if beats is None:
            return
        beats.report = dataclasses.replace(beats.report, dumped=True)
        beats.listening = True
        deadline_s = self._clock() + 3 * self._tick_s + 1
        while self._clock() < deadline_s and not self._stopped:
            peers = beats.peers()
            reports = [peers[other].report for other in others]
            if all(report is not None and report.dumped for report in reports):
                return
            time.sleep(0.02)

    def _end(self, culprit: int, others: set[int]) -> bool:
        """Whether some rank of its host sees to it that a stopped culprit ends: this one, if it is
        the first of them."""
        beats, rank = self._beats, self._world.rank
        assert beats is not None
        known = {**beats.identities, rank: self._identity}
        who = known.get(culprit)
        if who is None:
            return False
        near = [other for other in others if other in known and known[other].host == who.host]
        if rank == min(near, default=None) and who.started is not None:
            self._write(culprit, f"rank {culprit} (pid {who.pid}) doesn't run\n\n"
                                 f"{processes.describe(who.pid)}\n")
            processes.kill(who.pid, who.started)
        return bool(near)

    def _dump(self, own: Report) -> list[str]:
        """Write the stacks of this rank, once; what is to be said of its loader workers."""
        if self._dumped:
            return []
        self._dumped = True
        blamed: list[str] = []

        def dump() -> None:
            began = (f"rank {self._world.rank} of attempt {self._log.attempt}, pid {os.getpid()}: "
                     f"{own.phase} of step {own.step}, no progress for {own.idle_s:.1f} s"
                     f"{', waits for other ranks' if own.waits else ''}\n\n")
            self._write(self._world.rank, began + stacks.own_threads() + "\n")
            text, found = stacks.worker_stacks()
            blamed.extend(found)
            if text:
                self._write(self._world.rank, text)

        thread = threading.Thread(target=dump, name="stacks", daemon=True)
        thread.start()
        thread.join(DUMP_S)
        return list(blamed)

    def _write(self, rank: int, text: str) -> None:
        try:
            if self._log.folder is not None:
                stacks.write(self._log.folder, attempt=self._log.attempt, rank=rank, text=text)
                return
        except OSError as error:
            text = f"(stacks could not be written to the run folder: {error})\n{text}"
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def _leave(self, *, late: bool) -> None:
        """A peer is gone, or must be, and the main thread is still there: save and leave."""
        with self._leaving:
            if self._stopped:
                return
            self._world.abandon()
            if self._rescue() or late:
                self._log.warning(f"lost a peer; left in the place of the main thread, which is at "
                                  f"{self.pulse.main.point} of step {self.pulse.main.step}")
                self._exit()

    def _rescue(self) -> bool:
        """Save beside the main thread; whether that could be tried. Not for longer than a launcher
        waits."""
        tried: list[bool] = []

        def rescue() -> None:
            try:
                tried.append(self.rescue())
            except Exception:
                self._log.warning(f"the last boundary couldn't be saved:\n{traceback.format_exc()}")
                tried.append(True)

        thread = threading.Thread(target=rescue, name="rescue", daemon=True)
        thread.start()
        thread.join(LATE_S)
        return not tried or tried[0]

    def _exit(self) -> None:
        sys.stderr.flush()
        os._exit(EXIT_FAILURE)


def _is_over(allowed: Patience, idle_s: float, quiet_s: float) -> bool:
    return quiet_s > allowed.quiet_s or idle_s > allowed.idle_s


def _shown(phase: str, point: str) -> str:
    """A phase by its name in `faults.PHASES`, where it has one."""
    if phase == "train" or (phase, point) in (("build", "start"), ("warm-up", "data"),
                                              ("warm-up", "reading")):
        return "data" if point == "reading" else point
    return phase
