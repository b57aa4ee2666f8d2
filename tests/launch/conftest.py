"""The fixture `warm`: a process with all imports done, from which launchers are forked."""

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
