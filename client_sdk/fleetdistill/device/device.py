"""`Device`, the main class of the SDK: embeds a device of the fleet in an app.

    with Device(server="127.0.0.1:50051", model=make_model, data=(images, labels), state_dir="fleet-state") as device:
        device.run()

A device calls the server and never listens. It checks in, waits for asks, trains, and sends answers. Its state
directory holds everything that must survive a crash, so the process can be killed at any time and resumes after a
restart. Importing this module does not load torch.
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
    check_backend,
    check_columns,
    check_export,
    check_limits,
    check_transport_security,
    checked_budget,
)
from fleetdistill.device.ask_handler import AskHandler
from fleetdistill.device.check_in import CheckIn, MakeForData, open_link
from fleetdistill.device.consent import Consent
from fleetdistill.device.disclosure import Disclosure
from fleetdistill.device.events import Event, Events, Step
from fleetdistill.device.guard import Guard
from fleetdistill.device.identity import load_identity
from fleetdistill.device.predictions import Predictions
from fleetdistill.device.private import PrivateAnswers
from fleetdistill.device.sender import Sender
from fleetdistill.device.session import Session
from fleetdistill.errors import (
    ConfigurationError,
    FleetDistillError,
    LinkError,
    RefusedError,
    WorkInterrupted,
)
from fleetdistill.interruption import Hold, check_may_continue, checked_by
from fleetdistill.link.base import Link
from fleetdistill.link.credentials import is_enrolled
from fleetdistill.link.downloads import DOWNLOADS, Downloads, adopt_proxy_set
from fleetdistill.link.metered import MeteredLink
from fleetdistill.link.terms import pause_seconds, plain
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
"""Default of `Device(max_threads=...)`."""
MAX_SECONDS_PER_ASK = 3600.0
"""Default of `Device(max_seconds_per_ask=...)`, in seconds."""
_FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0


class Device(Disclosure):
    """Trains the app's model on private data when the server asks, and delivers the result to the app.

    Use a device from one thread; `stop`, `predict`, `model` and `models` are thread-safe.

    Args:
        server: `"host:port"` of the aggregation server, or a `Link`.
        model: Local model, or a function that builds it when it is first needed: a module with `extractor`, `features`
            and `predict`. `fleetdistill.training.split_sequential` makes one from a chain of layers.
        data: Private training data: `(inputs, labels)` as tensors or NumPy arrays, a map-style torch Dataset, or a
            function that returns one of these. Inputs are float `[samples, *input_shape]`; labels are integers
            `[samples]` in `[0, classes)`.
        worker: Compute backend, instead of `model` and `data`, for an app that does not use PyTorch: a function that
            takes the run's contract and returns a `fleetdistill.device.compute.Compute`.
        state_dir: Directory used only by this device. Stores its identity, its model and unfinished work.
        run: Name of the run. Optional if the server has a single run.
        device_id: Name of the device, 1 to 64 letters, digits, '-', '_' or '.'. Default: a UUID stored in `state_dir`.
        allow: Columns that may leave the device, a subset of `COLUMNS`. Default: all except `labels`, which FedDKC
            requires. Every answer includes the number of samples. `metrics` includes the training loss; `counts`
            adds the figures of each class.
        test_data: Data on which each round's model is scored. The scores are sent to the server.
        validation_data: Data that decide whether a round's model replaces the app's model: only if its accuracy is at
            least as high. The scores and the decision are sent to the server.
        model_name: Name of the model in the server's lists. Default: the module's class name.
        export_onnx: When to write `model.onnx` to `state_dir`: after each delivered round (`"round"`), at the end of
            the run (`"finish"`), or `"never"`.
        torch_device: Torch device to train on, such as `"cpu"` or `"cuda"`.
        on_event: Callback for every `Event`, called in the thread of `run`. An exception in it ends the run. After a
            crash, events about an answer may be repeated, but never lost.
        insecure: Allows plain text to a server on another machine.
        enrolment: One-time token from the operator, or a file with the token. The device then uses TLS, obtains a
            certificate and renews it automatically. Not required once `state_dir` has a certificate.
        max_spool_bytes: Maximum size in bytes of an answer with its states, and of one download. The device declines
            asks that exceed it or the free disk space.
        predictor: Predictor that the device trains in a classstats run with `predictor = "trained"`: a name in
            `fleetdistill.models.PREDICTORS`, or a function `(inputs, classes) -> nn.Module`.
        max_threads: Maximum number of compute threads that a run may require, at least 1.
        max_seconds_per_ask: Time limit for one ask in seconds, above 0. The device declines an ask that takes longer.
        privacy_budget: Maximum `(epsilon, delta)` of all private releases of this state directory together. The device
            uses the smaller of the run's and this epsilon, and declines a release beyond it. Default: the run's epsilon
            and delta, so one release. With a budget, the device takes part only in runs with [privacy].
        clock: Clock for tests, such as `fleetdistill.testing.ManualClock`. Default: the system clock.

    Raises:
        ConfigurationError: An argument is invalid, or has no effect together with `worker`.
        StateError: `state_dir` is in use, is damaged, or belongs to another run or device.
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
        privacy_budget: tuple[float, float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        torch_options: dict[str, Any] = {
            "test_data": test_data,
            "validation_data": validation_data,
            "model_name": model_name,
            "torch_device": torch_device,
            "predictor": predictor,
        }
        check_columns(allow)
        check_backend(model, data, worker, **torch_options)
        check_export(export_onnx)
        check_limits(max_threads, max_seconds_per_ask)
        budget = checked_budget(privacy_budget)
        if isinstance(server, str):
            check_transport_security(server, insecure, enrolment is not None or is_enrolled(Path(state_dir)))
        self._has_worker, self._export_onnx = worker is not None, export_onnx
        self._stopped, self._closed = threading.Event(), False
        self._guard = Guard(on_event or (lambda event: None))
        self._storage = Storage(Path(state_dir), max_spool_bytes)
        try:
            self._session = self._open_session(server, enrolment, run, device_id, clock or SystemClock(), allow)
        except FleetDistillError:
            self._storage.close()
            raise
        self._events = Events(self._guard, self.device_id)
        self._check_in = CheckIn(
            self._session,
            self._events,
            make_compute=_compute_factory(model, worker, torch_options),
            data=data,
            max_threads=max_threads,
            only_private=budget is not None,
            downloads=Downloads(self._storage.directory / DOWNLOADS, max_spool_bytes),
        )
        ready_compute = self._check_in.ready_compute
        self._predictions = Predictions(self._session, ready_compute)
        self._sender = Sender(self._session, self._events, ready_compute, self._predictions, export_onnx)
        self._handler = AskHandler(
            self._session,
            self._events,
            self._check_in,
            self._sender,
            self._stopped,
            private=PrivateAnswers(self._storage, budget, self._events),
            max_seconds=max_seconds_per_ask,
        )

    def _open_session(
        self,
        server: str | Link,
        enrolment: str | Path | None,
        run: str,
        device_id: str | None,
        clock: Clock,
        allow: Sequence[str],
    ) -> Session:
        identity = load_identity(self._storage, run, device_id)
        adopt_proxy_set(self._storage.directory)
        if isinstance(server, str):
            server = open_link(server, enrolment, self._storage.directory, identity.device)
        link = MeteredLink(server, lambda count: None)
        return Session(self._storage, link, identity, self._guard, clock, consent=Consent(allow))

    @property
    def device_id(self) -> str:
        """Name of this device in the fleet."""
        return self._session.identity.device

    @property
    def state_dir(self) -> Path:
        """Directory that stores the device's identity, model and unfinished work."""
        return self._storage.directory

    @property
    def model(self) -> Any:
        """The app's model: the last delivered one, in eval mode.

        A torch module, or the model type of the app's `worker`, updated in place by deliveries. Before the first one it
        is the model that the app passed in, with the run's initial weights unless `validation_data` was given. If the
        method has several variants, it is the best one on `validation_data`, or `general` without such data.

        Raises:
            FleetDistillError: The first access may check in and build the model, which can fail as in `step`.
        """
        with self._guard.held():
            return self._check_in.ready_compute().delivered_model()

    @property
    def models(self) -> Mapping[str, Any]:
        """All delivered variants of the model by name, in eval mode.

        Most methods have one variant, `general`. classstats adds `personal`, weighted by the device's own class shares,
        and, unless `features = "averaged"`, `own`, the network that the app passed in. Before the first delivery the
        mapping has only that network, as `own` with classstats and as `general` with other methods; a missing name
        raises ModelError, and `in` and `get` work as in any mapping.

        Note:
            The fleet trains `own` only with `own_network = "taught"`. With `features = "model"` and without
            `validation_data`, its extractor is the run's and its other layers were not trained on it: do not use it.
        """
        with self._guard.held():
            return AppModels(self._check_in.ready_compute().delivered_models())

    def predict(self, inputs: Any) -> Any:
        """Returns the delivered model's logits, also while the device trains or receives another model.

        Thread-safe, and without a lock: every call uses exactly one delivered model. The device copies the model at the
        first call and at each later delivery, before its event `delivered`. The model is that of `model`.

        Args:
            inputs: `[batch, *input_shape]` of any float type, on any device; a NumPy array or a torch tensor. A device
                without PyTorch accepts only arrays.

        Returns:
            Logits `[batch, classes]` float32; an array for an array, a tensor on the same device for a tensor.

        Raises:
            DataError: The inputs are not floats, or have another shape.
            ModelError: A device without PyTorch has no model before the first delivery, a custom worker does not
                support `predict`, or the model does not accept the batch.
            FleetDistillError: The first call may check in and build the model, which can fail as in `step`.
        """
        return self._predictions.predict(inputs)

    def replace_data(self, data: Any = None) -> None:
        """Replaces the training data. The next `step` checks in with them before it requests work.

        An answer without a receipt is settled first, because it was made from the previous data. The device keeps its
        model state; `model` and `models` then return new objects. May be called from `on_event`. Invalid data
        raise DataError in the next `step`.

        Args:
            data: New training data, as in `Device(data=...)`. Omit it if the device has a `worker`, whose function is
                then called again.

        Raises:
            ConfigurationError: `data` is missing, or the device has a `worker` and `data` was given.
        """
        if (data is None) is not self._has_worker:
            expected = "no argument with a worker, got new data" if self._has_worker else "the new data, got None"
            raise ConfigurationError(f"replace_data expects {expected}")
        with self._guard.held():
            self._check_in.replace_data(data)

    def run(self) -> None:
        """Takes part in the run until the run is finished, `stop` is called, or Ctrl-C is pressed.

        While the server is unavailable, `run` retries with exponential backoff, 0.5 to 15 seconds.

        Raises:
            RefusedError: The server refuses this device permanently; the message has the reason.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        try:
            self._run()
        except KeyboardInterrupt:
            self._stopped.set()
            self._events.emit("interrupted", 0, "interrupted by Ctrl-C; the device resumes its work after a restart")

    def _run(self) -> None:
        pause, last_error = _FIRST_PAUSE_SECONDS, ""
        while not self._stopped.is_set():
            try:
                if self.step() is Step.FINISHED:
                    return
                pause, last_error = _FIRST_PAUSE_SECONDS, ""
            except LinkError as error:
                if self._stopped.is_set():
                    return
                if str(error) != last_error:  # one event, not one for each attempt
                    last_error = str(error)
                    self._events.emit("lost-contact", 0, f"{last_error}; the device keeps trying")
                self._session.clock.wait(self._stopped, error.after_seconds + random.uniform(pause / 2, pause))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def step(self, wait_seconds: float = POLL_SECONDS) -> Step:
        """Settles an unfinished answer, or requests an ask from the server and answers it.

        For an app with its own loop; `run` calls it repeatedly.

        Args:
            wait_seconds: How long the server may hold the request if there is no work, 0 to 60 seconds.

        Returns:
            `Step.ANSWERED`, `Step.WAITED` if there was no work, `Step.PAUSED` if the device must not work now, or
            `Step.FINISHED` at the end of the run.

        Raises:
            LinkError: The server is unavailable or temporarily refuses requests, or the disk is full. Retry later.
            RefusedError: The server refuses this device permanently.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        try:
            with checked_by(self._check_stopped):
                check_may_continue()
                return self._step(wait_seconds)
        except WorkInterrupted:
            return Step.PAUSED
        except RefusedError as refusal:
            if refusal.code == Code.BAD_IDENTITY and "check_in" in refusal.details:
                self._session.terms = None  # a server restored from a backup no longer has this device: check in again
            elif is_final(refusal.code):
                raise
            raise LinkError(str(refusal), after_seconds(refusal.details)) from refusal

    def _step(self, wait_seconds: float) -> Step:
        with self._guard.held():
            if self._check_in.is_due:
                self._check_in.check_in()
            self._events.emit_put_aside(self._storage.put_aside)
            pending = self._storage.outbox.pending()
        if pending is not None:
            self._sender.settle(pending)
            return Step.ANSWERED
        self._sender.emit_outcome()  # left by an earlier process that ended before it emitted the events
        self._check_in.check_in_changed_data()
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
                self._session.clock.wait(self._stopped, pause_seconds(response.come_back, self._session.link.remote))
                return Step.WAITED

    def stop(self) -> None:
        """Interrupts the current step and makes `run` return. Thread-safe; may be called from a signal handler.

        Training ends after the current mini-batch, and calls to the server are cancelled. The committed state is
        unchanged. After a restart the device does the same work again, if the server still requests it.
        """
        self._stopped.set()
        self._session.link.interrupt()

    def close(self, *, leave: bool = True) -> None:
        """Leaves the run and releases the state directory.

        The device does not leave while an answer has no receipt or an ask was interrupted, because leaving would close
        the ask; the server then waits until the lease ends.

        Args:
            leave: Whether to leave the run. With False the server keeps waiting for the answer to an open ask.
        """
        if self._closed:
            return
        self._closed = True
        self._stopped.set()
        if leave and self._session.terms is not None:
            with contextlib.suppress(FleetDistillError):
                if self._storage.outbox.pending() is None and not self._session.ask_interrupted:
                    self._session.link.leave(self._session.identity)
        self._session.link.close()
        self._storage.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise Hold("stopped", "the app stopped the device").error()

    def _finish(self, reason: str) -> Step:
        if self._export_onnx == "finish":
            self._sender.export(0)
        self._events.emit("finished", 0, plain(reason))
        return Step.FINISHED


def _compute_factory(model: Any, worker: MakeCompute | None, torch_options: Mapping[str, Any]) -> MakeForData:
    """Returns the function that makes the compute backend; a `worker` has its own data."""
    if worker is not None:
        return lambda contract, data: worker(contract)
    return partial(_torch_compute, model=model, **torch_options)


def _torch_compute(contract: contract_pb2.Contract, data: Any, **options: Any) -> Compute:
    from fleetdistill.device.torch_compute import TorchCompute

    return TorchCompute(contract, data=data, **options)
