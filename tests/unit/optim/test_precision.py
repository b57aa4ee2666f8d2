"""Precision policy: number formats, compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from trainer.config.command_line import parse_config
from trainer.config.schema import Precision
from trainer.distributed.ddp import Objective
from trainer.errors import ConfigError
from trainer.optim import precision
from trainer.task import Outcome


@pytest.mark.parametrize(("wanted", "eager", "compiled", "mode"), [
    ("max-autotune", False, True, "max-autotune"), ("on", False, True, None),
    ("auto", False, False, None), ("on", True, False, None), ("max-autotune", True, False, None)])
def test_a_mode_of_torch_compile_is_passed_on_unless_the_run_is_eager(
        wanted, eager, compiled, mode):
    chosen = precision.resolve(Precision(compile=wanted), nn.Linear(1, 1), torch.device("cpu"),
                               eager=eager)

    assert (chosen.compile, chosen.mode) == (compiled, mode)


def test_kernels_chosen_by_their_speed_are_refused_in_a_deterministic_run():
    with pytest.raises(ConfigError, match=r"max-autotune: .*add --numerics.deterministic off"):
        parse_config(["--precision.compile=max-autotune"])

    parse_config(["--precision.compile=max-autotune", "--numerics.deterministic=off"])


class Layer(nn.Linear):
    """A user's module: some versions of torch do not compile a single module of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # from torch 2.11's compiler
def test_wrappers_are_removed_and_the_model_stays_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled(module):
        return torch.compile(module, backend=backend)

    part, twice = compiled(Layer(1, 1)), nn.DataParallel(Layer(1, 1))

    for wrapped in (nn.Sequential(part, twice, twice), nn.DataParallel(compiled(nn.Sequential(
            *(Layer(1, 1) for _ in range(3)))))):
        model = precision.unwrap(wrapped)
        graphs.clear()
        model(torch.ones(1, 1))

        assert [*model.state_dict()] == [
            f"{place}.{name}" for place in range(3) for name in ("weight", "bias")]
        assert graphs


def test_gradients_of_float64_have_full_precision():
    model = nn.Linear(1, 1, dtype=torch.float64)
    objective = Objective(model, lambda model, x: Outcome(model(x).sum(), len(x)), num_ranks=1,
                          nominal_count=3, device=torch.device("cpu"))

    loss = objective(torch.ones(1, 1, dtype=torch.float64), 1)
    loss.backward(objective.gradients[loss.dtype])

    assert model.weight.grad == 1 / 3


def test_determinism_can_be_turned_off_again():
    for wanted in (True, False):
        precision.set_determinism(wanted)
        assert torch.are_deterministic_algorithms_enabled() == wanted


CONV, MATMUL = torch.backends.cudnn.conv, torch.backends.cuda.matmul


def use_newer_settings() -> None:
    MATMUL.fp32_precision = CONV.fp32_precision = "tf32"


@pytest.fixture
def tf32_of_torch() -> Iterator[None]:
    """Torch's own settings afterwards."""
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    MATMUL.fp32_precision = "none"


@pytest.mark.parametrize("of_user", [
    lambda: None, use_newer_settings, lambda: setattr(torch.backends, "fp32_precision", "tf32")])
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_as_set_whichever_api_user_code_has_used(
    of_user: Callable[[], None], allowed: bool, tf32_of_torch: None
) -> None:
    """Torch raises where a process reads the older settings after it has used the newer ones."""
    of_user()
    before = CONV.fp32_precision, MATMUL.fp32_precision

    with precision.tf32_restored():
        precision.set_tf32(allowed)
        found = torch.backends.cudnn.allow_tf32, MATMUL.allow_tf32
        newer = CONV.fp32_precision, MATMUL.fp32_precision

    assert found == (allowed, allowed)
    assert newer == ("tf32" if allowed else "ieee",) * 2
    assert (CONV.fp32_precision, MATMUL.fp32_precision) == before
