"""--parallel.reduction canonical: the same bits for any number of ranks, and for a changing one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from runs import metrics, steps, train

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect

TASK = ["--task=odd_task:Odd", "--device=cpu", "--batch.micro-size=3",
        "--data.drop-last=off", "--eval.every=8", "--checkpoint.every=7",
        "--parallel.reduction=canonical"]  # fmt: skip


def run(ranks, sizes, folder: Path, *arguments: str) -> None:
    """Repeat the command until the run is complete, with the next number of ranks each time.

    The last number is used for all further starts.
    """
    for start in range(30):
        size = sizes[min(start, len(sizes) - 1)]
        ended = ranks.outcomes(size, train, *arguments, f"--run-dir={folder}", group=False,
                               timeout_s=300 if "--precision.compile=on" in arguments else 100)
        if all(rank.value == 0 for rank in ended):
            return
        assert not any(rank.value == 2 or rank.hung for rank in ended), ended
    raise AssertionError("the run did not end")


def label(folder: Path) -> str:
    return json.loads((folder / "environment.json").read_text())["determinism"]["label"]


SMALL = ["--task.samples=116", "--batch.global-size=12", "--data.workers=0"]
ODD = ["--task.samples=167", "--batch.global-size=18", "--task.width=700", "--task.odd",
       "--parallel.find-unused=on", "--optim.ema=0.9", "--data.workers=1"]  # fmt: skip
"""4 and 6 micro-batches; the last window of an epoch has 3 and 2, fewer than ranks."""


@pytest.mark.parametrize(("sizes", "more"), [
    ((1, 2, 3, 4), [*SMALL, "--epochs=3"]),
    ((1, 4), [*ODD, "--epochs=2"]),
    pytest.param((1, 2, 3, 4), [*SMALL, "--epochs=6"], marks=pytest.mark.long),
    pytest.param((1, 2, 3, 4, 5, 6), [*ODD, "--epochs=6"], marks=pytest.mark.long),
], ids=["4", "6", "4-long", "6-long"])  # fmt: skip
def test_any_number_of_ranks_gives_the_same_bits(ranks, tmp_path, sizes, more):
    for size in sizes:
        run(ranks, [size], tmp_path / f"of-{size}", *TASK, *more)

    for size in sizes[1:]:
        assert not list(differences(tmp_path / "of-1", tmp_path / f"of-{size}")), size
        assert metrics(tmp_path / "of-1") == metrics(tmp_path / f"of-{size}")
    assert steps(tmp_path / "of-1")[-1]["samples"] < 10, "the last window is smaller"


@pytest.mark.long
@pytest.mark.parametrize("more", [
    [*SMALL, "--precision.dtype=bf16"],
    [*SMALL, "--precision.dtype=fp16"],
    [*SMALL, "--nonfinite.spike-z=0.1"],
    [*SMALL, "--optim.name=sgd", "--clip.value=0.01", "--schedule.name=one-cycle"],
    ["--task=tape_task:Tape", "--task.norm=batch", "--task.samples=41", "--task.nan-at=17",
     "--batch.global-size=12"],
    ["--task=tape_task:Tokens", "--batch.global-size=12"],
    ["--task=stream_task:StreamTape", "--task.kind=lanes", "--task.sizes=9,6,7,11",
     "--batch.global-size=12", "--task.validation=5"],
    ["--task=stream_task:StreamTape", "--task.samples=50", "--data.drop-last=on",
     "--batch.global-size=12"],
    pytest.param([*SMALL, "--precision.compile=on"], marks=pytest.mark.timeout(600)),
], ids=["bf16", "fp16", "spikes", "sgd", "nan", "tokens", "lanes", "stream",
        "compiled"])  # fmt: skip
def test_other_settings_do_not_depend_on_the_number_of_ranks(ranks, tmp_path, more):
    arguments = [*TASK, *more, "--steps=24"]

    run(ranks, [1], tmp_path / "of-1", *arguments)
    run(ranks, [3, 1, 2], tmp_path / "changed", *arguments, "--inject=term:step=5",
        "--inject=term:step=14")

    assert not list(differences(tmp_path / "of-1", tmp_path / "changed"))
    assert metrics(tmp_path / "of-1") == metrics(tmp_path / "changed")


def test_the_short_last_window_of_a_stream_has_all_micro_batches(ranks, tmp_path):
    arguments = [*TASK, "--task=stream_task:StreamTape", "--task.kind=measured",
                 "--task.samples=29", "--batch.global-size=12", "--epochs=2"]

    run(ranks, [1], tmp_path / "of-1", *arguments)
    run(ranks, [3], tmp_path / "of-3", *arguments)

    assert [line["samples"] for line in steps(tmp_path / "of-1")] == 2 * [12, 12, 5]
    assert not list(differences(tmp_path / "of-1", tmp_path / "of-3"))


def changes(seed: int, last: int) -> tuple[list[int], list[str]]:
    """Random numbers of ranks, and the faults between them."""
    draw, step, sizes, faults = random.Random(seed), 0, [], []
    while (step := step + draw.randint(2, 12)) < last:
        size = draw.randint(1, 4)
        kind = draw.choice(("term", "kill", "kill"))
        phase = draw.choice(("forward", "backward", "optimizer", "step-end", "data"))
        sizes.append(size)
        faults.append(f"--inject={kind}:step={step}:rank={draw.randrange(size)}:phase={phase}")
    return [*sizes, draw.randint(1, 4)], faults


@pytest.mark.parametrize(("seed", "more", "epochs"), [
    (6, SMALL, 3),
    *(pytest.param(seed, more, 6, marks=pytest.mark.long)
      for seed in range(1, 6) for more in (SMALL, ODD)),
])  # fmt: skip
def test_the_number_of_ranks_may_change_and_ranks_may_die(ranks, tmp_path, seed, more, epochs):
    sizes, faults = changes(seed, 10 * epochs)
    arguments = [*TASK, *more, f"--epochs={epochs}"]

    run(ranks, [2], tmp_path / "straight", *arguments)
    run(ranks, sizes, tmp_path / "elastic", *arguments, *faults)

    assert not list(differences(tmp_path / "straight", tmp_path / "elastic")), faults
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "elastic")
    assert label(tmp_path / "elastic") == "exact"


def test_a_survivor_saves_the_last_boundary(ranks, tmp_path):
    arguments = [*TASK, *SMALL, "--steps=7", "--checkpoint.every=off"]
    death = "--inject=kill:step=5:rank=1:phase=backward"

    run(ranks, [1], tmp_path / "straight", *arguments)
    run(ranks, [3, 2], tmp_path / "killed", *arguments, death)

    assert not list(differences(tmp_path / "straight", tmp_path / "killed"))
    starts = [a["start_step"] for a in inspect(tmp_path / "killed")["attempts"]]
    assert starts == [0, 4]


UNFIT = ["--task=unfit_task:Unfit", "--device=cpu", "--batch.global-size=8",
         "--batch.micro-size=2", "--data.drop-last=off", "--data.workers=0",
         "--parallel.reduction=canonical"]  # fmt: skip


@pytest.mark.parametrize(("way", "size", "why"), [
    ("teacher", 2, "changes the parameters teacher"),
    ("sparse", 1, "the gradients of table.weight come in parts"),
    ("reentrant", 2, "the gradients of body.bias, body.weight come in parts"),
])  # fmt: skip
def test_models_that_depend_on_the_number_of_ranks_are_refused(
        ranks, tmp_path, capfd, way, size, why):
    codes = ranks(size, train, *UNFIT, f"--task.way={way}", "--steps=1",
                  f"--run-dir={tmp_path / 'run'}", group=False)

    output = capfd.readouterr().out
    assert codes == [2] * size
    assert "error: --parallel.reduction canonical: " in output
    assert why in output
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_changed_non_persistent_buffer_is_named(ranks, tmp_path, capfd):
    ranks(2, train, *UNFIT, "--task.way=passing", "--steps=1", f"--run-dir={tmp_path / 'run'}",
          group=False)

    output = capfd.readouterr().out
    assert output.count("warning: the model's forward changes passing, registered with") == 1


def test_a_start_at_a_window_with_fewer_micro_batches_than_ranks(ranks, tmp_path):
    arguments = [*UNFIT, "--epochs=2"]  # of 13 samples: windows of 4 and 3 micro-batches

    run(ranks, [1], tmp_path / "straight", *arguments)
    run(ranks, [1, 4], tmp_path / "changed", *arguments, "--inject=term:step=1")

    assert not list(differences(tmp_path / "straight", tmp_path / "changed"))


def test_the_default_reduction_is_equal_up_to_rounding_and_says_so(ranks, tmp_path):
    arguments = [*TASK, *SMALL, "--steps=12", "--parallel.reduction=ddp", "--parallel.sync-bn=off"]

    run(ranks, [2], tmp_path / "straight", *arguments)
    run(ranks, [1, 3, 2], tmp_path / "elastic", *arguments, "--inject=term:step=3",
        "--inject=kill:step=8:rank=0")

    assert label(tmp_path / "elastic") == "equivalent"
    losses = [[line["loss"] for line in steps(tmp_path / name)] for name in ("straight", "elastic")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] != losses[1]
