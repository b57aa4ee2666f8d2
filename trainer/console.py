"""The run for people at a terminal: a progress bar, or plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.log import Log
from trainer.metrics import RESERVED

REFRESH_S = 0.5
"""How often the figures beside the bar are brought up to date."""


class Console:
    """The run for people: a progress bar on a terminal, plain lines elsewhere.

    Args:
        total: steps of the run.
        every: steps between plain lines.
        start: steps made by earlier attempts.
        restarts: how often the run has been started again.
    """

    def __init__(
        self, log: Log, *, total: int, every: int, start: int, bar: bool, restarts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._log, self._total, self._every, self._clock = log, total, every, clock
        self._start, self._bar = start, None
        self._began = self._shown_s = clock()
        self._tail = f"  restarts {restarts}" if restarts else ""
        if bar:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True)
            log.echo = tqdm.write

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        step = line["step"]
        if not timing:
            return  # made by an earlier attempt
        if self._bar is not None:
            self._refresh(self._bar, line, timing)
        elif not step % self._every or step == self._total:
            done = max(1, step - self._start)
            left = (self._clock() - self._began) / done * (self._total - step)
            self._log.info(f"{self._place(step)}  {_columns(line, timing)}  ETA {_span(left)}"
                           f"{self._tail}")

    def validation(self, line: dict[str, Any]) -> None:
        if line["step"] < self._start:
            return
        # The loss and the first figure stand below those of the training lines.
        others = "  ".join(f"{k.removeprefix('val_')} {v:.3f}" for k, v in line.items()
                           if isinstance(v, float) and k not in ("train_loss", "val_loss"))
        train = _loss(line["train_loss"], "none").replace("  ", " ")
        self._log.info(f"{self._place(line['step'])}  {_loss(line['val_loss'], 'nan')}  {others}"
                       + "  " * bool(others) + f"(validation; training {train})")

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        pass  # the closing lines say it

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._log.echo = None

    def _refresh(self, bar: Any, line: dict[str, Any], timing: dict[str, float]) -> None:
        now = self._clock()
        if now - self._shown_s >= REFRESH_S or line["step"] == self._total:
            self._shown_s = now
            bar.set_postfix_str(_columns(line, timing) + self._tail, refresh=False)
        bar.update(1)

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}"


def _columns(line: Mapping[str, Any], timing: Mapping[str, float]) -> str:
    parts = [_loss(line["loss"])]
    parts += [f"{k} {v:.3f}" for k, v in line.items() if k not in RESERVED and v is not None][:2]
    norm = line["grad_norm"]
    parts.append(f"lr {line['lr']:.2e}  norm {'-' if norm is None else f'{norm:.2f}'}")
    return "  ".join([*parts, f"{line['samples'] / timing['step']:.0f} samples/s"])


def _loss(value: float | None, otherwise: str = "skipped") -> str:
    return f"loss {otherwise:>7}" if value is None else f"loss {value:7.4f}"


def _span(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
