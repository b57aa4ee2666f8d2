"""Page of a report: one self-contained HTML file, for any screen size, light and dark."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.commands.report.charts import Plot, css_variables, format_duration
from trainer.commands.report.figures import affected_rank, notable_events
from trainer.commands.report.history import History, flatten
from trainer.resilience.attempts import failure_sentence

MOST = 100
"""Largest number of events, and of attempts, on the page."""

_STYLE = """
:root { color-scheme: light dark; --page: #f5f6f9; --card: #ffffff; --soft: #5b6472;
  --mark: #fff3c9; --ink: var(--c1f2430); --faint: var(--cd4d8e0); --alarm: var(--cc62828);
  %(light)s }
@media (prefers-color-scheme: dark) { :root { --page: #14171d; --card: #1d222b; --soft: #9aa3b2;
  --mark: #4a3f14; %(dark)s } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.45;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
main { max-width: 1240px; margin: auto; padding: 16px }
h1 { font-size: 1.5rem; margin: 8px 0 2px; overflow-wrap: anywhere }
h2 { font-size: 1rem; margin: 0 0 2px }
p { margin: 0 0 8px; overflow-wrap: anywhere }
.soft, figcaption { color: var(--soft); font-size: .85rem }
.facts { display: flex; flex-wrap: wrap; gap: 10px; margin: 12px 0 }
.facts div { background: var(--card); border-radius: 10px; padding: 8px 14px; flex: 1 1 130px }
.facts b { display: block; font-size: 1.25rem }
.cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%%, 340px),
  1fr)) }
.card { background: var(--card); border-radius: 10px; padding: 12px 14px; margin: 0; min-width: 0 }
.summary { margin-bottom: 14px }
.tables { display: flex; flex-wrap: wrap; gap: 0 32px }
.tables table { flex: 1 1 300px; width: auto }
.wide { grid-column: 1 / -1 }
svg { display: block; width: 100%%; height: auto }
svg text { font-family: inherit !important }
.large { display: none }
@media (min-width: 800px) { .large { display: block } .small { display: none } }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%%; font-size: .9rem }
th, td { text-align: left; padding: 4px 10px 4px 0; border-top: 1px solid var(--faint);
  vertical-align: top }
tr.any td { overflow-wrap: anywhere } tr.any td:nth-child(-n+3) { white-space: nowrap }
table.any td:not(:first-child), .more td, .bad td { overflow-wrap: anywhere; min-width: 3.5em }
thead th { border-top: 0; color: var(--soft); font-weight: 600; overflow-wrap: normal }
tr.more td { border-top: 0; color: var(--soft); padding-top: 0 }
tr.differs td, tr.differs th { background: var(--mark) }
.bad { color: var(--alarm) }
details { margin-top: 8px }
summary { cursor: pointer; color: var(--soft) }
"""


def page(
    runs: Sequence[History], found: Sequence[Mapping[str, Any]],
    checkpoints: Sequence[Sequence[Mapping[str, Any]]], drawn: Iterable[Plot], *, now: float,
) -> str:  # fmt: skip
    """Return the text of the page.

    Args:
        found: `figures` of each run.
        checkpoints: `inspect.checkpoints` of each run.
        drawn: the plots, in order.
        now: the current time, in seconds since the epoch.
    """
    title = " · ".join(run.name for run in runs)
    suffixes = [f" of {run.name}" * (len(runs) > 1) for run in runs]
    parts = [
        _summary(runs, found), "<div class=cards>", *(_plot(plot) for plot in drawn),
        *map(_checkpoints, checkpoints, suffixes), *map(_attempts, runs, suffixes),
        *map(_happenings, runs, suffixes),
        _settings("Environment", [flatten(run.environment) for run in runs], runs),
        _settings("Configuration", [run.config for run in runs], runs), "</div>",
    ]  # fmt: skip
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n"
        f"<style>{_STYLE % {'light': css_variables(), 'dark': css_variables(dark=True)}}</style>\n"
        f"</head>\n<body>\n<main>\n<h1>{_text(title)}</h1>\n"
        f"<p class=soft>Made {_text(made)}</p>\n" + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def summary_rows(run: History, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows (name, value) of the summary of a run, the most important first."""
    f = figures
    total = f["step"]
    test = {k: v for k, v in (f["test"] or {}).items() if k not in ("samples",)}
    shown = [
        ("state", format_state(run, f)), ("steps", f"{total:,}"),
        ("loss of the last step", _number(f["loss"])),
        (f"best {_words(f['best_metric'])}", "" if f["best"] is None else
         f"{_number(f['best'])} at step {f['best_step']:,}"),
        *((f"test {name}", _number(value)) for name, value in test.items()),
        ("wall time", format_duration(f["wall_s"])),
        ("goodput", format_goodput(f)),
        ("not useful", ", ".join(f"{part} {format_duration(value)}"
                                 for part, value in f["parts_s"].items()
                                 if part != "useful" and value >= 0.0005) or "nothing"),
        ("attempts", f"{f['attempts']}"), ("injected faults", f"{f['faults']}" * bool(f["faults"])),
        ("repeated steps", f"{f['lost_steps']:,}"),
        ("steps without an update", f"{f['skipped']:,}"),
        ("clipped steps", "" if f["clipped"] is None else
         f"{f['clipped']:.1%}, in the last half {f['clipped_last_half']:.1%}"),
        ("time of a step", "" if f["split_s"] is None else f"{_ms(f['step_s'])}: " + ", ".join(
            f"{part} {_ms(value)}" for part, value in f["split_s"].items() if part != "step")),
        ("samples/s", "" if f["samples_per_s"] is None else f"{f['samples_per_s']:,.0f}"),
        ("memory of a rank", "" if f["memory_mb"] is None else f"{f['memory_mb']:,.0f} MB at most"),
        ("result", " ".join(str(part) for part in (
            (run.environment.get("determinism") or {}).get("label", ""),
            (run.environment.get("determinism") or {}).get("why", "")) if part)),
    ]  # fmt: skip
    return [(what, value) for what, value in shown if value]


def format_state(run: History, figures: Mapping[str, Any]) -> str:
    """Return the state of a run in a few words."""
    if figures["finished"]:
        return "finished"
    if not run.attempt_times:
        return "not started"
    last = run.attempt_times[-1].attempt
    return last.end if last.end != "died" or last.cause else "running, or died"


def format_goodput(figures: Mapping[str, Any]) -> str:
    """Format the useful share of the wall time, and of the wall time without waiting."""
    whole, running = figures["goodput"], figures["goodput_running"]
    if whole is None or running is None:
        return ""
    if not figures["parts_s"]["waiting"]:
        return f"{whole:.1%}"
    return f"{running:.1%} while it ran, {whole:.1%} of the wall time"


def _summary(runs: Sequence[History], found: Sequence[Mapping[str, Any]]) -> str:
    facts = ""
    if len(runs) == 1:
        f = found[0]
        accuracy = (f["test"] or {}).get("accuracy")
        top = [("state", format_state(runs[0], f)), ("step", f"{f['step']:,}"),
               ("test accuracy", "" if accuracy is None else f"{accuracy:.4f}"),
               (f"best {_words(f['best_metric'])}", _number(f["best"])),
               ("goodput" + " while it ran" * (f["parts_s"]["waiting"] > 0),
                "" if f["goodput_running"] is None else f"{f['goodput_running']:.1%}"),
               ("wall time", format_duration(f["wall_s"])),
               ("attempts", str(f["attempts"])),
               ("repeated steps", str(f["lost_steps"]))]
        facts = "<div class=facts>" + "".join(
            f"<div><span class=soft>{_text(what)}</span><b>{_text(value)}</b></div>"
            for what, value in top if value) + "</div>"
    tables = [dict(summary_rows(run, f)) for run, f in zip(runs, found, strict=True)]
    names = list(dict.fromkeys(name for table in tables for name in table))
    head = _names(runs)
    half = (len(names) + 1) // 2 if len(runs) == 1 else len(names)
    shown = ""
    for part in (names[:half], names[half:]):
        body = "".join(_row([name, *(table.get(name, "") for table in tables)]) for name in part)
        if part:
            shown += f"<table class=any><thead>{head}</thead><tbody>{body}</tbody></table>"
    return (f'{facts}<div class="card summary scroll"><h2>Summary</h2>'
            f"<div class=tables>{shown}</div></div>")


def _plot(plot: Plot) -> str:
    drawn = f"<div class=small>{plot.svg()}</div><div class=large>{plot.svg(wide=True)}</div>" if (
        plot.wide) else plot.svg()
    return (f'<figure class="card{" wide" if plot.wide else ""}"><h2>{_text(plot.title)}</h2>'
            f"{drawn}<figcaption>{_text(plot.note)}</figcaption></figure>")


def _attempts(run: History, suffix: str) -> str:
    left_out = max(0, len(run.attempt_times) - MOST)
    body = _row(["…", "", f"{left_out} earlier", "", ""]) if left_out else ""
    for passage in run.attempt_times[left_out:]:
        a = passage.attempt
        body += _row([str(a.number), str(a.world_size), f"{a.start_step:,} – {a.end_step:,}",
                      format_duration(passage.over - passage.begun), a.end])
        if a.cause is not None:
            cause = _text(failure_sentence(a.cause))
            body += f"<tr class=more><td></td><td colspan=4>{cause}</td></tr>"
    head = _row(["attempt", "ranks", "steps", "took", "ended"], "th")
    return _table(f"Attempts{suffix}", head, body, wide=True)


def _happenings(run: History, suffix: str) -> str:
    found = notable_events(run)
    body = "".join(
        _row([format_duration(at), str(affected_rank(event)),
              f"{event.get('at_step', event['step']):,}", text], mark="any")
        for at, event, text in found[:MOST])
    if len(found) > MOST:
        body += _row(["…", "", "", f"{len(found) - MOST} more in events.jsonl"])
    head = _row(["after", "rank", "step", "what"], "th")
    return _table(f"What happened{suffix}", head, body, wide=True) if found else ""


def _checkpoints(found: Sequence[Mapping[str, Any]], suffix: str) -> str:
    body = "".join(
        _row([f"{c['step']:,}", c["kind"] or "–",
              "–" if c["generation"] is None else str(c["generation"]),
              "whole" if c["valid"] else c["why"]], bad=not c["valid"]) for c in found)
    head = _row(["step", "kind", "generation", "state"], "th")
    return _table(f"Checkpoints{suffix}", head, body) if found else ""


def _settings(title: str, values: Sequence[Mapping[str, Any]], runs: Sequence[History]) -> str:
    """Table of settings. With several runs, differing settings are highlighted, the rest folded."""
    names = list(dict.fromkeys(name for own in values for name in own if name != "command"))
    differ = [n for n in names if any(own.get(n) != values[0].get(n) for own in values)]
    head = _names(runs)

    def table(chosen: Sequence[str], mark: str) -> str:
        body = "".join(_row([n, *("" if own.get(n) is None else str(own[n]) for own in values)],
                            mark=mark) for n in chosen)
        return f"<table class=any><thead>{head}</thead><tbody>{body}</tbody></table>"

    same = [name for name in names if name not in differ]
    shown = ""
    if len(runs) > 1:
        shown = table(differ, "differs") if differ else "<p class=soft>The same in all runs.</p>"
    suffix = " that are the same" * (len(runs) > 1)
    folded = (f"<details><summary>{len(same)} values{suffix}</summary>{table(same, '')}"
              "</details>")
    commands = "".join(f"<p class=soft>{_text(' '.join(map(str, own['command'])))}</p>"
                       for own in values if isinstance(own.get("command"), list))
    return (f'<section class="card wide scroll"><h2>{_text(title)}</h2>{commands}{shown}'
            f"{folded if same else ''}</section>")


def _table(title: str, head: str, body: str, *, wide: bool = False) -> str:
    return (f'<section class="card{" wide" * wide} scroll"><h2>{_text(title)}</h2>'
            f"<table><thead>{head}</thead><tbody>{body}</tbody></table></section>")


def _names(runs: Sequence[History]) -> str:
    return _row(["", *(run.name for run in runs)], "th") if len(runs) > 1 else ""


def _row(cells: Sequence[str], tag: str = "td", *, mark: str = "", bad: bool = False) -> str:
    kind = mark or ("bad" if bad else "")
    opened = f'<tr class="{kind}">' if kind else "<tr>"
    return opened + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"


def _words(name: Any) -> str:
    return str(name or "figure").replace("_", " ")


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _ms(seconds: float) -> str:
    text = f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _text(value: str) -> str:
    return html.escape(str(value))
