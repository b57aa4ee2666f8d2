"""Pictures of a validation: their files, restored state, and failures as warnings."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from wandb_stand_in import StandIn

from trainer.run.pictures import ANIMATION, Pictures
from trainer.run.recorders import show_samples
from trainer.telemetry.console import Console
from trainer.telemetry.events import Log
from trainer.telemetry.metrics import Metrics
from trainer.telemetry.tensorboard import GuardedSink, TensorBoard
from trainer.telemetry.wandb import WandB


def pictures(folder: Any, draw: Any, shown: list[Any]) -> Pictures:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    return Pictures(draw=draw, folder=folder / "pictures", model=model, log=Log(),
                    show=lambda image, step: shown.append((step, image.shape)))


def test_a_picture_is_drawn_in_eval_mode_and_moves_no_generator_or_buffer(tmp_path):
    modes, shown = [], []

    def draw(model: nn.Module) -> np.ndarray:
        modes.append([m.training for m in model.modules()])
        level = int(torch.rand(()) * 0) + 40
        model.drawn += 1
        return np.full((4, 6, 3), level, dtype=np.uint8)

    taken = pictures(tmp_path, draw, shown)
    taken.model[1].eval()  # train() resets a submodule's mode, as in an evaluation
    taken.model.train()
    taken.model.register_buffer("drawn", torch.zeros(()))
    before = torch.get_rng_state()

    taken.take(7)

    assert torch.equal(torch.get_rng_state(), before)
    assert taken.model.drawn == 0
    assert modes == [[False] * 3]
    assert taken.model.training
    assert shown == [(7, (4, 6, 3))]
    path = tmp_path / "pictures" / "step-00000007.png"
    with Image.open(path) as image:
        assert np.asarray(image).tolist() == np.full((4, 6, 3), 40).tolist()


def test_a_text_is_written_and_shown_in_every_sink(tmp_path, monkeypatch, capfd):
    stand_in, received = StandIn(), []
    monkeypatch.setitem(sys.modules, "wandb", stand_in)

    class Own:
        def text(self, text: str, step: int) -> None:
            received.append((step, text))

    sinks = [TensorBoard(tmp_path / "board", every=1, first=0),
             WandB(tmp_path, "abc", mode="offline", every=1, settings={}),
             GuardedSink("--log.sinks mine:Own", Own, Log()),
             Console(Log(), total=9, every=1, start=0, bar=False)]
    metrics = Metrics()
    metrics.show_in(sinks)
    model = nn.Linear(1, 1)
    taken = Pictures(draw=None, write=lambda model: f"a <b>\n{model.training}", model=model,
                     folder=tmp_path / "pictures", show=metrics.exhibit, log=Log())

    taken.take(4)

    assert (tmp_path / "pictures/step-00000004.txt").read_text() == "a <b>\nFalse"
    assert received == [(4, "a <b>\nFalse")]
    assert stand_in.calls[-1] == ("log", 4, {"validation_text": "<pre>a &lt;b&gt;\nFalse</pre>"})
    assert "step 4/9  a <b>" in capfd.readouterr().err
    assert b"False" in next((tmp_path / "board/train").iterdir()).read_bytes()


def fail(model: nn.Module) -> np.ndarray:
    raise RuntimeError("no pen")


@pytest.mark.parametrize(("draw", "told"), [
    (fail, "RuntimeError: no pen"),
    (lambda model: np.zeros((3, 3)), "ValueError: picture(model) returned "),
    (lambda model: np.zeros((3, 4, 4)), "ValueError: picture(model) returned "),
    (lambda model: np.zeros(()), "ValueError: picture(model) returned ")])
def test_a_picture_that_fails_or_has_another_shape_is_a_warning(tmp_path, capfd, draw, told):
    shown = []
    taken = pictures(tmp_path, draw, shown)

    taken.take(3)
    taken.save_animation(3)

    assert f"no picture of step 3: {told}" in "".join(capfd.readouterr())
    assert not shown
    assert not (tmp_path / "pictures").exists()
    assert taken.model.training


def test_a_picture_of_samples_that_fails_is_a_warning(tmp_path, capfd):
    class Flat:
        def preview(self, number: int) -> np.ndarray:
            return np.zeros((number, 8, 8), np.uint8)

    show_samples(TensorBoard(tmp_path, every=1, first=0), Flat(), Log())

    assert "no picture of samples: the task's preview(32)" in "".join(capfd.readouterr())


def test_the_animation_has_the_pictures_up_to_the_last_step_in_order(tmp_path):
    levels = iter([10, 90, 170, 250])
    taken = pictures(tmp_path, lambda m: np.full((2, 2, 3), next(levels)), [])
    for step in (5, 10, 100, 200):
        taken.take(step)

    taken.save_animation(100)

    frames = []
    with Image.open(tmp_path / "pictures" / ANIMATION) as save_animation:
        for number in range(save_animation.n_frames):
            save_animation.seek(number)
            frames.append(save_animation.convert("RGB").getpixel((0, 0))[0])
    assert frames == [10, 90, 170]
