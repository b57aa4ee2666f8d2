"""Durations of training in steps, epochs or percent of the run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

Unit = Literal["steps", "epochs", "percent"]


@dataclass(frozen=True)
class Length:
    """A duration of training: `200` steps, `1ep` epochs, `5%` of the run, or `off`."""

    value: float
    unit: Unit = "steps"

    @classmethod
    def parse(cls, text: str) -> Length:
        """Parse `200`, `1ep`, `0.5ep`, `5%` or `off`.

        Raises:
            ValueError: the text is none of these; names the allowed forms.
        """
        if text.strip() == "off":
            return cls(0.0)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ep|%|)\s*", text)
        if match is None:
            raise ValueError(f"{text!r} is not a length; write 200 (steps), 1ep (epochs), "
                             "5% (of the run) or off")
        value, mark = float(match[1]), match[2]
        if not mark and not value.is_integer():
            part = f"; {100 * value:g} % of the run is written {100 * value:g}%" * (value < 1)
            raise ValueError(f"{text!r} is not a whole number of steps{part}")
        if mark == "%" and value > 100:
            raise ValueError(f"{text!r} is more than the whole run")
        units: dict[str, Unit] = {"": "steps", "ep": "epochs", "%": "percent"}
        return cls(value, units[mark])

    def __str__(self) -> str:
        if self.value == 0:
            return "off"
        number = format(Decimal(repr(self.value)).normalize(), "f")  # all digits, no exponent
        return number + {"steps": "", "epochs": "ep", "percent": "%"}[self.unit]

    def steps(self, *, epoch: int, total: int) -> int:
        """The number of optimizer steps; at least 1, or 0 for `off`.

        Args:
            epoch: steps of an epoch.
            total: steps of the run.
        """
        if self.value == 0:
            return 0
        whole = {"steps": 1.0, "epochs": float(epoch), "percent": total / 100}[self.unit]
        return max(1, round(self.value * whole))
