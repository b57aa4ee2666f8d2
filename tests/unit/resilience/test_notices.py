"""Notices of the machine's end: the metadata services, and a command."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trainer.errors import ConfigError
from trainer.resilience import notices
from trainer.resilience.notices import NoticeWatch
from trainer.telemetry.events import Log

ACTION = '{"action": "terminate", "time": "2026-01-01T00:00:00Z"}'
EVENT = ('{"Events": [{"EventType": "%s", "Resources": ["%s"], '
         '"NotBefore": "Thu, 01 Jan 2026 00:00:00 GMT"}]}')


class Service:
    """A metadata service: `answers` gives status and body of a (method, path, headers)."""

    def __init__(self) -> None:
        self.answers: Callable[[str, str, dict[str, str]], tuple[int, str]]
        self.asked = queue.Queue[str]()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = service.answers(self.command, self.path, dict(self.headers))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())
                service.asked.put(self.path)

            do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def service(monkeypatch) -> Iterator[Service]:
    made = Service()
    monkeypatch.setenv("TRAINER_METADATA_URL", f"http://127.0.0.1:{made.server.server_port}")
    monkeypatch.setattr(notices.Aws, "pause_s", 0.01)
    monkeypatch.setattr(notices.Gcp, "pause_s", 0.01)
    monkeypatch.setattr(notices.Azure, "pause_s", 0.01)
    yield made
    made.server.shutdown()
    made.server.server_close()


def aws(method, path, headers, *, notice, tokens=("t",)):
    if (method, path) == ("PUT", "/latest/api/token"):
        assert headers["X-Aws-Ec2-Metadata-Token-Ttl-Seconds"] == "21600"
        return 200, tokens[0]
    assert path == "/latest/meta-data/spot/instance-action"
    if headers.get("X-Aws-Ec2-Metadata-Token") != tokens[0]:
        return 401, ""
    return (200, ACTION) if notice else (404, "")


def gcp(method, path, headers, *, notice):
    assert (path, headers["Metadata-Flavor"]) == (
        "/computeMetadata/v1/instance/preempted", "Google")
    return 200, "TRUE" if notice else "FALSE"


def azure(method, path, headers, *, notice, name="vm-1", event="Preempt"):
    assert headers["Metadata"] == "true"
    if path.startswith("/metadata/instance/compute/name"):
        return 200, "vm-1"
    return 200, EVENT % (event, name) if notice else '{"Events": []}'


@pytest.mark.parametrize(("provider", "answer", "text"), [
    ("aws", aws, ACTION), ("gcp", gcp, "preempts"), ("azure", azure, "Preempt of vm-1")])
def test_a_notice_of_a_provider_requests_a_stop(service, provider, answer, text):
    requested = queue.Queue[str]()
    service.answers = lambda *request: answer(*request, notice=False)
    with NoticeWatch(provider, requested.put, Log()):
        for _ in range(6):
            service.asked.get(timeout=10)
        assert requested.empty()
        service.answers = lambda *request: answer(*request, notice=True)
        assert text in requested.get(timeout=10)


def test_an_expired_token_is_renewed(service):
    requested, tokens = queue.Queue[str](), ["first"]
    service.answers = lambda *request: aws(*request, notice=tokens != ["first"], tokens=tokens)
    with NoticeWatch("aws", requested.put, Log()):
        service.asked.get(timeout=10)
        tokens[:] = ["second"]
        assert ACTION in requested.get(timeout=10)


@pytest.mark.parametrize("other", [{"name": "vm-2"}, {"event": "Freeze"}])
def test_an_event_of_another_machine_or_kind_is_none_of_ours(service, other):
    service.answers = lambda *request: azure(*request, notice=True, **other)

    assert notices.Azure().check() == ""


@pytest.mark.parametrize("command", ["exit 0", "read -t 0.1 x; :", "/bin/sh -c 'exit 0'"])
def test_the_exit_of_a_command_requests_a_stop(command):
    requested = queue.Queue[str]()
    with NoticeWatch(command, requested.put, Log()):
        assert command in requested.get(timeout=10)


def test_a_command_that_fails_is_asked_again_and_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(notices, "POLL_S", 0.01)
    requested, mark = queue.Queue[str](), tmp_path / "mark"
    with NoticeWatch(f"test -e {mark}", requested.put, Log()):
        mark.touch()
        assert str(mark) in requested.get(timeout=20)
    began_s = time.monotonic()
    with NoticeWatch("sleep 100", requested.put, Log()) as watch:
        process = watch._source._process
    assert process.returncode == -9
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize("value", ["aws", "gcp", "azure", "awss --now"])
def test_a_source_that_can_not_be_asked_is_refused(service, value):
    service.answers = lambda *request: (500, "")
    with pytest.raises(ConfigError, match=f"^--stop.on-notice {value}: .* or off"):
        NoticeWatch(value, print, Log())
