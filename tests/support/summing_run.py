"""A small run with secure sums and a refined head: three devices without torch, whose rows nobody has to extract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from support.small_run import Scenario

from fleetdistill.compute import Compute, Computed
from fleetdistill.knowledge import Array, Kind
from fleetdistill.methods import config_of_contract
from fleetdistill.methods.base import Ask
from fleetdistill.methods.classstats.exchange import REFINE
from fleetdistill.methods.classstats_secure.exchange import STEPS, SummedStatistics
from fleetdistill.replacement import Replacement
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.spec.plan import RUN

DIMENSIONS, CLASSES, ROWS = 8, 4, 120
CONFIG = f"""
[run]
name = "{RUN}"
method = "classstats_summed"
rounds = 1
min_devices = 3
[contract]
classes = {CLASSES}
input_shape = [1, 8, 8]
knowledge_type = "float32"
[method]
dimensions = {DIMENSIONS}
refine = "gradients"
refine_steps = 2
[server]
torch_device = "cpu"
compression = "none"
"""


def rows_of(name: str) -> tuple[Array, Array]:
    """Features and labels of a device, whose classes lie apart."""
    random, labels = np.random.default_rng(ord(name[-1])), np.arange(ROWS) % CLASSES
    return random.normal(size=(ROWS, DIMENSIONS)) + 3 * np.eye(CLASSES, DIMENSIONS)[labels], labels


class SummingWorker(Compute):
    """Computes for a device without torch: statistics of rows that nobody has to extract."""

    def __init__(self, name: str, contract: contract_pb2.Contract) -> None:
        super().__init__(contract)
        self._name = name

    @cached_property
    def _statistics(self) -> SummedStatistics:
        rows, labels = rows_of(self._name)
        return SummedStatistics(config_of_contract(self.contract), lambda: rows, labels, CLASSES)

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        return contract_pb2.DeviceProfile(
            samples=ROWS,
            classes=CLASSES,
            input_shape=self.contract.input_shape,
            knowledge_types=[self.contract.knowledge_type],
            allowed_columns=sorted(allow),
        )

    def wanted_payloads(self) -> Sequence[bytes]:
        return []

    def take_payload(self, sha256: bytes, parts: Mapping[str, Kind]) -> None:
        raise AssertionError("this worker wants no payload")

    def load_initial(self, parts: Mapping[str, Kind]) -> None:
        raise AssertionError("the method has no initial weights")

    def state(self) -> bytes:
        return b"{}"

    delivered_state = state

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        self.has_state = True

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        asked = Ask(round=ask.round, step=ask.step, seed=ask.seed, parts=parts)
        if ask.step in STEPS:
            return Computed(self._statistics.send(ask.step), b"{}")
        if ask.step == REFINE:
            return Computed(self._statistics.refine(asked), b"{}")
        return Computed(self._statistics.learn(asked), b"{}", Replacement(replaced=True), b"{}")

    def deliver(self, replacement: Replacement) -> None:
        assert replacement.replaced

    def delivered_model(self) -> Any:
        raise AssertionError("this worker has no model")

    def export(self, path: Path, number: int) -> Any:
        raise AssertionError("this worker has no model")


SUMS = Scenario(config=CONFIG, devices=("d0", "d1", "d2"), worker=SummingWorker)
