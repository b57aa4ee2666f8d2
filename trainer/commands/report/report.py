"""`python -m trainer report RUN …`: write the history of runs as one HTML page, and its plots.

The page is self-contained, and fits any screen size and the light or dark scheme.
"""

from __future__ import annotations

import argparse
import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.commands.inspect import checkpoints, list_mirror
from trainer.commands.report import figures
from trainer.commands.report.figures import DEATH, affected_rank, format_duration
from trainer.commands.report.history import History, flatten
from trainer.commands.report.plots import SERIES, Plot, class_names, last_table, plots
from trainer.errors import ConfigError
from trainer.resilience.attempts import failure_sentence
from trainer.run.run_source import reading_mirror
from trainer.run.saved_run import config_error_on_write
from trainer.storage import layout
from trainer.storage.files import make_subfolder, replace_bytes
from trainer.storage.object_store import path_or_url
from trainer.telemetry.classification import per_class
from trainer.telemetry.events import writable

PAGE, PLOTS = "report.html", layout.REPORT
MOST = 100
"""Largest number of rows of a table."""

_STYLE = """
:root { color-scheme: light dark; --page: #f5f6f9; --card: #ffffff; --soft: #5b6472;
  --mark: #fff3c9; --ink: #1f2430; --faint: #d4d8e0; --alarm: #c62828 }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171d; --card: #1d222b; --soft: #9aa3b2; --mark: #4a3f14; --ink: #e4e8f0;
    --faint: #39404d; --alarm: #ff7a70 }
  svg, .dot { filter: invert(.88) hue-rotate(180deg) } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.45;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
main { max-width: 1240px; margin: auto; padding: 16px }
h1 { font-size: 1.5rem; margin: 8px 0 2px }
h2 { font-size: 1rem; margin: 0 0 2px }
h1, p, td, dd { overflow-wrap: anywhere }
p { margin: 0 0 8px }
.soft { color: var(--soft); font-size: .85rem }
.cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px),
  1fr)) }
.card { background: var(--card); border-radius: 10px; padding: 12px 14px; margin: 0; min-width: 0;
  overflow-x: auto }
.wide { grid-column: 1 / -1 }
dl { columns: 320px; column-gap: 32px; margin: 0; font-size: .9rem }
dl div { break-inside: avoid; display: flex; gap: 14px; padding: 4px 0;
  border-top: 1px solid var(--faint) }
dt { flex: 0 0 40%; color: var(--soft) }
dd { margin: 0 }
svg { display: block; width: 100%; height: auto }
.wide svg { min-width: 760px }
.runs td, .runs th { white-space: nowrap }
.dot { font-size: 1.2em; line-height: 1 }
svg text { font-family: inherit !important }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
th, td { text-align: left; padding: 4px 10px 4px 0; border-top: 1px solid var(--faint);
  vertical-align: top; min-width: 3.5em }
th { border-top: 0; color: var(--soft); font-weight: 600 }
.differs td { background: var(--mark) }
.bad td { color: var(--alarm) }
summary { cursor: pointer; color: var(--soft); margin-top: 8px }
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="trainer report",
        description=f"Write {PAGE}, one self-contained page for a browser, and its plots as PNG "
        f"files in {PLOTS}/. Several runs are shown as a sorted table and in the same plots.")
    parser.add_argument("runs", type=path_or_url, nargs="+", metavar="RUN",
                        help="a run folder, or the URL of its mirror")
    parser.add_argument("--out", type=Path, help="folder to write to; default: the first run's")
    parser.add_argument("--sort", metavar="NAME[:min|max]", help="figure or setting by which runs "
                        "are sorted, such as val_accuracy or optim.lr; default: the metric that "
                        "selects the best weights")
    parser.add_argument("--text", action="store_true",
                        help="print the figures, or the table of runs, and write no files")
    options = parser.parse_args(argv)
    out = options.out or options.runs[0]
    if isinstance(out, str) and not options.text:
        raise ConfigError(f"--out: the report of {out} needs a folder on this machine; add "
                          "--out report.")
    stories = figures.read_runs(options.runs)
    found = {story.path: run for story, run in zip(stories, options.runs, strict=True)}
    stories = figures.sort_runs(stories, options.sort)
    if options.text:
        rows = (figures.run_table(stories, options.sort) if len(stories) > 1 else
                figures.summary(stories[0]).items())
        print(figures.text_table([list(row) for row in rows]))
        return 0
    drawn = sorted(plots(stories), key=lambda plot: plot.of_one)
    text = _page(stories, drawn, options.sort, {p: _listed(run) for p, run in found.items()})
    with config_error_on_write(f"--out {out}", "choose a folder that can be written"):
        make_subfolder(out / PLOTS)
        for plot in drawn:
            replace_bytes(out / PLOTS / f"{plot.name}.png", [plot.png()])
        replace_bytes(out / PAGE, [text.encode()])
    print(out / PAGE)
    return 0


def _listed(run: Path | str) -> list[dict[str, Any]]:
    """The checkpoints of a run; in a mirror, their files are not read."""
    if isinstance(run, Path):
        return checkpoints(run)
    with reading_mirror(run) as mirror:
        return list_mirror(mirror)["checkpoints"]


def _page(runs: Sequence[History], plots: Sequence[Plot], sort: str | None,
          saved: Mapping[Path, Sequence[Mapping[str, Any]]]) -> str:
    several = len(runs) > 1
    title = _text(f"{len(runs)} runs" if several else runs[0].name)
    suffixes = [f" of {run.name}" * several for run in runs]
    cards = [
        _ranking(runs, sort) if several else _summary(runs),
        *(_plot(plot) for plot in plots if not plot.of_one), _summary(runs) * several,
        *(_plot(plot) for plot in plots if plot.of_one), *map(_classes, runs, suffixes),
        *(_checkpoints(saved[run.path], suffix)
          for run, suffix in zip(runs, suffixes, strict=True)),
        *map(_attempts, runs, suffixes), *map(_happenings, runs, suffixes),
        _settings("Environment", [flatten(run.environment) for run in runs], runs),
        _settings("Configuration", [run.config for run in runs], runs)]
    made = _text(time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{title}</h1>\n<p class=soft>Made {made}</p>\n<div class=cards>\n" + "\n".join(cards)
        + "\n</div>\n</main>\n</body>\n</html>\n")


def _ranking(runs: Sequence[History], sort: str | None) -> str:
    """The table of runs, each with the colour of its curves."""
    head, *rows = figures.run_table(runs, sort)
    body = _row(head, tag="th")
    for number, cells in enumerate(rows):
        dot = f'<span class=dot style="color:{SERIES[number % len(SERIES)]}">●</span> '
        body += _row(cells).replace("<td>", f"<td>{dot}", 1)
    return _card("Runs", f"<table class=runs>{body}</table>")


def _classes(run: History, suffix: str) -> str:
    """Precision, recall, F1 and IoU of each class, from the last validation with a table."""
    if (line := last_table(run)) is None:
        return ""
    table = torch.tensor(line["val_table"])
    if table.shape[1:] not in ((len(table),), (2, 2)):
        return ""
    samples = table.sum(1) if table.dim() == 2 else table[:, 1].sum(1)
    found = per_class(table)
    rows = [_row([name, f"{samples[c]:,.0f}", *(f"{values[c]:.4f}" for values in found.values())])
            for c, name in enumerate(class_names(run, len(table)))]
    return _table(f"Classes{suffix}, validation at step {line['step']:,}",
                  ("class", "samples", *found), rows)


def _summary(runs: Sequence[History]) -> str:
    found = [figures.summary(run) for run in runs]
    if len(runs) > 1:
        names = list(dict.fromkeys(name for own in found for name in own))
        return _card("Summary", _comparison(names, found, runs))
    rows = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
                   for name, value in found[0].items())
    return _card("Summary", f"<dl>{rows}</dl>")


def _plot(plot: Plot) -> str:
    return _card(plot.title, f"{plot.svg()}<p class=soft>{_text(plot.note)}</p>", wide=plot.wide)


def _checkpoints(found: Sequence[Mapping[str, Any]], suffix: str) -> str:
    rows = [_row([f"{c['step']:,}", c["kind"] or "–",
                  "–" if c["generation"] is None else c["generation"],
                  "whole" if c["valid"] else c["why"]], "" if c["valid"] else "bad") for c in found]
    return _table(f"Checkpoints{suffix}", ("step", "kind", "generation", "state"), rows)


def _attempts(run: History, suffix: str) -> str:
    rows = []
    for times in run.attempt_times:
        a = times.attempt
        rows.append(_row([
            a.number, a.world_size, f"{a.start_step:,} – {a.end_step:,}",
            format_duration(times.over - times.begun),
            DEATH if times in run.deaths else a.end if a.cause is None
            else f"{a.end}: {failure_sentence(a.cause)}"], "bad" if times in run.deaths else ""))
    return _table(f"Attempts{suffix}", ("attempt", "ranks", "steps", "took", "ended"), rows)


def _happenings(run: History, suffix: str) -> str:
    rows = [_row([format_duration(event["time"] - run.begun), affected_rank(event),
                  f"{event.get('at_step', event['step']):,}", text])
            for event, text in figures.notable_events(run)]
    return _table(f"What happened{suffix}", ("after", "rank", "step", "what"), rows)


def _settings(title: str, values: Sequence[Mapping[str, Any]], runs: Sequence[History]) -> str:
    """Table of settings. With several runs, differing settings are highlighted, the rest folded."""
    names = list(dict.fromkeys(name for own in values for name in own if name != "command"))
    differ = [n for n in names if any(own.get(n) != values[0].get(n) for own in values)]
    same = [name for name in names if name not in differ]
    body = "".join(f"<p class=soft>{_text(' '.join(own['command']))}</p>"
                   for own in values if "command" in own)
    if differ:
        body += _comparison(differ, values, runs, "differs")
    return _card(title, f"{body}<details><summary>{len(same)} values"
                 f"{' that are the same' * (len(runs) > 1)}</summary>"
                 f"{_comparison(same, values, runs)}</details>")


def _comparison(
    names: Sequence[str], values: Sequence[Mapping[str, Any]], runs: Sequence[History],
    kind: str = "",
) -> str:
    """Table with a row for each name and a column for each run."""
    head = _row(["", *(run.name for run in runs)], tag="th") if len(runs) > 1 else ""
    rows = [_row([name, *("" if own.get(name) is None else own[name] for own in values)], kind)
            for name in names]
    return f"<table>{head}{''.join(rows)}</table>"


def _table(title: str, head: Sequence[str], rows: Sequence[str]) -> str:
    if len(rows) > MOST:
        title += f": the last {MOST} of {len(rows)}"
    body = _row(head, tag="th") + "".join(rows[-MOST:])
    return _card(title, f"<table>{body}</table>") if rows else ""


def _card(title: str, body: str, *, wide: bool = True) -> str:
    return f'<section class="card{" wide" * wide}"><h2>{_text(title)}</h2>{body}</section>'


def _row(cells: Sequence[object], kind: str = "", *, tag: str = "td") -> str:
    found = "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells)
    return f'<tr class="{kind}">{found}</tr>'


def _text(value: object) -> str:
    return html.escape(writable(str(value)))
