"""Library call: in a process of the user, and as a rank."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import events
from small_task import Held, Small, fail, interrupt_twice, process_state, samples, send
from tape_task import Tape

import trainer
from trainer import Config, ConfigError
from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.config.fields import Duration
from trainer.config.schema import Batch, Checkpoint, Optim, WorldConfig


def config(run: Path | str, task: Any = None, **more: Any) -> Config[Any]:
    """12 steps of two micro-batches."""
    return Config(**{
        "task": task or Held(), "run": str(run), "steps": 12, "device": "cpu",
        "batch": Batch(global_size=16, micro_size=8), "world": WorldConfig(threads=1),
        "checkpoint": Checkpoint(every=Duration(4)), "optim": Optim(ema=0.9)} | more)


def alone(function: Any, *arguments: Any) -> Any:
    """Call a function in a rank without the environment variables of a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                 "MASTER_PORT"):
        del os.environ[name]
    return function(*arguments)


ACTIONS = {"": None, "SIGINT": send(signal.SIGINT), "SIGTERM": send(signal.SIGTERM), "fail": fail,
           "twice": interrupt_twice}  # fmt: skip


def train(run: str, at: int = 0, act: str = "") -> Any:
    """Return the result of a call, or the names of its exception and of the cause."""
    before = process_state()
    try:
        done = trainer.train(config(run, Held(at, ACTIONS[act])))
    except BaseException as error:
        outcome: Any = (type(error).__name__, str(error), type(error.__cause__).__name__)
    else:
        weights = {n: v.clone() for n, v in done.model.state_dict().items()}
        outcome = (done.model.training, done.summary["step"], str(done.folder), weights)
    return outcome, [a for a, b in zip(before, process_state(), strict=True) if a != b]


def straight(run: str) -> None:
    trainer.train(config(run))


@pytest.fixture(scope="module")
def call(ranks) -> Callable[..., Any]:
    """`call(function, *arguments)`: what it returns in a process without a launcher."""
    return lambda *call: ranks(1, alone, *call, group=False)[0]


@pytest.fixture(scope="module")
def undisturbed(call, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("library") / "run"
    call(straight, str(path))
    return path


@pytest.fixture
def run(tmp_path) -> str:
    return str(tmp_path / "run")


def three_calls(path: str) -> Any:
    torch.manual_seed(5)
    return [train(f"{path}/{name}") for name in ("a", "b", "a")]


def test_tensors_in_memory_train_and_the_same_call_returns_the_finished_run(call, tmp_path):
    (first, _), (other, moved), (again, moved_again) = call(three_calls, str(tmp_path))

    assert first[:3] == again[:3] == (False, 12, f"{tmp_path}/a")
    assert moved == moved_again == []
    assert all(torch.equal(first[3][n], v) and torch.equal(other[3][n], v)
               for n, v in again[3].items())
    assert not list(differences(tmp_path / "a", tmp_path / "b"))
    table = recorded(tmp_path / "a")
    assert (table["class"], table["path"], table["holds"]) == (
        "trainer.given:Given", "small_task:Held", [])


def recorded(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text())["task"]


@dataclasses.dataclass(frozen=True)
class Kept(Small):
    x: torch.Tensor = dataclasses.field(default_factory=lambda: samples(96, 0)[0])


def one_step(run: str, task: Any) -> None:
    trainer.train(config(run, task, steps=1))


def test_a_task_is_recorded_as_on_the_command_line_or_by_the_form_of_its_tensors(call, tmp_path):
    for number, task in enumerate(("small_task:Small", Small, Small(), Kept())):
        call(one_step, str(tmp_path / f"{number}"), task)

    found = [recorded(tmp_path / f"{number}") for number in range(4)]
    assert found[:3] == [{"class": "small_task:Small", "drift": 0.0}] * 3
    assert found[3]["holds"] == ["drift=0.0", "x=Tensor float32 96x6"]
    assert "--task.holds was" in call(error_of, one_step, str(tmp_path / "3"), Kept(drift=0.5))


@pytest.mark.parametrize(("at", "act", "expected", "kept"), [
    # Two micro-batches make a step; the warm-up takes one, and the trial in the third step three.
    (16, "SIGINT", ("KeyboardInterrupt", "", "StopRequested"), 6),
    (16, "SIGTERM", ("SystemExit", "75", "StopRequested"), 6),
    # A second interrupt does not wait for the step.
    (17, "twice", ("KeyboardInterrupt", "", "StopRequested"), 5),
    (17, "fail", ("KeyError", '"the user\'s own mistake"', "NoneType"), 5),
])
def test_what_ends_a_call_is_saved_and_raised_and_the_next_call_goes_on_with_the_same_bits(
        call, undisturbed, run, at, act, expected, kept):
    outcome, moved = call(train, run, at, act)
    saved = inspect(Path(run))["step"]
    call(straight, run)

    assert outcome == expected
    assert len(moved) <= 2, "descriptors and threads that a first call makes"
    assert saved == kept
    assert not list(differences(undisturbed, Path(run)))
    if act == "fail":
        where = events(Path(run), "failure")[0]["where"]
        assert "small_task.py:" in where
        assert where.endswith(" in fail")


class Interrupted(Held):
    def dataset(self, split: str) -> Any:
        send(signal.SIGINT)()
        raise AssertionError("the interrupt comes first")


def test_an_interrupt_before_there_is_anything_to_save_is_raised_at_once(call, run):
    with pytest.raises(KeyboardInterrupt):
        call(one_step, run, Interrupted())

    assert not Path(run).exists()


def in_a_thread(run: str) -> Any:
    before = process_state()[0]
    with ThreadPoolExecutor(1) as pool:
        done, failed = (pool.submit(train, *call).result()[0]
                        for call in ((run,), (f"{run}-2", 12, "fail")))
    again = train(f"{run}-2")[0]  # the folder is free
    return done[:2], failed[0], again[:2], process_state()[0] == before


def test_in_another_thread_it_trains_and_leaves_the_signals_alone(call, run):
    assert call(in_a_thread, run) == ((False, 12), "KeyError", (False, 12), True)


def in_a_pool(run: str) -> None:
    files = Tape(samples=64)  # not in memory: otherwise nobody would want loader processes
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(one_step, (run, files))


def test_in_a_process_that_may_have_no_children_it_reads_itself(call, run):
    call(in_a_pool, run)

    assert inspect(Path(run))["finished"]


def error_of(function: Any, *arguments: Any) -> str:
    """Return the message of the exception of a call, or ""."""
    try:
        function(*arguments)
    except (RuntimeError, ConfigError) as error:
        return str(error)
    return ""


def one_in_the_other(run: str) -> str:
    return error_of(trainer.train, config(run, Held(8, lambda: straight(f"{run}/inner"))))


def test_a_second_training_at_the_same_time_is_refused(call, run):
    assert "running in this process already" in call(one_in_the_other, run)


@pytest.mark.parametrize(("more", "message"), [
    ({"task": object()}, "--task object: it has no method model, dataset, loss"),
    ({"device": "tpu"}, "--device 'tpu': expected auto|cpu|cuda|mps"),
])
def test_a_refusal_is_a_config_error_and_starts_nothing(run, more, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        trainer.train(config(run, **more))

    assert not Path(run).exists()


def two_calls(path: str) -> Any:
    before = process_state()[0]
    return [train(f"{path}/{name}")[0] for name in ("a", "b")], process_state()[0] == before


def test_ranks_of_a_launcher_train_together_and_go_on_in_the_same_script(ranks, tmp_path):
    (ours, as_before), (theirs, _) = ranks(2, two_calls, str(tmp_path), group=False)

    assert as_before, "the handlers of signals"
    for (mode, step, _, weights), (_, _, _, others) in zip(ours, theirs, strict=True):
        assert (mode, step) == (False, 12)
        assert all(torch.equal(v, others[n]) for n, v in weights.items())
    assert not list(differences(tmp_path / "a", tmp_path / "b"))


def refused(run: str) -> None:
    trainer.train(config(run, batch=Batch(global_size=128, micro_size=8)))


def stopped(run: str) -> None:
    trainer.train(config(run, Held(5, send(signal.SIGTERM))))


@pytest.mark.parametrize(("function", "code"), [(refused, 2), (stopped, 75)])
def test_a_rank_leaves_with_the_exit_codes_of_the_command_line(ranks, run, function, code):
    outcomes = ranks.outcomes(2, function, run, group=False)

    assert [outcome.exit_code for outcome in outcomes] == [code, code]
