"""An honest server's words, to be changed: a link that plays a small FedDKC run to one device, as a test wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.open_device import open_device
from torch import nn

from fleetdistill import COLUMNS, Device, Event
from fleetdistill.knowledge import Kind, Plan, RefinedKnowledge
from fleetdistill.methods import config_to_plan, example_config
from fleetdistill.training.model import split_sequential
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2, tensor_pb2

RUN, CLASSES = "lying", 3


def terms(method: str = "feddkc", settings: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """A valid answer to a check-in; settings go into the plan as they are, whatever the method makes of them."""
    contract = contract_pb2.Contract(
        run=RUN,
        method=method,
        classes=[str(label) for label in range(CLASSES)],
        input_shape=[4],
        knowledge_type=tensor_pb2.ELEMENT_TYPE_FLOAT32,
        threads=1,
        rounds=3,
    )
    usual = config_to_plan(example_config(method).for_classes(CLASSES))
    plan = Plan(values={**usual.values, **(settings or {})})
    contract.config.CopyFrom(encode({"config": plan}).parts.parts[0].plan)
    answer = service_pb2.CheckInResponse(contract=contract, lease_seconds=60, heartbeat_seconds=15)
    for name, value in changes.items():
        setattr(answer if hasattr(answer, name) else answer.contract, name, value)
    return answer


def ask(**changes: Any) -> service_pb2.Ask:
    """A valid question of step `train`; its payload is `KNOWLEDGE`."""
    settings: dict[str, Any] = {"round": 1, "step_number": 1, "step": "train", "payload": KNOWLEDGE.sha256, "seed": 5}
    return service_pb2.Ask(**{**settings, **changes})


def knowledge(**changes: Any) -> Payload:
    """What FedDKC asks with."""
    parts: Mapping[str, Kind] = {"knowledge": RefinedKnowledge(**{"valid": False, **changes})}
    return encode(parts)


KNOWLEDGE = knowledge()
VALUES = {"valid": True, "sample_ids": np.arange(6), "values": np.zeros((6, CLASSES), np.float32)}


class LyingLink:
    """Answers each call with what a test has put in place; after the asks it says that the run is finished.

    Attributes:
        terms: Answer to check-ins.
        asks: What `next_ask` gives, one after the other.
        payloads: What downloads give, by digest.
        declined: What the device has declined.
        uploads: Headers of its answers.
        beats: Heartbeats.
        left: Calls of `leave`.
    """

    def __init__(self, *asks: Any, terms: Any = None, remote: bool = False) -> None:
        self.terms = terms_of(terms)
        self.asks = list(asks)
        self.remote = remote
        self.payloads: dict[bytes, tuple[knowledge_pb2.PayloadHeader, list[AnyChunk]]] = {}
        self.declined: list[service_pb2.DeclineRequest] = []
        self.uploads: list[service_pb2.UploadHeader] = []
        self.beats = self.left = 0
        self.change_receipt: Callable[[service_pb2.Receipt], None] = lambda receipt: None
        self.holds(KNOWLEDGE)

    def holds(self, payload: Payload) -> bytes:
        """Puts a payload in place."""
        chunks: list[AnyChunk] = list(wire.chunks(payload.source, payload.slots))
        self.payloads[payload.sha256] = (payload.header(), chunks)
        return payload.sha256

    def check_in(self, identity: Any, profile: Any) -> Any:
        return self.terms

    def next_ask(self, identity: Any, wait_seconds: float) -> Any:
        if not self.asks:
            return service_pb2.NextAskResponse(finished="no more")
        result = self.asks.pop(0)
        return service_pb2.NextAskResponse(ask=result) if isinstance(result, service_pb2.Ask) else result

    def heartbeat(self, identity: Any) -> None:
        self.beats += 1

    def leave(self, identity: Any, *, forget: bool = False) -> bool:
        self.left += 1
        return forget

    def decline(self, request: Any) -> None:
        self.declined.append(request)

    def upload_status(self, identity: Any, name: Any) -> Any:
        return service_pb2.UploadStatusResponse(ask_open=True)

    def upload(self, header: Any, chunks: Iterator[Any]) -> Any:
        data = sum(len(chunk.data) for chunk in chunks)
        self.uploads.append(header)
        receipt = service_pb2.Receipt(id="ab" * 16, name=header.name, sha256=header.payload.sha256, data_bytes=data)
        self.change_receipt(receipt)
        return receipt

    def download(self, identity: Any, sha256: bytes, first_byte: int) -> Any:
        header, chunks = self.payloads[sha256]
        return header, iter(chunks)

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def terms_of(given: Any) -> Any:
    """The given ones, or valid ones."""
    return terms() if given is None else given


DATA = (np.random.default_rng(0).random((12, 4)).astype(np.float32), np.arange(12) % CLASSES)


def model() -> nn.Module:
    torch.manual_seed(0)
    return split_sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)), 2)


class Events(list[Event]):
    def texts(self, kind: str) -> list[str]:
        return [event.text for event in self if event.kind == kind]


def device_at(link: Any, state_dir: Path, **changes: Any) -> tuple[Device, Events]:
    events = Events()
    settings: dict[str, Any] = {
        "server": link,
        "model": model,
        "data": DATA,
        "state_dir": state_dir,
        "allow": COLUMNS,
        "export": "never",
        "on_event": events.append,
    }
    return open_device(**{**settings, **changes}), events
