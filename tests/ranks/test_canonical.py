"""--parallel.reduction canonical: the same bits for any number of ranks, and for a changing one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from runs import run, steps, until_done

from trainer.commands.compare import differences

TASK = ["--task=odd_task:Odd", "--device=cpu", "--batch.micro-size=3",
        "--data.drop-last=off", "--eval.every=8", "--checkpoint.every=7",
        "--parallel.reduction=canonical"]  # fmt: skip


SMALL = ["--task.samples=116", "--batch.global-size=12", "--data.workers=0"]
ODD = ["--task.samples=167", "--batch.global-size=18", "--task.width=700", "--task.odd",
       "--parallel.find-unused=on", "--optim.ema=0.9", "--data.workers=1"]  # fmt: skip
"""4 and 6 micro-batches; the last window of an epoch has 3 and 2, fewer than ranks."""


def label(folder: Path) -> str:
    return json.loads((folder / "environment.json").read_text())["determinism"]["label"]


@pytest.mark.parametrize(("sizes", "more"), [
    ((2, 3, 4), [*SMALL, "--epochs=3"]),
    ((4,), [*ODD, "--epochs=2"]),
    pytest.param((2, 3, 4, 5, 6), [*ODD, "--epochs=6"], marks=pytest.mark.long),
], ids=["4", "6", "6-long"])  # fmt: skip
def test_any_number_of_ranks_gives_the_same_bits(ranks, undisturbed, tmp_path, sizes, more):
    one = undisturbed(1, *TASK, *more)

    for size in sizes:
        found = run(ranks, size, tmp_path / f"of-{size}", *TASK, *more)
        assert not list(differences(one, found)), size

    assert steps(one)[-1]["samples"] < 10, "the last window is smaller"


@pytest.mark.long
@pytest.mark.parametrize("more", [
    [*SMALL, "--precision.dtype=bf16", "--nonfinite.spike-z=0.1"],
    [*SMALL, "--precision.dtype=fp16"],
    [*SMALL, "--optim.name=sgd", "--clip.value=0.01", "--schedule.name=one-cycle"],
    ["--task=tape_task:Tape", "--task.norm=batch", "--task.samples=41", "--task.nan-at=17",
     "--batch.global-size=12"],
    ["--task=tape_task:Tokens", "--batch.global-size=12"],
    ["--task=stream_task:StreamTape", "--task.kind=lanes", "--task.sizes=9,6,7,11",
     "--batch.global-size=12", "--task.validation=5"],
    pytest.param([*SMALL, "--precision.compile=on"], marks=pytest.mark.timeout(600)),
], ids=["bf16", "fp16", "sgd", "nan", "tokens", "lanes", "compiled"])
def test_other_settings_do_not_depend_on_the_number_of_ranks(ranks, undisturbed, tmp_path, more):
    arguments = [*TASK, *more, "--steps=24"]

    until_done(ranks, [3, 1, 2], tmp_path / "changed", *arguments, "--inject=term:step=5",
               "--inject=term:step=14", timeout_s=300)

    assert not list(differences(undisturbed(1, *arguments, timeout_s=300), tmp_path / "changed"))


def test_the_short_last_window_of_a_stream_has_all_micro_batches(ranks, undisturbed, tmp_path):
    arguments = [*TASK, "--task=stream_task:StreamTape", "--task.kind=measured",
                 "--task.samples=29", "--batch.global-size=12", "--epochs=2"]

    one, three = undisturbed(1, *arguments), run(ranks, 3, tmp_path / "of-3", *arguments)

    assert [line["samples"] for line in steps(one)] == 2 * [12, 12, 5]
    assert not list(differences(one, three))


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
      for seed in (1, 2, 3) for more in (SMALL, ODD)),
])  # fmt: skip
def test_the_number_of_ranks_may_change_and_ranks_may_die(
    ranks, undisturbed, tmp_path, seed, more, epochs
):
    sizes, faults = changes(seed, 10 * epochs)
    arguments = [*TASK, *more, f"--epochs={epochs}"]

    until_done(ranks, sizes, tmp_path / "elastic", *arguments, *faults)

    assert not list(differences(undisturbed(1, *arguments), tmp_path / "elastic")), faults
    assert label(tmp_path / "elastic") == "exact"


UNFIT = ["--task=hidden_task:Hidden", "--task.samples=13", "--device=cpu", "--batch.global-size=8",
         "--batch.micro-size=2", "--data.drop-last=off", "--data.workers=0",
         "--parallel.reduction=canonical"]  # fmt: skip


@pytest.mark.parametrize(("way", "size", "why"), [
    ("teacher", 2, "changes the parameters teacher"),
    ("sparse", 1, "the gradients of table.weight come in parts"),
    ("reentrant", 2, "the gradients of body.bias, body.weight come in parts")])
def test_models_that_depend_on_the_number_of_ranks_are_refused(
        ranks, tmp_path, capfd, way, size, why):
    run(ranks, size, tmp_path / "run", *UNFIT, f"--task.way={way}", "--steps=1", code=2)

    output = capfd.readouterr().out
    assert "error: --parallel.reduction canonical: " in output
    assert why in output


def test_a_changed_non_persistent_buffer_is_named(ranks, tmp_path, capfd):
    run(ranks, 2, tmp_path / "run", *UNFIT, "--task.way=passing", "--steps=1")

    warning = "warning: the model's forward changes passing, registered with"
    assert capfd.readouterr().out.count(warning) == 1


def test_a_start_at_a_window_with_fewer_micro_batches_than_ranks(ranks, undisturbed, tmp_path):
    # Of 13 samples: windows of 4 and 3 micro-batches.
    arguments = [*UNFIT, "--task.way=assigns", "--epochs=2"]

    until_done(ranks, [1, 4], tmp_path / "changed", *arguments, "--inject=term:step=1")

    assert not list(differences(undisturbed(1, *arguments), tmp_path / "changed"))


def test_the_default_reduction_is_equal_up_to_rounding_and_says_so(ranks, undisturbed, tmp_path):
    arguments = [*TASK, *SMALL, "--steps=12", "--parallel.reduction=ddp", "--parallel.sync-bn=off"]

    straight = undisturbed(2, *arguments)
    until_done(ranks, [1, 3, 2], tmp_path / "elastic", *arguments, "--inject=term:step=3",
               "--inject=kill:step=8:rank=0")

    assert label(tmp_path / "elastic") == "equivalent"
    losses = [[line["loss"] for line in steps(name)] for name in (straight, tmp_path / "elastic")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] != losses[1]
