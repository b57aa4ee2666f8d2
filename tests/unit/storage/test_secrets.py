"""Values of settings that are named like a secret: where they are masked, and what still works."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import stat
import sys
from typing import Any

import pytest
from small_task import Small
from torch import nn

import trainer
from trainer import Config, Outcome
from trainer.commands.report import report
from trainer.config import command_line
from trainer.config.compatibility import compare_settings, settings
from trainer.config.schema import Batch, Logging, WorldConfig
from trainer.errors import ConfigError
from trainer.storage import secrets
from trainer.storage.secrets import hide, is_secret, mask_arguments
from trainer.telemetry.events import Log

VALUE, URL = "hunter2-hunter2", "https://me:pass1word@host/data?sig=pass1word"


@dataclasses.dataclass(frozen=True)
class Hub(Small):
    """A task that needs a key to its data, and tells it in an error."""

    api_key: str = ""
    tokens: int = 7
    source: str = ""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    fails: bool = False

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        if self.fails and model.training:
            raise ConnectionError(f"{self.source}: 401 for {self}, {self.api_key}, {self.headers}")
        return super().loss(model, batch)


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_hidden", [])


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
    from wandb_stand_in import StandIn

    run, wandb = tmp_path / "run", StandIn()
    begin = wandb.init
    wandb.init = lambda **options: (begin(**options), wandb.calls.append(tuple(sys.argv)))[0]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(trainer.telemetry.wandb, "check_installed", lambda mode: None)
    monkeypatch.setattr("sys.argv", ["train.py", f"--task.api-key={VALUE}", "--task.api-key", VALUE,
                                     "--task.source", URL])
    task = Hub(api_key=VALUE, source=URL, headers={"password": VALUE[::-1]})

    for steps, fails in ((2, False), (3, True)):
        config = Config(task=dataclasses.replace(task, fails=fails), run=str(run), steps=steps,
                        device="cpu", batch=Batch(global_size=16, micro_size=8),
                        world=WorldConfig(threads=1), log=Logging(wandb="offline"),
                        accept=("task.fails",))
        with pytest.raises(ConnectionError) if fails else contextlib.nullcontext():
            trainer.train(config)
    report.main([str(run)])
    with pytest.raises(ConfigError) as refused:
        command_line.parse_config(["--task.api-key", VALUE, VALUE, "--task=test_secrets:Hub"])

    written = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*")
               if path.is_file()}
    assert b"401 for" in written["events.jsonl"]
    assert any(b"https://***@host" in text for name, text in written.items()
               if name.startswith("tensorboard"))
    for secret in (VALUE, VALUE[::-1], "pass1word"):
        assert [name for name, text in written.items() if secret.encode() in text] == [
            "config.toml"]
        assert secret not in "".join(capsys.readouterr()) + str(wandb.calls) + str(refused.value)
    assert stat.S_IMODE((run / "config.toml").stat().st_mode) == 0o600
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


@pytest.mark.parametrize(("text", "shown"), [
    (f"401 for {VALUE}", "401 for ***"),
    ("Hub(api_key='short', tokens='7')", "Hub(api_key='***', tokens='7')"),
    ('{"password": "pw", "user": "me"}', '{"password": "***", "user": "me"}'),
    ("no column key='image'", "no column key='image'"),
    ("http://me:pw@host:80/data?file=1", "http://***@host:80/data?***"),
    ("s3://bucket/part-??.tar", "s3://bucket/part-??.tar"),
    ("proxy of-the-environment", "proxy ***")])
def test_secrets_are_masked_in_all_text(text, shown, tmp_path, monkeypatch):
    monkeypatch.setenv("PROXY_PASSWORD", "of-the-environment")
    stream = io.StringIO()
    log = Log(stream=stream)
    hide([("api_key", VALUE)])
    log.open_events(tmp_path / "events.jsonl", attempt=0, nonce="n")

    log.event("failure", why=text)
    log.error(text)
    log.close()

    [event] = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["why"], stream.getvalue()) == (shown, f"error: {shown}\n")
