"""`python -m trainer runs FOLDER …`: runs side by side, as a table in the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.commands.report import figures
from trainer.commands.report.history import is_run
from trainer.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Print the table; exit code 2: a folder has no runs."""
    parser = argparse.ArgumentParser(
        prog="trainer runs", allow_abbrev=False,
        description="Print a table of runs, the best first: the figures of the best validation, "
        "the test metric, the wall time, and the settings in which the runs differ.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER",
                        help="a run, or a folder with runs in it")
    parser.add_argument("--sort", metavar="NAME[:min|max]", help="figure or setting by which runs "
                        "are sorted, such as val_accuracy or optim.lr; default: the metric that "
                        "selects the best weights")
    parser.add_argument("--json", action="store_true",
                        help="print a list of objects with all figures of each run")
    options = parser.parse_args(argv)
    runs = figures.sort_runs(figures.read_runs([*find_runs(options.folders)]), options.sort)
    if options.json:
        settings = figures.differing_settings(runs)
        print(json.dumps([
            {"run": str(run.path), "state": figures.run_state(run),
             "figures": figures.figures_of(run),
             "settings": {name: values[number] for name, values in settings.items()}}
            for number, run in enumerate(runs)], indent=2))
    else:
        print(figures.text_table(figures.run_table(runs, options.sort)))
    return 0


def find_runs(folders: Sequence[Path]) -> Iterator[Path]:
    """The runs among the folders and directly in them, each once, by name in each folder."""
    seen = set[Path]()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder.")
        found = [folder] if is_run(folder) else sorted(
            path for path in folder.iterdir() if path.is_dir() and is_run(path))
        if not found:
            raise ConfigError(f"{folder}: there is no run in this folder; give a run folder, or "
                              "the folder that holds the runs, such as runs.")
        for path in found:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path
