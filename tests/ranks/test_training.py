"""The whole trainer in forked ranks: batches, order, randomness, weighting, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import TAPE, run, steps, validations, weights
from tape_task import Indexed, TokenSet, read_tape

from trainer.commands.compare import differences


def tape_arguments(path: Path, **fields: object) -> list[str]:
    return [*TAPE, "--clip.norm=0", f"--task.tape={path}",
            *(f"--task.{name}={value}" for name, value in fields.items())]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_epoch_has_each_kept_sample_once_in_another_order(ranks, tmp_path, size):
    arguments = tape_arguments(tmp_path / "tape", samples=27)

    run(ranks, size, tmp_path / "run", *arguments, "--epochs=3")

    tapes = read_tape(tmp_path / "tape", size)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for line in (line for tape in tapes for line in tape):
        for epoch, index in zip(line["epochs"], line["ids"], strict=True):
            seen[epoch].append(index)
    for epoch in seen.values():
        assert len(epoch) == len(set(epoch)) == 24
    assert len({tuple(sorted(epoch)) for epoch in seen.values()}) > 1, "drops the same samples"
    orders = {tuple(i for line in tapes[0] for i, e in zip(line["ids"], line["epochs"],
              strict=True) if e == epoch) for epoch in seen}  # fmt: skip
    assert len(orders) == 3


def test_the_loss_sequence_does_not_depend_on_the_number_of_ranks(ranks, tmp_path):
    arguments = [*tape_arguments(tmp_path / "tape", samples=640, norm="group", width=8),
                 "--batch.global-size=128", "--batch.micro-size=32", "--steps=50"]

    losses = []
    for size in (1, 2, 3, 4):
        folder = run(ranks, size, tmp_path / f"run-{size}", *arguments)
        losses.append(torch.tensor([line["loss"] for line in steps(folder)], dtype=torch.float64))

    assert all(len(sequence) == 50 for sequence in losses)
    for sequence in losses[1:]:
        assert torch.allclose(sequence, losses[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("drop_last", ["on", "off"])
def test_three_ranks_share_four_micro_batches_with_synchronised_batch_norm(
    ranks, tmp_path, drop_last
):
    # 26 samples: with drop_last off the last window has 2 samples, fewer than ranks.
    arguments = [*tape_arguments(tmp_path / "tape", samples=26, norm="batch", dropout=0.1),
                 "--epochs=2", f"--data.drop-last={drop_last}"]

    folders = [run(ranks, 3, tmp_path / f"run-{i}", *arguments) for i in range(2)]

    count = 6 if drop_last == "on" else 8
    assert len(steps(folders[0])) == count
    assert not list(differences(*folders))
    samples = [line["samples"] for line in steps(folders[0])]
    assert samples == ([8] * 6 if drop_last == "on" else [8, 8, 8, 2] * 2)


@pytest.mark.parametrize("size", [1, 2])
def test_the_last_window_is_divided_by_its_size(ranks, tmp_path, size):
    arguments = [*tape_arguments(tmp_path / "tape", samples=10), "--batch.global-size=4",
                 "--batch.micro-size=1", "--epochs=1", "--data.drop-last=off",
                 "--data.shuffle=off", "--optim.name=sgd", "--optim.lr=0.1", "--optim.momentum=0",
                 "--optim.weight-decay=0", "--schedule.name=constant", "--schedule.warmup=off",
                 "--checkpoint.every=1", "--checkpoint.keep=9"]  # fmt: skip

    folder = run(ranks, size, tmp_path / "run", *arguments)

    assert [line["samples"] for line in steps(folder)] == [4, 4, 2]
    data, model = Indexed(10, 3), torch.nn.Linear(3, 1)
    saved = weights(folder, 1)
    gradient = None
    for step, window in enumerate([range(4), range(4, 8), range(8, 10)], start=1):
        saved = weights(folder, step)
        if step > 1:  # by hand, from the state of the previous step
            before = weights(folder, step - 1)
            model.load_state_dict({n: before[f"head.{n}"] for n in ("weight", "bias")})
            x, y = data.inputs[list(window)], data.targets[list(window)]
            (model(x).squeeze(1) - y).square().mean().backward()
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                expected = before[f"head.{name}"] - 0.1 * gradient
                assert torch.allclose(saved[f"head.{name}"], expected, rtol=1e-6, atol=1e-6)
                parameter.grad = None
    assert gradient is not None


def test_a_token_has_the_same_weight_on_any_rank_and_in_any_micro_batch(ranks, tmp_path):
    def update(size: int, micro: int) -> torch.Tensor:
        folder = run(ranks, size, tmp_path / f"run-{size}-{micro}", "--task=tape_task:Tokens",
                     "--device=cpu", "--batch.global-size=12", f"--batch.micro-size={micro}",
                     "--steps=1", "--optim.name=sgd", "--optim.lr=1", "--optim.momentum=0",
                     "--optim.weight-decay=0", "--schedule.warmup=off", "--clip.norm=0",
                     "--schedule.name=constant")  # fmt: skip
        return weights(folder, 1)["weight"]

    updates = {f"{w}x{12 // m // w}": update(w, m) for w, m in ((1, 12), (1, 3), (2, 3), (2, 6))}

    data = TokenSet(12)
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    batch = [data[i] for i in range(12)]
    x, y, valid = (torch.stack([sample[k] for sample in batch]) for k in ("x", "y", "valid"))
    (((model(x).squeeze(-1) - y).square() * valid).sum() / valid.sum()).backward()
    expected = (model.weight - model.weight.grad).detach()
    for split, weight in updates.items():
        assert torch.allclose(weight, expected, rtol=1e-6, atol=1e-6), split


@pytest.mark.parametrize("size", [1, 2])
def test_learning_rate_and_saves_count_optimizer_steps(ranks, tmp_path, size):
    arguments = [*tape_arguments(tmp_path / "tape", samples=320), "--epochs=1",
                 "--checkpoint.every=10", "--checkpoint.keep=9", "--schedule.warmup=4"]  # fmt: skip

    folder = run(ranks, size, tmp_path / "run", *arguments)

    names = sorted(p.name for p in (folder / "checkpoints").glob("step-*"))
    assert names == [f"step-{n:08d}" for n in (10, 20, 30, 40)]
    rates = [line["lr"] for line in steps(folder)]
    assert rates[:4] == pytest.approx([3e-3 / 4, 3e-3 / 2, 3e-3 * 3 / 4, 3e-3])
    assert rates[-1] == pytest.approx(3e-4)
    assert rates[3:] == sorted(rates[3:], reverse=True)


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


def test_validation_counts_each_sample_once_for_any_number_of_ranks(ranks, tmp_path):
    lines = []
    for size in (1, 2, 3):
        tape = tmp_path / f"tape-{size}"
        arguments = [*tape_arguments(tape, samples=8, validation=7),
                     "--batch.global-size=6", "--batch.micro-size=2", "--steps=1",
                     "--eval.batch-size=2"]  # fmt: skip
        lines.append(validations(run(ranks, size, tmp_path / f"run-{size}", *arguments)))

    for line, in lines:
        assert line["val_samples"] == 7
    assert lines[0][0]["val_loss"] == pytest.approx(lines[1][0]["val_loss"], rel=1e-6)
    ids = sorted(i for line in read_tape(tmp_path / "tape-1", 1, training=False)[0]
                 for i in line["ids"])
    assert ids[:7] == sorted([*range(7)] * 2)[:7] or ids == sorted([*range(7)] * 2)


@pytest.mark.parametrize(("samples", "arguments", "count"), [
    (1, ["--batch.global-size=4", "--data.drop-last=off"], 2),
    (3, ["--batch.global-size=4", "--data.drop-last=off"], 2),
    (5, ["--batch.global-size=4", "--data.drop-last=off"], 4),
    (5, ["--batch.global-size=4"], 2),
    (5, ["--batch.global-size=16", "--data.drop-last=off"], 2),
])  # fmt: skip
def test_a_small_data_set_gives_the_right_number_of_steps(ranks, tmp_path, samples, arguments,
                                                         count):
    folder = run(ranks, 2, tmp_path / "run", *tape_arguments(tmp_path / "tape", samples=samples),
                 "--batch.micro-size=2", "--epochs=2", *arguments)

    assert len(steps(folder)) == count


def test_parameters_without_gradients_survive_saves_and_a_restart(ranks, tmp_path):
    arguments = [*TAPE, "--task=tape_task:Unused", "--checkpoint.every=2"]

    for length in (4, 6):
        run(ranks, 1, tmp_path / "run", *arguments, f"--steps={length}")

    assert [line["step"] for line in steps(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    first, last = (weights(tmp_path / "run", step) for step in (4, 6))
    assert torch.equal(first["unused.weight"], last["unused.weight"])
    assert not torch.equal(first["head.weight"], last["head.weight"])


def test_one_rank_writes_the_run_folder(ranks, tmp_path):
    folder = run(ranks, 2, tmp_path / "run", *tape_arguments(tmp_path / "tape", samples=64),
                 "--batch.global-size=4", "--batch.micro-size=1", "--epochs=1")

    assert len(list((folder / "tensorboard").glob("*"))) == 1
    assert [line["step"] for line in steps(folder)] == list(range(1, 17))
