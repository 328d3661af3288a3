"""Base class of a method's device half, which has one handler for each step of a round.

    class FedDKCDevice(DeviceMethod):
        @answers("train")
        def train(self, ask: Ask) -> Answer: ...

A handler runs with the ask's seed and the run's thread count, so that a repeated ask gives the same answer.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_type_hints

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.knowledge import DELIVER, GENERAL, Kind, Metric, ModelParameters, Parts, Plan
from fleetdistill.models import USUAL_PREDICTOR
from fleetdistill.names import unknown_name

if TYPE_CHECKING:
    import torch

    from fleetdistill.training.local_training import BatchLosses, LazyData, TensorData, TrainingReport
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
    """A request from the server to one device, for one step of a round.

    Attributes:
        round: Number of the round, from 1.
        step: Name of the step; selects the handler.
        seed: Seed of the handler's random numbers. torch's global generator already has it when the handler starts.
        parts: The ask's payload, by name.
    """

    round: int
    step: str
    seed: int
    parts: Parts = field(default_factory=dict)

    def part(self, name: str, kind: type[PartKind]) -> PartKind:
        """Returns a part of the payload. Raises WireError if it is missing or of another kind."""
        part = self.parts.get(name)
        if not isinstance(part, kind):
            raise WireError(f"step {self.step!r}: part {name!r} is {type(part).__name__}, expected {kind.__name__}")
        return part

    def setting(self, name: str, kind: type[Setting]) -> Setting:
        """Returns a value of the part `plan`. Raises WireError if it is missing or of another type."""
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
        parts: Payload for the server, by name.
        samples: Number of local samples behind the answer, at least 1; its weight in averages.
        notes: Counts for the app's callback, such as the number of unknown sample ids; they are not sent.
    """

    parts: Parts
    samples: int
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Local:
    """The device's model and data, as a device half uses them.

    Attributes:
        model: The local model, on `torch_device`.
        taps: The same module as a `FeatureModel`, which gives its features at the cut.
        data: The private training data.
        classes: Number of classes in the contract.
        torch_device: Device on which handlers compute.
        proxy: The run's proxy set; None for a run without one. Available to handlers, but not in `__init__`.
        proxy_digest: SHA-256 digest of the proxy set's payload; empty without a proxy set.
        predictor: Predictor for class statistics with `predictor = "trained"`: a key of
            `fleetdistill.models.PREDICTORS`, or a function that builds a module.
    """

    model: torch.nn.Module
    taps: FeatureModel
    data: TensorData | LazyData
    classes: int
    torch_device: torch.device
    proxy: TensorData | None = None
    proxy_digest: bytes = b""
    predictor: str | Callable[[int, int], torch.nn.Module] = USUAL_PREDICTOR


Handler = Callable[[Any, Ask], Answer]
_F = TypeVar("_F", bound=Handler)


def answers(*steps: str) -> Callable[[_F], _F]:
    """Returns a decorator that makes a method of a device half the handler of one or more steps."""

    def mark(handler: _F) -> _F:
        handler.answers_steps = steps  # type: ignore[attr-defined]
        return handler

    return mark


class DeviceMethod:
    """Base class of all device halves.

    Args:
        config: The method's configuration, from the contract.
        local: The device's model and data.
    """

    shares_fleet_model: ClassVar[bool] = False
    """Whether `fleet_model` depends only on the ask and the architecture; a simulation then scores it only once."""

    own_variant: ClassVar[str] = GENERAL
    """Name of the variant that is the app's own model."""

    trained: TrainingReport | None = None
    """Report of the last handler's training; its mean loss is sent with the answer, as in the papers."""

    figures: Sequence[Metric] = ()
    """Further metrics that the last handler computed on the device's own rows; sent like metrics on test data."""

    def __init__(self, config: Any, local: Local) -> None:
        self.config = config
        self.local = local

    @classmethod
    def metrics_steps(cls, config: Any) -> Sequence[str]:
        """Returns the steps after which metrics are measured: one of them is the device's last step of each round.

        By default after every step but `deliver`; a method of several steps saves time with the last one alone.
        """
        return [step for step in _handlers(cls) if step != DELIVER]  # type: ignore[arg-type]  # as in `handle`

    def handle(self, ask: Ask) -> Answer:
        """Calls the handler of the ask's step. Raises WireError if the step has no handler."""
        name = _handlers(type(self)).get(ask.step)  # type: ignore[arg-type]  # mypy compares the hash of instances
        if name is not None:
            answer: Answer = getattr(self, name)(ask)
            return answer
        raise WireError(
            f"{type(self).__name__} has no handler for step {ask.step!r}; update the SDK if it is older than the server"
        )

    def first_ask(self) -> Ask:
        """Returns an ask like the first one of a run, made without the server, for `Device.preview`.

        Its parts have the shapes and types of the server's; their values are the device's own, or absent.

        Raises:
            ConfigurationError: The method does not support a preview, the default.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no preview; define first_ask, which returns an Ask like the first of a run"
        )

    def variants(self) -> Mapping[str, torch.nn.Module]:
        """Returns the variants of the app's model by name, each a module from inputs to logits.

        The first variant is in use unless another one scores better. The default is only the local model. Variants
        may share layers. The result may be empty at first, but never loses a name.
        """
        return {GENERAL: self.local.model}

    def fleet_model(self, ask: Ask) -> torch.nn.Module | None:
        """Returns the fleet's model that an ask contains, or None, the default, if it contains no model.

        The result is a new model, complete on this device; the local model does not change. The device would receive
        this model if the run ended with the last completed round. It is scored before the ask is handled.
        """
        return None

    def train_local(
        self,
        losses: BatchLosses,
        optimizer: torch.optim.Optimizer,
        seed: int,
        *,
        epochs: int | None = None,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Trains the local model on the device's own rows with the settings of local training, and sets `trained`.

        Args:
            losses: Function of the epoch, from 0, and a mini-batch's row indices `[batch]` on `torch_device`. Each
                scalar that it yields is the loss of one optimiser step, taken before the next loss is computed.
            optimizer: Optimiser of the local model's parameters.
            seed: Seed of the order of the rows: the ask's.
            epochs: Passes over the rows, at least 1; by default the configuration's `local_epochs`.
            loss: The same as a function of a mini-batch's inputs and labels, if `optimizer` is new, has all parameters
                and takes one step for each mini-batch, and the loss depends on nothing of this device but its model and
                rows. A simulation may then train several devices together.

        Raises:
            ConfigurationError: `epochs` is less than 1, or the batch size less than 2 for a model with batch-norm.
            DataError: There are no rows.
            KnowledgeError: A loss is not finite; the model keeps the weights from before that step.
            CannotAnswer, WorkInterrupted: The work must end; see `fleetdistill.interruption`.
        """
        import torch

        from fleetdistill.training.local_training import Training, train_steps, trained_together

        model, data, size = self.local.model, self.local.data, self.config.batch_size
        epochs, generator = self.config.local_epochs if epochs is None else epochs, torch.Generator().manual_seed(seed)
        together = None
        if loss is not None:
            together = trained_together(Training(model, loss, data, epochs, size, optimizer, generator))
        self.trained = together or train_steps(
            model,
            len(data),
            epochs=epochs,
            batch_size=size,
            optimizer=optimizer,
            losses=losses,
            generator=generator,
            device=self.local.torch_device,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to keep between rounds besides the model's: dicts, lists, numbers, strings and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""


@functools.cache
def _handlers(method: type[DeviceMethod]) -> Mapping[str, str]:
    """Returns the name of the handler for each step; of several for one step, the first in alphabetical order."""
    result = ((name, getattr(method, name)) for name in reversed(dir(method)))
    return {step: name for name, one in result for step in getattr(one, "answers_steps", ())}


_BEYOND = 3.4e38
"""Upper limit of settings, because torch raises its own errors for numbers that float32 cannot represent."""


def check_range(name: str, value: float, low: float, high: float = _BEYOND, *, open_low: bool = False) -> None:
    """Raises ConfigurationError unless `low <= value < high` (`low < value` with `open_low`)."""
    if not (low < value < high if open_low else low <= value < high):
        bound = ">" if open_low else ">="
        upper = f" and < {high:g}" if high != _BEYOND or value >= _BEYOND else ""
        raise ConfigurationError(f"{name} must be {bound} {low:g}{upper}, got {value!r}")


def check_types(config: Any) -> None:
    """Raises ConfigurationError for a setting of the wrong type; an integer is accepted for a float."""
    for name, known in _types_of(config.__class__).items():
        value = getattr(config, name)
        if type(value) not in known:
            expected = " or ".join(_TYPE_NAMES[item] for item in known if item in _TYPE_NAMES)
            raise ConfigurationError(f"{name} is {value!r}, expected {expected}")


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@functools.cache
def _types_of(config: Any) -> Mapping[str, tuple[type, ...]]:
    """Returns the accepted types of each number, string or flag; settings of other types are omitted."""
    try:
        hints = get_type_hints(config)
    except NameError:  # an app's configuration may use types that exist only for type checkers
        return {}
    result = {field.name: get_args(hints[field.name]) or (hints[field.name],) for field in fields(config)}
    simple = {*_TYPE_NAMES, type(None)}
    return {name: (*kinds, int) if float in kinds else kinds for name, kinds in result.items() if simple >= set(kinds)}


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raises ConfigurationError unless `value` is one of `known`."""
    if value not in known:
        raise ConfigurationError(unknown_name(name, value, known))


def check_share(name: str, value: float) -> None:
    """Raises ConfigurationError unless `0 < value <= 1`."""
    if not 0 < value <= 1:
        raise ConfigurationError(f"{name} must be in (0, 1], got {value!r}")


def with_parameters(model: torch.nn.Module, ask: Ask, *, without: frozenset[str] = frozenset()) -> torch.nn.Module:
    """Returns a copy of a model with the `parameters` of an ask; tensors named in `without` keep the model's values.

    Raises:
        WireError: The ask contains no model parameters, or parameters that do not fit the model.
    """
    from fleetdistill.training.parameters import take_weights

    complete = copy.deepcopy(model)
    take_weights(complete, ask.part("parameters", ModelParameters), without=without)
    return complete
