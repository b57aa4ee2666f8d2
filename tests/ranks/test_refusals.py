"""Bad input: one clear error that names flag, value and remedy, before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from runs import codes, run

TAPE = ["--task=tape_task:Tape", "--device=cpu", "--task.samples=200"]
UNFIT = ["--task=hidden_task:Hidden", "--task.way=sparse", "--device=cpu", "--steps=4",
         "--batch.global-size=8", "--batch.micro-size=2"]
BAD = {
    "task that can't be imported": (
        ["--task=broken_task:Task"],
        ["broken_task", "the user's own mistake", "broken_task.py", "Traceback"]),
    "task in a script that ends itself": (
        ["--task=script_task:Task"],
        ["script_task", "SystemExit: 0", "script_task.py", "Traceback"]),
    "plateau without validation": (
        [*TAPE, "--schedule.name=plateau"], ["the task has no validation data"]),
    "plateau of an unknown figure": (
        [*TAPE, "--schedule.name=plateau", "--schedule.options=metric=val_f1:max",
         "--task.validation=4"], ["it computes val_loss, val_abs"]),
    "too few samples": (
        [*TAPE, "--task.samples=3", "--batch.global-size=4", "--batch.micro-size=4"],
        ["--batch.global-size 4", "3 samples", "--data.drop-last"]),
    "unknown best": (
        [*TAPE, "--task.validation=4", "--eval.best=val_acc:max"],
        ["--eval.best val_acc:max", "val_loss"]),
    "resume path that isn't there": (
        [*TAPE, "--resume=/nowhere"], ["--resume /nowhere", "no such"]),
    "nothing left to train": (
        [*TAPE, "--freeze=*"], ["--freeze", "all are frozen"]),
    "what torch refuses": (
        [*TAPE, "--schedule.name=warm-restarts", "--schedule.options=T_0=0"],
        ["--schedule.options T_0=0", "positive integer T_0"]),
    "sparse gradients": (
        UNFIT, ["the gradient of table.weight is sparse", "use sparse=False"]),
    "fault that can't happen": (
        [*TAPE, "--inject=kill:rank=9"],
        ["--inject kill:rank=9", "there is no rank 9"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_clear_error_with_exit_code_2(ranks, tmp_path, capfd, what):
    arguments, expected = BAD[what]

    run(ranks, 1, tmp_path / "run", *arguments, code=2)

    output = capfd.readouterr().out
    assert output.count("error: ") == 1
    for text in expected:
        assert text in output
    assert ("Traceback" in output) == ("Traceback" in expected)  # of the user's own code only
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_sparse_gradients_work_with_an_optimizer_that_supports_them(ranks, tmp_path, capfd):
    run(ranks, 1, tmp_path / "run", *UNFIT, "--log.histograms=1", "--optim.name=torch.optim:SGD",
        "--optim.weight-decay=0", "--inject=nan:step=2")

    assert "skipped step 2: loss nan on rank 0" in capfd.readouterr().out


@pytest.mark.parametrize(("size", "name", "flags", "texts"), [
    (1, "file", [], ["--run-dir "]),
    (2, "x" * 300, [], ["File name too long"]),
    (3, "run", ["--batch.global-size=8", "--batch.micro-size=4"], ["3 ranks", "at most 2 ranks"]),
])  # fmt: skip
def test_a_run_folder_or_number_of_ranks_that_cannot_be_is_refused_on_all_ranks(
    ranks, tmp_path, capfd, size, name, flags, texts
):
    (tmp_path / "file").write_text("mine")

    assert codes(ranks, size, *TAPE, *flags, f"--run-dir={tmp_path / name}") == [2] * size

    output = capfd.readouterr().out
    assert output.count("error: ") == 1
    assert all(text in output for text in texts)
    assert "Traceback" not in output
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_torchrun_makes_one_attempt_at_bad_input(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node=2", "--max-restarts=3", "-m", "trainer", "--optm.lr=1"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})

    assert done.returncode == 1  # torchrun has no other code
    assert done.stderr.count("error: --optm.lr: there is no such flag") == 1
