"""Training on streams: the order is independent of ranks, workers, uneven lanes and stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
import torch
from runs import TAPE, state, steps, validations, weights
from stream_task import LANE, windows


def run(ranks, size: int, folder: Path, *arguments: str, code: int = 0, **fields) -> Path:
    """Train, with a tape of this attempt alone."""
    for tape in folder.parent.glob(f"{folder.name}-tape-*"):
        tape.unlink()
    return runs.run(
        ranks, size, folder, *TAPE[1:-1], "--task=stream_task:StreamTape", "--clip.norm=0",
        f"--task.tape={folder}-tape", *(f"--task.{name}={value}" for name, value in fields.items()),
        "--checkpoint.keep=9", *arguments, code=code)


def whole(folder: Path, size: int) -> list[list[tuple[int, int, tuple]]]:
    """The complete windows of the last attempt; drop_last drops the others."""
    return [window for window in windows(f"{folder}-tape", size, 4) if len(window) == 8]


@pytest.mark.parametrize(("fields", "first_window"), [
    ({"samples": 26}, [0, 4, 1, 5, 2, 6, 3, 7]),
    ({"kind": "lanes", "sizes": "9,6,7,10"},
     [LANE * lane + place for lane in range(4) for place in range(2)]),
])  # fmt: skip
def test_samples_and_draws_are_independent_of_ranks_and_workers(
    ranks, tmp_path, fields, first_window
):
    found = []
    for size, workers in ((1, 0), (2, 2), (3, 0)):
        folder = run(ranks, size, tmp_path / f"run-{size}", "--steps=8",
                     f"--data.workers={workers}", **fields)
        found.append(whole(folder, size))

    assert found[0] == found[1] == found[2]
    assert [window[0][0] for window in found[0]] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [index for _, index, _ in found[0][0]] == first_window
    samples = [(epoch, index) for window in found[0] for epoch, index, _ in window]
    assert len(samples) == len(set(samples)) == 64
    draws = [draw for window in found[0] for *_, draws in window for draw in draws]
    assert len(draws) == len(set(draws)) == 64 * 5


@pytest.mark.parametrize(("drop_last", "sizes", "epoch"), [
    ("on", "10,8", [4, 4, 4, 4]), ("off", "10,8", [4, 4, 4, 4, 2]), ("off", "5,0", [2, 2, 1])])
def test_ranks_with_different_numbers_of_batches_do_not_hang_or_mix_sums(
    ranks, tmp_path, drop_last, sizes, epoch
):
    # Rank 0 has more micro-batches an epoch than rank 1; a validation follows at once.
    found = []
    for size in (1, 2):
        folder = run(ranks, size, tmp_path / f"run-{size}", "--batch.global-size=4", "--steps=10",
                     "--eval.every=5", "--world.timeout-s=10", f"--data.drop-last={drop_last}",
                     kind="lanes", sizes=sizes, validation=7)
        found.append((steps(folder), validations(folder)))

    for lines, scores in found:
        assert [line["samples"] for line in lines] == (epoch * 4)[:10]
        assert [line["val_samples"] for line in scores] == [7, 7]
    for place, key in enumerate(("loss", "val_loss")):
        one, two = ([line[key] for line in lines[place]] for lines in found)
        assert one == pytest.approx(two, rel=1e-5)


def test_the_partial_last_window_of_an_epoch_has_no_effect(ranks, tmp_path):
    # Both runs use the same samples: the first 8 of each lane. With fp16 the state of the gradient
    # scaler must be restored too.
    folders = [
        run(ranks, 2, tmp_path / f"run-{sizes}", "--steps=8",
            "--precision.dtype=fp16", kind="lanes", sizes=sizes, norm="batch", dropout="0.1")
        for sizes in ("8,8,8,8", "9,8,11,10")
    ]  # fmt: skip

    assert steps(folders[0]) == steps(folders[1])
    first, second = (weights(folder, 8) for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("fields", [{"kind": "nodes", "sizes": "9,8,11,10"}, {"samples": 35}])
def test_a_stopped_run_continues_with_the_next_sample_on_any_number_of_ranks_and_workers(
    ranks, tmp_path, fields
):
    # 4 steps an epoch: it stops in the middle of epochs 1 and 2, the second time one step later.
    straight = whole(run(ranks, 1, tmp_path / "straight", "--steps=14", "--data.workers=0",
                         **fields), 1)  # fmt: skip
    folder, found, positions = tmp_path / "run", [], []

    for size, workers, end in ((2, 2, 7), (1, 0, 10), (2, 0, 11), (3, 2, 14)):
        stop = [f"--inject=term:step={end}"] if end < 14 else []
        run(ranks, size, folder, "--steps=14", f"--data.workers={workers}", "--data.prefetch=4",
            *stop, code=75 if stop else 0, **fields)
        found.append(whole(folder, size))
        positions.append(state(folder, end)["parts"]["stream"])

    assert [len(part) for part in found] == [7, 3, 1, 3]
    assert [window for part in found for window in part] == straight
    assert [(p["epoch"], p["start"]) for p in positions] == [(1, 4), (2, 8), (2, 8), (3, 12)]
    assert [p["feeds"][-1]["windows"] for p in positions] == [3, 2, 3, 2]


def test_a_lane_with_a_state_dict_is_not_read_again(ranks, tmp_path):
    log = tmp_path / "log"
    fields = {"kind": "stateful", "sizes": "20,20,20,20", "log": str(log)}
    arguments = ["--steps=8", "--data.workers=0"]
    run(ranks, 2, tmp_path / "run", *arguments, "--inject=term:step=6", code=75, **fields)
    log.unlink()

    run(ranks, 1, tmp_path / "run", *arguments, **fields)

    assert [why for why in state(tmp_path / "run", 8)["inexact"] if "stream" in why] == []
    read = [index for _, index in map(json.loads, log.read_text().splitlines())]
    fingerprint, read = read[:16], read[16:]
    assert fingerprint == list(range(16))
    assert sorted(read) == [LANE * lane + place for lane in range(4) for place in range(12, 16)]


@pytest.mark.parametrize(("arguments", "flag"), [
    (["--epochs=2"], "--steps"),
    (["--steps=4", "--eval.every=off", "--checkpoint.every=1ep"], "--checkpoint.every 1ep"),
    (["--steps=4"], "--eval.every 1ep"),
])  # fmt: skip
def test_lengths_in_epochs_of_a_stream_without_a_length_are_refused(
    ranks, tmp_path, capsys, arguments, flag
):
    run(ranks, 1, tmp_path / "run", *arguments, code=2, samples=64, validation=8)

    assert f"{flag}: the training stream has no length" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("sizes", "drop_last"), [("9,9,9,1", "on"), ("0,0,0,0", "off")])
def test_an_epoch_without_a_global_batch_is_an_error(ranks, tmp_path, sizes, drop_last):
    run(ranks, 2, tmp_path / "run", "--steps=4", "--data.workers=0",
        f"--data.drop-last={drop_last}", code=2, kind="lanes", sizes=sizes)  # fmt: skip


@pytest.mark.parametrize(("size", "workers", "first"), [(1, 0, 8), (2, 2, 7)])
def test_after_a_rollback_a_stream_is_read_from_the_older_position(
    ranks, tmp_path, size, workers, first
):
    # Steps 7 to 12 are epoch 1, whose sample 1 is the first of step 7.
    bad = ["--task.bad=25"] if first == 7 else [
        f"--inject=nan:step={step}" for step in (8, 9, 10)]
    common = ("--steps=14", "--checkpoint.every=5", f"--data.workers={workers}", *bad)
    back, on = (run(ranks, size, tmp_path / f"row-{row}", *common,
                    f"--nonfinite.max-in-row={row}", samples=48) for row in (3, 0))

    lines = steps(back)
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert [line["step"] for line in lines if line.get("skipped")] == [first, first + 1, first + 2]
    # The steps from 6 on (an epoch ends there) are repeated; the bad ones are not.
    all_on = whole(on, size)
    assert whole(back, size) == [
        *all_on[: first + 2], *all_on[5 : first - 1], *all_on[first + 2 :]]
    one, other = (weights(folder, 14) for folder in (back, on))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_wrong_state_is_refused_by_name_and_each_way_on_works(ranks, tmp_path, capsys):
    fields = {"kind": "behind", "sizes": "20,20,20,20"}
    straight = whole(run(ranks, 1, tmp_path / "straight", "--steps=6", "--data.workers=0",
                         kind="lanes", sizes="20,20,20,20"), 1)
    run(ranks, 2, tmp_path / "refused", "--steps=6", code=2, **fields)
    assert "the state of stream_task.Behind after 2 samples of lane 0 of the training stream " \
        "brings back another sample 2" in capsys.readouterr().out
    assert not (tmp_path / "refused").exists()

    for way in ("read-through", "state"):
        folder, found = tmp_path / way, []
        for stop in (["--inject=term:step=3"], []):
            run(ranks, 2, folder, "--steps=6", f"--data.stream-resume={way}", *stop,
                code=75 if stop else 0, **fields)
            found += whole(folder, 2)
        assert (found == straight) == (way == "read-through")
        inexact = " ".join(state(folder, 6)["inexact"])
        assert ("another sample 2" in inexact) == (way == "state")
