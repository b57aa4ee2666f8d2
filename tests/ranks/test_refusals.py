"""Bad input: one clear error that names flag, value and remedy, before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from runs import train

TAPE = ["--task=tape_task:Tape", "--device=cpu"]
BAD = {
    "unknown flag": (["--optm.lr=1"], ["--optm.lr", "optim.lr"]),
    "unknown recipe": (["sampel"], ["sampel", "'sample'"]),
    "micro that does not divide global": (
        ["--batch.micro-size=33"], ["--batch.micro-size 33", "128", "32"]),
    "missing data": (
        ["fashion-mnist", "--task.root=/nowhere/images"], ["/nowhere/images", "--task.root"]),
    "task that is not there": (["--task=no_such_module:Task"], ["no_such_module", "import path"]),
    "task that can't be imported": (
        ["--task=broken_task:Task"],
        ["broken_task", "the user's own mistake", "broken_task.py", "Traceback"]),
    "task in a script that ends itself": (
        ["--task=script_task:Task"],
        ["script_task", "SystemExit: 0", "script_task.py", "Traceback"]),
    "no such class": (["--task=tape_task:Tap"], ["did you mean tape_task:Tape"]),
    "too few samples": (
        [*TAPE, "--task.samples=3", "--batch.global-size=4", "--batch.micro-size=4"],
        ["--batch.global-size 4", "3 samples", "--data.drop-last"]),
    "bad length": (["--checkpoint.every=2x"], ["--checkpoint.every", "2x", "1ep"]),
    "value out of range": (["--optim.lr=-1"], ["--optim.lr -1", "above 0"]),
    "unknown best": (
        [*TAPE, "--task.samples=200", "--task.validation=4", "--eval.best=val_acc:max"],
        ["--eval.best val_acc:max", "val_loss"]),
    "resume path that isn't there": (
        [*TAPE, "--task.samples=200", "--resume=/nowhere"], ["--resume /nowhere", "no such"]),
    "nothing left to train": (
        [*TAPE, "--task.samples=200", "--freeze=*"], ["--freeze", "all are frozen"]),
    "what torch refuses": (
        [*TAPE, "--task.samples=200", "--schedule.name=warm-restarts", "--schedule.options=T_0=0"],
        ["--schedule.options T_0=0", "positive integer T_0"]),
    "sparse gradients": (
        ["--task=unfit_task:Unfit", "--task.way=sparse", "--device=cpu", "--batch.global-size=8",
         "--batch.micro-size=2", "--steps=2"],
        ["the gradient of table.weight is sparse", "use sparse=False"]),
    "fault that can't happen": (
        [*TAPE, "--task.samples=200", "--inject=kill:rank=9"],
        ["--inject kill:rank=9", "there is no rank 9"]),
    "unknown fault": (["--inject=kil:step=3"], ["--inject kil", "'kill'"]),
}  # fmt: skip


def bare(*arguments: str) -> int:
    """In a rank: like `train`, on a machine without the full data set and without network."""
    from trainer.tasks import fashion_mnist

    def download(target: Path) -> None:
        raise RuntimeError("no network")

    fashion_mnist.find_dataset = partial(fashion_mnist.find_dataset, system=Path("/nowhere"),
                                         download=download)
    return train(*arguments)


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_clear_error_with_exit_code_2(ranks, tmp_path, capfd, what):
    arguments, expected = BAD[what]
    env = {"TRAINER_DATA": str(tmp_path), "WORLD_SIZE": "1"}

    codes = ranks(1, bare, *arguments, f"--run-dir={tmp_path / 'run'}", group=False, env=env)

    output = capfd.readouterr().out
    assert codes == [2]
    assert output.count("error: ") == 1
    for text in expected:
        assert text in output
    assert ("Traceback" in output) == ("Traceback" in expected)  # of the user's own code only
    assert not list(tmp_path.glob("run/checkpoints/*"))
    assert not Path("/nowhere").exists()


def test_sparse_gradients_work_with_an_optimizer_that_supports_them(ranks, tmp_path, capfd):
    arguments = ["--task=unfit_task:Unfit", "--task.way=sparse", "--device=cpu", "--steps=4",
                 "--batch.global-size=8", "--batch.micro-size=2", "--log.histograms=1",
                 "--optim.name=torch.optim:SGD", "--optim.weight-decay=0", "--inject=nan:step=2"]

    codes = ranks(1, train, *arguments, f"--run-dir={tmp_path / 'run'}", group=False)

    assert codes == [0]
    assert "skipped step 2: loss nan on rank 0" in capfd.readouterr().out


def test_a_file_where_the_run_folder_should_be_is_refused(ranks, tmp_path, capfd):
    (tmp_path / "run").write_text("mine")

    codes = ranks(1, train, *TAPE, "--task.samples=200", f"--run-dir={tmp_path / 'run'}",
                  group=False)

    output = capfd.readouterr().out
    assert codes == [2]
    assert f"error: --run-dir {tmp_path / 'run'}: " in output
    assert "Traceback" not in output
    assert (tmp_path / "run").read_text() == "mine"


def test_an_invalid_path_of_the_run_folder_is_refused_on_all_ranks_at_once(
    ranks, tmp_path, capfd
):
    codes = ranks(2, train, *TAPE, "--task.samples=200", f"--run-dir={tmp_path / ('x' * 300)}",
                  group=False)

    output = capfd.readouterr().out
    assert codes == [2, 2]
    assert output.count("error: ") == 1
    assert "File name too long" in output
    assert "Traceback" not in output


def test_more_ranks_than_micro_batches_is_refused_on_all_ranks(ranks, tmp_path, capfd):
    codes = ranks(3, train, *TAPE, "--task.samples=64", "--batch.global-size=8",
                  "--batch.micro-size=4", f"--run-dir={tmp_path / 'run'}", group=False)

    output = capfd.readouterr().out
    assert codes == [2, 2, 2]
    assert output.count("error: ") == 1
    assert "3 ranks" in output
    assert "at most 2 ranks" in output
    assert not (tmp_path / "run").exists()


def test_torchrun_makes_one_attempt_at_bad_input(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node=2", "--max-restarts=3", "-m", "trainer", "--optm.lr=1"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})

    assert done.returncode == 1  # torchrun has no other code
    assert done.stderr.count("error: --optm.lr: there is no such flag") == 1
