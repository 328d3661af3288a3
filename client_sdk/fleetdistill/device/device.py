"""The device SDK: embeds a device of the fleet in an app.

    device = Device(server="127.0.0.1:50051", model=make_model, data=(images, labels), state_dir="fleet-state")
    device.run()

A device always calls and never listens. It checks in, waits for asks, trains, and sends answers; everything it must
not lose is in its state directory, so it may be killed at any moment and goes on where it was. Importing this module
loads no torch; the model is built, from a factory if you give one, when the first ask needs it.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fleetdistill.clock import Clock, SystemClock
from fleetdistill.device.app_models import AppModels
from fleetdistill.device.arguments import (
    DEFAULT_COLUMNS,
    check_bounds,
    check_columns,
    check_computes,
    check_export,
    check_transport_security,
)
from fleetdistill.device.ask_handler import AskHandler
from fleetdistill.device.check_in import CheckIn, MakeForData, open_link
from fleetdistill.device.events import Event, Events, Step
from fleetdistill.device.guard import Guard
from fleetdistill.device.identity import load_identity
from fleetdistill.device.sender import Sender
from fleetdistill.device.session import Session
from fleetdistill.errors import (
    ConfigurationError,
    FleetDistillError,
    LinkError,
    RefusedError,
)
from fleetdistill.link.base import Link
from fleetdistill.link.credentials import is_enrolled
from fleetdistill.link.downloads import DOWNLOADS, Downloads, adopt_proxy_set
from fleetdistill.link.terms import pause_of, plain
from fleetdistill.models import USUAL_PREDICTOR
from fleetdistill.state.directory import MAX_SPOOL_BYTES, Storage
from fleetdistill.wire.codes import Code, after_seconds, is_final
from fleetdistill.wire.v1 import contract_pb2

if TYPE_CHECKING:
    from torch import nn

    from fleetdistill.device.compute import Compute, MakeCompute
    from fleetdistill.methods.classstats.space_model import MakePredictor

POLL_SECONDS = 20.0
MAX_THREADS = 64
"""Default of `max_threads`."""
MAX_SECONDS_PER_ASK = 3600.0
"""Default of `max_seconds_per_ask`, in seconds."""
_FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0


class Device:
    """One device of a fleet, for one thread; `stop`, `model` and `models` may be used from any.

    Args:
        server: `host:port` of the aggregation server, or a `Link`.
        model: The local model, or a function that builds it: a module with `extractor`, `features` and `predict`
            (see `fleetdistill.training.model.split_sequential`).
        data: Private training data: `(inputs, labels)` as tensors or numpy arrays, a map-style torch Dataset, or a
            function that returns one of these.
        worker: Instead of model, data and what goes with them, for an app that computes with something else than
            PyTorch: a function that takes the run's contract and returns a `fleetdistill.device.compute.Compute`.
        state_dir: Directory of this device alone; keeps identity, model and what is under way.
        run: Name of the run; may be left out where the server has only one.
        device_id: 1 to 64 letters, digits, '-', '_' or '.'; by default a UUID that stays in `state_dir`.
        allow: What may leave the device, of `COLUMNS`. The default keeps labels back; FedDKC needs them, so an app
            that takes part in it gives `allow=COLUMNS`.
            The number of samples leaves with every answer, the training loss with `metrics`; with `counts` beside it
            the figures of `test_data` and `validation_data` come by class, with the samples of each class.
        test_data: Data whose figures are reported to the server after each round.
        validation_data: Data that decide whether the app's model, at first the one that it gives, is replaced: it is
            not when its accuracy falls. A metric reports which to the server.
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
        clock: For tests of an app: what the device waits by, such as `fleetdistill.testing.ManualClock`.
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
        worker: MakeCompute | None = None,
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
        clock: Clock | None = None,
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
        if isinstance(server, str):
            check_transport_security(server, insecure, enrolment is not None or is_enrolled(Path(state_dir)))
        self._own_worker = worker is not None
        self._allow, self._export_onnx = tuple(allow), export_onnx
        self._guard = Guard(on_event or (lambda event: None))
        self._storage = Storage(Path(state_dir), max_spool_bytes)
        try:
            self._session = self._open_session(server, enrolment, run, device_id, clock or SystemClock())
        except FleetDistillError:
            self._storage.close()
            raise
        self._events = Events(self._guard, self.device_id)
        self._check_in = CheckIn(
            self._session,
            self._events,
            make_compute=_ignoring_data(worker)
            if worker is not None
            else partial(
                _torch_compute,
                model=model,
                model_name=model_name,
                test_data=test_data,
                validation_data=validation_data,
                torch_device=torch_device,
                predictor=predictor,
            ),
            data=data,
            allow=self._allow,
            max_threads=max_threads,
            downloads=Downloads(self._storage.directory / DOWNLOADS, max_spool_bytes),
        )
        self._stopped = threading.Event()
        self._sender = Sender(self._session, self._events, self._check_in.ready_compute, export_onnx)
        self._handler = AskHandler(
            self._session,
            self._events,
            self._check_in,
            self._sender,
            self._stopped,
            allow=self._allow,
            max_seconds=max_seconds_per_ask,
        )
        self._closed = False

    def _open_session(
        self, server: str | Link, enrolment: str | Path | None, run: str, device_id: str | None, clock: Clock
    ) -> Session:
        identity = load_identity(self._storage, run, device_id)
        adopt_proxy_set(self._storage.directory)
        if isinstance(server, str):
            server = open_link(server, enrolment, self._storage.directory, identity.device)
        return Session(self._storage, server, identity, self._guard, clock)

    @property
    def device_id(self) -> str:
        """This device's id in the fleet."""
        return self._session.identity.device

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
            return self._check_in.ready_compute().delivered_model()

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
            return AppModels(self._check_in.ready_compute().delivered_models())

    def replace_data(self, data: Any = None) -> None:
        """Replaces the app's rows. The next `step` checks in with them before it asks for work.

        An answer that waits for its receipt is settled first: it was made of the rows of before. What the device has
        learned stays; a new compute backend goes on from it, so `model` and `models` give other objects from now
        on. May also be called from within `on_event`. Data that do not fit raise DataError from that step on.

        Args:
            data: The rows, as `Device(data=...)` takes them. None in an app that gave `worker`: its function is
                called again.

        Raises:
            ConfigurationError: There are data and `worker` was given, or neither.
        """
        if (data is None) is not self._own_worker:
            raise ConfigurationError("replace_data takes the new data, or none in an app that gave worker=")
        with self._guard.held():
            self._check_in.replace_data(data)

    def run(self) -> None:
        """Takes part until the run is over or `stop` is called, or Ctrl-C. Waits out a server that is away.

        Raises:
            RefusedError: The server refuses this device; the message has the reason and what to do.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        try:
            self._run()
        except KeyboardInterrupt:
            self._stopped.set()
            self._events.emit("interrupted", 0, "interrupted by Ctrl-C; started again, the device goes on where it was")

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
                if str(error) != trouble:  # one event, not one for every attempt
                    trouble = str(error)
                    self._events.emit("lost-contact", 0, f"{trouble}; the device keeps trying")
                self._session.clock.wait(self._stopped, error.after_seconds + random.uniform(pause / 2, pause))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def step(self, wait_seconds: float = POLL_SECONDS) -> Step:
        """One turn: settles what is under way, asks for work, and does it.

        Args:
            wait_seconds: How long the server may hold the question when there is no work, 0 to 60.

        Raises:
            LinkError: The server is away or refuses for now, or the disk has no room to note its reply; calling
                again later goes on.
            RefusedError: The server refuses this device.
        """
        try:
            return self._step(wait_seconds)
        except RefusedError as refusal:
            if refusal.code == Code.BAD_IDENTITY and "check_in" in refusal.details:
                self._session.terms = (
                    None  # the server was restored from a backup and does not know this device any more
                )
            elif is_final(refusal.code):
                raise
            raise LinkError(str(refusal), after_seconds(refusal.details)) from refusal

    def _step(self, wait_seconds: float) -> Step:
        with self._guard.held():
            if self._session.terms is None:
                self._check_in.check_in()
            pending = self._storage.outbox.pending()
        if pending is not None:
            self._sender.settle(pending)
            return Step.ANSWERED
        self._sender.emit_outcome()  # an earlier process's, which ended before its events
        self._check_in.declare_other_rows()
        self._sender.export_due()
        response = self._session.link.next_ask(self._session.identity, wait_seconds)
        match response.WhichOneof("next"):
            case "ask":
                self._events.emit_reason("")
                self._handler.handle(response.ask)
                return Step.ANSWERED
            case "finished":
                return self._finish(response.finished)
            case _:
                self._events.emit_reason(response.come_back.reason)
                self._session.clock.wait(self._stopped, pause_of(response.come_back, self._session.link.remote))
                return Step.WAITED

    def stop(self) -> None:
        """Makes `run` return after the step it is in; may be called from another thread or a signal handler."""
        self._stopped.set()
        self._session.link.interrupt()

    def close(self, *, leave: bool = True) -> None:
        """Leaves the run and releases the state directory.

        Not while an answer waits for its receipt: leaving would close its ask, and the device may come back in time.

        Args:
            leave: With False the device does not leave, so that the server keeps waiting for the answer to an open ask.
        """
        if self._closed:
            return
        self._closed = True
        self._stopped.set()
        if leave and self._session.terms is not None:
            with contextlib.suppress(FleetDistillError):
                if self._storage.outbox.pending() is None:
                    self._session.link.leave(self._session.identity)
        self._session.link.close()
        self._storage.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, reason: str) -> Step:
        if self._export_onnx == "finish":
            self._sender.export(0)
        self._events.emit("finished", 0, plain(reason))
        return Step.FINISHED


def _torch_compute(contract: contract_pb2.Contract, data: Any, **given: Any) -> Compute:
    from fleetdistill.device.torch_compute import TorchCompute

    return TorchCompute(contract, data=data, **given)


def _ignoring_data(make: MakeCompute) -> MakeForData:
    """An app's own function, which has its data itself."""
    return lambda contract, data: make(contract)
