"""How a run fails: the first failure is told with its place, the boundary is saved, all leave."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from runs import TAPE, events, summary, train
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect

TASK = (*TAPE, "--task=failing_task:Failing", "--data.shuffle=off", "--task.norm=batch",
        "--steps=20", "--checkpoint.every=1000")  # fmt: skip
RAISED = "ValueError: sample 88 is not to be borne (tests/support/failing_task.py:"


def run(ranks, size: int, path: Path, *arguments: str, **options):
    """The exit code of each rank, and what it has said."""
    outcomes = ranks.outcomes(size, train, *TASK, *arguments, f"--run-dir={path}", group=False,
                              **options)
    return [o.exit_code or o.value for o in outcomes], [o.output for o in outcomes]


@pytest.mark.parametrize(("how", "told", "kept"), [
    ("name", r"step 12 \(forward\), attempt 0: FileNotFoundError: no file \\udcff.jpg", 11),
    ("codes", r"step 12 \(forward\), attempt 0: Red\\x1b\[31m: \\x1b\[2Jgone \\x9b1m\\u202e", 11),
    ("words", r"step 12 \(forward\), attempt 0: RuntimeError: Connection reset by peer", 11),
    ("exit", r"step 12 \(forward\), attempt 0: SystemExit: 0", 11),
    ("exit-early", r"step 0 \(build\), attempt 0: SystemExit: 0", None),
])  # fmt: skip
def test_whatever_is_raised_is_a_failure_that_is_told_once_and_saved(
    ranks, tmp_path, how, told, kept
):
    [code], [said] = run(ranks, 1, tmp_path / "run", f"--task.how={how}")

    assert code == 1
    assert not set("\x1b\x9b\u202e") & set(said)
    assert re.match(rf"error: rank 0, {told} \(.*failing_task.py:\d+ in ", said.splitlines()[-1])
    if kept is not None:  # the run had begun
        [event] = events(tmp_path / "run", "failure")
        event["why"].encode()  # whoever reads it can write it
        assert inspect(tmp_path / "run")["step"] == kept


def test_the_task_may_change_the_current_folder_and_lose_a_child(ranks, undisturbed, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)

    for how in ("moved", "forked"):
        path = Path(os.path.relpath(tmp_path / how))
        codes, [said, _] = run(ranks, 2, path, f"--task.how={how}", f"--task.marks={tmp_path}/a/b")

        assert codes == [0, 0], said
        assert ("ValueError: in a process of the task's own" in said) == (how == "forked")
        assert "error: " not in said
        assert not list(differences(undisturbed(2, *TASK), tmp_path / how))


def test_out_of_memory_names_the_phase_and_the_remedies_in_order_and_all_leave(ranks, tmp_path):
    codes, said = run(ranks, 2, tmp_path / "run", "--task.how=memory", "--task.at=92")

    assert codes == [1, 1]
    assert re.search("error: out of memory, in phase forward, with micro-batches of 2.*\n"
                     "  1. a smaller micro-batch at .*: --batch.micro-size 1 --accept.*\n"
                     "  2. mixed precision: --precision.dtype bf16.*\n"
                     "  3. activation checkpointing: --precision.recompute-every 1 .*\n.*"
                     r"error: rank 1, step 12 \(forward\), attempt 0: RuntimeError: .*\n$", said[1])
    [failure] = events(tmp_path / "run", "failure", echo=False)
    [lost] = events(tmp_path / "run", "lost-peer")
    assert (failure["rank"], lost["rank"]) == (1, 0)
    assert lost["time"] - failure["time"] < 20.0  # the collectives' limit is a minute
    assert inspect(tmp_path / "run")["step"] == 11


def test_the_last_line_is_the_failure_with_the_users_line_which_torchrun_finds_too(ranks, tmp_path):
    env = {"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/{{rank}}.json"}

    codes, said = run(ranks, 2, tmp_path / "run", "--task.how=raise", "--task.at=92", env=env)

    assert codes == [1, 1]
    last = said[1].splitlines()[-1]
    assert f"error: rank 1, step 12 (forward), attempt 0: {RAISED}" in last
    assert last.endswith(" in _fail)")
    failures = {e["rank"]: e["echo"] for e in events(tmp_path / "run", "failure")}
    assert failures == {0: True, 1: False}
    ended = ChildFailedError("trainer", {
        rank: ProcessFailure(rank, 1, 1, f"{tmp_path}/{rank}.json") for rank in (0, 1)})
    assert ended.get_first_failure()[0] == 1
    assert re.search(rf"rank 1, step 12 \(forward\), attempt 0: {re.escape(RAISED)}\d+ in _fail\)\n"
                     "=+$", str(ended))
    assert json.loads((tmp_path / "0.json").read_text())["message"]["message"].startswith(
        "a peer of rank 0 was lost at step 12")


def test_a_start_tells_of_lines_that_no_checkpoint_holds(ranks, tmp_path):
    run(ranks, 1, tmp_path / "run", "--checkpoint.every=5", "--inject=term:step=17",
        "--inject=slow:step=16")  # until some save is whole
    record = tmp_path / "run/metrics.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:3]))

    codes, [said] = run(ranks, 1, tmp_path / "run", "--checkpoint.every=5")

    assert codes == [0]
    [lost] = events(tmp_path / "run", "lines-lost")
    assert (lost["first"], lost["count"]) == (4, lost["last"] - 3)
    assert lost["last"] in (5, 10, 15)  # of the newest save that was whole before the last
    assert f"the lines of {lost['count']} of 17 steps are gone (the first is step 4, the" in said


def test_a_collective_in_the_loss_pairs_in_an_evaluation_of_any_length(ranks, tmp_path):
    codes, _ = run(ranks, 2, tmp_path / "run", "--task.how=gather", "--task.validation=6",
                   "--eval.every=2", "--eval.batch-size=2", "--watchdog.limit-s=3")

    assert codes == [0, 0]
    assert not events(tmp_path / "run", "hang")


def on_a_slow_disk(*arguments: str) -> int:
    """In a rank: train where a save takes longer than a rank may wait in a step."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.2)
        fsync(descriptor)

    os.fsync = slow  # type: ignore[assignment]
    return train(*arguments, "--world.timeout-s=1")


def test_a_save_that_is_due_while_the_one_before_is_written_costs_no_attempt(ranks, tmp_path):
    arguments = [*TAPE, "--task.validation=6", "--steps=4", "--checkpoint.every=2",
                 "--eval.every=1", "--optim.lr=0.02", f"--run-dir={tmp_path / 'run'}"]

    assert ranks(2, on_a_slow_disk, *arguments, group=False) == [0, 0]

    kinds = {found["kind"] for found in inspect(tmp_path / "run")["checkpoints"]}
    assert kinds == {"best"}
    assert summary(tmp_path / "run")["save_waits"] > 0
