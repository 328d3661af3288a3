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
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from google.protobuf.message import DecodeError

from fleetdistill.device.app_models import AppModels
from fleetdistill.device.arguments import (
    DEFAULT_COLUMNS,
    check_bounds,
    check_columns,
    check_computes,
    check_export,
    check_way,
)
from fleetdistill.device.consent import check_may_leave
from fleetdistill.device.declines import MAX_REASON, Declines
from fleetdistill.device.events import Event, Step
from fleetdistill.device.guard import Guard
from fleetdistill.device.notes import in_words
from fleetdistill.errors import (
    CannotAnswer,
    ConfigurationError,
    ExportError,
    FleetDistillError,
    KnowledgeError,
    LinkError,
    NoRoomError,
    RefusedError,
    StateError,
    WireError,
)
from fleetdistill.link.base import Link
from fleetdistill.link.credentials import is_enrolled
from fleetdistill.link.downloads import DOWNLOADS, Downloads, adopt_proxy_set
from fleetdistill.link.terms import beat_seconds, check_ask, check_terms, known_compression, pause_of, plain
from fleetdistill.models import USUAL_PREDICTOR
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.printable import printable
from fleetdistill.state import failpoints
from fleetdistill.state.data_version import data_version, digest_of_given
from fleetdistill.state.directory import MAX_SPOOL_BYTES, Outcome, Pending, Storage
from fleetdistill.training.time_limit import time_limit
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.codes import Code, after_seconds, is_final, status_of
from fleetdistill.wire.compression import RAW, offered
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from torch import nn

    from fleetdistill.device.compute import DeviceWorker, MakeWorker
    from fleetdistill.knowledge import Kind
    from fleetdistill.methods.base import Answer
    from fleetdistill.methods.classstats.space_model import MakePredictor

logger = logging.getLogger(__name__)

POLL_SECONDS = 20.0
MAX_THREADS = 64
"""Most threads that a run may compute with unless the app says otherwise."""
MAX_SECONDS_PER_ASK = 3600.0
"""Most seconds that a device works on one ask unless the app says otherwise."""
_EXPORT_DUE = "model.onnx.due"
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 15.0
_ATTEMPTS_TO_SEND = 5
# gRPC statuses of refusals that say nothing about the answer: it waits in the outbox. The server cannot take it now ...
_LATER = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
# ... or keeps what has come of it and waits for the rest ...
_GOES_ON = "ABORTED"
# ... or does not take the caller for the one it says it is, which the app must hear.
_ABOUT_THE_CALLER = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_TAKES_NONE = (Code.LATE, Code.CLOSED, Code.SUPERSEDED)


class Device:
    """One device of a fleet, for one thread; `stop`, `model` and `models` may be used from any.

    Args:
        server: `host:port` of the aggregation server, or a `Link`.
        model: The local model, or a function that builds it: a module with `extractor`, `features` and `predict`
            (see `fleetdistill.training.model.split_sequential`).
        data: Private training data: `(inputs, labels)` as tensors or numpy arrays, a map-style torch Dataset, or a
            function that returns one of these.
        worker: Instead of model, data and what goes with them, for an app that computes with something else than
            PyTorch: a function that takes the run's contract and returns a `fleetdistill.device.compute.DeviceWorker`.
        state_dir: Directory of this device alone; keeps identity, model and what is under way.
        run: Name of the run; may be left out where the server has only one.
        device_id: 1 to 64 letters, digits, '-', '_' or '.'; by default a UUID that stays in `state_dir`.
        allow: What may leave the device, of `COLUMNS`. The default keeps labels back; FedDKC needs them, so an app
            that takes part in it says `allow=COLUMNS`.
            The number of samples leaves with every answer, the training loss with `metrics`; with `counts` beside it
            the figures of `test_data` and `validation_data` come by class, with the samples of each class.
        test_data: Data whose figures are reported to the server after each round.
        validation_data: Data that decide whether the app's model, at first the one that it gives, is replaced: it is
            not when its accuracy falls. The server is told which (a metric).
        model_name: Name of the model in the server's lists.
        export_onnx: Write `model.onnx` into `state_dir` after each round it delivers, only at the end, or never.
        torch_device: Where to train, such as "cpu" or "cuda".
        insecure: Allow plain text to a server that is not on this machine.
        enrolment: The operator's one-time token, or the file that holds it: the device speaks TLS, gets its certificate
            with its first call and renews it by itself. Not needed any more once `state_dir` has the certificate.
        max_spool_bytes: Most bytes in `state_dir` of the answer under way with its states, and of one download. What is
            over it, or over the room on the disk, is declined.
        predictor: Of class statistics with `predictor = "trained"`, the device's own: a name of
            `fleetdistill.models.PREDICTORS`, or a function of (inputs, classes) that makes a module.
        max_threads: Most threads that the run may have this device compute with, at least 1.
        max_seconds_per_ask: Most seconds of work on one ask, above 0; one that takes longer is declined.
        on_event: Called with every `Event`, in the thread of `run`; what it raises ends the run. After a crash an event
            about an answer may come a second time, never not at all.

    Raises:
        ConfigurationError: An argument is out of range or unknown, or would be ignored beside `worker`.
        StateError: `state_dir` is in use, damaged, or of another run or id.
    """

    def __init__(
        self,
        *,
        server: str | Link,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        data: Any = None,
        worker: MakeWorker | None = None,
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
        enrolment: str | Path | None = None,
        max_spool_bytes: int = MAX_SPOOL_BYTES,
        predictor: str | MakePredictor = USUAL_PREDICTOR,
        max_threads: int = MAX_THREADS,
        max_seconds_per_ask: float = MAX_SECONDS_PER_ASK,
    ) -> None:
        check_columns(allow)
        check_computes(
            model,
            data,
            worker,
            test_data=test_data,
            validation_data=validation_data,
            model_name=model_name,
            torch_device=torch_device,
            predictor=predictor,
        )
        check_export(export_onnx)
        check_bounds(max_threads, max_seconds_per_ask)
        self._max_threads, self._max_seconds_per_ask = max_threads, max_seconds_per_ask
        self._model, self._data, self._make = model, data, worker
        self._test_data, self._validation_data = test_data, validation_data
        self._model_name, self._torch_device, self._predictor = model_name, torch_device, predictor
        self._allow, self._export_onnx = tuple(allow), export_onnx
        self._guard = Guard(on_event or (lambda event: None))
        if isinstance(server, str):
            check_way(server, insecure, enrolment is not None or is_enrolled(Path(state_dir)))
        self._storage = Storage(Path(state_dir), max_spool_bytes)
        self._downloads = Downloads(self._storage.directory / DOWNLOADS, max_spool_bytes)
        try:
            self._identity = self._load_identity(run, device_id)
            adopt_proxy_set(self._storage.directory)
            self._link = self._open_link(server, enrolment) if isinstance(server, str) else server
        except FleetDistillError:
            self._storage.close()
            raise
        self._terms: service_pb2.CheckInResponse | None = None
        self._worker: DeviceWorker | None = None
        self._declared = False  # whether the server knows the worker's profile
        self._rows_known = False  # whether the server knows the version of the app's rows
        self._declines = Declines()
        self._in_memory: Pending | None = None  # the answer whose state the worker holds
        self._reason = ""  # why there is nothing to do, as the app was told
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
    def model(self) -> Any:
        """The model for the app to use: the one of the last delivered round, before the first one its own.

        A torch module, which loads torch, or what the app's own `worker` gives.

        Its own has, without validation data, the run's initial weights. Where a method gives several, it is the one
        that was best on `validation_data`, without such data `general`.
        """
        with self._guard.held():
            return self._ready_worker().delivered_model()

    @property
    def models(self) -> Mapping[str, Any]:
        """All that the last delivered round gave: `general`, and what the method has beside it. As `model`'s.

        With classstats also `personal`, for the device's own mix of classes, and `own`, the network that the app gave
        (not with `features = "averaged"`). The fleet trains `own` only where the run has `own_network = "taught"`.
        Without validation data it has the run's extractor where there is one (`features = "model"`), on which the
        layers behind it were never trained: then it is no model to use.
        Before the first delivery there is only the app's own, as in `model`: asking for another answer raises
        ModelError, `in` and `get` tell without.
        """
        with self._guard.held():
            return AppModels(self._ready_worker().delivered_models())

    def replace_data(self, data: Any = None) -> None:
        """Says that the app's rows are others now. The next `step` checks in with them before it asks for work.

        An answer that waits for its receipt is settled first: it was made of the rows of before. What the device has
        learned stays; the worker is made anew and goes on from it, so `model` and `models` give other objects from now
        on. May also be called from within `on_event`. Data that do not fit raise DataError from that step on.

        Args:
            data: The rows, as `Device(data=...)` takes them. None in an app with a worker of its own: its function is
                called again.

        Raises:
            ConfigurationError: There are data and a worker of the app's own, or neither.
        """
        if (data is None) is (self._make is None):
            raise ConfigurationError("replace_data takes the new data, or none in an app that gave worker=")
        with self._guard.held():
            self._storage.forget_rows()  # first: an app that dies now tells of its rows after its restart
            self._data, self._worker, self._in_memory = data, None, None
            self._declared = self._rows_known = False

    def run(self) -> None:
        """Takes part until the run is over or `stop` is called, or Ctrl-C. Waits out a server that is away.

        Raises:
            RefusedError: The server will not have this device; the message says why and what to do.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        try:
            self._run()
        except KeyboardInterrupt:
            self._stopped.set()
            self._tell("interrupted", 0, "interrupted by Ctrl-C; started again, the device goes on where it was")

    def _run(self) -> None:
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
                self._stopped.wait(error.after_seconds + random.uniform(pause / 2, pause))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def step(self, wait_seconds: float = POLL_SECONDS) -> Step:
        """One turn: settles what is under way, asks for work, and does it.

        Args:
            wait_seconds: How long the server may hold the question when there is no work, 0 to 60.

        Raises:
            LinkError: The server is away or has said no for now, or the disk has no room to note what it said; calling
                again later goes on.
            RefusedError: The server will not have this device.
        """
        try:
            return self._step(wait_seconds)
        except RefusedError as refusal:
            if refusal.code == Code.BAD_IDENTITY and "check_in" in refusal.details:
                self._terms = None  # the server was restored from a backup and does not know this device any more
            elif is_final(refusal.code):
                raise
            raise LinkError(str(refusal), after_seconds(refusal.details)) from refusal

    def _step(self, wait_seconds: float) -> Step:
        with self._guard.held():
            if self._terms is None:
                self._check_in()
            pending = self._storage.pending()
        if pending is not None:
            self._settle(pending)
            return Step.ANSWERED
        self._tell_outcome()  # an earlier process's, which ended before it had told the app
        self._tell_of_other_rows()
        self._export_due()
        response = self._link.next_ask(self._identity, wait_seconds)
        match response.WhichOneof("next"):
            case "ask":
                self._reason = ""
                self._answer(response.ask)
                return Step.ANSWERED
            case "finished":
                return self._finish(response.finished)
            case _:
                self._tell_reason(response.come_back.reason)
                self._stopped.wait(pause_of(response.come_back, self._link.remote))
                return Step.WAITED

    def stop(self) -> None:
        """Makes `run` return after the step it is in; may be called from another thread or a signal handler."""
        self._stopped.set()
        self._link.interrupt()

    def close(self, *, leave: bool = True) -> None:
        """Says goodbye to the server and releases the state directory.

        Not while an answer waits for its receipt: leaving would close its ask, and the device may come back in time.

        Args:
            leave: False says no goodbye, so that the server keeps waiting for the answer to an open ask.
        """
        if self._closed:
            return
        self._closed = True
        self._stopped.set()
        if leave and self._terms is not None:
            with contextlib.suppress(FleetDistillError):
                if self._storage.pending() is None:
                    self._link.leave(self._identity)
        self._link.close()
        self._storage.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- identity and contract

    def _open_link(self, server: str, token: str | Path | None) -> Link:
        """TLS for a device that is enrolled or has a token; plain text is never fallen back to."""
        from fleetdistill.link.grpc_link import GrpcLink

        directory = self._storage.directory
        if token is None and not is_enrolled(directory):
            return GrpcLink(server)
        from fleetdistill.link.enrolment import Enrolment

        return GrpcLink(server, Enrolment(server, directory, self._identity.device, token))

    def _load_identity(self, run: str, device_id: str | None) -> service_pb2.Identity:
        saved = self._storage.load_identity()
        _check_belongs(self._storage.directory, saved, run, device_id)
        device = device_id or saved.get("device") or str(uuid.uuid4())
        if not is_name(device):
            raise ConfigurationError(f"device_id {device!r} must be {NAME_RULE}")
        identity = service_pb2.Identity(run=run or saved.get("run", ""), device=device, secret=_secret_in(saved))
        if not saved:  # kept before it is sent: a lost response must not lock the id for ever
            self._storage.save_identity(_identity_file(identity))
        return identity

    def _check_in(self) -> service_pb2.CheckInResponse:
        """Introduces the device; the profile of last time serves, so that an idle device needs no torch."""
        profile = _profile_in(self._storage.load("profile.bin"))
        if profile is None:
            terms = self._greet(None)
            profile = self._profile_of(self._make_worker(terms.contract))
        else:
            del profile.allowed_columns[:]
            profile.allowed_columns.extend(self._allow)
            _set_compressions(profile)
        terms = self._greet(profile)
        self._identity.run = terms.contract.run
        failpoints.hit("device.check-in.before-save")
        self._save_identity(profile)
        failpoints.hit("device.check-in.after-save")
        if self._worker is not None:
            self._note_rows(profile)
        self._terms = terms
        self._tell("checked-in", 0, f"{self.device_id} takes part in run {terms.contract.run!r}")
        return terms

    def _greet(self, profile: contract_pb2.DeviceProfile | None) -> service_pb2.CheckInResponse:
        terms = self._link.check_in(self._identity, profile)
        check_terms(terms, self._identity.run, self._max_threads)
        return terms

    def _profile_of(self, worker: DeviceWorker) -> contract_pb2.DeviceProfile:
        # Not above: it loads methods, and the front, which imports this package, must know none.
        from fleetdistill.device.compute import NamesRows

        profile = worker.profile(self._allow)
        _set_compressions(profile)
        if isinstance(worker, NamesRows):
            profile.data_version = data_version(self._identity.secret, worker.data_digest())
        return profile

    def _save_identity(self, profile: contract_pb2.DeviceProfile) -> None:
        self._storage.save_identity(_identity_file(self._identity))
        self._storage.save("profile.bin", profile.SerializeToString())

    def _note_rows(self, profile: contract_pb2.DeviceProfile) -> None:
        self._storage.note_rows(profile.data_version, digest_of_given(self._data))
        self._rows_known = True

    # --- work

    def _make_worker(self, contract: contract_pb2.Contract) -> DeviceWorker:
        if self._worker is None:
            self._worker = self._make(contract) if self._make is not None else self._torch_worker(contract)
        return self._worker

    def _torch_worker(self, contract: contract_pb2.Contract) -> DeviceWorker:
        from fleetdistill.device.torch_compute import Worker

        assert self._model is not None  # checked by __init__
        return Worker(
            contract,
            model=self._model,
            model_name=self._model_name,
            data=self._data,
            test_data=self._test_data,
            validation_data=self._validation_data,
            torch_device=self._torch_device,
            predictor=self._predictor,
        )

    def _ready_worker(self) -> DeviceWorker:
        """The worker with the device's state: the committed one, or the run's initial weights."""
        with self._guard.held():
            return self._prepared_worker()

    def _prepared_worker(self) -> DeviceWorker:
        contract = (self._terms or self._check_in()).contract
        worker = self._make_worker(contract)
        self._declare(worker)
        for sha256 in _kept_payloads(worker, contract):
            if not worker.has_payload(sha256):
                worker.take_payload(sha256, decode(self._kept_payload(sha256, contract)))
        if not worker.has_state:
            self._restore(worker, contract)
        return worker

    def _declare(self, worker: DeviceWorker) -> None:
        """Checks in again where the app's model or data changed since the last time.

        Not while an answer waits that was made of the data of before: it may have more samples than there are now.
        """
        if self._declared or self._storage.pending() is not None:
            return
        profile = self._profile_of(worker)
        if profile.SerializeToString() != self._storage.load("profile.bin"):
            self._link.check_in(self._identity, profile)
            self._save_identity(profile)
        self._note_rows(profile)
        self._declared = True

    def _tell_of_other_rows(self) -> None:
        """Checks in again where the app's rows are not those that the server knows of.

        Arrays are compared by their digest, so that an idle device whose rows are the same needs no torch.
        """
        if self._rows_known:
            return
        with self._guard.held():
            self._compare_rows()

    def _compare_rows(self) -> None:
        profile = _profile_in(self._storage.load("profile.bin"))
        if profile is None or not self._storage.names_rows(profile.data_version, digest_of_given(self._data)):
            assert self._terms is not None  # checked in by `_step`
            self._declare(self._make_worker(self._terms.contract))
        self._rows_known = True

    def _restore(self, worker: DeviceWorker, contract: contract_pb2.Contract) -> None:
        saved = self._storage.load("state.safetensors")
        if saved is not None:
            worker.restore(saved, self._storage.load("delivered.safetensors"))
            return
        if contract.initial_weights and contract.initial_weights in worker.wanted_payloads():
            worker.load_initial(decode(self._download(contract.initial_weights)))
        # Kept from the start: a first answer that is dropped leads back here, and the app may keep its first model.
        failpoints.hit("device.first-state.before-save")
        self._storage.save("delivered.safetensors", worker.delivered_state())
        self._storage.save("state.safetensors", worker.state())
        failpoints.hit("device.first-state.after-save")
        worker.has_state = True

    def _download(self, sha256: bytes) -> Payload:
        """A payload of the run; what is kept besides is what the worker works with."""
        assert self._terms is not None
        assert self._worker is not None
        keep = _kept_payloads(self._worker, self._terms.contract)
        return self._downloads.fetch(self._link, self._identity, sha256, keep)

    def _kept_payload(self, sha256: bytes, contract: contract_pb2.Contract) -> Payload:
        """A payload that the worker works with: the one that is kept here, or fetched, once."""
        kept = self._downloads.held(sha256)
        if kept is not None:
            return kept
        payload = self._download(sha256)
        kind = "proxy" if sha256 == contract.proxy_digest else "extractor"
        what = "proxy set" if kind == "proxy" else "extractor file"
        values = {"digest": sha256.hex(), "bytes": payload.data_bytes}
        self._tell(kind, 0, f"fetched the run's {what} {sha256.hex()[:12]}, {payload.data_bytes} bytes", values)
        return payload

    def _answer(self, ask: service_pb2.Ask) -> None:
        if self._declines.knows(ask):
            self._decline(ask, self._declines.reason)
            return
        try:
            check_ask(ask)
        except WireError as reason:
            self._decline(ask, reason)
            return
        self._tell_ask(ask)
        with self._heartbeats():
            worker = self._ready_worker()
            try:
                pending, answer = self._work(worker, ask, self._question(ask))
            except _AskIsOver as over:
                self._tell("dropped", ask.round, str(over.refusal), {"code": over.refusal.code})
                return
            except (CannotAnswer, ConfigurationError, KnowledgeError, WireError, NoRoomError) as reason:
                # Training has made no numbers of it, it comes from a server that is newer or broken, or the disk is
                # full: no answer to this ask, and no end of the device.
                self._decline(ask, reason)
                return
            except BaseException:
                worker.forget_state()  # half an answer's training must not enter the next one
                raise
        if any(answer.notes.values()):
            self._tell("ask", ask.round, in_words(ask.step, answer.notes), dict(answer.notes))
        self._settle(pending)

    def _tell_ask(self, ask: service_pb2.Ask) -> None:
        if ask.first_attempt > 1:
            text = f"round {ask.round}: the server has lost the answer that it had acknowledged, and asks again"
            self._tell("asked-again", ask.round, text, {"first_attempt": ask.first_attempt})
        text = f"round {ask.round}: the server asks for step {plain(ask.step)!r}"
        self._tell("ask", ask.round, text, {"step": ask.step, "completed_rounds": ask.completed_rounds})

    def _question(self, ask: service_pb2.Ask) -> Mapping[str, Kind]:
        """What the ask brings along."""
        try:
            return decode(self._download(ask.payload)) if ask.payload else {}
        except RefusedError as refusal:
            if refusal.code != Code.NOT_FOUND:
                raise
            # The device was so slow that its round is over; it is out for the round, not for the run.
            raise _AskIsOver(refusal) from refusal

    def _work(self, worker: DeviceWorker, ask: service_pb2.Ask, parts: Mapping[str, Kind]) -> tuple[Pending, Answer]:
        """Computes the answer and makes it durable, with its state and with what becomes of the app's model."""
        with time_limit(self._max_seconds_per_ask):
            work = worker.answer(ask, parts, self._allow)
        answer = work.answer
        check_may_leave(answer.parts, self._allow)  # the gate: the one way out of the device
        payload = encode(answer.parts, DTYPES[worker.contract.knowledge_type])
        # The server asks again under a new number when it has lost an answer that this device has forgotten.
        attempt = max(self._storage.next_attempt(ask.round, ask.step_number), ask.first_attempt)
        scores = {split: counts.confusion.tolist() for split, counts in work.scores.items()}
        pending = Pending(ask.round, ask.step_number, attempt, answer.samples, work.verdict, scores, ask.payload.hex())
        self._storage.put_answer(pending, payload, work.state, work.delivered)
        self._in_memory = pending
        return pending, answer

    def _decline(self, ask: service_pb2.Ask, reason: FleetDistillError) -> None:
        """Out for the step, not for the run: the server closes this ask and does not wait for it.

        The same ask again, from a server that missed this or does not care, is declined without work, ever slower.
        """
        if self._worker is not None:
            self._worker.forget_state()
        self._stopped.wait(self._declines.note(ask, reason))
        request = service_pb2.DeclineRequest(identity=self._identity, round=ask.round, step_number=ask.step_number)
        request.reason = str(reason)[:MAX_REASON]
        self._link.decline(request)
        if self._declines.is_news():
            self._tell("dropped", ask.round, str(reason))

    def _settle(self, pending: Pending) -> None:
        """Brings the answer in the outbox to its end: a receipt, or the reason why there will be none.

        What it was is kept before anything is done about it, and until the app was told: the app hears at least once.
        Raises LinkError while the disk has no room for that; the server says the same again when there is.
        """
        outcome = self._outcome_of(pending)
        try:
            self._carry_out(outcome)
        except NoRoomError as full:
            self._forget_state()  # what of it is on the disk, the next turn finds there
            raise LinkError(f"round {pending.round}: no room to note what the server said: {full}") from full
        self._tell_outcome()

    def _carry_out(self, outcome: Outcome) -> None:
        with self._guard.held():
            self._storage.note_outcome(outcome)
            if outcome.receipt:
                self._promote(outcome.pending)
            else:
                self._drop()

    def _outcome_of(self, pending: Pending) -> Outcome:
        """Sends the answer until the server has decided on it. Raises LinkError while it has not."""
        trouble, damaged = "", 0
        for _ in range(_ATTEMPTS_TO_SEND):
            try:
                receipt = self._send(pending)
                return Outcome(pending, plain(receipt.id, 64), tries=self._storage.tries)
            except RefusedError as refusal:
                status = status_of(refusal.code)
                if status in _LATER:
                    raise LinkError(str(refusal), after_seconds(refusal.details)) from refusal
                if status in _ABOUT_THE_CALLER or refusal.code == Code.UNKNOWN_RUN:
                    raise
                trouble, damaged = str(refusal), damaged + (status != _GOES_ON)
                if "check_in" in refusal.details:  # a server that was restored knows what the device had earlier
                    self._terms = None
                if is_final(refusal.code) or damaged == _ATTEMPTS_TO_SEND:
                    details = {**refusal.details, "code": refusal.code}
                    return Outcome(pending, "", refusal.code, str(refusal), details, self._storage.tries)
        raise LinkError(trouble)

    def _send(self, pending: Pending) -> service_pb2.Receipt:
        """Sends what the server still lacks.

        Raises:
            RefusedError: No receipt; among the reasons are that the ask takes no answer any more (`late`, `closed`) or
                that it has another one (`superseded`).
        """
        name = service_pb2.UploadName(
            round=pending.round,
            step_number=pending.step_number,
            attempt=pending.attempt,
            payload=bytes.fromhex(pending.payload),
        )
        status = self._link.upload_status(self._identity, name)
        with self._storage.answer() as payload:
            if status.HasField("receipt"):
                receipt = status.receipt
            elif not status.ask_open:
                raise _closed(pending, status)
            else:
                receipt = self._upload(pending, name, payload, status.next_byte)
            _check_is_for(receipt, pending, payload)
        return receipt

    def _upload(
        self, pending: Pending, name: service_pb2.UploadName, payload: Payload, first_byte: int
    ) -> service_pb2.Receipt:
        header = service_pb2.UploadHeader(
            identity=self._identity,
            name=name,
            payload=payload.header(),
            samples=pending.samples,
            first_byte=first_byte,
        )
        packed = known_compression(self._terms.compression, offered()) if self._terms is not None else RAW
        self._storage.count_try()
        with self._heartbeats():
            failpoints.hit("device.upload.before-send")
            receipt = self._link.upload(header, wire.chunks(payload.source, payload.slots, first_byte, packed))
        failpoints.hit("device.upload.after-receipt")
        return receipt

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

    def _drop(self) -> None:
        """No receipt will come: the state goes back to the last answer that has one."""
        self._storage.drop_answer()
        self._forget_state()

    def _forget_state(self) -> None:
        """The worker reads its state from the disk before it works again."""
        self._in_memory = None
        if self._worker is not None:
            self._worker.forget_state()

    # --- what the app hears of it

    def _tell_outcome(self) -> None:
        """Tells the app what became of the last answer, if it has not been told; then exports what that delivered."""
        outcome = self._storage.outcome()
        if outcome is None:
            return
        number = outcome.pending.round
        if outcome.receipt:
            self._tell_scores(outcome.pending)
            values = {"receipt": outcome.receipt, "tries": outcome.tries}
            self._tell("answered", number, f"round {number}: receipt {outcome.receipt}", values)
            self._tell_verdict(outcome.pending)
        else:
            kind = "dropped" if outcome.code in _TAKES_NONE else "refused"
            self._tell(kind, number, outcome.text, {**outcome.details, "tries": outcome.tries})
        self._storage.outcome_told()
        self._export_due()

    def _tell_scores(self, pending: Pending) -> None:
        for split, confusion in pending.scores.items():
            correct, count = sum(row[label] for label, row in enumerate(confusion)), sum(map(sum, confusion))
            accuracy = correct / count if count else math.nan
            values = {"split": split, "accuracy": accuracy, "confusion": confusion}
            self._tell("scored", pending.round, f"round {pending.round}: {accuracy:.1%} on {split} data", values)

    def _tell_verdict(self, pending: Pending) -> None:
        """Tells the app what became of its model."""
        verdict = pending.verdict
        if verdict is not None:
            kind = "delivered" if verdict.replaced else "kept"
            self._tell(kind, pending.round, f"round {pending.round}: {verdict.text}", verdict.values)

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

    def _tell_reason(self, reason: str) -> None:
        """Tells the app once why there is nothing to do, where the server says so."""
        if reason and reason != self._reason:
            self._tell("stopped", 0, f"{plain(reason)}; the device waits")
        self._reason = reason

    def _finish(self, reason: str) -> Step:
        if self._export_onnx == "finish":
            self._export(0)
        self._tell("finished", 0, plain(reason))
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
        beat = threading.Thread(
            target=self._beat, args=(done, beat_seconds(self._terms.heartbeat_seconds)), daemon=True
        )
        beat.start()
        try:
            yield
        finally:
            done.set()
            beat.join(timeout=1.0)

    def _beat(self, done: threading.Event, seconds: float) -> None:
        while not done.wait(seconds):
            with contextlib.suppress(FleetDistillError):
                self._link.heartbeat(self._identity)

    def _tell(self, kind: str, number: int, text: str, values: dict[str, Any] | None = None) -> None:
        logger.info("%s: %s", self.device_id, printable(text))
        self._guard.tell(Event(kind, number, text, values or {}))


class _AskIsOver(Exception):
    """The payload of an ask is gone, so its round is over."""

    def __init__(self, refusal: RefusedError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def _closed(pending: Pending, status: service_pb2.UploadStatusResponse) -> RefusedError:
    """Why an ask takes no answer any more; a server of 0.1 does not say."""
    text = f"round {pending.round} takes no answer any more"
    said = plain(status.closed_text) or text
    return RefusedError(plain(status.closed_code, 64) or Code.CLOSED, f"{said}; the answer is dropped")


def _check_is_for(receipt: service_pb2.Receipt, pending: Pending, payload: Payload) -> None:
    """A receipt for another attempt, or for other bytes under this one's number, is none for this answer."""
    if not receipt.id:
        raise LinkError(f"round {pending.round}: the server sent a receipt without an id; the answer is sent again")
    if receipt.name.attempt != pending.attempt or receipt.sha256 != payload.sha256:
        known = plain(receipt.id, 64)
        text = f"round {pending.round} has the answer of attempt {receipt.name.attempt}, receipt {known}"
        raise RefusedError(Code.SUPERSEDED, f"{text}; attempt {pending.attempt} is dropped", {"receipt": known})


def _identity_file(identity: service_pb2.Identity) -> dict[str, str]:
    return {"device": identity.device, "run": identity.run, "secret": identity.secret.hex()}


def _secret_in(saved: dict[str, Any]) -> bytes:
    """The device's secret: the saved one, or a fresh one for a new device."""
    try:
        return bytes.fromhex(saved["secret"]) if "secret" in saved else secrets.token_bytes(32)
    except (ValueError, TypeError) as error:
        raise StateError(f"device.json is damaged: its secret is no hex ({error}); restore the file") from error


def _set_compressions(profile: contract_pb2.DeviceProfile) -> None:
    """What this process can unpack; a library may have come or gone since a profile was saved."""
    del profile.compressions[:]
    profile.compressions.extend(offered())


def _profile_in(saved: bytes | None) -> contract_pb2.DeviceProfile | None:
    """The saved profile; a damaged one counts as none, it is made anew."""
    try:
        return contract_pb2.DeviceProfile.FromString(saved) if saved is not None else None
    except DecodeError:
        return None


def _kept_payloads(worker: DeviceWorker, contract: contract_pb2.Contract) -> list[bytes]:
    """What the worker works with for as long as it lives; the initial weights are used once."""
    return [one for one in worker.wanted_payloads() if one != contract.initial_weights]


def _check_belongs(directory: Path, saved: dict[str, Any], run: str, device_id: str | None) -> None:
    for name, given, known in (("run", run, saved.get("run")), ("device id", device_id, saved.get("device"))):
        if given and known and given != known:
            raise StateError(
                f"the state directory {directory} belongs to {name} {known!r}, not {given!r}; "
                "use another directory, or the name it belongs to"
            )
