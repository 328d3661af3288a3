"""`wrap`: any traceable module is a local model that behaves like the module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.long import long_except
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torchvision.models import mobilenet_v3_small, resnet18
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from fleetdistill.errors import ModelError
from fleetdistill.training import check_local_model, fingerprint, node_names, wrap
from fleetdistill.training.model import embedding_tap, evaluating
from fleetdistill.training.onnx_export import export_onnx


class Plain(nn.Module):
    """A module with batch-norm, both kinds of dropout, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = functional.relu(x + self.norm(self.conv(x)))
        x = functional.dropout(x.mean((2, 3)), 0.5, self.training)
        return self.head(self.drop(x))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Plain()


def residual() -> nn.Module:
    torch.manual_seed(0)
    return resnet18(num_classes=3)


def mobile() -> nn.Module:
    torch.manual_seed(0)
    return mobilenet_v3_small(num_classes=3)


IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Any, str, Tensor]] = {
    "a plain module": (plain, "stem", IMAGES[:, :1]),
    "a plain module at an operation": (plain, "relu", IMAGES[:, :1]),
    "resnet18 at a node": (residual, "layer2.0.relu_1", IMAGES),
    "mobilenet_v3_small": (mobile, "features.3", IMAGES),
}
every_case = pytest.mark.parametrize(
    "case", long_except(CASES, *(case for case in CASES if case != "mobilenet_v3_small"))
)


@every_case
def test_a_wrapped_module_behaves_like_the_module_in_both_modes(case: str) -> None:
    make, cut, images = CASES[case]
    module, model = make(), wrap(make(), cut)
    check_local_model(model, images, 3)
    for training in (False, True):
        module.train(training)
        model.train(training)
        outputs = []
        for item in (module, model):
            torch.manual_seed(7)
            outputs.append(item(images))
        assert torch.equal(*outputs)
        functional.cross_entropy(outputs[1], torch.tensor([0, 1, 2])).backward()
    buffers = {name.split(".", 2)[2]: one for name, one in model.named_buffers()}
    assert all(torch.equal(one, buffers[name]) for name, one in module.named_buffers()), "batch-norm statistics"
    assert all(parameter.grad is not None for parameter in model.parameters())


@every_case
def test_the_extractor_has_the_module_s_names_and_values(case: str) -> None:
    make, cut, images = CASES[case]
    module, model = make().eval(), wrap(make(), cut).eval()
    state = model.extractor.state_dict()
    assert state.keys() <= module.state_dict().keys()
    assert_close(model.features(images), create_feature_extractor(module, [cut])(images)[cut], rtol=0, atol=0)
    assert fingerprint(model.extractor) == fingerprint(wrap(make(), cut).extractor)
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(
        parameter.numel() for parameter in module.parameters()
    )


@every_case
def test_wrapped_module_is_copied_saved_embedded_and_exported(case: str, tmp_path: Path) -> None:
    make, cut, images = CASES[case]
    model = wrap(make(), cut)
    model(images)  # moves the statistics of batch-norm
    twin = copy.deepcopy(model)
    fresh = wrap(make(), cut)
    fresh.load_state_dict(model.state_dict())
    with evaluating(model), evaluating(twin), evaluating(fresh), torch.no_grad():
        assert torch.equal(model(images), twin(images))
        assert torch.equal(model(images), fresh(images))
        tap = embedding_tap(model)
        assert tap is not None
        assert tap(images).ndim == 2
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert float(next(model.parameters()).detach().abs().sum()) > 0, "a copy has its own layers"
    assert export_onnx(model, tmp_path / "model.onnx", images, {}).max_difference < 1e-4


def test_cuts_have_torchvision_s_names() -> None:
    _, known = get_graph_node_names(residual(), suppress_diff_warning=True)
    assert set(node_names(residual())) <= set(known)
    assert {"layer1.1.relu_1", "maxpool", "flatten"} <= set(node_names(residual()))


def test_every_cut_that_is_named_works() -> None:
    for name in node_names(plain()):
        check_local_model(wrap(plain(), name).eval(), IMAGES[:, :1], 3)


def test_a_sequential_is_cut_by_name_or_number() -> None:
    chain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    for cut in ("1", 2):
        model = wrap(chain, cut)
        assert model.extractor[1] is chain[1]  # type: ignore[index]


class Optional(Plain):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x if scale == 1.0 else scale * x)


def test_an_optional_input_has_its_default() -> None:
    torch.manual_seed(0)
    model = wrap(Optional(), "stem").eval()
    assert torch.equal(model(IMAGES[:, :1]), plain().eval()(IMAGES[:, :1]))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(self.a(x))


class OtherLayersInTraining(TwoOutputs):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.b(self.a(x)) if self.training else self.a(x)


class Noisy(TwoOutputs):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.b(self.a(x) + torch.randn(3))


@pytest.mark.parametrize(
    ("module", "cut", "says"),
    [
        (plain(), "stm", "Plain has no layer 'stm' that its forward pass uses; cut at stem.0, stem.1, stem, "),
        (plain(), "conv", "a connection skips over 'conv' of Plain; cut at"),
        (plain(), "head", "'head' is the last layer of Plain, so none follows it; cut at"),
        (Noisy(), "a", r"Noisy creates a tensor in forward, such as with torch\.randn or torch\.ones; change forward"),
        (residual(), "layer1.0.conv1", "a connection skips over 'layer1.0.conv1' of ResNet.*cut at .*layer1"),
        (Branching(), "x", "Branching cannot be traced: .*add `extractor`"),
        (TwoInputs(), "x", "TwoInputs uses several inputs, expected one tensor"),
        (TwoOutputs(), "a", "TwoOutputs returns a tuple, expected logits"),
        (OtherLayersInTraining(), "a", "runs other layers in train than in eval mode"),
        ("resnet18", "layer1", "wrap needs a torch.nn.Module, not str"),
    ],
)
def test_what_cannot_be_cut_is_an_error_with_what_to_do(module: Any, cut: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        wrap(module, cut)


def test_check_local_model_says_how_to_make_one() -> None:
    with pytest.raises(ModelError, match=r"Plain lacks features, predict, extractor; use wrap\(model, cut=...\)"):
        check_local_model(plain())
