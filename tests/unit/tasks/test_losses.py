"""Losses: equal to torch's for any split of the samples; wrong combinations are explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_cases import CASES, Plain, noise, numbers, one_step
from torch import Tensor

from trainer.errors import ConfigError
from trainer.tasks import losses


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


# --- weights from counts

def test_balanced_classes_weigh_the_same_and_the_mean_weight_is_one():
    weights = losses.balanced([10, 30, 0, 60])

    assert [w * n for w, n in zip(weights, [10, 30, 0, 60], strict=True)] == pytest.approx(
        [100 / 3, 100 / 3, 0, 100 / 3])


def test_balanced_labels_give_positives_and_negatives_equal_weight():
    assert losses.balanced_positive([25, 100, 0], 100) == (3.0, 0.0, 1.0)


# --- wrong pairings

LOGITS = noise(40, 3).requires_grad_()
LABELS = numbers(40, below=3)
YES = numbers(40, 3, below=2).float()

WRONG: dict[str, tuple[str, tuple[Tensor, ...], str]] = {
    "softmax": ("cross-entropy", (LOGITS.softmax(1), LABELS), "went through a softmax.*logits"),
    "softmax, unsqueezed": ("cross-entropy", (LOGITS.softmax(1).double().float(), LABELS),
                            "went through a softmax"),
    "softmax without a graph": ("cross-entropy", (LOGITS.detach().softmax(1), LABELS), "softmax"),
    "sigmoid before cross-entropy": ("cross-entropy", (LOGITS.sigmoid(), LABELS), "sigmoid"),
    "label too high": ("cross-entropy", (LOGITS, LABELS + 1), "from 1 to 3, but 3 logits"),
    "label below 0": ("cross-entropy", (LOGITS, LABELS - 1), "from -1 to 1.*ignore_index"),
    "one logit": ("cross-entropy", (LOGITS[:, :1], LABELS), "loss bce"),
    "sigmoid": ("bce", (LOGITS.sigmoid(), YES), "went through a sigmoid.*logits"),
    "sigmoid, squeezed": ("bce", (LOGITS.sigmoid()[:, :1].squeeze(1), YES[:, 0]), "sigmoid"),
    "softmax before bce": ("bce", (LOGITS.softmax(1), YES), "softmax"),
    "class numbers": ("bce", (LOGITS[:, 0], LABELS.float()), "from 0 to 2.*cross-entropy"),
    "broadcast": ("mse", (LOGITS[:, 0], YES[:, :1]), r"unsqueeze\(1\)"),
    "huber": ("huber", (LOGITS[:, :1], YES[:, 0]), "output has shape .40, 1. and the target .40,."),
    "order of 0 and 1": ("margin-ranking", (LOGITS[:, 0], LOGITS[:, 1], YES[:, 0]),
                         r"2 \* order - 1"),
    "teacher's probabilities": ("kl", (LOGITS, LOGITS.detach().softmax(1)), "softmax"),
    "teacher with a graph": ("kl", (LOGITS, LOGITS * 2), r"no_grad"),
    "masks": ("dice+bce", (LOGITS.sigmoid()[:, :, None, None], YES[:, :, None, None]), "sigmoid"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pairing_is_explained_on_the_first_batch(name):
    loss, arguments, message = WRONG[name]

    with pytest.raises(ConfigError, match=f"(?s)^{loss.replace('+', '.')}: .*{message}"):
        losses.LOSSES[loss]()(*arguments)


def test_an_empty_first_batch_is_not_checked_but_the_next_one_is():
    loss = losses.CrossEntropy()
    loss(LOGITS[:0], LABELS[:0])

    with pytest.raises(ConfigError, match="softmax"):
        loss(LOGITS.softmax(1), LABELS)


def test_a_sigmoid_in_a_compiled_model_is_recognised_by_its_values():
    class CompiledFunctionBackward(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.sigmoid()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            return gradient

    CompiledFunctionBackward.__name__ = "CompiledFunction"
    with pytest.raises(ConfigError, match="sigmoid"):
        losses.BCE()(CompiledFunctionBackward.apply(LOGITS), YES)


def test_logits_that_happen_to_lie_between_0_and_1_are_no_sigmoid():
    losses.BCE()(LOGITS * 0.01 + 0.5, YES)


def test_log_probabilities_are_fine_for_cross_entropy():
    ours = losses.CrossEntropy()(LOGITS.log_softmax(1), LABELS)[0]

    torch.testing.assert_close(ours, losses.CrossEntropy()(LOGITS, LABELS)[0])


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"'crossentropy': .* use one of cross-entropy, bce"):
        losses.named("crossentropy")
