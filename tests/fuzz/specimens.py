"""One valid answer of every kind that a device can send, with the ask and the contract that it fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from support.wire_samples import CLASSES, make_contract, make_knowledge, make_metrics

from fleetdistill import knowledge as k
from fleetdistill.methods.classstats.shared_statistics import moments_of, to_wire
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.payload import ELEMENT_TYPES, slots
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

_PROXY_SAMPLES = 5
_DIGEST = bytes(range(32))
_MAX_ROWS = 4
_DECLARED = (
    "named_tensors",
    "shared_statistics",
    "class_sums",
    "head_gradient",
    "secure_message",
    "model_parameters",
    "distillation_gradient",
    "generator",
    "discriminator",
    "weighted_predictions",
)


@dataclass(frozen=True)
class Specimen:
    """A valid answer.

    Attributes:
        expects: Part name to kind, what the ask wants.
        payload: What answers it.
    """

    expects: dict[str, str]
    payload: Payload


def _weights() -> k.ModelParameters:
    rng = np.random.default_rng(0)
    parameters = {"0.weight": rng.random((4, 3), np.float32), "0.bias": rng.random(4, np.float32)}
    return k.ModelParameters(parameters=parameters, buffers={"1.running_mean": rng.random(4, np.float32)})


def _parts() -> dict[str, dict[str, k.Kind]]:
    """Answers by the name of their specimen."""
    values = np.full((6, CLASSES), 1 / CLASSES, np.float32)
    gradient = k.DistillationGradient(gradients={"0.weight": np.ones((4, 3), np.float32)}, batch_size=4, loss=0.5)
    proxy = k.ProxyKnowledge(
        valid=True,
        proxy_digest=_DIGEST,
        logits=np.zeros((_PROXY_SAMPLES, CLASSES), np.float32),
        embeddings=np.ones((_PROXY_SAMPLES, 4), np.float32),
    )
    sums = k.ClassSums(
        counts=np.float32([9, -2, 7]),  # type: ignore[arg-type]
        sums=np.ones((3, 4), np.float32),
        second_moment=np.ones(10, np.float32),
        mu=0.5,
        discrete=True,
    )
    rows, labels = np.random.default_rng(0).random((16, 4)), np.repeat([0, 2], 8)
    shared = to_wire(moments_of(rows, labels), rank=3)
    return {
        "sample_knowledge": {"knowledge": make_knowledge(), "metrics": make_metrics()},
        "model_parameters": {"model": _weights()},
        "named_tensors": {
            "table": k.NamedTensors(
                tensors={"means": np.ones((3, 4), np.float32), "counts": np.array([5, 0, 2])},
                reveals=["features", "counts"],
            )
        },
        "proxy_knowledge": {"proxy": proxy},
        "weighted_predictions": {"predictions": k.WeightedPredictions(noise_seed=3, values=values)},
        "shared_statistics": {"moments": shared},
        "class_sums": {"sums": sums},
        "head_gradient": {
            "gradient": k.HeadGradient(gradient=np.ones((3, 5), np.float16), scale=0.25, loss=7.5, rows=16)
        },
        "secure_message": {
            "keys": k.SecureMessage(keys=np.arange(100, dtype=np.uint8)),
            "shares": k.SecureMessage(shares=np.ones((4, 32), np.uint8)),
            "gradient": k.SecureMessage(gradient=np.arange(14, dtype=np.uint8)),
        },
        "distillation_gradient": {"gradient": gradient},
        "generator": {
            "model": _weights(),
            "generator": k.Generator(parameters=_weights(), noise_size=3),
            "discriminator": k.Discriminator(parameters=_weights(), shares_extractor=True),
        },
        "plan": {"plan": k.Plan(values={"count": 3, "rate": 0.5, "on": True, "name": "x", "cuts": [1, 2]})},
    }


def specimens() -> dict[str, Specimen]:
    """All of them, by the kind that they are about."""
    result = {}
    for name, parts in _parts().items():
        payload = encode(parts)
        kinds = {part.name: str(part.WhichOneof("kind")) for part in payload.parts.parts if part.name != "metrics"}
        if name == "sample_knowledge":
            kinds["knowledge/features/cut"] = "tensor"  # of the contract's columns only this one
        result[name] = Specimen(kinds, payload)
    return result


def contract_for(all_of_them: dict[str, Specimen]) -> contract_pb2.Contract:
    """A contract that every specimen fits."""
    features = [
        contract_pb2.NamedShape(name="cut", shape=(2, 2)),
        contract_pb2.NamedShape(name="embedding", shape=(4,)),
    ]
    contract = make_contract(proxy_samples=_PROXY_SAMPLES, proxy_digest=_DIGEST, features=features)
    for specimen in all_of_them.values():
        for part in specimen.payload.parts.parts:
            if part.WhichOneof("kind") in _DECLARED:
                _declare(contract, part)
    return contract


def _declare(contract: contract_pb2.Contract, part: knowledge_pb2.Part) -> None:
    if any(known.part == part.name for known in contract.uploads):
        return
    kind = part.WhichOneof("kind")
    shapes = contract.uploads.add(part=part.name, min_samples=5 if kind == "shared_statistics" else 0)
    if kind == "shared_statistics":
        shapes.max_rows = _MAX_ROWS
        shapes.tensors.extend([contract_pb2.NamedShape(name=name, shape=(4,)) for name in ("means", "variances")])
        return
    for slot in slots(knowledge_pb2.Parts(parts=[part])):
        name, element_type = slot.path.removeprefix(f"{part.name}/"), ELEMENT_TYPES[slot.dtype]
        shapes.tensors.add(name=name, shape=slot.shape, element_type=element_type)
