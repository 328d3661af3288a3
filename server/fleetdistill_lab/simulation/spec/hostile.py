"""Simulates hostile devices, which are enrolled and send well-formed but harmful answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fleetdistill.compute.base import Computed
from fleetdistill.knowledge import (
    Array,
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
    WeightedPredictions,
)
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.spec.compute import SimulatedCompute

DECLARED = 10**9
"""Number of samples that an attacker with the attack `declares` claims, if the run allows as many."""
_LARGEST = 6e4  # below float16's largest number
_VARIANCES = ("running_var", "variances")

Change = Callable[[str, Array, Array | None, np.random.Generator], Array]
"""Maps (array name, honest array, array received under this name or None, random generator) to the array to send."""


def _reverse(name: str, honest: Array, start: Array | None, random: np.random.Generator) -> Array:
    """Multiplies the device's update by -5."""
    before = np.zeros_like(honest) if start is None else start
    changed: Array = before - 5 * (honest - before)
    return changed


def _scale(name: str, honest: Array, start: Array | None, random: np.random.Generator) -> Array:
    return 1000 * honest


def _random(name: str, honest: Array, start: Array | None, random: np.random.Generator) -> Array:
    noise: Array = random.normal(honest.mean(), honest.std() + 1e-3, honest.shape)
    return noise


_CHANGES: Mapping[str, Change] = {"reversed": _reverse, "scaled": _scale, "random": _random}
_FLIPS = ("flips", "declares")

ATTACKS: Mapping[str, str] = {
    "flips": "trains on the labels C - 1 - c",
    "reversed": "sends its update, gradient or statistics times -5",
    "scaled": "sends its model, gradient, features or statistics times 1,000",
    "random": "sends random numbers with the mean and standard deviation of the honest values",
    "declares": "declares as many samples as the run allows, and trains on flipped labels",
}
"""Maps each attack to its description."""


def flip(attack: str, labels: Array, classes: int) -> Array:
    """Returns the labels that a device with this attack trains on."""
    return classes - 1 - labels if attack in _FLIPS else labels


class HostileCompute(SimulatedCompute):
    """A `SimulatedCompute` that computes honest answers and modifies them according to an attack.

    Args:
        attack: A name in `ATTACKS`.
        given: Arguments of `SimulatedCompute`.
    """

    def __init__(self, contract: contract_pb2.Contract, attack: str, *given: Any, **data: Any) -> None:
        super().__init__(contract, *given, **data)
        self._attack = attack
        self._declared = min(contract.max_samples or DECLARED, DECLARED)

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        """Returns the device's profile, with a false number of samples under the attack `declares`."""
        profile = super().profile(allow)
        if self._attack == "declares":
            profile.samples = self._declared
        return profile

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        """Returns the modified answer to an ask."""
        honest = super().answer(ask, parts, allow)
        sent = dict(honest.answer.parts)
        samples = honest.answer.samples
        if self._attack == "declares":
            samples = self._declared
            sent = {name: _counted(part, samples) for name, part in sent.items()}
        if (change := _CHANGES.get(self._attack)) is not None:
            sent = _change(sent, parts, change, np.random.default_rng(ask.seed))
        return replace(honest, answer=replace(honest.answer, parts=sent, samples=samples))


def _counted(part: Kind, samples: int) -> Kind:
    if not isinstance(part, SharedStatistics) or part.counts is None:
        return part
    return replace(part, counts=np.full_like(part.counts, samples // len(part.labels)))


def _change(sent: Parts, start: Parts, change: Change, random: np.random.Generator) -> dict[str, Kind]:
    return {name: _change_part(part, start.get(name), change, random) for name, part in sent.items()}


def _change_part(part: Any, start: Any, change: Change, random: np.random.Generator) -> Any:
    """Changes all values of a part; permutes each row's probabilities instead, which keeps them well-formed."""
    match part:
        case Metrics():
            return part
        case WeightedPredictions():
            return replace(part, values=random.permutation(part.values, axis=1))
        case Generator() | Discriminator():
            before = getattr(start, "parameters", None)
            return replace(part, parameters=_change_part(part.parameters, before, change, random))
        case ModelParameters():
            fields: tuple[str, ...] = ("parameters", "buffers")
        case DistillationGradient():
            fields = ("gradients",)
        case SampleKnowledge():
            fields = ("features", "logits")
        case ProxyKnowledge():
            fields = ("logits", "embeddings")
        case SharedStatistics():
            fields = ("means", "variances")
        case _:
            return part
    result: dict[str, Any] = {}
    for field in fields:
        honest, before = getattr(part, field), getattr(start, field, None)
        if isinstance(honest, Mapping):
            earlier = before or {}
            result[field] = {k: _one(k, one, earlier.get(k), change, random) for k, one in honest.items()}
        elif honest is not None:
            result[field] = _one(field, honest, before, change, random)
    return replace(part, **result)


def _one(name: str, honest: Array, start: Array | None, change: Change, random: np.random.Generator) -> Array:
    if honest.dtype.kind != "f":
        return honest
    changed = change(name, honest.astype(np.float64), start, random)
    low = 0.0 if name.endswith(_VARIANCES) else -_LARGEST
    return np.clip(changed, low, _LARGEST).astype(honest.dtype)
