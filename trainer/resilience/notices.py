"""Notices that this machine will be taken away, as spot and preemptible machines get them.

A thread of one rank of each machine asks the metadata service of the provider, or runs a command,
and requests a stop of the run.

Sources: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html,
cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption and
learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from trainer.errors import ConfigError
from trainer.telemetry.events import Log

FLAG = "--stop.on-notice"
POLL_S = 2.0
"""Seconds between two questions, and at least between two starts of a command."""
TIMEOUT_S = 2.0
SILENT_S = 150.0
"""Seconds without an answer until a warning; Azure may take two minutes for the first one."""
METADATA_URL = "TRAINER_METADATA_URL"
"""Environment variable that replaces the address of the metadata service."""
TOKEN_S = 21600
"""Lifetime of the token for AWS."""
_HERE = "http://169.254.169.254"


class NoAnswer(Exception):
    """A source of notices can't be asked."""


class Source:
    """Where notices come from."""

    pause_s, tries = POLL_S, 3  # at the start

    def check(self) -> str:
        """The notice, "" if there is none. Raises NoAnswer."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class _Metadata(Source):
    def __init__(self, address: str) -> None:
        self._address = os.environ.get(METADATA_URL, address).rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _ask(self, path: str, headers: dict[str, str], method: str = "GET") -> tuple[int, str]:
        request = urllib.request.Request(self._address + path, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoAnswer(f"{self._address} doesn't answer: {error}") from None

    def _get(self, path: str, headers: dict[str, str], method: str = "GET") -> str:
        status, body = self._ask(path, headers, method)
        if status != 200:
            raise NoAnswer(f"{self._address}{path} answers with status {status}")
        return body


class Aws(_Metadata):
    """EC2: 404 until the spot instance is to be interrupted, two minutes later."""

    _token = ""

    def __init__(self) -> None:
        super().__init__(_HERE)

    def check(self) -> str:
        for _ in range(2):
            self._token = self._token or self._get("/latest/api/token", {
                "X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}, "PUT")
            status, body = self._ask("/latest/meta-data/spot/instance-action",
                                     {"X-aws-ec2-metadata-token": self._token})
            if status == 200:
                return f"EC2 interrupts this machine: {body}"
            if status == 404:
                return ""
            self._token = ""  # it has expired
        raise NoAnswer(f"{self._address} answers with status {status}")


class Gcp(_Metadata):
    """Compute Engine: TRUE once the machine is preempted, 30 s before its end."""

    def __init__(self) -> None:
        super().__init__("http://metadata.google.internal")

    def check(self) -> str:
        body = self._get("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return "Compute Engine preempts this machine" * (body.strip() == "TRUE")


class Azure(_Metadata):
    """Azure: an event of the machine, at least 30 s before its end."""

    ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")
    _name = ""

    def __init__(self) -> None:
        super().__init__(_HERE)

    def check(self) -> str:
        self._name = self._name or self._get(
            "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
            {"Metadata": "true"}).strip()
        body = self._get("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        try:
            for event in json.loads(body)["Events"]:
                if event["EventType"] in self.ENDS and self._name in event["Resources"]:
                    return f"Azure: {event['EventType']} of {self._name}, {event['NotBefore']}"
        except (ValueError, KeyError, TypeError) as error:
            raise NoAnswer(f"{self._address} answers with other content: {error}") from None
        return ""


class Command(Source):
    """A command of the shell: its exit with 0 is a notice. After another exit it starts again."""

    pause_s, tries = 0.25, 1

    def __init__(self, command: str) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = -math.inf

    def check(self) -> str:
        if self._process is None:
            if time.monotonic() - self._started_s < POLL_S:
                return ""
            self._process = self._start()
        if (code := self._process.poll()) is None:
            return ""
        self._process = None
        if code in (126, 127):
            raise NoAnswer(f"this command can't be run (exit code {code})")
        return f"the command {self._command!r} has ended" if code == 0 else ""

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the command and wait for a moment, in which one that can't be run ends. Where
        `setpriv` is installed it dies with this process."""
        bound = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._started_s = time.monotonic()
        try:
            process = subprocess.Popen(
                [*bound, "/bin/sh", "-c", self._command], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise NoAnswer(f"this command can't be started: {error}") from None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.pause_s)
        return process


PROVIDERS: dict[str, Callable[[], Source]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class NoticeWatch:
    """Asks for notices in a thread, and calls `request` with the first one. `value` is that of the
    flag: aws, gcp, azure, or a command. Raises ConfigError if the source can't be asked."""

    def __init__(self, value: str, request: Callable[[str], object], log: Log) -> None:
        self._value, self._request, self._log = value, request, log
        self._source = PROVIDERS[value]() if value in PROVIDERS else Command(value)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(self._first_answer(),),
                                        name="notices", daemon=True)
        self._thread.start()

    def __enter__(self) -> NoticeWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._thread.join()
        self._source.close()

    def _first_answer(self) -> str:
        for _ in range(self._source.tries):
            try:
                return self._source.check()
            except NoAnswer as error:
                why = error
        raise ConfigError(f"{FLAG} {self._value}: {why}. Use aws, gcp or azure on a machine of "
                          "that provider, a command of the shell that exits with 0 at a notice, "
                          "or off.")

    def _work(self, notice: str) -> None:
        answered_s, is_silent = time.monotonic(), False
        while not notice and not self._closed.wait(self._source.pause_s):
            try:
                notice = self._source.check()
                answered_s = time.monotonic()
            except NoAnswer as error:
                if time.monotonic() - answered_s > SILENT_S and not is_silent:
                    is_silent = True
                    self._log.warning(f"{FLAG} {self._value}: {error}; no notice can arrive")
        if notice:
            self._log.event("notice", why=notice)
            self._log.warning(f"{notice}; the run saves and stops")
            self._request(notice)
