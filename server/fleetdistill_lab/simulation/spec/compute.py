"""The compute backend of simulated devices that share a process: equal work is done once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from fleetdistill.compute.base import Computed
from fleetdistill.compute.torch_compute import TorchCompute
from fleetdistill.data.samples import Samples, read_samples
from fleetdistill.knowledge import Kind
from fleetdistill.methods.base import Ask
from fleetdistill.replacement import SPLIT
from fleetdistill.training.figures import Counts
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.spec.arrays import load_arrays

_MAX_SCORES = 64


class Shared:
    """What the devices of one process of a simulation share; several threads may use it.

    Attributes:
        scores: Scores of models on the test set, by architecture and weights; the newest ones.
        received: Architecture, step and payload of the last ask, and the scores of the fleet model in it.
    """

    def __init__(self) -> None:
        self.scores: OrderedDict[tuple[str, bytes], list[tuple[str, Counts]]] = OrderedDict()
        self.received: tuple[tuple[str, str, bytes], dict[str, Counts]] = ("", "", b""), {}
        self._samples: dict[str, Samples] = {}

    def samples(self, file: str) -> Samples:
        """Returns the samples of a data file that many devices read; they are read and checked once."""
        if file not in self._samples:
            self._samples[file] = read_samples(load_arrays(file))
        return self._samples[file]


class SimulatedCompute(TorchCompute):
    """A `TorchCompute` that scores a model that many devices have received, such as the global model, only once.

    Args:
        contract: The run's contract.
        shared: What the devices of this process share.
        given: Arguments of `TorchCompute`.
    """

    def __init__(self, contract: contract_pb2.Contract, shared: Shared, **given: Any) -> None:
        super().__init__(contract, **given)
        self._shared = shared
        self._payload = b""  # of the ask in progress

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        self._payload = ask.payload
        return super().answer(ask, parts, allow)

    def _score_received(self, ask: Ask) -> tuple[dict[str, Counts], nn.Module | None]:
        if not self.method.shares_fleet_model or SPLIT in self._scored:
            return super()._score_received(ask)
        key = self._model_name, ask.step, self._payload
        result = self._shared.received  # another thread may replace it
        if result[0] != key:
            result = self._shared.received = key, super()._score_received(ask)[0]
        return result[1], None  # without validation data the model takes part in no decision

    def _score_model(self, name: str, model: nn.Module) -> list[tuple[str, Counts]]:
        key = f"{self._model_name}/{name}", _digest(model)
        scores = self._shared.scores
        if SPLIT in self._scored:  # the device's own data, so no other device has these scores
            return super()._score_model(name, model)
        result = scores.get(key)
        if result is None:
            result = scores[key] = super()._score_model(name, model)
            while len(scores) > _MAX_SCORES:
                scores.popitem(last=False)
        return result


def _digest(model: nn.Module) -> bytes:
    result = hashlib.sha256()
    for tensor in model.state_dict().values():
        result.update(np.ascontiguousarray(tensor.numpy(force=True)).data)
    return result.digest()
