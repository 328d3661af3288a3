"""A device of plain calls that keeps the rules of the wire format; subclasses break one each."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import google_crc32c
import grpc

from fleetdistill.errors import WireError
from fleetdistill.knowledge import ModelParameters
from fleetdistill.wire.codec import KNOWLEDGE_TYPES, Payload, encode
from fleetdistill.wire.digests import digest
from fleetdistill.wire.v1 import contract_pb2, service_pb2, service_pb2_grpc
from fleetdistill_lab.conformance.player import Player, answer_from, chunks_of, payload_of, refusal_of
from fleetdistill_lab.conformance.script import RUN, fingerprint

SAMPLES = 8


class RawDevice:
    """Plays the run that `ListeningServer` scripts, without training."""

    steps: tuple[str, ...] = ("train", "deliver")

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.player = Player(service_pb2_grpc.DeviceServiceStub(self.channel), "raw", RUN)

    def run(self) -> None:
        """Takes part until the end, or until the server rejects something for good."""
        self.check_in()
        while (result := self.next_ask()).WhichOneof("next") != "finished":
            if result.HasField("come_back"):
                self.pause(result.come_back.after_seconds)
            else:
                self.handle(result.ask)
        self.after_the_end()

    def check_in(self) -> None:
        self.player.check_in(self.profile())

    def profile(self) -> contract_pb2.DeviceProfile:
        return contract_pb2.DeviceProfile(
            samples=SAMPLES,
            classes=3,
            input_shape=[4],
            model_fingerprint=fingerprint(),
            knowledge_types=KNOWLEDGE_TYPES[:1],
            allowed_columns=["parameters"],
        )

    def next_ask(self) -> service_pb2.NextAskResponse:
        try:
            return self.player.next_ask(self.wait_seconds())
        except grpc.RpcError as error:
            if "restored" not in str(error.details()):
                raise
            self.check_in()
            return self.player.next_ask(self.wait_seconds())

    def wait_seconds(self) -> float:
        return 0.0

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def handle(self, ask: service_pb2.Ask) -> None:
        self.player.ask = ask
        try:
            if ask.step not in self.steps:
                raise WireError("an unknown step")
            model = self.download(ask)
        except WireError:
            self.player.decline()
            return
        self.upload(self.payload(ask, model))

    def download(self, ask: service_pb2.Ask) -> ModelParameters:
        """Downloads until all bytes have arrived. Raises WireError for a wrong digest."""
        while True:
            try:
                header, chunks = self.player.download(ask.payload)
            except grpc.RpcError:
                continue
            if all(google_crc32c.value(chunk.data) == chunk.crc32c for chunk in chunks):
                break
        data = b"".join(chunk.data for chunk in chunks)
        self.check_digest(ask, digest(header.parts, iter([data])))
        model = answer_from(header, data)
        assert model is not None
        return model

    def check_digest(self, ask: service_pb2.Ask, found: bytes) -> None:
        if found != ask.payload:
            raise WireError("a wrong digest")

    def payload(self, ask: service_pb2.Ask, model: ModelParameters) -> Payload:
        return encode({}) if ask.step == "deliver" else payload_of(model)

    def upload(self, payload: Payload) -> None:
        """Uploads until there is a receipt or the ask is closed."""
        while True:
            first_byte = self.first_byte()
            if first_byte < 0:
                return
            refusal, status = refusal_of(partial(self.send, payload, first_byte))
            if status == "OK":
                return
            if refusal is not None:
                assert refusal.code in ("too-many", "checksum"), refusal
                self.pause(float(refusal.details.get("after_seconds", 0)))

    def send(self, payload: Payload, first_byte: int) -> None:
        chunks = self.chunks(payload, first_byte)
        self.player.upload(self.header(payload), chunks, first_byte=first_byte, **self.given())

    def first_byte(self) -> int:
        """Offset of the next byte; -1 if there is nothing to send."""
        status = self.player.status()
        return status.next_byte if status.ask_open else -1

    def header(self, payload: Payload) -> Any:
        return payload.header()

    def chunks(self, payload: Payload, first_byte: int) -> list[Any]:
        return chunks_of(payload, first_byte)

    def given(self) -> dict[str, Any]:
        """Further fields of the header."""
        return {"samples": SAMPLES}

    def after_the_end(self) -> None:
        self.player.leave()
