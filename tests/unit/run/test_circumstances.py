"""What decides bits besides the configuration: code, packages, data of every split, threads."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torchvision
from runs import validations
from torch import nn

from trainer import Config
from trainer.commands import compare
from trainer.commands.inspect import inspect
from trainer.commands.library import process_settings_restored, train
from trainer.config.fields import Duration
from trainer.config.schema import Batch, Checkpoint, Eval, Optim, WorldConfig
from trainer.errors import ConfigError
from trainer.run import circumstances, run_dir

LAYERS = "from torch.nn.functional import relu as activation\nWIDTH = 8\n"
TASK = '''
import dataclasses, torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer import Outcome
import code_layers

SEEDS = {"train": 0, "validation": 3}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, code_layers.WIDTH), nn.Linear(code_layers.WIDTH, 1)
    def forward(self, x):
        return self.b(code_layers.activation(self.a(x)))

@dataclasses.dataclass(frozen=True)
class Mine:
    def model(self):
        return Net()
    def dataset(self, split):
        if split not in SEEDS:
            return None
        draw = torch.Generator().manual_seed(SEEDS[split])
        x = torch.randn(40, 4, generator=draw)
        return TensorDataset(x, x.sum(1, keepdim=True))
    def loss(self, model, batch):
        x, y = batch
        return Outcome((model(x) - y).square().sum(), len(x))
'''


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    with process_settings_restored():
        yield


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Write a module and import it, again if it is there."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name: str, text: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        module = sys.modules.get(name)
        return importlib.import_module(name) if module is None else importlib.reload(module)

    yield write
    for name in ("code_layers", "code_task"):
        sys.modules.pop(name, None)


def trained(run: Path, task: Any, steps: int, **more: Any) -> Any:
    return train(Config(
        task=task, run=str(run), steps=steps, device="cpu", world=WorldConfig(threads=1),
        batch=Batch(global_size=8, micro_size=4), eval=Eval(every=Duration(2)),
        checkpoint=Checkpoint(every=Duration(2), keep=9), **more))


def reasons(run: Path, step: int) -> list[str]:
    path = run / f"checkpoints/step-{step:08d}/state.json"
    return json.loads(path.read_text())["inexact"]


def test_a_changed_file_is_named_and_the_run_is_only_equivalent(write, tmp_path):
    write("code_layers", LAYERS)
    task = write("code_task", TASK)
    trained(tmp_path / "run", task.Mine(), 4)
    assert inspect(tmp_path / "run")["next"] == "exact"

    write("code_layers", LAYERS.replace("relu", "gelu"))

    assert inspect(tmp_path / "run")["why"] == "changed: code_layers.py"
    trained(tmp_path / "run", task.Mine(), 6)
    assert reasons(tmp_path / "run", 6) == ["--steps was 4 and is 6", "changed: code_layers.py"]


def test_a_model_that_does_not_fit_its_checkpoint_is_refused_and_its_weights_begin_another(
        write, tmp_path):
    write("code_layers", LAYERS)
    task = write("code_task", TASK)
    trained(tmp_path / "run", task.Mine(), 4)
    write("code_layers", LAYERS.replace("8", "9"))

    with pytest.raises(ConfigError, match=r"checkpoint of step 4: a\.weight has shape") as end:
        trained(tmp_path / "run", task.Mine(), 6)

    path = str(end.value).partition("--init ")[2].partition(" --init-strict off")[0]
    trained(tmp_path / "other", task.Mine(), 2, init=path, init_strict="off")
    write("code_layers", LAYERS)
    trained(tmp_path / "run", task.Mine(), 6)
    assert reasons(tmp_path / "run", 6) == ["--steps was 4 and is 6"]


def test_other_validation_data_are_refused_or_best_and_patience_begin_anew(write, tmp_path):
    write("code_layers", LAYERS)
    task = write("code_task", TASK)
    straight = trained(tmp_path / "straight", task.Mine(), 4, optim=Optim(lr=1e-9))
    assert straight.summary["best"]["step"] == 2
    trained(tmp_path / "run", task.Mine(), 2, optim=Optim(lr=1e-9))
    task.SEEDS["validation"] = 1

    with pytest.raises(ConfigError, match=r"of the validation data was '40 .*--accept data\."):
        trained(tmp_path / "run", task.Mine(), 4, optim=Optim(lr=1e-9))

    trained(tmp_path / "run", task.Mine(), 4, optim=Optim(lr=1e-9), accept=("data",))
    state = json.loads((tmp_path / "run/checkpoints/step-00000004/state.json").read_text())
    first, second = validations(tmp_path / "run")
    assert first["val_loss"] < second["val_loss"]
    assert (state["best"]["step"], state["best"]["waited"]) == (4, 0)
    assert state["inexact"][1].endswith("best weights and patience begin anew")


def test_compare_names_what_decides_bits_before_the_first_difference(write, tmp_path, capsys):
    write("code_layers", LAYERS)
    task = write("code_task", TASK)
    for name, rate in (("a", 0.1), ("b", 0.2)):
        trained(tmp_path / name, task.Mine(), 2, optim=Optim(lr=rate))
        write("code_layers", LAYERS + "# other bytes\n")

    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    code, rate, first = capsys.readouterr().out.removeprefix("different: ").split("; ")
    assert code.startswith("code, code_layers.py is ")
    assert rate == "--optim.lr is 0.1 and 0.2"
    assert first.startswith("metrics.jsonl, step 1")


def test_the_hash_of_a_file_is_that_of_the_code_which_runs(write, tmp_path):
    write("code_layers", LAYERS)
    before = circumstances.loaded_code()["code_layers.py"]

    (tmp_path / "code_layers.py").write_text(LAYERS + "\n")
    assert circumstances.loaded_code()["code_layers.py"] == before

    write("code_layers", LAYERS + "\n")
    assert circumstances.loaded_code()["code_layers.py"] != before


def test_files_of_installed_packages_and_of_the_trainer_are_not_hashed():
    assert not [file for file in circumstances.loaded_code()
                if file.split("/")[0] in ("torch", "torchvision", "numpy", "json", "trainer")]


@pytest.mark.parametrize(("body", "equal"), [
    ("relu()", True), ("gelu()", False), ("relu() if x in {'a', 'b'} else x", False)])
def test_a_class_without_a_file_is_known_by_what_its_methods_compute(body, equal):
    def made(lines: str, body: str) -> dict[str, str]:
        module = ModuleType("notebook_cell")
        exec(f"{lines}class Net:\n    def forward(self, x):\n        return x.{body}",
             vars(module))
        sys.modules["notebook_cell"] = module
        try:
            return {name: code for name, code in circumstances.loaded_code([module.Net]).items()
                    if name == "class Net"}
        finally:
            del sys.modules["notebook_cell"]

    assert len(made("", "relu()")) == 1
    assert (made("", "relu()") == made("\n\n# a comment\n", body)) is equal


def test_the_packages_of_the_model_have_versions():
    classes = [type(m) for m in torchvision.models.resnet18().modules()] + [nn.Linear]

    found = circumstances._packages(classes)
    assert found == {"torchvision", "trainer"}
    assert run_dir.package_version("torchvision") == torchvision.__version__
    assert run_dir.package_version("no_such_package") is None
