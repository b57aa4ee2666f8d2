"""Object stores for tests: S3 and Google's, by moto in this process, and Azure's."""

from __future__ import annotations

import base64
import hmac
import json
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import obstore
from machine import free_port
from moto.server import DomainDispatcherApplication, create_backend_app
from obstore.store import S3Store
from werkzeug.serving import WSGIRequestHandler, make_server

KEY, SECRET, TOKEN = "AKIDOFTHETEST0", "secret-of-the-test", "token-of-the-test"


class _Quiet(WSGIRequestHandler):
    def log(self, *arguments: Any) -> None:
        pass


class S3Server:
    """An S3 server, between whose requests a test can act.

    `before` and `after` are called with (method, path?query) around each request; what `before`
    returns is answered as that status, without moto. `drops_conditions`: as old stores do."""

    def __init__(self) -> None:
        self.before: Callable[[str, str], int | None] = lambda method, path: None
        self.after: Callable[[str, str], object] = lambda method, path: None
        self.drops_conditions = False
        self.requests: list[str] = []
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True,
                                   request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._buckets = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        path += f"?{environ['QUERY_STRING']}" * bool(environ["QUERY_STRING"])
        self.requests.append(f"{method} {path}")
        status = self.before(method, path)
        if status is not None:
            start_response(f"{status} fault", [])
            return [f"<Error><Code>Fault</Code> {SECRET} {TOKEN}</Error>".encode()]
        if self.drops_conditions:
            for name in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"):
                environ.pop(name, None)
        answer = list(self._moto(environ, start_response))
        self.after(method, path)
        return answer

    def environment(self, **more: str) -> dict[str, str]:
        """The variables by which a process reaches this server."""
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN,
                "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", **more}

    def bucket(self) -> str:
        """The URL of a new bucket."""
        self._buckets += 1
        name = f"bucket-{id(self)}-{self._buckets}"
        urllib.request.urlopen(urllib.request.Request(
            f"{self.endpoint}/{name}", method="PUT",
            headers={"authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/x"}))
        return f"s3://{name}"

    def content(self, url: str) -> dict[str, bytes]:
        """All objects of a bucket by key."""
        store = S3Store.from_url(url, config={
            "endpoint": self.endpoint, "access_key_id": KEY, "secret_access_key": SECRET,
            "region": "us-east-1"}, client_options={"allow_http": True})
        return {meta["path"]: bytes(obstore.get(store, meta["path"]).bytes())
                for batch in obstore.list(store) for meta in batch}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class GoogleServer(S3Server):
    """The same, with the conditions of Google's XML API in place of S3's: x-goog-generation and
    x-goog-if-generation-match (https://cloud.google.com/storage/docs/xml-api/reference-headers)."""

    def __init__(self) -> None:
        super().__init__()
        self._generations: dict[str, int] = {}
        self._turn = threading.Lock()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path, is_object = environ["PATH_INFO"], not environ["QUERY_STRING"]
        condition = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
        environ |= {"HTTP_AUTHORIZATION": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/x",
                    "RAW_URI": f"{path}?{environ['QUERY_STRING']}"}  # not quoted
        with self._turn:
            now = self._generations.get(path, 0)
            if condition is not None and not self.drops_conditions and int(condition) != now:
                start_response("412 Precondition Failed", [])
                return [b"<Error><Code>PreconditionFailed</Code></Error>"]
            if environ["REQUEST_METHOD"] in ("PUT", "DELETE") and is_object:
                self._generations[path] = environ["REQUEST_METHOD"] == "PUT" and len(self.requests)
            generation = ("x-goog-generation", str(self._generations.get(path, 0)))
            return super()._answer(environ, lambda status, headers: start_response(
                status, [*headers, generation]))

    def environment(self, **more: str) -> dict[str, str]:
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({
            "gcs_base_url": self.endpoint, "disable_oauth": True, "client_email": "",
            "private_key": "", "private_key_id": ""}), **more}

    def bucket(self) -> str:
        return super().bucket().replace("s3://", "gs://")


class Azurite:
    """Microsoft's emulator of Azure Blob Storage: `azurite-blob`, of the npm package azurite."""

    ACCOUNT = "devstoreaccount1"
    KEY = ("Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw"
           "==")  # published, and the same everywhere

    def __init__(self, program: str, folder: Path) -> None:
        self._port = free_port()
        self._process = subprocess.Popen(
            [program, "--location", str(folder), "--blobPort", str(self._port),
             "--skipApiVersionCheck", "--disableTelemetry"], text=True, stdout=subprocess.PIPE)
        while "successfully listens" not in (line := self._process.stdout.readline()):
            assert line, "Azurite has ended"

    def environment(self) -> dict[str, str]:
        return {"AZURE_STORAGE_USE_EMULATOR": "true",
                "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{self._port}"}

    def bucket(self) -> str:
        """The URL of the container, which is made by the first call."""
        date, version = format_datetime(datetime.now(UTC), usegmt=True), "2021-08-06"
        signed = (f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n"
                  f"/{self.ACCOUNT}/{self.ACCOUNT}/box\nrestype:container")
        digest = hmac.digest(base64.b64decode(self.KEY), signed.encode(), "sha256")
        urllib.request.urlopen(urllib.request.Request(
            f"http://127.0.0.1:{self._port}/{self.ACCOUNT}/box?restype=container", method="PUT",
            headers={"x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
                     "Authorization":
                         f"SharedKey {self.ACCOUNT}:{base64.b64encode(digest).decode()}"}))
        return "az://box"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
