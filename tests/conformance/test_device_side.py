"""The kit as a server: our device passes, and a device that breaks a rule fails the check of that rule."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from conformance.raw_device import SAMPLES, RawDevice
from support.open_device import open_device
from torch import nn

from fleetdistill import COLUMNS
from fleetdistill.knowledge import ModelParameters
from fleetdistill.wire.codec import Payload, encode
from fleetdistill_lab.conformance import ListeningServer, Report
from fleetdistill_lab.conformance.player import payload_of


class Linear(nn.Linear):
    """The model of the kit's run."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.extractor = nn.Identity()

    def features(self, x):
        return x

    def predict(self, features):
        return self(features)


def played(device: Callable[[str], None]) -> Report:
    """The report on a device that runs in a thread; a device that the server rejects may end early."""
    server, failures = ListeningServer(), list[BaseException]()

    def run() -> None:
        try:
            device(server.address)
        except (grpc.RpcError, AssertionError) as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return server.wait(0.0 if failures else 60.0, quiet_seconds=0.0)


def failed(report: Report) -> list[str]:
    return [result.rule.name for result in report.results() if result.found]


def test_our_device_keeps_every_rule(tmp_path: Path) -> None:
    inputs, labels = np.random.default_rng(0).random((12, 4), np.float32), np.arange(12) % 3

    def run(address: str) -> None:
        with open_device(
            server=address,
            model=Linear,
            data=(inputs, labels),
            state_dir=tmp_path,
            allow=COLUMNS,
            export="never",
        ) as device:
            device.run()

    report = played(run)
    assert report.passed, str(report)


def test_a_device_of_plain_calls_keeps_every_rule() -> None:
    report = played(lambda address: RawDevice(address).run())
    assert report.passed, str(report)


class ShortSecret(RawDevice):
    def check_in(self):
        self.player.secret = b"short"
        super().check_in()


class OtherSecret(RawDevice):
    def check_in(self):
        super().check_in()
        self.player.secret = bytes(32)


class OtherRun(RawDevice):
    def check_in(self):
        super().check_in()
        self.player.run = "another"


class OtherId(RawDevice):
    def check_in(self):
        super().check_in()
        self.player.device = "another"


class NoCheckIn(RawDevice):
    def check_in(self):
        pass


class NoSecondCheckIn(RawDevice):
    def next_ask(self):
        try:
            return super().next_ask()
        except grpc.RpcError:
            return super().next_ask()

    def check_in(self):
        if not self.player.ask.round:
            super().check_in()


class OtherProfile(RawDevice):
    def profile(self):
        profile = super().profile()
        profile.classes = 4
        return profile


class LongPoll(RawDevice):
    def wait_seconds(self):
        return 61.0


class Impatient(RawDevice):
    def pause(self, seconds):
        pass


class AnyStep(RawDevice):
    steps = ("train", "deliver", "conformance-unknown")


class OtherDownload(RawDevice):
    def download(self, ask):
        self.player.download(bytes(32))


class Credulous(RawDevice):
    def check_digest(self, ask, found):
        pass


class Declines(RawDevice):
    steps = ("deliver",)


class NoStatus(RawDevice):
    def first_byte(self):
        return 0


class FromTheStart(RawDevice):
    def first_byte(self):
        return min(super().first_byte(), 0)


class NoHeader(RawDevice):
    def upload(self, payload):
        self.player.status()
        self.player.send([])


class OtherName(RawDevice):
    def given(self):
        return {**super().given(), "name": self.player.name(payload=bytes(32))}


class EarlierAttempt(RawDevice):
    def handle(self, ask):
        ask.first_attempt = 1
        super().handle(ask)


class MoreSamples(RawDevice):
    def given(self):
        return {"samples": SAMPLES + 1}


class Changing(RawDevice):
    uploads = 0

    def header(self, payload):
        self.uploads += 1
        header = super().header(payload)
        header.parts.parts[0].model_parameters.scope = f"version {self.uploads}"
        return header


class IgnoresReceipts(RawDevice):
    def first_byte(self):
        return self.player.status().next_byte


class IgnoresTheEnd(RawDevice):
    def first_byte(self):
        return max(super().first_byte(), 0)


class DeliversParts(RawDevice):
    def payload(self, ask, model):
        return payload_of(model)


class Trained(RawDevice):
    """Changes the answer to `train`."""

    def payload(self, ask, model):
        return self.trained(model) if ask.step == "train" else super().payload(ask, model)

    def trained(self, model: ModelParameters) -> Payload:
        raise NotImplementedError


class TwoParts(Trained):
    def trained(self, model):
        return encode({"parameters": model, "another": model})


class OtherTensors(Trained):
    def trained(self, model):
        return payload_of(replace(model, parameters={"weight": model.parameters["weight"]}))


class NotFinite(Trained):
    def trained(self, model):
        bias = np.full(3, np.nan, np.float32)
        return payload_of(replace(model, parameters={**model.parameters, "bias": bias}))


class OtherSize(RawDevice):
    def header(self, payload):
        header = super().header(payload)
        header.data_bytes += 4
        return header


class OtherDigest(RawDevice):
    def header(self, payload):
        header = super().header(payload)
        header.sha256 = bytes(32)
        return header


class Changed(RawDevice):
    """Changes the first chunk."""

    def change(self, chunk: Any) -> None:
        raise NotImplementedError

    def chunks(self, payload, first_byte):
        result = super().chunks(payload, first_byte)
        self.change(result[0])
        return result


class Gap(Changed):
    def change(self, chunk):
        chunk.offset += 4


class OtherCrc(Changed):
    def change(self, chunk):
        chunk.crc32c ^= 1


class Compressed(Changed):
    def change(self, chunk):
        chunk.compression = 1


class GoesOn(RawDevice):
    def after_the_end(self):
        self.player.next_ask(0)


FAULTY = {
    ShortSecret: "secret",
    OtherSecret: "secret",
    OtherRun: "run",
    OtherId: "id",
    NoCheckIn: "check-in.first",
    NoSecondCheckIn: "check-in.again",
    OtherProfile: "profile",
    LongPoll: "wait",
    Impatient: "pause",
    AnyStep: "decline",
    OtherDownload: "download.known",
    Credulous: "download.digest",
    Declines: "answers",
    NoStatus: "upload.status",
    FromTheStart: "upload.first_byte",
    NoHeader: "upload.header",
    OtherName: "upload.name",
    EarlierAttempt: "upload.attempt",
    MoreSamples: "upload.samples",
    Changing: "upload.same",
    IgnoresReceipts: "upload.receipt",
    IgnoresTheEnd: "upload.closed",
    DeliversParts: "upload.empty",
    TwoParts: "parts",
    OtherTensors: "tensors",
    NotFinite: "finite",
    OtherSize: "header",
    OtherDigest: "digest",
    Gap: "chunks.place",
    OtherCrc: "chunks.crc",
    Compressed: "chunks.compression",
    GoesOn: "finished",
}
ALSO = {
    Impatient: ("upload.later",),
    Changing: ("digest",),
    TwoParts: ("tensors",),
    IgnoresReceipts: ("upload.closed",),
    IgnoresTheEnd: ("upload.receipt",),
    NoStatus: ("upload.first_byte", "upload.receipt", "upload.closed"),
}
"""Further rules that such a device breaks."""


@pytest.mark.long
@pytest.mark.parametrize("device", FAULTY, ids=lambda device: device.__name__)
def test_a_faulty_device_fails_the_check_of_its_rule(device: type[RawDevice]) -> None:
    report = played(lambda address: device(address).run())
    assert FAULTY[device] in failed(report), str(report)
    assert set(failed(report)) <= {FAULTY[device], *ALSO.get(device, ()), "answers"}, "a device may end early"
