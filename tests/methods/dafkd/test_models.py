"""Portable noise, generators and classifiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.dafkd.dafkd_fleet import CLASSES, SHAPE, OwnSplit
from torch import nn
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.methods.dafkd.samples import make_generator
from fleetdistill.models import GENERATORS, build_generator, build_model
from fleetdistill.models.discriminators import JudgedClassifier, OwnNetwork
from fleetdistill.training.model import check_local_model, parameter_count
from fleetdistill.training.portable_noise import portable_noise, splitmix64

# --- portable noise


def test_daf_11_splitmix64() -> None:
    assert [hex(item) for item in splitmix64(12345, 3).tolist()] == [
        "0x22118258a9d111a0",
        "0x346edce5f713f8ed",
        "0x1e9a57bc80e6721d",
    ]


def test_daf_11_portable_noise() -> None:
    expected = [[0.5625435, 1.9279937, 0.9228022], [1.8429871, -0.6061906, 0.9957380]]
    noise = portable_noise(12345, 2, 3)
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise, expected, atol=1e-6)
    many = portable_noise(7, 200, 100)
    assert (round(float(many.mean()), 4), round(float(many.std()), 4)) == (-0.0085, 1.0094)


@given(seed=st.integers(0, 2**64 - 1), rows=st.integers(0, 5), more=st.integers(0, 5), size=st.integers(1, 5))
def test_noise_of_fewer_rows_is_the_beginning_of_more(seed: int, rows: int, more: int, size: int) -> None:
    few, many = portable_noise(seed, rows, size), portable_noise(seed, rows + more, size)
    np.testing.assert_array_equal(few, many[:rows])
    assert np.isfinite(many).all()


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ConfigurationError, match=r"must be in \[0, 2\*\*64\)"):
        portable_noise(seed, 1, 1)


# --- models


def test_paper_classifier_has_eleven_layers_and_256_features() -> None:
    model = build_model("dafkd_resnet11", input_shape=(1, 28, 28), classes=10)
    chain = [part for name, part in model.named_modules() if isinstance(part, nn.Conv2d) and "shortcut" not in name]
    assert len(chain) + 1 == 11  # and the linear layer
    assert check_local_model(model, torch.rand(2, 1, 28, 28), 10).features(torch.rand(2, 1, 28, 28)).shape == (2, 256)
    # Worked by hand, 3 channels: stem 464, blocks 4,928 + 24,192 + 95,488, head 257 * 10.
    assert parameter_count(build_model("dafkd_resnet11")) == 464 + 4_928 + 24_192 + 95_488 + 2_570
    # The authors' second blocks: 4,544 + 17,792 + 70,400.
    assert parameter_count(build_model("dafkd_resnet20")) == 127_642 + 4_544 + 17_792 + 70_400


def test_image_generator_has_167k_parameters_of_prototype() -> None:
    count = parameter_count(build_generator("dafkd_generator", shape=(1, 28, 28)))
    # Linear 101 * 1568, two batch-norms 64 + 32, transposed convolutions 32 * 16 * 16 and 16 * 16 + 1.
    assert count == 158_368 + 96 + 8_192 + 257
    assert round(count / 1000) == 167


def test_paper_generator_has_embeddings_batch_norm_leaky_relu() -> None:
    config = DaFKDConfig.from_settings({"paper": True}).for_classes(10)
    generator = make_generator(config, (1, 28, 28), 10)
    assert (generator.noise_embedding.in_features, generator.label_embedding.in_features) == (100, 10)
    kinds = [type(module) for module in generator.body]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.LeakyReLU, nn.Linear, nn.Sigmoid, nn.Unflatten]
    # Embeddings 101 * 128 and 11 * 128, hidden layer 257 * 256 with 2 * 256 of batch-norm, image 257 * 784.
    assert parameter_count(generator) == 12_928 + 1_408 + 65_792 + 512 + 201_488
    features = DaFKDConfig.from_settings({"paper": True, "generator_level": "feature"}).for_classes(10)
    assert (features.generator, features.label_condition) == ("feature_generator", True)
    assert DaFKDConfig().for_classes(10).generator == "dafkd_generator"


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("classes", [0, 7])
def test_every_generator_makes_samples_of_its_shape_and_range(name: str, classes: int) -> None:
    shape = (48,) if name == "feature_generator" else (2, 8, 12)
    generator = build_generator(name, shape=shape, noise_dim=5, classes=classes)
    labels = torch.arange(6) % 7 if classes else None
    made = generator(10 * torch.randn(6, 5), labels)
    assert made.shape == (6, *shape)
    low, high = {"dafkd_generator_tanh": (-1, 1), "feature_generator": (0, float("inf"))}.get(name, (0, 1))
    assert low <= made.min().item() < low + 0.5
    assert made.max().item() <= high
    made.sum().backward()
    assert all(parameter.grad is not None for parameter in generator.parameters())
    if classes:
        with pytest.raises(ConfigurationError, match="pass one per sample"):
            generator(torch.randn(6, 5))


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dafkd_generator", {"shape": (1, 9, 8)}, "multiples of 4 for this generator"),
        ("digits_generator", {"noise_dim": 0}, "noise_dim must be >= 1, got 0"),
        ("feature_generator", {"classes": 1}, "classes is 1"),
        ("os:system", {}, "unknown generator 'os:system', expected one of dafkd_generator"),
    ],
)
def test_a_generator_that_cannot_be_is_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        build_generator(name, **options)


@pytest.mark.parametrize("make", [OwnSplit, lambda: build_model("resnet4", input_shape=SHAPE)])
@pytest.mark.parametrize("sharing", [True, False])
def test_a_classifier_is_judged_wherever_it_is_split(make: Any, sharing: bool) -> None:
    classifier, x = make().eval(), torch.rand(3, *SHAPE)
    size = 12 if isinstance(classifier, OwnSplit) else 16
    judged = JudgedClassifier(classifier, (size,), sharing=sharing, feature_level=False).eval()
    assert judged.features(x).shape == (3, size)
    assert_close(judged.classify_generated(x), classifier(x))
    assert judged.realness(x).shape == (3,)
    if sharing:
        assert parameter_count(judged.discriminator) == size + 1
    else:  # all layers but the last, which becomes one number
        assert parameter_count(judged.discriminator) == parameter_count(classifier) - (size + 1) * (CLASSES - 1)
        assert isinstance(judged.discriminator, OwnNetwork)
