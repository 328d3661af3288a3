"""The device half of a method: a class with one handler a step, and the device's state.

    class FedDKCDevice(DeviceMethod):
        @answers("train")
        def train(self, ask: Ask) -> Answer: ...

A handler runs under the ask's own seed and with the run's thread count, so it gives the same answer each time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_type_hints

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.knowledge import GENERAL, Kind, Metric, ModelParameters, Parts, Plan
from fleetdistill.models import USUAL_PREDICTOR
from fleetdistill.names import unknown_name

if TYPE_CHECKING:
    import torch

    from fleetdistill.methods.classstats.space_model import MakePredictor
    from fleetdistill.training.local_training import TensorData, TrainingReport
    from fleetdistill.training.model import FeatureModel

__all__ = [
    "Answer",
    "Ask",
    "DeviceMethod",
    "Local",
    "answers",
    "check_choice",
    "check_range",
    "check_share",
    "check_types",
    "with_parameters",
]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One question to this device.

    Attributes:
        round: Number of the round, from 1.
        step: Name of the step, which chose the handler.
        seed: Seed of the handler's random numbers; torch's global generator is seeded with it already.
        parts: What came along.
    """

    round: int
    step: str
    seed: int
    parts: Parts = field(default_factory=dict)

    def part(self, name: str, kind: type[PartKind]) -> PartKind:
        """The part of that name. Raises WireError if it is missing or of another kind."""
        found = self.parts.get(name)
        if not isinstance(found, kind):
            raise WireError(f"step {self.step!r}: part {name!r} is {type(found).__name__}, expected {kind.__name__}")
        return found

    def setting(self, name: str, kind: type[Setting]) -> Setting:
        """A value of the part `plan`. Raises WireError if it is missing or of another type."""
        value = self.part("plan", Plan).values.get(name)
        if type(value) is not kind:
            raise WireError(f"step {self.step!r}: the plan's {name} is {value!r}, expected {kind.__name__}")
        return value


Setting = TypeVar("Setting", bool, int, float)
PartKind = TypeVar("PartKind", bound=Kind)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The reply to an ask.

    Attributes:
        parts: What goes to the server.
        samples: Local samples behind it, the weight in averages, at least 1.
        notes: Counts for the app's callback, such as rows whose ids were not known.
    """

    parts: Parts
    samples: int
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Local:
    """What a device half works on.

    Attributes:
        model: The local model, on `torch_device`.
        data: The private training data.
        classes: C of the contract.
        torch_device: Where handlers compute.
        proxy: The run's proxy set, where it has one. It is there when a handler runs, not yet in `__init__`.
        proxy_digest: SHA-256 that names the proxy set.
        predictor: Of class statistics with `predictor = "trained"`: a name of `fleetdistill.models.PREDICTORS`, or a
            function that makes one.
    """

    model: torch.nn.Module
    taps: FeatureModel
    data: TensorData
    classes: int
    torch_device: torch.device
    proxy: TensorData | None = None
    proxy_digest: bytes = b""
    predictor: str | MakePredictor = USUAL_PREDICTOR


Handler = Callable[[Any, Ask], Answer]
_F = TypeVar("_F", bound=Handler)


def answers(step: str) -> Callable[[_F], _F]:
    """Marks the handler of a step."""

    def mark(handler: _F) -> _F:
        handler.answers_step = step  # type: ignore[attr-defined]
        return handler

    return mark


class DeviceMethod:
    """Base of all device halves.

    Args:
        config: The method's configuration, from the contract.
        local: Model and data.
    """

    own_variant: ClassVar[str] = GENERAL
    """Name, among the variants that the app has, of the model that it gave."""

    trained: TrainingReport | None = None
    """What a handler's training did; its mean loss goes to the server beside the answer, as the papers have it."""

    figures: Sequence[Metric] = ()
    """What else a handler found out about own rows; it goes to the server as the figures of test data do."""

    def __init__(self, config: Any, local: Local) -> None:
        self.config = config
        self.local = local

    @classmethod
    def form(cls, config: Any) -> type[DeviceMethod]:
        """The device half of this configuration, for a method of several forms."""
        return cls

    @classmethod
    def metrics_steps(cls, config: Any) -> Sequence[str]:
        """Steps whose answer ends a round for the device, one of them in each round: metrics are measured after it."""
        raise NotImplementedError

    def handle(self, ask: Ask) -> Answer:
        """Calls the handler of the ask's step. Raises WireError if there is none."""
        for name in dir(type(self)):
            handler = getattr(type(self), name)
            if getattr(handler, "answers_step", None) == ask.step:
                return handler(self, ask)  # type: ignore[no-any-return]
        raise WireError(
            f"{type(self).__name__} has no handler for step {ask.step!r}; is the SDK older than the server?"
        )

    def variants(self) -> Mapping[str, torch.nn.Module]:
        """Variants of the app's model by name, inputs to logits; the first is in use unless another proves better.

        By default the local model alone. They may share layers with it and with each other. Once there is one of a
        name, it stays; there may be none at first.
        """
        return {GENERAL: self.local.model}

    def fleet_model(self, ask: Ask) -> torch.nn.Module | None:
        """The fleet's model as an ask brings it, complete on this device; None where it brings none, the default.

        It is what the device would be delivered if the run ended with the last completed round, and is scored before
        the ask is answered. A model of its own: the local one does not change.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """State beyond the model's, kept between rounds: dicts, lists, numbers, strings and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""


_BEYOND = 3.4e38
"""What float32 does not hold, and torch raises errors of its own for."""


def check_range(name: str, value: float, low: float, high: float = _BEYOND, *, open_low: bool = False) -> None:
    """Raises ConfigurationError unless `low <= value < high` (`low < value` with `open_low`)."""
    if not (low < value < high if open_low else low <= value < high):
        bound = ">" if open_low else ">="
        upper = f" and < {high:g}" if high != _BEYOND or value >= _BEYOND else ""
        raise ConfigurationError(f"{name} must be {bound} {low:g}{upper}, got {value!r}")


def check_types(config: Any) -> None:
    """Raises ConfigurationError for a setting of another type than it has; a whole number is a number."""
    for name, known in _types_of(config.__class__).items():
        value = getattr(config, name)
        if type(value) not in known:
            expected = " or ".join(_TYPE_NAMES[one] for one in known if one in _TYPE_NAMES)
            raise ConfigurationError(f"{name} is {value!r}, expected {expected}")


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@functools.cache
def _types_of(config: Any) -> Mapping[str, tuple[type, ...]]:
    """Types of each setting that is a number, a text or a flag; an app's own configuration may have others."""
    try:
        hints = get_type_hints(config)
    except NameError:  # an app's own configuration, of types that are not there at run time
        return {}
    found = {one.name: get_args(hints[one.name]) or (hints[one.name],) for one in fields(config)}
    simple = {*_TYPE_NAMES, type(None)}
    return {name: (*kinds, int) if float in kinds else kinds for name, kinds in found.items() if simple >= set(kinds)}


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raises ConfigurationError unless `value` is one of `known`."""
    if value not in known:
        raise ConfigurationError(unknown_name(name, value, known))


def check_share(name: str, value: float) -> None:
    """Raises ConfigurationError unless `0 < value <= 1`."""
    if not 0 < value <= 1:
        raise ConfigurationError(f"{name} must be in (0, 1], got {value!r}")


def with_parameters(model: torch.nn.Module, ask: Ask, *, without: frozenset[str] = frozenset()) -> torch.nn.Module:
    """A copy of a model with the `parameters` of an ask; tensors named in `without` stay the model's.

    Raises:
        WireError: The ask brings no model parameters, or others than the model has.
    """
    from fleetdistill.training.parameters import take_weights

    complete = copy.deepcopy(model)
    take_weights(complete, ask.part("parameters", ModelParameters), without=without)
    return complete
