"""Metrics of torchmetrics: those of the library in one process, from batches in any order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.distributed.world import LaunchInfo, World
from trainer.errors import ConfigError
from trainer.run.metric_states import MetricStates
from trainer.task import task_metrics

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import classification, text, wrappers  # noqa: E402
from torchmetrics.image import PeakSignalNoiseRatio  # noqa: E402

CPU = torch.device("cpu")
DRAW = torch.Generator().manual_seed(0)
CLASSES = [(torch.rand(n, 3, generator=DRAW), torch.randint(0, 3, (n,), generator=DRAW))
           for n in (5, 7, 1, 4)]  # fmt: skip
BINARY = [(scores[:, 0], (labels > 0).long()) for scores, labels in CLASSES]
TEXTS = [(["a b c d", "a c"], [["a b c e"], ["a c d", "c"]]), (["d e f"], [["d e f g"]]), ([], [])]


def boxes(count: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Predicted and true boxes of three pictures."""
    def some(extra: int, **more: Tensor) -> dict[str, Tensor]:
        corners = torch.rand(count + extra, 2, generator=DRAW) * 50
        return {"boxes": torch.cat([corners, corners + 30], 1),
                "labels": torch.randint(0, 2, (count + extra,), generator=DRAW), **more}

    return ([some(1, scores=torch.rand(count + 1, generator=DRAW)) for _ in range(3)],
            [some(0) for _ in range(3)])


def detection() -> Any:
    pytest.importorskip("pycocotools")
    from torchmetrics.detection import MeanAveragePrecision

    return {"map": MeanAveragePrecision()}


CASES = {
    "auroc": (lambda: {"auroc": classification.BinaryAUROC()}, BINARY),
    "binned": (lambda: {"auroc": classification.BinaryAUROC(thresholds=9)}, BINARY),
    "precision": (lambda: {"ap": classification.BinaryAveragePrecision()}, BINARY),
    "classes": (lambda: {"acc": classification.MulticlassAccuracy(3, average=None)}, CLASSES),
    "named": (lambda: {"acc": wrappers.ClasswiseWrapper(
        classification.MulticlassAccuracy(3, average=None))}, CLASSES),
    "collection": (lambda: torchmetrics.MetricCollection(
        [classification.MulticlassF1Score(3), classification.MulticlassAUROC(3)]), CLASSES),
    "bleu": (lambda: {"bleu": text.BLEUScore(n_gram=2)}, TEXTS),
    "float sums": (lambda: {"mean": torchmetrics.MeanMetric(), "most": torchmetrics.MaxMetric()},
                   [(scores,) for scores, _ in CLASSES]),
    "constant": (lambda: {"psnr": PeakSignalNoiseRatio(data_range=1.0)},
                 [(scores, scores.flip(0)) for scores, _ in CLASSES]),
    "detection": (detection, [boxes(2), boxes(0), boxes(3)]),
}


def flat(value: Any) -> list[float]:
    """The recorded values of a metric."""
    if isinstance(value, dict):
        return [float(v) for v in value.values() if v.numel() == 1]
    return value.flatten().tolist()


@pytest.mark.parametrize("case", CASES)
def test_the_values_are_those_of_the_library_in_one_process(case: str) -> None:
    make, batches = CASES[case]
    library = dict(make().items())
    for metric in library.values():
        for batch in batches:
            metric.update(*batch)
    expected = [number for metric in library.values() for number in flat(metric.compute())]

    states = MetricStates(SimpleNamespace(metrics=make), CPU)
    for _ in range(2):  # a second evaluation begins anew
        states.begin()
        for number in reversed(range(len(batches))):
            states.add(number, dict.fromkeys(library, batches[number]))
        states.add(-1, dict.fromkeys(library, batches[0]))  # a stand-in
        found = states.compute(World(LaunchInfo(), CPU, 1))

        assert list(found.values()) == expected
    if case == "classes":
        assert list(found) == ["acc_0", "acc_1", "acc_2"]
    if case == "named":
        assert list(found) == [f"acc_multiclassaccuracy_{n}" for n in range(3)]
    if case == "detection":
        assert {"map", "map_50"} <= {*found}


@pytest.mark.parametrize(("metrics", "message"), [
    (lambda: {"r": torchmetrics.PearsonCorrCoef()}, r"'mean_x' of 'r' \(PearsonCorrCoef\) is red"),
    (lambda: {"r": wrappers.Running(torchmetrics.SumMetric())}, r"'r' \(Running\) is reduced by"),
    (lambda: [1], r"metrics\(\): a list in place of a metric; return a dict of name: torchmetrics"),
    (lambda: {"all": torchmetrics.MetricCollection([torchmetrics.MeanMetric()])},
     "a MetricCollection in place of a metric; return a dict .*, or one MetricCollection"),
    (lambda: {"loss": torchmetrics.MeanMetric()}, r"metrics\(\) has 'loss', but val_loss is taken"),
])
def test_what_cannot_be_merged_is_refused(metrics: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MetricStates(SimpleNamespace(metrics=metrics), CPU)


def test_missing_arguments_and_too_many_values_are_refused() -> None:
    states = MetricStates(SimpleNamespace(
        metrics=lambda: {"roc": classification.BinaryROC()}), CPU)
    for wrong in (None, {"other": BINARY[0]}):
        with pytest.raises(ConfigError, match=r"metrics\(\) has 'roc', but .* predictions="):
            states.add(0, wrong)
    states.add(0, (torch.arange(200) / 200, torch.arange(200) % 2))
    with pytest.raises(ConfigError, match=r"'roc' has \d+ values; use a metric of at most 100"):
        states.compute(World(LaunchInfo(), CPU, 1))


def test_a_data_set_may_leave_out_metrics_in_all_of_its_batches() -> None:
    states = MetricStates(SimpleNamespace(metrics=lambda: {
        "auroc": classification.BinaryAUROC(), "bleu": text.BLEUScore()}), CPU)
    states.add(0, {"auroc": BINARY[0]})
    states.add(1, {"auroc": BINARY[1]})
    assert [*states.compute(World(LaunchInfo(), CPU, 1))] == states.computed == ["auroc"]

    states.add(2, {"bleu": TEXTS[0]})
    with pytest.raises(ConfigError, match=r"for the metrics \['auroc'\], and those of another"):
        states.compute(World(LaunchInfo(), CPU, 1))
    states.begin()
    states.add(0, {})
    assert states.compute(World(LaunchInfo(), CPU, 1)) == {}


def test_a_task_may_use_the_name_otherwise() -> None:
    assert task_metrics(SimpleNamespace(metrics=("accuracy",))) == {}


def test_what_a_metric_remembers_beside_its_states_does_not_reach_the_next_validation() -> None:
    states = MetricStates(SimpleNamespace(metrics=lambda: {
        "acc": wrappers.MinMaxMetric(classification.BinaryAccuracy())}), CPU)
    found = []
    for target in ([1, 1], [1, 0]):
        states.begin()
        states.add(0, (torch.tensor([1, 1]), torch.tensor(target)))
        found.append(states.compute(World(LaunchInfo(), CPU, 1)))

    assert found[1]["acc_max"] == found[1]["acc_raw"] == 0.5
