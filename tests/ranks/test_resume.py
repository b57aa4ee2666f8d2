"""Stops and restarts: samples, weights and metrics equal those of an uninterrupted run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from runs import metrics, steps, train, validations

from trainer.commands.compare import differences

TASK = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0",
        "--batch.global-size=8", "--batch.micro-size=2",
        "--task.norm=batch", "--task.dropout=0.3"]  # fmt: skip


def until_done(ranks, size: int, folder: Path, *arguments: str, sizes=()) -> list[int]:
    """Run the same command until it isn't stopped any more. Returns the exit codes of rank 0."""
    codes = []
    while not codes or codes[-1] == 75:
        now = sizes[len(codes)] if len(codes) < len(sizes) else size
        ended = ranks(now, train, *arguments, f"--run-dir={folder}", group=False)
        assert len(set(ended)) == 1
        codes.append(ended[0])
        assert len(codes) < 10
    return codes


@pytest.mark.parametrize(("stops", "workers"), [
    # Three times in the first epoch, the last one step after a resume; 20 steps per epoch.
    ((4, 10, 11), 0),
    # In a later epoch, on an epoch's last step, and on its first.
    ((5, 40, 41), 2),
])  # fmt: skip
def test_stopped_runs_end_with_the_same_bits(ranks, tmp_path, stops, workers):
    arguments = [*TASK, "--task.samples=160", "--task.validation=6", "--epochs=3",
                 f"--data.workers={workers}", "--eval.every=10"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    stop = [f"--inject=term:step={step}:rank=1" for step in stops]

    until_done(ranks, 2, straight, *arguments, f"--task.tape={tmp_path / 'a'}")
    codes = until_done(ranks, 2, stopped, *arguments, f"--task.tape={tmp_path / 'b'}", *stop)

    assert codes == [75] * len(stops) + [0]
    assert not list(differences(straight, stopped))
    assert metrics(straight) == metrics(stopped)
    keys = {tuple(sorted(json.loads((c / "manifest.json").read_bytes())["files"]))
            for c in (stopped / "checkpoints").glob("step-*")}
    assert len(keys) == 1
    assert [line["step"] for line in steps(stopped)] == list(range(1, 61))
    assert [line["step"] for line in validations(stopped)] == [10, 20, 30, 40, 50, 60]
    epochs = [line["epoch"] for line in steps(stopped)]
    assert epochs == [0] * 20 + [1] * 20 + [2] * 20


def test_a_due_validation_is_done_exactly_once_despite_a_kill_before_or_after_it(ranks, tmp_path):
    arguments = [*TASK, "--task.samples=80", "--task.validation=6", "--epochs=3",
                 "--checkpoint.every=5", "--eval.every=5"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    until_done(ranks, 1, straight, *arguments)
    faults = ["--inject=kill:step=5:phase=evaluate", "--inject=kill:step=10:phase=step-end",
              "--inject=kill:step=20:phase=save-end", "--inject=kill:step=30:phase=evaluate"]

    for _ in faults:
        outcome, = ranks.outcomes(1, train, *arguments, *faults, f"--run-dir={killed}", group=False)
        assert outcome.signal == 9
    assert until_done(ranks, 1, killed, *arguments, *faults) == [0]

    assert not list(differences(straight, killed))
    assert [line["step"] for line in validations(killed)] == [5, 10, 15, 20, 25, 30]
    assert {line["val_samples"] for line in validations(killed)} == {6}
    assert [line["step"] for line in steps(killed)] == list(range(1, 31))


def test_the_number_of_ranks_may_change_and_no_sample_is_lost_or_repeated(ranks, tmp_path, capfd):
    arguments = [*TASK, "--task.samples=48", "--epochs=2", "--task.norm=group",
                 "--task.dropout=0"]
    straight, changed = tmp_path / "straight", tmp_path / "changed"
    until_done(ranks, 2, straight, *arguments)
    capfd.readouterr()

    codes = until_done(ranks, 2, changed, *arguments, f"--task.tape={tmp_path / 'tape'}",
                       "--inject=term:step=3", "--inject=term:step=7", sizes=(2, 1, 2))

    assert codes == [75, 75, 0]
    assert "world size was 2 and is 1" in capfd.readouterr().out
    assert len(steps(changed)) == 12
    losses = [[line["loss"] for line in steps(run)] for run in (straight, changed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    seen: dict[int, list[int]] = {0: [], 1: []}
    for rank in range(2):
        for text in Path(f"{tmp_path}/tape-{rank}.jsonl").read_text().splitlines():
            line = json.loads(text)
            for epoch, index in zip(line["epochs"], line["ids"], strict=True):
                seen[epoch].append(index)
    assert sorted(set(seen[0])) == sorted(set(seen[1])) == list(range(48))
    # A rehearsal takes one micro-batch, at the first start twice: four on rank 0, three on rank 1.
    assert len(seen[0]) + len(seen[1]) == 96 + 7 * 2


def test_the_learning_rate_continues_where_it_was(ranks, tmp_path):
    arguments = [*TASK, "--task.samples=160", "--steps=20", "--schedule.warmup=5"]
    until_done(ranks, 1, tmp_path / "straight", *arguments)
    stops = [f"--inject=term:step={n}" for n in (1, 4, 5, 6, 19)]

    codes = until_done(ranks, 1, tmp_path / "stopped", *arguments, *stops)

    assert codes == [75] * 5 + [0]
    rates = [[line["lr"] for line in steps(tmp_path / run)] for run in ("straight", "stopped")]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 20


def test_a_finished_run_is_unchanged_and_a_longer_one_continues_at_the_last_rate(ranks, tmp_path,
                                                                               capfd):
    arguments = [*TASK, "--task.samples=80", f"--run-dir={tmp_path / 'run'}"]
    assert ranks(1, train, *arguments, "--steps=10", group=False) == [0]
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}

    assert ranks(1, train, *arguments, "--steps=10", group=False) == [0]
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    assert before == after
    assert "nothing to do" in capfd.readouterr().out

    assert ranks(1, train, *arguments, "--steps=15", group=False) == [0]
    rates = [line["lr"] for line in steps(tmp_path / "run")]
    assert rates[10:] == [rates[9]] * 5
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["determinism"]["label"] == "equivalent"


@pytest.mark.parametrize(("changed", "flag"), [
    (["--batch.global-size=4"], "batch.global-size"),
    (["--task.samples=161"], "task.samples"),
    (["--task.norm=group"], "task.norm"),
    (["--seed=1"], "seed"),
])  # fmt: skip
def test_another_run_is_not_continued_by_mistake(ranks, tmp_path, capfd, changed, flag):
    arguments = [*TASK, "--task.samples=160", "--steps=4", f"--run-dir={tmp_path / 'run'}"]
    assert ranks(1, train, *arguments, "--inject=term:step=2", group=False) == [75]

    assert ranks(1, train, *arguments, *changed, group=False) == [2]

    assert f"--accept {flag}" in capfd.readouterr().out
    assert ranks(1, train, *arguments, group=False) == [0]


@pytest.mark.parametrize("damage", [
    "flip", "remove", "all",
    *(pytest.param(other, marks=pytest.mark.long) for other in ("cut", "empty"))])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(ranks, tmp_path, capfd, damage):
    arguments = [*TASK, "--task.samples=160", "--steps=12", "--checkpoint.every=3"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    until_done(ranks, 2, straight, *arguments)
    assert ranks(2, train, *arguments, "--inject=term:step=10", f"--run-dir={broken}",
                 group=False) == [75, 75]
    newest = broken / "checkpoints/step-00000010/model.safetensors"
    data = newest.read_bytes()
    if damage == "cut":
        newest.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        middle = len(data) // 2
        newest.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "empty":
        newest.write_bytes(b"")
    elif damage == "remove":
        newest.unlink()
    else:
        for file in broken.glob("checkpoints/*/state.json"):
            file.write_bytes(file.read_bytes()[:-5])
    files = {p: p.read_bytes() for p in broken.rglob("*.safetensors")}
    capfd.readouterr()

    codes = ranks(2, train, *arguments, f"--run-dir={broken}", group=False)

    output = capfd.readouterr().out
    assert "step-00000010" in output
    if damage == "all":
        assert codes == [2, 2]
        assert "no valid checkpoint is left; nothing was changed" in output
        assert files == {p: p.read_bytes() for p in broken.rglob("*.safetensors")}
        return
    assert codes == [0, 0]
    assert "continuing from step 9" in output
    assert not list(differences(straight, broken))


def test_a_run_starts_from_a_given_checkpoint_and_later_continues_from_its_own(ranks, tmp_path):
    arguments = [*TASK, "--task.samples=160", "--steps=12", "--checkpoint.every=3",
                 "--checkpoint.keep=9"]
    straight, other = tmp_path / "straight", tmp_path / "other"
    until_done(ranks, 1, straight, *arguments)
    resume = f"--resume={straight / 'checkpoints/step-00000006'}"

    codes = until_done(ranks, 1, other, *arguments, resume, "--inject=term:step=8")

    assert codes == [75, 0]
    starts = [json.loads(t) for t in (other / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in starts if e["event"] == "start"] == [6, 8]
    final = [(run / "checkpoints/step-00000012/model.safetensors").read_bytes()
             for run in (straight, other)]
    assert final[0] == final[1]


def test_the_best_checkpoint_stays_and_the_folder_never_holds_fewer_than_keep(ranks, tmp_path):
    run = tmp_path / "run"
    arguments = [*TASK, "--task.samples=160", "--task.validation=6", "--steps=20",
                 "--checkpoint.every=3", "--eval.every=2", "--checkpoint.keep=2",
                 "--optim.lr=3", "--optim.name=sgd", "--eval.best=val_loss:min"]

    until_done(ranks, 1, run, *arguments, "--inject=term:step=14")

    values = {line["step"]: line["val_loss"] for line in validations(run)
              if line["val_loss"] is not None}
    best = min(values, key=lambda step: values[step])
    kept = sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("step-????????"))
    assert best in kept
    assert kept[-1] == 20
    assert len([step for step in kept if step != best]) >= 1
    assert json.loads((run / "summary.json").read_text())["best"]["step"] == best


def test_a_moved_run_folder_is_continued(ranks, tmp_path):
    arguments = [*TASK, "--task.samples=160", "--steps=8"]
    until_done(ranks, 1, tmp_path / "straight", *arguments)
    assert ranks(1, train, *arguments, "--inject=term:step=4", f"--run-dir={tmp_path / 'here'}",
                 group=False) == [75]

    shutil.move(tmp_path / "here", tmp_path / "there")
    assert until_done(ranks, 1, tmp_path / "there", *arguments) == [0]

    assert not list(differences(tmp_path / "straight", tmp_path / "there"))


def test_three_ranks_resume_to_the_bits_of_a_straight_run(ranks, tmp_path):
    arguments = [*TASK, "--task.samples=160", "--steps=12", "--task.width=40"]
    until_done(ranks, 3, tmp_path / "straight", *arguments)

    codes = until_done(ranks, 3, tmp_path / "stopped", *arguments, "--inject=term:step=5:rank=2")

    assert codes == [75, 0]
    assert not list(differences(tmp_path / "straight", tmp_path / "stopped"))


def test_patience_is_kept_over_restarts(ranks, tmp_path):
    # With this high rate validations get worse and worse: the first one stays the best.
    arguments = [*TASK, "--task.samples=160", "--task.validation=6", "--steps=60",
                 "--eval.every=2", "--eval.patience=3", "--eval.best=val_loss:min",
                 "--optim.name=sgd", "--optim.lr=5", "--clip.norm=0", "--schedule.warmup=off"]
    until_done(ranks, 1, tmp_path / "straight", *arguments)
    stops = [f"--inject=term:step={n}" for n in (3, 4, 5, 6, 7)]

    codes = until_done(ranks, 1, tmp_path / "stopped", *arguments, *stops)

    values = [line["val_loss"] for line in validations(tmp_path / "straight")]
    best = min(range(len(values)), key=lambda i: float("inf") if values[i] is None else values[i])
    assert len(values) == best + 1 + 3
    assert len(steps(tmp_path / "straight")) == 2 * len(values) < 60
    assert codes[-1] == 0
    assert not list(differences(tmp_path / "straight", tmp_path / "stopped"))
    assert until_done(ranks, 1, tmp_path / "stopped", *arguments, *stops) == [0]
    assert json.loads((tmp_path / "stopped/summary.json").read_text())["stopped_early"]
