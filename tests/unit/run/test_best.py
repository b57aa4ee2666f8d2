"""Best validation: any gain selects the weights, a gain above min_delta resets the
patience."""

from __future__ import annotations

import json

import pytest

from trainer.checkpoint.progress import BestTracker
from trainer.run.finish import update_best


@pytest.mark.parametrize("sign", [1, -1])
def test_a_small_gain_is_the_best_but_does_not_reset_the_patience(sign):
    rule, best = ("val_loss:min", "val_loss:max")[sign < 0], BestTracker()
    seen = []
    for step, loss in enumerate([1.0, 0.95, 0.91, 0.85, float("nan"), 0.80, 0.70], 1):
        taken = update_best(rule, best, {"val_loss": sign * loss}, step, min_delta=0.1)
        seen.append((taken, best.step, best.waited))
        # A restart at every validation.
        best = BestTracker.from_json(json.loads(json.dumps(best.state_dict())))

    assert seen == [(True, 1, 0), (True, 2, 1), (True, 3, 2), (True, 4, 0), (False, 4, 1),
                    (True, 6, 2), (True, 7, 0)]
    assert not best.patience_is_exhausted(1)


def test_without_min_delta_any_gain_resets_the_patience():
    best = BestTracker()
    waits = []
    for step, loss in enumerate([1.0, 1.0, 1.1, 0.999], 1):
        update_best("auto", best, {"val_loss": loss}, step)
        waits.append(best.waited)

    assert waits == [0, 1, 2, 0]
