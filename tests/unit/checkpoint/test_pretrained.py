"""Initial weights: supported file formats, and the messages for weights that don't fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainer.checkpoint.pretrained import load_initial_weights, read_weights
from trainer.errors import ConfigError


def net(classes: int = 3, *, seed: int = 0, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, classes))


def same(model: nn.Module, other: nn.Module, names: list[str] | None = None) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return all(torch.equal(ours[n], theirs[n]) for n in names or ours)


@pytest.mark.parametrize("wrap", [
    lambda s: s,
    lambda s: {"model": s, "epoch": 3},
    lambda s: {"state_dict": {f"module.{n}": t for n, t in s.items()}},
    lambda s: {"model_state_dict": {f"_orig_mod.module.{n}": t for n, t in s.items()}},
    lambda s: {"model": {"state_dict": {f"module._orig_mod.{n}": t for n, t in s.items()}}}])
def test_a_torch_checkpoint_is_read_whatever_it_is_wrapped_in(tmp_path, wrap):
    source, model = net(seed=1), net()
    torch.save(wrap(dict(source.state_dict())), tmp_path / "old.pt")

    lines = load_initial_weights(model, tmp_path / "old.pt", strict=True)

    assert lines == []
    assert same(model, source)


@pytest.mark.parametrize("asked", ["model.safetensors", ""])
def test_a_safetensors_file_or_its_folder_is_read(tmp_path, asked):
    source, model = net(seed=1), net()
    addresses = [p.data_ptr() for p in model.parameters()]
    save_file(source.state_dict(), tmp_path / "model.safetensors")

    load_initial_weights(model, tmp_path / asked, strict=True)

    assert same(model, source)
    assert [p.data_ptr() for p in model.parameters()] == addresses


@pytest.mark.parametrize("wrong", ["[]", *(json.dumps({"weight_map": {"a": part}}) for part in (
    "../x", "a\0b", "", 1, "model.safetensors.index.json"))])
def test_the_parts_of_a_file_are_read_by_their_index(wrong, tmp_path):
    source, model = net(seed=1), net()
    weights = {name: f"model-{len(name) % 2 + 1}-of-2.safetensors" for name in source.state_dict()}
    for part in set(weights.values()):
        save_file({n: t for n, t in source.state_dict().items() if weights[n] == part},
                  tmp_path / part)
    (index := tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights}))

    assert load_initial_weights(model, tmp_path, strict=True) == []
    assert same(model, source)
    assert read_weights(index).keys() == weights.keys()
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-2-of-2\.safetensors: there is no such file"):
        read_weights(tmp_path)
    index.write_text(wrong)
    with pytest.raises(ConfigError, match="can't be read as an index of weights"):
        read_weights(tmp_path)


@pytest.mark.parametrize("kept", ["0.weight", "2.weight"])
def test_a_file_may_hold_one_name_of_tied_weights(tmp_path, kept):
    def tied(seed: int) -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
        nn.init.normal_(model[0].weight, std=seed + 1)
        model[2].weight = model[0].weight
        return model

    source, model = tied(1), tied(0)
    save_file({n: t for n, t in source.state_dict().items() if n in (kept, "1.weight", "1.bias")},
              tmp_path / "model.safetensors")

    assert load_initial_weights(model, tmp_path, strict=True) == []
    assert same(model, source)


def test_a_head_of_another_size_is_new_and_named(tmp_path):
    source, model = net(classes=1000, seed=1), net()
    head = {n: t.clone() for n, t in model[2].state_dict().items()}
    save_file(source.state_dict(), tmp_path / "model.safetensors")

    lines = load_initial_weights(model, tmp_path, strict=True)

    assert lines == [
        "new head, initialized by the model: 2.weight (3, 4), in the file (1000, 4)",
        "new head, initialized by the model: 2.bias (3,), in the file (1000,)"]
    assert same(model[:2], source[:2])
    assert all(torch.equal(t, head[n]) for n, t in model[2].state_dict().items())


def test_names_and_sizes_that_do_not_fit_are_refused_unless_allowed(tmp_path):
    source = net(seed=1).state_dict()
    source["aux.weight"] = source.pop("2.bias")
    save_file(source, tmp_path / "model.safetensors")

    with pytest.raises(ConfigError) as error:
        load_initial_weights(net(), tmp_path, strict=True)
    assert "missing from the file: 2.bias; unknown to the model: aux.weight" in str(error.value)
    assert "--init-strict off" in str(error.value)
    assert load_initial_weights(net(), tmp_path, strict=False) == [
        "not loaded: missing from the file: 2.bias", "not loaded: unknown to the model: aux.weight"]

    # Another width is in a later layer's second dimension: no head.
    save_file(net(width=8, seed=1).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"shapes: 2\.weight \(3, 8\), in the model \(3, 4\)"):
        load_initial_weights(net(), tmp_path, strict=True)


def test_an_older_file_without_num_batches_tracked_is_complete(tmp_path):
    source = {n: t for n, t in net(seed=1).state_dict().items() if "num_batches" not in n}
    torch.save(source, tmp_path / "old.pth")

    assert load_initial_weights(net(), tmp_path / "old.pth", strict=True) == []


class Code:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_file_that_would_run_code_is_refused(tmp_path, capfd):
    torch.save({"model": net().state_dict(), "hook": Code()}, tmp_path / "bad.pt")

    with pytest.raises(ConfigError, match="can't be read without running code from it"):
        load_initial_weights(net(), tmp_path / "bad.pt", strict=False)
    assert "this must not run" not in capfd.readouterr().out


def test_a_file_without_a_state_dict_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.safetensors").write_text("no weights")
    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")

    with pytest.raises(ConfigError, match="the file holds a list and no state_dict"):
        read_weights(tmp_path / "list.pt")
    with pytest.raises(ConfigError, match="can't be read"):
        read_weights(tmp_path / "text.safetensors")
    with pytest.raises(ConfigError, match="there is no such file"):
        read_weights(tmp_path / "absent.pt")
    with pytest.raises(ConfigError, match="in this folder; give a weights file"):
        read_weights(tmp_path)
    with pytest.raises(ConfigError, match="no tensor fits the model; the file has other"):
        load_initial_weights(net(), tmp_path / "other.safetensors", strict=False)
