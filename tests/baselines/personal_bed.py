"""Models of the personal baselines' tests: with a base and a head of one weight each, and with layers of one weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from baselines.bed import make_config, make_device, make_rows, norm_model, tiny_model
from methods.tiny_context import CLASSES, INPUTS, tiny_context
from torch import Tensor, nn

from fleetdistill.models.fedd2s import fedd2s_m1
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import SplitModel
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods import server_class


class Scale(nn.Module):
    """The weight w, which multiplies its input."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class ScaleAlone(SplitModel):
    """Scales by layer, above which two classes get x and 0."""

    def __init__(self, cut: int, **scales: float) -> None:
        super().__init__({name: Scale(w) for name, w in scales.items()}, cut=cut)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.stages(x), 0 * x], dim=1)

    def weights(self) -> list[float]:
        return [stage.w.item() for stage in self.stages]  # type: ignore[operator]


def base_and_head(base: float = 1.0, head: float = 0.5) -> ScaleAlone:
    """Builds f(x) = h b x, cut above b."""
    return ScaleAlone(1, base=base, head=head)


def one_base(input_shape: Sequence[int] = (1,)) -> nn.Module:
    """Builds the base b."""
    return base_and_head().extractor


def three_scales(input_shape: Sequence[int] = (1,), classes: int = 2) -> ScaleAlone:
    """Builds three layers of one weight each: 0, 0 and 7."""
    return ScaleAlone(1, first=0.0, second=0.0, third=7.0)


def six_layers(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """Builds six layers, with batch-norm in the second."""
    layers: dict[str, nn.Module] = {f"l{number}": nn.Linear(INPUTS, INPUTS) for number in range(1, 6)}
    layers["l2"] = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.BatchNorm1d(INPUTS), nn.ReLU())
    return SplitModel({**layers, "l6": nn.Linear(INPUTS, classes)}, cut="l3")


def tiny_base(input_shape: Sequence[int] = (INPUTS,)) -> nn.Module:
    """Builds the base of `tiny_model`."""
    return tiny_model().extractor


def norm_base(input_shape: Sequence[int] = (INPUTS,)) -> nn.Module:
    """Builds the base of `norm_model`."""
    return norm_model().extractor


def m1_base(input_shape: Sequence[int] = (3, 32, 32)) -> nn.Module:
    """Builds C1 to C3 of FedD2S's M1."""
    return SplitModel(fedd2s_m1().stages, cut="C3").extractor


def whole_base(input_shape: Sequence[int] = (INPUTS,)) -> nn.Module:
    """Builds the base of `headless`."""
    return headless().extractor


def headless(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """Builds a model whose weights are all below its cut."""
    return SplitModel({"body": nn.Linear(INPUTS, classes), "head": nn.Identity()}, cut="body")


def empty_base(input_shape: Sequence[int] = (INPUTS,)) -> nn.Module:
    """Builds the base of `baseless`."""
    return nn.Sequential(nn.Flatten())


def baseless(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """Builds a model whose weights are all above its cut."""
    return SplitModel({"body": nn.Flatten(), "head": nn.Linear(INPUTS, classes)}, cut="body")


def small_server(method: str, *, device: str = "", extractor: str = "", inputs: int = INPUTS, **settings: Any) -> Any:
    """Returns a server half over models of this file."""
    where = "baselines.personal_bed:"
    models = ModelSection(device=where + device if device else "", extractor=where + (extractor or "tiny_base"))
    classes = 2 if inputs == 1 else CLASSES
    context = tiny_context("", classes=classes, input_shape=(inputs,), models=models)
    return server_class(method)(make_config(method, **settings).for_classes(classes), context)


def scale_devices(
    method: str, models: Sequence[ScaleAlone], centres: Sequence[Sequence[float]], rows: Sequence[int], **settings: Any
) -> dict[str, Any]:
    """Returns devices whose loss is sum over their layers of (w - c)^2 / 2: a step of rate 1 takes w to c."""
    members = {}
    for number, (model, targets, count) in enumerate(zip(models, centres, rows, strict=True)):
        data = TensorData(torch.ones(count, 1), torch.zeros(count, dtype=torch.int64))
        half = make_device(method, model, data, classes=2, learning_rate=1.0, **settings)
        half.loss = lambda x, y, model=model, targets=targets: _distance(model, targets)
        members[f"d{number}"] = half
    return members


def _distance(model: ScaleAlone, targets: Sequence[float]) -> Tensor:
    terms = [(stage.w - c) ** 2 / 2 for stage, c in zip(model.stages, targets, strict=True)]  # type: ignore[operator]
    return torch.cat(terms).sum()  # type: ignore[arg-type]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of a module's state."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Asserts that two states are bit-equal."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def members_of(method: str, build: Callable[[], nn.Module], count: int = 2, **settings: Any) -> dict[str, Any]:
    """Returns devices with models and rows of their own."""
    members = {}
    for number in range(count):
        torch.manual_seed(number)
        members[f"d{number}"] = make_device(method, build(), make_rows(number), **settings)
    return members
