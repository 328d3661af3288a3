"""What a round of a method costs on the wire: its exchanges, counted in numbers by the type that they travel in.

Pure arithmetic over sizes. A server half describes its round in `exchanges`, `fleetdistill methods` prints the bytes,
and a test holds them against the traffic that the store counts. Tensor bytes only, before packing: headers, metrics and
plans add about half a kilobyte a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Weights
from fleetdistill.wire.schema import float_type, in_channel_steps

KnowledgeType = Literal["float16", "float32", "uint8"]
KNOWLEDGE_TYPES: tuple[KnowledgeType, ...] = ("float16", "float32", "uint8")
UP, DOWN = "up", "down"

_FLOAT32, _FLOAT16, _INT32, _INT64 = (np.dtype(one).itemsize for one in (np.float32, np.float16, np.int32, np.int64))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One device's model and data, as far as the bytes of a round depend on them.

    The defaults are sizes to start a comparison from; FedD2S's are those of a run's first rounds.

    Attributes:
        samples: Of the device: N, in FedD2S K.
        features: Numbers of one sample's features at the cut: FedDKC's F, FedD2S's s_1.
        channels: Channels that these numbers belong to, the first axis of a sample's features; None: each is its own.
        classes: C.
        model: W, what of the model travels; with FedDKD_BN that is without batch-norm.
        proxy_samples: P, rows of the proxy set.
        embedding: Numbers that enter the last layer: the F of CDKT-FL and of DaFKD.
        generator: DaFKD's G.
        discriminator: DaFKD's W_d, a discriminator that shares no layers; None: as large as the model.
        layer_features: FedD2S's s_l at the distillation layer l, 0 for l = 1; None for the last layer, where a run
            begins: the logits.
        layer_channels: Channels of these; None: each number is its own.
        head: FedD2S's layers above l; none at the last layer.
        extractor: W_e, the layers below the cut, where they travel alone.

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

    @property
    def feature_channels(self) -> int:
        """Channels of the features at the cut."""
        return self.features if self.channels is None else self.channels

    def numbers(self) -> dict[str, Any]:
        """All of it as plain data, for people and scripts."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value.numbers() if isinstance(value, Weights) else value for name, value in found.items()}

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least = 1 if one.name in ("samples", "features", "classes") else 0
            counts = (value.parameters, value.buffer_bytes) if isinstance(value, Weights) else (value,)
            if any(count is not None and count < least for count in counts):
                raise ConfigurationError(f"{one.name} is {min(counts)}, must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Content:
    """The tensors of one message, in numbers by what they are; contents add up.

    Attributes:
        features: Feature columns of own samples: the run's knowledge type.
        channels: Of these columns; with uint8 each has a step and a minimum.
        knowledge: Logits, embeddings, soft labels, class statistics: the run's knowledge type, float16 with uint8.
        float32: Gradients and weighted predictions.
        halves: Shared statistics and class spaces: float16 whatever the run's knowledge type is.
        int8: Directions of shared statistics.
        labels: Labels, and counts of class statistics: int32.
        ids: int64, and the single numbers of a class space.
        weights: Parameters (float32) and buffers of models.
    """

    features: int = 0
    channels: int = 0
    knowledge: int = 0
    float32: int = 0
    halves: int = 0
    int8: int = 0
    labels: int = 0
    ids: int = 0
    weights: Sequence[Weights] = ()

    def bytes(self, knowledge_type: KnowledgeType) -> int:
        """Tensor bytes of the message."""
        weights = sum(_FLOAT32 * one.parameters + one.buffer_bytes for one in self.weights)
        fixed = _FLOAT32 * self.float32 + _INT32 * self.labels + _INT64 * self.ids
        fixed += _FLOAT16 * self.halves + self.int8
        scales = 2 * _FLOAT32 * self.channels if in_channel_steps(knowledge_type, [1]) else 0
        knowledge = np.dtype(knowledge_type).itemsize * self.features
        knowledge += float_type(knowledge_type).itemsize * self.knowledge
        return knowledge + scales + fixed + weights


NOTHING = Content()


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One ask and its answer, or several alike.

    Attributes:
        step: The step that is asked.
        down, up: What the ask and the answer carry.
        times: How often a round asks it.
        setting: Name of the setting that `times` is; empty for a step that is always asked once.
        first: Completed rounds of the run before it is asked for the first time.
        end: Completed rounds from which on it is not asked any more; None where it is to the end.
        every: Rounds from one time to the next, at least 1.
    """

    step: str
    down: Content = NOTHING
    up: Content = NOTHING
    times: int = 1
    setting: str = ""
    first: int = 0
    end: int | None = None
    every: int = 1

    def is_in(self, completed: int) -> bool:
        """Whether the round after so many completed ones has it."""
        ended = self.end is not None and completed >= self.end
        return completed >= self.first and not ended and (completed - self.first) % self.every == 0


def round_bytes(exchanges: Sequence[Exchange], knowledge_type: KnowledgeType) -> dict[str, int]:
    """Tensor bytes of a device and round by direction, `up` and `down`."""
    return {
        UP: sum(one.times * one.up.bytes(knowledge_type) for one in exchanges),
        DOWN: sum(one.times * one.down.bytes(knowledge_type) for one in exchanges),
    }


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
