"""Values of settings that are named like a secret: where they are masked, and what still works."""

from __future__ import annotations

import dataclasses
import io
import json
import stat
from pathlib import Path

import pytest
from small_task import Small

from trainer import Config
from trainer.commands.library import train
from trainer.commands.report import report
from trainer.config import command_line
from trainer.config.compatibility import compare_settings, settings
from trainer.config.schema import Batch, WorldConfig
from trainer.config.secrets import is_secret, mask_arguments
from trainer.errors import ConfigError
from trainer.telemetry.events import Log

VALUE = "hunter2-hunter2"


@dataclasses.dataclass(frozen=True)
class Hub(Small):
    """A task that needs a key to its data."""

    api_key: str = ""
    tokens: int = 7


@pytest.mark.parametrize(("name", "expected"), [
    ("--task.api-key", True), ("task.hub_token", True), ("task.password", True), ("key", True),
    ("--task.clientSecret", True), ("task.credentials", True), ("task.tokens", False),
    ("task.tokenizer", False), ("task.monkey", False), ("optim.lr", False)])
def test_a_secret_is_told_by_a_word_of_its_name(name, expected):
    assert is_secret(name) == expected


def test_a_command_line_is_masked():
    given = ["x.py", "--task.api-key", "a", "b", "--seed", "3", "--task.token=c"]
    assert mask_arguments(given) == [
        "x.py", "--task.api-key", "***", "***", "--seed", "3", "--task.token=***"]


def test_a_secret_is_written_to_config_toml_alone(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    command = ["train.py", f"--task.api-key={VALUE}", "--task.api-key", VALUE, "--steps=2"]
    monkeypatch.setattr("sys.argv", command)
    config = Config(task=Hub(api_key=VALUE), run=str(run), steps=2, device="cpu",
                    batch=Batch(global_size=16, micro_size=8), world=WorldConfig(threads=1))

    train(config)
    report.main([str(run)])

    holds = [path.relative_to(run) for path in run.rglob("*")
             if path.is_file() and VALUE.encode() in path.read_bytes()]
    assert holds == [Path("config.toml")]
    assert stat.S_IMODE((run / "config.toml").stat().st_mode) == 0o600
    assert VALUE not in "".join(capsys.readouterr())
    again = command_line.parse_config([str(run / "config.toml")])
    assert again.task.api_key == VALUE


def test_another_secret_is_a_change_and_an_unmasked_record_is_none():
    config = Config(task=Hub(api_key=VALUE))
    saved = settings(config)
    assert saved["task.api_key"] != VALUE

    for same in (saved, {**saved, "task.api_key": VALUE}):
        assert compare_settings(config, same, now={}, then={}).label == "exact"
    with pytest.raises(ConfigError, match=r"--task\.api-key was") as caught:
        compare_settings(Config(task=Hub(api_key="other")), saved, now={}, then={})
    assert VALUE not in str(caught.value)


def test_a_secret_is_masked_in_events_and_lines(tmp_path):
    stream = io.StringIO()
    log = Log(stream=stream)
    log.hide([VALUE])
    log.open_events(tmp_path / "events.jsonl", attempt=0, nonce="n")

    log.event("failure", why=f"401 for {VALUE}")
    log.error(f"401 for {VALUE}")
    log.close()

    [event] = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["why"], stream.getvalue()) == ("401 for ***", "error: 401 for ***\n")
