"""Draw images with captions, and confusion matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RIGHT, WRONG, INK = (30, 120, 60), (190, 40, 40), (40, 40, 40)
CAPTION, GAP = 12, 4


def captioned(
    images: np.ndarray, captions: Sequence[str], right: Sequence[bool], *, columns: int = 6,
    least_side: int = 112,
) -> np.ndarray:  # fmt: skip
    """A grid (HxWx3 uint8) of images with a green (right) or red (wrong) caption below each.

    Args:
        images: NxCxHxW uint8, C 1 or 3.
        least_side: smaller images are enlarged to at least this many pixels, by an integer factor.
    """
    from PIL import Image, ImageDraw

    factor = max(1, -(-least_side // max(images.shape[2:])))
    shown = images.repeat(factor, 2).repeat(factor, 3).transpose(0, 2, 3, 1)
    shown = np.broadcast_to(shown, (*shown.shape[:3], 3))
    height, width = shown.shape[1] + CAPTION + GAP, shown.shape[2] + GAP
    sheet = Image.new("RGB", (columns * width, -(-len(shown) // columns) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (image, caption, fits) in enumerate(zip(shown, captions, right, strict=True)):
        x, y = number % columns * width, number // columns * height
        sheet.paste(Image.fromarray(np.ascontiguousarray(image)), (x, y))
        text = _cut(pen, caption, width - GAP)
        pen.text((x, y + shown.shape[1]), text, fill=RIGHT if fits else WRONG)
    return np.asarray(sheet)


def predictions(images: Any, logits: Any, labels: Any, names: Sequence[str]) -> np.ndarray:
    """Images (NxCxHxW float) captioned with the predicted class, and with the true class if the
    prediction is wrong. The value range of each image is scaled to 0..255."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    pixels = ((images - low) / (high - low).clamp(min=1e-12) * 255).byte().cpu().numpy()
    share, found = (tensor.tolist() for tensor in logits.float().softmax(1).max(1))
    truth = [int(label) for label in labels]
    captions = [f"{_name(names, f)} {100 * s:.0f}%" if f == t else
                f"{_name(names, f)}, is {_name(names, t)}"
                for f, s, t in zip(found, share, truth, strict=True)]
    return captioned(pixels, captions, [f == t for f, t in zip(found, truth, strict=True)])


def is_matrix(table: Any) -> bool:
    """Whether a table is a confusion matrix: two-dimensional and square."""
    shape = np.shape(table)
    return len(shape) == 2 and shape[0] == shape[1]


def matrix(table: Sequence[Sequence[float]], names: Sequence[str], *, side: int = 34) -> np.ndarray:
    """Draw a confusion matrix, HxWx3 uint8: rows are true classes, columns predicted ones.

    The shade of a cell is its share of the row. With few classes the counts are written too.
    """
    from PIL import Image, ImageDraw

    counts = np.asarray(table, dtype=np.float64)
    number = len(counts)
    few = number <= 20
    side = side if few else max(4, 700 // number)
    labels = [_name(names, c) for c in range(number)] if few else []
    left, top = (84, CAPTION + GAP) if few else (0, 0)
    sheet = Image.new("RGB", (left + number * side, top + number * side), "white")
    pen = ImageDraw.Draw(sheet)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    for row in range(number):
        for column in range(number):
            x, y, share = left + column * side, top + row * side, shares[row, column]
            tint = RIGHT if row == column else WRONG
            pen.rectangle((x, y, x + side - 2, y + side - 2), fill=tuple(
                round(245 - (245 - part) * share) for part in tint))
            if labels and counts[row, column]:
                pen.text((x + 2, y + side // 2 - 6), f"{counts[row, column]:.0f}",
                         fill="white" if share > 0.6 else INK)
    for place, label in enumerate(labels):
        pen.text((2, top + place * side + side // 2 - 6), _cut(pen, label, left - 4), fill=INK)
        pen.text((left + place * side, 0), _cut(pen, label, side - 2), fill=INK)
    return np.asarray(sheet)


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else str(number)


def _cut(pen: Any, text: str, width: int) -> str:
    """The longest prefix of a text that fits into `width` pixels."""
    while text and pen.textlength(text) > width:
        text = text[:-1]
    return text
