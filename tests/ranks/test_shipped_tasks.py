"""The shipped tasks: against a plain loop, for any number of ranks, through a kill."""

from __future__ import annotations

import argparse
import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import events, run, steps, summary, train, until_done, validations
from safetensors.torch import save_file
from torch.nn import functional

from trainer import rng
from trainer.commands.compare import differences
from trainer.tasks.image_models import SmallCNN
from trainer.tasks.text import Text

TEXT = argparse.__file__
"""A file of the Python distribution, 100 kB."""

SMALL_TEXT = (f"--task.file={TEXT}", "--task.context=32", "--task.width=32")


def plain_loop(count: int, batch: int) -> list[float]:
    """The GPT on the same text, with torch alone: the loss of each step."""
    rng.seed_all(0, rng.MODEL)  # the same first weights
    task = Text(file=TEXT, context=32, width=32)
    model, data = task.model(), task.dataset("train")
    optimizer = torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ], lr=3e-3, betas=(0.9, 0.95))
    order = torch.randperm(  # the same order
        len(data), generator=torch.Generator().manual_seed(rng.mix(0, rng.ORDER, 0)))
    found = []
    for rows in order.split(batch)[:count]:
        inputs, targets = data.__getitems__(rows.tolist())
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def test_the_gpt_has_the_loss_of_a_plain_loop_on_one_and_on_two_ranks(ranks, tmp_path):
    arguments = ["--task=text", *SMALL_TEXT, "--device=cpu", *SIXTEEN,
                 "--steps=60", "--optim.lr=3e-3", "--optim.weight-decay=0.1", "--clip.norm=1",
                 "--optim.betas", "0.9", "0.95", "--schedule.name=constant",
                 "--schedule.warmup=off"]  # fmt: skip

    folders = [run(ranks, size, tmp_path / f"{size}", *arguments) for size in (1, 2)]
    one, two = ([line["loss"] for line in steps(folder)] for folder in folders)

    assert len(one) == 60
    assert one[-1] < 0.7 * one[0]
    assert one == pytest.approx(plain_loop(60, batch=16), abs=1e-4)
    assert two == pytest.approx(one, abs=1e-5)
    last = validations(folders[0])[-1]
    assert last["val_perplexity"] == pytest.approx(np.exp(last["val_loss"]))


EIGHT = ("--batch.global-size=8", "--batch.micro-size=2")
SIXTEEN = ("--batch.global-size=16", "--batch.micro-size=4")
SPIRAL = ("spiral", "--device=cpu", "--task.points=120", "--task.width=16",
          "--batch.global-size=40", "--batch.micro-size=10", "--eval.every=4")  # fmt: skip
SHORT = {
    "spiral": (*SPIRAL[2:], "--eval.best=val_f1:max"),
    "shapes": ("--task.images=48", "--task.width=4", *EIGHT, "--eval.every=4"),
    "shape-labels": ("--task.images=48", "--task.width=4", *EIGHT, "--eval.every=4",
                     "--task.balanced"),
    **dict.fromkeys(("text", "text-stream"), (*SMALL_TEXT, *EIGHT, "--eval.every=6")),
    "sample": (*SIXTEEN, "--eval.every=off", "--task.validation-fraction=0.98"),
    "distill": (*SIXTEEN, "--eval.every=off", "--task.validation-fraction=0.99",
                "--task.teacher={data}/teacher.safetensors"),
    "folder": (*EIGHT, "--task.root={data}", "--task.model=squeezenet1_1", "--task.crop=32",
               "--task.class-weights=balanced", "--data.workers=1"),
}  # fmt: skip
"""Recipe → flags that make it a matter of seconds."""


def write_data(folder: Path, recipe: str) -> None:
    """Write random data, or a teacher, for a recipe that needs files."""
    folder.mkdir()
    if recipe == "distill":
        torch.manual_seed(1)
        save_file(SmallCNN().state_dict(), folder / "teacher.safetensors")
    elif recipe == "folder":
        images = np.random.default_rng(1).integers(0, 255, (40, 40, 50, 3), dtype=np.uint8)
        for number, image in enumerate(images):
            path = folder / "train" / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", [
    name if name in ("spiral", "shapes", "text-stream") else
    pytest.param(name, marks=pytest.mark.long) for name in SHORT])
def test_a_killed_run_of_a_recipe_ends_with_the_same_bits(ranks, undisturbed, tmp_path, recipe):
    write_data(tmp_path / "data", recipe)
    arguments = (recipe, *(flag.format(data=tmp_path / "data") for flag in SHORT[recipe]),
                 "--steps=12", "--checkpoint.every=5", "--device=cpu")

    ends = until_done(ranks, 2, tmp_path / "run", *arguments,
                      "--inject=kill:rank=1:step=8:phase=backward")

    assert ends == [[1, -9], [0, 0]]
    assert not list(differences(undisturbed(2, *arguments), tmp_path / "run"))


def test_a_picture_that_died_with_rank_0_is_drawn_by_the_next_attempt(ranks, undisturbed, tmp_path):
    arguments = [*SPIRAL, "--steps=8", "--checkpoint.every=4"]
    straight, killed = undisturbed(2, *arguments), tmp_path / "killed"
    inject = "--inject=kill:rank=0:step=5:phase=forward"  # rank 1 saves step 4, validated
    outcomes = ranks.outcomes(2, train, *arguments, inject, f"--run-dir={killed}", group=False)
    assert outcomes[0].signal == 9
    shutil.rmtree(killed / "pictures", ignore_errors=True)

    run(ranks, 2, killed, *arguments, inject)

    pictures = [{p.name: p.read_bytes() for p in (folder / "pictures").iterdir()}
                for folder in (straight, killed)]
    assert sorted(pictures[0]) == ["step-00000004.png", "step-00000008.png", "training.gif"]
    assert pictures[0] == pictures[1]
    with Image.open(killed / "pictures/training.gif") as film:
        assert film.n_frames == 2
    assert not list(differences(straight, killed))


REACHED = {
    "sample": ("accuracy", 0.89, 0.1), "spiral": ("accuracy", 0.97, 1 / 3),
    "shapes": ("iou", 0.70, 0.36), "shape-labels": ("f1", 0.93, 0.71),
}  # fmt: skip
"""Recipe → figure of the test, at least so much, and what a rule without learning reaches: the
likeliest class; every pixel above 0.4 is each shape; each image holds each shape."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", REACHED)
def test_a_recipe_reaches_its_figure_and_gets_no_hint(trained, recipe):
    figure, least, without_learning = REACHED[recipe]

    folder = trained(2, recipe, "--device=cpu")

    assert summary(folder)["test"][figure] >= least > without_learning
    assert not events(folder, "hint")


@pytest.fixture(scope="module")
def trained(undisturbed):
    return functools.partial(undisturbed, timeout_s=850)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["text", "text-stream"])
def test_the_gpt_beats_counting_which_byte_follows_which(trained, recipe):
    folder = trained(2, recipe, "--device=cpu")

    task = Text()
    train_on, held_out = (task.dataset(split).data.astype(np.int64)
                          for split in ("train", "validation"))
    counts = np.full((256, 256), 0.01)
    np.add.at(counts, (train_on[:-1], train_on[1:]), 1)
    share = counts / counts.sum(1, keepdims=True)
    counting = float(np.exp(-np.log(share[held_out[:-1], held_out[1:]]).mean()))
    assert validations(folder)[-1]["val_perplexity"] < 0.85 * counting
    assert not events(folder, "hint")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_student_of_few_images_is_better_with_a_teacher_than_without(trained):
    teacher = trained(2, "sample", "--device=cpu")
    student = ("distill", f"--task.teacher={teacher}", "--device=cpu")

    taught, alone = (summary(trained(2, *student, *more))["test"]["accuracy"]
                     for more in ((), ("--task.teacher-share=0",)))

    assert summary(teacher)["test"]["accuracy"] > taught > alone + 0.02
