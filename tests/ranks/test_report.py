"""`report` and `inspect` of a real run that was killed, skipped a step, was stopped and resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from runs import TAPE, steps, until_done

from trainer.commands import inspect
from trainer.commands.report import history, report
from trainer.commands.report.figures import summary
from trainer.telemetry.events import read_events

TASK = (*TAPE, "--task.norm=batch", "--steps=40", "--clip.norm=0.5",
        "--checkpoint.every=15")  # fmt: skip
FAULTS = ["--inject=kill:rank=1:step=12:phase=backward", "--inject=nan:step=20",
          "--inject=term:step=25"]  # fmt: skip


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory) -> Path:
    """Three attempts of two ranks: killed in step 12, stopped after step 25, finished."""
    path = tmp_path_factory.mktemp("runs") / "night"
    assert until_done(ranks, 2, path, *TASK, *FAULTS) == [[1, -9], [75, 75], [0, 0]]
    return path


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


class Page(HTMLParser):
    """The elements, attributes and text of the report of a run."""

    def __init__(self, run: Path, *, out: Path) -> None:
        super().__init__()
        assert report.main([str(run), "--out", str(out)]) == 0
        self.tags, self.attributes, self.text = set[str](), list[tuple[str, str]](), ""
        self.feed((out / "report.html").read_text())
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += f" {data}"


def test_the_figures_of_a_real_run(run):
    story = history.read_history(run)

    events = read_events(run / "events.jsonl")
    first = min(e["entered"]["start"] for e in events if e["event"] == "first-step")
    assert sum(story.goodput.values()) == pytest.approx(story.wall_s)
    assert story.wall_s == pytest.approx(events[-1]["time"] - first, rel=0.01)
    assert [times.attempt.start_step for times in story.attempt_times] == [0, 11, 25]
    assert story.goodput["useful"] > 0
    assert story.goodput["waiting"] > 0  # no launcher has joined these attempts
    assert story.lost_steps == 0
    assert sum(line["steps"] for line in story.timing) == len(steps(run)) == 40
    norms = [line["grad_norm"] for line in steps(run) if line["grad_norm"] is not None]
    share = sum(norm > 0.5 for norm in norms) / len(norms)
    assert summary(story)["clipped steps"].startswith(f"{share:.1%}, in the last half ")
    assert summary(story)["steps without an update"] == "1"


def test_the_page_shows_the_run_and_is_self_contained(run, tmp_path):
    page = Page(run, out=tmp_path)

    for text in ("night", "finished", "kill:rank=1", "a peer of rank 0 was lost at step 12",
                 "stopped on request after step 25", "whole", "goodput", "clipped steps",
                 "batch.global_size", "Time line", "Learning rate"):
        assert text in page.text, text
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    for name, value in page.attributes:
        assert name not in ("src", "srcset")
        assert not name.startswith("on")
        assert "href" not in name or value.startswith("#")
        assert "url(" not in (value or "") or "url(#" in value
    assert {path.stem for path in (tmp_path / "report").glob("*.png")} >= {
        "loss", "goodput", "timeline", "lr", "gradients", "step-time", "samples", "memory"}


def test_the_texts_of_a_run_are_escaped(copy, tmp_path):
    evil = "<img src=x onerror=alert(1)>&amp;$x_1$"
    path = copy.rename(copy.with_name(evil))
    for name, old in (("events.jsonl", "stopped on"), ("events.jsonl", "kill:rank=1"),
                      ("metrics.jsonl", '"abs'), ("config.toml", '"cosine')):
        text = (path / name).read_text()
        assert old in text
        (path / name).write_text(text.replace(old, old + evil))

    page = Page(path, out=tmp_path / "out")

    assert "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert evil in page.text


def test_an_unfinished_run_can_be_reported(copy, tmp_path):
    (copy / "summary.json").unlink()
    for name in ("events.jsonl", "metrics.jsonl", "timing.jsonl"):
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(data[: len(data) * 2 // 3])
    next(copy.glob("checkpoints/*/model.safetensors")).write_bytes(b"torn")

    page = Page(copy, out=tmp_path / "out")

    assert "finished" not in page.text
    assert "Loss" in page.text
    assert "model.safetensors" in page.text  # of the torn checkpoint


# --- inspect

def test_inspect_prints_the_same_as_text_and_as_json(run, capsys):
    assert inspect.main([str(run)]) == 0
    text = capsys.readouterr().out
    assert inspect.main([str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)

    assert shown.items() >= {"finished": True, "running": False, "step": 40,
                             "world_sizes": [2]}.items()
    assert [a["end"] for a in shown["attempts"]] == ["failure", "stopped", "finished"]
    assert sum(shown["goodput"].values()) == pytest.approx(shown["wall_s"], rel=1e-3)
    assert (shown["next"], shown["does"]) == ("exact", "nothing to do: the run is complete")
    assert "step 40, finished" in text
    assert f"{shown['goodput']['useful'] / shown['wall_s']:.1%}" in text


def rewrite_events(run: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    lines = map(change, read_events(run / "events.jsonl"))
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line))


def test_a_clock_that_is_set_back_hides_no_end(copy):
    rewrite_events(copy, lambda e: e | {"time": e["time"] - 9000 * (e["attempt"] == 2)
                                        - 9000 * (e["event"] in ("end", "stop", "failure"))})

    assert [a["end"] for a in inspect.inspect(copy)["attempts"]] == [
        "failure", "stopped", "finished"]


@pytest.mark.parametrize("is_owner", [True, False])
def test_the_attempt_that_holds_the_lock_is_running_and_not_dead(copy, is_owner):
    rewrite_events(copy, lambda e: None if e["event"] == "end" else e)
    for name in ("summary.json", "lock"):
        (copy / name).unlink()
    nonce = read_events(copy / "events.jsonl")[-1]["nonce"] if is_owner else "of the next one"
    code = ("import pathlib, sys; from trainer.storage.locks import RunLock\n"
            "RunLock(pathlib.Path(sys.argv[1]), sys.argv[2]).take(); print(flush=True); input()")

    with subprocess.Popen([sys.executable, "-c", code, str(copy / "lock"), nonce], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == "\n"
        shown, page = inspect.inspect(copy), summary(history.read_history(copy))["state"]
        owner.communicate("\n")

    expected = "running" if is_owner else "died"
    assert shown["running"]
    assert (shown["attempts"][-1]["end"], page) == (expected, expected)
    assert inspect.inspect(copy)["attempts"][-1]["end"] == "died"


def tear_all(run: Path) -> None:
    for path in (run / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(b"torn")


def fail_thrice(run: Path) -> None:
    start = [e for e in read_events(run / "events.jsonl") if e["event"] == "start"][-1]
    with (run / "events.jsonl").open("a") as file:
        for attempt in (3, 4, 5):
            more = {"attempt": attempt, "time": start["time"] + 100 * attempt}
            failure = {"event": "failure", "why": "ValueError: x", "echo": False,
                       "failed_step": 41, "step": 40}
            file.write(json.dumps(start | more) + "\n" + json.dumps(start | more | failure) + "\n")


@pytest.mark.parametrize(("harm", "label", "why", "does"), [
    (lambda run: None, "exact", "", "continues from step 40"),
    (tear_all, "refused", "there are checkpoints and none is whole", ""),
    (fail_thrice, "refused", "step 41 has failed 3 times in a row: rank ", "gives up"),
])
def test_inspect_shows_what_the_next_start_does(copy, harm, label, why, does):
    (copy / "summary.json").unlink()
    harm(copy)

    shown = inspect.inspect(copy)

    assert (shown["next"], bool(shown["why"])) == (label, bool(why))
    assert shown["why"].startswith(why)
    assert shown["does"].startswith(does)
