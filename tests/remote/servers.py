"""An S3 server in this process (moto), between whose requests a test can act."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import obstore
from moto.server import DomainDispatcherApplication, create_backend_app
from obstore.store import S3Store
from werkzeug.serving import WSGIRequestHandler, make_server

KEY, SECRET, TOKEN = "AKIDOFTHETEST0", "secret-of-the-test", "token-of-the-test"


class _Quiet(WSGIRequestHandler):
    def log(self, *arguments: Any) -> None:
        pass


class S3Server:
    """`before` and `after` are called with (method, path?query) around each request; what `before`
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
