"""System limits, folders and locales: checks at startup and explanations of failures."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
import torch

from trainer.distributed.world import LaunchInfo, World
from trainer.errors import ConfigError
from trainer.resilience.diagnosis import diagnose, remedy
from trainer.resilience.preflight import allow_files
from trainer.run.run_dir import RunIdentity, enter
from trainer.storage.locks import RunLock
from trainer.telemetry.events import Log

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("soft", "hard", "raised"), [
    (40, 200, 200), (200, 200, 200), (1024, -1, 1 << 16), (-1, -1, -1),
    (1 << 17, 1 << 18, 1 << 17)])
def test_the_limit_of_open_files_is_raised(monkeypatch, soft, hard, raised) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))

    allow_files()

    assert limits[-1] == (raised, hard)


def caused(number: int) -> Exception:
    error = OSError(f"step 4 was not saved: {os.strerror(number)}")
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize(("error", "words"), [
    (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
    (OSError(errno.EFBIG, "File too large"), "ulimit -f"),
    (caused(errno.ENOSPC), "make room on that disk"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on "
                  "device (28)"), "docker run --shm-size"),
    (RuntimeError("out of resource: shared memory, Required: 2, Hardware limit: 1"), ""),  # a GPU's
    (ValueError("No space left on device"), "")])
def test_an_error_at_a_limit_is_explained_with_a_remedy(error: Exception, words: str) -> None:
    assert words in remedy(error)
    assert bool(remedy(error)) == bool(words)
    assert words in diagnose(error).message


@pytest.mark.parametrize("command", ["trainer", "launch --"])
@pytest.mark.parametrize(("before", "words"), [
    ("mkdir gone; cd gone; rmdir ../gone", ("the current folder is gone", "cd to another one")),
    ("touch file; export TORCHINDUCTOR_CACHE_DIR=$PWD/file/in",
     ("TORCHINDUCTOR_CACHE_DIR is ", "unset it"))])
def test_nothing_starts_in_a_deleted_folder_or_if_torch_can_not_write_its_cache(
        command: str, before: str, words: tuple[str, str], tmp_path: Path) -> None:
    script = f"{before}; exec {sys.executable} -m {command} --steps=1 --run-dir={tmp_path}/run"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=200,
                          check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})

    assert done.returncode == 2
    assert all(word in done.stderr.splitlines()[-1] for word in words)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("file", "command"), [
    ("trainer.py", "-m launch --"), ("trainer/__init__.py", "-m launch --"),
    ("trainer.py", "trainer"), ("trainer.py", "trainer inspect run"),
    ("trainer.py", "trainer-launch --"), ("launch.py", "trainer-launch --")])
def test_a_file_that_hides_a_package_is_named(file: str, command: str, tmp_path: Path) -> None:
    (hiding := tmp_path / file).parent.mkdir(exist_ok=True)
    hiding.write_text("print('not the package')")
    arguments = command.split()
    if arguments[0] in (scripts := tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "scripts"]):  # an installed command: the current folder is not on its path
        module, _, function = scripts[arguments[0]].partition(":")
        arguments[:1] = ["-P", "-c", f"from {module} import {function} as main; main()"]

    done = subprocess.run([sys.executable, *arguments, "--steps=1"], capture_output=True, text=True,
                          check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})

    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {hiding} hides the package {Path(file).parts[0].removesuffix('.py')}" in (
        done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "events.jsonl"])
def test_a_run_of_another_user_is_refused_before_it_starts(name: str) -> None:
    with tempfile.TemporaryDirectory() as place:  # other users can't enter pytest's own folders
        path = Path(place, "run")
        for folder in ("checkpoints", "tensorboard"):
            (path / folder).mkdir(parents=True)
        (path / "events.jsonl").touch()
        for open_to_all in (Path(place), path, *path.iterdir()):
            open_to_all.chmod(0o777)
        (path / name).chmod(0o555)
        world = World(LaunchInfo(), torch.device("cpu"), 1)
        mine = RunIdentity(run_id="a", attempt=1)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may write anywhere
        try:
            with pytest.raises(ConfigError, match=f"--run-dir .*run/{name}'; choose a folder"):
                enter(path, mine, RunLock(path / "lock", nonce=world.nonce), world, Log())
        finally:
            os.seteuid(user)
