"""The whole trainer in forked ranks: batches, order, randomness, weighting, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import TAPE, run, steps, weights
from tape_task import Indexed, Tokens, read_tape
from torch.utils.data import default_collate

PLAIN = ("--optim.name=sgd", "--optim.momentum=0", "--optim.weight-decay=0",
         "--schedule.name=constant", "--schedule.warmup=off")  # fmt: skip
"""An update is the rate times the gradient."""


def tape_arguments(path: Path, **fields: object) -> list[str]:
    return [*TAPE, "--clip.norm=0", f"--task.tape={path}",
            *(f"--task.{name}={value}" for name, value in fields.items())]


@pytest.mark.parametrize("size", [1, 2])
def test_the_last_window_is_divided_by_its_size(ranks, tmp_path, size):
    arguments = [*tape_arguments(tmp_path / "tape", samples=10), "--batch.global-size=4",
                 "--batch.micro-size=1", "--epochs=1", "--data.drop-last=off",
                 "--data.shuffle=off", *PLAIN, "--optim.lr=0.1", "--checkpoint.every=1",
                 "--checkpoint.keep=9"]

    folder = run(ranks, size, tmp_path / "run", *arguments)

    assert [line["samples"] for line in steps(folder)] == [4, 4, 2]
    data, model = Indexed(10, 3), torch.nn.Linear(3, 1)
    for step, window in ((2, slice(4, 8)), (3, slice(8, 10))):
        before, after = weights(folder, step - 1), weights(folder, step)
        model.load_state_dict({n: before[f"head.{n}"] for n in ("weight", "bias")})
        model.zero_grad()
        (model(data.inputs[window]).squeeze(1) - data.targets[window]).square().mean().backward()
        for name, parameter in model.named_parameters():
            expected = before[f"head.{name}"] - 0.1 * parameter.grad
            assert torch.allclose(after[f"head.{name}"], expected, rtol=1e-6, atol=1e-6)


def test_a_token_has_the_same_weight_on_any_rank_and_in_any_micro_batch(ranks, tmp_path):
    def update(size: int, micro: int) -> torch.Tensor:
        folder = run(ranks, size, tmp_path / f"run-{size}-{micro}", "--task=tape_task:Tokens",
                     "--device=cpu", "--batch.global-size=12", f"--batch.micro-size={micro}",
                     "--steps=1", *PLAIN, "--optim.lr=1", "--clip.norm=0")
        return weights(folder, 1)["weight"]

    updates = {f"{w}x{12 // m // w}": update(w, m) for w, m in ((1, 12), (1, 3), (2, 3), (2, 6))}

    task = Tokens()
    model = task.model()
    whole = task.loss(model, default_collate([*task.dataset("train")]))
    (whole.total / whole.count).backward()
    expected = (model.weight - model.weight.grad).detach()
    for split, weight in updates.items():
        assert torch.allclose(weight, expected, rtol=1e-6, atol=1e-6), split


def test_random_numbers_differ_by_sample_epoch_and_rank_and_repeat_with_any_workers(
    ranks, tmp_path
):
    tables, by_sample = [], []
    for number, (size, workers) in enumerate(((2, 0), (2, 2), (1, 0))):
        tape = tmp_path / f"tape-{number}"
        run(ranks, size, tmp_path / f"run-{number}", *tape_arguments(tape, samples=16),
            "--epochs=2", f"--data.workers={workers}")
        tables.append([line for lines in read_tape(tape, size) for line in lines])
        by_sample.append({
            (epoch, index): draws for line in tables[-1]
            for epoch, index, draws in zip(line["epochs"], line["ids"], line["draws"], strict=True)
        })  # fmt: skip

    assert tables[0] == tables[1]
    assert by_sample[0] == by_sample[2]
    lines = tables[0]
    for kind in range(5):
        draws = [sample[kind] for line in lines for sample in line["draws"]]
        assert len(draws) == len(set(draws)) == 32
    masks = [tuple(line["mask"]) for line in lines]
    assert len(set(masks)) > len(masks) - 2  # 16 bits each: one pair may be equal by chance
    randoms = [r for line in lines for r in line["random"]]
    assert len(set(randoms)) == len(randoms)
    assert by_sample[0].keys() == {(e, i) for e in (0, 1) for i in range(16)}
