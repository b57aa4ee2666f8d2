"""The shape of the code: layers, sizes, names, and that nothing is declared without being used."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from trainer.config import schema
from trainer.config.fields import Duration
from trainer.resilience import fault_injection

ROOT = Path(__file__).parents[1]

LAYERS = {
    # Know nothing of the rest: errors, numbers, bytes, sockets, threads.
    0: "errors adamw allocator append communication confusion diagnosis drawing durable handles "
       "handshake hang length network packing pipe processes rng snapshot stop progress "
       "tensorfile data tasks commands recipes",
    # One thing each on top of that.
    1: "anomaly attempts attributes buffers device ema flags generators given graph groups "
       "heartbeats leaf job limits lock log manifest memory orders pairing pretrained pulse "
       "recompute stacks timing data.augment data.bad data.batch data.sampler",
    2: "config_run config_training data.reading faults hints losses pace reduced sinks state store "
       "task tasks.gpt tree waiting world",
    3: "agreement alarm config data.loader folder launcher leaks outcome source sync_batchnorm "
       "tasks.fashion_mnist tasks.image_models tasks.shapes tasks.spiral tasks.text",
    # What the configuration sets.
    4: "budget cli compile_cache data.feed failure health optim parallel pictures precision "
       "restore resume schedules storable tasks.images tasks.photos wandb_sink watchdog",
    5: "checkpoint data.lanes prepare rereading step",
    6: "alike blame canonical data.stream evaluate hidden testing",
    7: "metrics",
    8: "card console level parts",
    # The one that constructs, and what uses all of it.
    9: "opening product recovery commands.history",
    10: "boundary build start commands.charts commands.figures commands.inspect",
    11: "loop reader scratch commands.page commands.plots",
    12: "commands.*",
    13: "__main__",
    14: "library",
    15: "__init__",
}
"""Layer → its modules. A module imports from lower layers only; what it needs of a higher one is
passed in."""

MAX_LINES, MAX_LOOP = 350, 60
MAX_LEAVES = 75
"""Flags of the configuration, the task's apart: what one reader of --help can take in. A new one
has to be worth it, or to take the place of another."""
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


def modules(package: str = "trainer") -> dict[str, Path]:
    """Dotted name below the package → file."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def layer_of(name: str) -> int:
    for number, names in LAYERS.items():
        if name in names.split():
            return number
    family = f"{name.rpartition('.')[0]}.*"
    for number, names in LAYERS.items():
        if family in names.split():
            return number
    raise AssertionError(f"trainer/{name.replace('.', '/')}.py is in no layer: add it to LAYERS")


def imported(path: Path, package: str = "trainer") -> Iterator[tuple[str, int]]:
    """(module of the package, line) for each import, at module level or inside a function."""
    known = modules(package)
    for node in ast.walk(tree(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] != package:
                continue
            inner = name.partition(".")[2]
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            yield inner or "__init__", node.lineno


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in modules(package).values()]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def called_with_text(path: Path) -> Iterator[tuple[str, str]]:
    """(name of the function or method, first argument) of each call with a literal text."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(
                function, "id", "")
            if isinstance(node.args[0].value, str):
                yield name, node.args[0].value


# --- layers

def test_every_module_has_a_layer_and_every_name_in_the_table_is_a_module():
    known = modules()
    listed = [name for names in LAYERS.values() for name in names.split()]

    assert len(listed) == len(set(listed))
    assert [name for name in listed if not name.endswith("*") and name not in known] == []
    assert all(layer_of(name) >= 0 for name in known)


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_from_lower_layers_only(name):
    path, own = modules()[name], layer_of(name)

    upward = [f"line {line}: {other} (layer {layer_of(other)})"
              for other, line in imported(path) if layer_of(other) >= own]

    assert upward == [], f"trainer.{name} is in layer {own}"


def test_the_trainer_does_not_know_the_launcher():
    for path in sources("trainer"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [
                    node.module or ""]
                assert not any(n.split(".")[0] == "launch" for n in names), path


@pytest.mark.parametrize("name", ["trainer.__main__", "trainer.checkpoint.store",
                                  "trainer.resilience.fault_injection",
                                  "launch.__main__", "launch.chaos"])
def test_what_runs_before_or_without_torch_does_not_import_it(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- sizes and names

@pytest.mark.parametrize("path", sources("trainer", "launch"), ids=_name)
def test_a_module_is_short_and_says_what_it_is_for(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES
    if path.read_text().strip():
        told = ast.get_docstring(tree(path))
        assert told, "a module opens with its job in one sentence"
        assert re.match(r"[^\n]+(\n[^\n]+)*?[.:](\s|$)", told), told
    assert path.stem not in EMPTY_NAMES


def test_the_training_loop_fits_a_screen():
    assert code_lines(modules()["loop"].read_text()) <= MAX_LOOP


def code_lines(text: str) -> int:
    """Lines with code on them: not blank, no comment, no docstring."""
    told = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                assert first.end_lineno is not None
                told |= set(range(first.lineno, first.end_lineno + 1))
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
             tokenize.ENDMARKER)
    used = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            used |= set(range(token.start[0], token.end[0] + 1))
    return len(used - told)


def test_lines_of_code_are_counted_without_comments_docstrings_and_blank_lines():
    text = '"""Job."""\n\nx = 1  # why\n# a comment\n\n\ndef f():\n    """Doc\n    more."""\n' \
           '    return (x +\n            1)\n'

    assert code_lines(text) == 4


# --- configuration

def leaves(cls: type = schema.Config, section: str = "") -> Iterator[tuple[str, str, type]]:
    """(section, leaf, class that declares it) of the whole configuration, the task's apart."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default) and not isinstance(field.default, Duration):
            yield from leaves(type(field.default), field.name)
        elif (section, field.name) != ("", "task"):
            yield section, field.name, cls


CONFIG = ("config", "config_run", "config_training")


def attributes(node: ast.AST) -> set[tuple[str, str]]:
    """(what is before the dot, name) of each attribute that is read."""
    return {
        (getattr(n.value, "attr", getattr(n.value, "id", "")).lstrip("_"), n.attr)
        for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
    }


@cache
def reads() -> set[tuple[str, str]]:
    """The attributes read outside `config`, and by methods of `config` that are used there."""
    outside = set().union(*(attributes(tree(path)) for name, path in modules().items()
                            if name not in CONFIG))
    methods = [n for name in CONFIG for n in ast.walk(tree(modules()[name]))
               if isinstance(n, ast.FunctionDef)]
    through = set().union(*(attributes(method) for method in methods
                            if method.name in {name for _, name in outside}))
    return outside | {("config", name) for before, name in through if before == "self"}


@pytest.mark.parametrize(("section", "leaf", "cls"), list(leaves()),
                         ids=lambda v: getattr(v, "__name__", v))
def test_a_leaf_of_the_configuration_is_read_and_documented(section, leaf, cls):
    assert {(section or "config", leaf), ("config", leaf)} & reads(), (
        f"nothing reads {section}.{leaf}")
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    places = [i for i, node in enumerate(body) if isinstance(node, ast.AnnAssign)
              and isinstance(node.target, ast.Name) and node.target.id == leaf]
    after = body[places[0] + 1]
    assert isinstance(after, ast.Expr), f"{section}.{leaf} has no docstring"
    assert isinstance(after.value, ast.Constant)
    assert str(after.value.value).endswith(".")


def test_the_configuration_stays_within_its_budget():
    assert len(list(leaves())) <= MAX_LEAVES


# --- faults

@pytest.mark.parametrize("phase", fault_injection.PHASES)
def test_each_fault_point_is_somewhere_in_the_run(phase):
    points = {text for name, path in modules().items() if name != "faults"
              for called, text in called_with_text(path) if called.strip("_") in ("at", "fault")}

    assert phase in points


def test_each_fault_point_of_the_run_is_known():
    points = {text for name, path in modules().items() if name != "faults"
              for called, text in called_with_text(path) if called.strip("_") in ("at", "fault")}

    assert points <= set(fault_injection.PHASES)


# --- no pickle, nothing heavy

@pytest.mark.parametrize("path", sources("trainer", "launch"), ids=_name)
def test_nothing_is_pickled(path):
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            assert name.split(".")[0] not in ("pickle", "_pickle", "cloudpickle", "dill", "shelve")
            assert not re.search(r"(gather|broadcast|scatter|send|recv)_object(_list)?$", name)
            assert name != "torch.save"
            # Safe mode runs nothing of what it reads.
            assert name != "torch.load" or 'weights_only=True' in path.read_text()


def test_the_default_task_trains_without_torchvision(tmp_path):
    code = ("import sys; from trainer.__main__ import main\n"
            f"code = main(['--steps=1', '--device=cpu', '--run-dir={tmp_path}/run'])\n"
            "print('code', code, 'torch' in sys.modules, 'torchvision' in sys.modules)")

    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                           timeout=250, check=False)

    assert ended.stdout.splitlines()[-1:] == ["code 0 True False"], ended.stderr
    assert (tmp_path / "run/checkpoints/step-00000001/model.safetensors").exists()
