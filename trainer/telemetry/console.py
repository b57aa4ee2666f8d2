"""Progress on the terminal: a progress bar, or plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from trainer.telemetry.events import Log
from trainer.telemetry.metrics import RESERVED, Sink

REFRESH_S = 0.5
"""Seconds between updates of the metrics next to the bar."""
BAR, LEAST_BAR = "{bar}| {n_fmt}/{total_fmt} {elapsed}<{remaining}{desc}", 6
"""Format of the line, and the least length of its bar."""


class Console(Sink):
    """Sink that shows the run as a progress bar, or as a plain line every `every` of the `total`
    steps. `start`: steps of earlier attempts, which took `earlier_s`; `restarts`: number of
    restarts of the run."""

    def __init__(self, log: Log, *, total: int, every: int, start: int, bar: bool,
                 restarts: int = 0, earlier_s: float = 0.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._total, self._every, self._clock = log, total, every, clock
        self._start, self._bar = start, None
        self._began = self._shown_s = clock()
        self._last: dict[str, Any] = {}  # line of a step
        self._restarts = [f"restarts {restarts}"] if restarts else []
        self._note: Callable[[], str] = str
        if bar:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=start, dynamic_ncols=True, bar_format=BAR,
                             delay=1e-6)  # not drawn before the next lines
            self._bar.start_t -= earlier_s
            self._bar.refresh()
            # The bar is on stderr, as the log: tqdm.write would use stdout.
            log.write_lines_by(lambda text: tqdm.write(text, file=sys.stderr))

    def show_note(self, note: Callable[[], str]) -> None:
        """Show the text that `note` returns, if any, after the figures of a step."""
        self._note = note

    @property
    def _tail(self) -> list[str]:
        return [*self._restarts, *filter(None, [self._note()])]

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        step = line["step"]
        self._last = line
        if not timing:
            return  # a step of an earlier attempt
        if self._bar is not None:
            if self._clock() - self._shown_s >= REFRESH_S or step == self._total:
                self._shown_s = self._clock()
                self._bar.set_description_str(self._bar_text(line, timing), refresh=False)
            self._bar.update(1)
        elif not step % self._every or step == self._total:
            done = max(1, step - self._start)
            left_s = (self._clock() - self._began) / done * (self._total - step)
            loss, metrics, rate, norm, speed = _columns(line, timing)
            self._log.info("  ".join([self._step_label(step), loss, *metrics, rate, norm, speed,
                                      f"ETA {timedelta(seconds=round(left_s))}", *self._tail]))

    def _bar_text(self, line: Mapping[str, Any], timing: Mapping[str, float]) -> str:
        """The figures that fit next to a bar of `LEAST_BAR` characters, the most important first.
        """
        loss, metrics, rate, norm, speed = _columns(line, timing)
        loss, room, text = " ".join(loss.split()), self._room(), ""
        for part in (loss, *metrics[:1], speed, *self._tail, rate, norm, *metrics[1:]):
            if len(text) + 2 + len(part) <= room:
                text += f"  {part}"
        return text

    def _room(self) -> int:
        """Characters of the terminal's line that bar, steps and times leave."""
        assert self._bar is not None
        state = self._bar.format_dict
        if state["ncols"] is None:
            return sys.maxsize
        rest = self._bar.format_meter(**state | {"ncols": None, "prefix": "", "bar_format":
                                                 BAR.replace("{bar}", "")})
        return int(state["ncols"]) - len(rest) - LEAST_BAR

    def validation(self, line: dict[str, Any]) -> None:
        if line["step"] < self._start:
            return
        others = "  ".join(f"{k.removeprefix('val_')} {v:.3f}" for k, v in line.items()
                           if isinstance(v, float) and k not in ("train_loss", "val_loss"))
        train = _loss(line.get("train_loss"), "none").replace("  ", " ")
        where = f"epoch {self._last['epoch']}, lr {self._last['lr']:.2e}, " if self._last else ""
        parts = [self._step_label(line["step"]), _loss(line["val_loss"], "nan"), others,
                 f"(validation; {where}training {train})"]
        self._log.info("  ".join(filter(None, parts)))

    def text(self, text: str, step: int) -> None:
        self._log.info(f"{self._step_label(step)}  {text}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._log.write_lines_by(None)

    def _step_label(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}"


def _columns(
    line: Mapping[str, Any], timing: Mapping[str, float]
) -> tuple[str, list[str], str, str, str]:
    """Loss, two metrics of the task, rate, norm of the gradient, speed."""
    metrics = [f"{k} {v:.3f}" for k, v in line.items() if k not in RESERVED and v is not None][:2]
    norm = line["grad_norm"]
    turn = f"{line['turn']} " if "turn" in line else ""
    return (turn + _loss(line["loss"]), metrics, f"lr {line['lr']:.2e}",
            f"norm {'-' if norm is None else f'{norm:.2f}'}",
            f"{line['samples'] / timing['step']:.0f} samples/s")


def _loss(value: float | None, otherwise: str = "skipped") -> str:
    return f"loss {otherwise:>7}" if value is None else f"loss {value:7.4f}"
