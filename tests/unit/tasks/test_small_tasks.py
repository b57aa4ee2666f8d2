"""Shipped tasks: they pass `check_task`; their data, targets and teachers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trainer import rng
from trainer.config import command_line
from trainer.data.batch import collate
from trainer.errors import ConfigError
from trainer.tasks.images import Images
from trainer.tasks.photos import Photos
from trainer.tasks.ring import Ring
from trainer.tasks.shapes import Shapes
from trainer.tasks.spiral import Spiral
from trainer.tasks.text import NOT_COUNTED, MuonText, Text
from trainer.testing import check_task


@pytest.mark.parametrize("task", [
    Spiral(label_smoothing=0.1), Shapes(images=16), Shapes(images=16, target="labels"),
    Shapes(images=16, target="labels", balanced=True),
    Shapes(images=16, loss_name="bce", balanced=True), Text(context=16, dropout=0.1),
    Text(context=16, stream=True), MuonText(context=16, width=16), Ring(points=64, width=8),
], ids=str)
def test_a_shipped_task_passes_check_task(task):
    check_task(task)


@pytest.mark.parametrize("recipe", command_line.recipe_names())
def test_a_recipe_is_in_the_docs(recipe):
    page = (Path(__file__).parents[3] / "docs/tasks.md").read_text()

    assert f"`{recipe}`" in page


@pytest.mark.parametrize("task", [Images(), Spiral(), Ring(), Shapes(images=8),
                                  Shapes(images=8, target="labels")], ids=str)
def test_a_picture_is_drawn_of_a_fresh_model(task):
    with torch.inference_mode():
        picture = task.picture(task.model().eval())

    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    assert picture.std() > 1


WRONG = {
    Images: {"validation_fraction": [1.0, -0.1, math.nan], "dropout": [1.0], "norm": ["layer"],
             "augment": ["crop"], "data": ["mnist"], "label_smoothing": [1], "temperature": [0.0],
             "teacher_share": [1.1], "seed": ["1"]},
    Photos: {"crop": [0], "resize": [-5], "class_weights": ["even"], "validation_fraction": [2]},
    Shapes: {"images": [3], "width": [2, 6], "noise": [math.inf], "seed": [-1],
             "balanced": [True]},
    Spiral: {"points": [-5, 8], "noise": [-1], "width": [0], "seed": [-1]},
    Text: {"context": [0], "heads": [0, 3], "layers": [0], "dropout": [1.5]}}


@pytest.mark.parametrize(("task", "field", "value"), [
    (task, field, value) for task, fields in WRONG.items()
    for field, values in fields.items() for value in values])
def test_a_wrong_setting_is_refused_by_its_flag(task, field, value):
    flag = "width" if (field, value) == ("heads", 3) else field.replace("_", "-")

    with pytest.raises(ConfigError, match=f"^--task.{flag} .*: (use|expected|masks) "):
        task(**{field: value})


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Images(architecture="resnet18", norm="group"), "--task.norm group: .*cnn"),
    (lambda: Images(architecture="resnet18", dropout=0.1), "--task.dropout 0.1: .*cnn"),
    (lambda: Images(validation_fraction=0.99999).dataset("train"),
     "--task.validation-fraction 0.99999: none of 12000 images"),
    (lambda: Photos(root=".", crop=200, resize=40)._sizes(), "--task.resize 40: use the crop")])
def test_settings_that_do_not_fit_together_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# --- text

@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) * 2)
    return path


def test_pieces_are_the_text_with_next_bytes_and_the_last_one_is_shorter(text):
    data = Text(file=str(text), context=16, validation_fraction=0.0).dataset("train")

    assert len(data) == 13  # 199 bytes have a next byte
    inputs, targets = data.__getitems__(range(13))
    assert inputs.flatten()[:199].tolist() == list(text.read_bytes()[:-1])
    assert targets.flatten()[:199].tolist() == list(text.read_bytes()[1:])
    assert targets.flatten()[199:].tolist() == [NOT_COUNTED] * 9
    assert torch.equal(data[12][1], targets[12])


def test_bytes_are_the_weight(text):
    task = Text(file=str(text), context=16, validation_fraction=0.0)
    data = task.dataset("train")
    rng.seed_all(0, rng.MODEL)
    model = task.model()

    outcome = task.loss(model, collate([data[0], data[12]]))

    assert int(outcome.count) == 16 + 7


def test_the_end_of_the_text_is_held_out(text):
    task = Text(file=str(text), context=16, validation_fraction=0.25)

    assert bytes(task.dataset("train").data) == text.read_bytes()[:150]
    assert bytes(task.dataset("validation").data) == text.read_bytes()[150:]
    assert task.dataset("test") is None


def test_lanes_read_contiguous_parts_of_the_text_and_save_their_position(text):
    stream = Text(file=str(text), context=16, stream=True, validation_fraction=0.0).dataset("train")

    lanes = [list(stream.lane(number, 3)) for number in range(3)]
    assert [len(lane) for lane in lanes] == [4, 4, 5]
    assert torch.equal(torch.cat([x for lane in lanes for x, _ in lane])[:199],
                       torch.cat([x for x, _ in stream])[:199])
    reader, later = stream.lane(1, 3), stream.lane(1, 3)
    reader.reset()
    next(reader), next(reader)
    later.reset(reader.state_dict())
    assert torch.equal(next(later)[0], lanes[1][2][0])


def test_the_gpt_does_not_look_ahead():
    torch.manual_seed(1)
    model = Text(context=16).model().eval()
    tokens = torch.randint(256, (2, 16))
    other = tokens.clone()
    other[:, 9] = (other[:, 9] + 1) % 256

    with torch.no_grad():
        difference = (model(tokens) - model(other)).abs().amax((0, 2))

    assert float(difference[:9].max()) == 0
    assert float(difference[9:].min()) > 0


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), (b"", "empty"),
                                               (b"a", "too few")])
def test_a_text_that_cannot_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=f"task.file {path}.*{message}"):
        Text(file=str(path)).dataset("train")


# --- teachers

@pytest.fixture
def teacher(tmp_path) -> Path:
    rng.seed_all(7, rng.MODEL)
    save_file(Images().model().state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def test_a_task_with_a_teacher_passes_check_task(teacher):
    check_task(Images(teacher=str(teacher)))


def test_the_distillation_loss_mixes_labels_and_teacher(teacher):
    task = Images(teacher=str(teacher), teacher_share=0.3, temperature=2.0)
    rng.seed_all(0, rng.MODEL)
    model = task.model()
    batch = collate([task.dataset("train")[i] for i in range(6)])

    ours = task.loss(model, batch)

    rng.seed_all(7, rng.MODEL)
    plain = Images().model().eval()
    model = model.train()
    logits, wanted = model(batch[0]), plain(batch[0])
    labels = torch.nn.functional.cross_entropy(logits, batch[1])
    softened = torch.nn.functional.kl_div(
        (logits / 2).log_softmax(1), (wanted / 2).softmax(1), reduction="batchmean")
    expected = 0.7 * labels + 0.3 * 4 * softened
    torch.testing.assert_close(ours.total / ours.count, expected)
    with torch.no_grad():
        model.eval()
        assert float(task.loss(model, batch).total) == float(Images().loss(model, batch).total)


def test_the_teacher_is_not_trained_and_its_weights_are_in_the_fingerprint(teacher):
    task = Images(teacher=str(teacher))
    before = task.fingerprint()
    assert task.model().state_dict().keys() == Images().model().state_dict().keys()
    rng.seed_all(8, rng.MODEL)

    save_file(Images().model().state_dict(), teacher / "model.safetensors")

    assert task.fingerprint() != before != Images().fingerprint()


def test_a_missing_or_unfit_teacher_is_named(teacher, tmp_path):
    with pytest.raises(ConfigError, match=r"--task.teacher nowhere: there is no nowhere"):
        Images(teacher="nowhere").fingerprint()
    task = Images(teacher=str(teacher), norm="group")
    batch = collate([task.dataset("train")[0]])
    save_file({"head": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"doesn't fit --task.teacher-model cnn"):
        Images(teacher=str(tmp_path / "other.safetensors")).loss(task.model().train(), batch)
