"""The watchdog of a rank: after a hang, write stacks, name and end the culprit, save and leave.

Its thread reports the progress marks to the other ranks (`Heartbeats`), decides (`find_hang`) and
acts (`Alarm`): the first rank that finds a hang raises the alarm, and each running rank writes its
stacks. A culprit that runs ends itself; a stopped one is killed by another rank of its host. That
breaks the collectives of the others, whose main threads save and leave. If a main thread cannot,
because it computes or waits for a kernel, this thread does.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable

from trainer.distributed.waits import WaitsFor, collective_of_user, waits_for
from trainer.distributed.world import World
from trainer.resilience import hang_detection
from trainer.resilience.hang_detection import Pace, QuietTime, RankReport
from trainer.resilience.hang_response import Alarm
from trainer.resilience.heartbeats import Heartbeats
from trainer.resilience.progress_marks import Place, ProgressMarks
from trainer.resilience.stop_signals import is_readable
from trainer.storage import processes
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase
from trainer.telemetry.step_timing import StepTiming

TICK_S = 1.0
LEAST_SILENCE_S = 2.0  # a heartbeat that is missing for less may just be late
LEAVE_S = 1.5  # from a peer's end until this thread saves and leaves in place of the main thread
LOOK_S = 0.2  # between two looks at the main thread meanwhile


class Watchdog:
    """Watches this rank from `with` to `stop`. The main thread creates it and enters `with`.
    `limit_s` holds inside steps (None: learn it), `start_s` before them (None: long)."""

    def __init__(
        self, world: World, log: Log, *, limit_s: float | None, start_s: float | None = None
    ) -> None:
        self.marks = ProgressMarks(log.status)
        self._in_flight: Callable[[], int | None] = lambda: None
        self._world, self._log = world, log
        self._pace = Pace(limit_s, start_s)
        self._tick_s = TICK_S if limit_s is None else min(TICK_S, max(0.05, limit_s / 5))
        self._woken, self._wake = os.pipe()
        self._resumed_s = -math.inf
        self._main_thread = threading.get_ident()
        self._main_quiet, self._writer_quiet = QuietTime(), QuietTime(of_writer=True)
        self._saving = (-1, 0.0)  # the step of the save in flight, and when it was first seen
        self._others: dict[int, processes.Activity] = {}
        self._beats = None if world.store is None else Heartbeats(
            world.store.clone(), rank=world.rank, size=world.size,
            report=self._look(time.monotonic()), tick_s=self._tick_s)
        self._alarm = Alarm(world, log, self.marks, self._beats, self._tick_s)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._world.store is None:  # with one, the thread may be waiting for its host
            self._thread.join()
            for descriptor in (self._woken, self._wake):
                os.close(descriptor)

    def guard(
        self, rescue: Callable[[], bool], in_flight: Callable[[], int | None], times: StepTiming
    ) -> None:
        """Guard a run from now on. `rescue` saves in place of the main thread and returns whether
        it could, `in_flight` returns the step that the checkpoint writer saves (or None), `times`
        are sent to rank 0 with the heartbeats."""
        self._in_flight = in_flight
        self._alarm.rescue_with(rescue)
        if self._beats is not None:
            self._beats.gather(times)

    def stop(self) -> None:
        """The main thread leaves by itself. Blocks while the watchdog leaves in its place."""
        if not self._alarm.stopped:
            self._alarm.stop()
            os.write(self._wake, b"!")

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:
            self._log.error("the watchdog has failed; the run continues without it:\n"
                            + traceback.format_exc())

    def _watch(self) -> None:
        alarm, poll, connections = self._alarm, select.poll(), self._world.connections()
        poll.register(self._woken, select.POLLIN)
        for descriptor in connections:
            poll.register(descriptor, select.POLLRDHUP)
        last_s = time.monotonic()
        try:
            ended: list[tuple[int, int]] = []
            while not alarm.stopped and not ended and alarm.lasts(time.monotonic()):
                ended = poll.poll(1000 * self._tick_s)
                now = time.monotonic()
                if now - last_s > 3 * self._tick_s + 1:  # this process was stopped, or its host
                    self._resumed_s = now
                    if self._beats is not None:
                        self._beats.reset_silence()
                last_s = now
                if not ended and alarm.at_s == math.inf:
                    self._tick(now)
        finally:
            for descriptor in connections:
                os.close(descriptor)
        self._wait_for_main_thread()

    def _wait_for_main_thread(self) -> None:
        """Peers are gone: wait for the main thread to leave, else leave in its place. It cannot
        leave while it waits for a GPU, whose kernel waits for the peers."""
        lost_s = time.monotonic()
        self.marks.report_lost_peer()
        while not self._alarm.stopped:
            waited_s = time.monotonic() - lost_s
            if waited_s >= LEAVE_S or self._waits_for_gpu():
                self._alarm.leave(late=waited_s > self._alarm.late_s)
            is_readable(self._woken, LOOK_S)

    def _waits_for_gpu(self) -> bool:
        frame = sys._current_frames().get(self._main_thread)
        return (self._world.device.type == "cuda"
                and waits_for(self._main_thread, frame) is WaitsFor.DEVICE)

    def _tick(self, now: float) -> None:
        own, limit_s, silent_s = self._look(now), self._pace.limit_s, 0.0
        peers: dict[int, hang_detection.Peer] = {}
        if (beats := self._beats) is not None:
            beats.update(own, listening=own.waits and own.idle_s > limit_s / 2)
            if beats.alarm is not None:
                self._alarm.follow(beats.alarm, own)
                return
            self._listen(beats)
            peers, silent_s = beats.peers(), beats.silent_s
        hang = hang_detection.find_hang(
            self._world.rank, own, peers, limit_s=max(limit_s, LEAST_SILENCE_S),
            store_silent_s=silent_s, store_host=0 if self._world.launch.hosts_store else None)
        if hang is not None:
            self._alarm.sound(hang, own, limit_s)

    def _look(self, now: float) -> RankReport:
        phase, main, whom = self._log.status.phase, self.marks.main, WaitsFor.NOBODY
        limit_s = self._pace.see(main, phase, now)
        if (step := self._in_flight()) is not None and (
                stuck := self._look_at_writer(step, now, limit_s)) is not None:
            return stuck
        idle_s = now - max(main.at_s, self._resumed_s)
        quiet_s = self._main_quiet.measure(idle_s, limit_s)
        frame = sys._current_frames().get(self._main_thread) if idle_s > limit_s / 4 else None
        if frame is not None:
            whom = waits_for(self._main_thread, frame)
        if whom is WaitsFor.DEVICE:  # such a wait takes processor time
            quiet_s = idle_s
        allowed = self._pace.patience(phase, main.point)
        return RankReport(
            phase=hang_detection.name_place(phase, main.point), step=main.step,
            idle_s=round(idle_s, 1), flag=allowed.flag, collective=collective_of_user(frame),
            waits=whom in (WaitsFor.PEERS, WaitsFor.DEVICE) and self._world.size > 1,
            over=whom not in (WaitsFor.WRITER, WaitsFor.PERSON)
            and allowed.is_exceeded(idle_s, quiet_s))

    def _look_at_writer(self, step: int, now: float, limit_s: float) -> RankReport | None:
        """Report the save of this step if it exceeds a time limit."""
        if step != self._saving[0]:
            self._saving = (step, now)
        mark = self.marks.writer
        if not mark.point or mark.step != step:  # of an earlier save
            mark = Place(Phase.SAVE_BEGIN, *self._saving)
        idle_s = now - max(mark.at_s, self._resumed_s)
        quiet_s = self._writer_quiet.measure(idle_s, limit_s)
        allowed = self._pace.patience(Phase.SAVE)
        if not allowed.is_exceeded(idle_s, quiet_s):
            return None
        return RankReport(phase=str(mark.point), step=step, idle_s=round(idle_s, 1), waits=False,
                          over=True)

    def _listen(self, beats: Heartbeats) -> None:
        """Count processor time of the ranks on this host as a sign of life: code that holds the
        interpreter's lock keeps their heartbeat threads from running."""
        if not beats.listening:
            self._others = {}
            return
        for rank, who in beats.on_this_host().items():
            if rank not in self._others:
                self._others[rank] = processes.Activity(who.pid)
            elif self._others[rank].seen() and not processes.is_stopped(who.pid):
                beats.note_alive(rank)
