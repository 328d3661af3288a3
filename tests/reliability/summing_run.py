"""Small runs with secure sums: three devices without torch, whose rows nobody has to extract.

One is without noise, with a refined head; the other has noise, and certificates vouch for the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from support.secured import device_credentials, make_pki, save_credentials
from support.small_run import Scenario

from fleetdistill import SecureTerms
from fleetdistill.compute import Compute, Computed
from fleetdistill.knowledge import Array, Kind
from fleetdistill.methods import config_of_contract
from fleetdistill.methods.base import Ask
from fleetdistill.methods.classstats.exchange import REFINE
from fleetdistill.methods.classstats_secure.exchange import STEPS, MaskedStatistics, SecureStatistics, SummedStatistics
from fleetdistill.replacement import Replacement
from fleetdistill.state.files import Files
from fleetdistill.state.secure_sessions import SecureSessions
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.spec.plan import RUN

DEVICES = ("d0", "d1", "d2")
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
PRIVATE_CONFIG = CONFIG.replace("classstats_summed", "classstats_secure").replace(
    'refine = "gradients"\nrefine_steps = 2', 'epsilon = 20.0\nkeys = "certificates"'
)


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
    def _statistics(self) -> MaskedStatistics:
        rows, labels = rows_of(self._name)
        made = SecureStatistics if self.contract.method == "classstats_secure" else SummedStatistics
        return made(config_of_contract(self.contract), lambda: rows, labels, CLASSES)

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
            assert isinstance(self._statistics, SummedStatistics)
            return Computed(self._statistics.refine(asked), b"{}")
        return Computed(self._statistics.learn(asked), b"{}", Replacement(replaced=True), b"{}")

    def deliver(self, replacement: Replacement) -> None:
        assert replacement.replaced

    def delivered_model(self) -> Any:
        raise AssertionError("this worker has no model")

    def export(self, path: Path, number: int) -> Any:
        raise AssertionError("this worker has no model")


def with_certificates(work: Path) -> Mapping[str, str]:
    """A CA, and what each device has after enrolment."""
    authority = make_pki(work / "pki")
    for name in DEVICES:
        save_credentials(work / name, device_credentials(authority, name))
    return {"pki": str(work / "pki"), "enrol_listen": "127.0.0.1:0"}


def note_frozen(work: Path, name: str) -> None:
    """Writes down the input of the device's open sum, one file for each that it ever had."""
    session = SecureSessions(Files(work / name)).open()
    if session is not None:
        (work / f"{name}.{session.sid.hex()}.{sha256(session.numbers).hexdigest()}.frozen").write_bytes(session.numbers)


SUMS = Scenario(config=CONFIG, devices=DEVICES, worker=SummingWorker)
PRIVATE_SUMS = Scenario(
    config=PRIVATE_CONFIG,
    devices=DEVICES,
    worker=SummingWorker,
    prepare=with_certificates,
    options={
        "secure": SecureTerms(min_devices=3, keys="certificates"),
        "privacy": (100.0, 1e-5),  # of more sums than there are
    },
    watch=note_frozen,
)
