"""The shape of the code: rooms and their order, sizes, names, and that nothing is unused."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from trainer.config import schema
from trainer.config.fields import Duration
from trainer.resilience import fault_injection
from trainer.resilience.progress_marks import POINTS
from trainer.telemetry.status import Phase

ROOT = Path(__file__).parents[1]

ROOMS = (
    "errors rng", "storage", "task", "telemetry", "distributed", "resilience",
    "config", "data", "optim", "checkpoint", "step", "run", "tasks", "loop", "commands", "testing",
    "__init__ __main__")
"""The rooms of `trainer/` and the modules beside them, in their order. A module imports from its
own room and from rooms before it; what it needs of a later one is passed in."""

MAX_ENTRIES = 20
"""Files and folders directly in `trainer/`."""
MAX_LOOP = 60
MAX_FUNCTION, MAX_PARAMETERS = 60, 8
LARGER: dict[str, str] = {}
"""Functions that are larger, each with its reason; at most 5."""
MAX_LEAVES = 87
"""Flags of the configuration, the task's apart: what one reader of --help can take in. A new one
has to be worth it, or to take the place of another. (data.limit and overfit came last: what a user
tries before a long run.)"""
ASSIGNED = {
    "trainer/checkpoint/buffers.py": ["buffer.data"],  # torch's own way to another shape
    "trainer/run/model_modes.py": ["module.training"],  # torch's own way, without an override
    "trainer/distributed/sync_batchnorm.py": ["ctx.count", "ctx.module"],  # torch's own way
    "trainer/rng.py": ["bits.state"],  # numpy's way
}
"""Attributes of other modules' objects that are assigned from outside, each with its reason; at
most 5 modules."""
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
SHARED_NAMES = {
    "main": "the entry point of a command",
    "train": "the training loop, and the library call that runs it"}
"""Names of several top-level functions, each with its one meaning."""


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


def room_of(module: str) -> int:
    """Place of a module's room in the order."""
    first = module.split(".")[0]
    return next(number for number, names in enumerate(ROOMS) if first in names.split())


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """(module of the trainer, line) for each import, at module level or inside a function, but
    not those for a type checker alone."""
    known = modules()
    typed = {id(inner) for node in ast.walk(tree(path)) if isinstance(node, ast.If)
             and ast.unparse(node.test) == "TYPE_CHECKING" for inner in ast.walk(node)}
    for node in ast.walk(tree(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if not name.startswith("trainer.") or id(node) in typed:
                continue
            inner = name.partition(".")[2]
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            yield inner or "__init__", node.lineno


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in modules(package).values()]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def marks(path: Path) -> Iterator[str]:
    """Name of the `Phase` of each progress mark that a module passes: `mark(Phase.NAME, …)`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Attribute):
            function, phase = node.func, ast.unparse(node.args[0])
            name = function.attr if isinstance(function, ast.Attribute) else getattr(
                function, "id", "")
            if name.strip("_") == "mark" and phase.startswith("Phase."):
                yield phase.removeprefix("Phase.")


# --- rooms

@pytest.mark.parametrize("name", modules())
def test_a_module_imports_from_its_own_room_and_from_rooms_before_it(name):
    path, own = modules()[name], room_of(name)

    later = [f"line {line}: {other}" for other, line in imported(path) if room_of(other) > own]

    assert later == [], f"trainer.{name} is in the room {ROOMS[own]!r}"
    assert not re.search(r"^\s*(from|import) launch\b", path.read_text(), re.MULTILINE)


def test_few_entries_lie_directly_in_the_package():
    entries = {p.name for p in (ROOT / "trainer").iterdir()} - {"__pycache__"}

    assert len(entries) <= MAX_ENTRIES, sorted(entries)
    for path in (ROOT / "trainer").glob("*/**/__init__.py"):
        assert not path.read_text(), f"{path}: a room's __init__ is empty"


@pytest.mark.parametrize("name", ["trainer.__main__", "trainer.checkpoint.store",
                                  "trainer.resilience.fault_injection",
                                  "launch.__main__", "launch.chaos"])
def test_what_runs_before_or_without_torch_does_not_import_it(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- sizes and names

@pytest.mark.parametrize("path", sources("trainer", "launch"), ids=_name)
def test_a_module_says_what_it_is_for(path):
    if path.read_text().strip():
        told = ast.get_docstring(tree(path))
        assert told, "a module opens with its job in one sentence"
        assert re.match(r"[^\n]+(\n[^\n]+)*?[.:](\s|$)", told), told
    assert path.stem not in EMPTY_NAMES


def test_functions_are_short_and_take_few_arguments():
    large = set()
    for path in sources("trainer", "launch"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines, given = node.end_lineno - node.lineno + 1, node.args
                names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                parameters = len(names) - (names[:1] in (["self"], ["cls"]))
                if lines > MAX_FUNCTION or parameters > MAX_PARAMETERS:
                    large.add(f"{_name(path)} {node.name}")

    assert large == set(LARGER), "a function that is too large, or an exception that isn't needed"
    assert len(LARGER) <= 5


def own_attributes(module: ast.Module) -> set[str]:
    """Names of the attributes that the classes of a module declare or assign themselves."""
    found = set()
    for owner in (n for n in ast.walk(module) if isinstance(n, ast.ClassDef)):
        for node in ast.walk(owner):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return found


@cache
def all_attributes() -> set[str]:
    return set().union(*(own_attributes(tree(path)) for path in sources("trainer", "launch")))


def assigned_from_outside(path: Path) -> Iterator[str]:
    """Each attribute of another module's class that a module assigns, as `object.attribute`.

    A function may complete an object that it has constructed itself, and set a setting of an
    imported module, such as those of `torch.backends`.
    """
    module = tree(path)
    foreign = all_attributes() - own_attributes(module)
    imports = {alias.asname or alias.name.split(".")[0] for node in ast.walk(module)
               if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}

    def visit(node: ast.AST, constructed: frozenset[str]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef):
            constructed = constructed | {
                target.id for inner in ast.walk(node) if isinstance(inner, ast.Assign)
                and isinstance(inner.value, ast.Call)
                and re.match(r"(\w+\.)*(cls|[A-Z]\w*)$", ast.unparse(inner.value.func))
                for target in inner.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            base = ast.unparse(node.value)
            if node.attr in foreign and not (
                    base in ("self", "cls") or base in constructed
                    or re.split(r"\W", base)[0] in imports):
                yield f"{base}.{node.attr}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, constructed)

    yield from visit(module, frozenset())


def test_an_attribute_is_assigned_by_its_own_class_or_module():
    found = {_name(path): sorted(set(assigned_from_outside(path)))
             for path in sources("trainer", "launch")}

    assert {name: names for name, names in found.items() if names} == ASSIGNED
    assert len(ASSIGNED) <= 5


def test_a_name_means_one_thing():
    places = defaultdict(set)
    for path in sources("trainer", "launch"):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                places[node.name].add(_name(path))

    several = {name: sorted(where) for name, where in places.items() if len(where) > 1}

    assert several.keys() == SHARED_NAMES.keys(), several


def test_the_training_loop_fits_a_screen():
    assert len(modules()["loop"].read_text().splitlines()) <= MAX_LOOP


# --- configuration

def leaves(cls: type = schema.Config, section: str = "") -> Iterator[tuple[str, str]]:
    """(section, leaf) of the whole configuration, the task's apart."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default) and not isinstance(field.default, Duration):
            yield from leaves(type(field.default), field.name)
        elif (section, field.name) != ("", "task"):
            yield section, field.name


CONFIG = ("config.schema",)


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


def test_each_leaf_of_the_configuration_is_read_and_they_stay_within_their_budget():
    unread = [f"{section}.{leaf}" for section, leaf in leaves()
              if not {(section or "config", leaf), ("config", leaf)} & reads()]

    assert unread == []
    assert len(list(leaves())) <= MAX_LEAVES


# --- faults

def test_each_mark_at_which_a_fault_can_be_injected_is_passed_and_each_passed_one_is_known():
    passed = {Phase[name] for path in sources("trainer") for name in marks(path)}

    assert set(fault_injection.PHASES) <= passed
    assert passed <= set(POINTS)


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
