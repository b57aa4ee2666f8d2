"""Number formats: fp16 with its scaler, compiled models, skipped updates."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from runs import metrics, steps, train, weights
from safetensors.torch import load_file

from trainer.commands.compare import differences

TASK = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0",
        "--batch.global-size=8", "--batch.micro-size=2",
        "--task.norm=group", "--task.samples=160"]  # fmt: skip


def run(ranks, size: int, folder: Path, *arguments: str, timeout_s: float = 100) -> list[int]:
    return ranks(size, train, *TASK, *arguments, f"--run-dir={folder}", group=False,
                 timeout_s=timeout_s)


@pytest.mark.parametrize("size", [1, 2])
def test_overflowing_updates_are_skipped_and_change_neither_rate_nor_count(ranks, tmp_path, size):
    arguments = ["--precision.dtype=fp16", f"--precision.loss-scale={2.0**40}", "--steps=40",
                 "--schedule.warmup=10"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"

    assert run(ranks, size, straight, *arguments) == [0] * size
    stops = ["--inject=term:step=3", "--inject=term:step=33"]
    assert run(ranks, size, stopped, *arguments, *stops) == [75] * size
    assert run(ranks, size, stopped, *arguments, *stops) == [75] * size
    assert run(ranks, size, stopped, *arguments, *stops) == [0] * size

    lines = steps(straight)
    first = list(itertools.takewhile(lambda line: line.get("skipped"), lines))
    taken = [line for line in lines if not line.get("skipped")]
    assert len(first) >= 3
    assert [line["scale"] for line in first] == [2.0**40 / 2**n for n in range(len(first))]
    assert {line["lr"] for line in first} == {taken[0]["lr"]}
    assert [line["lr"] for line in taken[:10]] == pytest.approx(
        [3e-3 * (n + 1) / 10 for n in range(10)])
    assert all(line["loss"] is None for line in first)
    assert metrics(straight) == metrics(stopped)
    assert not list(differences(straight, stopped))
    for folder in (straight, stopped):
        checkpoint = folder / "checkpoints/step-00000040"
        state = json.loads((checkpoint / "state.json").read_text())
        counts = {float(value) for name, value in load_file(
            checkpoint / "optimizer.safetensors").items() if name.endswith("step")}
        assert counts == {len(taken)} == {state["schedule"]["updates"]}


def test_a_window_in_fp16_is_clipped_once_in_real_units(ranks, tmp_path):
    common = ["--steps=1", "--batch.global-size=6", "--optim.name=sgd", "--optim.lr=1",
              "--optim.momentum=0", "--optim.weight-decay=0", "--schedule.warmup=off",
              "--schedule.name=constant", "--clip.norm=0.1"]

    run(ranks, 1, tmp_path / "half", *common, "--precision.dtype=fp16",
        "--precision.loss-scale=1024", "--batch.micro-size=2")
    run(ranks, 1, tmp_path / "plain", *common, "--precision.dtype=fp32", "--batch.micro-size=6")

    norms = [steps(tmp_path / name)[0]["grad_norm"] for name in ("half", "plain")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert norms[1] > 0.1
    half, plain = (weights(tmp_path / name, 1) for name in ("half", "plain"))
    assert all(torch.allclose(half[name], plain[name], atol=1e-3) for name in plain)


@pytest.mark.parametrize("size", [1, 2])
def test_a_nan_on_one_rank_is_skipped_by_all_and_changes_nothing(ranks, tmp_path, size):
    arguments = ["--steps=8", "--task.norm=batch", "--checkpoint.every=1", "--checkpoint.keep=9",
                 f"--inject=nan:step=5:rank={size - 1}"]

    assert run(ranks, size, tmp_path / "run", *arguments) == [0] * size

    line = steps(tmp_path / "run")[4]
    assert line["skipped"]
    assert line["loss"] is None
    before, after = (weights(tmp_path / "run", n) for n in (4, 5))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run", 8).values())


@pytest.mark.long
def test_checkpoints_load_with_and_without_compile_and_ddp_in_all_pairs(ranks, tmp_path):
    # The walk contains each ordered pair of settings (ranks, compile) at least once.
    ways = [(size, compiled) for size in (1, 2) for compiled in ("off", "on")]
    walk = [ways[i] for i in (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)]
    keys = set()

    for step, (size, compiled) in enumerate(walk, start=1):
        stop = ["--inject=term:step=" + str(n) for n in range(1, len(walk))]
        codes = run(ranks, size, tmp_path / "run", f"--steps={len(walk)}", *stop,
                    f"--precision.compile={compiled}", timeout_s=300)
        assert codes == [75 if step < len(walk) else 0] * size
        keys.add(tuple(sorted(weights(tmp_path / "run", step))))

    assert len(keys) == 1
    assert not any("module." in key or "_orig_mod" in key for key in keys.pop())
    assert len(steps(tmp_path / "run")) == len(walk)


def test_names_in_a_checkpoint_are_those_of_the_plain_model(ranks, tmp_path):
    from tape_task import Tape

    assert run(ranks, 2, tmp_path / "run", "--steps=2") == [0, 0]

    model = Tape(norm="group").model()
    model.load_state_dict(weights(tmp_path / "run", 2), strict=True)
