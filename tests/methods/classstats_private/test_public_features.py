"""The public features of private class statistics: rows of one length, made without any data set."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.classstats_private.config import MAX_WHITENED
from fleetdistill.methods.classstats_private.public_features import (
    CONSTANTS,
    SIDES,
    PublicFeatures,
    WhitenedScattering,
    private_extractor,
)
from fleetdistill.training.onnx_export import onnx_bytes

FIRST_64 = {
    8: "b00d7ebd7f6b08860e08f1c6e4ecf93a0f2ddce1709090139b50c506276d4928",
    14: "449ea84b1a940c7feb3a118d0fc77d4a4e1e73571e360e97184da8bb85cb76f0",
    28: "4ddc99830ad0665b78e1212ce36da7ce309f19c6ffd7f428e91e5d3513a85dce",
}
"""SHA-256 of an image size's mean and first 64 directions; devices of all versions need the same ones."""


def script():
    path = Path(__file__).parents[3] / "benchmarks" / "whitening.py"
    spec = importlib.util.spec_from_file_location("whitening", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def images(count, channels=1, side=8):
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 12, 10), (3, 16, 16), (1, 14, 14), (1, 28, 28), (3, 40, 32)])
def test_rows_have_one_length_whatever_the_image(shape):
    inputs = torch.cat(
        [images(3, shape[0], 40)[:, :, : shape[1], : shape[2]], torch.zeros(1, *shape), torch.ones(1, *shape)]
    )
    rows = private_extractor("scattering", None, shape, 16)(inputs)
    assert rows.shape == (5, 16)
    assert rows.norm(dim=1) == pytest.approx(np.full(5, 4.0), rel=1e-5)


def test_rows_of_zeros_stay_zero():
    rows = PublicFeatures(nn.Flatten(), 64)(torch.zeros(2, 1, 8, 8))
    assert torch.equal(rows, torch.zeros(2, 64))


@pytest.mark.parametrize("side", SIDES)
def test_the_first_64_of_192_directions_stay_as_they_were(side):
    with np.load(CONSTANTS) as stored:
        mean, directions = stored[f"mean_{side}"], stored[f"directions_{side}"]
    assert directions.shape == (len(mean), MAX_WHITENED)
    first = mean.tobytes() + np.ascontiguousarray(directions[:, :64]).tobytes()
    assert hashlib.sha256(first).hexdigest() == FIRST_64[side]


def test_the_script_adds_directions_and_changes_none():
    made = {"mean_8": np.array([1.0, 2.0]), "directions_8": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}
    stored = {"mean_8": np.array([1.5, 2.5]), "directions_8": np.array([[7.0], [8.0]])}
    result = script().extended(made, stored)
    assert result["mean_8"].tolist() == [1.5, 2.5]
    assert result["directions_8"].tolist() == [[7, 2, 3], [8, 5, 6]]
    assert all(np.array_equal(script().extended(made, {})[name], one) for name, one in made.items())


@pytest.mark.long
@pytest.mark.parametrize("side", SIDES)
def test_constants_whiten_shapes_that_they_were_not_made_from(side):
    """2,000 images: correlations of white numbers have a standard deviation of 1 / sqrt(2,000) = 0.022."""
    with torch.no_grad():
        rows = WhitenedScattering((1, side, side), MAX_WHITENED)(script().dead_leaves(2000, side, seed=1))
    values = rows.double().numpy()
    assert values.mean(axis=0) == pytest.approx(np.zeros(MAX_WHITENED), abs=0.15)
    assert values.var(axis=0) == pytest.approx(np.ones(MAX_WHITENED), abs=0.25)
    beside = np.corrcoef(values.T)[np.triu_indices(MAX_WHITENED, 1)]
    assert np.sqrt(np.square(beside).mean()) < 0.035
    assert np.abs(beside).max() < 0.2


@pytest.mark.long
def test_constants_match_script_and_whiten_its_images():
    """For the smallest size; the largest takes seconds. float16 holds three digits."""
    made = script().whitening(8)
    with np.load(CONSTANTS) as stored:
        assert set(stored.files) == {f"{name}_{side}" for name in ("mean", "directions") for side in SIDES}
        assert stored["mean_8"] == pytest.approx(made["mean_8"], abs=1e-3)
        assert stored["directions_8"].astype(float) == pytest.approx(made["directions_8"].astype(float), abs=0.05)
    with torch.no_grad():
        rows = WhitenedScattering((1, 8, 8), MAX_WHITENED)(script().dead_leaves(4000, 8)).double().numpy()
    assert rows.mean(axis=0) == pytest.approx(np.zeros(MAX_WHITENED), abs=0.01)
    assert np.cov(rows.T) == pytest.approx(np.eye(MAX_WHITENED), abs=0.02)


def test_fewer_dimensions_are_the_first_ones():
    few, usual, many = (WhitenedScattering((1, 8, 8), size)(images(4)) for size in (8, 64, 192))
    assert torch.allclose(few, usual[:, :8], atol=1e-5)
    assert torch.allclose(usual, many[:, :64], atol=1e-4)


def test_colour_images_count_as_their_luminance():
    colour = images(4, channels=3)
    grey = (colour * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1, keepdim=True)
    result, expected = (WhitenedScattering((c, 8, 8), 16)(x) for c, x in ((3, colour), (1, grey)))
    assert torch.allclose(result, expected, atol=1e-4)


@pytest.mark.parametrize("dimensions", [64, 192])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 17, 17)])
def test_a_device_without_pytorch_computes_the_same(shape, dimensions):
    onnxruntime = pytest.importorskip("onnxruntime")
    extractor = private_extractor("scattering", None, shape, dimensions).eval()
    session = onnxruntime.InferenceSession(onnx_bytes(extractor, shape))
    inputs = images(3, shape[0], shape[1])
    (result,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    assert result == pytest.approx(extractor(inputs).numpy(), abs=1e-3)


def test_the_runs_own_extractor_is_scaled_to_one_length():
    rows = private_extractor("model", nn.Linear(64, 32), (64,), 64)(torch.rand(5, 64))
    assert rows.norm(dim=1).detach() == pytest.approx(np.full(5, 32**0.5), rel=1e-5)


def test_more_numbers_than_the_constants_have_are_refused():
    with pytest.raises(ConfigurationError, match="dimensions of at most 192, got 1 channels and dimensions 193"):
        private_extractor("scattering", None, (1, 8, 8), 193)


@pytest.mark.parametrize(
    ("features", "given", "shape", "says"),
    [
        ("model", nn.Linear(64, 129), (64,), "extractor has 129 outputs; private statistics need at most 128"),
        ("scattering", None, (2, 8, 8), "needs images of 1 or 3 channels"),
        ("scattering", None, (1, 7, 7), "must be at least 8"),
        ("scattering", None, (64,), "must be channels, height, width"),
    ],
)
def test_what_is_not_public_features_is_refused(features, given, shape, says):
    with pytest.raises(ConfigurationError, match=says):
        private_extractor(features, given, shape, 64)
