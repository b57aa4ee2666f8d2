"""Weights to begin with: read from a file that runs no code, and fitted to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import tensorfile
from trainer.errors import ConfigError

NESTED = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")
SHOWN = 8


def begin_with(model: nn.Module, path: Path, *, strict: bool) -> list[str]:
    """Put a file's weights into the model, in the storage that it has.

    A head of another size stays as the model has made it: tensors that differ in their first
    dimension, the number of outputs, only. Where anything else differs, so does a later layer.

    Args:
        strict: refuse names that only one side has, and other sizes.

    Returns:
        What wasn't taken, one line each.

    Raises:
        ConfigError: the file can't be read, or doesn't fit.
    """
    flag = f"--init {path}"
    saved, live = read(path), model.state_dict()
    common = [n for n in live if n in saved]
    resized = [n for n in common if saved[n].shape != live[n].shape]
    head = [n for n in resized if saved[n].dim() and saved[n].dim() == live[n].dim()
            and saved[n].shape[1:] == live[n].shape[1:]]
    taken = {n: saved[n] for n in common if n not in resized}
    if not taken:
        raise ConfigError(f"{flag}: none of its tensors fits; it has {_listed(saved)}, the model "
                          f"{_listed(live)}.")
    problems = []
    if other := [n for n in resized if n not in head]:
        problems.append("of another size are " + _listed(
            f"{n} {tuple(saved[n].shape)}, here {tuple(live[n].shape)}" for n in other))
    # torch knows which lacking buffers an older file may lack.
    if lacking := [n for n in model.load_state_dict(taken, strict=False).missing_keys
                   if n not in resized]:
        problems.append(f"it lacks {_listed(lacking)}")
    if unknown := [n for n in saved if n not in live]:
        problems.append(f"the model has no {_listed(unknown)}")
    if strict and problems:
        raise ConfigError(f"{flag}: it doesn't fit the model: {'; '.join(problems)}. Take what "
                          "fits, all the same, with --init-strict off.")
    lines = [f"new head, as the model makes it: {n} {tuple(live[n].shape)}, in the file "
             f"{tuple(saved[n].shape)}" for n in head]
    return lines + [f"not taken: {problem}" for problem in problems]


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a torch checkpoint (`weights_only`: it runs no code),
    or of the model.safetensors in a folder, under plain names.

    Raises:
        ConfigError: it can't be read.
    """
    flag = f"--init {path}"
    if path.is_dir():
        path = path / "model.safetensors"
        if not path.is_file():
            raise ConfigError(f"{flag}: there is no model.safetensors in this folder; name the "
                              "file of weights, or the folder of a finished run or a checkpoint.")
    if not path.is_file():
        raise ConfigError(f"{flag}: there is no such file; each rank reads it.")
    try:
        if path.suffix == ".safetensors":
            found: Any = tensorfile.load(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        what = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{flag}: it can't be read without running what it holds "
                          f"({type(error).__name__}: {what}); save the model's state_dict() anew, "
                          "best as safetensors.") from error
    while isinstance(found, dict) and (inner := [
            found[key] for key in NESTED if isinstance(found.get(key), dict)]):
        found = inner[0]
    if not isinstance(found, dict):
        raise ConfigError(f"{flag}: it holds a {type(found).__name__}, no state_dict.")
    return {_plain(name): value for name, value in found.items() if isinstance(value, Tensor)}


def _plain(name: str) -> str:
    while prefix := next((p for p in PREFIXES if name.startswith(p)), ""):
        name = name.removeprefix(prefix)
    return name.replace("._orig_mod.", ".")


def _listed(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f", … ({len(names)})" if len(names) > SHOWN else "")
