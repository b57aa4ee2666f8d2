"""An S3 store that fails on request: moto, in a process of its own, with faults around it.

    python -m benchmarks.chaos_store SEED

Prints the port of the store, and the one at which XML-RPC calls the methods of `Faults`; ends with
its stdin.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable
from typing import Any
from xmlrpc.client import ServerProxy
from xmlrpc.server import SimpleXMLRPCServer

from benchmarks import reporting

NETWORK_S = {"cut": 2.0, "slow-store": 3.0, "5xx": 3.0}
"""Kinds of faults, and the mean seconds that each lasts from the first request on."""
SLOW_S, FAILING = 0.6, 0.5
"""Longest delay of a request at a slow store; share of the requests that get a 5xx."""
LATEST_S = 3.0
"""How long after the death of its sender a request may arrive."""
BUCKET = "benchmark"


class FaultyStore(ServerProxy):
    """The methods of `Faults`, in a process that ends with this one. The environment variables name
    its store from now on."""

    def __init__(self, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.chaos_store", str(seed)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=reporting.environment())
        assert self.process.stdout is not None
        if not (ports := self.process.stdout.readline().split()):
            raise SystemExit("the store did not start; pip install 'moto[server]'")
        store, control = (f"http://127.0.0.1:{port}" for port in ports)
        os.environ |= {"AWS_ENDPOINT_URL": store, "AWS_ACCESS_KEY_ID": "benchmark",
                       "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_REGION": "us-east-1",
                       "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        urllib.request.urlopen(urllib.request.Request(
            f"{store}/{BUCKET}", method="PUT", headers={
                "authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/x"}))
        super().__init__(control, allow_none=True)


class _Fault:
    def __init__(self, kind: str, seconds: float) -> None:
        self.kind, self.seconds, self.hits = kind, seconds, 0
        self.until_s: float | None = None  # None before the first request

    def is_on(self) -> bool:
        if self.until_s is None:
            self.until_s = time.monotonic() + self.seconds
        return time.monotonic() < self.until_s


class Faults:
    """A WSGI application around that of moto, and the faults that strike it."""

    def __init__(self, moto: Any, seed: int) -> None:
        self._moto, self._draw = moto, random.Random(seed)
        self._faults: list[_Fault] = []
        self._last_hit_s = 0.0
        self._held_folder: str | None = None
        self._held: threading.Event | None = None

    def disturb(self, kind: str) -> int:
        """Begin a fault of `NETWORK_S` at the next request; its number."""
        self._faults.append(_Fault(kind, NETWORK_S[kind] * self._draw.uniform(0.5, 1.5)))
        return len(self._faults) - 1

    def hits(self, number: int) -> int:
        """How many requests a fault has struck."""
        return self._faults[number].hits

    def disturbed_since(self, moment_s: float) -> bool:
        """Whether a request has been struck since then, by `time.monotonic`."""
        return self._last_hit_s >= moment_s

    def calm(self) -> None:
        """End all faults, and let a held upload go on."""
        for fault in self._faults:
            fault.until_s = 0.0
        self._held_folder = None
        self.release()

    def hold(self, folder: str) -> None:
        """Keep the next upload to a folder of the mirror waiting, before or after it is done."""
        self._held_folder = f"/{folder}/"

    def holds(self) -> bool:
        """Whether such an upload waits."""
        return self._held is not None

    def release(self) -> None:
        """Let the upload go on in up to `LATEST_S`."""
        if self._held is not None:
            threading.Timer(self._draw.uniform(0, LATEST_S), self._held.set).start()
            self._held = None

    def answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request. A fault strikes before moto does it, or loses moto's answer."""
        held, is_done = self._take_hold(environ), self._draw.random() < 0.5
        answer: list[Any] = []
        content = list(self._moto(environ, lambda *parts: answer.extend(parts))) if is_done else []
        if held is not None:
            held.wait(60)
        if self._fails():
            start_response("503 Slow Down", [])
            return [b"<Error><Code>SlowDown</Code></Error>"]
        if not is_done:
            return self._moto(environ, start_response)
        start_response(*answer)
        return content

    def _take_hold(self, environ: dict[str, Any]) -> threading.Event | None:
        if (environ["REQUEST_METHOD"] != "PUT" or self._held_folder is None
                or self._held_folder not in environ["PATH_INFO"]):
            return None
        self._held_folder, self._held = None, threading.Event()
        return self._held

    def _fails(self) -> bool:
        """Whether the answer is a 5xx. Waits if the store is slow; raises ConnectionResetError,
        at which the server closes the connection, if the network is cut."""
        for fault in [fault for fault in self._faults if fault.is_on()]:
            if fault.kind == "5xx" and self._draw.random() >= FAILING:
                continue
            fault.hits += 1
            self._last_hit_s = time.monotonic()
            if fault.kind == "cut":
                raise ConnectionResetError
            if fault.kind == "5xx":
                return True
            time.sleep(self._draw.uniform(0, SLOW_S))
        return False


def main() -> int:
    parser = reporting.parser("chaos_store", __doc__)
    parser.add_argument("seed", metavar="SEED", type=int, help="of the faults")
    seed = parser.parse_args().seed
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *arguments: Any) -> None:
            pass

        def connection_dropped(self, *arguments: Any) -> None:
            self.close_connection = True

    faults = Faults(DomainDispatcherApplication(create_backend_app), seed)
    store = make_server("127.0.0.1", 0, faults.answer, threaded=True, request_handler=Quiet)
    control = SimpleXMLRPCServer(("127.0.0.1", 0), logRequests=False, allow_none=True)
    control.register_instance(faults)
    for server in (store, control):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(store.server_port, control.server_address[1], flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    reporting.finish(main)
