"""Draw images with captions, and confusion matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RIGHT, WRONG, INK = (30, 120, 60), (190, 40, 40), (40, 40, 40)
CAPTION, GAP = 12, 4
COLUMNS, MIN_SIDE = 6, 112
"""Images in a row, and the least length of their longer side."""
FEW, CELL = 20, 56
"""The most classes whose names a confusion matrix shows, and the side of its cells then."""


def predictions(images: Any, logits: Any, labels: Any, names: Sequence[str]) -> np.ndarray:
    """A grid (HxWx3 uint8) of images (NxCxHxW float, C 1 or 3), each scaled to its own range, with
    the predicted class below each: in green, or in red with the true class if it is wrong. Small
    images are enlarged by an integer factor."""
    from PIL import Image, ImageDraw

    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    pixels = ((images - low) / (high - low).clamp(min=1e-12) * 255).byte().cpu().numpy()
    factor = max(1, -(-MIN_SIDE // max(pixels.shape[2:])))
    pixels = pixels.repeat(factor, 2).repeat(factor, 3).transpose(0, 2, 3, 1)
    pixels = np.broadcast_to(pixels, (*pixels.shape[:3], 3))
    height, width = pixels.shape[1] + CAPTION + GAP, pixels.shape[2] + GAP
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(pixels) // COLUMNS) * height), "white")
    pen = ImageDraw.Draw(sheet)
    shares, found = (tensor.tolist() for tensor in logits.float().softmax(1).max(1))
    for number, (image, share, guess, label) in enumerate(
            zip(pixels, shares, found, map(int, labels), strict=True)):
        name, right = _name(names, guess), guess == label
        caption = f"{name} {100 * share:.0f}%" if right else f"{name}, is {_name(names, label)}"
        x, y = number % COLUMNS * width, number // COLUMNS * height
        sheet.paste(Image.fromarray(np.ascontiguousarray(image)), (x, y))
        pen.text((x, y + pixels.shape[1]), _cut(pen, caption, width - GAP),
                 fill=RIGHT if right else WRONG)
    return np.asarray(sheet)


def is_matrix(table: Any) -> bool:
    """Whether a table is a confusion matrix: two-dimensional and square."""
    shape = np.shape(table)
    return len(shape) == 2 and shape[0] == shape[1]


def matrix(table: Sequence[Sequence[float]], names: Sequence[str]) -> np.ndarray:
    """A confusion matrix, HxWx3 uint8: rows are true classes, columns predicted ones. The shade of
    a cell is its share of the row. With few classes their names and the counts are written too, so
    large that they can be read in a picture of half the size."""
    from PIL import Image, ImageDraw, ImageFont

    counts = np.asarray(table, dtype=np.float64)
    number = len(counts)
    few = number <= FEW
    side = CELL if few else max(4, 700 // number)
    font: Any = ImageFont.load_default(size=22)
    labels = [_name(names, c) for c in range(number)] if few else []
    widths = [round(font.getlength(label)) + 12 for label in labels]
    edge = min(220, max(120, *widths)) if widths else 0
    sheet = Image.new("RGB", (edge + number * side, edge + number * side), "white")
    pen = ImageDraw.Draw(sheet)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    for row in range(number):
        for column in range(number):
            x, y, share = edge + column * side, edge + row * side, shares[row, column]
            tint = RIGHT if row == column else WRONG
            pen.rectangle((x, y, x + side - 2, y + side - 2), fill=tuple(
                round(245 - (245 - part) * share) for part in tint))
            if labels and counts[row, column]:
                text = f"{counts[row, column]:.0f}"
                fitting = font.font_variant(size=min(22, 22 * (side - 6) / font.getlength(text)))
                pen.text((x + side / 2, y + side / 2), text, font=fitting, anchor="mm",
                         fill="white" if share > 0.6 else INK)
    if labels:
        _label(sheet, labels, edge, font)
    return np.asarray(sheet)


def _label(sheet: Any, labels: Sequence[str], edge: int, font: Any) -> None:
    """Write the names of the rows and, turned, those of the columns."""
    from PIL import Image, ImageDraw

    pen = ImageDraw.Draw(sheet)
    pen.text((6, 6), "rows: true\ncolumns: predicted", font=font.font_variant(size=edge / 9),
             fill=INK)
    for place, label in enumerate(labels):
        start, middle = edge + place * CELL, CELL / 2
        label = _cut(pen, label, edge - 12, font)
        pen.text((edge - 6, start + middle), label, font=font, anchor="rm", fill=INK)
        column = Image.new("RGB", (edge, CELL), "white")
        ImageDraw.Draw(column).text((6, middle), label, font=font, anchor="lm", fill=INK)
        # A narrow name leaves room for the corner's text.
        sheet.paste(column.crop((0, 0, round(font.getlength(label)) + 8, CELL)).rotate(
            90, expand=True), (start, edge - round(font.getlength(label)) - 8))


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else str(number)


def _cut(pen: Any, text: str, width: int, font: Any = None) -> str:
    """The longest prefix of a text that fits into `width` pixels."""
    while text and pen.textlength(text, font=font) > width:
        text = text[:-1]
    return text
