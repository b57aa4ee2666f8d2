"""Facts besides the configuration on which bits depend: data, code, versions, threads, device."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

import trainer
from trainer.config import command_line
from trainer.config.schema import Config
from trainer.distributed import nccl
from trainer.distributed.device import describe_gpus, driver_version
from trainer.optim.named_optimizers import members_of
from trainer.optim.precision import PrecisionPolicy
from trainer.run.context import Context
from trainer.run.prepare import Setup
from trainer.run.run_dir import device_name, package_version
from trainer.storage.files import read_file

_OWN = Path(trainer.__file__).parent
_FOLDERS = tuple(f"{folder}/" for folder in (
    sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _OWN, _OWN.parent / "launch"))
_HASHES: dict[str, tuple[Any, str]] = {}
"""Module → its specification, which a reload replaces, and the hash of its file when it was first
asked for: ranks are forked with the code that the launcher's server has imported."""
_newest = ""
"""The newest module that was seen. A forked rank only looks at modules that were imported after it:
each of the thousands before would cost it a copied page of memory."""


def find(context: Context, setup: Setup) -> dict[str, Any]:
    """Collective. The circumstances of this attempt, as JSON values; see
    `compatibility.compare_settings`."""
    world = context.world
    objects = (getattr(setup.task, "given", setup.task), setup.optimizer,
               *[member.optimizer for member in members_of(setup.optimizer).values()],
               *setup.model.modules(), *setup.data.values())
    classes = {kind for one in objects for kind in type(one).__mro__}
    return {
        "task": command_line.task_path(context.config.task),
        "data": setup.fingerprints["train"],
        "stream_states": setup.card["stream_states"],
        "splits": {split: found for split, found in setup.fingerprints.items() if split != "train"},
        "world_size": world.size, "threads": world.threads,
        "device": device_name(world.device), "cpu": torch.backends.cpu.get_cpu_capability(),
        **library_versions(),
        "cudnn": torch.backends.cudnn.version() if world.device.type == "cuda" else None,
        "packages": {name: package_version(name) for name in sorted(_packages(classes))},
        "code": loaded_code(classes),
        **({"gpu": _of_gpus(context)} if world.device.type == "cuda" else {})}


def inexact_kernels(
    config: Config[Any], choice: PrecisionPolicy, device: torch.device
) -> list[str]:
    """Why the kernels of another start may round differently, if they may."""
    if config.numerics.deterministic == "off" and (
            device.type != "cpu" or choice.mode == "max-autotune"):
        return ["--numerics.deterministic is off"]
    return ["mps has no deterministic kernels"] * (device.type == "mps")


def _of_gpus(context: Context) -> dict[str, str | None]:
    """Collective. Facts on which only sums on GPUs depend. NCCL's order of a sum follows its
    version, its settings and the topology; the rank-invariant reduction doesn't use it."""
    world = context.world
    facts = {"CUDA": torch.version.cuda, "NVIDIA driver": driver_version(),
             "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}
    if world.size > 1 and context.config.parallel.reduction == "ddp":
        own = describe_gpus(world.device, world.local_size) if world.local_rank == 0 else None
        facts |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())),
                  "the variables of NCCL": nccl.chosen_sums(),
                  "the GPUs of the hosts": "; ".join(filter(None, world.gather_json(own)))}
    return dict(world.broadcast_json(facts))  # that of rank 0: hosts may differ


def library_versions() -> dict[str, str]:
    return {"torch": torch.__version__, "numpy": np.__version__,
            "python": ".".join(platform.python_version_tuple()[:2])}


def code_on_disk(names: Iterable[str]) -> dict[str, str]:
    """File → hash, of those files of `loaded_code` that the import path has, without importing."""
    found = {}
    for name in names:
        for folder in sys.path:
            with contextlib.suppress(OSError, ValueError):  # no such file there
                found[name] = xxhash.xxh3_64(read_file(Path(folder, name))).hexdigest()
                break
    return found


def hash_json(value: Any) -> str:
    """The hash of a JSON value."""
    return xxhash.xxh3_64(json.dumps(value, sort_keys=True).encode()).hexdigest()


def loaded_code(classes: Iterable[type] = ()) -> dict[str, str]:
    """File → hash, of each module outside of installed packages that this process has imported,
    and the hashes of those `classes` that no file defines. The program itself (`__main__`) counts
    if it defines one of them."""
    global _newest
    classes = list(classes)
    own = {kind.__module__ for kind in classes}
    found = {}
    new = _imported_after(_newest)
    _newest = new[0] if new else _newest
    for name in {*_HASHES, "__main__", "__mp_main__", *new}:
        module = sys.modules.get(name)  # a thread may import meanwhile
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


def _imported_after(name: str) -> list[str]:
    """The names of modules, newest first."""
    while True:
        try:
            return [*itertools.takewhile(lambda other: other != name, reversed(sys.modules))]
        except RuntimeError:  # a thread has imported a module meanwhile
            continue


def _packages(classes: Iterable[type]) -> set[str]:
    """The installed packages that define one of the classes; torch is recorded in any case."""
    files = {kind.__module__: _file_of(sys.modules.get(kind.__module__)) for kind in classes}
    return {name.split(".")[0] for name, file in files.items()
            if file and "-packages" in file} - {"torch"} | {"trainer"}


def _file_of(module: Any) -> str | None:
    # Not getattr: a package may import others when it is asked for an attribute.
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else None


def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python, an installed package, or the trainer."""
    return "-packages/" in file or file.startswith(_FOLDERS)  # Debian: dist-packages


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
