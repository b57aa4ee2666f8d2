"""Number formats and compiled models: fp16 with its scaler, skipped updates, the cache."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest
import torch
from runs import TAPE, events, run, state, steps, until_done, weights
from safetensors.torch import load_file

from trainer.commands.compare import differences
from trainer.distributed.world import World
from trainer.optim.compile_cache import VARIABLE, use

TASK = (*TAPE, "--task.norm=group")


@pytest.mark.parametrize("size", [1, 2])
def test_overflowing_updates_are_skipped_and_change_neither_rate_nor_count(
    ranks, undisturbed, tmp_path, size
):
    arguments = [*TASK, "--precision.dtype=fp16", f"--precision.loss-scale={2.0**40}",
                 "--steps=40", "--schedule.warmup=10"]
    straight, stopped = undisturbed(size, *arguments), tmp_path / "stopped"

    ends = until_done(ranks, size, stopped, *arguments, "--inject=term:step=3",
                      "--inject=term:step=33")

    assert ends == [[75] * size, [75] * size, [0] * size]
    assert not list(differences(straight, stopped))
    lines = steps(stopped)
    first = list(itertools.takewhile(lambda line: line.get("skipped"), lines))
    taken = [line for line in lines if not line.get("skipped")]
    assert len(first) >= 3
    assert [line["scale"] for line in first] == [2.0**40 / 2**n for n in range(len(first))]
    assert {line["lr"] for line in first} == {taken[0]["lr"]}
    assert [line["lr"] for line in taken[:10]] == pytest.approx(
        [3e-3 * (n + 1) / 10 for n in range(10)])
    assert all(line["loss"] is None for line in first)
    optimizer = load_file(stopped / "checkpoints/step-00000040/optimizer.safetensors")
    counts = {float(value) for name, value in optimizer.items() if name.endswith("step")}
    assert counts == {len(taken)} == {state(stopped, 40)["schedule"]["updates"]}


def test_a_window_in_fp16_is_clipped_once_in_real_units(ranks, tmp_path):
    common = [*TASK, "--steps=1", "--batch.global-size=6", "--optim.name=sgd", "--optim.lr=1",
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


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "label"), [
    (["reduce-overhead"], "exact"),
    (["max-autotune", "--numerics.deterministic=off"], "equivalent")])
def test_a_killed_run_in_a_mode_of_torch_compile_ends_with_the_same_bits(
    ranks, undisturbed, tmp_path, mode, label
):
    """On a CPU; where kernels may be chosen by their speed, the run does not promise it."""
    arguments = [*TASK, "--steps=6", f"--precision.compile={mode[0]}", *mode[1:]]

    until_done(ranks, 2, tmp_path / "run", *arguments, "--inject=kill:rank=1:step=4")

    assert not list(differences(undisturbed(2, *arguments), tmp_path / "run"))
    [restored] = events(tmp_path / "run", "restore", rank=0)
    assert restored["label"] == label


@pytest.mark.long
def test_checkpoints_load_with_and_without_compile_and_ddp_in_all_pairs(ranks, tmp_path):
    # The walk contains each ordered pair of settings (ranks, compile) at least once.
    ways = [(size, compiled) for size in (1, 2) for compiled in ("off", "on")]
    walk = [ways[i] for i in (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)]
    keys = set()

    for step, (size, compiled) in enumerate(walk, start=1):
        stop = ["--inject=term:step=" + str(n) for n in range(1, len(walk))]
        run(ranks, size, tmp_path / "run", *TASK, f"--steps={len(walk)}", *stop,
            f"--precision.compile={compiled}", timeout_s=300, code=75 if step < len(walk) else 0)
        keys.add(tuple(sorted(weights(tmp_path / "run", step))))

    assert len(keys) == 1
    assert not any("module." in key or "_orig_mod" in key for key in keys.pop())
    assert len(steps(tmp_path / "run")) == len(walk)


def compile_something(folder: str, end: str) -> str:
    """In a rank: use the cache, compile as `end` says, and tell where it is."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    os.environ.pop(VARIABLE, None)
    with World.form(device="cpu") as world:
        use(Path(folder), world)
        place = Path(os.environ[VARIABLE])
        place.mkdir(exist_ok=True)
        world.barrier()
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0"):
            (place / f"half-{world.rank}").touch()
            world.barrier()
            if end == "kill" and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "raise" and world.rank == 1:
                raise ZeroDivisionError
    return str(place)


@pytest.mark.parametrize("end", ["kill", "raise"])
def test_a_cache_is_made_anew_after_an_end_amid_a_compile_only(ranks, tmp_path, end):
    [place, _] = ranks(2, compile_something, str(tmp_path), "", group=False)
    kept = Path(place, "old")
    kept.touch()

    ranks(2, compile_something, str(tmp_path), "", group=False)
    assert kept.exists()
    ranks.outcomes(2, compile_something, str(tmp_path), end, group=False)
    assert [mark.suffix for mark in tmp_path.glob("*.compiling-*")] == [".compiling-1"]
    ranks(2, compile_something, str(tmp_path), "", group=False)

    assert not kept.exists()
    assert not list(tmp_path.glob("*.compiling-*"))
