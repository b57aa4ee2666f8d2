"""Phases of a rank, what may be saved after a failure, and the name of a place for people."""

from __future__ import annotations

import pytest

from trainer.telemetry.status import AT_STAKE, Phase, Rescue, Status, decide_rescue

STAGES = (Phase.START, Phase.JOIN, Phase.BUILD, Phase.WARM_UP, Phase.RESTORE, Phase.TRAIN,
          Phase.EVALUATE, Phase.ROLL_BACK, Phase.STOP, Phase.FINISH)


def status(phase: Phase, *, in_step: bool = False, updating: bool = False) -> Status:
    made = Status()
    made.enter(phase)
    if in_step:
        made.begin_step()
    if updating:
        made.begin_update()
    return made


@pytest.mark.parametrize("own_error", [False, True])
@pytest.mark.parametrize("phase", [s for s in STAGES if s not in AT_STAKE])
def test_nothing_is_lost_where_the_model_does_not_hold_the_run(phase, own_error):
    assert decide_rescue(status(phase), own_error=own_error) is Rescue.NOTHING_LOST


@pytest.mark.parametrize(("phase", "in_step", "updating", "after_death", "after_error"), [
    (Phase.TRAIN, False, False, Rescue.SAVE, Rescue.LOST),
    (Phase.TRAIN, True, False, *[Rescue.RESTORE_BUFFERS_AND_SAVE] * 2),
    (Phase.TRAIN, True, True, Rescue.LOST, Rescue.LOST),
    (Phase.EVALUATE, False, False, Rescue.SAVE, Rescue.SAVE),
    (Phase.STOP, False, False, Rescue.SAVE, Rescue.LOST)])
def test_what_may_be_saved_follows_from_the_status(phase, in_step, updating, after_death,
                                                   after_error):
    now = status(phase, in_step=in_step, updating=updating)

    assert decide_rescue(now, own_error=False) is after_death
    assert decide_rescue(now, own_error=True) is after_error
    for own_error in (False, True):
        assert decide_rescue(now, own_error=own_error, exchanging_weights=True) is Rescue.LOST


@pytest.mark.parametrize(("phase", "point", "place"), [
    (Phase.TRAIN, Phase.READING, "data"), (Phase.TRAIN, Phase.OPTIMIZER, "optimizer"),
    (Phase.WARM_UP, Phase.FORWARD, "warm-up, forward"), (Phase.BUILD, Phase.START, "build"),
    (Phase.EVALUATE, Phase.EVALUATE, "evaluate"), (Phase.FINISH, Phase.EVALUATE, "finish")])
def test_a_place_has_the_most_precise_name(phase, point, place):
    now = status(phase)
    now.reach(point)

    assert now.place == place
