"""The fixture `ranks`: runs a function in freshly forked ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(world_size, function, *args, timeout_s=100, group=True, env=None, **kwargs)`."""
    server = Ranks()
    yield server
    server.close()
