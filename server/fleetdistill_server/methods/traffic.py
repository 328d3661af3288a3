"""A method's messages: its exchanges, the schema of their parts, and the figures derived from them.

A server half describes its round once, in `exchanges`. Everything else is arithmetic over sizes: the bytes that
`fleetdistill methods` prints, the kinds of an answer's parts, the columns that leave a device and, with the sizes of a
run, the contract's declarations. A test compares the bytes with the traffic that the store counts. Byte counts are
those of tensors before compression; headers, metrics and plans add about 0.5 kB per message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import CUT, NamedTensors, Weights
from fleetdistill.wire.kind import COLUMNS, PartSchema
from fleetdistill.wire.schema import Shapes

__all__ = [
    "DOWN",
    "KNOWLEDGE_TYPES",
    "UP",
    "Exchange",
    "KnowledgeType",
    "Message",
    "Sizes",
    "all_exchanges",
    "columns_of",
    "exchange_formula",
    "is_over_early",
    "mean_round_bytes",
    "round_bytes",
    "tensor_columns",
    "usual_exchanges",
]

KnowledgeType = Literal["float16", "float32", "uint8"]
KNOWLEDGE_TYPES: tuple[KnowledgeType, ...] = ("float16", "float32", "uint8")
UP, DOWN = "up", "down"
MODEL = "parameters"
"""Name of the part with the model."""
Message = Mapping[str, PartSchema]
"""The parts of a message by name."""
NOTHING: Message = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one device's model and data that determine the messages of a round.

    The defaults are the sizes that `fleetdistill methods` compares; FedD2S's are those of a run's first rounds.
    `ServerMethod.sizes` returns the sizes of a run, including names and shapes of its tensors.

    Attributes:
        samples: Number of the device's samples: N, or K in FedD2S.
        features: Elements of one sample's features at the cut: FedDKC's F, FedD2S's s_1.
        channels: Channels of these features, their first axis; None if each element is its own channel.
        classes: Number of classes C.
        model: Number of the model's parameters that are sent, W; FedDKD_BN leaves batch-norm out.
        proxy_samples: Number of rows of the proxy set, P.
        embedding: Number of inputs of the last layer, F in CDKT-FL and DaFKD.
        generator: Number of the generator's parameters, G in DaFKD.
        discriminator: Number of the discriminator's parameters, W_d in DaFKD; None for the model's size, or one layer
            if it shares the model's other layers.
        layer_features: Elements of one sample's features at FedD2S's distillation layer l, s_l; 0 for l = 1. None for
            the last layer (the logits), where a run begins.
        layer_channels: Channels of the features at layer l; None if each element is its own channel.
        head: Number of parameters of FedD2S's layers above l; 0 at the last layer.
        cuts: The feature columns of a run by cut, each with the shape of one sample; empty in a table.

    Raises:
        ConfigurationError: A size is below 0, or `samples`, `features` or `classes` is below 1.
    """

    samples: int = 1000
    features: int = 4096
    classes: int = 10
    model: Weights = field(default=Weights(500_000))
    proxy_samples: int = 80
    embedding: int = 256
    generator: Weights = field(default=Weights(120_000))
    discriminator: Weights | None = None
    layer_features: int | None = None
    channels: int | None = None
    layer_channels: int | None = None
    head: Weights = field(default=Weights(0))
    cuts: Shapes = field(default_factory=dict)

    @classmethod
    def of_cuts(cls, cuts: Shapes, **others: Any) -> Sizes:
        """Returns sizes with a run's feature columns; `features` is the element count of the first one."""
        first = next(iter(cuts.values()))
        return cls(features=prod(first), channels=first[0], cuts=cuts, **others)

    @property
    def at_cut(self) -> Shapes:
        """The feature columns by name; one flat column if only the element count is known."""
        return self.cuts or {CUT: (self.features,)}

    @property
    def cut_channels(self) -> Mapping[str, int]:
        """Channels of the column whose shape is unknown."""
        return {} if self.cuts or self.channels is None else {CUT: self.channels}

    def numbers(self) -> dict[str, Any]:
        """Returns all sizes except `cuts` as plain data."""
        result = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cuts"}
        return {name: value.numbers() if isinstance(value, Weights) else value for name, value in result.items()}

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            least = 1 if name in ("samples", "features", "classes") else 0
            counts = value.values() if isinstance(value, dict) else (value,)
            if any(count is not None and count < least for count in counts):
                raise ConfigurationError(f"{name} is {min(counts)}, must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One ask and its answer.

    Attributes:
        step: Name of the step.
        down, up: Parts of the ask and of the answer, without metrics and plans, which have no tensors.
        times: Number of times that a round asks the step.
        setting: Name of the setting that `times` comes from; empty for a step that is asked once per round.
        end: Number of completed rounds after which the step is no longer asked; None if it is asked until the end.
    """

    step: str
    down: Message = field(default_factory=dict)
    up: Message = field(default_factory=dict)
    times: int = 1
    setting: str = ""
    end: int | None = None

    def nbytes(self, direction: str, knowledge_type: KnowledgeType) -> int:
        """Returns the tensor bytes of one ask (`down`) or one answer (`up`)."""
        message = self.up if direction == UP else self.down
        return sum(part.nbytes(knowledge_type) for part in message.values() if part.sent)

    def is_in(self, completed: int) -> bool:
        """Returns whether the round after `completed` rounds has this exchange."""
        return self.end is None or completed < self.end


def round_bytes(exchanges: Sequence[Exchange], knowledge_type: KnowledgeType) -> dict[str, int]:
    """Returns tensor bytes per device and round by direction, `up` and `down`."""
    return {
        direction: sum(exchange.times * exchange.nbytes(direction, knowledge_type) for exchange in exchanges)
        for direction in (UP, DOWN)
    }


def answer_kinds(exchanges: Sequence[Exchange]) -> dict[str, dict[str, str]]:
    """Returns for each step the parts of its answer, as part name to kind."""
    result: dict[str, dict[str, str]] = {exchange.step: {} for exchange in exchanges}
    for exchange in exchanges:
        result[exchange.step] |= {name: part.kind.wire_name for name, part in exchange.up.items() if part.sent}
    return result


def columns_of(exchanges: Sequence[Exchange]) -> list[str]:
    """Returns the kinds of data that leave a device, as names in `fleetdistill.COLUMNS`."""
    result = {column for _, part in _answered(exchanges) for column in part.columns}
    return [column for column in COLUMNS if column in result]


def tensor_columns(exchanges: Sequence[Exchange]) -> list[str]:
    """Returns the columns that tensors of the method are declared to contain, as names in `fleetdistill.COLUMNS`."""
    result = {column for _, part in _answered(exchanges) if part.kind is NamedTensors for column in part.columns}
    return [column for column in COLUMNS if column in result]


def features_of(exchanges: Sequence[Exchange]) -> Shapes:
    """Returns the feature columns that parts contain or are computed from: shape of one sample by cut."""
    parts = [part for exchange in exchanges for message in (exchange.up, exchange.down) for part in message.values()]
    return {name: shape for part in parts for name, shape in part.features.items()}


def declared_parts(exchanges: Sequence[Exchange]) -> dict[str, PartSchema]:
    """Returns the parts of answers whose shapes the contract declares, by name; the model is first."""
    result = {name: part for exchange in exchanges for name, part in exchange.up.items() if part.declared}
    return dict(sorted(result.items(), key=lambda one: one[0] != MODEL))


def _answered(exchanges: Sequence[Exchange]) -> Iterator[tuple[str, PartSchema]]:
    """Yields name and schema of all answer parts that are sent."""
    asked = (exchange for exchange in exchanges if exchange.times)
    return ((name, part) for item in asked for name, part in item.up.items() if part.sent)


def in_round(exchanges: Sequence[Exchange], completed: int) -> list[Exchange]:
    """Returns the exchanges of the round after `completed` rounds."""
    return [exchange for exchange in exchanges if exchange.is_in(completed)]


def mean_round_bytes(exchanges: Sequence[Exchange], knowledge_type: KnowledgeType, rounds: int) -> dict[str, int]:
    """Returns tensor bytes per device and round by direction: the mean over `rounds` rounds, rounded down."""
    each = [round_bytes(in_round(exchanges, completed), knowledge_type) for completed in range(rounds)]
    return {direction: sum(item[direction] for item in each) // rounds for direction in (UP, DOWN)}


def is_over_early(exchanges: Sequence[Exchange]) -> bool:
    """Returns whether every exchange ends, so that a longer run sends no more bytes."""
    return all(exchange.end is not None for exchange in exchanges)


def all_exchanges(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Returns all exchanges of a run whose exchanges end, each as often as it is asked."""
    return [exchange for exchange in exchanges for _ in range(exchange.end or 0)]


def exchange_formula(exchanges: Sequence[Exchange]) -> str:
    """Returns the exchanges per round as text, such as `1 + dkd_steps`, or `2 in all` for a whole run."""
    if is_over_early(exchanges):
        return f"{sum(exchange.times for exchange in all_exchanges(exchanges))} in all"
    usual = usual_exchanges(exchanges)
    always = sum(item.times for item in usual if not item.setting)
    return " + ".join([str(always), *(item.setting for item in usual if item.setting)])


def usual_exchanges(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Returns the exchanges that are in every round."""
    return [exchange for exchange in exchanges if exchange.end is None]
