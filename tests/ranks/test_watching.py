"""What a run shows: TensorBoard, the console, hints, over restarts and full disks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import TAPE, events, run, steps, train, until_done, validations

from trainer.commands.compare import differences

TASK = (*TAPE, "--task.norm=batch", "--task.validation=6", "--steps=12", "--checkpoint.every=2",
        "--eval.every=50")  # fmt: skip
WIDE = (*TASK, "--task.width=20000", "--checkpoint.keep=2")


def shown_by(run: Path, part: str = "train") -> Any:
    """What TensorBoard itself reads of training or validation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(("scalars", "images", "tensors", "histograms"), 0)
    accumulator = EventAccumulator(str(run / "tensorboard" / part), size_guidance=everything)
    accumulator.Reload()
    return accumulator


def timeless(events: list[Any]) -> list[Any]:
    return [dataclasses.replace(event, wall_time=0.0) for event in events]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_all_of_it_and_each_step_once_after_kills(ranks, undisturbed, tmp_path):
    arguments = ["spiral", "--device=cpu", "--data.workers=0", "--task.points=120",
                 "--batch.global-size=10", "--batch.micro-size=5", "--steps=24", "--epochs=None",
                 "--checkpoint.every=5", "--eval.every=8",
                 "--log.histograms=4", "--log.graph=on"]  # fmt: skip
    straight, killed = undisturbed(1, *arguments), tmp_path / "killed"
    faults = [f"--inject=kill:step={n}:phase={p}" for n, p in
              ((4, "forward"), (13, "step-end"), (19, "optimizer"))]

    assert until_done(ranks, 1, killed, *arguments, *faults) == [[-9]] * 3 + [[0]]

    expected, shown = shown_by(straight), shown_by(killed)
    assert len(list((killed / "tensorboard/train").iterdir())) == 4
    assert [e.step for e in shown.Scalars("curves/loss")] == list(range(1, 25))
    tags = expected.Tags()["scalars"]
    assert {tag for tag in tags if tag.startswith("curves/")} == {
        f"curves/{name}" for name in ("accuracy", "learning_rate", "loss", "samples_per_s")}
    assert "optimizer/grad_norm" in tags
    for tag in (tag for tag in tags if tag != "curves/samples_per_s"
                and not tag.startswith("speed/")):
        assert timeless(shown.Scalars(tag)) == timeless(expected.Scalars(tag)), tag
    validated = {line["step"]: line for line in validations(killed)}
    for tag in ("loss", "accuracy"):
        points = shown_by(killed, "validation").Scalars(f"curves/{tag}")
        assert timeless(points) == timeless(
            shown_by(straight, "validation").Scalars(f"curves/{tag}")), tag
        assert [e.step for e in points] == list(range(8, 25))
        assert [e.value for e in points] == pytest.approx(
            [validated[step // 8 * 8][f"val_{tag}"] for step in range(8, 25)])
    for tag in ("images/confusion", "images/validation"):
        assert timeless(shown.Images(tag)) == timeless(expected.Images(tag)), tag
        assert [e.step for e in shown.Images(tag)] == [8, 16, 24]
    norms = shown.Histograms("optimizer/grad_norms")
    assert timeless(norms) == timeless(expected.Histograms("optimizer/grad_norms"))
    assert [(e.step, e.histogram_value.num) for e in norms] == [(8, 8), (16, 8), (24, 8)]
    for kind in ("parameters", "gradients"):
        drawn = [e.step for e in shown.Histograms(f"{kind}/0.weight")]
        assert drawn == sorted(set(drawn))
        assert [e.step for e in expected.Histograms(f"{kind}/0.weight")] == list(range(4, 25, 4))
    marks = shown.Scalars("run/restarts")
    assert [mark.value for mark in marks] == [1, 2, 3]
    assert len({mark.step for mark in marks}) == 3
    for each in (expected, shown):
        card, = each.Tensors("run/text_summary")
        assert b"global batch of 10" in card.tensor_proto.string_val[0]
        assert "_hparams_/session_end_info" in each.summary_metadata
        settings = each.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        assert b"Final/test_accuracy" in settings
        assert each.Graph().node
    losses = {line["step"]: line["loss"] for line in steps(killed)}
    read = [e.value for e in shown.Scalars("curves/loss")]
    assert read == pytest.approx(list(losses.values()), rel=1e-6)
    assert not list(differences(straight, killed))


def test_the_log_is_short_and_plain_without_a_terminal(ranks, tmp_path, capfd):
    run(ranks, 1, tmp_path / "run", *TASK, "--steps=1000", "--task.samples=1600",
        "--checkpoint.every=1000")

    output = capfd.readouterr().out
    assert len(output.splitlines()) <= 60
    assert not any(ord(c) < 32 and c != "\n" for c in output)


def unheard(how: str, run: str) -> int:
    """In a rank: train with stdout and stderr that take nothing."""
    if how == "closed":
        os.closerange(0, 3)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        if how == "full disk":
            writer = os.open("/dev/full", os.O_WRONLY)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
    return train(*TASK, "--steps=6", "--log.every=1", run)


@pytest.mark.parametrize("how", ["no reader", "full disk", "closed"])
def test_a_console_that_takes_nothing_stops_nothing(ranks, tmp_path, how):
    assert ranks(1, unheard, how, f"--run-dir={tmp_path / 'run'}", group=False) == [0]
    assert len(steps(tmp_path / "run")) == 6


def test_only_the_first_rank_speaks_and_a_quiet_run_says_nothing(ranks, tmp_path):
    first, second = ranks.outcomes(2, train, *TASK, "--steps=6", f"--run-dir={tmp_path / 'run'}",
                                   group=False)
    quiet, = ranks.outcomes(1, train, *TASK, "--steps=6", "--quiet",
                            f"--run-dir={tmp_path / 'quiet'}", group=False)

    assert (first.value, second.value, quiet.value) == (0, 0, 0)
    assert "2 ranks × micro-batches of 2 × 2 (accumulated) = global batch of 8; each BatchNorm " \
           "sees 4 samples" in first.output
    assert second.output == quiet.output == ""
    assert len(list((tmp_path / "run/tensorboard/train").iterdir())) == 1


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
    from trainer.resilience.progress_marks import ProgressMarks

    resize(folder, size)
    original = ProgressMarks.mark

    def mark(self, point: str, step: int | None = None, epoch: int = 0) -> None:
        if point == "step-end" and step == 9:
            resize(folder, 64 << 20)
        original(self, point, step, epoch)

    ProgressMarks.mark = mark  # type: ignore[method-assign]
    return train(*arguments)


def room_for_two(run: Path) -> int:
    """The size of a disk on which a third checkpoint has no room."""
    newest = sorted((run / "checkpoints").glob("step-????????"))[-1]
    return int(2.6 * sum(-(-p.stat().st_size // 4096) * 4096 for p in newest.iterdir()))


def test_a_full_disk_is_said_once_and_nothing_is_missing_when_space_comes_back(
    ranks, undisturbed, small_disk, capfd
):
    straight, full = undisturbed(1, *WIDE), small_disk / "run"
    capfd.readouterr()

    assert ranks(1, full_disk_run, small_disk, room_for_two(straight), *WIDE, f"--run-dir={full}",
                 group=False) == [0]

    output = capfd.readouterr().out
    assert output.count("was not saved") == 1
    assert "No space left on device" in output
    assert not list(differences(straight, full))
    assert not list((full / "checkpoints").glob("*.tmp*"))


def test_a_disk_that_stays_full_ends_with_1_and_whole_checkpoints(ranks, undisturbed, small_disk):
    straight = undisturbed(1, *WIDE)
    resize(small_disk, room_for_two(straight))

    full = run(ranks, 1, small_disk / "run", *WIDE, code=1)

    kept = sorted(p.name for p in (full / "checkpoints").glob("step-*"))
    assert kept == ["step-00000002", "step-00000004"]
    resize(small_disk, 64 << 20)
    run(ranks, 1, full, *WIDE)
    assert not list(differences(straight, full))


def test_a_failed_save_ends_the_run_where_that_is_asked_for(ranks, tmp_path, capfd):
    run(ranks, 2, tmp_path / "run", *TASK, "--checkpoint.on-error=stop",
        "--inject=enospc:step=4:phase=save-mid", code=1)

    assert "was not saved" in capfd.readouterr().out
    assert not (tmp_path / "run/summary.json").exists()


def test_a_bad_run_gets_each_hint_once_also_after_a_restart(ranks, tmp_path, capfd):
    until_done(ranks, 1, tmp_path, "--task=hinted_task:Hinted", "--device=cpu", "--steps=240",
               "--batch.global-size=8", "--batch.micro-size=4", "--schedule.name=constant",
               "--schedule.warmup=off", "--optim.lr=1e-4", "--task.scale=50", "--task.shuffled",
               "--task.leaked", "--task.dead", "--clip.norm=1",
               "--inject=kill:step=150:phase=forward")

    hints = [event["hint"] for event in events(tmp_path, "hint")]
    assert sorted(hints) == ["clipped-steps", "constant-rate", "dead-gradient", "first-loss",
                             "flat-loss", "shared-samples", "small-batchnorm"]
    output = capfd.readouterr().out
    for name in hints:
        assert output.count(f"docs/hints.md#{name}; --log.hints-off {name}") == 1
