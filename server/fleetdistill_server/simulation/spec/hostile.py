"""Simulated hostile devices: they are enrolled, and send well-formed answers that are meant to do harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fleetdistill.device.compute import Computed
from fleetdistill.device.torch_compute import TorchCompute
from fleetdistill.knowledge import (
    Array,
    ClassStatistics,
    Discriminator,
    DistillationGradient,
    Generator,
    Kind,
    Metrics,
    ModelParameters,
    Parts,
    ProxyKnowledge,
    SampleKnowledge,
    SharedStatistics,
    SoftPredictions,
    WeightedPredictions,
)
from fleetdistill.wire.v1 import contract_pb2, service_pb2

DECLARED = 10**9
"""Samples that a device declares to have, where it lies about them and the run allows so many."""
_LARGEST = 6e4  # fits float16
_VARIANCES = ("running_var", "variances")

Change = Callable[[str, Array, Array | None, np.random.Generator], Array]
"""(name, what the device would send, what it was sent under this name, random numbers) -> what it sends."""


def _reversed(name: str, honest: Array, start: Array | None, random: np.random.Generator) -> Array:
    """The update times -5."""
    before = np.zeros_like(honest) if start is None else start
    changed: Array = before - 5 * (honest - before)
    return changed


def _scaled(name: str, honest: Array, start: Array | None, random: np.random.Generator) -> Array:
    return 1000 * honest


def _random(name: str, honest: Array, start: Array | None, random: np.random.Generator) -> Array:
    return random.normal(honest.mean(), honest.std() + 1e-3, honest.shape)


_CHANGES: Mapping[str, Change] = {"reversed": _reversed, "scaled": _scaled, "random": _random}
_FLIPS = ("flips", "declares")

ATTACKS: Mapping[str, str] = {
    "flips": "trains on the labels C - 1 - c",
    "reversed": "sends its update, gradient or statistics times -5",
    "scaled": "sends its model, gradient, features or statistics times 1,000",
    "random": "sends random numbers of the size of the honest ones",
    "declares": "declares as many samples as the run allows, and flips labels",
}
"""Name of an attack, and what a device does."""


def flipped(attack: str, labels: Array, classes: int) -> Array:
    """The labels that a hostile device trains on."""
    return classes - 1 - labels if attack in _FLIPS else labels


class HostileWorker(TorchCompute):
    """A worker that computes as every other and changes what it sends.

    Args:
        contract: The run's terms.
        attack: A name in `ATTACKS`.
        given: Arguments of `TorchCompute`.
    """

    def __init__(self, contract: contract_pb2.Contract, attack: str, **given: Any) -> None:
        super().__init__(contract, **given)
        self._attack = attack
        self._declared = min(contract.max_samples or DECLARED, DECLARED)

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        """As of every worker, but for the samples."""
        profile = super().profile(allow)
        if self._attack == "declares":
            profile.samples = self._declared
        return profile

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        """The answer that an honest device would give, changed."""
        work = super().answer(ask, parts, allow)
        sent, samples = dict(work.answer.parts), work.answer.samples
        if self._attack == "declares":
            samples = self._declared
            sent = {name: _counted(part, samples) for name, part in sent.items()}
        if (change := _CHANGES.get(self._attack)) is not None:
            sent = _changed(sent, parts, change, np.random.default_rng(ask.seed))
        return replace(work, answer=replace(work.answer, parts=sent, samples=samples))


def _counted(part: Kind, samples: int) -> Kind:
    if not isinstance(part, ClassStatistics | SharedStatistics) or part.counts is None:
        return part
    return replace(part, counts=np.full_like(part.counts, samples // len(part.labels)))


def _changed(sent: Parts, start: Parts, change: Change, random: np.random.Generator) -> dict[str, Kind]:
    return {name: _changed_part(part, start.get(name), change, random) for name, part in sent.items()}


def _changed_part(part: Any, start: Any, change: Change, random: np.random.Generator) -> Any:
    """A part with all its numbers changed; probabilities become those of other rows, so that they stay well-formed."""
    match part:
        case Metrics():
            return part
        case SoftPredictions() | WeightedPredictions():
            return replace(part, values=random.permutation(part.values, axis=1))
        case Generator() | Discriminator():
            before = getattr(start, "parameters", None)
            return replace(part, parameters=_changed_part(part.parameters, before, change, random))
        case ModelParameters():
            fields: tuple[str, ...] = ("parameters", "buffers")
        case DistillationGradient():
            fields = ("gradients",)
        case SampleKnowledge():
            fields = ("features", "logits")
        case ProxyKnowledge():
            fields = ("logits", "embeddings")
        case ClassStatistics() | SharedStatistics():
            fields = ("means", "variances")
        case _:
            return part
    found: dict[str, Any] = {}
    for field in fields:
        honest, before = getattr(part, field), getattr(start, field, None)
        if isinstance(honest, Mapping):
            earlier = before or {}
            found[field] = {k: _one(k, one, earlier.get(k), change, random) for k, one in honest.items()}
        elif honest is not None:
            found[field] = _one(field, honest, before, change, random)
    return replace(part, **found)


def _one(name: str, honest: Array, start: Array | None, change: Change, random: np.random.Generator) -> Array:
    if honest.dtype.kind != "f":
        return honest
    changed = change(name, honest.astype(np.float64), start, random)
    low = 0.0 if name.endswith(_VARIANCES) else -_LARGEST
    return np.clip(changed, low, _LARGEST).astype(honest.dtype)
