"""Losses: equal to torch's for any split of the samples; wrong combinations are explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_cases import CASES, Plain, noise, numbers, one_step
from softmax_task import Softmax
from torch import Tensor, nn

from trainer import Outcome, losses
from trainer.distributed.ddp import Objective
from trainer.errors import ConfigError
from trainer.task import first_batch
from trainer.testing import check_task


@pytest.fixture(params=CASES)
def case(request: Any) -> tuple[Any, Plain, tuple[Tensor, ...]]:
    return CASES[request.param]


def test_every_loss_has_a_case():
    assert {type(loss) for loss, _, _ in CASES.values()} == set(losses.LOSSES.values())


def test_total_over_count_is_torchs_mean_with_torchs_gradient(case):
    loss, plain, (output, *others) = case
    ours, theirs = (output.clone().requires_grad_() for _ in range(2))

    total, count = loss(ours, *others)
    mean = plain(theirs, *others)
    (total / count).backward()
    mean.backward()

    torch.testing.assert_close(total / count, mean)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_no_sample_gives_zero_with_a_graph(case):
    loss, _, (output, *others) = case
    empty = output[:0].clone().requires_grad_()

    total, count = loss(empty, *(other[:0] for other in others))
    total.backward()

    assert float(total.detach()) == 0
    assert float(count) == 0
    assert empty.grad is not None


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (2, 2, 2, 2), (5, 3), (1, 7)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_micro_batches_of_any_size_give_the_gradient_of_the_whole_batch(name, sizes):
    """Runs the trainer's step, because it corrects for the count, not the loss."""
    _, plain, (output, *others) = CASES[name]
    expected = output.clone().requires_grad_()
    plain(expected, *others).backward()

    loss, gradient = one_step(name, sizes)

    assert abs(loss - float(plain(output, *others))) < 1e-6
    torch.testing.assert_close(gradient, expected.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["cross-entropy", "smoothed", "tokens", "weighted tokens",
                                  "probabilities"])
def test_the_form_for_deterministic_kernels_has_the_same_loss(name: str) -> None:
    _, plain, (output, target) = CASES[name]
    many = output[..., None].repeat(*[1] * output.dim(), 3) if output.dim() > 2 else output
    wanted = target[..., None].repeat(*[1] * target.dim(), 3) if output.dim() > 2 else target
    ours, theirs = (many.clone().requires_grad_() for _ in range(2))

    loss = plain(*losses.class_last(ours, wanted))
    loss.backward()
    plain(theirs, wanted).backward()

    torch.testing.assert_close(loss, plain(theirs, wanted))
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_balanced_classes_weigh_the_same_and_the_mean_weight_is_one():
    weights = losses.balanced([10, 30, 0, 60])

    assert [w * n for w, n in zip(weights, [10, 30, 0, 60], strict=True)] == pytest.approx(
        [100 / 3, 100 / 3, 0, 100 / 3])
    assert losses.balanced_positive([25, 100, 0], 100) == (3.0, 0.0, 1.0)


LOGITS = noise(40, 3).requires_grad_()
LABELS = numbers(40, below=3)
YES = numbers(40, 3, below=2).float()

WRONG: dict[str, tuple[str, tuple[Tensor, ...], str]] = {
    "softmax": ("cross-entropy", (LOGITS.softmax(1), LABELS), "went through a softmax.*logits"),
    "softmax without a graph": ("cross-entropy", (LOGITS.detach().softmax(1), LABELS), "softmax"),
    "sigmoid before cross-entropy": ("cross-entropy", (LOGITS.sigmoid(), LABELS), "sigmoid"),
    "label too high": ("cross-entropy", (LOGITS, LABELS + 1), "from 1 to 3, but 3 logits"),
    "label below 0": ("cross-entropy", (LOGITS, LABELS - 1), "from -1 to 1.*ignore_index"),
    "one logit": ("cross-entropy", (LOGITS[:, :1], LABELS), "loss bce"),
    "sigmoid": ("bce", (LOGITS.sigmoid(), YES), "went through a sigmoid.*logits"),
    "softmax before bce": ("bce", (LOGITS.softmax(1), YES), "softmax"),
    "class numbers": ("bce", (LOGITS[:, 0], LABELS.float()), "from 0 to 2.*cross-entropy"),
    "broadcast": ("mse", (LOGITS[:, 0], YES[:, :1]), r"unsqueeze\(1\)"),
    "huber": ("huber", (LOGITS[:, :1], YES[:, 0]), "output has shape .40, 1. and the target .40,."),
    "order of 0 and 1": ("margin-ranking", (LOGITS[:, 0], LOGITS[:, 1], YES[:, 0]),
                         r"2 \* order - 1"),
    "teacher's probabilities": ("kl", (LOGITS, LOGITS.detach().softmax(1)), "softmax"),
    "teacher with a graph": ("kl", (LOGITS, LOGITS * 2), r"no_grad"),
    "masks": ("dice+bce", (LOGITS.sigmoid()[:, :, None, None], YES[:, :, None, None]), "sigmoid")}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pairing_is_explained_on_the_first_batch(name):
    loss, arguments, message = WRONG[name]

    with first_batch(), pytest.raises(
            ConfigError, match=f"(?s)^{loss.replace('+', '.')}: .*{message}"):
        losses.named(loss)(*arguments)


def test_a_sigmoid_in_a_compiled_model_is_recognised_by_its_values():
    class CompiledFunctionBackward(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.sigmoid()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            return gradient

    CompiledFunctionBackward.__name__ = "CompiledFunction"
    with first_batch():
        with pytest.raises(ConfigError, match="sigmoid"):
            losses.BCE()(CompiledFunctionBackward.apply(LOGITS), YES)
        losses.BCE()(LOGITS * 0.01 + 0.5, YES)  # logits that happen to lie between 0 and 1
        losses.CrossEntropy()(LOGITS.log_softmax(1), LABELS)  # as good as logits


def test_each_run_checks_every_loss_of_its_first_batch_with_samples():
    loss = losses.named("cross-entropy")

    def heads(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        (one, count), (two, _) = (loss(x, batch[1]) for x in (model(batch[0]), batch[0]))
        return Outcome(one + two, count)

    right, wrong = (LOGITS, LABELS), (LOGITS.softmax(1), LABELS)
    for _ in range(2):
        objective = Objective(nn.Linear(3, 3), heads, num_ranks=1, nominal_count=1,
                              device=torch.device("cpu"))
        objective((LOGITS[:0], LABELS[:0]), 0)
        with pytest.raises(ConfigError, match="softmax"):
            objective(wrong, 40)
    objective(right, 40)
    objective(wrong, 40)  # a later batch may look like this by chance


def test_check_task_checks_the_losses_of_each_task():
    for _ in range(2):
        with pytest.raises(AssertionError, match="went through a softmax"):
            check_task(Softmax())


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"'crossentropy': .* use one of cross-entropy, bce"):
        losses.named("crossentropy")
