"""DaFKD's models: its classifier, and generators of images and of features.

The paper calls its classifier "ResNet11" without a description. A 3x3 convolution and one bottleneck block (expansion
4) per stage at widths 16, 32 and 64 have 11 layers with weights; the authors' code has two blocks per stage
(`dafkd_resnet20`). Both end in 256 features and one linear layer, and the discriminator shares all layers before it.
`embedding_generator` is the paper's generator: embeddings of noise and label, then a fully connected layer with
batch-norm and LeakyReLU. `feature_generator` makes features in the same way. The other image generators follow DCGAN,
as in the authors' code: one linear layer, then transposed convolutions.

References:
    Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023, sections 3.3 and 4.1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import ConfigurationError
from fleetdistill.models.resnet import CIFAR_SHAPE, EXPANSION, Bottleneck, initialise_convolutions
from fleetdistill.models.shapes import check_classes, check_image, check_shape
from fleetdistill.training.model import SplitModel

_WIDTHS = (16, 32, 64)
_IMAGE_WIDTHS = (32, 16)
_HIDDEN = {"digits": 64, "embedding": 256, "features": 256}
_EMBEDDING = 128
_SLOPE = 0.2


def dafkd_resnet11(input_shape: Sequence[int] = CIFAR_SHAPE, classes: int = 10) -> SplitModel:
    """Builds the paper's classifier: one bottleneck block per stage.

    Args:
        input_shape: Channels, height and width of one image.
        classes: Number of classes, at least 2.

    Raises:
        ConfigurationError: A shape or number does not fit the model.
    """
    return _resnet(1, input_shape, classes)


def dafkd_resnet20(input_shape: Sequence[int] = CIFAR_SHAPE, classes: int = 10) -> SplitModel:
    """Builds the authors' classifier: two bottleneck blocks per stage. Arguments as `dafkd_resnet11`."""
    return _resnet(2, input_shape, classes)


def dafkd_cnn(input_shape: Sequence[int] = (1, 28, 28), classes: int = 10) -> SplitModel:
    """Builds the small convolutional classifier for 28x28 images that our comparison uses.

    It has two 5x5 convolutions of width 16 and 32 with pooling and a hidden layer of 64, 46,730 parameters for 10
    classes. The discriminator uses the hidden layer's output. Arguments and errors as `dafkd_resnet11`; height and
    width at least 16.
    """
    channels, height, width = check_image(input_shape, smallest=16)
    pooled = 32 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    stages: dict[str, nn.Module] = {
        "convolution1": nn.Sequential(nn.Conv2d(channels, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        "convolution2": nn.Sequential(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        "hidden": nn.Sequential(nn.Flatten(), nn.Linear(pooled, 64), nn.ReLU()),
        "head": nn.Linear(64, check_classes(classes)),
    }
    return SplitModel(stages, cut="convolution1")


def _resnet(blocks: int, input_shape: Sequence[int], classes: int) -> SplitModel:
    channels, _, _ = check_image(input_shape)
    inputs = _WIDTHS[0]
    convolution = nn.Conv2d(channels, inputs, kernel_size=3, padding=1, bias=False)
    stages = OrderedDict[str, nn.Module](stem=nn.Sequential(convolution, nn.BatchNorm2d(inputs), nn.ReLU()))
    for width in _WIDTHS:
        for index in range(blocks):
            stride = 2 if index == 0 and width != _WIDTHS[0] else 1
            stages[f"block{width}_{index + 1}"] = Bottleneck(inputs, width, stride)
            inputs = EXPANSION * width
    stages["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    stages["head"] = nn.Linear(inputs, check_classes(classes))
    model = SplitModel(stages, cut="pool")
    initialise_convolutions(model)
    return model


class NoiseGenerator(nn.Module):
    """Maps noise, and labels if the generator has them, to samples.

    Attributes:
        noise_dim: The paper's d, numbers in one noise vector.
        classes: Number of classes of the labels; 0 for a generator without labels.
    """

    def __init__(self, noise_dim: int, classes: int, body: nn.Sequential, embedding: int = _EMBEDDING) -> None:
        super().__init__()
        self.noise_dim = noise_dim
        self.classes = classes
        self.body = body
        if classes:
            self.noise_embedding = nn.Linear(noise_dim, embedding)
            self.label_embedding = nn.Linear(classes, embedding)

    def forward(self, noise_md: Tensor, labels_m: Tensor | None = None) -> Tensor:
        """Returns samples `[M, *shape]` of noise `[M, d]` and, for a generator with labels, labels `[M]` int64."""
        if not self.classes:
            return self.body(noise_md)  # type: ignore[no-any-return]  # a module's call
        if labels_m is None:
            raise ConfigurationError(f"the generator needs labels of {self.classes} classes; pass one per sample")
        one_hot_mc = functional.one_hot(labels_m, self.classes).to(noise_md.dtype)
        both = torch.cat([self.noise_embedding(noise_md), self.label_embedding(one_hot_mc)], dim=1)
        return self.body(both)  # type: ignore[no-any-return]


def dafkd_generator(shape: Sequence[int] = (1, 28, 28), noise_dim: int = 100, classes: int = 0) -> NoiseGenerator:
    """Builds a generator of images in (0, 1): a linear layer, two transposed convolutions and a sigmoid.

    Args:
        shape: Channels, height and width of one image; height and width must be multiples of 4.
        noise_dim: Numbers in one noise vector, at least 1.
        classes: Number of classes of the labels; 0 for a generator without labels.

    Raises:
        ConfigurationError: A shape or number does not fit the generator.
    """
    return _images(shape, noise_dim, classes, nn.Sigmoid())


def dafkd_generator_tanh(shape: Sequence[int] = (1, 28, 28), noise_dim: int = 100, classes: int = 0) -> NoiseGenerator:
    """Builds the authors' generator of images in (-1, 1), with tanh. Arguments and errors as `dafkd_generator`.

    Use it for data in this range. For images in [0, 1], tanh is steepest at the black background: it becomes noise, by
    which a discriminator recognises every generated image.
    """
    return _images(shape, noise_dim, classes, nn.Tanh())


def _images(shape: Sequence[int], noise_dim: int, classes: int, last: nn.Module) -> NoiseGenerator:
    channels, height, width = check_image(shape, smallest=4)
    if height % 4 or width % 4:
        raise ConfigurationError(f"shape {shape!r}: height and width must be multiples of 4 for this generator")
    first, second = _IMAGE_WIDTHS
    small = (first, height // 4, width // 4)
    body = nn.Sequential(
        nn.Linear(_inputs(noise_dim, classes), prod(small)),
        nn.Unflatten(1, small),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.ConvTranspose2d(first, second, kernel_size=4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.ConvTranspose2d(second, channels, kernel_size=4, stride=2, padding=1),
        last,
    )
    return NoiseGenerator(noise_dim, classes, body)


def digits_generator(shape: Sequence[int] = (1, 8, 8), noise_dim: int = 100, classes: int = 0) -> NoiseGenerator:
    """Builds a small generator of images in (0, 1), with one hidden layer of 64.

    The arguments are those of `dafkd_generator`, with any shape.
    """
    return _one_hidden_layer(_HIDDEN["digits"], shape, noise_dim, classes)


def embedding_generator(shape: Sequence[int] = (1, 28, 28), noise_dim: int = 100, classes: int = 10) -> NoiseGenerator:
    """Builds the paper's generator, for images in (0, 1).

    It has two embeddings, a fully connected layer of 256 with batch-norm and LeakyReLU, and a linear layer. The widths
    and the sigmoid are ours; the paper does not state them. Arguments as `dafkd_generator`, with any shape; without
    labels the noise is the input of the layer of 256.
    """
    return _one_hidden_layer(_HIDDEN["embedding"], shape, noise_dim, classes)


def _one_hidden_layer(hidden: int, shape: Sequence[int], noise_dim: int, classes: int) -> NoiseGenerator:
    body = nn.Sequential(
        *_layer(_inputs(noise_dim, classes), hidden),
        nn.Linear(hidden, prod(check_shape(shape))),
        nn.Sigmoid(),
        nn.Unflatten(1, tuple(shape)),
    )
    return NoiseGenerator(noise_dim, classes, body)


def feature_generator(shape: Sequence[int] = (256,), noise_dim: int = 100, classes: int = 10) -> NoiseGenerator:
    """Builds a generator of features of at least 0, as after a ReLU: two layers of 256.

    Arguments as `dafkd_generator`, with any shape.
    """
    hidden = _HIDDEN["features"]
    body = nn.Sequential(
        *_layer(_inputs(noise_dim, classes), hidden),
        *_layer(hidden, hidden),
        nn.Linear(hidden, prod(check_shape(shape))),
        nn.ReLU(),
        nn.Unflatten(1, tuple(shape)),
    )
    return NoiseGenerator(noise_dim, classes, body)


def _layer(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.LeakyReLU(_SLOPE)


def _inputs(noise_dim: int, classes: int) -> int:
    """Returns the number of inputs of the body: of the noise, or of both embeddings."""
    if noise_dim < 1:
        raise ConfigurationError(f"noise_dim must be >= 1, got {noise_dim!r}")
    return 2 * _EMBEDDING if classes and check_classes(classes) else noise_dim
