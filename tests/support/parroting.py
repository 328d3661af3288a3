"""A device without a model for FedAvg: it answers with the parameters that it was sent, moved by its own small number.

Its secret is made of its name, so that a test may go on with a store that was recorded with it.
"""

from __future__ import annotations

import hashlib

from fleetdistill.knowledge import Kind, Metric, Metrics, ModelParameters
from fleetdistill.link.base import Link
from fleetdistill.link.downloads import check_payload
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.kind import COLUMNS
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.v1 import contract_pb2, service_pb2


class ParrotDevice:
    """One device of a run; `step` as an SDK device has it.

    Attributes:
        identity: Who it is.
        link: Its way to the server.
        receipts: Receipts in order.
        finished: The server's word at the end of the run.
    """

    def __init__(self, link: Link, run: str, name: str) -> None:
        self.link = link
        secret = hashlib.sha256(name.encode()).digest()
        self.identity = service_pb2.Identity(run=run, device=name, secret=secret)
        self.contract: contract_pb2.Contract | None = None
        self.receipts: list[service_pb2.Receipt] = []
        self.finished = ""

    def step(self) -> None:
        """Checks in, or asks for work and does it."""
        if self.contract is None:
            self.check_in()
            return
        answer = self.link.next_ask(self.identity, 0.0)
        if answer.HasField("ask"):
            self.answer(answer.ask, max(answer.ask.first_attempt, 1))
        self.finished = answer.finished

    def check_in(self) -> None:
        contract = self.link.check_in(self.identity, None).contract
        profile = contract_pb2.DeviceProfile(
            samples=3,
            classes=len(contract.classes),
            input_shape=contract.input_shape,
            model_fingerprint=contract.model_fingerprint,
            extractor_fingerprint=contract.extractor_fingerprint,
            knowledge_types=[contract.knowledge_type],
            allowed_columns=COLUMNS,
        )
        self.link.check_in(self.identity, profile)
        self.contract = contract

    def answer(self, ask: service_pb2.Ask, attempt: int = 1) -> service_pb2.Receipt:
        """Answers an ask under this attempt's number; the receipt is kept too."""
        payload = self.answer_to(ask)
        name = service_pb2.UploadName(round=ask.round, step_number=ask.step_number, attempt=attempt)
        first = self.link.upload_status(self.identity, name).next_byte
        header = service_pb2.UploadHeader(
            identity=self.identity, name=name, payload=payload.header(), samples=3, first_byte=first
        )
        receipt = self.link.upload(header, wire.chunks(payload.source, payload.slots, first))
        self.receipts.append(receipt)
        return receipt

    def answer_to(self, ask: service_pb2.Ask) -> Payload:
        """What it says to an ask: for one ask always the same."""
        assert self.contract is not None
        parts: dict[str, Kind] = {}
        if ask.step == "train":
            header, chunks = self.link.download(self.identity, ask.payload, 0)
            data = b"".join(chunk.data for chunk in chunks)
            sent = decode(check_payload(header, data, ask.payload))["parameters"]
            assert isinstance(sent, ModelParameters)
            by = (1 + self.identity.secret[0]) / 1000
            moved = {name: one + one.dtype.type(by) for name, one in sent.parameters.items()}
            accuracy = Metric(name="accuracy", split="test", sum=float(ask.round), count=10)
            answer = ModelParameters(parameters=moved, buffers=sent.buffers)
            parts = {"parameters": answer, "metrics": Metrics(metrics=[accuracy])}
        return encode(parts, DTYPES[self.contract.knowledge_type])
