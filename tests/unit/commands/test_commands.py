"""evaluate, predict, export: read a run folder and compute the same bits as the run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import validations
from safetensors.torch import load_file
from small_task import Held, Net, Parts, Small, samples
from torch.utils.data import IterableDataset

from trainer import Config, Outcome
from trainer.__main__ import main
from trainer.commands.library import process_settings_restored, train
from trainer.commands.predict import _lines
from trainer.config.fields import Duration
from trainer.config.schema import BadStepConfig, Batch, Checkpoint, Eval, Optim, WorldConfig
from trainer.errors import NonFinite


def settings(run: Path, task: Small | str, **more: Any) -> Config[Any]:
    return Config(
        task=task, run=str(run), steps=12, device="cpu", world=WorldConfig(threads=1),
        batch=Batch(global_size=16, micro_size=8), eval=Eval(every=Duration(4)),
        checkpoint=Checkpoint(every=Duration(4), keep=9), **more)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run with averaged weights, validated and saved at 4, 8 and 12."""
    path = tmp_path_factory.mktemp("commands") / "run"
    train(settings(path, Small(), optim=Optim(ema=0.8)))
    return path


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Restore the threads and the determinism settings that a command changes in its process."""
    with process_settings_restored():
        yield


def content(path: Path) -> dict[str, int]:
    return {str(p.relative_to(path)): p.stat().st_mtime_ns for p in sorted(path.rglob("*"))}


def evaluated(capsys, *arguments: str) -> dict[str, Any]:
    assert main(["evaluate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_evaluation_equals_what_the_run_logged_for_that_step(run, capsys):
    before = content(run)
    lines = {line["step"]: line for line in validations(run)}
    assert sorted(lines) == [4, 8, 12]

    for step, line in lines.items():
        found = evaluated(capsys, str(run), f"--checkpoint={step}")
        assert found["averaged"]
        assert {f"val_{n}": v for n, v in found["validation"].items()} == {
            n: v for n, v in line.items() if n.startswith("val_") and n != "val_table"}
    assert content(run) == before


def test_the_best_weights_give_the_test_metrics_of_the_run(run, tmp_path, capsys):
    summary = json.loads((run / "summary.json").read_text())
    shutil.copytree(run, slim := tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))

    found = evaluated(capsys, str(run))

    assert found["step"] == summary["best"]["step"]
    assert found["test"] == summary["test"]
    assert evaluated(capsys, str(slim))["test"] == found["test"]


def test_a_flag_overrides_the_configuration_of_the_run(run, capsys):
    averaged = evaluated(capsys, str(run), "--checkpoint=4")
    trained = evaluated(capsys, str(run), "--checkpoint=4", "--optim.ema=0")

    assert not trained["averaged"]
    assert trained["validation"]["loss"] != averaged["validation"]["loss"]


def test_an_unfinished_run_can_be_evaluated(run, tmp_path, capsys):
    at_work = tmp_path / "run"
    shutil.copytree(run, at_work)
    for name in ("summary.json", "model.safetensors"):
        (at_work / name).unlink()
    writing = at_work / "checkpoints/step-00000016.tmp-1-0123abcd"
    writing.mkdir()
    (writing / "model.safetensors").write_bytes(b"half")

    found = evaluated(capsys, str(at_work), "--checkpoint=last")

    assert found == evaluated(capsys, str(run), "--checkpoint=last")


BAD = {
    "no run": (["evaluate", "{run}/nowhere"], "there is no run in this folder"),
    "no such checkpoint": (["evaluate", "{run}", "--checkpoint=7"],
                           "--checkpoint 7: step-00000007: there is no such checkpoint"),
    "no checkpoint at all": (["evaluate", "{run}", "--checkpoint=newest"],
                             "use best, last or one of these steps"),
    "damaged": (["export", "{damaged}", "--to={out}", "--checkpoint=12"],
                "--checkpoint 12: step-00000012: model.safetensors"),
    "export into a run": (["export", "{run}", "--to={run}"], "this is a run or a checkpoint"),
    "export of a model that isn't Hugging Face's": (
        ["export", "{run}", "--to={folder}", "--format=hf"], "a Net, has no save_pretrained"),
    "unknown flag": (["predict", "{run}", "--optm.lr=1"], "did you mean --optim.lr?"),
    "unknown split": (["predict", "{run}", "--split=tset"], "--split tset: dataset('tset') raised"),
    "unknown kind of file": (["predict", "{run}", "--out=p.npz"], "--out p.npz: the name must end"),
    "out in a file": (["predict", "{run}", "--out={file}/p.jsonl"], "--out"),
    "out is a folder": (["predict", "{run}", "--out={folder}"], "this is a folder"),
    "an impossible tolerance": (["export", "{run}", "--to={out}", "--tolerance=nan"],
                                "--tolerance nan: use 0 or more"),
    "an empty name": (["report", "{run}", "--out="], "--out '': the value is empty; give one"),
    "a misspelt flag": (["evaluate", "{run}", "--chekpoint=last"], "--chekpoint: there is no such "
                        "flag; did you mean --checkpoint?"),
    "plot of no kind": (["lr-find", "--plot={out}.txt"], "is not supported"),
    "rates without an end": (["lr-find", "--to=inf"], "--to inf: use two rates above 0"),
    "too few rates": (["lr-find", "--points=3"], "--points 3: use 10 or more"),
    "trace into a file": (["profile", "--to={file}"], "--to {file}: "),
    "no step to look at": (["profile", "--active=0"], "--active 0: use 1 or more"),
    "another model": (["evaluate", "{run}", "--task=tape_task:Tape"], "the weights don't fit")}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_argument_is_one_error_with_exit_code_2(run, tmp_path, capsys, what):
    arguments, expected = BAD[what]
    shutil.copytree(run, damaged := tmp_path / "damaged")
    weights = damaged / "checkpoints/step-00000012/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    (file := tmp_path / "file").touch()
    (folder := tmp_path / "folder.jsonl").mkdir()
    names = {"run": run, "damaged": damaged, "out": tmp_path / "out", "file": file,
             "folder": folder}

    code = main([text.format(**names) for text in arguments])

    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert output.err.count("error: ") == 1
    assert expected.format(**names) in output.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["inspect", "compare", "report", "evaluate", "predict"])
def test_an_unreadable_run_is_one_error(command, tmp_path, capsys):
    run = str(tmp_path / ("x" * 300))

    assert main([command, run, *[run] * (command == "compare")]) == 2
    error = capsys.readouterr().err
    assert "File name too long" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [["export", "--to"], ["predict", "--out"]])
def test_an_error_in_the_data_is_not_reported_as_an_error_of_the_output_file(
    command, run, tmp_path, capsys, monkeypatch
):
    def gone(self, split):
        raise FileNotFoundError("no such data")

    monkeypatch.setattr(Small, "dataset", gone)
    name, flag = command

    with pytest.raises(FileNotFoundError, match="no such data"):
        main([name, str(run), flag, str(tmp_path / "out.jsonl")])
    assert flag not in capsys.readouterr().err


class Lane(Iterator[Any]):
    """Its state has an entry that is another one in each process."""

    def __init__(self) -> None:
        self.rows, self.place = [*zip(*samples(96, 0), strict=True)], 0

    def __next__(self) -> Any:
        if self.place == 96:
            raise StopIteration
        self.place += 1
        return self.rows[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "loaded": os.urandom(4)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Stream(IterableDataset):
    def __iter__(self) -> Lane:
        return Lane()


class Streamed(Small):
    def dataset(self, split: str) -> Any:
        return Stream() if split == "train" else super().dataset(split)


def test_the_books_of_a_streams_source_are_not_compared(tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(settings(tmp_path / name, Streamed(), seed=seed))
    capsys.readouterr()

    assert main(["compare", *(str(tmp_path / name) for name in "ab")]) == 0
    assert re.match("same bits\n.*sources differ.* not compared", capsys.readouterr().out)
    assert main(["compare", *(str(tmp_path / name) for name in "ac")]) == 1
    assert json.loads((tmp_path / "a/environment.json").read_text())["determinism"] == {
        "label": "exact", "why": ""}


def test_a_damaged_final_model_cannot_be_compared(run, tmp_path, capsys):
    shutil.copytree(run, damaged := tmp_path / "damaged")
    os.truncate(damaged / "model.safetensors", 100)

    assert main(["compare", str(run), str(damaged)]) == 2
    assert f"error: {damaged}/model.safetensors: " in capsys.readouterr().err


def of_the_run(run: Path, step: int) -> Net:
    """Return the model as a script would build it: averaged parameters, and buffers."""
    model = Net().eval()
    folder = run / f"checkpoints/step-{step:08d}"
    model.load_state_dict(load_file(folder / "model.safetensors")
                          | load_file(folder / "ema.safetensors"))
    return model


@pytest.mark.parametrize(("split", "count", "seed"), [("test", 30, 2), ("predict", 7, 3)])
def test_predictions_are_the_models_outputs_in_the_order_of_the_data(
        run, tmp_path, capsys, split, count, seed):
    out = tmp_path / "p.safetensors"

    code = main(["predict", str(run), "--checkpoint=8", f"--split={split}", f"--out={out}"])

    found = load_file(out)
    expected = torch.cat([of_the_run(run, 8)(x) for x in samples(count, seed)[0].split(16)])
    assert code == 0
    assert f"{split}, step 8, {count} samples" in capsys.readouterr().out
    assert torch.equal(found["index"], torch.arange(count))
    assert torch.equal(found["output"], expected)


def test_predictions_go_into_the_run_folder_or_into_json_lines(run, tmp_path):
    checkpoints = content(run / "checkpoints")

    assert main(["predict", str(run), "--checkpoint=8"]) == 0
    assert main(["predict", str(run), "--checkpoint=8", f"--out={tmp_path}/p.jsonl"]) == 0

    found = load_file(run / "predictions/test-step-00000008.safetensors")
    lines = [json.loads(text) for text in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(30))
    assert torch.equal(torch.tensor([line["output"] for line in lines]), found["output"])
    assert content(run / "checkpoints") == checkpoints


NONE = [[None, None]]


@pytest.mark.parametrize(("kind", "expected"), [
    ("strings", {0: {"output": "a"}, 1: {"output": "bb"}, 2: {"output": "ccc"}}),
    ("named", {n: {"word": "abc"[n] * (n + 1), "class": n} for n in range(3)}),
    ("pair", {n: {"word": "abc"[n] * (n + 1), "number": n} for n in range(3)}),
    ("objects", {n: {"output": {"logits": NONE * (n + 1), "mean": None, "cache": None,
                                "states": []}} for n in range(3)}),
    ("dicts", {n: {"output": {"boxes": NONE * (n + 1), "word": "abc"[n] * (n + 1)}}
               for n in range(3)}),
])  # fmt: skip
def test_answers_that_are_no_tensors_are_json_lines(run, tmp_path, capsys, kind, expected):
    task = ["--task=small_task:Spoken", f"--task.kind={kind}", "--checkpoint=8"]

    assert main(["predict", str(run), *task]) == 0
    path = run / "predictions/test-step-00000008.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()

    chosen = of_the_run(run, 8)(samples(30, 2)[0]).argmax(1).tolist()
    assert lines == [{"index": i, **expected[n]} for i, n in enumerate(chosen)]
    assert main(["predict", str(run), *task, f"--out={tmp_path}/p.safetensors"]) == 2
    assert "is no tensor" in capsys.readouterr().err


def test_tensors_whose_size_differs_between_batches_are_json_lines(run):
    assert main(["predict", str(run), "--task=small_task:Spoken", "--task.kind=padded"]) == 0

    (path,) = (run / "predictions").glob("*.jsonl")
    sizes = [len(json.loads(line)["output"]) for line in path.read_text().splitlines()]
    path.unlink()
    assert sizes == [16] * 16 + [14] * 14


@pytest.mark.parametrize(("kind", "why"), [("foreign", "a object, which JSON can't represent"),
                                           ("short", "a list with one entry for each")])
def test_answers_that_fit_no_file_are_named(run, tmp_path, capsys, kind, why):
    assert main(["predict", str(run), "--task=small_task:Spoken", f"--task.kind={kind}",
                 f"--out={tmp_path}/p.jsonl"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("drift", [0, -1e-9])
def test_of_a_structured_output_the_tensors_are_used_and_the_rest_is_named(
    run, tmp_path, capsys, drift
):
    answers = ["--task=small_task:Answers", f"--task.drift={drift}", "--checkpoint=8"]

    codes = [main(["predict", str(run), f"--out={tmp_path}/p.safetensors", *answers]),
             main(["export", str(run), f"--to={tmp_path}/out", "--format=safetensors",
                   "--format=program", *answers])]

    found, words = load_file(tmp_path / "p.safetensors"), capsys.readouterr().err
    expected = torch.cat([of_the_run(run, 8)(x) for x in samples(30, 2)[0].split(16)])
    torch.testing.assert_close(found["logits"], expected)
    assert torch.equal(found["states.0"], found["logits"] + 1)
    assert (codes, sorted(found)) == ([0, 0], ["index", "logits", "states.0"])
    assert "no row for each sample: mean (()), cache (object)" in words
    assert "not compared, since only tensors are: cache (object)" in words
    answer = torch.export.load(tmp_path / "out/model.pt2").module()(samples(50, 1)[0][:16])
    assert [name for name, value in answer.items() if value is not None] == [
        "logits", "mean", "states"]


class Unstable(Held):
    def loss(self, model: Net, batch: Any) -> Outcome:
        return dataclasses.replace(outcome := super().loss(model, batch),
                                   total=outcome.total * math.inf)


def short_of_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize(("task", "error", "remedy"), [
    (Held(1, short_of_memory), MemoryError, "--precision.recompute-every 1"),
    (Unstable(), NonFinite, "--numerics.anomaly on")])
def test_a_library_call_names_the_remedies_too(tmp_path, capsys, task, error, remedy):
    with pytest.raises(error) as raised:
        train(settings(tmp_path / "run", task, nonfinite=BadStepConfig(max_total=0)))

    assert remedy in capsys.readouterr().err
    assert error is MemoryError or remedy in str(raised.value)


def test_lines_are_valid_json_with_nonfinite_numbers():
    values = torch.tensor([[1.0, math.nan], [math.inf, 2.0]])

    assert [json.loads(line)["output"] for line in _lines([{"output": values}])] == [
        [1.0, None], [None, 2.0]]


def test_exported_weights_and_program_compute_what_the_run_does(run, tmp_path, capsys):
    code = main(["export", str(run), f"--to={tmp_path}", "--format=safetensors",
                 "--format=program"])

    about = json.loads((tmp_path / "export.json").read_text())
    x, expected = samples(21, 5)[0], of_the_run(run, about["step"])
    plain = Net().eval()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        assert torch.equal(plain(x), expected(x))
        torch.testing.assert_close(program(x), expected(x))
    assert code == 0
    assert about["averaged"]
    assert {name: file["tolerance"] for name, file in about["files"].items()} == {
        "model.safetensors": 0.0, "model.pt2": 1e-4}
    assert capsys.readouterr().out.count("largest difference") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "export.json", "model.pt2", "model.safetensors"]


def test_an_exported_model_is_only_kept_with_the_same_output(run, tmp_path, capsys):
    sampled = main(["export", str(run), f"--to={tmp_path}/sampled", "--task.drift=-0.5",
                    "--format=safetensors", "--format=program"])
    drifting = main(["export", str(run), f"--to={tmp_path}/out", "--task.drift=0.5"])

    assert (sampled, drifting) == (0, 1)
    assert "largest difference 0." in (output := capsys.readouterr().err)
    assert "more than --tolerance 0: it isn't kept" in output
    assert not list((tmp_path / "out").iterdir())


def test_a_model_of_transformers_is_exported_with_its_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    path, to = tmp_path / "run", tmp_path / "tuned"
    train(settings(path, "pretrained_task:Letters"))

    assert main(["export", str(path), "--to", str(to), "--format", "hf"]) == 0

    model = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
    ids = transformers.AutoTokenizer.from_pretrained(to)("abcdef", return_tensors="pt")["input_ids"]
    trained = type(model)(model.config).eval()
    trained.load_state_dict(load_file(path / "model.safetensors"))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trained(ids).logits)
    about = json.loads((to / "export.json").read_text())["files"]["config.json"]
    assert about["difference"] == 0
    assert "model.safetensors" in about["files"]


def test_the_loss_is_compared_where_it_does_not_call_the_model_itself(tmp_path, capsys):
    train(settings(tmp_path / "run", Parts()))
    export = ["export", str(tmp_path / "run"), "--to", str(tmp_path / "to")]

    assert main(export) == 0
    assert main([*export, "--format", "program"]) == 2
    assert "doesn't call the model itself" in capsys.readouterr().err


def test_adapters_are_exported_alone_and_read_back_on_their_base(tmp_path):
    pytest.importorskip("peft")
    from pretrained_task import Letters

    train(settings(tmp_path / "run", Letters(adapters=True)))

    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "tuned"),
                 "--format", "hf"]) == 0
    assert {"adapter_config.json", "adapter_model.safetensors"} <= content(
        tmp_path / "tuned").keys()
    assert not (tmp_path / "tuned/model.safetensors").exists()
