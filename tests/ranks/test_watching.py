"""What a run shows: metrics.jsonl, TensorBoard, the console, over restarts and full disks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import metrics, steps, train, validations

from trainer.commands.compare import differences

TASK = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0",
        "--batch.global-size=8", "--batch.micro-size=2",
        "--task.norm=batch", "--task.samples=160", "--task.validation=6"]  # fmt: skip


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag → (step, value) as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_each_step_once_after_kills(ranks, tmp_path):
    arguments = [*TASK, "--steps=24", "--checkpoint.every=5", "--eval.every=8", "--log.every=1"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert ranks(1, train, *arguments, f"--run={straight}", group=False) == [0]
    faults = [f"--inject=kill:step={n}:phase={p}" for n, p in
              ((4, "forward"), (13, "step-end"), (19, "optimizer"))]

    for _ in faults:
        outcome, = ranks.outcomes(1, train, *arguments, *faults, f"--run={killed}", group=False)
        assert outcome.signal == 9
    assert ranks(1, train, *arguments, *faults, f"--run={killed}", group=False) == [0]

    expected, shown = scalars(straight), scalars(killed)
    assert len(list((killed / "tensorboard").iterdir())) == 4
    assert [step for step, _ in shown["train/loss"]] == list(range(1, 25))
    for tag in expected:
        if not tag.startswith("speed/"):
            assert shown[tag] == expected[tag], tag
    losses = {line["step"]: line["loss"] for line in steps(killed)}
    assert [v for _, v in shown["train/loss"]] == pytest.approx(list(losses.values()), rel=1e-6)
    assert metrics(straight) == metrics(killed)


def test_the_log_is_short_and_plain_without_a_terminal(ranks, tmp_path, capfd):
    assert ranks(1, train, *TASK, "--steps=1000", "--task.samples=1600",
                 f"--run={tmp_path / 'run'}", group=False, timeout_s=100) == [0]

    output = capfd.readouterr().out
    assert len(output.splitlines()) <= 60
    assert not any(ord(c) < 32 and c != "\n" for c in output)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A tmpfs that can be made larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)],
            capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def resize(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def full_disk_run(folder: Path, size: int, *arguments: str) -> int:
    """In a rank: train on a disk of `size` bytes until step 9, then on a large one."""
    from trainer.pulse import Pulse

    resize(folder, size)
    original = Pulse.beat

    def beat(self, point: str, step: int | None = None, epoch: int = 0) -> None:
        if point == "step-end" and step == 9:
            resize(folder, 64 << 20)
        original(self, point, step, epoch)

    Pulse.beat = beat  # type: ignore[method-assign]
    return train(*arguments)


def checkpoint_bytes(run: Path) -> int:
    newest = sorted((run / "checkpoints").glob("step-????????"))[-1]
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in newest.iterdir())


def test_a_full_disk_is_said_once_and_nothing_is_missing_when_space_comes_back(
    ranks, tmp_path, small_disk, capfd
):
    arguments = [*TASK, "--task.width=20000", "--steps=12", "--checkpoint.every=2",
                 "--checkpoint.keep=2", "--eval.every=50"]
    straight, full = tmp_path / "straight", small_disk / "run"
    assert ranks(1, train, *arguments, f"--run={straight}", group=False) == [0]
    size = int(2.6 * checkpoint_bytes(straight))
    capfd.readouterr()

    codes = ranks(1, full_disk_run, small_disk, size, *arguments, f"--run={full}", group=False)

    output = capfd.readouterr().out
    assert codes == [0]
    assert output.count("was not saved") == 1
    assert "No space left on device" in output
    assert "bytes and" in output
    assert metrics(straight) == metrics(full)
    assert not list(differences(straight, full))
    assert not list((full / "checkpoints").glob("*.tmp*"))


def test_a_disk_that_stays_full_ends_with_1_and_whole_checkpoints(ranks, tmp_path, small_disk,
                                                                  capfd):
    arguments = [*TASK, "--task.width=20000", "--steps=12", "--checkpoint.every=2",
                 "--checkpoint.keep=2", "--eval.every=50"]
    straight, full = tmp_path / "straight", small_disk / "run"
    assert ranks(1, train, *arguments, f"--run={straight}", group=False) == [0]
    resize(small_disk, int(2.6 * checkpoint_bytes(straight)))

    assert ranks(1, train, *arguments, f"--run={full}", group=False) == [1]

    capfd.readouterr()
    kept = sorted(p.name for p in (full / "checkpoints").glob("step-*"))
    assert kept == ["step-00000002", "step-00000004"]
    resize(small_disk, 64 << 20)
    assert ranks(1, train, *arguments, f"--run={full}", group=False) == [0]
    assert not list(differences(straight, full))


def test_a_failed_save_ends_the_run_where_that_is_asked_for(ranks, tmp_path, capfd):
    codes = ranks(2, train, *TASK, "--steps=40", "--checkpoint.every=2",
                  "--checkpoint.on-error=stop", "--inject=enospc:step=4:phase=save-mid",
                  f"--run={tmp_path / 'run'}", group=False)

    assert codes == [1, 1]
    assert "was not saved" in capfd.readouterr().out
    assert not (tmp_path / "run/summary.json").exists()
    assert validations(tmp_path / "run") == [] or steps(tmp_path / "run")
