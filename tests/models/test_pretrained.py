"""Pretrained networks as extractors: their features, the images that they take, and files of weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.long import long_except
from torch import nn
from torch.testing import assert_close
from torchvision import models
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.transforms import functional as transforms

from fleetdistill.errors import ConfigurationError
from fleetdistill.models import RECOMMENDED, build_model
from fleetdistill.models.pretrained import ImageInputs, images_of
from fleetdistill.training import check_local_model, fingerprint
from fleetdistill.training.onnx_export import onnx_bytes

COLOUR, GREY = (3, 32, 32), (1, 28, 28)
POOLED = {  # node of torchvision's feature extraction with the classifier's input, and F
    "resnet18": ("flatten", 512),
    "mobilenet_v3_small": ("flatten", 576),
    "densenet121": ("flatten", 1024),
    "convnext_tiny": ("classifier.1", 768),
    "vit_b_32": ("getitem_5", 768),
}
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def weights_of(name: str, folder: Path, **options: Any) -> tuple[nn.Module, str]:
    """A network of random weights, and the file of its state dict."""
    torch.manual_seed(5)
    network = models.get_model(name, **options).eval()
    file = folder / f"{name}.pt"
    torch.save(network.state_dict(), file)
    return network, str(file)


@pytest.mark.parametrize("name", long_except(POOLED, "resnet18", "mobilenet_v3_small"))
def test_the_features_are_the_input_of_the_classifier(name, tmp_path):
    network, file = weights_of(name, tmp_path)
    node, features = POOLED[name]
    extractor = build_model(f"torchvision:{name}", input_shape=COLOUR, weights=file).eval()
    images = torch.rand(2, *COLOUR)
    whole = create_feature_extractor(network, [node])
    with torch.no_grad():
        got = extractor(images)
        expected = whole(transforms.normalize(transforms.resize(images, [224, 224]), *IMAGENET))[node]
    assert got.shape == (2, features)
    assert_close(got, expected.flatten(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_enlarged_images_are_those_of_torchvision_s_transforms(mode):
    prepare = ImageInputs(COLOUR, 48, *IMAGENET, mode)
    images = torch.rand(2, *COLOUR)
    is_antialiased = mode == "bilinear"  # the filter has no effect, but bicubic has another kernel with it
    resized = transforms.resize(images, [48, 48], transforms.InterpolationMode(mode), antialias=is_antialiased)
    assert_close(prepare(images), transforms.normalize(resized, *IMAGENET), rtol=1e-4, atol=1e-4)


def test_grey_images_are_repeated_to_three_channels():
    prepare = ImageInputs(GREY, 28, [0.5, 0.25, 0.0], [0.5, 0.25, 1.0])
    images = torch.full((1, *GREY), 0.75)
    expected = torch.tensor([0.5, 2.0, 0.75])  # (0.75 - 0.5) / 0.5, (0.75 - 0.25) / 0.25, 0.75 / 1
    assert_close(prepare(images), expected.reshape(1, 3, 1, 1).expand(1, 3, 28, 28))


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "efficientnet_b0"])
def test_resize_and_normalisation_are_in_the_onnx_file(name):
    extractor = build_model(f"torchvision:{name}", input_shape=GREY).eval()
    data = onnx_bytes(extractor, GREY)  # compares the file with the module
    assert b"Resize" in data


def test_a_linear_model_is_a_local_model_on_the_extractor(tmp_path):
    _, file = weights_of("shufflenet_v2_x0_5", tmp_path)
    model = build_model("linear:torchvision:shufflenet_v2_x0_5", input_shape=COLOUR, classes=7)
    given = build_model("torchvision:shufflenet_v2_x0_5", input_shape=COLOUR, weights=file)
    assert fingerprint(check_local_model(model, torch.rand(2, *COLOUR), 7).extractor) == fingerprint(given)
    weighted = build_model("linear:torchvision:shufflenet_v2_x0_5", input_shape=COLOUR, classes=7, weights=file)
    assert_close(check_local_model(weighted).extractor.state_dict(), given.state_dict())
    own = build_model("linear:digits_extractor", input_shape=(1, 8, 8), classes=3)
    assert own(torch.rand(2, 1, 8, 8)).shape == (2, 3)


def test_a_file_may_be_of_any_number_of_classes(tmp_path):
    network, file = weights_of("resnet18", tmp_path, num_classes=4)
    extractor = build_model("torchvision:resnet18", input_shape=COLOUR, weights=file)
    assert_close(extractor.state_dict()["network.conv1.weight"], network.state_dict()["conv1.weight"])


def test_only_a_pretrained_extractor_prepares_images():
    images = images_of(build_model("linear:torchvision:resnet18", input_shape=GREY, classes=2))
    assert images is not None
    assert (images.input_shape, images.size) == (GREY, 224)
    assert images_of(build_model("digits_extractor", input_shape=(1, 8, 8))) is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("torchvision:resnet1", "no classification network 'resnet1'"),
        ("torchvision:googlenet", "normalises its inputs itself"),
        ("torchvision:squeezenet1_0", "has no linear classifier"),
        ("linear:torchvision:resnet1", "no classification network"),
    ],
)
def test_an_unusable_network_is_refused(name, sentence):
    options = {"classes": 3} if name.startswith("linear:") else {}
    with pytest.raises(ConfigurationError, match=sentence):
        build_model(name, input_shape=COLOUR, **options)


@pytest.mark.parametrize("shape", [(2, 32, 32), (64,)])
def test_inputs_must_be_grey_or_colour_images(shape):
    with pytest.raises(ConfigurationError, match="shape"):
        build_model("torchvision:resnet18", input_shape=shape)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "there is no file"),
        (b"no zip file", "is not a file of torch.save"),
        ([1], "has a list, expected a state dict"),
        ({"conv1.weight": torch.zeros(1)}, "not those of torchvision:resnet18: they differ at"),
    ],
)
def test_a_wrong_file_of_weights_is_refused(content, sentence, tmp_path):
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ConfigurationError, match=sentence):
        build_model("torchvision:resnet18", input_shape=COLOUR, weights=str(file))


def test_weights_of_another_shape_are_refused(tmp_path):
    _, file = weights_of("resnet18", tmp_path, width_per_group=64)
    given = torch.load(file, weights_only=True)
    torch.save({**given, "conv1.weight": torch.zeros(64, 1, 7, 7)}, file)
    with pytest.raises(ConfigurationError, match=r"differ at conv1\.weight"):
        build_model("torchvision:resnet18", input_shape=COLOUR, weights=file)


def test_weights_that_cannot_be_downloaded_name_the_setting(monkeypatch):
    def refuse(name: str, weights: Any) -> None:
        raise OSError("no route to the host")

    monkeypatch.setattr(models, "get_model", refuse)
    with pytest.raises(ConfigurationError, match=r"no route.*\[model\] extractor_weights"):
        build_model("torchvision:resnet18", input_shape=COLOUR, weights=RECOMMENDED)


# --- timm, which the tests do not install: a stand-in with the functions that are used


class TimmNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.default_cfg = {"classifier": "fc"}
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3))


def test_timm_gives_network_and_transform(monkeypatch, tmp_path):
    needs = {"input_size": (3, 40, 40), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    made = SimpleNamespace(
        create_model=lambda name, pretrained, num_classes: TimmNetwork(),
        data=SimpleNamespace(resolve_model_data_config=lambda network: needs),
    )
    monkeypatch.setitem(sys.modules, "timm", made)
    torch.save({**TimmNetwork().state_dict(), "fc.weight": torch.zeros(2, 4)}, tmp_path / "weights.pt")
    extractor = build_model("timm:tiny", input_shape=GREY, weights=str(tmp_path / "weights.pt"))
    assert extractor(torch.rand(2, *GREY)).shape == (2, 4)
    images = images_of(extractor)
    assert images is not None
    assert (images.size, images.mode) == (40, "bicubic")


def test_without_timm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigurationError, match=r"fleetdistill\[timm\]"):
        build_model("timm:resnet18", input_shape=COLOUR)
