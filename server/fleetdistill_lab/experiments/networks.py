"""Networks of the experiments' files: FedAvg's 2NN, FedD2S's networks with another cut, and the layers below a cut.

    models = ["fleetdistill_lab.experiments.networks:m1_cut_at_f1"]
    extractor = "fleetdistill_lab.experiments.networks:m1_convolutions"

FedPer and FedRep share the convolutions and keep the linear layers, as in Atapour et al., FedD2S, section IV-A. The
built-in networks are cut after the first convolution, as FedD2S and FedICT need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from fleetdistill.models import build_model

if TYPE_CHECKING:
    from torch import nn

    from fleetdistill.training.model import SplitModel


def _cut_at_f1(model: str) -> Callable[..., nn.Module]:
    """Returns a factory of a built-in network that is cut before its first linear layer."""

    def make(input_shape: Sequence[int], classes: int) -> SplitModel:
        from fleetdistill.training.model import SplitModel

        built = build_model(model, input_shape=input_shape, classes=classes)
        assert isinstance(built, SplitModel)
        names = built.stage_names
        return SplitModel(built.stages, cut=names[names.index("F1") - 1])

    return make


def _below(factory: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns a factory of the layers below a network's cut."""

    def make(input_shape: Sequence[int]) -> nn.Module:
        from torch import Tensor

        extractor = factory(input_shape, 10).extractor
        assert not isinstance(extractor, Tensor)
        return extractor

    return make


def _built_in(model: str) -> Callable[..., nn.Module]:
    return lambda input_shape, classes: build_model(model, input_shape=input_shape, classes=classes)


def mnist_2nn(input_shape: Sequence[int] = (1, 28, 28), classes: int = 10) -> SplitModel:
    """Builds the network of two hidden layers of 200 units of McMahan et al., FedAvg, section 3: 199,210 parameters."""
    from torch import nn

    from fleetdistill.training.model import SplitModel

    first = nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 200), nn.ReLU())
    second = nn.Sequential(nn.Linear(200, 200), nn.ReLU())
    return SplitModel({"hidden1": first, "hidden2": second, "output": nn.Linear(200, classes)}, cut="hidden1")


def scattering_linear(input_shape: Sequence[int], classes: int) -> SplitModel:
    """Builds a linear layer above the fixed features of class statistics, for methods that describe features."""
    import torch
    from torch import nn

    from fleetdistill.training.model import SplitModel

    extractor = build_model("scattering", input_shape=input_shape)
    size = extractor(torch.zeros(1, *input_shape)).flatten(1).shape[1]
    linear = nn.Sequential(nn.Flatten(), nn.Linear(size, classes))
    return SplitModel({"scattering": extractor, "linear": linear}, cut="scattering")


digits_cut_at_f1, m1_cut_at_f1, m2_cut_at_f1 = (
    _cut_at_f1(name) for name in ("fedd2s_digits", "fedd2s_m1", "fedd2s_m2")
)
digits_convolutions, m1_convolutions, m2_convolutions = (
    _below(factory) for factory in (digits_cut_at_f1, m1_cut_at_f1, m2_cut_at_f1)
)
digits_first, m1_first, m2_first = (_below(_built_in(name)) for name in ("fedd2s_digits", "fedd2s_m1", "fedd2s_m2"))
"""The first convolution of each network."""
