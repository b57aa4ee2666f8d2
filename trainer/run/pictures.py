"""A task's pictures and texts of the model, made by rank 0 after each validation."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer import rng
from trainer.checkpoint.buffers import Buffers
from trainer.run.model_modes import eval_mode
from trainer.storage import layout
from trainer.storage.files import make_subfolder, open_regular, replace_bytes
from trainer.telemetry.events import Log, writable

ANIMATION, _FRAME_MS = "training.gif", 250


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Makes a task's pictures (`picture(model)`, HxWx3 uint8) and texts (`text(model)`), saves and
    shows them. An error is only a warning."""

    draw: Callable[[nn.Module], Any] | None
    write: Callable[[nn.Module], str] | None = None
    folder: Path
    model: nn.Module
    show: Callable[[Any, int], None]
    """Shows a picture, or a text, of a step."""
    log: Log

    def take(self, step: int, *, again: bool = True) -> None:
        """Make the picture and the text of a step (`again`: even if their files exist)."""
        if self.draw is not None:
            self._take(self._path(step), partial(self._picture, self.draw), step, again=again)
        if self.write is not None:
            self._take(self._path(step).with_suffix(".txt"), partial(self._text, self.write), step,
                       again=again)

    def _take(self, path: Path, make: Callable[[], tuple[Any, bytes]], step: int, *, again: bool
              ) -> None:
        if path.exists() and not again:
            return
        try:
            with eval_mode(self.model), Buffers(self.model).preserved(), torch.no_grad():
                rng.seed_all(rng.EVALUATE, step)
                made, data = make()
            make_subfolder(self.folder)
            aside = path.with_suffix(".tmp")  # not fsynced: the other ranks wait in a step
            with open(open_regular(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(data)
            aside.rename(path)
        except Exception as error:
            what = "text" if path.suffix == ".txt" else "picture"
            self.log.warning(f"no {what} of step {step}: {type(error).__name__}: {error}")
            return
        self.show(made, step)

    def _picture(self, draw: Callable[[nn.Module], Any]) -> tuple[Any, bytes]:
        from PIL import Image

        image = np.asarray(draw(self.model), dtype=np.uint8)
        if image.shape[2:] != (3,):
            raise ValueError(f"picture(model) returned shape {image.shape}; return H×W×3")
        return image, _encoded(Image.fromarray(image), "PNG")

    def _text(self, write: Callable[[nn.Module], str]) -> tuple[str, bytes]:
        text = write(self.model)
        if not isinstance(text, str):
            raise TypeError(f"text(model) returned a {type(text).__name__}; return a str")
        return writable(text), text.encode(errors="replace")

    def save_animation(self, last: int) -> None:
        """Save the pictures up to a step as an animated GIF."""
        paths = [p for p in sorted(self.folder.glob("step-*.png")) if p <= self._path(last)]
        if not paths:
            return
        try:
            from PIL import Image

            frames = []
            for path in paths:
                with open(open_regular(path), "rb") as file, Image.open(file) as image:
                    frames.append(image.convert("P", palette=Image.Palette.ADAPTIVE))
            first, *others = frames
            data = _encoded(first, "GIF", save_all=True, append_images=others, loop=0,
                            duration=[_FRAME_MS] * len(others) + [8 * _FRAME_MS])
            replace_bytes(self.folder / ANIMATION, [data])
        except Exception as error:
            self.log.warning(f"no animation of the pictures: {type(error).__name__}: {error}")

    def _path(self, step: int) -> Path:
        return self.folder / f"{layout.step_name(step)}.png"


def _encoded(image: Any, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
