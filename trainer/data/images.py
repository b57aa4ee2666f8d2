"""Decode image files by PIL."""

from __future__ import annotations

from typing import Any

import numpy as np


def read_rgb(file: Any) -> Any:
    """Read an image of PIL as RGB, from a path or a binary file."""
    from PIL import Image

    with Image.open(file) as image:
        if image.mode.startswith("I"):  # 16-bit grey, which PIL would clip at 255
            grey = np.asarray(image).astype(np.int64) >> 8
            return Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")
