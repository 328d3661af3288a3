"""Plays devices against a server: conforming calls, and calls that violate one rule each.

The run is one round of FedAvg, because its answers can be made without training: a device sends back what it received.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import google_crc32c
import grpc

from fleetdistill.errors import ConfigurationError, RefusedError
from fleetdistill.knowledge import ModelParameters
from fleetdistill.link.grpc_link import errors_of
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.codes import Code, status_of
from fleetdistill.wire.digests import digest
from fleetdistill.wire.payload import CHUNK_BYTES, chunk_data
from fleetdistill.wire.v1 import contract_pb2, service_pb2, service_pb2_grpc
from fleetdistill_lab.conformance.faulty_answers import FAULTY_ANSWERS
from fleetdistill_lab.conformance.player import (
    SAMPLES,
    Player,
    answer_from,
    chunks_of,
    messages,
    payload_of,
    refusal_of,
)
from fleetdistill_lab.conformance.rules import SERVER_RULES, Report

_WELL, _RESUMES, _GAP, _CRC, _DIGEST, _DECLINES, _LEAVES = (
    "well",
    "resumes",
    "gap",
    "crc",
    "digest",
    "declines",
    "leaves",
)
_PLAYERS = (_WELL, _RESUMES, _GAP, _CRC, _DIGEST, _DECLINES, _LEAVES, *FAULTY_ANSWERS)
RUN_TOML = f"""[run]
name = "conformance"
method = "fedavg"
rounds = 1
min_devices = {len(_PLAYERS)}
quorum = 0.01

[contract]
classes = 10
input_shape = [1, 8, 8]

[model]
extractor = ""
server = ""
device = "digits_linear"
"""
"""The run that a server must serve, from an empty store."""
_WAIT_SECONDS = 5.0
_OTHER = bytes(32)


def check_server(address: str, seconds: float = 300.0) -> Report:
    """Checks a server that serves the run `RUN_TOML` in plain text.

    Args:
        address: `"host:port"` of the server.
        seconds: Maximum time to wait for the round and for its end.

    Returns:
        The report. Rules that the run did not reach are not checked.

    Raises:
        LinkError: The server is unavailable.
        ConfigurationError: The server does not serve such a run, or asks nothing of the devices.
    """
    with grpc.insecure_channel(address) as channel:
        check = _ServerCheck(service_pb2_grpc.DeviceServiceStub(channel), time.monotonic() + seconds)
        try:
            with errors_of(address):
                check.run()
        except RefusedError as refusal:
            check.report.expect("conforming", False, f"{refusal.code}: {refusal}")
    return check.report


class _ServerCheck:
    def __init__(self, stub: Any, until: float) -> None:
        self.report = Report(SERVER_RULES)
        self._expect = self.report.expect
        self._stub, self._until = stub, until
        self._tag = secrets.token_hex(4)
        self._contract = contract_pb2.Contract()
        self._model = ModelParameters(parameters={})

    def run(self) -> None:
        self._check_contract()
        self._check_identities()
        self._check_profiles()
        players = {name: self._joined(name) for name in _PLAYERS}
        for player in players.values():
            player.ask = self._ask_of(player)
        self._check_payload(players[_WELL])
        for name, (send, code) in FAULTY_ANSWERS.items():
            player = players[name]
            self._refused(name, partial(send, player, self._model, self._contract), code)
            self._check_closed("final", player)
        self._check_streams(players)
        self._check_well_behaved(players[_WELL])
        for name, player in players.items():
            if name != _WELL:
                player.leave()
        self._finish(players[_WELL])
        self._expect("conforming", True)

    # --- check-in

    def _player(self, name: str, **options: Any) -> Player:
        return Player(self._stub, f"{name}-{self._tag}", run=self._contract.run, **options)

    def _check_contract(self) -> None:
        result = self._when_ready()
        self._contract = result.contract
        if self._contract.method != "fedavg" or not self._contract.uploads:
            raise ConfigurationError(
                f"the server has a run of {self._contract.method!r}; serve the run that "
                "`python -m fleetdistill_lab.conformance --run-toml` prints"
            )
        self._expect("contract", result.contract.run and not result.secret, "no contract, or a secret")

    def _when_ready(self) -> service_pb2.CheckInResponse:
        """Requests the contract until the server has prepared its run."""
        new = self._player("new")
        while time.monotonic() < self._until:
            refusal, _ = refusal_of(lambda: new.check_in(None))
            if refusal is None or refusal.code != Code.NOT_READY:
                break
            time.sleep(0.2)
        return new.check_in(None)

    def _profile(self, **changes: Any) -> contract_pb2.DeviceProfile:
        contract = self._contract
        profile = contract_pb2.DeviceProfile(
            model_name="conformance",
            model_fingerprint=contract.model_fingerprint,
            extractor_fingerprint=contract.extractor_fingerprint,
            samples=SAMPLES,
            classes=len(contract.classes),
            input_shape=contract.input_shape,
            features=contract.features,
            knowledge_types=[contract.knowledge_type],
            allowed_columns=contract.requirements.columns,
        )
        for field, value in changes.items():
            profile.ClearField(field)  # type: ignore[arg-type]
            profile.MergeFrom(contract_pb2.DeviceProfile(**{field: value}))
        return profile

    def _check_identities(self) -> None:
        unknown = self._player("unknown")
        refusal = self._refused("id.unknown", lambda: unknown.next_ask(0), Code.BAD_IDENTITY)
        self._expect("id.unknown", "check_in" in refusal, "the metadata have no check_in")
        malformed = self._player("a b")
        self._refused("id.malformed", lambda: malformed.check_in(self._profile()), Code.BAD_IDENTITY)
        elsewhere = Player(self._stub, "elsewhere", run=f"no-{self._tag}")
        self._refused("run.unknown", lambda: elsewhere.check_in(None), Code.UNKNOWN_RUN)

    def _check_profiles(self) -> None:
        column = contract_pb2.NamedShape(name="c" * 256, shape=[1])
        faulty: dict[str, tuple[dict[str, Any], Code]] = {
            "profile.classes": ({"classes": len(self._contract.classes) + 1}, Code.CONTRACT_MISMATCH),
            "profile.input_shape": ({"input_shape": [*self._contract.input_shape, 1]}, Code.CONTRACT_MISMATCH),
            "profile.knowledge_types": ({"knowledge_types": []}, Code.CONTRACT_MISMATCH),
            "profile.samples": ({"samples": 0}, Code.CONTRACT_MISMATCH),
            "profile.fingerprint": ({"model_fingerprint": "0" * 64}, Code.CONTRACT_MISMATCH),
            "profile.columns": ({"allowed_columns": []}, Code.COLUMN_NOT_ALLOWED),
            "profile.size": ({"features": [column] * 300}, Code.TOO_LARGE),
            "profile.names": ({"model_name": "m" * 129}, Code.TOO_LARGE),
            "profile.data_version": ({"data_version": bytes(33)}, Code.BAD_MESSAGE),
        }
        for name, (changes, code) in faulty.items():
            player = self._player(name)
            profile = self._profile(**changes)
            self._refused(name, partial(player.check_in, profile), code)

    def _joined(self, name: str) -> Player:
        """Returns a device that has checked in; `_WELL` lets the server create its secret."""
        player = self._player(name, **({"secret": b""} if name == _WELL else {}))
        result = player.check_in(self._profile())
        if name == _WELL:
            self._expect("secret.new", len(result.secret) == 32, f"a secret of {len(result.secret)} bytes")
            player.secret = result.secret
            self._check_joined(player, result)
        else:
            self._expect("secret.own", not result.secret, f"a secret of {len(result.secret)} bytes")
        return player

    def _check_joined(self, player: Player, found: service_pb2.CheckInResponse) -> None:
        times = found.heartbeat_seconds, found.lease_seconds
        ok = all(map(math.isfinite, times)) and 0 < times[0] <= times[1]
        self._expect("check-in.times", ok, f"heartbeat_seconds {times[0]:g}, lease_seconds {times[1]:g}")
        again = player.check_in(self._profile())
        self._expect("check-in.again", again.contract == found.contract and not again.secret, "another reply")
        thief = Player(self._stub, player.device, player.run)
        for call in (lambda: thief.check_in(self._profile()), lambda: thief.next_ask(0)):
            refusal = self._refused("secret.other", call, Code.BAD_IDENTITY)
            self._expect("secret.other", "check_in" not in refusal, "the metadata have check_in")

    # --- asks and payloads

    def _ask_of(self, player: Player) -> service_pb2.Ask:
        result = self._next(player, "ask")
        ask = result.ask
        ok = ask.round and ask.step_number and ask.step and ask.first_attempt and ask.deadline_seconds > 0
        self._expect("ask", ok, f"the ask {ask}")
        return ask

    def _next(self, player: Player, wanted: str) -> service_pb2.NextAskResponse:
        """Calls until the reply is an ask or the end; one of them is wanted."""
        while time.monotonic() < self._until:
            result = player.next_ask(_WAIT_SECONDS)
            kind = result.WhichOneof("next")
            if kind != "come_back":
                if kind != wanted:
                    raise ConfigurationError(f"{player.device} got {kind!r}, expected {wanted!r}; use a new store")
                return result
            time.sleep(max(result.come_back.after_seconds, 0.05))
        raise ConfigurationError(
            f"{player.device} got no {wanted!r}; the run must have min_devices = {len(_PLAYERS)} and no other devices"
        )

    def _check_payload(self, player: Player) -> None:
        header, chunks = player.download(player.ask.payload)
        data = b"".join(map(chunk_data, chunks))
        model = answer_from(header, data)
        if model is None or player.ask.step != "train":
            raise ConfigurationError(f"the ask of {player.device} is not FedAvg's step 'train' with a model")
        self._model = model
        ok = header.sha256 == player.ask.payload and header.data_bytes == len(data) == player.ask.payload_bytes
        ok = ok and digest(header.parts, iter([data])) == player.ask.payload
        self._expect("download", ok, "another digest or size")
        self._check_chunks(chunks)
        _, rest = player.download(player.ask.payload, 7)
        self._expect("download.resume", b"".join(map(chunk_data, rest)) == data[7:], "other bytes")
        self._refused("download.unknown", lambda: player.download(_OTHER), Code.NOT_FOUND)

    def _check_chunks(self, chunks: list[Any]) -> None:
        at = 0
        for chunk in chunks:
            size = len(chunk_data(chunk))
            ok = google_crc32c.value(chunk.data) == chunk.crc32c and 1 <= size <= CHUNK_BYTES and chunk.offset == at
            self._expect("download.chunks", ok, f"a chunk of {size} bytes at {chunk.offset}, expected byte {at}")
            at += size

    # --- uploads

    def _check_streams(self, players: dict[str, Player]) -> None:
        self._check_resume(players[_RESUMES])
        self._check_stays_open(players[_GAP], "chunks.gap", Code.OUT_OF_STEP, _with_gap)
        self._check_stays_open(players[_CRC], "chunks.crc", Code.CHECKSUM, _with_wrong_crc)
        self._check_stays_open(players[_DIGEST], "digest", Code.CHECKSUM, _with_wrong_digest)
        declines, leaves = players[_DECLINES], players[_LEAVES]
        self._expect("heartbeat", declines.heartbeat(), "no open ask, although the device has one")
        declines.decline()
        declines.decline()
        self._expect("heartbeat", not declines.heartbeat(), "an open ask, although the device has declined it")
        self._check_closed("decline", declines)
        leaves.leave()
        self._check_closed("leave", leaves)

    def _check_resume(self, player: Player) -> None:
        payload = payload_of(self._model)
        half = chunks_of(payload, size=512)[:2]
        sent = sum(len(item.data) for item in half)
        name = "resume.incomplete"
        self._refused(name, lambda: player.upload(payload.header(), half), Code.INCOMPLETE)
        status = player.status()
        ok = status.ask_open and 0 <= status.next_byte <= sent
        self._expect(name, ok, f"ask_open {status.ask_open}, next_byte {status.next_byte} after {sent} bytes")
        rest = chunks_of(payload, status.next_byte)
        receipt = player.upload(payload.header(), rest, first_byte=status.next_byte)
        self._expect("resume", receipt.sha256 == payload.sha256, "a receipt with another digest")

    def _check_stays_open(
        self, player: Player, name: str, code: Code, make: Callable[[Payload], tuple[Any, list[Any]]]
    ) -> None:
        payload = payload_of(self._model)
        header, chunks = make(payload)
        self._refused(name, lambda: player.upload(header, chunks), code)
        status = player.status()
        if not self._expect(name, status.ask_open, "the ask is closed"):
            return
        receipt = player.upload(payload.header(), chunks_of(payload, status.next_byte), first_byte=status.next_byte)
        self._expect(name, receipt.sha256 == payload.sha256, "the answer is not accepted afterwards")

    def _check_well_behaved(self, player: Player) -> None:
        payload = payload_of(self._model)
        again = player.next_ask(0).ask
        self._expect("ask.again", again.payload == player.ask.payload and again.round == player.ask.round, "no ask")
        status = player.status()
        ok = status.ask_open and not status.next_byte and not status.HasField("receipt")
        self._expect("status.new", ok, f"the status {status}")
        self._check_before_the_answer(player, payload)
        receipt = player.upload(payload.header(), chunks_of(payload))
        named = receipt.name.attempt == player.ask.first_attempt and receipt.received_at_ms > 0
        same = receipt.sha256 == payload.sha256 and receipt.data_bytes == payload.data_bytes
        self._expect("receipt", receipt.id and named and same, f"the receipt {receipt}")
        self._expect("status.receipt", player.status().receipt == receipt, "another receipt or none")
        self._expect("repeat", player.upload(payload.header(), chunks_of(payload)) == receipt, "another receipt")
        name = player.name(attempt=player.ask.first_attempt + 1)
        later = player.upload(payload.header(), chunks_of(payload), name=name)
        self._expect("repeat.attempt", later.id == receipt.id and later.name == receipt.name, "another receipt")

    def _check_before_the_answer(self, player: Player, payload: Payload) -> None:
        chunks = chunks_of(payload)
        header = payload.header()
        other, nothing = player.name(payload=_OTHER), player.name(round=1 << 40)
        self._refused("upload.other-ask", lambda: player.upload(header, chunks, name=other), Code.CLOSED)
        self._refused("upload.not-asked", lambda: player.upload(header, chunks, name=nothing), Code.NOT_ASKED)
        self._refused("resume.offset", lambda: player.upload(header, chunks, first_byte=8), Code.OUT_OF_STEP)
        self._refused("upload.no-header", lambda: player.send(messages(chunks)), Code.BAD_MESSAGE)
        first = service_pb2.UploadHeader(identity=player.identity, name=player.name(), payload=header, samples=SAMPLES)
        twice = [service_pb2.UploadRequest(header=first)] * 2
        self._refused("upload.two-headers", lambda: player.send(twice), Code.BAD_MESSAGE)
        for name in ("upload.other-ask", "resume.offset"):
            self._expect(name, player.status().ask_open, "the ask is closed")

    def _check_closed(self, name: str, player: Player) -> None:
        status = player.status()
        ok = not status.ask_open and status.closed_code and not status.HasField("receipt")
        self._expect(name, ok, f"ask_open {status.ask_open}, closed_code {status.closed_code!r}")

    def _finish(self, player: Player) -> None:
        """Answers the run's last step, which delivers the model, and waits for the end."""
        player.ask = self._ask_of(player)
        if player.ask.step == "deliver":
            player.upload(encode({}).header(), [])
        result = self._next(player, "finished")
        self._expect("finished", result.finished)

    def _refused(self, name: str, make: Callable[[], object], code: Code) -> dict[str, str]:
        """Expects an error with a code; returns its metadata."""
        refusal, status = refusal_of(make)
        result = refusal.code if refusal is not None else status
        self._expect(name, result == code, f"{result}, expected {code}")
        if status != "OK":
            ok = refusal is not None and status_of(refusal.code) == status
            self._expect("errors", ok, f"{result} with the status {status}")
        return refusal.details if refusal is not None else {}


def _with_gap(payload: Payload) -> tuple[Any, list[Any]]:
    chunks = chunks_of(payload, size=512)
    return payload.header(), [chunks[0], *chunks[2:]]


def _with_wrong_crc(payload: Payload) -> tuple[Any, list[Any]]:
    chunks = chunks_of(payload)
    chunks[0].crc32c ^= 1
    return payload.header(), chunks


def _with_wrong_digest(payload: Payload) -> tuple[Any, list[Any]]:
    header = payload.header()
    header.sha256 = _OTHER
    return header, chunks_of(payload)
