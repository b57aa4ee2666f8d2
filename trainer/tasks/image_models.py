"""Image classifiers: a small CNN for 28x28 grey images, and torchvision's classifiers by name."""

from __future__ import annotations

import difflib
import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from trainer.errors import ConfigError
from trainer.task import load_object

IMAGE_SIZE = 28

_EXTRA_ARGUMENTS = {
    # Both would return auxiliary outputs in training, and warn about their initialisation.
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


class SmallCNN(nn.Module):
    """Two blocks of 3x3 convolution, norm ("batch", "group" with 8 groups, or "none"), ReLU and 2x2
    max-pooling (32 and 64 channels), then a hidden layer of 128 units: about 422,000 parameters."""

    def __init__(self, norm: str = "batch", dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(*_block(1, 32, norm), *_block(32, 64, norm))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * (IMAGE_SIZE // 4) ** 2, 128), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits Nx10 of images Nx1x28x28."""
        return self.head(self.features(images))


def classifier(name: str, classes: int = 10, size: int = IMAGE_SIZE) -> nn.Module:
    """A new torchvision classifier, or `module:Class` called with the number of classes.

    For torchvision, a grey image is repeated to three channels, and images of `size` x `size` are
    enlarged to the least size that it states for the network. A forward pre-hook does both, so the
    names of the weights remain torchvision's.
    """
    if ":" in name:
        return load_object(name, "--task.model")(classes)
    models = _known(name)
    net = _new(name, classes)
    least = min(weights.meta["min_size"][0] for weights in models.get_model_weights(name))
    net.register_forward_pre_hook(functools.partial(_as_photograph, size=max(size, least)))
    return net


def pretrained(name: str, weights: str, classes: int) -> nn.Module:
    """A torchvision classifier with published weights, read from torch's cache (TORCH_HOME) or
    downloaded into it. The last layer is newly initialised if its size differs."""
    chosen = find_pretrained(name, weights)
    net = _new(name, classes)
    try:
        values = chosen.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"--task.weights {weights}: {chosen.url} can't be loaded ({error}); put "
                          "the file into TORCH_HOME/hub/checkpoints.") from None
    own = net.state_dict()
    values = {n: v for n, v in values.items() if not n.startswith(("aux", "AuxLogits"))}
    other = [n for n, v in values.items() if n in own and own[n].shape != v.shape]
    if len({n.rpartition(".")[0] for n in other}) > 1:
        raise ConfigError(f"--task.weights {weights}: {', '.join(other)} of {name} don't fit.")
    net.load_state_dict({**own, **{n: v for n, v in values.items() if n not in other}})
    return net


def _new(name: str, classes: int) -> nn.Module:
    extra = _EXTRA_ARGUMENTS.get(name, {})
    return _known(name).get_model(name, weights=None, num_classes=classes, **extra)


def find_pretrained(name: str, weights: str) -> Any:
    """The torchvision enum member of a classifier's published weights."""
    known = _known(name).get_model_weights(name).__members__
    if weights not in known:
        raise ConfigError(f"--task.weights {weights}: torchvision has no such weights of {name}; "
                          f"it has {', '.join(known) or 'no weights'}.")
    return known[weights]


def _known(name: str) -> Any:
    """The module torchvision.models, after checking that it has this classifier."""
    from torchvision import models  # as slow to import as torch, so imported only when needed

    known = models.list_models(module=models)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or ["resnet18"]
        raise ConfigError(f"--task.model {name}: torchvision has no such classifier "
                          "(torchvision.models.list_models lists them); did you mean "
                          f"{' or '.join(near)}?")
    return models


def _block(channels_in: int, channels_out: int, norm: str) -> list[nn.Module]:
    layers: list[nn.Module] = [
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=norm == "none")]
    if norm != "none":
        layers.append(nn.BatchNorm2d(channels_out) if norm == "batch" else
                      nn.GroupNorm(8, channels_out))
    return [*layers, nn.ReLU(), nn.MaxPool2d(2)]


def _as_photograph(module: nn.Module, arguments: tuple[Tensor, ...], *, size: int) -> Tensor:
    images = arguments[0].expand(-1, 3, -1, -1)
    if images.shape[-1] == size:
        return images
    return functional.interpolate(images, (size, size), mode="bilinear", align_corners=False)
