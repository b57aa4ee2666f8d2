"""Common mistakes in a training loop, each compared with the correct loop.

    python -m benchmarks.lessons.wrong_orders [--rows NAME,...]

An MLP on 512 samples of ten classes, 40 updates, one thread, fixed seeds: a matter of seconds. The
mistakes are the rows of the table in docs/the-loop.md. The exit code is 1 if a row does not hold.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import reporting
from benchmarks.lessons import mistakes

PAGE = Path(__file__).parents[2] / "docs/the-loop.md"
MISTAKES = {name.replace("_", "-"): function
            for name, function in inspect.getmembers_static(mistakes, inspect.isfunction)
            if function.__module__ == mistakes.__name__ and not name.startswith("_")}
"""Name of a row → its measurement."""


def rows() -> dict[str, tuple[str, str]]:
    """Name of each row of the page → what is changed, and what happens."""
    return {name: (change, happens) for name, change, happens in
            re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \| .* \|$", PAGE.read_text(), re.M)}


def measure(names: Sequence[str]) -> list[dict[str, Any]]:
    """Measure these rows."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        measured, holds = MISTAKES[name]()
        change, happens = rows()[name]
        found.append({"name": name, "change": change, "happens": happens, "holds": holds,
                      "measured": re.sub(r"(?<=\d)%", " %", measured)})
    return found


def main() -> int:
    parser = reporting.parser("lessons.wrong_orders", __doc__)
    parser.add_argument("--rows", type=reporting.some_of(rows()), default=",".join(rows()),
                        help="names, separated by commas (all)")
    options = parser.parse_args()
    found = measure(options.rows)
    print("| row | what is changed | what happens | measured |\n|---|---|---|---|")
    for row in found:
        told = row["measured"] if row["holds"] else f"DOES NOT HOLD: {row['measured']}"
        print(f"| `{row['name']}` | {row['change']} | {row['happens']} | {told} |")
    return int(not all(row["holds"] for row in found))


if __name__ == "__main__":
    reporting.finish(main)
