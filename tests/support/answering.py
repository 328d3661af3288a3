"""A device without a model: it answers FedDKC's step with random knowledge that its ask's seed decides.

It speaks through any link, so it serves whole servers as well as engines in the test's own process.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence

import numpy as np

from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.knowledge import Array, SampleKnowledge
from fleetdistill.link.base import Link
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.kind import COLUMNS
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.v1 import contract_pb2, service_pb2


class AnsweringDevice:
    """One device of a run; `step` as an SDK device has it.

    Attributes:
        receipts: Ids of the receipts, in order.
        finished: The server's word at the end of the run.
        data_version: Names its rows at its next check-in.
    """

    def __init__(self, link: Link, run: str, name: str, rows: int = 6, data_version: bytes = b"") -> None:
        self._link = link
        self.identity = service_pb2.Identity(run=run, device=name)
        self._rows = rows
        self.data_version = data_version
        self.contract: contract_pb2.Contract | None = None
        self.receipts: list[str] = []
        self.finished = ""

    def step(self, wait_seconds: float = 0.0) -> None:
        """Checks in, or asks for work and does it."""
        if self.contract is None:
            self._check_in()
            return
        answer = self._link.next_ask(self.identity, wait_seconds)
        if answer.HasField("ask"):
            self._answer(answer.ask)
        self.finished = answer.finished

    def change_data(self, data_version: bytes) -> None:
        """Has other rows; the next step checks in with them."""
        self.data_version = data_version
        self.contract = None

    def _check_in(self) -> None:
        contract = self._link.check_in(self.identity, None).contract
        profile = contract_pb2.DeviceProfile(
            samples=self._rows,
            classes=len(contract.classes),
            input_shape=contract.input_shape,
            features=contract.features,
            extractor_fingerprint=contract.extractor_fingerprint,
            knowledge_types=[contract.knowledge_type],
            allowed_columns=COLUMNS,
            data_version=self.data_version,
        )
        self.identity.secret = self._link.check_in(self.identity, profile).secret or self.identity.secret
        self.contract = contract

    def _answer(self, ask: service_pb2.Ask) -> None:
        payload = self._knowledge(ask.seed)
        name = service_pb2.UploadName(round=ask.round, step_number=ask.step_number, attempt=1)
        status = self._link.upload_status(self.identity, name)
        header = service_pb2.UploadHeader(
            identity=self.identity,
            name=name,
            payload=payload.header(),
            samples=self._rows,
            first_byte=status.next_byte,
        )
        chunks = wire.chunks(payload.source, payload.slots, status.next_byte)
        self.receipts.append(self._link.upload(header, chunks).id)

    def _feature_column(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return random.random((shape[0], math.prod(shape[1:])), np.float32).reshape(shape)

    def _knowledge(self, seed: int) -> Payload:
        contract = self.contract
        assert contract is not None
        random = np.random.default_rng(seed)
        classes = len(contract.classes)
        features = {
            feature.name: self._feature_column(random, (self._rows, *feature.shape)) for feature in contract.features
        }
        knowledge = SampleKnowledge(
            sample_ids=np.arange(self._rows),
            features=features,
            logits=random.standard_normal((self._rows, classes)).astype(np.float32),
            labels=random.integers(0, classes, self._rows).astype(np.int32),
        )
        return encode({"knowledge": knowledge}, DTYPES[contract.knowledge_type])


class AnsweringFleet:
    """Answering devices that call the servers on these ports in turn, from a thread each until the end of the block."""

    def __init__(self, port: int | Sequence[int], run: str, count: int) -> None:
        ports = itertools.cycle([port] if isinstance(port, int) else port)
        self._over = threading.Event()
        self._links = [GrpcLink(f"127.0.0.1:{next(ports)}") for _ in range(count)]
        self.devices = [AnsweringDevice(link, run, f"d{number}") for number, link in enumerate(self._links)]
        self._threads = [threading.Thread(target=self._work, args=(device,)) for device in self.devices]

    def _work(self, device: AnsweringDevice) -> None:
        while not self._over.is_set() and not device.finished:
            try:
                device.step(0.5)
            except (LinkError, RefusedError):  # the server is away, not ready, or was killed under an upload
                self._over.wait(0.1)

    def __enter__(self) -> AnsweringFleet:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for link in self._links:
            link.close()
