"""Status of a rank: its phase, its step, and what a failure at this moment would lose."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum, auto


class Phase(StrEnum):
    """Position of a rank, as named in the log, `--inject`, heartbeats and diagnosis: the stages of
    an attempt (`Status.phase`), the progress marks that the main thread passes inside a stage
    (`Status.point`), and the marks of the thread that writes checkpoints."""

    START = "start"
    JOIN = "join"
    BUILD = "build"
    WARM_UP = "warm-up"
    RESTORE = "restore"
    TRAIN = "train"
    EVALUATE = "evaluate"
    ROLL_BACK = "roll-back"
    STOP = "stop"
    FINISH = "finish"

    READING = "reading"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STEP_END = "step-end"
    SAVE = "save"

    SAVE_BEGIN = "save-begin"
    SAVE_MID = "save-mid"
    SAVE_END = "save-end"


PREPARING = frozenset((Phase.START, Phase.JOIN, Phase.BUILD, Phase.WARM_UP, Phase.RESTORE))
"""Stages before the first step of an attempt: everything is on disk already."""

AT_STAKE = frozenset((Phase.TRAIN, Phase.EVALUATE, Phase.STOP))
"""Stages in which the model holds the weights of the run, which may not be on disk yet."""


class Status:
    """What a rank is doing: the parts of a run update it, the log and the watchdog read it."""

    def __init__(self) -> None:
        self.phase = self.point = Phase.START
        self.step = 0
        """The last completed step."""
        self.in_step = False
        """The forwards of a step have begun and it is not complete: buffers may be ahead of the
        parameters, and the copies of the buffers are those of the last step boundary."""
        self.updating = False
        """Parameters, optimizer state and progress may be in the middle of an update."""
        self._on_phase: list[Callable[[Phase], None]] = []
        self._on_step: list[Callable[[int], None]] = []

    def on_phase(self, observer: Callable[[Phase], None]) -> None:
        """Call `observer` with each stage that begins from now on."""
        self._on_phase.append(observer)

    def on_step(self, observer: Callable[[int], None]) -> None:
        """Call `observer` with each step that is completed from now on."""
        self._on_step.append(observer)

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        for observer in self._on_phase:
            observer(phase)

    def reach(self, point: Phase) -> None:
        self.point = point

    def move_to(self, step: int) -> None:
        """Set the step boundary after a restore or a roll-back."""
        self.step = step

    def complete_step(self, step: int) -> None:
        """The loop has completed a step, with or without an update."""
        self.step = step
        for observer in self._on_step:
            observer(step)

    def begin_step(self) -> None:
        self.in_step = True

    def begin_update(self) -> None:
        self.updating = True

    def end_step(self) -> None:
        """Parameters, buffers and progress belong to one step boundary again."""
        self.in_step = self.updating = False

    @property
    def has_nothing_at_stake(self) -> bool:
        """Whether no step of this attempt has begun, so that a stop loses nothing."""
        return self.phase in PREPARING

    @property
    def place(self) -> str:
        """The most precise name of the main thread's position, for messages."""
        point = Phase.DATA if self.point is Phase.READING else self.point
        if self.phase is Phase.TRAIN:
            return point.value
        in_step = point in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
        inside = self.phase is Phase.WARM_UP and in_step
        return f"{self.phase.value}, {point.value}" if inside else self.phase.value


class Rescue(Enum):
    """What can be done about the newest step boundary after a failure."""

    NOTHING_LOST = auto()
    """The state is on disk, or the model does not hold the weights of the run."""
    SAVE = auto()
    """Parameters, buffers and progress belong to one step boundary: save them."""
    RESTORE_BUFFERS_AND_SAVE = auto()
    """Only buffers have moved since the boundary: put their copies back, then save."""
    LOST = auto()
    """Memory holds a mixture of two states: nothing may be saved."""


def decide_rescue(status: Status, *, own_error: bool, exchanging_weights: bool = False) -> Rescue:
    """Decide what a rank may save after a failure.

    ======================================  ==========================  ==========================
    main thread is in                       a peer died                 own exception
    ======================================  ==========================  ==========================
    start … restore, roll-back, finish      NOTHING_LOST                NOTHING_LOST
    train, between two steps                SAVE                        LOST
    train, step begun, before its update    RESTORE_BUFFERS_AND_SAVE    RESTORE_BUFFERS_AND_SAVE
    train, inside the update                LOST                        LOST
    evaluate                                SAVE                        SAVE
    evaluate, while weights are exchanged   LOST                        LOST
    stop                                    SAVE                        LOST
    ======================================  ==========================  ==========================

    A peer's death reaches a rank inside a collective, and none runs while the state between two
    steps is assembled; an exception of this rank may occur anywhere in it.

    Args:
        own_error: this rank itself failed, by an exception; otherwise a peer died.
        exchanging_weights: the exchange of weights and their average is half done.
    """
    if status.phase not in AT_STAKE:
        return Rescue.NOTHING_LOST
    if status.updating or exchanging_weights:
        return Rescue.LOST
    if status.in_step:
        return Rescue.RESTORE_BUFFERS_AND_SAVE
    if own_error and status.phase is not Phase.EVALUATE:
        return Rescue.LOST
    return Rescue.SAVE
