"""Response of a rank to a hang: write stacks, name and end the culprit, leave."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from trainer.distributed.world import World
from trainer.errors import EXIT_FAILURE
from trainer.resilience import stack_dumps
from trainer.resilience.hang_detection import HangReport, RankReport, name_place
from trainer.resilience.heartbeats import Heartbeats
from trainer.resilience.launcher_channel import tell
from trainer.resilience.progress_marks import ProgressMarks, read_marks
from trainer.storage import processes
from trainer.storage.files import display_path
from trainer.storage.layout import STACKS
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase
from trainer.telemetry.std_streams import say

LATE_S = 5.0  # a rank without peers leaves this long before the launcher would kill it
DUMP_S = 5.0  # time limit of writing stacks, in seconds: the disk may be what hangs


class Alarm:
    """This rank's part in an alarm. The watchdog's thread calls all methods but `stop`."""

    def __init__(
        self, world: World, log: Log, marks: ProgressMarks, beats: Heartbeats | None, tick_s: float
    ) -> None:
        self.rescue: Callable[[], bool] = lambda: False  # see `Watchdog.guard`
        self.stopped = False  # the main thread leaves by itself
        self.at_s = math.inf  # time of the alarm; inf before
        self._given_up = self._dumped = False
        self._world, self._log, self._marks = world, log, marks
        self._beats, self._tick_s = beats, tick_s
        self.late_s = max(0.0, world.launch.grace_s - LATE_S)
        self._leaving = threading.Lock()

    def rescue_with(self, rescue: Callable[[], bool]) -> None:
        self.rescue = rescue

    def stop(self) -> None:
        with self._leaving:
            self.stopped = True
        if self._beats is not None:
            self._beats.stop()

    def lasts(self, now: float) -> bool:
        return not self._given_up and now <= self.at_s + self._tick_s + DUMP_S

    def sound(self, hang: HangReport, own: RankReport, limit_s: float) -> None:
        """Raise the alarm, unless another rank was first."""
        rank, why, causes = self._world.rank, hang.why, self._dump(own)
        if rank in hang.culprits:
            why = "; ".join([why, *causes])
        local = {} if self._beats is None else self._beats.on_this_host()
        if not hang.run and hang.culprits and all(
                who in local and processes.is_stopped(local[who].pid) for who in hang.culprits):
            why = "is stopped"
        places = {str(culprit): own if culprit == rank else self._place_of(culprit)
                  for culprit in hang.culprits}
        alarm = {"by": rank, "why": why, "run": hang.run, "limit_s": limit_s,
                 "culprits": {name: dataclasses.asdict(r) for name, r in places.items()}}
        if self._beats is None or self._beats.raise_alarm(alarm, 3 * self._tick_s + 1):
            _run_for(DUMP_S, partial(self._report, alarm))
        else:
            alarm = self._beats.alarm or alarm
        self.follow(alarm, own)

    def _place_of(self, culprit: int) -> RankReport:
        """Place of a rank that does not run: from its shared memory, else its last heartbeat."""
        assert self._beats is not None
        last = self._beats.peers()[culprit].report
        last = last or RankReport(phase="unknown", step=0, idle_s=0.0, waits=False, over=True)
        who = self._beats.on_this_host().get(culprit)
        if who is None or (places := read_marks(who.pid)) is None:
            return last
        main, writer = places
        idle_s = round(time.monotonic() - max(main.at_s, writer.at_s if writer.point else 0.0), 1)
        warming_up = main.point is Phase.WARM_UP
        phase = last.phase if warming_up else name_place(Phase.TRAIN, main.point)
        saving = f"{writer.point} of step {writer.step}" if writer.point else ""
        return dataclasses.replace(last, phase=phase, step=main.step, idle_s=idle_s, saving=saving)

    def _report(self, alarm: dict[str, Any]) -> None:
        folder, why, limit_s = self._log.folder, alarm["why"], alarm["limit_s"]
        where = "stderr" if folder is None else display_path(folder / STACKS)
        usual = f"--watchdog.limit-s {limit_s:g}"
        close = f"; the stacks of all ranks are in {where}"
        for culprit, place in alarm["culprits"].items():
            phase, step, saving, idle_s = map(place.get, ("phase", "step", "saving", "idle_s"))
            self._note(why, int(culprit), at_phase=phase, at_step=step, failed_phase=phase,
                       failed_step=step, saving=saving, idle_s=idle_s, limit_s=limit_s)
            self._log.error(f"hang: rank {culprit} {why}: {phase} of step {step}"
                            f"{f' and {saving}' if saving else ''}, for {idle_s:.1f} s "
                            f"({(alarm['run'] and place['flag']) or usual}){close}")
        if not alarm["culprits"]:
            self._note(why, None, limit_s=limit_s)
            self._log.error(f"hang: {why} ({usual}){close}")

    def _note(self, why: str, culprit: int | None, **fields: Any) -> None:
        tell("failure", self._log.event("hang", culprit=culprit, why=why, echo=False, **fields))

    def follow(self, alarm: dict[str, Any], own: RankReport) -> None:
        """Write the stacks, then do this rank's part in an alarm."""
        self.at_s, rank = time.monotonic(), self._world.rank
        self._dump(own)
        culprits = {int(culprit) for culprit in alarm["culprits"]}
        others = set(range(self._world.size)) - culprits - {rank}
        self._await_stacks(others)
        if self.stopped:
            return
        if rank in culprits:
            if not others:
                self._rescue()  # no other rank is left to save
            self._exit()
        ends = alarm["run"] or all([self._end(culprit, others | {rank}) for culprit in culprits])
        if not culprits or not ends:
            self._world.abandon()
            self._given_up = True

    def _await_stacks(self, others: set[int]) -> None:
        """Wait a short time until the other ranks have written their stacks."""
        if (beats := self._beats) is None:
            return
        beats.update(dataclasses.replace(beats.report, dumped=True), listening=True)
        deadline_s = time.monotonic() + 3 * self._tick_s + 1
        while time.monotonic() < deadline_s and not self.stopped:
            peers = beats.peers()
            if all((report := peers[other].report) and report.dumped for other in others):
                return
            time.sleep(0.02)

    def _end(self, culprit: int, others: set[int]) -> bool:
        """Kill a stopped culprit, if this is the lowest other rank of its host, if it has one."""
        assert self._beats is not None
        rank, known = self._world.rank, self._beats.identities
        if (who := known.get(culprit)) is None:
            return False
        on_host = [other for other in others if other in known and known[other].host == who.host]
        if rank == min(on_host, default=None) and who.started is not None:
            self._write(culprit, f"rank {culprit} (pid {who.pid}) does not run\n\n"
                                 f"{processes.describe_process(who.pid)}\n")
            processes.kill(who.pid, who.started)
        return bool(on_host)

    def _dump(self, own: RankReport) -> list[str]:
        """Write the stacks of this rank, once; return the problems of its loader workers."""
        causes: list[str] = []

        def dump() -> None:
            began = (f"rank {self._world.rank} of attempt {self._log.attempt}, pid {os.getpid()}: "
                     f"{own.phase} of step {own.step}, no progress for {own.idle_s:.1f} s"
                     f"{', waits for other ranks' if own.waits else ''}\n\n")
            self._write(self._world.rank, began + stack_dumps.own_threads() + "\n")
            text, found = stack_dumps.worker_stacks()
            causes.extend(found)
            if text:
                self._write(self._world.rank, text)

        if not self._dumped:
            self._dumped = True
            _run_for(DUMP_S, dump)
        return list(causes)

    def _write(self, rank: int, text: str) -> None:
        try:
            if self._log.folder is not None:
                stack_dumps.write(self._log.folder, attempt=self._log.attempt, rank=rank, text=text)
                return
        except OSError as error:
            text = f"(stacks could not be written to the run folder: {error})\n{text}"
        say(text)

    def leave(self, *, late: bool) -> None:
        """A peer is gone and the main thread has not left: save and leave in its place."""
        with self._leaving:
            if self.stopped:
                return
            self._world.abandon()
            if self._rescue() or late:
                self._log.warning(f"lost a peer; leaving in place of the main thread, which is at "
                                  f"{self._marks.main.point} of step {self._marks.main.step}")
                self._exit()

    def _rescue(self) -> bool:
        """Save in place of the main thread, within the grace time; whether that could be tried."""
        tried: list[bool] = []

        def rescue() -> None:
            try:
                tried.append(self.rescue())
            except Exception:
                self._log.warning(f"the last boundary wasn't saved:\n{traceback.format_exc()}")
                tried.append(True)

        _run_for(self.late_s, rescue)
        return not tried or tried[0]

    def _exit(self) -> None:
        say("")
        os._exit(EXIT_FAILURE)


def _run_for(limit_s: float, work: Callable[[], None]) -> None:
    """Run `work` in another thread, and wait at most `limit_s` seconds for its end."""
    thread = threading.Thread(target=work, name="alarm", daemon=True)
    thread.start()
    thread.join(limit_s)
