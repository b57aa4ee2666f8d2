"""`python -m trainer lr-find`: a learning-rate range test on the real task."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from trainer.commands.report.plots import smooth
from trainer.commands.scratch_run import next_step, scratch_run
from trainer.config import command_line
from trainer.errors import ConfigError
from trainer.optim.named_optimizers import NamedOptimizers

SMOOTHING = 0.9
"""Decay of the exponential average of the losses."""
DIVERGED = 4.0
"""The test ends when the smoothed loss is this many times its minimum."""
ROWS = 20
"""Rows of the printed table."""


class Suggestion(NamedTuple):
    """The rates at which the smoothed loss falls fastest and is lowest, and the suggested one: a
    tenth of the latter, or 0 if the loss never fell."""

    steepest: float
    lowest: float
    rate: float


def suggest(rates: Sequence[float], losses: Sequence[float]) -> Suggestion:
    """Suggest a rate from the losses of steps at increasing rates.

    The range test is that of Smith, "Cyclical learning rates for training neural networks", 2015.
    """
    smoothed = smooth(losses, SMOOTHING)
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    start = min(lowest, len(smoothed) // 10)
    fall = [(smoothed[i + 1] - smoothed[i]) / math.log(rates[i + 1] / rates[i])
            for i in range(start, lowest)]
    if not fall or smoothed[start] - smoothed[lowest] <= 0.02 * abs(smoothed[start]):
        return Suggestion(0.0, rates[lowest], 0.0)
    return Suggestion(rates[start + fall.index(min(fall))], rates[lowest], rates[lowest] / 10)


def main(argv: Sequence[str]) -> int:
    """Run the range test, print its result, return the exit code."""
    parser = argparse.ArgumentParser(
        prog="trainer lr-find", allow_abbrev=False,
        description="Train for a few steps at an increasing learning rate, discard the weights, "
        "and suggest a rate. The other arguments are those of a training run.")
    parser.add_argument("--from", dest="low", type=float, default=1e-6, help="first rate (1e-6)")
    parser.add_argument("--to", dest="high", type=float, default=10.0, help="last rate (10)")
    parser.add_argument("--points", type=int, default=100, help="steps (100)")
    parser.add_argument("--plot", type=Path, default=Path("lr-find.png"),
                        help="file of the plot (lr-find.png)")
    options, rest = command_line.split(parser, argv)
    if not 0 < options.low < options.high < math.inf:
        raise ConfigError(f"--from {options.low:g} --to {options.high:g}: use two rates above 0, "
                          "the lower one first.")
    if options.points < 10:
        raise ConfigError(f"--points {options.points}: use 10 or more.")
    try:
        Figure().savefig(options.plot)  # before anything is measured
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {options.plot}: {error}; choose another file.") from error
    rates, losses = _run_range_test(rest, options.low, options.high, options.points)
    if len(losses) < 2:
        print("the loss was not finite in the first steps: no suggestion")
        return 1
    found, smoothed = suggest(rates, losses), smooth(losses, SMOOTHING)
    print(f"{'rate':>10}  {'loss':>10}  {'smoothed':>10}")
    for i in range(0, len(rates), math.ceil(len(rates) / ROWS)):
        print(f"{rates[i]:>10.2e}  {losses[i]:>10.4g}  {smoothed[i]:>10.4g}")
    if found.rate:
        print(f"steepest fall at {found.steepest:.2e}, lowest at {found.lowest:.2e}")
        print(f"suggestion: --optim.lr {found.rate:.1e}")
    else:
        print("the loss never fell: no suggestion; look at the data and the loss first, or widen "
              "--from and --to")
    _plot(options.plot, rates, losses, smoothed, found)
    print(f"plot: {options.plot}")
    return 0


def _run_range_test(
    argv: Sequence[str], low: float, high: float, points: int
) -> tuple[list[float], list[float]]:
    """Return the rates, and for each the loss of its step before the update, until they diverge."""
    rates: list[float] = []
    losses: list[float] = []
    with scratch_run(argv, steps=points, command="lr-find") as run:
        if isinstance(run.state.optimizer, NamedOptimizers):
            raise ConfigError("trainer lr-find varies one rate, that of --optim.lr; the task's "
                              "optimizers(model) sets the rates, so try them there.")
        groups = run.state.optimizer.param_groups
        shares = [group["lr"] / run.context.config.optim.lr for group in groups]
        for number, rate in enumerate(np.geomspace(low, high, points).tolist()):
            for group, share in zip(groups, shares, strict=True):
                group["lr"] = rate * share
            loss = next_step(run).loss
            if loss is None or not math.isfinite(loss):
                break
            rates.append(rate)
            losses.append(loss)
            smoothed = smooth(losses, SMOOTHING)
            if smoothed[-1] > DIVERGED * max(min(smoothed), 1e-12) and number > points // 10:
                break
    return rates, losses


def _plot(
    path: Path, rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float],
    found: Suggestion,
) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.semilogx(rates, losses, color="0.8", label="loss")
    axes.semilogx(rates, smoothed, color="tab:blue", label="smoothed")
    if found.rate:
        axes.axvline(found.rate, color="tab:green", linestyle="--",
                     label=f"suggestion {found.rate:.1e}")
    low, high = min(smoothed), max(smoothed[: max(2, len(smoothed) // 2)])
    axes.set_ylim(low - 0.1 * (high - low), high + 0.5 * (high - low) + 1e-9)
    axes.set_xlabel("learning rate")
    axes.legend()
    figure.savefig(path, dpi=120)
