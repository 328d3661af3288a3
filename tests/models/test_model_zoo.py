"""The zoo: the papers' sizes, common extractors, the tables of names, and the docs page about them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fleetdistill.errors import ConfigurationError
from fleetdistill.models import MODELS, build_model
from fleetdistill.training.model import SplitModel, check_local_model, fingerprint, output_shape, parameter_count
from fleetdistill_server.models import SERVER_MODELS, build_server_model

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
RESNETS = ("resnet2", "resnet4", "resnet6", "resnet10", "resnet12")
DIGITS = ("digits_linear", "digits_mlp_small", "digits_mlp_large", "digits_cnn_small", "digits_cnn_large")
DEVICE_MODELS = RESNETS + DIGITS
PAPER_THOUSANDS = {  # FedDKC, Table 3, "Params (K)"
    "resnet2": "0.63",
    "resnet4": "5.31",
    "resnet6": "19.99",
    "resnet10": "43.23",
    "resnet12": "61.79",
    "resnet20": "167.31",
}
PAPER_MEGAFLOPS = {"resnet2": 0.51, "resnet4": 5.31, "resnet6": 9.02, "resnet10": 18.59, "resnet12": 23.35}


def build_any(name: str) -> nn.Module:
    return build_server_model(name) if name in SERVER_MODELS else build_model(name)


def images(name: str, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, *((3, 32, 32) if name.startswith("resnet") else (1, 8, 8)))


@pytest.mark.parametrize("name", PAPER_THOUSANDS)
def test_parameter_counts_equal_the_papers_to_its_rounding(name):
    assert f"{parameter_count(build_any(name)) / 1000:.2f}" == PAPER_THOUSANDS[name]


def test_server_resnet_has_parameter_count_of_specification():
    assert parameter_count(build_server_model("resnet20")) == 167_306


@pytest.mark.parametrize("name", RESNETS)
def test_paper_operation_counts_need_extractor_without_max_pool(name):
    def multiplications(max_pool: bool) -> float:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            build_model(name, max_pool=max_pool).eval()(images(name, batch=1))
        return counter.get_total_flops() / 2 / 1e6  # it counts a multiply-add as two

    # The paper's figure also holds norms and activations: 13 % in the smallest network, 3 % in the largest.
    assert 0.86 * PAPER_MEGAFLOPS[name] < multiplications(max_pool=False) < PAPER_MEGAFLOPS[name]
    if name != "resnet2":  # has nothing behind the pooling but a linear layer
        assert multiplications(max_pool=True) < 0.4 * PAPER_MEGAFLOPS[name]


@pytest.mark.parametrize("name", DEVICE_MODELS)
def test_every_model_has_its_taps_and_trains_all_parameters(name):
    model = build_model(name, classes=7)
    assert isinstance(model, SplitModel)
    check_local_model(model, images(name), classes=7)
    assert model.embedding(images(name)).ndim == 2
    model(images(name, 4)).logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("names", "extractor"), [(RESNETS, "resnet_extractor"), (DIGITS, "digits_extractor")])
def test_one_initial_extractor_fits_every_model_of_a_family(names, extractor):
    initial = build_model(extractor)
    for name in names:
        model = build_model(name)
        assert fingerprint(model.extractor) == fingerprint(initial)  # type: ignore[arg-type]
        model.extractor.load_state_dict(initial.state_dict())  # type: ignore[union-attr]
        x = images(name)
        assert torch.equal(model.eval().features(x), initial.eval()(x))  # type: ignore[operator]


def test_no_two_device_models_are_the_same():
    assert len({fingerprint(build_model(name)) for name in DEVICE_MODELS}) == len(DEVICE_MODELS)


def test_digit_features_are_128_numbers_a_sample():
    assert output_shape(build_model("digits_extractor"), (1, 8, 8)) == (8, 4, 4)


@pytest.mark.parametrize(("shape", "pooled", "whole"), [((3, 32, 32), 16, 32), ((1, 28, 28), 14, 28)])
def test_pooled_resnet_features_have_16_channels_and_half_size(shape, pooled, whole):
    assert output_shape(build_model("resnet_extractor", input_shape=shape), shape) == (16, pooled, pooled)
    assert output_shape(build_model("resnet_extractor", input_shape=shape, max_pool=False), shape) == (16, whole, whole)


@pytest.mark.parametrize("device", DEVICE_MODELS)
def test_the_server_predictor_of_a_family_reads_its_features(device):
    model = build_model(device).eval()
    features = model.features(images(device))  # type: ignore[operator]
    server = "resnet20" if device in RESNETS else "digits_server"
    predictor = build_server_model(server, feature_shape=features.shape[1:], classes=5).eval()
    assert predictor(features).shape == (2, 5)


def test_the_digit_server_has_two_hidden_layers_of_128():
    widths = [layer.out_features for layer in build_server_model("digits_server") if isinstance(layer, nn.Linear)]  # type: ignore[attr-defined]
    assert widths == [128, 128, 10]
    assert output_shape(build_server_model("digits_server", feature_shape=[128]), (128,)) == (10,)


@settings(max_examples=30)
@given(
    name=st.sampled_from(DEVICE_MODELS),
    channels=st.integers(1, 4),
    height=st.integers(2, 13),
    width=st.integers(2, 13),
    classes=st.integers(2, 12),
)
def test_any_image_size_and_class_number_gives_logits(name, channels, height, width, classes):
    model = build_model(name, input_shape=[channels, height, width], classes=classes)  # a list, as TOML gives it
    assert output_shape(model, (channels, height, width)) == (classes,)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"input_shape": (8, 8)}, "channels, height, width"),
        ({"input_shape": (1, 0, 8)}, "positive whole numbers"),
        ({"input_shape": (1, 1, 8)}, "at least 2"),
        ({"input_shape": (1, 8.0, 8)}, "positive whole numbers"),
        ({"classes": 1}, "classes is 1"),
        ({"classes": True}, "classes is True"),
        ({"depth": 3}, r"is called with depth, but accepts \(input_shape.*unexpected keyword argument 'depth'"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        build_model("digits_linear", **options)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigurationError,
        match=r"unknown device model 'resnet3'; did you mean 'resnet6'. .*digits_cnn_large, .*resnet6",
    ):
        build_model("resnet3")
    with pytest.raises(
        ConfigurationError,
        match=r"unknown server model 'resnet12'; did you mean 'resnet20'. Expected one of digits_server",
    ):
        build_server_model("resnet12")


def test_a_path_builds_an_apps_own_factory():
    assert isinstance(build_model("torch.nn:Linear", in_features=4, out_features=3), nn.Linear)
    assert isinstance(build_server_model("fleetdistill.models.digits:digits_linear"), SplitModel)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_package.models:build", "cannot import 'no_such_package.models'"),
        ("torch.nn:NoSuchLayer", "has no function 'NoSuchLayer'"),
        ("torch:float32", "has no function 'float32'"),
        ("collections:OrderedDict", "is not a factory of models"),
        ("builtins:dict", "is not a factory of models"),
        ("pathlib:Path", "built a PosixPath"),
        ("asyncio:get_running_loop", "'asyncio:get_running_loop' raised RuntimeError: no running event loop"),
        ("torch.nn:", "unknown device model"),
        (":build", "unknown device model"),
    ],
)
def test_a_path_that_leads_to_no_factory_is_refused(path, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        build_model(path)


def test_listing_both_tables_loads_no_torch():
    code = (
        "import sys; from fleetdistill.models import MODELS; from fleetdistill_server.models import SERVER_MODELS; "
        "assert MODELS and SERVER_MODELS; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_docs_table_has_every_model_with_code_and_paper_counts():
    documented = {
        name: (count.strip(), paper.strip())
        for name, count, paper in re.findall(
            r"^\| `(\w+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    counted = {
        name: (f"{parameter_count(build_any(name)):,}", f"{PAPER_THOUSANDS[name]}k" if name in PAPER_THOUSANDS else "")
        for name in (*MODELS, *SERVER_MODELS)
    }
    assert documented == counted


def test_the_docs_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})
