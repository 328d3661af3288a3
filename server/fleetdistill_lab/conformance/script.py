"""The run that the kit serves to a device: its contract, and one ask for each fault."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from fleetdistill.knowledge import ModelParameters
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, tensor_pb2
from fleetdistill_lab.conformance.player import payload_of

RUN = "conformance"
SHAPES = {"weight": (3, 4), "bias": (3,)}
_FLOAT32 = tensor_pb2.ELEMENT_TYPE_FLOAT32
_SETTINGS = {
    "local_epochs": 1,
    "batch_size": 8,
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 0.0,
    "participation_ratio": 1.0,
    "robust": "gross",
}


@dataclass(frozen=True)
class Scene:
    """One ask and what goes wrong with it.

    Attributes:
        fault: Name of the fault; empty for none.
        step: Step of the ask.
        first_attempt: Smallest attempt number of the answer.
        answered: Whether the device must answer the ask.
    """

    fault: str = ""
    step: str = "train"
    first_attempt: int = 1
    answered: bool = True


SCENES = (
    Scene("download-cut"),
    Scene("download-crc"),
    Scene("upload-cut"),
    Scene("too-many"),
    Scene("checksum"),
    Scene("receipt-lost"),
    Scene("check-in"),
    Scene("late", answered=False),
    Scene("unknown-step", step="conformance-unknown", answered=False),
    Scene("download-digest", answered=False),
    Scene("repeated", first_attempt=3),
    Scene(step="deliver"),
)
"""The asks of the run, one per round."""


def contract() -> contract_pb2.Contract:
    """Returns the contract: FedAvg with a linear model of 4 inputs and 3 classes."""
    tensors = [
        contract_pb2.NamedShape(name=f"parameters/{name}", shape=shape, element_type=_FLOAT32)
        for name, shape in SHAPES.items()
    ]
    return contract_pb2.Contract(
        run=RUN,
        method="fedavg",
        config=_plan(),
        classes=["a", "b", "c"],
        input_shape=[4],
        knowledge_type=_FLOAT32,
        requirements=contract_pb2.Requirements(same_architecture=True, columns=["parameters"]),
        model_fingerprint=fingerprint(),
        rounds=len(SCENES) - 1,
        threads=1,
        max_upload_bytes=1 << 20,
        uploads=[contract_pb2.PartShapes(part="parameters", tensors=tensors)],
    )


def fingerprint() -> str:
    """Returns the fingerprint of the run's model."""
    entries = [[name, list(shape), "float32", "parameter"] for name, shape in sorted(SHAPES.items())]
    text = json.dumps({"cuts": [], "entries": entries}, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def payload(number: int) -> Payload:
    """Returns the payload of a round, the global model; each round has another one."""
    count = float(number)
    return payload_of(
        ModelParameters(parameters={name: np.full(shape, count / 64, np.float32) for name, shape in SHAPES.items()})
    )


def _plan() -> knowledge_pb2.Plan:
    plan = knowledge_pb2.Plan()
    for name, value in _SETTINGS.items():
        entry = plan.entries.add(name=name)
        if isinstance(value, bool):
            entry.flag = value
        elif isinstance(value, int):
            entry.integer = value
        elif isinstance(value, float):
            entry.real = value
        else:
            entry.text = str(value)
    return plan
