"""`python -m trainer report RUN …`: write the history of runs as one HTML page, and its plots."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.commands.inspect import checkpoints
from trainer.commands.report import history
from trainer.commands.report.figures import figures
from trainer.errors import ConfigError

PAGE, PLOTS = "report.html", "report"


def main(argv: Sequence[str]) -> int:
    """Write the report and print the path of the page."""
    parser = argparse.ArgumentParser(
        prog="trainer report",
        description=f"Write {PAGE}, one self-contained page for a browser, and its plots as PNG "
        f"files in {PLOTS}/. Several runs are shown in the same plots.",
    )
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
    from trainer.commands.report.page import page
    from trainer.commands.report.plots import plots

    stories = [history.read_history(path) for path in runs]
    if len({story.name for story in stories}) < len(stories):
        stories = [dataclasses.replace(story, name=str(story.path)) for story in stories]
    drawn = list(plots(stories))
    text = page(stories, [figures(story) for story in stories],
                [checkpoints(path) for path in runs], drawn, now=time.time())
    try:
        (out / PLOTS).mkdir(parents=True, exist_ok=True)
        for plot in drawn:
            _replace(out / PLOTS / f"{plot.name}.png", plot.png())
        # A file name need not be UTF-8.
        _replace(out / PAGE, text.encode(errors="surrogateescape"))
    except OSError as error:
        raise ConfigError(f"--out {out}: {error}; choose a folder that can be written.") from error
    return out / PAGE


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
