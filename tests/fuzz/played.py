"""What an honest server says to one device in a whole run of a method: what a hostile one begins with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from support.fleets import RUNS, prepare
from support.open_device import open_device

from fleetdistill import COLUMNS, Device
from fleetdistill.clock import Clock
from fleetdistill.compute import light_worker
from fleetdistill.link.base import Link
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2
from fleetdistill_lab.simulation.links.links import run_over_memory
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.device import DeviceSpec, build_device_model
from fleetdistill_server.intake.memory_link import MemoryLink

LIGHT = "classstats in one exchange"
"""The run that a device without PyTorch takes part in too."""


@dataclass
class Played:
    """One device's part of a run.

    Attributes:
        name: Of the run, in `support.fleets.RUNS`; "light" before it for a device without PyTorch.
        spec: The device.
        data: Its rows.
        terms: The answer to its check-in.
        asks: All that it was asked.
        payloads: Header and data by digest.
    """

    name: str
    spec: DeviceSpec
    data: tuple[np.ndarray, np.ndarray]
    terms: service_pb2.CheckInResponse = field(default_factory=service_pb2.CheckInResponse)
    asks: list[service_pb2.Ask] = field(default_factory=list)
    payloads: dict[bytes, tuple[knowledge_pb2.PayloadHeader, bytes]] = field(default_factory=dict)

    def device(
        self,
        server: str | Link,
        state_dir: Path,
        on_event: Callable[[Any], None],
        seconds: float,
        clock: Clock | None = None,
    ) -> Device:
        """A device that fits the run, in a directory of the caller's choice."""
        data, spec = self.data, self.spec
        own: dict[str, Any] = {"worker": light_worker(data)}
        if not self.name.startswith("light"):
            own = {
                "model": lambda: build_device_model(spec, data[0].shape[1:]),
                "data": data,
                "predictor": spec.predictor,
            }
        return open_device(
            server=server,
            state_dir=state_dir,
            allow=COLUMNS,
            export="never",
            on_event=on_event,
            seconds_per_ask=seconds,
            spool_bytes=64 << 20,
            clock=clock,
            **own,
        )


class NotingLink(MemoryLink):
    """Notes what the device API says to the first device."""

    played: Played

    def check_in(self, identity: Any, profile: Any) -> Any:
        terms = super().check_in(identity, profile)
        if self._is_first(identity) and profile is not None:
            self.played.terms.CopyFrom(terms)
        return terms

    def next_ask(self, identity: Any, wait_seconds: float) -> Any:
        result = super().next_ask(identity, wait_seconds)
        if self._is_first(identity) and result.HasField("ask") and result.ask not in self.played.asks:
            self.played.asks.append(result.ask)
        return result

    def download(self, identity: Any, sha256: bytes, first_byte: int) -> Any:
        header, chunks = super().download(identity, sha256, first_byte)
        return header, self._noted(identity, header, list(chunks))

    def _noted(self, identity: Any, header: Any, chunks: list[AnyChunk]) -> Iterator[AnyChunk]:
        if self._is_first(identity):
            from fleetdistill.wire.payload import chunk_data

            self.played.payloads[header.sha256] = (header, b"".join(map(chunk_data, chunks)))
        return iter(chunks)

    def _is_first(self, identity: Any) -> bool:
        return bool(identity.device == self.played.spec.name)


def play(name: str, work: Path) -> list[Played]:
    """Plays a run of `support.fleets.RUNS`; twice where a device without PyTorch can take part."""
    prepared = prepare(RUNS[name], work)
    spec = prepared[1][0]
    result = Played(name, spec, load_arrays(spec.data_file))
    noting = type("Noting", (NotingLink,), {"played": result})
    run = run_over_memory(*prepared, lambda store: None, lambda api, device: noting(api))
    with contextlib.closing(run) as store:
        file = result.terms.contract.extractor_file
        if name != LIGHT or not file:
            return [result]
        payload = store.blobs.open(file)
        result.payloads[file] = (payload.header(), payload.source.read(0, payload.data_bytes))
    return [result, replace(result, name=f"light {name}")]


def play_all(names: Sequence[str], work: Path) -> list[Played]:
    """Plays several."""
    return [item for number, name in enumerate(names) for item in play(name, work / str(number))]
