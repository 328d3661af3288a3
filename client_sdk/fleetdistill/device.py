"""The device SDK: embeds a device of the fleet in an app.

    device = Device(server="127.0.0.1:50051", model=make_model, data=(images, labels), state_dir="fleet-state")
    device.run()

A device always calls and never listens. It checks in, waits for asks, trains, and sends answers; everything it must
not lose is in its state directory, so it may be killed at any moment and goes on where it was. Importing this module
loads no torch; the model is built, from a factory if you give one, when the first ask needs it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from google.protobuf.message import DecodeError

from fleetdistill.errors import (
    CannotAnswer,
    ConfigurationError,
    ExportError,
    FleetDistillError,
    KnowledgeError,
    LinkError,
    RefusedError,
    StateError,
)
from fleetdistill.gate import check_may_leave
from fleetdistill.link import Link
from fleetdistill.storage import Pending, Storage
from fleetdistill.transfer import download
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.codes import Code, is_final
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from torch import nn

    from fleetdistill.knowledge import Kind
    from fleetdistill.methods.base import Answer
    from fleetdistill.worker import Worker

logger = logging.getLogger(__name__)

COLUMNS = ("features", "logits", "labels", "counts", "parameters", "gradients", "metrics")
"""Everything that an app can allow to leave the device."""
DEFAULT_COLUMNS = ("features", "logits", "counts", "parameters", "gradients", "metrics")
"""Allowed unless the app says otherwise: all but the labels of its samples."""

POLL_SECONDS = 20.0
_EXPORT_DUE = "model.onnx.due"
PROXY_FOLDER = "proxy"
_DEVICE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 15.0
_ATTEMPTS_TO_SEND = 5


class Step(StrEnum):
    """What one `Device.step` did."""

    ANSWERED = "answered"
    WAITED = "waited"
    FINISHED = "finished"


@dataclass(frozen=True)
class Event:
    """Something the app may want to show.

    Attributes:
        kind: checked-in, proxy, ask, scored, answered, refused, dropped, kept, delivered, exported, lost-contact or
            finished.
        round: Round it belongs to, 0 for none.
        text: One sentence.
        values: Counts and figures.
    """

    kind: str
    round: int
    text: str
    values: dict[str, Any] = field(default_factory=dict)


class Device:
    """One device of a fleet. Not to be used from several threads at once, but for `stop`.

    Args:
        server: `host:port` of the aggregation server, or a `Link`.
        model: The local model, or a function that builds it: a module with `extractor`, `features` and `predict`
            (see `fleetdistill.model.split_sequential`).
        data: Private training data: `(inputs, labels)` as tensors or numpy arrays, a map-style torch Dataset, or a
            function that returns one of these.
        state_dir: Directory of this device alone; keeps identity, model and what is under way.
        run: Name of the run; may be left out where the server has only one.
        device_id: 1 to 64 letters, digits, '-', '_' or '.'; by default a UUID that stays in `state_dir`.
        allow: What may leave the device, of `COLUMNS`. The default keeps labels back; FedDKC needs them, so an app
            that takes part in it says `allow=COLUMNS`.
            The number of samples leaves with every answer, the training loss with `metrics`; with `counts` beside it
            the figures of `test_data` and `validation_data` come by class, with the samples of each class.
        test_data: Data whose figures are reported to the server after each round.
        validation_data: Data that decide whether the app's model is replaced: it is not when its accuracy falls. The
            server is told which (a metric).
        model_name: Name of the model in the server's lists.
        export_onnx: Write `model.onnx` into `state_dir` after each round it delivers, only at the end, or never.
        torch_device: Where to train, such as "cpu" or "cuda".
        insecure: Allow plain text to a server that is not on this machine. There is no TLS yet: use a tunnel.
        on_event: Called with every `Event`, in the thread of `run`; what it raises ends the run.

    Raises:
        ConfigurationError: An argument is out of range.
        StateError: `state_dir` is in use, damaged, or of another run or id.
    """

    def __init__(
        self,
        *,
        server: str | Link,
        model: nn.Module | Callable[[], nn.Module],
        data: Any,
        state_dir: str | Path,
        run: str = "",
        device_id: str | None = None,
        allow: Sequence[str] = DEFAULT_COLUMNS,
        test_data: Any = None,
        validation_data: Any = None,
        model_name: str = "",
        export_onnx: Literal["round", "finish", "never"] = "round",
        torch_device: str = "cpu",
        on_event: Callable[[Event], None] | None = None,
        insecure: bool = False,
    ) -> None:
        _check_columns(allow)
        self._model, self._data = model, data
        self._test_data, self._validation_data = test_data, validation_data
        self._model_name, self._torch_device = model_name, torch_device
        self._allow, self._export_onnx = tuple(allow), export_onnx
        self._on_event = on_event or (lambda event: None)
        self._link = server if not isinstance(server, str) else _open_link(server, insecure)
        try:
            self._storage = Storage(Path(state_dir))
        except FleetDistillError:
            self._link.close()
            raise
        try:
            self._identity = self._load_identity(run, device_id)
        except FleetDistillError:
            self._storage.close()
            self._link.close()
            raise
        self._terms: service_pb2.CheckInResponse | None = None
        self._worker: Worker | None = None
        self._attempts: dict[tuple[int, int], int] = {}
        self._in_memory: Pending | None = None  # the answer whose state the worker holds
        self._stopped = threading.Event()
        self._closed = False

    @property
    def device_id(self) -> str:
        """This device's id in the fleet."""
        return self._identity.device

    @property
    def state_dir(self) -> Path:
        """Where the device keeps what it must not lose."""
        return self._storage.directory

    @property
    def model(self) -> nn.Module:
        """The model for the app to use: the one of the last delivered round, or the initial one. Loads torch."""
        return self._ready_worker().delivered_model()

    def run(self) -> None:
        """Takes part until the run is over or `stop` is called. Waits out a server that is away.

        Raises:
            RefusedError: The server will not have this device; the message says why and what to do.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        pause, trouble = _FIRST_PAUSE_SECONDS, ""
        while not self._stopped.is_set():
            try:
                if self.step() is Step.FINISHED:
                    return
                pause, trouble = _FIRST_PAUSE_SECONDS, ""
            except LinkError as error:
                if self._stopped.is_set():
                    return
                if str(error) != trouble:  # said once, not at every try
                    trouble = str(error)
                    self._tell("lost-contact", 0, f"{trouble}; the device keeps trying")
                self._stopped.wait(random.uniform(pause / 2, pause))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def step(self, wait_seconds: float = POLL_SECONDS) -> Step:
        """One turn: settles what is under way, asks for work, and does it.

        Args:
            wait_seconds: How long the server may hold the question when there is no work, 0 to 60.

        Raises:
            LinkError: The server is away; calling again later goes on.
            RefusedError: The server will not have this device.
        """
        try:
            return self._step(wait_seconds)
        except RefusedError as refusal:
            if refusal.code != Code.NOT_READY:
                raise
            raise LinkError(str(refusal)) from refusal

    def _step(self, wait_seconds: float) -> Step:
        if self._terms is None:
            self._check_in()
        pending = self._storage.pending()
        if pending is not None:
            self._settle(pending)
            return Step.ANSWERED
        self._export_due()
        response = self._link.next_ask(self._identity, wait_seconds)
        match response.WhichOneof("next"):
            case "ask":
                self._answer(response.ask)
                return Step.ANSWERED
            case "finished":
                return self._finish(response.finished)
            case _:
                pause = random.uniform(response.come_back.after_seconds, response.come_back.before_seconds)
                self._stopped.wait(pause)
                return Step.WAITED

    def stop(self) -> None:
        """Makes `run` return after the step it is in; may be called from another thread or a signal handler."""
        self._stopped.set()
        self._link.interrupt()

    def close(self) -> None:
        """Says goodbye to the server and releases the state directory."""
        if self._closed:
            return
        self._closed = True
        self._stopped.set()
        if self._terms is not None:
            with contextlib.suppress(LinkError, RefusedError):
                self._link.leave(self._identity)
        self._link.close()
        self._storage.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- identity and contract

    def _load_identity(self, run: str, device_id: str | None) -> service_pb2.Identity:
        saved = self._storage.load_identity()
        _check_belongs(self._storage.directory, saved, run, device_id)
        device = device_id or saved.get("device") or str(uuid.uuid4())
        if not _DEVICE_ID.fullmatch(device):
            raise ConfigurationError(f"device_id {device!r} must be 1 to 64 letters, digits, '-', '_' or '.'")
        identity = service_pb2.Identity(run=run or saved.get("run", ""), device=device, secret=_secret_in(saved))
        if not saved:  # kept before it is sent: a lost response must not lock the id for ever
            self._storage.save_identity(_identity_file(identity))
        return identity

    def _check_in(self) -> None:
        """Introduces the device; the profile of last time serves, so that an idle device needs no torch."""
        profile = _profile_in(self._storage.load("profile.bin"))
        if profile is None:
            terms = self._link.check_in(self._identity, None)
            profile = self._make_worker(terms.contract).profile(self._allow)
        else:
            del profile.allowed_columns[:]
            profile.allowed_columns.extend(self._allow)
        terms = self._link.check_in(self._identity, profile)
        self._identity.run = terms.contract.run
        self._save_identity(profile)
        self._terms = terms
        self._tell("checked-in", 0, f"{self.device_id} takes part in run {terms.contract.run!r}")

    def _save_identity(self, profile: contract_pb2.DeviceProfile) -> None:
        self._storage.save_identity(_identity_file(self._identity))
        self._storage.save("profile.bin", profile.SerializeToString())

    # --- work

    def _make_worker(self, contract: contract_pb2.Contract) -> Worker:
        from fleetdistill.worker import Worker

        if self._worker is None:
            self._worker = Worker(
                contract,
                model=self._model,
                model_name=self._model_name,
                data=self._data,
                test_data=self._test_data,
                validation_data=self._validation_data,
                torch_device=self._torch_device,
            )
        return self._worker

    def _ready_worker(self) -> Worker:
        """The worker with the device's state: the committed one, or the run's initial weights."""
        if self._terms is None:
            self._check_in()
        assert self._terms is not None
        contract = self._terms.contract
        fresh = self._worker is None
        worker = self._make_worker(contract)
        if fresh and worker.profile(self._allow).SerializeToString() != self._storage.load("profile.bin"):
            profile = worker.profile(self._allow)  # the app's model or data changed since the last check-in
            self._link.check_in(self._identity, profile)
            self._save_identity(profile)
        if not worker.has_state:
            self._restore(worker, contract)
        if contract.proxy_digest and not worker.has_proxy:
            worker.take_proxy(decode(self._proxy_payload(contract.proxy_digest)))
        return worker

    def _restore(self, worker: Worker, contract: contract_pb2.Contract) -> None:
        saved = self._storage.load("state.safetensors")
        if saved is not None:
            worker.restore(saved, self._storage.load("delivered.safetensors"))
            return
        if contract.initial_weights:
            worker.load_initial(decode(download(self._link, self._identity, contract.initial_weights)))
        # Kept from the start: a first answer that is dropped leads back here, and the app may keep its first model.
        self._storage.save("delivered.safetensors", worker.delivered_state())
        self._storage.save("state.safetensors", worker.state())
        worker.has_state = True

    def _proxy_payload(self, sha256: bytes) -> Payload:
        """The run's proxy set: the one that is kept here, or fetched, once."""
        kept = self._storage.kept_payload(PROXY_FOLDER, sha256)
        if kept is not None:
            return kept
        payload = download(self._link, self._identity, sha256)
        self._storage.keep_payload(PROXY_FOLDER, payload)
        values = {"digest": sha256.hex(), "bytes": payload.data_bytes}
        self._tell("proxy", 0, f"fetched the run's proxy set {sha256.hex()[:12]}, {payload.data_bytes} bytes", values)
        return payload

    def _answer(self, ask: service_pb2.Ask) -> None:
        self._tell("ask", ask.round, f"round {ask.round}: {ask.step}", {"completed_rounds": ask.completed_rounds})
        with self._heartbeats():
            worker = self._ready_worker()
            try:
                parts = decode(download(self._link, self._identity, ask.payload)) if ask.payload else {}
            except RefusedError as refusal:
                if refusal.code != Code.NOT_FOUND:
                    raise
                # The device was so slow that its round is over; it is out for the round, not for the run.
                self._tell("dropped", ask.round, str(refusal), {"code": refusal.code})
                return
            try:
                pending, answer = self._work(worker, ask, parts)
            except (CannotAnswer, KnowledgeError) as reason:  # also what training has made of numbers is no answer
                self._decline(worker, ask, reason)
                return
            except BaseException:
                worker.forget_state()  # half an answer's training must not enter the next one
                raise
        if any(answer.notes.values()):
            self._tell("ask", ask.round, f"{ask.step}: {dict(answer.notes)}", dict(answer.notes))
        self._settle(pending)

    def _work(self, worker: Worker, ask: service_pb2.Ask, parts: Mapping[str, Kind]) -> tuple[Pending, Answer]:
        """Computes the answer and makes it durable, with its state and with what becomes of the app's model."""
        work = worker.answer(ask, parts, self._allow)
        answer = work.answer
        check_may_leave(answer.parts, self._allow)  # the gate: the one way out of the device
        payload = encode(answer.parts, DTYPES[worker.contract.knowledge_type])
        attempt = self._attempts.get((ask.round, ask.step_number), 0) + 1
        self._attempts = {(ask.round, ask.step_number): attempt}
        scores = {split: counts.confusion.tolist() for split, counts in work.scores.items()}
        pending = Pending(ask.round, ask.step_number, attempt, answer.samples, work.verdict, scores)
        self._storage.put_answer(pending, payload, work.state, work.delivered)
        self._in_memory = pending
        return pending, answer

    def _decline(self, worker: Worker, ask: service_pb2.Ask, reason: FleetDistillError) -> None:
        """Out for the step, not for the run: the server closes this ask and does not wait for it."""
        worker.forget_state()
        self._link.decline(
            service_pb2.DeclineRequest(
                identity=self._identity, round=ask.round, step_number=ask.step_number, reason=str(reason)
            )
        )
        self._tell("dropped", ask.round, str(reason))

    def _settle(self, pending: Pending) -> None:
        """Brings the answer in the outbox to its end: a receipt, or the reason why there will be none."""
        for attempt in range(_ATTEMPTS_TO_SEND):
            try:
                receipt = self._send(pending)
                break
            except RefusedError as refusal:
                if refusal.code == Code.NO_SPACE:  # nothing is wrong with the answer: it waits in the outbox
                    raise LinkError(str(refusal)) from refusal
                if is_final(refusal.code) or attempt + 1 == _ATTEMPTS_TO_SEND:
                    self._drop(pending, refusal)
                    return
        if receipt is None or receipt.name.attempt != pending.attempt:
            self._drop(pending, None)
            return
        self._tell_scores(pending)  # before promoting: after a crash in between they are told again, not lost
        self._promote(pending)
        self._tell("answered", pending.round, f"round {pending.round}: receipt {receipt.id}", {"receipt": receipt.id})
        self._deliver(pending)

    def _tell_scores(self, pending: Pending) -> None:
        for split, confusion in pending.scores.items():
            correct, count = sum(row[label] for label, row in enumerate(confusion)), sum(map(sum, confusion))
            accuracy = correct / count if count else math.nan
            values = {"split": split, "accuracy": accuracy, "confusion": confusion}
            self._tell("scored", pending.round, f"round {pending.round}: {accuracy:.1%} on {split} data", values)

    def _promote(self, pending: Pending) -> None:
        """The receipt makes the answer's state the device's, and its model the app's if the verdict says so."""
        if self._export_onnx == "round" and pending.verdict is not None and pending.verdict.replaced:
            self._storage.save(_EXPORT_DUE, str(pending.round).encode())  # before: a crash must not leave an old file
        self._storage.promote_answer()
        if self._worker is None:
            return
        if self._in_memory == pending:
            if pending.verdict is not None:
                self._worker.deliver(pending.verdict)
        else:
            self._worker.forget_state()  # the answer is an earlier process's; its state is read from the disk

    def _send(self, pending: Pending) -> service_pb2.Receipt | None:
        """Sends what the server still lacks; None when it takes no answer any more."""
        name = service_pb2.UploadName(round=pending.round, step_number=pending.step_number, attempt=pending.attempt)
        status = self._link.upload_status(self._identity, name)
        if status.HasField("receipt"):
            return status.receipt
        if not status.ask_open:
            return None
        with self._storage.answer() as payload, self._heartbeats():
            header = service_pb2.UploadHeader(
                identity=self._identity,
                name=name,
                payload=payload.header(),
                samples=pending.samples,
                first_byte=status.next_byte,
            )
            return self._link.upload(header, wire.chunks(payload.source, payload.slots, status.next_byte))

    def _drop(self, pending: Pending, refusal: RefusedError | None) -> None:
        """No receipt will come: the state goes back to the last answer that has one."""
        self._storage.drop_answer()
        if self._worker is not None:
            self._worker.forget_state()
        if refusal is None:
            self._tell("dropped", pending.round, f"round {pending.round} takes no answer any more; it is dropped")
        else:
            self._tell("refused", pending.round, str(refusal), {"code": refusal.code, **refusal.details})

    def _deliver(self, pending: Pending) -> None:
        """Tells the app what became of its model, and exports a new one."""
        verdict = pending.verdict
        if verdict is None:
            return
        kind = "delivered" if verdict.replaced else "kept"
        self._tell(kind, pending.round, f"round {pending.round}: {verdict.text}", verdict.values)
        self._export_due()

    def _export_due(self) -> None:
        """Exports the delivered model where a round has replaced it and the file is still the one of before."""
        number = self._storage.load(_EXPORT_DUE)
        if number is None:
            return
        try:
            if self._export_onnx == "round":
                self._export(int(number) if number.isdigit() else 0)
        except ExportError:
            self._storage.remove(_EXPORT_DUE)  # the app is told once; the next delivered round tries again
            raise
        self._storage.remove(_EXPORT_DUE)

    def _finish(self, reason: str) -> Step:
        if self._export_onnx == "finish":
            self._export(0)
        self._tell("finished", 0, reason)
        return Step.FINISHED

    def _export(self, number: int) -> None:
        worker = self._ready_worker()
        report = worker.export(self._storage.directory / "model.onnx", number)
        values = {"path": str(report.path), "max_difference": report.max_difference, "bytes": report.bytes}
        text = f"{report.path.name} agrees with the model to {report.max_difference:.1e}"
        self._tell("exported", number, text, values)

    @contextlib.contextmanager
    def _heartbeats(self) -> Iterator[None]:
        """Says that the device lives while this thread computes or sends."""
        if not self._link.remote or self._terms is None:
            yield
            return
        done = threading.Event()
        beat = threading.Thread(target=self._beat, args=(done, self._terms.heartbeat_seconds), daemon=True)
        beat.start()
        try:
            yield
        finally:
            done.set()
            beat.join(timeout=1.0)

    def _beat(self, done: threading.Event, seconds: float) -> None:
        while not done.wait(seconds):
            with contextlib.suppress(LinkError, RefusedError):
                self._link.heartbeat(self._identity)

    def _tell(self, kind: str, number: int, text: str, values: dict[str, Any] | None = None) -> None:
        logger.info("%s: %s", self.device_id, text)
        self._on_event(Event(kind, number, text, values or {}))


def _open_link(server: str, insecure: bool) -> Link:
    from fleetdistill.grpc_link import GrpcLink, is_loopback

    if not (insecure or is_loopback(server)):
        raise ConfigurationError(
            f"{server} is not on this machine and there is no TLS yet: go through a tunnel to 127.0.0.1, "
            "or accept plain text with Device(insecure=True)"
        )
    return GrpcLink(server)


def _identity_file(identity: service_pb2.Identity) -> dict[str, str]:
    return {"device": identity.device, "run": identity.run, "secret": identity.secret.hex()}


def _secret_in(saved: dict[str, Any]) -> bytes:
    """The device's secret: the saved one, or a fresh one for a new device."""
    try:
        return bytes.fromhex(saved["secret"]) if "secret" in saved else secrets.token_bytes(32)
    except (ValueError, TypeError) as error:
        raise StateError(f"device.json is damaged: its secret is no hex ({error}); restore the file") from error


def _profile_in(saved: bytes | None) -> contract_pb2.DeviceProfile | None:
    """The saved profile; a damaged one counts as none, it is made anew."""
    try:
        return contract_pb2.DeviceProfile.FromString(saved) if saved is not None else None
    except DecodeError:
        return None


def _check_columns(allow: Sequence[str]) -> None:
    unknown = sorted(set(allow) - set(COLUMNS))
    if unknown:
        raise ConfigurationError(f"allow has unknown columns {', '.join(unknown)}; known are {', '.join(COLUMNS)}")


def _check_belongs(directory: Path, saved: dict[str, Any], run: str, device_id: str | None) -> None:
    for name, given, known in (("run", run, saved.get("run")), ("device id", device_id, saved.get("device"))):
        if given and known and given != known:
            raise StateError(
                f"the state directory {directory} belongs to {name} {known!r}, not {given!r}; "
                "use another directory, or the name it belongs to"
            )
