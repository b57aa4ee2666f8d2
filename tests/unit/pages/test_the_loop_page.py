"""docs/the-loop.md and the code say the same: lines, flags, names, and what was measured."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.lessons import wrong_orders
from trainer.config.command_line import find_recipe, load
from trainer.config.schema import SCHEDULES
from trainer.tasks.losses import LOSSES

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / f"docs/{name}.md" for name in ("the-loop", "lab")]
PAGE = PAGES[0].read_text()


def tables(text: str = PAGE) -> Iterator[list[list[str]]]:
    """The cells of each table, the head first."""
    for found in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                 for line in found.splitlines()]
        yield [lines[0], *lines[2:]]


def table(first: str) -> list[list[str]]:
    """The rows below the head whose first cell begins so."""
    (found,) = [rows for rows in tables() if rows[0][0].startswith(first)]
    return found[1:]


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_each_quoted_line_is_in_its_file():
    checked = 0
    for head, *rows in tables():
        for column, name in enumerate(head):
            if not name.endswith(".py`"):
                continue
            text = (ROOT / name.strip("`")).read_text()
            lines = {line.strip() for line in re.sub(r"  # .*", "", text).splitlines()}
            for row in rows:
                for code in codes(row[column]):
                    assert code in lines, f"{name}: {code}"
                    checked += 1
    assert checked > 40


def test_each_row_of_the_table_holds():
    threads = torch.get_num_threads()
    with warnings.catch_warnings(action="error"):
        measured = wrong_orders.measure(list(wrong_orders.rows()))
    torch.set_num_threads(threads)

    assert [row["name"] for row in measured if not row["holds"]] == []
    assert set(wrong_orders.rows()) == set(wrong_orders.MISTAKES)


def test_each_flag_on_the_pages_is_one_of_the_configuration():
    known = {"--" + name.replace("_", "-") for name, *_ in load(find_recipe("sample")).leaves()}
    known |= {"--run-dir", "--rows", "--markdown", "--json", "--nproc-per-node", "--max-restarts"}

    for page in PAGES:
        told = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", page.read_text()))
        assert told - known == set(), page.name


def test_each_command_on_the_page_has_values_that_the_configuration_takes():
    from trainer.config.command_line import parse_config

    for text in codes(PAGE):
        if text.startswith("--") and " " in text:
            parse_config(["sample", *text.split()])


def test_the_tables_to_choose_from_know_all_schedules_and_losses():
    chosen = {code for *_, flags in table("you know") for text in codes(flags)
              for code in re.findall(r"--schedule\.name ([\w-]+)", text)}

    assert chosen <= set(SCHEDULES)
    assert {code for row in table("what is predicted") for code in codes(row[-1])} == set(LOSSES)


def test_anchors_are_unique_and_links_lead_somewhere():
    anchors = re.findall(r'<a id="([\w-]+)">', PAGE)

    assert len(set(anchors)) == len(anchors) > 10
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", page.read_text()):
            assert not path or (page.parent / path).exists(), path
            assert not anchor or anchor in anchors, anchor


# --- what the page says of torch without a row of its own

def test_clipping_by_value_tells_no_norm():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)

    assert nn.utils.clip_grad_value_([weight], 0.5) is None


def test_a_kept_loss_holds_its_activations_only_until_backward():
    live = set()

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor.detach()
            live.add(id(self))

        def __del__(self) -> None:
            live.discard(id(self))

    weight = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        loss = (weight * 2).exp().sum()
    assert live
    loss.backward()
    assert not live
    assert loss.grad_fn is not None


def test_a_mean_is_over_the_weights_of_the_targets_that_count():
    logits, target = torch.randn(4, 3), torch.tensor([0, 1, -100, 2])
    weight = torch.tensor([1.0, 2.0, 3.0])

    mean = functional.cross_entropy(logits, target, weight)
    total = functional.cross_entropy(logits, target, weight, reduction="sum")

    torch.testing.assert_close(mean, total / (1 + 2 + 3))


def test_the_plain_mean_of_a_divergence_is_too_small_by_the_number_of_classes():
    own, other = torch.randn(4, 10).log_softmax(1), torch.randn(4, 10).softmax(1)
    with warnings.catch_warnings(action="ignore"):
        plain = functional.kl_div(own, other, reduction="mean")

    torch.testing.assert_close(functional.kl_div(own, other, reduction="batchmean"), 10 * plain)


def test_parameters_gives_frozen_ones_too():
    assert len(list(nn.Linear(2, 2).requires_grad_(False).parameters())) == 2


def test_gradients_are_set_to_none_unless_told():
    default = inspect.signature(torch.optim.Optimizer.zero_grad).parameters["set_to_none"].default

    assert default is True


def test_names_of_the_day_before_raise():
    from torch.utils.checkpoint import checkpoint_sequential

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match="verbose"):
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, verbose=True)
    with pytest.raises(TypeError, match="segments"):
        checkpoint_sequential(nn.Sequential(nn.Linear(1, 1)), chunks=1, input=torch.ones(1))
    with (pytest.raises(TypeError, match="device_type"),
          warnings.catch_warnings(action="ignore")):
        torch.cuda.amp.autocast(device_type="cuda")


def test_backward_takes_the_format_of_its_forward_and_weights_stay_fp32():
    layer, seen = nn.Linear(4, 4), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(torch.ones(2, 4))
    output.register_hook(lambda gradient: seen.append(gradient.dtype))
    output.sum().backward()

    assert seen == [torch.bfloat16]
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
