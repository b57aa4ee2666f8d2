"""What a start prints: the summary once, and again after a change; the time of all attempts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from trainer.config.compatibility import ResumeDecision
from trainer.resilience.attempts import running_s
from trainer.run.context import Resumption
from trainer.run.startup_summary import log_startup
from trainer.telemetry.events import Log


@pytest.mark.parametrize(("attempt", "changes", "shown"), [
    (0, (), True), (1, (), False), (3, (), False), (1, ("--optim.lr was 1 and is 2",), True)])
def test_the_summary_is_printed_once_unless_something_has_changed(attempt, changes, shown):
    log = Log(stream=(stream := io.StringIO()))
    log.attempt = attempt
    resumption = Resumption(found=None, decision=ResumeDecision(changes=changes), position=0,
                            circumstances={})

    log_startup(log, ["model   Net"], ["look out"], resumption, Path("run"))

    text = stream.getvalue()
    assert ("model   Net" in text) == shown
    assert "warning: look out" in text
    assert all(f"changed: {change}" in text for change in changes)


def test_the_time_of_a_run_is_that_of_its_attempts_without_the_time_between():
    records = [{"attempt": number, "time": time}
               for number, time in ((0, 10.0), (1, 103.5), (0, 15.0), (1, 101.0), (0, 12.0))]

    assert running_s(records) == 5.0 + 2.5
    assert running_s([]) == 0
