"""An SDK device without a model: it answers every step with sample knowledge that fits `wire_samples.make_contract`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.live_front import RUN
from support.open_device import open_device
from support.wire_samples import make_knowledge, make_profile

from fleetdistill import COLUMNS, Device
from fleetdistill.compute import Compute, Computed
from fleetdistill.knowledge import Kind
from fleetdistill.methods.base import Answer
from fleetdistill.replacement import Replacement
from fleetdistill.testing import EventLog
from fleetdistill.wire.v1 import contract_pb2, service_pb2


class SmallWorker(Compute):
    """Its state is how many answers it has given; each says so in its logits. `rows` is the size of an answer."""

    def __init__(self, contract: contract_pb2.Contract, rows: int = 4) -> None:
        super().__init__(contract)
        self.taken: list[bytes] = []
        self.rows = rows
        self.count = 0
        self.asked: list[service_pb2.Ask] = []

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        return make_profile(proxy_digest=self.contract.proxy_digest, samples=self.rows)

    def wanted_payloads(self) -> Sequence[bytes]:
        return [item for item in (self.contract.initial_weights, self.contract.proxy_digest) if item]

    def has_payload(self, sha256: bytes) -> bool:
        return sha256 in self.taken

    def take_payload(self, sha256: bytes, parts: Mapping[str, Kind]) -> None:
        self.taken.append(sha256)

    def state(self) -> bytes:
        return json.dumps(self.count).encode()

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        self.count = json.loads(saved)
        self.has_state = True

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        self.asked.append(ask)
        self.count += 1
        knowledge = make_knowledge(self.rows)
        knowledge.logits[:] = self.count  # type: ignore[index]
        return Computed(
            Answer(parts={"knowledge": knowledge}, samples=self.rows), self.state(), Replacement(True), self.state()
        )

    def delivered_state(self) -> bytes:
        return self.state()


def small_device(
    port: int, state_dir: Path, events: EventLog, link: Any = None, rows: int = 4, **changes: Any
) -> Device:
    """A device of `support.live_front`'s run, called d1 unless the changes say otherwise."""
    settings: dict[str, Any] = {
        "run": RUN,
        "device_id": "d1",
        "allow": COLUMNS,
        "export": "never",
        "worker": lambda contract: SmallWorker(contract, rows),
    }
    return open_device(
        server=link or f"127.0.0.1:{port}",
        state_dir=state_dir,
        on_event=events.append,
        **{**settings, **changes},
    )
