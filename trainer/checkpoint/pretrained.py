"""Initial weights from a file (`--init`): read without running code, fitted to the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.manifest import check_listed
from trainer.errors import CheckpointDamaged, ConfigError, listed
from trainer.storage import tensorfile
from trainer.storage.records import Kind, is_name, read_record, table_of

NESTED = ("state_dict", "model_state_dict", "model")
INDEX = ".index.json"
_INDEX = Kind(needed={"weight_map": table_of(lambda name: is_name(name) and INDEX not in name)})
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Weights in a folder: one file, or several that NAME.index.json lists (Hugging Face)."""


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
    # torch itself decides which buffers may be missing from an older file. Of tied weights a file
    # may hold one name only.
    found = {(live[n].data_ptr(), live[n].shape) for n in common}
    if missing := [n for n in model.load_state_dict(taken, strict=False).missing_keys
                   if n not in common and (live[n].data_ptr(), live[n].shape) not in found]:
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
            code), the index of several such files, or a folder with one of `WEIGHTS`.
    """
    flag = f"--init {path}"
    if path.is_dir():
        names = [name + end for name in WEIGHTS for end in ("", INDEX)]
        path = next((path / name for name in names if (path / name).is_file()), path)
        if path.is_dir():
            raise ConfigError(f"{flag}: there is none of {', '.join(names)} in this folder; give a "
                              "weights file, or the folder of a finished run or a checkpoint.")
    if path.name.endswith(INDEX):
        try:
            parts = sorted(set((read_record(path, _INDEX) or {})["weight_map"].values()))
        except (OSError, KeyError) as error:
            raise ConfigError(f"{flag}: {path.name} can't be read as an index of weights "
                              f"({type(error).__name__}: {error}); give a weights file.") from error
        return {name: value for part in parts
                for name, value in read_weights(path.with_name(part)).items()}
    if not path.is_file():
        raise ConfigError(f"{flag}: there is no such file; every rank must be able to read it.")
    try:
        check_listed(path)
        if path.suffix == ".safetensors":
            found: Any = tensorfile.load_tensors(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointDamaged as error:
        raise ConfigError(f"{flag}: {error}; restore the file, or give another one.") from error
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
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name).replace("._orig_mod.", "."): value
            for name, value in found.items() if isinstance(value, Tensor)}
