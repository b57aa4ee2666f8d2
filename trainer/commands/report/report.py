"""`python -m trainer report RUN …`: write the history of runs as one HTML page, and its plots."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from trainer.commands.inspect import checkpoints
from trainer.commands.report.history import read_history
from trainer.commands.report.page import page
from trainer.commands.report.plots import plots
from trainer.errors import ConfigError
from trainer.storage.files import replace_bytes

PAGE, PLOTS = "report.html", "report"


def main(argv: Sequence[str]) -> int:
    """Write the report and print the path of the page."""
    parser = argparse.ArgumentParser(
        prog="trainer report",
        description=f"Write {PAGE}, one self-contained page for a browser, and its plots as PNG "
        f"files in {PLOTS}/. Several runs are shown in the same plots.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, help="folder to write to; default: the first run's")
    options = parser.parse_args(argv)
    print(report(options.runs, options.out or options.runs[0]))
    return 0


def report(runs: Sequence[Path], out: Path) -> Path:
    """Read the runs and write the page and its plots into a folder. Return the path of the page.

    Raises:
        ConfigError: a run does not exist, or the folder cannot be written.
    """
    stories = [read_history(path) for path in runs]
    if len({story.name for story in stories}) < len(stories):
        stories = [dataclasses.replace(story, name=str(story.path)) for story in stories]
    drawn = list(plots(stories))
    text = page(stories, [checkpoints(path) for path in runs], drawn)
    try:
        (out / PLOTS).mkdir(parents=True, exist_ok=True)
        for plot in drawn:
            replace_bytes(out / PLOTS / f"{plot.name}.png", [plot.png()])
        # A file name need not be UTF-8.
        replace_bytes(out / PAGE, [text.encode(errors="surrogateescape")])
    except OSError as error:
        raise ConfigError(f"--out {out}: {error}; choose a folder that can be written.") from error
    return out / PAGE
