"""The training loop done right once, and each usual mistake beside it: what happens, measured.

    python -m benchmarks.wrong_orders [--rows NAME,...] [--markdown] [--json]

An MLP on 512 samples of ten classes, 40 updates, one thread, fixed seeds: a matter of seconds. Each
row says whether its claim holds in this run; the exit code is 1 if one doesn't. docs/the-loop.md
has the table.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import (  # noqa: F401  # these fill ROWS
    mistakes_in_a_step,
    mistakes_over_steps,
    reporting,
)
from benchmarks.mistakes import ROWS, Row


def measure(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each row with what this run measured."""
    torch.set_num_threads(1)
    found = []
    for one in rows:
        start = time.perf_counter()
        measured, holds = one.measure()
        found.append({"name": one.name, "change": one.change, "happens": one.happens,
                      "measured": re.sub(r"(?<=\d)%", " %", measured), "holds": holds,
                      "seconds": round(time.perf_counter() - start, 2)})
    return found


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """The table of docs/the-loop.md."""
    lines = ["| row | what is changed | what happens | measured |", "|---|---|---|---|"]
    lines += [f"| `{r['name']}` | {r['change']} | {r['happens']} | {r['measured']} |"
              for r in found]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wrong_orders", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in ROWS]
    parser.add_argument("--rows", default=",".join(names), help="names with commas (all)")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--json", action="store_true", help="print the line for programs only")
    options = parser.parse_args()
    chosen = options.rows.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"--rows: no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    found = measure([one for one in ROWS if one.name in chosen])
    if options.markdown:
        print(markdown(found))
    elif not options.json:
        for r in found:
            print(f"{r['name']}: {r['change']}\n    → {r['happens']}\n    "
                  f"{'measured' if r['holds'] else 'DOES NOT HOLD'}: {r['measured']}")
    if not options.markdown:
        reporting.print_json("wrong_orders", machine=reporting.machine(), rows=found)
    raise SystemExit(not all(r["holds"] for r in found))


if __name__ == "__main__":
    reporting.finish(main)
