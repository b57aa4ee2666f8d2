"""The pages of docs/: what they quote is in the code, their flags exist, their examples run."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lessons import lab, wrong_orders
from trainer import ConfigError
from trainer.__main__ import DRY_RUN
from trainer.config.command_line import parse_config
from trainer.config.schema import SCHEDULES
from trainer.data.stream_reader import StreamSpec
from trainer.resilience import fault_injection
from trainer.run.stream_proof import prove_stream
from trainer.task import METHOD_ARGUMENTS, Task
from trainer.tasks.losses import LOSSES

ROOT = Path(__file__).parents[3]
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))} | {
    "../README": (ROOT / "README.md").read_text()}


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def example(text: str, first: str = "") -> str:
    """The first block of Python that begins so."""
    return re.search(rf"```python\n({first}.*?)```", text, re.DOTALL)[1]


# --- flags, faults and members of a task

@pytest.mark.parametrize("name", PAGES)
def test_each_flag_exists_and_takes_the_values_that_are_given_for_it(name):
    page = PAGES[name]
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    known = {"--" + name.replace("_", "-") for name, *_ in parse_config(["sample"]).leaves()}

    assert set(re.findall(r"--(?!task\.)[a-z]+\.[a-z0-9-]+\b", page)) <= known
    for code in codes(text):
        placeholder = re.search(r"\b[A-Z]+\b|\|", code)
        if re.match(r"--(?!task\.)[a-z]+\.[a-z0-9-]+[ =]", code) and not placeholder:
            parse_config(["sample", *shlex.split(code)])


def test_each_kind_and_phase_of_a_fault_is_described():
    page = PAGES["schedulers"]
    kinds = re.search(r"\| KIND \|.*?\n\n", page, re.DOTALL)
    phases = re.search(r"^P is .*?\.$", page, re.DOTALL | re.MULTILINE)
    assert kinds
    assert phases

    first = " ".join(row.split("|")[1] for row in kinds[0].splitlines()[2:] if row)
    assert set(codes(first)) == set(fault_injection.KINDS)
    assert set(codes(phases[0])) == set(fault_injection.PHASES)


def test_each_member_of_a_task_is_described():
    page = PAGES["your-own-task"]
    table = re.search(r"\| member \|.*?\n\n", page, re.DOTALL)
    assert table
    assert Task.__doc__

    named = {re.split(r"\W", code)[0] for row in table[0].splitlines()[2:] if row
             for code in codes(row.split("|")[1])}
    optional = set(re.findall(r"^    - `(\w+)", Task.__doc__, re.MULTILINE))
    assert named == set(METHOD_ARGUMENTS) | optional | {"preview"}


# --- from-other-trainers.md

CLASSES = {"Trainer": "pytorch_lightning", "Accelerator": "accelerate",
           "TrainingArguments": "transformers"}


def rows(name: str) -> list[tuple[str, str]]:
    """The rows of the table of a class: theirs and ours."""
    head = f"| `{name}(…)` | flags |\n|---|---|\n"
    table = PAGES["from-other-trainers"].partition(head)[2].partition("\n\n")[0]
    return [tuple(cell.strip("| ") for cell in row.split(" | ")[:2]) for row in table.splitlines()]


@pytest.mark.parametrize("name", CLASSES)
def test_each_argument_is_one_of_the_class(name):
    module = pytest.importorskip(CLASSES[name])
    known = inspect.signature(getattr(importlib.import_module(module.__name__), name)).parameters

    for theirs, _ in rows(name):
        for code in codes(theirs):
            call = ast.parse(f"f({code})", mode="eval").body
            assert isinstance(call, ast.Call)
            assert {argument.arg for argument in call.keywords} <= known.keys(), code


@pytest.mark.parametrize("name", CLASSES)
def test_each_flag_can_be_parsed(name):
    found = rows(name)
    assert len(found) > 6
    for theirs, ours in found:
        flags = [code for code in codes(ours) if code.startswith("--")]
        assert flags or "`" in ours or "same command" in ours, theirs
        for code in flags:
            if code != DRY_RUN:
                parse_config(shlex.split(code))


# --- the-loop.md

def tables() -> Iterator[list[list[str]]]:
    """The cells of each table, the head first."""
    for found in re.findall(r"(?:^\|.*\|\n)+", PAGES["the-loop"], re.MULTILINE):
        lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                 for line in found.splitlines()]
        yield [lines[0], *lines[2:]]


def table(first: str) -> list[list[str]]:
    """The rows below the head whose first cell begins so."""
    (found,) = [rows for rows in tables() if rows[0][0].startswith(first)]
    return found[1:]


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


def test_the_tables_to_choose_from_know_all_schedules_and_losses():
    chosen = {code for *_, flags in table("you know") for text in codes(flags)
              for code in re.findall(r"--schedule\.name ([\w-]+)", text)}

    assert chosen <= set(SCHEDULES)
    assert {code for row in table("what is predicted") for code in codes(row[-1])} == set(LOSSES)


def test_anchors_are_unique_and_links_lead_somewhere():
    anchors = re.findall(r'<a id="([\w-]+)">', PAGES["the-loop"])

    assert len(set(anchors)) == len(anchors) > 10
    for page in ("the-loop", "lab"):
        for path, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", PAGES[page]):
            assert not path or (ROOT / "docs" / path).exists(), path
            assert not anchor or anchor in anchors, anchor


# --- lab.md

COMMANDS = lab.commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_of_the_lab_can_be_parsed(name):
    command = COMMANDS[name]

    config = parse_config(command[command.index("--") + 1 :])

    assert config.epochs == lab.EPOCHS


def test_the_table_of_the_lab_has_a_row_for_each_step():
    head, _, *rows = [line for line in PAGES["lab"].splitlines()
                      if line.startswith("|")][-len(COMMANDS) - 2:]

    assert head.startswith("| step | test | validation |")
    assert [row.split("|")[1].strip() for row in rows] == [*COMMANDS]
    assert len(rows) == 9


# --- examples

def test_the_mixture_of_parquet_files_is_exact(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    paths = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    for path in paths:
        rows = {"x": [*range(100)], "y": [path] * 100, "z": [0.0] * 100}
        parquet.write_table(table(rows), path, row_group_size=10)
    names: dict[str, Any] = {}
    exec(example(PAGES["data"], "import pyarrow"), names)

    dataset = names["Mixture"](paths, lambda row: (row["y"][-9], row["x"]))
    proof = prove_stream(StreamSpec(dataset=dataset, lanes=2, micro_size=8, seed=1), range(2),
                         daemon=True)
    every = [[*dataset.lane(lane, 2)] for lane in range(2)]

    assert proof.tried[0] > 1
    assert (proof.problem, proof.unlike) == ("", "")
    assert {row for lane in every for row in lane} == {
        (name, x) for name in "ab" for x in range(100)}
    dataset.set_epoch(1)
    assert [*dataset.lane(0, 2)] != every[0]


def test_the_first_example_runs_again_and_only_with_a_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = example(PAGES["your-own-task"])
    seed = next(line for line in cell.splitlines() if "manual_seed" in line)

    def run(text: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(text, names)
        return names

    first, again = run(cell), run(cell)

    model, x, y = first["done"].model, first["x"], first["y"]
    assert (model(x) - y).square().mean().item() < 7, "of targets with a variance of 8"
    assert torch.equal(model.weight, again["done"].model.weight)
    torch.seed()
    with pytest.raises(ConfigError, match="random numbers drawn before the run"):
        run(cell.replace(seed, ""))


def test_the_example_with_metrics_of_torchmetrics_runs(tmp_path, monkeypatch):
    pytest.importorskip("torchmetrics")
    monkeypatch.chdir(tmp_path)
    section = PAGES["your-own-task"].partition("## Metrics that are no means")[2]

    exec(example(section), {"__name__": "__main__"})

    line = json.loads(Path("runs/detect/metrics.jsonl").read_text().splitlines()[-1])
    assert {"val_loss", "val_auroc", "val_clean_auroc", "val_noisy_ap"} <= {*line}
    assert line["val_auroc"] == line["val_clean_auroc"] > line["val_noisy_auroc"] > 0.5
