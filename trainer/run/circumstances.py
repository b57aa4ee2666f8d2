"""Facts besides the configuration on which bits depend: data, code, versions, threads, device."""

from __future__ import annotations

import functools
import inspect
import json
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

import trainer
from trainer.config import command_line
from trainer.optim.named_optimizers import members_of
from trainer.run.context import Context
from trainer.run.prepare import Setup
from trainer.run.run_dir import device_name
from trainer.task import SPLITS

_HASHES: dict[str, tuple[Any, str]] = {}
"""Module → its specification, which a reload replaces, and the hash of its file when it was first
asked for: ranks are forked with the code that the launcher's server has imported."""


def find(context: Context, setup: Setup) -> dict[str, Any]:
    """The circumstances of this attempt, as JSON values; see `compatibility.compare_settings`."""
    world = context.world
    objects = (getattr(setup.task, "given", setup.task), setup.optimizer,
               *[member.optimizer for member in members_of(setup.optimizer).values()],
               *setup.model.modules(), *setup.data.values())
    classes = {kind for one in objects for kind in type(one).__mro__}
    return {
        "task": command_line.task_path(context.config.task),
        "data": setup.fingerprints["train"],
        "splits": {split: setup.fingerprints[split] for split in SPLITS[1:]},
        "world_size": world.size, "threads": world.threads,
        "device": device_name(world.device), "cpu": torch.backends.cpu.get_cpu_capability(),
        **library_versions(),
        "cudnn": torch.backends.cudnn.version() if world.device.type == "cuda" else None,
        "packages": {name: package_version(name) for name in sorted(_packages(classes))},
        "code": loaded_code(classes)}


def library_versions() -> dict[str, str]:
    return {"torch": torch.__version__, "numpy": np.__version__,
            "python": ".".join(platform.python_version_tuple()[:2])}


def package_version(name: str) -> str | None:
    """The version of an importable package; None if it has none."""
    version = getattr(sys.modules.get(name), "__version__", None)
    if version is None:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return None
    return str(version)


def hash_json(value: Any) -> str:
    """The hash of a JSON value."""
    return xxhash.xxh3_64(json.dumps(value, sort_keys=True).encode()).hexdigest()


def loaded_code(classes: Iterable[type] = ()) -> dict[str, str]:
    """File → hash, of each module outside of installed packages that this process has imported,
    and the hashes of those `classes` that no file defines. The program itself (`__main__`) counts
    if it defines one of them."""
    classes = list(classes)
    own = {kind.__module__ for kind in classes}
    found = {}
    for name, module in [*sys.modules.items()]:
        file = _file_of(module)
        if file and not _is_installed(file) and (not name.startswith("__") or name in own):
            spec = vars(module).get("__spec__")
            if name not in _HASHES or _HASHES[name][0] is not spec:
                try:
                    _HASHES[name] = spec, xxhash.xxh3_64(Path(file).read_bytes()).hexdigest()
                except OSError:  # inside a zip file, or deleted
                    continue
            depth = len(name.split(".")) + (Path(file).stem == "__init__")
            found["/".join(Path(file).parts[-depth:])] = _HASHES[name][1]
    for kind in classes:
        if not _file_of(sys.modules.get(kind.__module__)) and (code := [*_methods(kind)]):
            found[f"class {kind.__qualname__}"] = hash_json([*map(_instructions, code)])
    return dict(sorted(found.items()))


def _packages(classes: Iterable[type]) -> set[str]:
    """The installed packages that define one of the classes; torch is recorded in any case."""
    files = {kind.__module__: _file_of(sys.modules.get(kind.__module__)) for kind in classes}
    return {name.split(".")[0] for name, file in files.items()
            if file and "-packages" in file} - {"torch"} | {"trainer"}


def _file_of(module: Any) -> str | None:
    # Not getattr: a package may import others when it is asked for an attribute.
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else None


@functools.cache
def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python, an installed package, or the trainer."""
    own = Path(trainer.__file__).parent
    folders = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(own),
               str(own.parent / "launch"))
    # Debian installs to dist-packages.
    return "-packages/" in file or file.startswith(tuple(f"{folder}/" for folder in folders))


def _methods(kind: type) -> Iterator[CodeType]:
    for value in vars(kind).values():
        for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
            if inspect.isfunction(function):
                yield function.__code__


def _instructions(code: CodeType) -> list[Any]:
    """What a function computes, as JSON values, without its place in a file."""
    constants = [
        _instructions(value) if isinstance(value, CodeType) else
        repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
        for value in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]
