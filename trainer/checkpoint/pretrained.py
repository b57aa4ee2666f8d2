"""Initial weights from a file (`--init`): read without running code, fitted to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError, listed
from trainer.storage import layout, tensorfile

NESTED = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")


def load_initial_weights(model: nn.Module, path: Path, *, strict: bool) -> list[str]:
    """Copy a file's weights into the model's parameters and buffers.

    Head tensors of another size keep the model's initial values: those of which only the first
    dimension, the number of outputs, differs.

    Args:
        strict: refuse missing names, unknown names and other shapes.

    Returns:
        One line for each tensor or group of tensors that was not loaded.
    """
    flag = f"--init {path}"
    saved, live = read_weights(path), model.state_dict()
    common = [n for n in live if n in saved]
    resized = [n for n in common if saved[n].shape != live[n].shape]
    head = [n for n in resized if saved[n].dim() and saved[n].dim() == live[n].dim()
            and saved[n].shape[1:] == live[n].shape[1:]]
    taken = {n: saved[n] for n in common if n not in resized}
    if not taken:
        raise ConfigError(f"{flag}: no tensor fits the model; the file has {listed(saved)}, "
                          f"the model has {listed(live)}.")
    problems = []
    if other := [n for n in resized if n not in head]:
        problems.append("different shapes: " + listed(
            f"{n} {tuple(saved[n].shape)}, in the model {tuple(live[n].shape)}" for n in other))
    # torch itself decides which buffers may be missing from an older file.
    if missing := [n for n in model.load_state_dict(taken, strict=False).missing_keys
                   if n not in resized]:
        problems.append(f"missing from the file: {listed(missing)}")
    if unknown := [n for n in saved if n not in live]:
        problems.append(f"unknown to the model: {listed(unknown)}")
    if strict and problems:
        raise ConfigError(f"{flag}: the file doesn't fit the model: {'; '.join(problems)}. Use "
                          "--init-strict off to load only what fits.")
    lines = [f"new head, initialized by the model: {n} {tuple(live[n].shape)}, in the file "
             f"{tuple(saved[n].shape)}" for n in head]
    return lines + [f"not loaded: {problem}" for problem in problems]


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read weights by parameter name, without prefixes of wrappers (DDP, torch.compile).

    Args:
        path: a safetensors file, a torch checkpoint (read with `weights_only`, so it runs no
            code), or a folder with a model.safetensors.
    """
    flag = f"--init {path}"
    if path.is_dir():
        path = path / layout.PRODUCT
        if not path.is_file():
            raise ConfigError(f"{flag}: there is no model.safetensors in this folder; give a "
                              "weights file, or the folder of a finished run or a checkpoint.")
    if not path.is_file():
        raise ConfigError(f"{flag}: there is no such file; every rank must be able to read it.")
    try:
        if path.suffix == ".safetensors":
            found: Any = tensorfile.load_tensors(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{flag}: the file can't be read without running code from it "
                          f"({type(error).__name__}: {reason}); save the model's state_dict() "
                          "again, preferably as safetensors.") from error
    while isinstance(found, dict) and (inner := [
            found[key] for key in NESTED if isinstance(found.get(key), dict)]):
        found = inner[0]
    if not isinstance(found, dict):
        raise ConfigError(f"{flag}: the file holds a {type(found).__name__} and no state_dict; "
                          "save the model's state_dict().")
    return {_without_prefixes(name): value for name, value in found.items()
            if isinstance(value, Tensor)}


def _without_prefixes(name: str) -> str:
    while prefix := next((p for p in PREFIXES if name.startswith(p)), ""):
        name = name.removeprefix(prefix)
    return name.replace("._orig_mod.", ".")
