"""Synchronised batch norm equals one process with the samples of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from torch import Tensor, nn

from trainer.distributed import stand_in
from trainer.distributed.sync_batchnorm import SyncBatchNorm, convert

CHANNELS = 5
DOUBLE = torch.float64


def samples(number: int, kind: str = "2d", mean: float = 0.0,
            dtype: torch.dtype = torch.float32) -> Tensor:
    """N(mean, 1), shape (number, CHANNELS, …), from a fixed seed."""
    extra = {"flat": (), "1d": (6,), "2d": (3, 4), "channels-last": (3, 4), "3d": (2, 3, 4)}[kind]
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(number, CHANNELS, *extra, generator=generator, dtype=torch.float64) + mean
    form = torch.channels_last if kind == "channels-last" else torch.contiguous_format
    return x.to(dtype).contiguous(memory_format=form)


def layer(kind: str = "2d", dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A plain batch norm whose parameters and buffers are not the initial ones."""
    classes = {"flat": nn.BatchNorm1d, "1d": nn.BatchNorm1d, "3d": nn.BatchNorm3d}
    made = classes.get(kind, nn.BatchNorm2d)(CHANNELS, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*made.parameters(), *made.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return made


def train(module: nn.Module, x: Tensor, steps: int = 2) -> dict[str, Tensor | None]:
    """Output and gradients of the last of `steps` forwards and backwards, and the buffers then."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        module.zero_grad()
        y = module(x)
        ((y ** 3).sum() * 0.1 + (y * x.detach().cos()).sum()).backward()
    result: dict[str, Tensor | None] = {"output": y.detach(), "input.grad": x.grad}
    result |= {f"{name}.grad": tensor.grad for name, tensor in module.named_parameters()}
    return result | {name: tensor.clone() for name, tensor in module.named_buffers()}


def train_share(module: nn.Module, shares: Sequence[Tensor],
                steps: int = 2) -> dict[str, Tensor | None]:
    number = convert(module, dist.get_world_size(), "cpu")
    assert number == sum(isinstance(m, SyncBatchNorm) for m in module.modules()) > 0
    return train(module, shares[dist.get_rank()], steps)


def shared_layer() -> nn.Module:
    """A layer that is called twice in each forward."""
    shared = layer(dtype=DOUBLE)
    return nn.Sequential(shared, nn.Conv2d(CHANNELS, CHANNELS, 1, dtype=DOUBLE), nn.ReLU(), shared)


CASES: dict[str, tuple[nn.Module, Tensor, float]] = {
    **{kind: (layer(kind), samples(4, kind), 1e-6) for kind in ("flat", "1d", "3d")},
    "channels-last": (layer(), samples(4, "channels-last"), 1e-6),
    "cumulative": (layer(momentum=None), samples(4), 1e-6),
    "not affine": (layer(affine=False), samples(4), 1e-6),
    "no statistics": (layer(track_running_stats=False), samples(4), 1e-6),
    "frozen": (layer().requires_grad_(False), samples(4), 1e-6),
    "a mean of 100": (layer(), samples(4, mean=100.0), 3e-5),
    "twice, and a mean of 100": (shared_layer(), samples(4, mean=100.0, dtype=DOUBLE), 1e-9),
}  # fmt: skip
"""Module, samples, tolerance relative to the largest value."""


def assert_equal_shares(results: Sequence[dict[str, Any]], case: str) -> None:
    """Together, the ranks' results are those of one process with all samples."""
    module, x, tolerance = CASES[case]
    for name, value in train(copy.deepcopy(module), x).items():
        parts = [result[name] for result in results]
        if value is None:
            assert parts == [None] * len(parts)
            continue
        if name in ("output", "input.grad"):
            actual = torch.cat(parts)
        elif name.endswith(".grad"):
            actual = sum(parts)
        else:
            assert all(torch.equal(parts[0], part) for part in parts), name
            actual = parts[0]
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(actual, value, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("case", CASES)
def test_unequal_shares_equal_one_process(ranks: Ranks, case: str) -> None:
    module, x, _ = CASES[case]

    results = ranks(3, train_share, module, x.split([0, 1, 3]))

    assert_equal_shares(results, case)
    if case == "channels-last":
        for result in results:
            assert result["output"].is_contiguous(memory_format=torch.channels_last)


def train_beside_a_stand_in(module: nn.Module, shares: Sequence[Tensor]) -> dict[str, Any]:
    if dist.get_rank() != 1:
        return train_share(module, shares)
    convert(module, dist.get_world_size(), "cpu")
    with stand_in.forward_and_backward(module), stand_in.zero_gradients(module.parameters()):
        result = train(module, shares[1])
    for name in ("output", "input.grad"):
        assert result[name].shape == shares[1].shape
        result[name] = result[name][:0]
    return result


@pytest.mark.parametrize("case", CASES)
def test_a_stand_in_takes_part_without_any_effect(ranks: Ranks, case: str) -> None:
    module, x, _ = CASES[case]
    one, other = x.split([1, 3])

    results = ranks(3, train_beside_a_stand_in, module, [one, x[:2] * torch.nan, other])

    assert_equal_shares(results, case)


def outputs_under_autocast(module: nn.Module, shares: Sequence[Tensor]) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return train_share(module, shares, steps=1)


def test_bf16_inputs_have_statistics_in_fp32(ranks: Ranks) -> None:
    x = samples(4, mean=3.0).bfloat16()
    expected = train(layer(), x.float(), steps=1)

    results = ranks(3, outputs_under_autocast, layer(), x.split([0, 1, 3]))

    for result in results:
        assert result["output"].dtype == result["input.grad"].dtype == torch.bfloat16
        assert result["weight.grad"].dtype == torch.float32
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(result[name], expected[name], rtol=1e-6, atol=1e-6)
    output = torch.cat([result["output"] for result in results])
    torch.testing.assert_close(output.float(), expected["output"], rtol=1e-2, atol=1e-2)


def evaluate_or_train_without_grad(shares: Sequence[Tensor]) -> list[Any]:
    """An evaluation on rank 0 alone; a forward without gradients, and the buffers then."""
    convert(module := layer("flat"), 2, "cpu")
    rows = 1 - dist.get_rank()
    with pytest.raises(ValueError, match=rf"more than 1 value per channel.*\({rows}, 5\) on this"):
        module(samples(rows, "flat"))
    convert(module := layer(), 2, "cpu")
    output = module.eval()(samples(2)) if dist.get_rank() == 0 else None
    with torch.no_grad():
        trained = module.train()(shares[dist.get_rank()])
    return [output, trained, dict(module.named_buffers())]


def test_one_value_is_refused_evaluation_does_not_wait_and_grad_is_not_needed(
        ranks: Ranks) -> None:
    expected = layer()
    output = expected(samples(4)).detach()

    first, second = ranks(2, evaluate_or_train_without_grad, samples(4).split([1, 3]))

    assert second[0] is None
    assert torch.equal(first[0], layer().eval()(samples(2)))
    torch.testing.assert_close(torch.cat([first[1], second[1]]), output, rtol=1e-6, atol=1e-6)
    for _, trained, buffers in (first, second):
        assert not trained.requires_grad
        torch.testing.assert_close(buffers, dict(expected.named_buffers()))


class Scaled(nn.BatchNorm2d):
    """A batch norm that overrides `forward`."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_conversion_keeps_objects_names_hooks_and_overridden_forwards() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(3), Scaled(3)),
                          nn.GroupNorm(1, 3), nn.InstanceNorm2d(3), nn.LazyBatchNorm2d())
    modules, keys = list(model.modules()), list(model.state_dict())
    weight = model[0].weight
    calls: list[nn.Module] = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(module))

    number = convert(model, 2, "cpu")
    model[0].eval()(torch.ones(2, 3))

    assert number == 2
    assert list(model.modules()) == modules
    assert list(model.state_dict()) == keys
    assert [type(model[0]), type(model[1][0]), type(model[1][1])] == [SyncBatchNorm] * 2 + [Scaled]
    assert model[0].weight is weight
    assert calls == [model[0]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_own_synchronised_layer_is_converted_also_where_others_stay_plain(
        world_size: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))

    assert convert(model, world_size, "cpu", plain=False) == 1
    assert type(model[0]) is nn.BatchNorm1d
    assert torch.equal(model[1](torch.eye(3)), nn.BatchNorm1d(3)(torch.eye(3)))
