"""A run with private class statistics, its asks, and a link that keeps what its devices send."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.open_device import open_device

from fleetdistill import Device
from fleetdistill.compute import Compute, Computed
from fleetdistill.knowledge import ClassSums, Kind, PrivateRows
from fleetdistill.link.base import Link
from fleetdistill.methods.base import Answer
from fleetdistill.replacement import Replacement
from fleetdistill.state import failpoints
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

RUN, CLASSES, SIZE = "private", 3, 8


class PrivateFleet:
    """A store with a published private run, and the asks that a test writes into it."""

    def __init__(self, store: Store | None = None, *, epsilon: float = 1.0, exact: bool = False) -> None:
        self.store = store or Store.in_memory()
        config = run_config(
            {
                "run": {"name": RUN, "method": "classstats_private", "rounds": 1},
                "contract": {"classes": CLASSES, "input_shape": [1, 8, 8]},
                "method": {"dimensions": SIZE, "epsilon": epsilon, "exact": exact},
            }
        )
        self.store.runs.begin(RUN, config.fixed_part())
        self.contract, _, extractor = make_contract(config, build_method(config))
        self.store.blobs.put(extractor)  # type: ignore[arg-type]
        self.store.runs.publish_contract(RUN, self.contract.SerializeToString())
        self.api = DeviceApi(self.store)

    def ask(self, device: str = "d", step: str = "summarise", parts: Mapping[str, Kind] | None = None) -> None:
        """Opens a round with one ask for one device."""
        number = self.store.runs.start_round(RUN, [device])
        payload = encode(parts or {})
        self.store.blobs.put(payload)
        row: dict[str, Any] = {"run": RUN, "round": number, "step_number": 1, "device": device, "step": step, "seed": 5}
        row |= {"payload": payload.sha256, "payload_bytes": payload.data_bytes, "deadline_at": time.time() + 600}
        expects = {"statistics": "class_sums"} if step == "summarise" else {}
        self.store.asks.add([Ask(**row, expects=expects)])


def received(store: Store) -> list[ClassSums]:
    """The sums in every answer that the server has."""
    uploads = [upload for upload in store.asks.uploads(RUN) if upload.step == "summarise"]
    result = [decode(store.blobs.open(upload.sha256))["statistics"] for upload in uploads]
    return [item for item in result if isinstance(item, ClassSums)]


class RecordingLink(MemoryLink):
    """Keeps every message of a device as bytes, without the secret that only names the device."""

    def __init__(self, api: DeviceApi) -> None:
        super().__init__(api)
        self.sent: list[tuple[str, Any]] = []

    def _keep(self, call: str, message: Any) -> None:
        copy = type(message).FromString(message.SerializeToString())
        if hasattr(copy, "identity"):
            copy.identity.secret = b""
        self.sent.append((call, copy))

    def check_in(self, identity: Any, profile: Any) -> Any:
        if profile is not None:
            self._keep("check_in", profile)
        return super().check_in(identity, profile)

    def decline(self, request: service_pb2.DeclineRequest) -> None:
        self._keep("decline", request)
        super().decline(request)

    def upload_status(self, identity: Any, name: Any) -> Any:
        self._keep("upload_status", name)
        return super().upload_status(identity, name)

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[Any]) -> Any:
        self._keep("upload", header)
        return super().upload(header, self._kept(chunks))

    def _kept(self, chunks: Iterator[Any]) -> Iterator[Any]:
        for chunk in chunks:
            self.sent.append(("chunk", bytes(chunk.data)))
            yield chunk


class RowsWorker(Compute):
    """Computes for a device without torch: its rows are its data, and it keeps no state."""

    def __init__(self, contract: contract_pb2.Contract, rows: int = 30) -> None:
        super().__init__(contract)
        random = np.random.default_rng(rows)
        self._rows, self._labels = random.normal(size=(rows, SIZE)), np.arange(rows) % CLASSES

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        return contract_pb2.DeviceProfile(
            samples=len(self._labels),
            classes=CLASSES,
            input_shape=self.contract.input_shape,
            knowledge_types=[self.contract.knowledge_type],
            allowed_columns=sorted(allow),
        )

    def state(self) -> bytes:
        return b"state"

    delivered_state = state

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        self.has_state = True

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        rows = PrivateRows(self._rows, self._labels, CLASSES)
        return Computed(Answer(parts={"statistics": rows}, samples=len(self._labels)), b"state", None)

    def deliver(self, replacement: Replacement) -> None:
        raise AssertionError("nothing is delivered")


def make_device(link: str | Link, directory: Path, **changes: Any) -> Device:
    """A device whose worker sends rows."""
    given: dict[str, Any] = {"worker": RowsWorker, "export": "never", "device_id": "d"} | changes
    return open_device(server=link, state_dir=directory, **given)


def take_a_step(points: str, store: Path, directory: Path, budget: tuple[float, float] | None) -> None:
    """One step of a device with these failpoints. Here because a forked process imports it by name."""
    api = DeviceApi(Store.open(store))
    failpoints.switch_on(points)
    with make_device(MemoryLink(api), directory, privacy=budget) as device:
        device.step(0)


def state_files(directory: Path) -> dict[str, bytes]:
    """The private files of a state directory."""
    names = ("privacy.json", "released.npz")
    return {name: (directory / name).read_bytes() for name in names if (directory / name).exists()}
