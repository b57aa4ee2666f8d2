"""Stops and deaths: a disturbed run ends with the samples, weights and metrics of an undisturbed
one."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from runs import (
    PLATEAU,
    TAPE,
    codes,
    events,
    flip_a_bit,
    impatient,
    run,
    state,
    steps,
    summary,
    train,
    until_done,
    validations,
)

from trainer.checkpoint.progress import LossMeter
from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.commands.report.figures import summary as figures
from trainer.commands.report.history import read_history
from trainer.distributed.comm_timer import DeviceInterval
from trainer.optim import ema
from trainer.run.run_dir import closing_lines

NET = (*TAPE, "--task.norm=batch", "--task.dropout=0.3")
EPOCHS = (*NET, "--task.validation=6", "--epochs=3", "--eval.every=10")
VALIDATED = (*TAPE, "--task.validation=6", "--steps=12", "--checkpoint.every=1000")
BEST = (*VALIDATED, "--eval.every=5", "--eval.best=val_loss:max", "--optim.lr=0.02")
"""The first validation, of step 5, stays the best."""
SHORT = (*NET, "--steps=9", "--checkpoint.every=1000")
CRAFT = (*NET, "--task.validation=6", "--steps=20", "--checkpoint.every=4")


def stops(*numbers: int, rank: int = 0) -> list[str]:
    return [f"term:step={number}:rank={rank}" for number in numbers]


FOUR = [*stops(2), "kill:rank=1:step=6:phase=backward", "kill:rank=0:step=10:phase=evaluate",
        *stops(15, rank=1)]  # fmt: skip
FOUR_ENDS = [[75, 75], [1, -9], [-9, 1], [75, 75]]

DISTURBED = {
    "stops in one epoch": (2, EPOCHS, stops(4, 10, 11, rank=1), [[75, 75]] * 3),
    "stops at an epoch's end, with workers": (
        2, (*EPOCHS, "--data.workers=2"), stops(5, 40, 41, rank=1), [[75, 75]] * 3),
    "deaths before, in and after a due validation": (
        1, (*NET, "--task.samples=80", "--task.validation=6", "--epochs=3", "--checkpoint.every=5",
            "--eval.every=5"),
        ["kill:step=5:phase=evaluate", "kill:step=10:phase=step-end",
         "kill:step=20:phase=save-end", "kill:step=30:phase=evaluate"], [[-9]] * 4),
    "a validation that is done again": (
        1, (*VALIDATED, "--eval.every=5", "--log.every=1"), [*stops(5), "kill:step=8"],
        [[75], [-9]]),
    "stops around the warm-up of the rate": (
        1, (*NET, "--steps=20", "--schedule.warmup=5"), stops(1, 4, 5, 6, 19), [[75]] * 5),
    # The last window of an epoch has 2 samples, fewer than ranks.
    "three ranks": (
        3, (*NET, "--task.samples=26", "--data.drop-last=off", "--steps=12"), stops(5, rank=2),
        [[75, 75, 75]]),
    "stops at the last steps": (2, (*SHORT, "--task.validation=6", "--eval.every=4"),
                                stops(8, 9, rank=1), [[75, 75]] * 2),
    "rmsprop and an unused parameter": (
        1, (*TAPE, "--task=tape_task:Unused", "--steps=6", "--optim.name=torch.optim:RMSprop"),
        stops(2, 5), [[75]] * 2),
    "plateau and averaged weights": (
        2, (*CRAFT, "--optim.ema=0.9", "--optim.rates=body.*=0.5", *PLATEAU), FOUR, FOUR_ENDS),
    "one-cycle": (2, (*CRAFT, "--schedule.name=one-cycle", "--schedule.warmup=3",
                      "--optim.ema=0.5", "--eval.every=5"), FOUR, FOUR_ENDS),
    "a failed save of the best weights": (
        1, (*BEST, "--checkpoint.every=7"), ["enospc:step=5:phase=save-begin"], []),
    # Weights of step 5 that wait, the stop's own, and those of the last step.
    "failed saves of a stop and of the end": (
        2, (*BEST, "--steps=9", "--checkpoint.every=7"),
        [*(f"enospc:step={step}:phase=save-begin" for step in (5, 6, 9)), *stops(6)], [[75, 75]]),
    "the death of the writer of the best weights": (
        2, BEST, ["slow:step=5:phase=save-begin:seconds=30", "kill:step=8"], [[-9, 1]]),
    "an exception before an update": (1, SHORT, ["raise:step=5:phase=optimizer"], [[1]]),
    **{f"a death in the last save, {phase}": (
        2, SHORT, [f"kill:step=9:phase={phase}"], [[-9, 1]])
       for phase in ("save-begin", "save-mid", "save-end")},
}  # fmt: skip
"""Number of ranks, flags, faults, and exit codes of the starts that end early."""


@pytest.mark.parametrize("what", [
    pytest.param(what, marks=pytest.mark.long) if what == "one-cycle" else what
    for what in DISTURBED])
def test_a_disturbed_run_ends_with_the_same_bits(ranks, undisturbed, tmp_path, what):
    size, flags, faults, ends = DISTURBED[what]
    straight, disturbed = undisturbed(size, *flags), tmp_path / "run"

    ended = until_done(ranks, size, disturbed, *flags, *(f"--inject={fault}" for fault in faults))

    assert ended == [*ends, [0] * size]
    assert not list(differences(straight, disturbed))
    assert [line["step"] for line in validations(straight)] == [
        line["step"] for line in validations(disturbed)]
    keys = {tuple(sorted(json.loads((c / "manifest.json").read_bytes())["files"]))
            for c in (disturbed / "checkpoints").glob("step-*")}
    assert len(keys) == 1
    for begin, saved in (("a death in the last save", 9), ("the death of the writer", 7),
                         ("an exception", 4)):
        if what.startswith(begin):
            assert inspect(disturbed)["attempts"][1]["start_step"] == saved


def test_the_epochs_and_validations_of_a_run_are_whole(undisturbed):
    straight = undisturbed(2, *EPOCHS)

    assert [line["step"] for line in validations(straight)] == [10, 20, 30, 40, 50, 60]
    assert {line["val_samples"] for line in validations(straight)} == {6}
    assert [line["epoch"] for line in steps(straight)] == [0] * 20 + [1] * 20 + [2] * 20


def test_the_number_of_ranks_may_change_and_no_sample_is_lost_or_repeated(
    ranks, undisturbed, tmp_path, capfd
):
    arguments = [*NET, "--task.samples=48", "--epochs=2", "--task.norm=group", "--task.dropout=0"]
    straight, changed = undisturbed(2, *arguments), tmp_path / "changed"

    ends = until_done(ranks, (2, 1, 2), changed, *arguments, f"--task.tape={tmp_path / 'tape'}",
                      "--inject=term:step=3", "--inject=term:step=7")

    assert ends == [[75, 75], [75], [0, 0]]
    assert "world size was 2 and is 1" in capfd.readouterr().out
    assert len(steps(changed)) == 12
    losses = [[line["loss"] for line in steps(run)] for run in (straight, changed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    lines = [json.loads(text) for rank in range(2)
             for text in (tmp_path / f"tape-{rank}.jsonl").read_text().splitlines()]
    seen = [sample for line in lines for sample in zip(line["epochs"], line["ids"], strict=True)]
    assert set(seen) == {(epoch, index) for epoch in (0, 1) for index in range(48)}
    # A rehearsal takes one micro-batch, at the first start twice: four on rank 0, three on rank 1.
    # Each rank checks its first one there, twice as a whole and once in halves, then once more,
    # and three times in the third step.
    assert len(seen) == 96 + 7 * 2 + 2 * (3 + 1 + 3) * 2


def test_a_finished_run_is_unchanged_and_a_longer_one_continues_at_the_last_rate(
    ranks, tmp_path, capfd
):
    arguments = [*NET, "--task.samples=80"]
    folder = run(ranks, 1, tmp_path / "run", *arguments, "--steps=10")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}

    run(ranks, 1, folder, *arguments, "--steps=10")

    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert "nothing to do" in capfd.readouterr().out
    run(ranks, 1, folder, *arguments, "--steps=15")
    rates = [line["lr"] for line in steps(folder)]
    assert rates[10:] == [rates[9]] * 5
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["determinism"]["label"] == "equivalent"


@pytest.mark.parametrize("damage", ["flip", "remove", "all"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    ranks, undisturbed, tmp_path, capfd, damage
):
    arguments = [*NET, "--steps=12", "--checkpoint.every=3"]
    straight = undisturbed(2, *arguments)
    broken = run(ranks, 2, tmp_path / "run", *arguments, "--inject=term:step=10", code=75)
    newest = broken / "checkpoints/step-00000010/model.safetensors"
    match damage:
        case "flip":
            flip_a_bit(newest)
        case "remove":
            newest.unlink()
        case "all":
            for file in broken.glob("checkpoints/*/state.json"):
                os.truncate(file, file.stat().st_size - 5)
    files = {p: p.read_bytes() for p in broken.rglob("*.safetensors")}
    capfd.readouterr()

    run(ranks, 2, broken, *arguments, code=2 if damage == "all" else 0)

    output = capfd.readouterr().out
    assert "step-00000010" in output
    if damage == "all":
        assert "no valid checkpoint is left; nothing was changed" in output
        assert files == {p: p.read_bytes() for p in broken.rglob("*.safetensors")}
    else:
        assert "continuing from step 9" in output
        assert not list(differences(straight, broken))


BEST_OF_2 = (*VALIDATED, "--steps=8", "--eval.every=2", "--eval.best=val_loss:max",
             "--task.samples=40")  # fmt: skip


def damage_the_best(run: Path, at_step: int) -> None:
    assert state(run, at_step)["best"]["step"] == 2
    flip_a_bit(run / "checkpoints/step-00000002/model.safetensors")


def test_damaged_best_weights_end_the_attempt_and_the_next_one_computes_them_again(
    ranks, undisturbed, tmp_path, capfd
):
    command, stop = [*BEST_OF_2, "--checkpoint.every=1"], "--inject=term:step=3:rank=1"
    harmed = run(ranks, 2, tmp_path / "harmed", *command, stop, code=75)
    damage_the_best(harmed, 3)

    run(ranks, 2, harmed, *command, stop, code=1)
    run(ranks, 2, harmed, *command, stop)

    assert "best weights, of step 2, are damaged. The next start continues from step 1" in (
        "".join(capfd.readouterr()))
    assert [e["at_step"] for e in events(harmed, "restore") if e["rank"] == 0] == [3, 1]
    assert not list(differences(undisturbed(2, *command), harmed))


def test_lost_best_weights_are_replaced_by_the_last_with_a_warning(ranks, tmp_path, capfd):
    command = [*BEST_OF_2, "--checkpoint.every=1", "--checkpoint.keep=1", "--inject=term:step=6"]
    harmed = run(ranks, 2, tmp_path / "run", *command, code=75)
    damage_the_best(harmed, 6)

    run(ranks, 2, harmed, *command)

    assert "the best weights, of step 2, are lost" in capfd.readouterr().out
    assert summary(harmed)["model.safetensors"] == "the weights of step 8, the last step"
    product = (harmed / "model.safetensors").read_bytes()
    assert product == (harmed / "checkpoints/step-00000008/model.safetensors").read_bytes()


def test_a_run_starts_from_a_given_checkpoint_and_later_continues_from_its_own(
    ranks, undisturbed, tmp_path
):
    arguments = [*NET, "--steps=12", "--checkpoint.every=3", "--checkpoint.keep=9"]
    straight, other = undisturbed(1, *arguments), tmp_path / "other"
    resume = f"--resume={straight / 'checkpoints/step-00000006'}"

    ends = until_done(ranks, 1, other, *arguments, resume, "--inject=term:step=8")

    assert ends == [[75], [0]]
    assert [e["step"] for e in events(other, "start")] == [6, 8]
    model = "checkpoints/step-00000012/model.safetensors"
    assert (other / model).read_bytes() == (straight / model).read_bytes()


def test_the_best_checkpoint_stays_and_the_folder_never_holds_fewer_than_keep(ranks, tmp_path):
    folder = tmp_path / "run"
    arguments = [*NET, "--task.validation=6", "--steps=20", "--checkpoint.every=3",
                 "--eval.every=2", "--checkpoint.keep=2", "--optim.lr=3", "--optim.name=sgd",
                 "--eval.best=val_loss:min"]

    until_done(ranks, 1, folder, *arguments, "--inject=term:step=14")

    values = {line["step"]: line["val_loss"] for line in validations(folder)
              if line["val_loss"] is not None}
    best = min(values, key=lambda step: values[step])
    kept = {int(p.name[5:]) for p in (folder / "checkpoints").glob("step-????????")}
    assert {best, 20} <= kept
    assert len(kept - {best}) >= 1
    assert summary(folder)["best"]["step"] == best


def test_the_end_of_each_cycle_of_the_rate_is_kept(ranks, tmp_path):
    """Also where a survivor has saved it, and after skipped updates."""
    cycles = [f"--schedule.options={text}" for text in ("T_0=3", "T_mult=2")]

    until_done(ranks, 2, tmp_path / "run", *NET, "--steps=25", "--schedule.name=warm-restarts",
               *cycles, "--schedule.warmup=off", "--checkpoint.every=8", "--checkpoint.keep=1",
               "--checkpoint.keep-every=cycle", "--inject=nan:step=5:always",
               "--inject=kill:rank=1:step=10:phase=step-end")

    assert [info["step"] for info in inspect(tmp_path / "run")["checkpoints"]] == [3, 10, 22, 25]


def test_a_folder_that_was_moved_and_has_lost_its_identity_is_continued(
    ranks, undisturbed, tmp_path
):
    folder = run(ranks, 1, tmp_path / "here", *SHORT, "--inject=term:step=4", code=75)
    folder = Path(shutil.move(folder, tmp_path / "there"))
    (folder / "run.json").write_text('{"run": "ab')

    run(ranks, 1, folder, *SHORT, "--inject=term:step=4")

    assert not list(differences(undisturbed(1, *SHORT), folder))


def test_patience_is_kept_over_restarts(ranks, undisturbed, tmp_path):
    # With this high rate validations get worse and worse: the first one stays the best.
    arguments = [*NET, "--task.validation=6", "--steps=60", "--eval.every=2", "--eval.patience=3",
                 "--eval.best=val_loss:min", "--optim.name=sgd", "--optim.lr=5", "--clip.norm=0",
                 "--schedule.warmup=off"]
    straight, stopped = undisturbed(1, *arguments), tmp_path / "stopped"

    until_done(ranks, 1, stopped, *arguments,
               *(f"--inject={stop}" for stop in stops(3, 4, 5, 6, 7)))

    values = [line["val_loss"] for line in validations(straight)]
    assert values[0] == min(value for value in values if value is not None)
    assert len(values) == 1 + 3
    assert len(steps(straight)) == 2 * 4
    assert not list(differences(straight, stopped))
    early = ", 52 steps before the planned end: stopped early by --eval.patience"
    assert summary(stopped)["stopped_early"]
    assert closing_lines(summary(stopped), "")[0] == f"finished at step 8{early}"
    assert inspect(stopped)["early_end"] == early
    assert figures(read_history(stopped))["state"] == f"finished{early}"


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_step_that_outlasts_the_grace_is_left_and_its_boundary_saved(
    ranks, undisturbed, tmp_path, size
):
    late = ["--stop.grace-s=1", "--inject=term:step=7", "--inject=slow:step=7:seconds=600"]
    stopped = tmp_path / "run"

    assert codes(ranks, size, *SHORT, *late, f"--run-dir={stopped}")[0] == 75

    assert [e["at_step"] for e in events(stopped, "save")] == [6]
    run(ranks, size, stopped, *SHORT, *late)
    assert not list(differences(undisturbed(size, *SHORT), stopped))


@pytest.mark.parametrize(("faults", "ends", "step"), [
    # A stop that can't be saved is a failure on all ranks.
    (["term:step=4", "enospc:step=4:phase=save-begin:always"], [1, 1], 0),
    # A survivor's save is tried once more.
    (["kill:step=6:rank=1", "enospc:phase=save-mid"], [1, -9], 5),
    # A peer that hangs is survived like one that dies; its watchdog ends it.
    (["hang:step=6:rank=0"], [1, 1], 5),
])  # fmt: skip
def test_a_save_at_an_early_end(ranks, tmp_path, faults, ends, step):
    ended = codes(ranks, 2, *SHORT, *(f"--inject={fault}" for fault in faults),
                  "--world.timeout-s=5", f"--run-dir={tmp_path / 'run'}", function=impatient)

    assert ended == ends
    assert inspect(tmp_path / "run")["step"] == step


@pytest.mark.parametrize("size", [0, 100, None])
def test_a_lost_or_cut_product_is_made_again_by_the_same_command(
    ranks, undisturbed, tmp_path, size
):
    folder = Path(shutil.copytree(undisturbed(2, *SHORT), tmp_path / "run"))
    product, results = folder / "model.safetensors", (folder / "summary.json").read_text()
    whole = product.read_bytes()
    product.write_bytes(whole[:size or 0])
    if size is None:
        product.unlink()

    run(ranks, 2, folder, *SHORT)

    assert product.read_bytes() == whole
    again, before = summary(folder), json.loads(results)
    assert [again[key] for key in ("best", "test")] == [before[key] for key in ("best", "test")]


def test_a_run_whose_validations_are_all_nan_comes_to_its_end(ranks, tmp_path):
    folder = run(ranks, 1, tmp_path / "run", *VALIDATED, "--steps=4", "--eval.every=2",
                 "--optim.name=sgd", "--optim.lr=1e30", "--clip.norm=0", "--schedule.warmup=off")

    assert summary(folder)["best"]["value"] is None
    assert "best" not in summary(folder)["model.safetensors"]


PLACES = {
    "meter": (LossMeter, "take_mean", 1),
    "average": (ema, "_copy", 2),  # the first call is that of the first update
    "beginning": (DeviceInterval, "first", 5),  # before the buffers are copied in step 5
}
"""A function, and the call of it after which a loader process is killed."""


def struck(folder: str, *arguments: str) -> int:
    """In a rank: train without a launcher, struck at the place that has the rank's number."""
    place, (owner, name, times) = list(PLACES.items())[int(os.environ["RANK"])]
    for variable in ("RANK", "WORLD_SIZE"):
        del os.environ[variable]
    original, left = getattr(owner, name), iter(range(times)[::-1])

    def then_strike(*given):
        result = original(*given)
        if next(left, None) == 0:
            worker = multiprocessing.active_children()[0]
            os.kill(worker.pid or 0, signal.SIGKILL)
            while worker.is_alive():
                time.sleep(0.01)
            time.sleep(0.01)  # if another thread received the signal, it will arrive
        return result

    setattr(owner, name, then_strike)
    return train(*arguments, f"--run-dir={folder}/{place}")


def test_a_loader_process_dies_while_the_state_is_updated(ranks, undisturbed, tmp_path):
    arguments = [*VALIDATED, "--data.workers=1", "--eval.every=5", "--checkpoint.every=3",
                 "--optim.ema=0.9", "--task.norm=batch"]

    # At the same time, because torch looks for a dead loader process only every 5 s.
    assert codes(ranks, len(PLACES), str(tmp_path), *arguments, function=struck) == [1, 1, 1]
    for place in PLACES:
        run(ranks, 1, tmp_path / place, *arguments)

        assert not list(differences(undisturbed(1, *arguments), tmp_path / place))
