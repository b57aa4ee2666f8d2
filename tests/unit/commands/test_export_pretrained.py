"""`export --format hf`: what it writes is read by from_pretrained and computes the same."""

from __future__ import annotations

import json

import pytest
import torch
from runs import run

from trainer.__main__ import main

TASK = ["--task=pretrained_task:Letters", "--device=cpu", "--steps=2", "--batch.global-size=4",
        "--batch.micro-size=2"]  # fmt: skip


def test_a_model_of_transformers_is_written_with_its_tokenizer(ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder, to = run(ranks, 1, tmp_path / "run", *TASK), tmp_path / "tuned"

    assert main(["export", str(folder), "--to", str(to), "--format", "hf"]) == 0

    model = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
    ids = transformers.AutoTokenizer.from_pretrained(to)("abcdef", return_tensors="pt")["input_ids"]
    trained = type(model)(model.config).eval()
    from safetensors.torch import load_file

    trained.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trained(ids).logits)
    about = json.loads((to / "export.json").read_text())["files"]["config.json"]
    assert about["difference"] == 0
    assert "model.safetensors" in about["files"]


def test_a_model_without_save_pretrained_is_named(ranks, tmp_path, capsys):
    folder = run(ranks, 1, tmp_path / "run", "--task=small_task:Small", *TASK[1:])

    assert main(["export", str(folder), "--to", str(tmp_path / "out"), "--format", "hf"]) == 2
    assert "a Net, has no save_pretrained" in capsys.readouterr().err
