"""The messages of a method: its exchanges, whose parts have a schema, and all that follows from these.

Pure arithmetic over sizes. A server half describes its round once, in `exchanges`. From it follow the bytes that
`fleetdistill methods` prints, which a test holds against the traffic that the store counts; the kinds of an answer's
parts; the columns that leave a device; and, with the sizes of a run, what the contract declares. Tensor bytes only,
before packing: headers, metrics and plans add about half a kilobyte a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import CUT, Weights
from fleetdistill.wire.schema import PartSchema, Shapes

KnowledgeType = Literal["float16", "float32", "uint8"]
KNOWLEDGE_TYPES: tuple[KnowledgeType, ...] = ("float16", "float32", "uint8")
UP, DOWN = "up", "down"
COLUMNS = ("features", "counts", "parameters", "gradients", "logits", "labels")
"""What may leave a device in a method's parts, in the order in which a contract names it."""
MODEL = "parameters"
"""Name of the part that carries the model."""
Message = Mapping[str, PartSchema]
"""The parts of a message by name."""
NOTHING: Message = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One device's model and data, as far as the messages of a round depend on them.

    The defaults are sizes to start a comparison from; FedD2S's are those of a run's first rounds. `ServerMethod.sizes`
    has those of a run, which know the names and shapes of its tensors too.

    Attributes:
        samples: Of the device: N, in FedD2S K.
        features: Numbers of one sample's features at the cut: FedDKC's F, FedD2S's s_1.
        channels: Channels that these numbers belong to, the first axis of a sample's features; None: each is its own.
        classes: C.
        model: W, what of the model travels; with FedDKD_BN that is without batch-norm.
        proxy_samples: P, rows of the proxy set.
        embedding: Numbers that enter the last layer: the F of CDKT-FL and of DaFKD.
        generator: DaFKD's G.
        discriminator: DaFKD's W_d; None: as large as the model, or one layer if it shares the model's others.
        layer_features: FedD2S's s_l at the distillation layer l, 0 for l = 1; None for the last layer, where a run
            begins: the logits.
        layer_channels: Channels of these; None: each number is its own.
        head: FedD2S's layers above l; none at the last layer.
        extractor: W_e, the layers below the cut, where they travel alone.
        cuts: Of a run: its feature columns by cut, each with the shape of one sample.

    Raises:
        ConfigurationError: A size is below 0, or is one of `samples`, `features` and `classes` and below 1.
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
    extractor: Weights = field(default=Weights(1_000))
    cuts: Shapes = field(default_factory=dict)

    @classmethod
    def of_cuts(cls, cuts: Shapes, **others: Any) -> Sizes:
        """With the feature columns of a run, and the numbers of the first of them."""
        first = next(iter(cuts.values()))
        return cls(features=prod(first), channels=first[0], cuts=cuts, **others)

    @property
    def at_cut(self) -> Shapes:
        """The feature columns; where only their numbers are known, one row of numbers."""
        return self.cuts or {CUT: (self.features,)}

    @property
    def cut_channels(self) -> Mapping[str, int]:
        """Channels of the column of which only the numbers are known."""
        return {} if self.cuts or self.channels is None else {CUT: self.channels}

    def numbers(self) -> dict[str, Any]:
        """The numbers as plain data, for people and scripts."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "cuts"}
        return {name: value.numbers() if isinstance(value, Weights) else value for name, value in found.items()}

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            least = 1 if name in ("samples", "features", "classes") else 0
            counts = value.values() if isinstance(value, dict) else (value,)
            if any(count is not None and count < least for count in counts):
                raise ConfigurationError(f"{name} is {min(counts)}, must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One ask and its answer, or several alike.

    Attributes:
        step: The step that is asked.
        down, up: The parts of the ask and of the answer; figures and plans, which have no tensors, are not among them.
        times: How often a round asks it.
        setting: Name of the setting that `times` is; empty for a step that is always asked once.
        first: Completed rounds of the run before it is asked for the first time.
        end: Completed rounds from which on it is not asked any more; None where it is to the end.
        every: Rounds from one time to the next, at least 1.
    """

    step: str
    down: Message = field(default_factory=dict)
    up: Message = field(default_factory=dict)
    times: int = 1
    setting: str = ""
    first: int = 0
    end: int | None = None
    every: int = 1

    def nbytes(self, direction: str, knowledge_type: KnowledgeType) -> int:
        """Tensor bytes of the ask or the answer, once."""
        message = self.up if direction == UP else self.down
        return sum(part.nbytes(knowledge_type) for part in message.values() if part.sent)

    def is_in(self, completed: int) -> bool:
        """Whether the round after so many completed ones has it."""
        ended = self.end is not None and completed >= self.end
        return completed >= self.first and not ended and (completed - self.first) % self.every == 0


def round_bytes(exchanges: Sequence[Exchange], knowledge_type: KnowledgeType) -> dict[str, int]:
    """Tensor bytes of a device and round by direction, `up` and `down`."""
    return {
        direction: sum(one.times * one.nbytes(direction, knowledge_type) for one in exchanges)
        for direction in (UP, DOWN)
    }


def answer_kinds(exchanges: Sequence[Exchange]) -> dict[str, dict[str, str]]:
    """For each step: part name to kind, what an answer consists of."""
    found: dict[str, dict[str, str]] = {one.step: {} for one in exchanges}
    for one in exchanges:
        found[one.step] |= {name: part.kind.wire_name for name, part in one.up.items() if part.sent}
    return found


def columns_of(exchanges: Sequence[Exchange]) -> list[str]:
    """What leaves a device, in the words of `fleetdistill.COLUMNS`."""
    found = {column for _, part in _answered(exchanges) for column in part.columns}
    return [column for column in COLUMNS if column in found]


def features_of(exchanges: Sequence[Exchange]) -> Shapes:
    """Feature columns that parts consist of or are made of: the cut's name, and one sample's shape there."""
    parts = [part for one in exchanges for message in (one.up, one.down) for part in message.values()]
    return {name: shape for part in parts for name, shape in part.features.items()}


def declared_parts(exchanges: Sequence[Exchange]) -> dict[str, PartSchema]:
    """The parts of answers of which the contract declares shapes, by name; the model's comes first."""
    found = {name: part for one in exchanges for name, part in one.up.items() if part.declared}
    return dict(sorted(found.items(), key=lambda one: one[0] != MODEL))


def _answered(exchanges: Sequence[Exchange]) -> Iterator[tuple[str, PartSchema]]:
    """The parts of all answers that are asked for."""
    asked = (one for one in exchanges if one.times)
    return ((name, part) for one in asked for name, part in one.up.items() if part.sent)


def in_round(exchanges: Sequence[Exchange], completed: int) -> list[Exchange]:
    """Those of the round after so many completed ones."""
    return [one for one in exchanges if one.is_in(completed)]


def mean_round_bytes(exchanges: Sequence[Exchange], knowledge_type: KnowledgeType, rounds: int) -> dict[str, int]:
    """Tensor bytes of a device by direction, the mean over a run of so many rounds, rounded down."""
    each = [round_bytes(in_round(exchanges, completed), knowledge_type) for completed in range(rounds)]
    return {direction: sum(one[direction] for one in each) // rounds for direction in (UP, DOWN)}


def is_over_early(exchanges: Sequence[Exchange]) -> bool:
    """Whether there are none from some round on, so that a longer run costs no more."""
    return all(one.end is not None for one in exchanges)


def all_exchanges(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Those of a whole run that is over early, each as often as it is asked."""
    return [one for one in exchanges for _ in range(one.first, one.end or 0, one.every)]


def exchange_formula(exchanges: Sequence[Exchange]) -> str:
    """How many exchanges a usual round has, such as `1 + dkd_steps`; `2 in all` where a run has no more."""
    if is_over_early(exchanges):
        return f"{sum(one.times for one in all_exchanges(exchanges))} in all"
    usual = usual_exchanges(exchanges)
    always = sum(one.times for one in usual if not one.setting)
    return " + ".join([str(always), *(one.setting for one in usual if one.setting)])


def usual_exchanges(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Those that are in every round from their first one on."""
    return [one for one in exchanges if one.end is None and one.every == 1]
