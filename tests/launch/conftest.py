"""The fixture `warm`: a process that has everything imported, to fork launchers from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Ranks


@pytest.fixture(scope="session")
def warm() -> Iterator[Ranks]:
    """`warm(1, function, *args, group=False)` runs a function of the test's module in a fork."""
    server = Ranks()
    yield server
    server.close()
