"""Training on data with bad samples: all ranks end at once, or use the same replacements."""

from __future__ import annotations

import pytest
from runs import events, run, steps, summary, train, until_done, weights

from trainer.commands.compare import differences

TASK = ("--task=bad_task:BadTape", "--device=cpu", "--clip.norm=0", "--batch.global-size=12",
        "--batch.micro-size=2", "--task.norm=batch", "--task.dropout=0.3")  # fmt: skip
SKIP = (*TASK, "--task.samples=72", "--task.bad=5,40", "--task.uncollatable=11", "--epochs=3",
        "--data.on-error=skip")  # fmt: skip
BAD = {5, 11, 40}


@pytest.mark.parametrize(("size", "workers", "kind", "doing", "line"), [
    (2, 2, "bad", "reading", "# the user's line"),
    (3, 0, "uncollatable", "collating", 'raise ValueError(f"no shape for')])
def test_all_ranks_end_within_seconds_and_the_sample_is_named(
    ranks, tmp_path, size, workers, kind, doing, line
):
    # The window of step 3 has the samples 24 to 35. The bad one is in the middle micro-batch of
    # rank 1 of 2, or in the first one of the last rank of 3: other ranks wait.
    arguments = [*TASK, "--task.samples=48", "--epochs=2", "--data.shuffle=off",
                 f"--task.{kind}=32", f"--data.workers={workers}"]

    # A peer that waits for the timeout of its collective would end a minute later.
    outcomes = ranks.outcomes(size, train, *arguments, f"--run-dir={tmp_path / 'run'}",
                              group=False)

    assert [outcome.value for outcome in outcomes] == [1] * size
    ends = [outcome.at for outcome in outcomes]
    assert max(ends) - min(ends) < 30
    *others, text = [outcome.output for outcome in outcomes]
    for expected in (f"SampleError: {doing} sample 32 of epoch 0 raised ValueError: no ",
                     f"rank {size - 1}" + (", loader worker " if workers else ")"), line,
                     "--data.on-error skip"):
        assert expected in text
    assert all("sample 32" not in other for other in others)
    [failure] = events(tmp_path / "run", "failure", echo=False)
    assert failure["rank"] == size - 1
    saved = sorted(p.name for p in (tmp_path / "run/checkpoints").glob("step-*"))
    assert saved == ["step-00000002"], "a survivor's"


def test_a_bad_sample_of_the_validation_is_never_replaced(ranks, tmp_path, capfd):
    arguments = [*TASK, "--task.samples=48", "--epochs=1", "--task.validation=9",
                 "--task.bad-validation=7", "--data.on-error=skip"]

    run(ranks, 2, tmp_path / "run", *arguments, code=1)

    output = capfd.readouterr().out
    assert "reading sample 7 of epoch 0 raised ValueError: no picture in 7 (rank 1" in output
    assert "--data.on-error skip is for training samples only" in output


def test_a_killed_run_replaces_the_same_samples_and_counts_each_once(
    ranks, undisturbed, tmp_path, capfd
):
    straight, killed = undisturbed(2, *SKIP, "--data.workers=0"), tmp_path / "killed"
    faults = ["--inject=kill:step=3:rank=1:phase=backward", "--inject=kill:step=11:rank=0"]

    ends = until_done(ranks, 2, killed, *SKIP, "--data.workers=2", *faults)

    assert ends == [[1, -9], [-9, 1], [0, 0]]
    assert not list(differences(straight, killed))
    for folder in (straight, killed):
        counts = [line["replaced"] for line in steps(folder) if "replaced" in line]
        assert all(counts)
        assert sum(counts) == summary(folder)["replaced"] == 3 * len(BAD)
    found = events(straight, "bad-sample")
    reported = {(e["rank"], e["index"]) for e in found}
    assert len(reported) == len(found), "once by each rank"
    assert {index for _, index in reported} == BAD
    assert {e["exception"] for e in found} == {
        "ValueError: no picture in 5", "ValueError: no picture in 40", "ValueError: no shape for "
        "{11}"}  # fmt: skip
    assert all(e["replaced_by"] not in BAD for e in found)
    assert "9 bad samples replaced" in capfd.readouterr().out


def test_too_many_bad_samples_end_the_run_on_all_ranks(ranks, tmp_path, capfd):
    bad = ",".join(str(number) for number in range(1, 240, 2))

    run(ranks, 2, tmp_path / "run", *TASK, "--task.samples=240", f"--task.bad={bad}",
        "--data.on-error=skip", "--checkpoint.every=1", "--epochs=3", code=2)

    output = capfd.readouterr().out
    assert output.count("--data.on-error skip: ") == 1
    lines = steps(tmp_path / "run")
    replaced = [sum(line.get("replaced", 0) for line in lines[:n]) for n in range(len(lines) + 1)]
    assert replaced[-1] > 100 >= replaced[-2]
    assert weights(tmp_path / "run", len(lines) - 1)


def test_a_stopped_run_resumes_as_if_it_had_skipped_from_the_start(ranks, tmp_path, capfd):
    arguments = [*TASK, "--task.samples=48", "--epochs=2", "--data.shuffle=off", "--task.bad=32"]
    straight = run(ranks, 2, tmp_path / "straight", *arguments, "--data.on-error=skip")
    stopped = run(ranks, 2, tmp_path / "stopped", *arguments, code=1)

    capfd.readouterr()
    run(ranks, 2, stopped, *arguments, "--data.on-error=skip")

    assert "equivalent" not in capfd.readouterr().out
    assert not list(differences(straight, stopped))
