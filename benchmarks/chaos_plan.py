"""The plan of the chaos benchmark: settings and faults of each run, drawn from a seed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

from trainer.resilience.fault_injection import PHASES

STEPS, CHECKPOINT_EVERY, EVAL_EVERY = 26, 3, 4
MICRO_SIZE = 2
MOST_FAULTS, MOST_MIRRORED = 8, 4
"""Of one run; with --mirror."""
PAUSE_S = 0.04
"""Of each micro-batch with --mirror, so that uploads keep up with the steps."""

SHAPES = ((2, 2), (3, 4), (4, 12), (1, 3), (3, 9), (2, 6), (4, 4), (3, 3), (1, 1))
"""(ranks, micro-batches in a global batch)."""
ELASTIC_SHAPES = ((2, 4), (2, 6), (2, 7))
"""With --elastic: each launch draws its own number of ranks; faults strike ranks 0 and 1."""

AT_PHASES = ("kill", "exit", "kill", "raise", "kill", "term")
"""Kinds that strike each phase in turn, round by round."""
ELSEWHERE = ("ranks", "launcher", "corrupt")
"""Once a round each: SIGKILL of all ranks or the launcher from outside; a rank that damages the
newest checkpoint and dies."""
SOAK_AT_PHASES = (*AT_PHASES, "slow", "hang", "kill", "stop", "enospc")
SOAK_ELSEWHERE = (*ELSEWHERE, "server", "nan", "flip")
"""With --soak also: a rank that is slow, hangs or is stopped, a full disk, SIGKILL of the fork
server (only `python -m launch` has one), a NaN in the loss, a flipped bit of one rank's weights."""
LASTING = ("nan",)
"""Kinds that change the bits of the result: they happen in the undisturbed run too, whenever the
step is computed."""
NETWORK = ("cut", "slow-store", "5xx")
LOSSES = ("disks", "twins")
MIRRORED = (*NETWORK, "upload", "ranks", "launcher")
"""With --mirror: the network, SIGKILL during an upload, and the processes. Each run also has one of
`LOSSES`: SIGKILL of all processes, and the run folder is deleted; then the command is given again,
or, with `twins`, twice at once for two empty folders."""
UPLOADED = ("data", "records", "checkpoints")
"""Folders of the mirror: for a checkpoint one after the other gets objects."""
OUTSIDE = ("ranks", "launcher", "server", *NETWORK, "upload", *LOSSES)
"""Kinds done to the run from outside; the trainer itself injects all others."""

IN_STEP = ("data", "forward", "backward", "optimizer", "step-end")
ONE_A_RUN = ("start", "restore")
SLOW_S, HANG_S = 0.2, 3.0
ENOUGH_SAVED = 4 * CHECKPOINT_EVERY + 1
"""From this step on there are two whole checkpoints, even if a save has failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A configuration. The bits of its result don't depend on `workers`."""

    ranks: int
    micro_batches: int
    sync_bn: str
    workers: int
    seed: int
    mode: str = ""  # soak, mirror, elastic or none

    def __str__(self) -> str:
        return (f"W={'1-4' if self.mode == 'elastic' else self.ranks} M={self.micro_batches} "
                f"sync-bn={self.sync_bn} workers={self.workers}")

    def arguments(self, run: str) -> list[str]:
        """The trainer's arguments: three epochs, each with a last global batch that is smaller."""
        size = self.micro_batches * MICRO_SIZE
        values = {
            "run-dir": run, "task": "benchmarks.chaos_task:Chaos", "steps": STEPS,
            "seed": self.seed, "device": "cpu", "world.threads": 1, "log.level": "warning",
            "task.samples": 8 * size + min(3, size - 1), "data.drop-last": "off",
            "batch.global-size": size, "batch.micro-size": MICRO_SIZE,
            "data.workers": self.workers, "parallel.sync-bn": self.sync_bn,
            "checkpoint.every": CHECKPOINT_EVERY, "eval.every": EVAL_EVERY,
            "restart.max-same-step": 1000,
        }  # fmt: skip
        if self.mode == "soak":
            values |= {"watchdog.limit-s": HANG_S, "parallel.verify-every": 1,
                       "nonfinite.max-in-row": 1 if self.sync_bn == "auto" else 3}
        if self.mode == "mirror":
            values["task.pause-s"] = PAUSE_S
        if self.mode == "elastic":
            values["parallel.reduction"] = "canonical"
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and the step or attempt at which it strikes; None is the first that fits. One that
    has no place in a run yet has a kind, and perhaps a phase.

    Kinds of `OUTSIDE` strike `delay_s` after the step is seen in metrics.jsonl, or after the
    attempt's ranks are seen.
    """

    kind: str
    rank: int | None = None
    phase: str | None = None
    step: int | None = None
    attempt: int | None = None
    delay_s: float = 0.0

    @property
    def restarts(self) -> bool:
        """Whether it always ends the attempt."""
        in_writer = self.phase is not None and self.phase.startswith("save-")
        if self.kind in ("slow", "flip", *LASTING, *NETWORK):
            return False
        return not (self.kind in ("raise", "enospc") and in_writer)

    def __str__(self) -> str:
        """The value of `--inject`, if it can be injected."""
        parts = [self.kind, *(f"{name}={value}" for name in ("rank", "step", "phase", "attempt")
                              if (value := getattr(self, name)) is not None)]
        if self.kind == "slow":
            parts.append(f"seconds={SLOW_S}")
        if self.kind in LASTING:
            parts.append("always")
        return ":".join(parts) + (f" + {self.delay_s:.3f} s" if self.delay_s else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A setting and its faults."""

    number: int
    setting: Setting
    faults: tuple[Fault, ...]


def deck(draw: random.Random, mode: str) -> Iterator[Fault]:
    """Faults without end, in rounds: of `MIRRORED`, or each phase with the next kind in turn, and
    the others."""
    kinds, others = ((SOAK_AT_PHASES, SOAK_ELSEWHERE) if mode == "soak" else
                     (AT_PHASES, ELSEWHERE))
    for turn in itertools.count():
        cards = [Fault(kind=kinds[(place + turn) % len(kinds)], phase=phase)
                 for place, phase in enumerate(PHASES)] if mode != "mirror" else []
        cards += [Fault(kind=kind) for kind in (MIRRORED if mode == "mirror" else others)]
        draw.shuffle(cards)
        yield from cards


def sizes(faults: int, mode: str) -> list[int]:
    """Faults of each run, none more than allowed; without a mirror every shape has a run, if there
    are enough."""
    runs = (-(-faults // MOST_MIRRORED) if mode == "mirror" else
            max(-(-faults // MOST_FAULTS), min(faults, len(SHAPES))))
    return [faults // runs + (number < faults % runs) for number in range(runs)]


def setting(number: int, seed: int, mode: str) -> Setting:
    """The setting of a run: all combinations come within four laps over the shapes."""
    shapes = ELASTIC_SHAPES if mode == "elastic" else SHAPES
    lap, place = divmod(number, len(shapes))
    ranks, micro_batches = shapes[place]
    return Setting(
        ranks=ranks, micro_batches=micro_batches, seed=seed, mode=mode,
        sync_bn=("auto", "off")[(place + lap) % 2 if mode != "elastic" else 0],
        workers=(0, 2)[(place // 2 + lap // 2) % 2],
    )  # fmt: skip


def plan(number: int, count: int, cards: Iterator[Fault], left: list[Fault],
         draw: random.Random, *, seed: int, mode: str) -> Run:
    """The next run, with `count` faults from `left` (what is taken is removed), then `cards`. One
    of them is a loss of all disks, with a mirror."""
    chosen = setting(number, seed, mode)
    hand = [Fault(kind=LOSSES[number % len(LOSSES)])] if mode == "mirror" else []
    passed: list[Fault] = []
    while len(hand) < count:
        card = left.pop(0) if left else next(cards)
        (hand if _goes_with(card, hand, count) else passed).append(card)
    left[:0] = passed
    steps: set[int] = set()
    faults = []
    for card in sorted(hand, key=lambda c: len(_steps(c))):  # those with the least choice first
        fault = _place(card, hand, chosen.ranks, steps, draw)
        steps |= {fault.step} if fault.step else set()
        faults.append(fault)
    faults.sort(key=lambda f: (f.step or 0, f.attempt or 0))
    return Run(number=number, setting=chosen, faults=tuple(faults))


def _goes_with(card: Fault, hand: Sequence[Fault], count: int) -> bool:
    if card.phase in ONE_A_RUN and any(other.phase == card.phase for other in hand):
        return False
    if card.phase == "restore":
        return count > 1  # something else has to end an attempt first
    # The steps of a run's faults differ: each phase of saving or validating has only a few.
    allowed = _steps(card)
    rivals = sum(_steps(other) == allowed for other in hand)
    return not allowed or rivals < len(allowed) // 2


def _place(card: Fault, hand: Sequence[Fault], ranks: int, taken: set[int],
           draw: random.Random) -> Fault:
    free = [step for step in _steps(card) if step not in taken]
    rank = draw.choice((0, ranks - 1))
    if card.kind == "flip":
        # One rank alone has nobody to compare with.
        return Fault(kind="flip" if ranks > 1 else "kill", rank=rank, step=draw.choice(free),
                     phase="step-end")
    if card.kind in LASTING:
        return Fault(kind=card.kind, rank=rank, step=draw.choice(free), phase="forward")
    if card.kind == "upload":
        return Fault(kind="upload", phase=draw.choice(UPLOADED), step=draw.choice(free))
    if card.kind in OUTSIDE:
        if card.kind != "twins" and draw.random() < 0.3:  # while the ranks start
            return Fault(kind=card.kind, attempt=_early(card, hand, draw),
                         delay_s=round(draw.uniform(0, 1.0), 3))
        return Fault(kind=card.kind, step=draw.choice(free),
                     delay_s=round(draw.uniform(0, 0.03), 3))
    if card.phase == "start":
        return Fault(kind=card.kind, rank=rank, phase="start", attempt=_early(card, hand, draw))
    if card.phase == "restore":
        return Fault(kind=card.kind, rank=rank, phase="restore")
    if card.phase is not None and card.phase.startswith("save-"):
        rank = 0  # the one that writes
    return Fault(kind=card.kind, rank=rank, step=draw.choice(free),
                 phase=card.phase or draw.choice(IN_STEP))


def _early(card: Fault, hand: Sequence[Fault], draw: random.Random) -> int:
    """The number of an attempt that always comes."""
    others = sum(other.restarts for other in hand if other is not card)
    return draw.randint(0, min(2, others // 2))


def _steps(card: Fault) -> range:
    """The steps at which a fault can strike; none if it is not bound to a step."""
    if card.phase in ONE_A_RUN:
        return range(0)
    if card.kind == "twins":
        return range(STEPS - 4, STEPS - 2)  # after all others
    if card.kind in OUTSIDE:
        return range(2, STEPS - 4)  # to be seen and struck before the run ends
    if card.kind == "corrupt":
        return range(ENOUGH_SAVED, STEPS - 1)
    if card.phase == "evaluate":
        return range(EVAL_EVERY, STEPS, EVAL_EVERY)
    if card.phase is not None and card.phase.startswith("save-"):
        return range(CHECKPOINT_EVERY, STEPS, CHECKPOINT_EVERY)
    return range(1, STEPS + 1)
