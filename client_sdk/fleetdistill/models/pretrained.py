"""Pretrained networks of torchvision and timm as extractors, with the resize and normalisation that they need.

An extractor takes a run's images and returns the input of the network's classifier, in most networks the pooled
output of the last convolution. Preparing the images is part of the module, and so of every exported file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import ConfigurationError
from fleetdistill.models import RECOMMENDED, build_model
from fleetdistill.models.shapes import check_classes, check_image
from fleetdistill.training.model import output_shape

__all__ = ["ImageInputs", "images_of"]

_CLASSIFIERS = ("classifier", "fc", "head", "heads")
_UNUSABLE = {
    "googlenet": "normalises its inputs itself, but only with downloaded weights",
    "inception_v3": "normalises its inputs itself, but only with downloaded weights",
    "vit_h_14": "has another architecture with downloaded weights than without",
}
_MODES = ("bilinear", "bicubic")


class ImageInputs(nn.Module):
    """Prepares images `[batch, 1 or 3, h, w]` in [0, 1] for a pretrained network: `[batch, 3, size, size]`.

    Grey images are repeated to three channels. The whole image is resized, without the crop of torchvision's
    transforms, because small images have no margin to lose. The resize has no antialias filter, which ONNX export does
    not support. Bilinear enlarging is the same without it; reducing a photograph to half its side changes pixels by
    0.02 on average.

    Attributes:
        input_shape: Shape of the run's images: channels, height and width.
        size: Height and width in pixels that the weights were trained for.
        mode: Interpolation, `bilinear` or `bicubic`.
        mean: Mean of the training images, `[3, 1, 1]`.
        std: Their standard deviation, `[3, 1, 1]`.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, input_shape: Sequence[int], size: int, mean: Sequence[float], std: Sequence[float], mode: str = "bilinear"
    ) -> None:
        """Keeps what the weights need.

        Raises:
            ConfigurationError: `input_shape` is not that of a grey image or of one with three channels.
        """
        super().__init__()
        self.input_shape = check_image(input_shape)
        if self.input_shape[0] not in (1, 3):
            raise ConfigurationError(
                f"a pretrained network takes images with 1 or 3 channels, but the shape is {list(input_shape)}; use "
                "your own package.module:factory"
            )
        self.size, self.mode = size, mode if mode in _MODES else "bicubic"
        self.register_buffer("mean", torch.tensor(mean).reshape(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).reshape(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Returns resized and normalised images."""
        if self.input_shape[0] == 1:
            x = x.expand(-1, 3, -1, -1)
        resized = functional.interpolate(x, (self.size, self.size), mode=self.mode, align_corners=False)
        return (resized - self.mean) / self.std

    def extra_repr(self) -> str:
        """See `torch.nn.Module.extra_repr`."""
        return f"{self.input_shape}, size={self.size}, mode={self.mode}"


class PretrainedExtractor(nn.Module):
    """Maps images `[batch, c, h, w]` in [0, 1] to features `[batch, F]`.

    Attributes:
        images: Prepares the images.
        network: The network below its classifier.
    """

    def __init__(self, images: ImageInputs, network: nn.Module) -> None:
        super().__init__()
        self.images, self.network = images, network

    def forward(self, x: Tensor) -> Tensor:
        """Returns features `[batch, F]`."""
        return self.network(self.images(x)).flatten(1)  # type: ignore[no-any-return]


class LinearModel(nn.Module):
    """A local model of an extractor and one linear layer.

    Attributes:
        extractor: Maps inputs to features.
        head: Linear layer from flattened features to logits.
    """

    def __init__(self, extractor: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.extractor, self.head = extractor, nn.Linear(features, check_classes(classes))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits `[batch, classes]` of inputs `[batch, *input_shape]`."""
        return self.predict(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Returns the extractor's output `[batch, ...]`."""
        return self.extractor(x)  # type: ignore[no-any-return]

    def embedding(self, x: Tensor) -> Tensor:
        """Returns the input of the linear layer, `[batch, F]`."""
        return self.features(x).flatten(1)

    def predict(self, features: Tensor) -> Tensor:
        """Returns logits `[batch, classes]` of the extractor's output."""
        return self.head(features.flatten(1))  # type: ignore[no-any-return]


def images_of(extractor: nn.Module) -> ImageInputs | None:
    """Returns the part of an extractor that prepares images; None if it is not a pretrained network of this module."""
    return next((part for part in extractor.modules() if isinstance(part, ImageInputs)), None)


def torchvision_network(name: str, input_shape: Sequence[int], weights: str = "") -> PretrainedExtractor:
    """Builds an extractor from a classification network of torchvision; the resize is that of the named weights.

    Args:
        name: Name in `torchvision.models.list_models(module=torchvision.models)`.
        input_shape: Shape of the run's images.
        weights: `RECOMMENDED`, or another name in torchvision's list of this network's weights, which torchvision
            downloads; path of a file that `torch.save(network.state_dict(), path)` wrote; or empty for random weights.

    Raises:
        ConfigurationError: The network is unknown or unusable, or its weights cannot be loaded.
    """
    from torchvision import models

    title = f"torchvision:{name}"
    if name in _UNUSABLE:
        raise ConfigurationError(f"{title} {_UNUSABLE[name]}, so it cannot be an extractor; choose another network")
    if name not in models.list_models(module=models):
        raise ConfigurationError(
            f"torchvision has no classification network {name!r}; "
            "torchvision.models.list_models(module=torchvision.models) lists them"
        )
    known = models.get_model_weights(name)
    chosen = known[weights] if weights in known.__members__ else known.DEFAULT
    is_downloaded = weights in (RECOMMENDED, *known.__members__)
    needs = chosen.transforms()
    images = ImageInputs(input_shape, needs.crop_size[0], needs.mean, needs.std, needs.interpolation.value)
    try:
        network = models.get_model(name, weights=chosen if is_downloaded else None)
    except OSError as error:
        raise _not_downloaded(title, error) from error
    classifier = _cut_classifier(network, title)
    if weights and not is_downloaded:
        _load(network, weights, classifier, title)
    return PretrainedExtractor(images, network)


def timm_network(name: str, input_shape: Sequence[int], weights: str = "") -> PretrainedExtractor:
    """Builds an extractor from a network of timm; its pooled output, as with `num_classes=0`.

    Args:
        name: Name in `timm.list_models()`.
        input_shape: Shape of the run's images.
        weights: `RECOMMENDED` for timm's, which it downloads; path of a file that
            `torch.save(network.state_dict(), path)` wrote; or empty for random weights.

    Raises:
        ConfigurationError: timm is not installed, the network is unknown, or its weights cannot be loaded.
    """
    title = f"timm:{name}"
    try:
        import timm
    except ImportError as error:
        raise ConfigurationError(f"{title} needs the package timm: pip install 'fleetdistill[timm]'") from error
    try:
        network = timm.create_model(name, pretrained=weights == RECOMMENDED, num_classes=0)
    except OSError as error:
        raise _not_downloaded(title, error) from error
    except RuntimeError as error:  # raised for an unknown name
        raise ConfigurationError(f"{title} cannot be built: {error}; timm.list_models() has the names") from error
    needs = timm.data.resolve_model_data_config(network)
    images = ImageInputs(input_shape, needs["input_size"][-1], needs["mean"], needs["std"], needs["interpolation"])
    if weights not in ("", RECOMMENDED):
        _load(network, weights, str(network.default_cfg["classifier"]), title)
    return PretrainedExtractor(images, network)


def linear_model(name: str, input_shape: Sequence[int], classes: int, weights: str = "") -> LinearModel:
    """Builds a local model of an extractor and one linear layer.

    Args:
        name: The extractor, as for `fleetdistill.models.build_model`.
        input_shape: Shape of one input.
        classes: Number of classes, at least 2.
        weights: Weights of an extractor of a library, see `torchvision_network`; empty for random ones.

    Raises:
        ConfigurationError: The extractor cannot be built.
        ModelError: The extractor does not take inputs of this shape.
    """
    options = {"weights": weights} if weights else {}
    extractor = build_model(name, input_shape=input_shape, **options)
    return LinearModel(extractor, prod(output_shape(extractor, input_shape)), classes)


def _not_downloaded(title: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"the weights of {title} cannot be downloaded: {error}; download them on another machine with "
        "torch.save(network.state_dict(), path), and name the file in [model] extractor_weights"
    )


def _cut_classifier(network: nn.Module, title: str) -> str:
    """Removes a network's classifier from its first linear layer on; returns the classifier's name."""
    name = next((name for name in _CLASSIFIERS if hasattr(network, name)), "")
    classifier = getattr(network, name, None)
    if isinstance(classifier, nn.Linear):
        setattr(network, name, nn.Identity())
        return name
    layers = list(classifier) if isinstance(classifier, nn.Sequential) else []
    below = list(itertools.takewhile(lambda layer: not isinstance(layer, nn.Linear), layers))
    if len(below) == len(layers):
        raise ConfigurationError(f"{title} has no linear classifier to leave out; choose another network")
    setattr(network, name, nn.Sequential(*below))
    return name


def _load(network: nn.Module, path: str, classifier: str, title: str) -> None:
    """Loads a file of weights without its classifier, which may be of any number of classes."""
    given = _read(path, title)
    own = network.state_dict()
    taken = {key: tensor for key, tensor in given.items() if key in own or not key.startswith(f"{classifier}.")}
    wrong = sorted(own.keys() ^ taken.keys()) or [key for key in own if own[key].shape != taken[key].shape]
    if wrong:
        raise ConfigurationError(
            f"the weights in {path!r} are not those of {title}: they differ at {', '.join(wrong[:3])}; write the file "
            "with torch.save(network.state_dict(), path) from this network"
        )
    network.load_state_dict(taken)


def _read(path: str, title: str) -> dict[str, Tensor]:
    if not Path(path).is_file():
        raise ConfigurationError(
            f"the weights of {title}: there is no file {path!r}, and the library has no weights of this name"
        )
    try:
        given: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises errors of pickle, zipfile and its own
        raise ConfigurationError(f"the weights of {title}: {path!r} is not a file of torch.save") from error
    if not isinstance(given, dict) or not all(isinstance(tensor, Tensor) for tensor in given.values()):
        raise ConfigurationError(
            f"the weights of {title}: {path!r} has a {type(given).__name__}, expected a state dict of tensors"
        )
    return given
