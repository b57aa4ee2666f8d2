"""An S3 server for the tests of this folder."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A `servers.S3Server`, which the environment variables name."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    from servers import S3Server

    made = S3Server()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()
