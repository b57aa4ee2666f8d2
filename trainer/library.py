"""The library call: `train(config)` in a notebook, a script, or a script under a launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
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

from trainer import allocator, cli, compile_cache, folder, rng, tensorfile
from trainer.config import Config
from trainer.device import choose_device
from trainer.errors import (
    EXIT_COMPLETE,
    EXIT_STOPPED,
    AlreadyFinished,
    ConfigError,
    StopRequested,
    TrainerError,
)
from trainer.failure import Failure
from trainer.given import Given
from trainer.lock import let_go
from trainer.log import Log
from trainer.pipe import say
from trainer.prepare import bind_seed
from trainer.rank_process import CurrentRun, RankProcess, train_attempt
from trainer.status import Phase
from trainer.stop import SIGNALS, StopRequest, attend
from trainer.task import find_task
from trainer.world import Launch, World

_AT_WORK = threading.Lock()
"""Random states, threads and signals are the whole process's: one training at a time."""


@dataclass(frozen=True)
class Trained:
    """A run that is complete."""

    model: nn.Module
    """With the weights of model.safetensors, in evaluation mode, on the run's device."""
    summary: dict[str, Any]
    """What summary.json holds."""
    folder: Path
    """The run folder."""


def train(config: Config[Any]) -> Trained:
    """Train, or go on with the run in `config.run`, to the end.

    `config.task` is a task's import path, class, or an instance. Of one that config.toml can't
    hold (tensors in its fields, a class of a notebook) the run folder keeps a description: this
    call in this program goes on with the run, other commands can't make the task again.

    In the main thread Ctrl-C raises `KeyboardInterrupt` and the other signals that stop a run
    `SystemExit(75)`, after the step and its save; a second Ctrl-C at once, with the last step
    saved. Signal handlers, random states and torch's settings are put back. Started by torchrun or
    `python -m launch`, the process is a rank, and leaves as `python -m trainer` does, with its
    exit codes, unless the run is complete.

    Raises:
        ConfigError: the configuration doesn't fit; nothing was started.
        RuntimeError: a training is under way in this process.
        Exception: what your own code has raised; the step before it is saved.
    """
    if not isinstance(config, Config):
        raise TypeError(f"train() takes a trainer.Config, not a {type(config).__name__}: "
                        "train(Config(task=Mine(), run=\"runs/mine\"))")
    config = _resolved(config)
    if not _AT_WORK.acquire(blocking=False):
        raise RuntimeError("train() is at work in this process already, and another one would "
                           "move its random states; start a process for it.")
    try:
        try:
            with _settings():
                if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
                    _as_rank(config)
                else:
                    _alone(config)
        finally:
            gc.collect()  # the parts of a run refer to each other, and hold memory of the device
        return _result(config)
    finally:
        _AT_WORK.release()


def _resolved(config: Config[Any]) -> Config[Any]:
    """With a task that is an instance, and a run folder."""
    task, kind = config.task, config.task
    if isinstance(task, str):
        kind = find_task(task)
    if isinstance(kind, type):
        try:
            task = kind()
        except TypeError as error:
            raise ConfigError(f"--task {kind.__name__}: {error}; give an instance.") from error
    missing = [m for m in ("model", "dataset", "loss") if not callable(getattr(task, m, None))]
    if missing:
        raise ConfigError(f"--task {type(task).__name__}: it has no method {', '.join(missing)}; "
                          "give Config a task: an instance, a class or module:Class, which "
                          "defines model(), dataset(split) and loss(model, batch).")
    workers = config.data.workers
    if workers not in ("auto", 0) and multiprocessing.current_process().daemon:
        raise ConfigError(f"--data.workers {workers}: this process is daemonic, as those of a "
                          "multiprocessing.Pool are, and may have no children; use 0, or a "
                          "concurrent.futures.ProcessPoolExecutor.")
    name = type(task).__name__.lower()
    if not isinstance(task, Given) and not _can_be_made_again(config, task):
        if dataclasses.is_dataclass(task):
            task = bind_seed(task, config.seed)
        task = Given.of(task)
    path = Path(config.run or f"runs/{name}").absolute()  # the task may change the current folder
    return dataclasses.replace(config, task=task, run=str(path))


def _can_be_made_again(config: Config[Any], task: Any) -> bool:
    """Whether another process can make the task from what config.toml holds."""
    kind = type(task)
    module = sys.modules.get(kind.__module__)
    named = kind.__module__ != "__main__" and getattr(module, kind.__qualname__, None) is kind
    if not named or not dataclasses.is_dataclass(task):
        return False
    try:
        cli.to_toml(dataclasses.replace(config, task=task))
    except ConfigError:
        return False
    return True


def _as_rank(config: Config[Any]) -> None:
    """As one of a launcher's ranks; returns if the run is complete."""
    stop = attend()
    code = RankProcess(stop).run((), config, is_program=False)
    if code != EXIT_COMPLETE:
        say("", sys.stdout)
        say("", sys.stderr)
        os._exit(code)
    # A thread of gloo may still let go of the last tensors, for which it needs the interpreter:
    # one that meets the interpreter's end instead aborts the process.
    time.sleep(0.02)
    stop.uninstall()


def _alone(config: Config[Any]) -> None:
    """In a process that isn't the trainer's own: errors are raised, and nothing ends it."""
    stop, log = StopRequest(), Log(level=config.log.level)
    failure, current = Failure(log), CurrentRun()
    threads = None if config.world.threads == "auto" else config.world.threads
    try:
        log.status.enter(Phase.JOIN)
        with _signals(stop, log), World.form(
            device=config.device, timeout_s=config.world.timeout_s, threads=threads, launch=Launch()
        ) as world:
            train_attempt(config, world, log, stop, os.getppid(), failure, current, watched=False)
    except AlreadyFinished as done:
        log.info(str(done))
    except TrainerError as error:
        log.event("refused" if isinstance(error, ConfigError) else "stop", why=str(error),
                  exit_code=error.exit_code, error=type(error).__name__)
        if not isinstance(error, StopRequested):
            raise
        log.info(str(error))
        # Without its frames: a notebook keeps the last exception, and these hold the whole run.
        raise (KeyboardInterrupt() if stop.reason == "SIGINT" else SystemExit(EXIT_STOPPED)
               ) from error.with_traceback(None)
    except Exception as error:
        failure.note(error)
        raise
    finally:
        parts, current.parts = current.parts, None
        if parts is not None:
            parts.loader.close()
            parts.lock.close()
            parts.checkpoint.store.close()
            del parts
        for path in (folder.LOCK, f"{folder.CHECKPOINTS}/.lock"):
            let_go(Path(str(config.run)) / path)
        log.close()
        stop.close()


@contextlib.contextmanager
def _signals(stop: StopRequest, log: Log) -> Iterator[None]:
    """In the main thread, signals are requests to stop; elsewhere they are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        again = stop.requested and number == signal.SIGINT
        stop.request(signal.Signals(number).name)
        if again or log.status.has_nothing_at_stake:  # impatience; nothing to save
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_STOPPED)

    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCHLD)}
    for number in SIGNALS:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """What a training sets in the whole process is put back."""
    backend, threads = torch.backends.cudnn, torch.get_num_threads()
    fast = (backend.deterministic, backend.benchmark, backend.allow_tf32)
    products = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        with (rng.preserved(), compile_cache.restored(), torch.inference_mode(False),
              torch.enable_grad()):
            yield
    finally:
        torch.set_num_threads(threads)
        allocator.give_back()
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(products)
        backend.deterministic, backend.benchmark, backend.allow_tf32 = fast


def _result(config: Config[Any]) -> Trained:
    path = Path(str(config.run))
    summary = folder.read_json(path / folder.SUMMARY)
    assert summary is not None, "the summary is the last file of a complete run"
    launch = Launch.from_environment()
    device = choose_device(config.device, size=launch.size, local_rank=launch.local_rank,
                           local_size=launch.local_size)
    with rng.preserved():
        rng.key_generators(config.seed, rng.MODEL)
        model = bind_seed(config.task, config.seed).model()
    model.load_state_dict(tensorfile.load(path / folder.PRODUCT))
    return Trained(model.to(device).eval(), summary, path)
