"""Read a run folder, also while the run writes to it: configuration, weights, data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import rng
from trainer.checkpoint.buffers import take_shapes
from trainer.checkpoint.manifest import check_listed
from trainer.checkpoint.progress import LossMeter
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import TrainState
from trainer.config import command_line
from trainer.config.schema import Config
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.optim import optimizers, precision
from trainer.optim.named_optimizers import optimizer_of
from trainer.resilience.progress_marks import ProgressMarks
from trainer.run.evaluate import Evaluator
from trainer.run.prepare import bind_seed, make_data, make_model
from trainer.run.run_dir import SUMMARY
from trainer.run.run_source import TRIES, run_folder
from trainer.storage import layout, tensorfile
from trainer.storage.layout import EMA
from trainer.storage.records import read_json


@dataclass(frozen=True)
class CheckpointWeights:
    """Model weights of a checkpoint that the run would use in a validation."""

    step: int
    tensors: dict[str, Tensor]
    average: dict[str, Tensor]
    """Averages of the trained parameters, by the first name of each."""
    optimizer: tuple[dict[str, Tensor], SavedState] | None
    """State of an optimizer of the user, whose `eval()` may give the weights."""
    threads: int | None
    """Threads of a rank in that attempt: their number changes bits."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run's configuration, and its model with weights, in evaluation mode."""

    config: Config[Any]
    task: Any
    world: World
    model: nn.Module
    choice: precision.PrecisionPolicy
    weights: CheckpointWeights

    def evaluator(self, split: str) -> Evaluator | None:
        """The evaluator of a split, as in the run; None without data."""
        dataset = make_data(self.task, self.config, split)
        if dataset is None:
            return None
        return Evaluator(
            task=self.task, dataset=dataset, model=self.model, config=self.config,
            world=self.world, autocast=precision.autocast(self.choice, self.world.device),
            marks=ProgressMarks(), step=lambda: self.weights.step,
            limit=self.config.eval.batches if split.startswith("validation") else 0)

    def fresh_model(self) -> nn.Module:
        """Construct another model, with its initial weights."""
        model = make_model(self.task, self.config, self.world.device)[0]
        model.eval()
        return model

    @contextlib.contextmanager
    def evaluating(self, number: int) -> Iterator[None]:
        """Context in which batch `number` of an evaluation is computed."""
        rng.seed_all(self.config.seed, rng.EVALUATE, number)
        with torch.no_grad(), precision.autocast(self.choice, self.world.device)():
            yield


def open_saved_run(
    run: Path | str, *, checkpoint: str, overrides: Sequence[str] = ()
) -> SavedRun:
    """Open a run, in a folder or at a URL, with the weights of a checkpoint (best, last, or a
    step)."""
    with run_folder(run, checkpoint=checkpoint) as folder:
        path = folder / layout.CONFIG
        if not path.is_file():
            raise ConfigError(f"{folder}: there is no run in this folder (no {layout.CONFIG}).")
        config = dataclasses.replace(command_line.parse_config([str(path), *overrides]),
                                     run=str(run))
        weights = find_weights(folder, checkpoint, averaged=bool(config.optim.ema),
                               own_optimizer=":" in config.optim.name)
    threads = config.world.threads
    if threads == "auto" and weights.threads is not None:
        threads = weights.threads
    precision.set_determinism(config.numerics.deterministic == "on")
    world = World.form(device=config.device, threads=threads, launch=LaunchInfo())
    precision.set_tf32(config.numerics.tf32 == "on")
    task = bind_seed(config.task, config.seed)
    model, choice = make_model(task, config, world.device)
    load_weights(model, weights.tensors, f"{run}: --checkpoint {checkpoint}")
    load_weights(model, weights.average, f"{run}: the average of the weights", strict=False)
    if weights.optimizer is not None:
        _average_by_optimizer(model, task, config, weights.optimizer)
    model.eval()
    return SavedRun(config=config, task=task, world=world, model=model, choice=choice,
                    weights=weights)


def _average_by_optimizer(
    model: nn.Module, task: Any, config: Config[Any], saved: tuple[dict[str, Tensor], SavedState]
) -> None:
    """Give the model the weights of its optimizer's `eval()`, if that has one."""
    optimizers.freeze(model, () if config.freeze_until.value else config.freeze)
    optimizer = optimizer_of(config.optim, model, task)
    if not optimizers.has_modes(optimizer):
        return
    tensors, facts = saved
    state = TrainState(model=model, optimizer=optimizer, schedule=None, progress=facts.progress,
                       scaler=torch.amp.GradScaler("cpu", enabled=False), best=facts.best,
                       meter=LossMeter(), seed=config.seed, num_ranks=1)
    state.load_optimizer(tensors, facts.optimizer)
    optimizers.set_mode(optimizer, training=False)


def find_weights(
    run: Path, checkpoint: str, *, averaged: bool, own_optimizer: bool
) -> CheckpointWeights:
    store, product, tries = Store(run / layout.CHECKPOINTS), run / layout.PRODUCT, TRIES
    while True:
        seen = [info.path for info in store.checkpoints()]
        try:
            if checkpoint == "best" and not seen and product.is_file():
                check_listed(product)
                summary = read_json(run / layout.SUMMARY, SUMMARY)
                step = 0 if summary is None else summary["best"]["step"]
                return CheckpointWeights(step, tensorfile.load_tensors(product), {}, None, None)
            return _read_weights(store, checkpoint, averaged=averaged,
                                 own_optimizer=own_optimizer)
        except (CheckpointDamaged, OSError, ValueError) as error:
            tries -= 1
            if tries and seen != [info.path for info in store.checkpoints()]:
                continue
            steps = ", ".join(str(info.step) for info in store.checkpoints()) or "none"
            raise ConfigError(f"{run}: --checkpoint {checkpoint}: {error}; use best, last or "
                              f"one of these steps: {steps}.") from error


def _read_weights(
    store: Store, checkpoint: str, *, averaged: bool, own_optimizer: bool
) -> CheckpointWeights:
    if checkpoint in ("best", "last"):
        newest, skipped = store.newest_valid()
        if newest is None:
            raise CheckpointDamaged("; ".join(skipped) or "no checkpoint is there")
        best = SavedState.read(newest.path).best.step if checkpoint == "best" else 0
        info = store.verify(best or newest.step)
    else:
        info = store.verify(int(checkpoint))
    model, average = info.path / layout.MODEL, info.path / EMA
    state = SavedState.read(info.path)
    return CheckpointWeights(
        info.step, tensorfile.load_tensors(model),
        tensorfile.load_tensors(average) if averaged and EMA in info.manifest["files"] else {},
        (tensorfile.load_tensors(info.path / layout.OPTIMIZER), state) if own_optimizer else None,
        state.circumstances.get("threads"))


def load_weights(
    model: nn.Module, tensors: dict[str, Tensor], where: str, *, strict: bool = True
) -> None:
    """Load weights into a model; `where` is their origin, for a message. Unless `strict`, only
    those that both have."""
    take_shapes(model, tensors)
    try:
        model.load_state_dict(tensors, strict=strict)
    except RuntimeError as error:
        lines = " ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise ConfigError(f"{where}: the weights don't fit the model: {lines}") from error


@contextlib.contextmanager
def config_error_on_write(flag: str, remedy: str) -> Iterator[None]:
    """Context in which an OSError becomes a ConfigError with the flag and a remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag}: {error}; {remedy}.") from error


@dataclass(frozen=True)
class ModelCall:
    """Arguments with which a loss calls its model, and the output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def find_first_call(model: nn.Module, loss: Any, batch: Any) -> ModelCall | None:
    """Compute the loss of a batch and record the first call of the model in it, if there is one."""
    calls: list[ModelCall] = []

    def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(ModelCall(args, kwargs, output))

    with model.register_forward_hook(note, with_kwargs=True):
        loss(model, batch)
    return calls[0] if calls else None


def record_first_call(model: nn.Module, loss: Any, batch: Any) -> ModelCall:
    """Compute the loss of a batch and record the first call of the model in it."""
    if (call := find_first_call(model, loss, batch)) is None:
        raise ConfigError("--task: loss() doesn't call the model itself (model(…)), so its "
                          "output is unknown; give the task a method predict(model, batch).")
    return call


def named_fields(value: Any) -> dict[Any, Any] | None:
    """The values of a mapping, a dataclass or a named tuple by name; None for another object."""
    if isinstance(value, Mapping):
        return {**value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else None


def output_leaves(
    output: Any, path: str = "", *, whole: Container[str] = ()
) -> dict[str, Any]:
    """The values of a model's output by name, those of its named fields and sequences too, but for
    the lists named in `whole`; without None."""
    inner: Iterable[tuple[Any, Any]]
    if (named := named_fields(output)) is not None:
        inner = named.items()
    elif isinstance(output, tuple | list) and (path or "output") not in whole:
        inner, path = enumerate(output), path or "output"
    else:
        return {} if output is None else {path or "output": output}
    return {name: leaf for key, value in inner
            for name, leaf in output_leaves(value, f"{path}.{key}" if path else str(key),
                                            whole=whole).items()}
