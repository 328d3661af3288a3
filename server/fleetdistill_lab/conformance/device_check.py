"""Plays a server against one device: a scripted run of FedAvg with one fault per round."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import google_crc32c
import grpc
from grpc_status import rpc_status

from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import Code, rich_status
from fleetdistill.wire.payload import chunks
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2, service_pb2_grpc
from fleetdistill_lab.conformance.received import ReceivedAnswer
from fleetdistill_lab.conformance.rules import DEVICE_RULES, Report
from fleetdistill_lab.conformance.script import RUN, SCENES, Scene, contract, payload

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PAUSE_SECONDS = 0.2
_LATER_SECONDS = 0.3
_LEASE_SECONDS, _BEAT_SECONDS = 60.0, 15.0
_NOT_ANSWERED = {"unknown-step": "decline", "download-digest": "download.digest", "late": "upload.closed"}
_ROUNDING_SECONDS = 0.02  # of the clocks of two processes
_CUT_BYTES = 30  # of the 60 bytes of an answer, within its first tensor


@dataclass
class Act:
    """What has happened in a round.

    Attributes:
        scene: The ask and its fault.
        number: Number of the round.
        payload: Payload of the ask.
        answer: The current attempt.
        done: Whether the ask is closed.
        faulted: Whether the fault has happened.
        attempt: Number of the current attempt; 0 before the first call.
        next_byte: Offset in the last reply to `UploadStatus`, until an upload uses it; None if there is none.
        not_before: Earliest time of the next upload, on the monotonic clock.
        downloads: Number of downloads of the payload.
        sent_bytes: Tensor bytes sent in the downloads.
        receipt: The receipt; without an id before the answer is complete.
    """

    scene: Scene
    number: int
    payload: Payload
    answer: ReceivedAnswer
    done: bool = False
    faulted: bool = False
    attempt: int = 0
    next_byte: int | None = None
    not_before: float = 0.0
    downloads: int = 0
    sent_bytes: int = 0
    receipt: service_pb2.Receipt = field(default_factory=service_pb2.Receipt)


class ListeningServer(service_pb2_grpc.DeviceServiceServicer):
    """Serves the scripted run to the first device that checks in, and checks everything that it sends.

    Args:
        address: `"host:port"` to listen on; port 0 for a free one. Plain text.

    Attributes:
        report: Result of the checks so far.
        address: `"host:port"` on which the server listens.

    Raises:
        LinkError: The address cannot be used.
    """

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.report = Report(DEVICE_RULES)
        self._expect = self.report.expect
        self._contract = contract()
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._identity: service_pb2.Identity | None = None
        self._profile = contract_pb2.DeviceProfile()
        self._paused_until: float | None = None
        self._checked_in_again = False
        self._acts = [self._act(number, scene) for number, scene in enumerate(SCENES, start=1)]
        self._server = grpc.server(ThreadPoolExecutor(8))
        service_pb2_grpc.add_DeviceServiceServicer_to_server(self, self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise LinkError(f"cannot listen on {address}; is the port in use?") from error
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def _act(self, number: int, scene: Scene) -> Act:
        return Act(scene, number, payload(number), ReceivedAnswer(self.report, scene.step))

    def wait(self, seconds: float = 300.0, quiet_seconds: float = 1.0) -> Report:
        """Waits for the end of the run, then for further calls, and stops the server.

        Args:
            seconds: Maximum time for the run.
            quiet_seconds: Time after the end in which the device must not call.

        Returns:
            The report; rules that the run did not reach are not checked.
        """
        if self._ended.wait(seconds):
            time.sleep(quiet_seconds)
        self.close()
        with self._lock:
            self._check_end()
        return self.report

    def close(self) -> None:
        """Stops the server."""
        self._server.stop(0).wait()

    def _check_end(self) -> None:
        for act in self._acts:
            if act.scene.answered:
                self._expect("answers", act.done, f"no answer in round {act.number}")
        if self._ended.is_set():
            self._expect("finished", True)

    @property
    def _current(self) -> Act | None:
        return next((act for act in self._acts if not act.done), None)

    # --- check-in and asks

    def CheckIn(self, request: service_pb2.CheckInRequest, context: Any) -> service_pb2.CheckInResponse:
        with self._lock:
            identity = request.identity
            self._expect("id", _NAME.fullmatch(identity.device), f"the id {identity.device[:70]!r}")
            response = service_pb2.CheckInResponse(
                contract=self._contract, lease_seconds=_LEASE_SECONDS, heartbeat_seconds=_BEAT_SECONDS
            )
            if request.HasField("profile"):
                self._take_profile(request.profile)
                response.secret = self._admit(identity, context)
            return response

    def _admit(self, identity: service_pb2.Identity, context: Any) -> bytes:
        """Registers the device, or compares it with the registered one; returns a new secret if it has none."""
        self._not_after_the_end("CheckIn")
        if self._identity is not None:
            self._checked_in_again = True
            self._authenticate(identity, context, "CheckIn")
            return b""
        self._identity = service_pb2.Identity(run=RUN, device=identity.device, secret=identity.secret)
        if not identity.secret:
            self._identity.secret = secrets.token_bytes(32)
            return self._identity.secret
        self._expect("secret", len(identity.secret) == 32, f"a secret of {len(identity.secret)} bytes")
        return b""

    def _take_profile(self, profile: contract_pb2.DeviceProfile) -> None:
        terms, columns = self._contract, self._contract.requirements.columns
        fits = {
            "classes": profile.classes == len(terms.classes),
            "input_shape": profile.input_shape == terms.input_shape,
            "knowledge_types": terms.knowledge_type in profile.knowledge_types,
            "samples": profile.samples >= 1,
            "allowed_columns": set(columns) <= set(profile.allowed_columns),
            "model_fingerprint": profile.model_fingerprint == terms.model_fingerprint,
            "size": profile.ByteSize() <= 64 << 10 and len(profile.data_version) <= 32,
        }
        wrong = [name for name, ok in fits.items() if not ok]
        self._expect("profile", not wrong, f"other {', '.join(wrong)}")
        self._profile = profile

    def _authenticate(self, identity: service_pb2.Identity, context: Any, call: str) -> None:
        """Compares a caller with the registered device; rejects another one."""
        known = self._identity
        if not self._expect("check-in.first", known is not None, f"{call} before a check-in"):
            self._refuse(context, Code.BAD_IDENTITY, "the device has not checked in", check_in="again")
        assert known is not None
        self._expect("id", identity.device == known.device, f"the id {identity.device[:70]!r} after {known.device!r}")
        self._expect("run", identity.run in ("", RUN), f"the run {identity.run[:70]!r}")
        if not self._expect("secret", identity.secret == known.secret, f"another secret in {call}"):
            self._refuse(context, Code.BAD_IDENTITY, "the device has another secret")

    def _not_after_the_end(self, call: str) -> None:
        if self._ended.is_set():
            self._expect("finished", False, f"{call} after finished")

    def NextAsk(self, request: service_pb2.NextAskRequest, context: Any) -> service_pb2.NextAskResponse:
        with self._lock:
            self._not_after_the_end("NextAsk")
            self._authenticate(request.identity, context, "NextAsk")
            self._expect("wait", 0 <= request.wait_seconds <= 60, f"wait_seconds {request.wait_seconds:g}")
            if self._paused_until is None:
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
                pause = service_pb2.ComeBack(after_seconds=_PAUSE_SECONDS, before_seconds=2 * _PAUSE_SECONDS)
                return service_pb2.NextAskResponse(come_back=pause)
            early = self._paused_until - time.monotonic()
            self._expect("pause", early <= _ROUNDING_SECONDS, f"a call {early:.2f} s too early")
            self._paused_until = 0.0
            return self._next(context)

    def _next(self, context: Any) -> service_pb2.NextAskResponse:
        act = self._current
        if act is None:
            self._ended.set()
            return service_pb2.NextAskResponse(finished="finished: the conformance test is over")
        if act.scene.fault == "check-in" and not act.faulted:
            act.faulted, self._checked_in_again = True, False
            self._refuse(context, Code.BAD_IDENTITY, "the server was restored from a backup", check_in="again")
        if act.scene.fault == "check-in":
            self._expect("check-in.again", self._checked_in_again, "NextAsk without a check-in")
        return service_pb2.NextAskResponse(ask=self._ask(act))

    def _ask(self, act: Act) -> service_pb2.Ask:
        return service_pb2.Ask(
            round=act.number,
            step_number=1,
            step=act.scene.step,
            payload=act.payload.sha256,
            payload_bytes=act.payload.data_bytes,
            seed=act.number,
            deadline_seconds=600,
            completed_rounds=act.number - 1,
            first_attempt=act.scene.first_attempt,
        )

    def Heartbeat(self, request: service_pb2.HeartbeatRequest, context: Any) -> service_pb2.HeartbeatResponse:
        with self._lock:
            self._authenticate(request.identity, context, "Heartbeat")
            return service_pb2.HeartbeatResponse(ask_open=self._current is not None)

    def Leave(self, request: service_pb2.LeaveRequest, context: Any) -> service_pb2.LeaveResponse:
        with self._lock:
            self._authenticate(request.identity, context, "Leave")
            return service_pb2.LeaveResponse()

    def Decline(self, request: service_pb2.DeclineRequest, context: Any) -> service_pb2.DeclineResponse:
        with self._lock:
            self._not_after_the_end("Decline")
            self._authenticate(request.identity, context, "Decline")
            act = self._current
            if act is None:
                return service_pb2.DeclineResponse()
            named = (request.round, request.step_number) == (act.number, 1)
            rule = _NOT_ANSWERED.get(act.scene.fault, "answers")
            text = f"round {request.round}, step {request.step_number} is declined: {request.reason[:200]}"
            self._expect(rule, named and rule != "answers", text)
            act.done = True
            return service_pb2.DeclineResponse()

    # --- downloads

    def Download(self, request: service_pb2.DownloadRequest, context: Any) -> Iterator[service_pb2.DownloadResponse]:
        with self._lock:
            self._not_after_the_end("Download")
            self._authenticate(request.identity, context, "Download")
            act = next((act for act in self._acts if act.payload.sha256 == request.sha256), None)
            if not self._expect("download.known", act is not None, f"the digest {request.sha256.hex()[:16]}"):
                self._refuse(context, Code.NOT_FOUND, "no such payload")
            assert act is not None
            act.downloads += 1
            self._check_download(act, request.first_byte)
            header = act.payload.header()
            result = list(chunks(act.payload.source, act.payload.slots, request.first_byte))
        yield service_pb2.DownloadResponse(header=header)
        yield from self._damaged(act, result, context)

    def _check_download(self, act: Act, first_byte: int) -> None:
        fault = act.scene.fault
        if fault == "download-cut" and act.downloads > 1:
            self._expect("download.resume", first_byte <= act.sent_bytes, f"byte {first_byte} after {act.sent_bytes}")
        if fault == "download-crc" and act.downloads > 1:
            self._expect("download.crc", True)

    def _damaged(self, act: Act, found: list[Any], context: Any) -> Iterator[service_pb2.DownloadResponse]:
        """Yields the chunks of a payload with the fault of its round."""
        first = act.downloads == 1
        fault = act.scene.fault
        for number, one in enumerate(found):
            data = bytes(one.data)
            crc = one.crc32c
            if fault == "download-digest" and number == 0:
                data = bytes([data[0] ^ 1]) + data[1:]
                crc = google_crc32c.value(data)
            if fault == "download-crc" and first and number == 0:
                crc ^= 1
            chunk = knowledge_pb2.Chunk(offset=one.offset, data=data, crc32c=crc)
            yield service_pb2.DownloadResponse(chunk=chunk)
            act.sent_bytes += len(data)
            if fault == "download-cut" and first:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is interrupted (conformance test)")

    # --- uploads

    def UploadStatus(self, request: service_pb2.UploadStatusRequest, context: Any) -> service_pb2.UploadStatusResponse:
        with self._lock:
            self._not_after_the_end("UploadStatus")
            self._authenticate(request.identity, context, "UploadStatus")
            act = self._named(request.name, context)
            act.next_byte = len(act.answer.data)
            if act.receipt.id:
                if act.scene.fault == "receipt-lost":
                    self._expect("upload.receipt", True)
                act.done = True
                return service_pb2.UploadStatusResponse(receipt=act.receipt)
            if act.scene.fault == "late":
                act.done = True
                self._expect("upload.closed", True)
                return service_pb2.UploadStatusResponse(closed_code="late", closed_text="the deadline has passed")
            return service_pb2.UploadStatusResponse(ask_open=True, next_byte=act.next_byte)

    def _named(self, name: service_pb2.UploadName, context: Any) -> Act:
        """Returns the round that an upload names, and checks the name."""
        act = next((act for act in self._acts if act.number == name.round), None)
        ok = act is not None and name.step_number == 1 and name.payload == act.payload.sha256
        if not self._expect("upload.name", ok, f"round {name.round}, step {name.step_number}, or another payload"):
            self._refuse(context, Code.NOT_ASKED, "the device has no such ask")
        assert act is not None
        least = act.scene.first_attempt
        self._expect("upload.attempt", name.attempt >= least, f"attempt {name.attempt}, expected at least {least}")
        if name.attempt != act.attempt:
            act.attempt, act.answer = name.attempt, ReceivedAnswer(self.report, act.scene.step)
        return act

    def Upload(self, request_iterator: Iterator[service_pb2.UploadRequest], context: Any) -> service_pb2.UploadResponse:
        first = next(request_iterator, service_pb2.UploadRequest())
        with self._lock:
            self._not_after_the_end("Upload")
            if not self._expect("upload.header", first.HasField("header"), "a stream without a header"):
                self._refuse(context, Code.BAD_MESSAGE, "a stream must begin with its header")
            header = first.header
            self._authenticate(header.identity, context, "Upload")
            act = self._named(header.name, context)
            if act.receipt.id:
                self._expect("upload.receipt", False, "an upload after the answer was complete")
                act.done = True
                return service_pb2.UploadResponse(receipt=act.receipt)
            self._check_header(act, header, context)
            self._check_again(act)
        return self._receive(act, request_iterator, context)

    def _check_header(self, act: Act, header: service_pb2.UploadHeader, context: Any) -> None:
        if act.scene.fault in _NOT_ANSWERED:
            self._expect(_NOT_ANSWERED[act.scene.fault], False, f"an answer to the ask of round {act.number}")
            act.done = True
            self._refuse(context, Code.CLOSED, "the ask accepts no answer")
        self._expect("upload.status", act.next_byte is not None, "an upload without UploadStatus")
        held = len(act.answer.data)
        act.next_byte = None
        ok = self._expect("upload.first_byte", header.first_byte == held, f"{header.first_byte}, expected {held}")
        most = self._profile.samples
        self._expect("upload.samples", 1 <= header.samples <= most, f"{header.samples}, the profile has {most}")
        if not ok:
            self._refuse(context, Code.OUT_OF_STEP, "the upload does not continue at the server's offset")
        if not act.answer.take_header(header.payload):
            act.done = True
            self._refuse(context, Code.BAD_MESSAGE, "the header is invalid")

    def _check_again(self, act: Act) -> None:
        """Checks an upload after the fault of its round."""
        if not act.faulted:
            return
        if act.scene.fault == "upload-cut":
            self._expect("upload.resume", True)
        if act.scene.fault == "checksum":
            self._expect("upload.checksum", True)
        if act.scene.fault == "too-many":
            early = act.not_before - time.monotonic()
            self._expect("upload.later", early <= _ROUNDING_SECONDS, f"an upload {early:.2f} s too early")

    def _receive(
        self, act: Act, stream: Iterator[service_pb2.UploadRequest], context: Any
    ) -> service_pb2.UploadResponse:
        fault = "" if act.faulted else act.scene.fault
        if fault == "too-many":
            act.faulted, act.not_before = True, time.monotonic() + _LATER_SECONDS
            self._refuse(context, Code.TOO_MANY, "too many uploads", after_seconds=str(_LATER_SECONDS))
        assert act.answer.header is not None
        size = act.answer.header.data_bytes
        correct = act.answer.take_chunks(stream, _CUT_BYTES if fault == "upload-cut" else size)
        if not correct:
            act.done = True
            self._refuse(context, Code.BAD_MESSAGE, "a chunk is invalid")
        if fault == "upload-cut":
            act.faulted = True
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is interrupted (conformance test)")
        if fault == "checksum":
            act.faulted, act.answer.data = True, b""
            self._refuse(context, Code.CHECKSUM, "bytes were changed in transit")
        return self._accept(act, context)

    def _accept(self, act: Act, context: Any) -> service_pb2.UploadResponse:
        header = act.answer.header
        assert header is not None
        if not act.answer.is_complete:
            text = f"the stream ended after {len(act.answer.data)} of {header.data_bytes} bytes"
            self._expect("chunks.place", False, text)
            act.done = True
            self._refuse(context, Code.BAD_MESSAGE, text)
        act.answer.check()
        name = service_pb2.UploadName(round=act.number, step_number=1, attempt=act.attempt)
        act.receipt = service_pb2.Receipt(
            id=secrets.token_hex(16),
            name=name,
            sha256=header.sha256,
            data_bytes=header.data_bytes,
            received_at_ms=int(time.time() * 1000),
        )
        if act.scene.fault == "receipt-lost" and not act.faulted:
            act.faulted = True
            context.abort(grpc.StatusCode.UNAVAILABLE, "the reply is lost (conformance test)")
        act.done = True
        return service_pb2.UploadResponse(receipt=act.receipt)

    def _refuse(self, context: Any, code: Code, text: str, **details: str) -> NoReturn:
        context.abort_with_status(rpc_status.to_status(rich_status(RefusedError(code, text, details))))
        raise AssertionError("abort_with_status raises")
