"""Pictures of what the model does, drawn by rank 0 after each validation, and a film of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer import rng
from trainer.buffers import Buffers
from trainer.folder import replace_bytes
from trainer.log import Log

FOLDER, FILM = "pictures", "training.gif"

_FRAME_MS = 250


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Draws a task's pictures into the run's folder and to TensorBoard.

    A picture that fails costs a warning and not the run: nothing else depends on it.

    Args:
        draw: the task's `picture(model)`, HxWx3 uint8.
        folder: the run's folder of pictures.
        show: given each picture and its step.
    """

    draw: Callable[[nn.Module], Any]
    folder: Path
    model: nn.Module
    show: Callable[[Any, int], None]
    log: Log

    def take(self, step: int, *, again: bool = True) -> None:
        """Draw the picture of a step; the model's mode and buffers and the generators stay
        as they are.

        Args:
            again: whether one that is there already is drawn once more.
        """
        path = self._path(step)
        if path.exists() and not again:
            return
        training = self.model.training
        self.model.eval()
        try:
            with rng.preserved(), Buffers(self.model).untouched(set()), torch.no_grad():
                image = np.asarray(self.draw(self.model), dtype=np.uint8)
            if image.shape[2:] != (3,):
                raise ValueError(f"picture(model) gave the shape {image.shape}; H×W×3 is wanted")
            self.folder.mkdir(exist_ok=True)
            replace_bytes(path, [_encoded(_open(image), "PNG")])
        except Exception as error:
            self.log.warning(f"no picture of step {step}: {type(error).__name__}: {error}")
            return
        finally:
            self.model.train(training)
        self.show(image, step)

    def film(self, last: int) -> None:
        """The pictures up to a step, in order, as an animated GIF."""
        paths = [p for p in sorted(self.folder.glob("step-*.png")) if p <= self._path(last)]
        if not paths:
            return
        try:
            from PIL import Image

            frames = []
            for path in paths:
                with Image.open(path) as image:
                    frames.append(image.convert("P", palette=Image.Palette.ADAPTIVE))
            first, *others = frames
            data = _encoded(first, "GIF", save_all=True, append_images=others, loop=0,
                            duration=[_FRAME_MS] * len(others) + [8 * _FRAME_MS])
            replace_bytes(self.folder / FILM, [data])
        except Exception as error:
            self.log.warning(f"no film of the pictures: {type(error).__name__}: {error}")

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.png"


def _open(array: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(array)


def _encoded(image: Any, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
