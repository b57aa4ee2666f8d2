"""Paths for the tests' own modules, and for `benchmarks`, which isn't installed; how hypothesis
draws; processes and runs that tests share."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

for folder in ("..", "support", "ranks"):
    path = str((Path(__file__).parent / folder).resolve())
    if path not in sys.path:
        sys.path.insert(0, path)

# The same examples each time, however long one takes: neither luck nor a busy machine fails a test.
settings.register_profile("tests", deadline=None, derandomize=True, database=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable]:
    """`ranks(world_size, function, *args, timeout_s=100, group=True, env=None, **kwargs)`: run a
    function in freshly forked ranks."""
    from harness import Ranks

    server = Ranks()
    yield server
    server.close()


@pytest.fixture(scope="session")
def undisturbed(ranks, tmp_path_factory) -> Callable[..., Path]:
    """`undisturbed(size, *flags)`: the folder of a run with these flags, which trains once."""
    from runs import run

    return functools.cache(lambda size, *flags, **options: run(
        ranks, size, tmp_path_factory.mktemp("undisturbed") / "run", *flags, **options))


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
