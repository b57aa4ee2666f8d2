"""Library call: `train(config)` in a notebook, in a script, or in a script under a launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from trainer import rng
from trainer.commands.train import RankProcess, Training
from trainer.config import command_line
from trainer.config.schema import Config
from trainer.distributed import allocator
from trainer.distributed.device import choose_device
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import (
    EXIT_COMPLETE,
    EXIT_STOPPED,
    AlreadyFinished,
    ConfigError,
    StopRequested,
    TrainerError,
)
from trainer.optim import compile_cache
from trainer.optim.precision import set_determinism, tf32_restored
from trainer.resilience.stop_signals import StopSignals, attend, handle_stop_signals
from trainer.run.prepare import bind_seed
from trainer.run.saved_run import load_weights
from trainer.storage import layout, tensorfile
from trainer.storage.locks import release_locks
from trainer.storage.records import read_json
from trainer.storage.secrets import hide
from trainer.task import REQUIRED_METHODS, ObjectTask, find_task
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase
from trainer.telemetry.std_streams import say

_IN_PROGRESS = threading.Lock()
"""One training at a time: random states, threads and signal handlers belong to the process."""


@dataclass(frozen=True)
class Trained:
    """Result of a finished run."""

    model: nn.Module
    """Model with the weights of model.safetensors, in evaluation mode, on the device of the run."""
    summary: dict[str, Any]
    """Content of summary.json."""
    folder: Path


def train(config: Config[Any]) -> Trained:
    """Train to the end, or continue the run in `config.run`.

    `config.task` is the import path of a task, a class, or an instance. Of an instance that
    config.toml cannot represent (tensors in its fields, a class of a notebook), the run folder has
    a description only: the same call in the same program continues the run, but no command can.

    In the main thread, Ctrl-C raises `KeyboardInterrupt`, and the other stop signals raise
    `SystemExit(75)`, after the current step and its save; a second Ctrl-C raises at once, and the
    last finished step is saved. Signal handlers, random states and settings of torch are restored.

    In a process that torchrun or `python -m launch` has started, the call is a rank: it exits with
    the exit codes of `python -m trainer`, unless the run is complete.

    Raises:
        ConfigError: the configuration is wrong; nothing was started.
        RuntimeError: another training is in progress in this process.
        Exception: an error of the task's code; the step before it is saved.
    """
    if not isinstance(config, Config):
        raise TypeError(f"train() takes a trainer.Config, not a {type(config).__name__}: "
                        "train(Config(task=Mine(), run=\"runs/mine\"))")
    config = resolve_task(config)
    if not _IN_PROGRESS.acquire(blocking=False):
        raise RuntimeError("train() is running in this process already, and another training "
                           "would change its random states; start another process for it.")
    as_rank = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    try:
        try:
            with process_settings_restored():
                (_train_as_rank if as_rank else train_in_process)(config)
        finally:
            gc.collect()  # the objects of a run form reference cycles and hold device memory
        return _load_result(config)
    finally:
        _IN_PROGRESS.release()


def resolve_task(config: Config[Any]) -> Config[Any]:
    """Return the configuration with an instance of the task and with an absolute run folder."""
    task = config.task
    kind = find_task(task) if isinstance(task, str) else task
    if isinstance(kind, type):
        try:
            task = kind()
        except TypeError as error:
            raise ConfigError(f"--task {kind.__name__}: {error}; pass an instance.") from error
    missing = [m for m in REQUIRED_METHODS if not callable(getattr(task, m, None))]
    if missing:
        raise ConfigError(f"--task {type(task).__name__}: it has no method {', '.join(missing)}; "
                          "pass a task to Config: an instance, a class or module:Class that "
                          "defines model(), dataset(split) and loss(model, batch).")
    name = type(task).__name__.lower()
    if not isinstance(task, ObjectTask) and not _is_reconstructible(config, task):
        if dataclasses.is_dataclass(task):
            task = bind_seed(task, config.seed)
        task = ObjectTask.of(task)
    path = Path(config.run or f"runs/{name}").absolute()  # the task may change the current folder
    return dataclasses.replace(config, task=task, run=str(path))


def _is_reconstructible(config: Config[Any], task: Any) -> bool:
    """Return whether another process can construct the task from config.toml."""
    kind = type(task)
    module = sys.modules.get(kind.__module__)
    named = kind.__module__ != "__main__" and getattr(module, kind.__qualname__, None) is kind
    if named and dataclasses.is_dataclass(task):
        with contextlib.suppress(ConfigError):
            command_line.to_toml(dataclasses.replace(config, task=task))
            return True
    return False


def _train_as_rank(config: Config[Any]) -> None:
    """Train as a rank of a launcher. Returns only if the run is complete, and exits otherwise."""
    stop = attend()
    code = RankProcess(stop).run((), config, is_program=False)
    if code != EXIT_COMPLETE:
        say("", sys.stdout)
        say("", sys.stderr)
        os._exit(code)
    # A thread of gloo may still free the last tensors, for which it needs the interpreter. If the
    # interpreter shuts down first, that thread aborts the process.
    time.sleep(0.02)
    stop.uninstall()


def train_in_process(config: Config[Any]) -> None:
    """Train in a process of the user: errors are raised, and the process is never ended."""
    stop, log = StopSignals(), Log(level=config.log.level)
    hide((name, value) for name, value, _ in config.leaves())
    training = Training(log, stop, config)
    try:
        log.status.enter(Phase.JOIN)
        set_determinism(config.numerics.deterministic == "on")
        with _signals(stop, log), World.form(
            device=config.device, timeout_s=config.world.timeout_s, threads=config.world.threads,
            launch=LaunchInfo()
        ) as world:
            training.run(config, world, watched=False)
    except AlreadyFinished as done:
        log.info(str(done))
    except TrainerError as error:
        log.event("refused" if isinstance(error, ConfigError) else "stop", why=str(error),
                  exit_code=error.exit_code, error=type(error).__name__)
        if not isinstance(error, StopRequested):
            raise
        log.info(str(error))
        # No traceback: a notebook keeps the last exception, and its frames hold the whole run.
        raise (KeyboardInterrupt() if stop.reason == "SIGINT" else SystemExit(EXIT_STOPPED)
               ) from error.with_traceback(None)
    except Exception as error:
        training.failure.note(error)
        training.failure.advise()
        raise
    finally:
        training.release()
        for path in (layout.LOCK, f"{layout.CHECKPOINTS}/.lock"):
            release_locks(Path(str(config.run)) / path)
        log.close()


@contextlib.contextmanager
def _signals(stop: StopSignals, log: Log) -> Iterator[None]:
    """Turn signals into stop requests in the main thread; do nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        repeated = stop.requested and number == signal.SIGINT
        stop.request(signal.Signals(number).name)
        if repeated or log.status.has_nothing_at_stake:  # a second Ctrl-C, or nothing to save
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_STOPPED)

    before = {signal.SIGCHLD: signal.getsignal(signal.SIGCHLD)} | handle_stop_signals(handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def process_settings_restored() -> Iterator[None]:
    """Restore the settings that a training changes in the whole process."""
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    flags = {name: getattr(cudnn, name) for name in ("deterministic", "benchmark")}
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        with (rng.preserved(), compile_cache.restored(), tf32_restored(),
              torch.inference_mode(False), torch.enable_grad()):
            yield
    finally:
        torch.set_num_threads(threads)
        allocator.give_back()
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        for name, value in flags.items():
            setattr(cudnn, name, value)


def _load_result(config: Config[Any]) -> Trained:
    path = Path(str(config.run))
    summary = read_json(path / layout.SUMMARY)
    assert summary is not None, "the summary is the last file of a complete run"
    launch = LaunchInfo.from_environment()
    device = choose_device(config.device, size=launch.size, local_rank=launch.local_rank,
                           local_size=launch.local_size)
    with rng.preserved():
        rng.seed_all(config.seed, rng.MODEL)
        model = bind_seed(config.task, config.seed).model()
    load_weights(model, tensorfile.load_tensors(path / layout.PRODUCT), str(path))
    model.to(device)
    model.eval()
    return Trained(model, summary, path)
