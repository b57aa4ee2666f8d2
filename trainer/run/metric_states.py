"""Metrics of torchmetrics in an evaluation: a state for each batch, merged in the order of batches.

On one process torchmetrics adds each batch to the state so far. Here each batch is added to an
empty state; all ranks receive these states and add them up in the order of batches, so the result
has the same bits for any number of ranks. Sums of integers, exact in any order, are added at once.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.task import task_metrics

MOST_VALUES = 100
"""Largest number of values of a metric that are recorded."""


class MetricStates:
    """The metrics of a task over one data set. ConfigError if a state is neither a sum, a maximum,
    a minimum nor a list of tensors."""

    def __init__(self, task: Any, device: torch.device) -> None:
        self.metrics: dict[str, Any] = task_metrics(task)
        self._device = device
        self._states: list[tuple[Any, str, Callable[[Any, Any], Any]]] = []
        """Metric (one inside a wrapper too), name of the state, how two states are merged."""
        for name, metric in self.metrics.items():
            for module in (m for m in metric.modules() if hasattr(m, "metric_state")):
                # torchmetrics itself would gather the states of all ranks in `compute`.
                setattr(module, "distributed_available_fn", lambda: False)  # noqa: B010
                self._states += [(module, state, _merge(name, module, state))
                                 for state in module.metric_state]
        self.computed: list[str] = []
        """Names of the metrics in the last evaluation."""
        self.begin()

    def begin(self) -> None:
        """Begin an evaluation."""
        self._rows: dict[int, list[list[Tensor]]] = {}
        self._counts: dict[int, Tensor] = {}
        self._given: list[list[str]] = []
        for metric in self.metrics.values():
            metric.to(self._device)

    def arguments(self, predictions: Any) -> dict[str, tuple[Any, ...]]:
        """The arguments of each metric's `update` in `Outcome.predictions`. A dict may leave out
        metrics that belong to another validation set."""
        found = dict.fromkeys(self.metrics, predictions)
        if isinstance(predictions, Mapping):
            known = {name: predictions[name] for name in self.metrics if name in predictions}
            found = known if known or not predictions else dict.fromkeys(self.metrics)
        for name, value in found.items():
            if not isinstance(value, tuple | list):
                raise ConfigError(
                    f"--task: metrics() has {name!r}, but in evaluation the loss returned no "
                    "arguments of its update; return Outcome(…, predictions=(preds, target)), or a "
                    "dict of name: arguments if the metrics take different ones.")
        return {name: tuple(value) for name, value in found.items()}

    def add(self, number: int, predictions: Any) -> None:
        """Add a batch; -1 is a stand-in, which does not count."""
        if not self.metrics:
            return
        arguments = self.arguments(predictions)
        if [*arguments] not in self._given:
            self._given.append([*arguments])
        for name, metric in self.metrics.items():
            metric.reset()
            if name in arguments:
                metric.update(*arguments[name])
        if number < 0:
            return
        row = self._rows[number] = []
        for place, (module, state, merge) in enumerate(self._states):
            value = getattr(module, state)
            tensors = [_tensor(module, one) for one in (
                value if isinstance(value, list) else [value])]
            if merge is operator.add and not isinstance(value, list) and (
                    not value.is_floating_point() and not value.is_complex()):
                self._counts[place] = tensors.pop().long() + self._counts.get(place, 0)
            # Not waited for: the scores of the evaluation are read from the device after it.
            row.append([tensor.to("cpu", non_blocking=True) for tensor in tensors])

    def compute(self, world: World) -> dict[str, float]:
        """Collective. The values over all batches of all ranks, by name."""
        if not self.metrics:
            return {}
        rows = self._everywhere(world)
        given = [names for names_of_rank in world.gather_json(self._given)
                 for names in names_of_rank]
        if any(names != given[0] for names in given):
            raise ConfigError(f"--task: the predictions of a batch are for the metrics {given[0]}, "
                              f"and those of another batch of the same data for others; return "
                              "the same for each batch of a validation set.")
        found: dict[str, float] = {}
        for place, (module, state, merge) in enumerate(self._states):
            default = getattr(module, state)
            if isinstance(default, list):
                value: Any = [tensor for row in rows for tensor in row[place]]
            elif rows[0][place]:
                value = functools.reduce(merge, (row[place][0] for row in rows))
            else:
                count = self._counts.get(place, torch.zeros(default.shape, dtype=torch.int64))
                value = world.all_sum(count.cpu()).to(default.dtype)
            setattr(module, state, value)
        self.computed = given[0]
        for name in self.computed:
            # A copy: what compute() changes besides the states would reach the next validation.
            found |= dict(_values(name, copy.deepcopy(self.metrics[name]).cpu().compute()))
        # Ranks on other processors may round differently, and must not decide alone.
        return dict(world.broadcast_json(found))

    def _everywhere(self, world: World) -> list[list[list[Tensor]]]:
        """Collective. The states of all batches, in their order."""
        layouts = world.gather_json([
            [number, [[[str(t.dtype).removeprefix("torch."), *t.shape] for t in state]
                      for state in row]] for number, row in self._rows.items()])
        everywhere: dict[int, list[list[Tensor]]] = {}
        for rank, layout in enumerate(layouts):
            rows = self._rows if rank == world.rank else {
                number: [[torch.empty(shape, dtype=getattr(torch, dtype))
                          for dtype, *shape in state] for state in row] for number, row in layout}
            world.broadcast([t for row in rows.values() for state in row for t in state], rank)
            everywhere |= rows
        return [everywhere[number] for number in sorted(everywhere)]


def _merge(name: str, module: Any, state: str) -> Callable[[Any, Any], Any]:
    """How a state of two batches is merged."""
    from torchmetrics import utilities, wrappers  # an extra: only a task with such metrics needs it

    reduction = vars(module)["_reductions"][state]  # no public name
    if isinstance(module.metric_state[state], list):
        if reduction in (utilities.dim_zero_cat, None):
            return operator.add
    elif not isinstance(module, wrappers.Running) and (known := {  # which counts the batches
            utilities.dim_zero_sum: operator.add, utilities.dim_zero_max: torch.maximum,
            utilities.dim_zero_min: torch.minimum}.get(reduction)) is not None:
        return known
    what = getattr(reduction, "__name__", reduction)
    error = ConfigError(
        f"--task: metrics(): the state {state!r} of {name!r} ({type(module).__name__}) is reduced "
        f"by {what}, so it can't be merged in the order of batches; use a metric whose states are "
        'sums, maxima, minima or lists (dist_reduce_fx "sum", "max", "min" or "cat").')
    if reduction is not utilities.dim_zero_mean:
        raise error

    def unchanged(one: Tensor, other: Tensor) -> Tensor:
        """A mean of equal values, such as the range of the data of a signal-to-noise ratio."""
        if not torch.equal(one, other):
            raise error
        return one

    return unchanged


def _tensor(module: Any, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigError(f"--task: metrics(): a state of {type(module).__name__} has a "
                          f"{type(value).__name__}; only tensors can be sent to other ranks.")
    return value.detach()


def _values(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The values to record: of a dict its scalars, of a vector each element by its number."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(inner, Tensor) or inner.numel() == 1:
                yield from _values(key if key.startswith(name) else f"{name}_{key}", inner)
        return
    numbers = [float(number) for one in (value if isinstance(value, tuple | list) else [value])
               for number in torch.as_tensor(one).flatten()]
    if len(numbers) > MOST_VALUES:
        raise ConfigError(f"--task: metrics(): {name!r} has {len(numbers)} values; use a metric of "
                          f"at most {MOST_VALUES}, such as the area under the curve.")
    if len(numbers) == 1:
        yield name, numbers[0]
    else:
        yield from ((f"{name}_{place}", number) for place, number in enumerate(numbers))
