"""`Device`, the main class of the SDK: embeds a device of the fleet in an app.

    with Device(server="127.0.0.1:50051", model=make_model, data=(images, labels), state_dir="fleet-state") as device:
        device.run()

A device calls the server and never listens. It checks in, waits for asks, trains, and sends answers. Its state
directory holds everything that must survive a crash, so the process can be killed at any time and resumes after a
restart. Importing this module does not load torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fleetdistill.checked import check_name, check_number
from fleetdistill.clock import Clock, SystemClock
from fleetdistill.control_flow import control_flow_as_errors
from fleetdistill.data.samples import check_splits
from fleetdistill.data.splits import Splits, splits_of
from fleetdistill.deployment.settings import Deployment
from fleetdistill.device.app_models import AppModels, Predictions
from fleetdistill.device.arguments import (
    check_backend,
    check_columns,
    check_connection,
    check_export,
    check_groups,
    check_on_event,
    check_state_dir,
)
from fleetdistill.device.ask_handler import AskHandler
from fleetdistill.device.backend import Backend, ComputeFactory
from fleetdistill.device.budgets import Budgets
from fleetdistill.device.check_in import CheckIn
from fleetdistill.device.consent import Consent
from fleetdistill.device.contact import Contact, open_link, request_forgetting
from fleetdistill.device.deployer import Deployer
from fleetdistill.device.eligibility import Eligibility
from fleetdistill.device.events import DeviceLock, Event, Events, Step
from fleetdistill.device.identity import load_identity, save_server
from fleetdistill.device.interrupts import StopRequest, delays_ctrl_c
from fleetdistill.device.loop import POLL_SECONDS, REPLY_SECONDS, Loop, Turns
from fleetdistill.device.options import Runtime, Server
from fleetdistill.device.parts import DeviceParts
from fleetdistill.device.permission import MeteredLink, Permission
from fleetdistill.device.private import PrivateAnswers
from fleetdistill.device.secure import ANY_TERMS, SecureSums, SecureTerms
from fleetdistill.device.sender import Sender
from fleetdistill.errors import ConfigurationError, DeviceClosedError, LinkError
from fleetdistill.link.abilities import Abilities
from fleetdistill.link.base import HandsOver, Link, replies_within
from fleetdistill.link.downloads import DOWNLOADS, Downloads, MemoryDownloads
from fleetdistill.models.torch_model import TorchModel
from fleetdistill.spans import NO_SPANS, ProviderSpans, Spans
from fleetdistill.state.directory import Storage, erase_directory
from fleetdistill.state.sample_ids import SampleIds
from fleetdistill.state.saved_profile import PROFILE
from fleetdistill.state.sent_ledger import LEDGER, Ledger, read_ledger
from fleetdistill.wire.kind import DEFAULT_COLUMNS

if TYPE_CHECKING:
    from torch import nn

    from fleetdistill.compute.base import Compute, MakeCompute
    from fleetdistill.device.preview import Preview

_MAX_WAIT_SECONDS = 60.0


class Device:
    """Trains the app's model on private data when the server asks, and delivers the result to the app.

    Takes part in the foreground (`run`), in a thread (`start`, `stop`, `join`), in the app's own loop (`tick`
    or `step`), or in asyncio (`AsyncDevice`). Any thread may use any member at any time. One thread at a time works on
    the device: `run`, `start`, `step`, `tick`, `preview` and `forget` raise DeviceBusyError while another call of them
    is in progress.

    Args:
        server: `"host:port"` of the aggregation server, a `Link`, or `Server`, which names a run and a token, too.
        model: Local model, or a function without arguments that builds it when it is first needed, such as its class: a
            module with `extractor`, `features` and `predict`. `fleetdistill.training.split_sequential` makes one from a
            chain of layers. Or `TorchModel`, which has its name, its torch device and its predictor.
        data: Private training data, read again at every ask: `(inputs, labels)` as tensors or NumPy arrays, also
            memory-mapped ones, a map-style or iterable torch Dataset, a DataLoader, a list of pairs, a
            `fleetdistill.data.Augmented`, or a function that returns one of these or yields pairs. Inputs are float
            `[samples, *input_shape]`; labels are integers `[samples]` in `[0, classes)`. Or
            `fleetdistill.data.Splits`, which has test and validation data, too.
        worker: Compute backend, instead of `model` and `data`, for an app that does not use PyTorch: a function that
            takes the run's contract and returns a `fleetdistill.compute.Compute`.
        state_dir: Directory used only by this device. Stores its identity, its model and unfinished work. A new one
            must be empty. A simulation passes an open `Storage`, which the device closes.
        device_id: Name of the device, 1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit, not
            ending with '.', and no device of Windows such as CON. Default: a UUID stored in `state_dir`.
        allow: Columns that may leave the device, a subset of `COLUMNS`. Default: `class_statistics`, `counts` and
            `metrics`, which class statistics send. A run whose method sends others refuses the device, with the line to
            add. Every answer includes the number of samples. `metrics` includes the training loss; `counts` adds the
            figures of each class.
        on_event: Callback for every `Event`, called in the thread of `run`. An exception in it is logged and reported
            to it as the event `callback-failed`; only KeyboardInterrupt and SystemExit end the work. After a crash,
            events about an answer may be repeated, but never lost.
        eligibility: Conditions under which the device works. Default: always.
        budgets: Limits on what the device uses, and on what a run may require. Default: `Budgets()`.
        secure: Terms of secure sums, which no cryptographer has reviewed yet. With them, the device takes part only in
            runs with secure sums. Default: in any run.
        deployment: How to keep, check and export the delivered model. Default: `Deployment()`.
        runtime: Clock and tracer provider. Default: `Runtime()`.

    Raises:
        ConfigurationError: An argument is invalid.
        ModelError: The module passed as `model` is not a local model. A function is called later.
        DataError: The data cannot be used. Functions and iterables are read later.
        StateError: `state_dir` is in use, is damaged, contains other files, or belongs to another run or device.
    """

    @delays_ctrl_c
    def __init__(
        self,
        *,
        server: str | Link | Server,
        model: nn.Module | Callable[[], nn.Module] | TorchModel | None = None,
        data: Any = None,
        worker: MakeCompute | None = None,
        state_dir: str | Path | Storage,
        device_id: str | None = None,
        allow: Sequence[str] = DEFAULT_COLUMNS,
        on_event: Callable[[Event], object] | None = None,
        eligibility: Eligibility | None = None,
        budgets: Budgets | None = None,
        secure: SecureTerms | None = None,
        deployment: Deployment | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        server = server if isinstance(server, Server) else Server(server)
        model = model if model is None or isinstance(model, TorchModel) else TorchModel(model)
        splits = None if data is None else splits_of(data)
        directory = state_dir.directory if isinstance(state_dir, Storage) else check_state_dir(state_dir)
        check_columns(allow)
        if device_id is not None:
            check_name("device_id", device_id)
        check_groups(eligibility=eligibility, budgets=budgets, secure=secure, deployment=deployment, runtime=runtime)
        check_backend(model, splits, worker)
        if on_event is not None:
            check_on_event(on_event)
        deployment = deployment or Deployment()
        deployment.check_used(has_worker=worker is not None)
        check_export(deployment, worker)
        check_connection(server, directory)
        runtime = runtime or Runtime()
        spans = NO_SPANS if runtime.tracer_provider is None else ProviderSpans(runtime.tracer_provider)
        limits = budgets or Budgets()
        self._has_worker = worker is not None
        self._lock = DeviceLock(on_event or (lambda event: None))
        self._storage = state_dir if isinstance(state_dir, Storage) else Storage(directory, limits.spool_bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(self._storage.close)  # a constructor that fails leaves the directory unlocked
            clock = runtime.clock or SystemClock()
            permission = Permission(self._storage, clock, eligibility, budgets)
            self._parts = self._make_parts(server, device_id, clock, allow, permission, spans)
            factory = ComputeFactory(model, splits, worker, SampleIds(self._storage), deployment)
            downloads = _downloads(self._storage, server.address, limits.spool_bytes)
            self._assemble(factory, None if splits is None else splits.data, downloads, limits, deployment, secure)
            undo.pop_all()

    def _make_parts(
        self,
        server: Server,
        device_id: str | None,
        clock: Clock,
        allow: Sequence[str],
        permission: Permission,
        spans: Spans,
    ) -> DeviceParts:
        run, link, server_address = server.run, server.address, ""
        identity = load_identity(self._storage, "" if isinstance(run, Abilities) else run, device_id)
        if isinstance(run, Abilities) and not identity.run:
            identity.abilities.CopyFrom(run.message())
        if isinstance(link, str):
            server_address = link
            if not self._storage.load_identity().get("server"):
                save_server(self._storage, link)  # a later one replaces it once it has accepted the device
            link = open_link(link, server.enrolment, self._storage.directory, identity.device, spans)
        same_process = link if isinstance(link, HandsOver) and not self._storage.has_directory else None
        add_bytes = partial(permission.usage.add, "bytes")
        return DeviceParts(
            storage=self._storage,
            link=link if same_process else MeteredLink(link, add_bytes, permission.note_check_in),
            identity=identity,
            server_address=server_address,
            events=Events(self._lock, identity.device),
            lock=self._lock,
            clock=clock,
            consent=Consent(allow),
            permission=permission,
            same_process=same_process,
            spans=spans,
        )

    def _assemble(
        self,
        factory: ComputeFactory,
        data: Any,
        downloads: Downloads,
        limits: Budgets,
        deployment: Deployment,
        secure: SecureTerms | None,
    ) -> None:
        """Makes the objects of the device, each from those before it."""
        parts, stopped = self._parts, StopRequest()
        privacy = limits.privacy_budget()
        sums = SecureSums(
            parts.storage, parts.identity.device, secure or ANY_TERMS, privacy, parts.events, parts.clock.time
        )
        sums.forget_expired()
        contact = Contact(parts.events, parts.clock)
        self._backend = Backend(parts, factory, data, downloads)
        self._check_in = CheckIn(
            parts,
            self._backend,
            max_threads=limits.threads,
            only_private=privacy is not None,
            secure=secure,
        )
        self._predictions = Predictions(
            parts, self._backend, self._stored_compute, factory.own_model, lambda: self._deployer.version
        )
        self._deployer = Deployer(parts, self._backend, self._check_in.compute_of_app, self._predictions, deployment)
        sender = Sender(parts, self._check_in, self._backend, self._deployer)
        self._handler = AskHandler(
            parts,
            self._check_in,
            self._backend,
            sender,
            private=PrivateAnswers(parts.storage, privacy, parts.events, sums),
            max_seconds=limits.seconds_per_ask,
            is_pinned=self._deployer.versions.is_pinned,
        )
        turns = Turns(parts, contact, self._check_in, sender, self._deployer, self._handler, stopped)
        self._loop = Loop(parts, contact, turns, self._backend, stopped)

    def __repr__(self) -> str:
        run = self._parts.identity.run
        return f"<Device {self.device_id!r}{f' of run {run!r}' if run else ''}, version {self.version}>"

    @property
    def device_id(self) -> str:
        """Name of this device in the fleet."""
        return self._parts.identity.device

    @property
    def state_dir(self) -> Path:
        """Directory that stores the device's identity, model and unfinished work."""
        return self._parts.storage.directory

    # --- work

    def run(self, *, handle_ctrl_c: bool = True) -> None:
        """Takes part in the run until it is finished, or until `stop` is called.

        While the server is unavailable, `run` retries with exponential backoff, 0.5 to 15 seconds. A call of `stop`
        before `run` makes it return immediately.

        Args:
            handle_ctrl_c: Whether Ctrl-C calls `stop`, and a second Ctrl-C makes `run` return without waiting for the
                end of the work in progress. Applies to the main thread, unless the app has its own handler for SIGINT.
                With False, Ctrl-C raises KeyboardInterrupt, as usual in Python.

        Raises:
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
            RefusedError: The server refuses this device permanently; the message has the reason.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        self._loop.run(handle_ctrl_c=handle_ctrl_c)

    def step(self, wait_seconds: float = POLL_SECONDS) -> Step:
        """Runs a turn: settles an unfinished answer, or requests an ask from the server and answers it.

        Waits at most `wait_seconds`: for work, or while the device must make no call, because the server or a lost
        contact requires a pause or the device may not work; if that ends sooner, another turn follows. Work, and up to
        7 seconds for a server that does not answer, come on top. For an app with its own thread for the device.

        Args:
            wait_seconds: How long to wait if there is nothing to do, 0 to 60 seconds.

        Returns:
            `Step.ANSWERED`, `Step.DECLINED` if an ask ended without an answer that counts, `Step.WAITED` if there was
            no work or the device must not work now, `Step.PAUSED` if `stop` was called, or `Step.FINISHED` at the end
            of the run.

        Raises:
            ConfigurationError: `wait_seconds` is outside its range.
            LinkError: The server is unavailable or temporarily refuses requests, or the disk is full. Retry later.
            NoRoomError: The disk has no room for the device's first state. Retry later.
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
            RefusedError: The server refuses this device permanently.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        check_number("wait_seconds", wait_seconds)
        if not 0 <= wait_seconds <= _MAX_WAIT_SECONDS:
            raise ConfigurationError(f"wait_seconds is {wait_seconds}, must be in [0, {_MAX_WAIT_SECONDS:g}]")
        return self._loop.step(wait_seconds)

    def tick(self) -> Step:
        """Runs one turn without waiting, for an app with its own loop.

        Does not wait for work or for the end of a pause: it returns `Step.WAITED` immediately until the next attempt is
        due. It blocks while it computes or sends an answer, and up to 7 seconds for a server that accepts calls and
        does not answer; a loop that must not stand still uses `start`.

        Returns:
            As `step`; `Step.WAITED` also while the server is unavailable (events `lost-contact`, `contact-returned`).

        Raises:
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
            RefusedError: The server refuses this device permanently.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        return self._loop.tick()

    @property
    def pause_seconds(self) -> float:
        """Seconds until the next turn of `tick` is due, at least 0: the server or a lost contact requires a pause.

        Until then `tick` returns `Step.WAITED` without a call. For apps that run several devices in one loop.
        """
        return self._loop.pause_seconds

    def start(self) -> None:
        """Takes part in the run in a background thread, until the run is finished or `stop` is called.

        Events are emitted in that thread. An exception ends it, is emitted as the event `failed`, and is raised by
        `join`. The thread is a daemon: an app that ends without `close` stops the device, and waits for it at most 5
        seconds; unfinished work is done again after a restart. Withdraws an earlier `stop`.

        Raises:
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
        """
        self._loop.start()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end of the background thread.

        Args:
            timeout: Maximum time in seconds, at least 0; None for no limit.

        Returns:
            Whether the thread has ended; True if the device was never started.

        Raises:
            ConfigurationError: `timeout` is not a number of at least 0, or None.
            DeviceBusyError: `on_event` called `join` in the background thread, which would wait for itself.
            BaseException: The exception that ended the thread, at each call until the next `start`.
        """
        if timeout is not None:
            check_number("timeout", timeout)
            if not timeout >= 0:
                raise ConfigurationError(f"timeout is {timeout}, must be at least 0, or None for no limit")
        return self._loop.join(timeout)

    def background_result(self) -> Future[None]:
        """Returns the result of the last `start`, as a future that cannot be cancelled; for `AsyncDevice`.

        Raises:
            ConfigurationError: The device was never started.
        """
        return self._loop.background_result()

    def stop(self) -> None:
        """Ends the work in progress; `run`, the background thread, `step` or `tick` then returns.

        Training ends after the current mini-batch, and calls to the server are cancelled. The committed state is
        unchanged. A later turn does the same work again, if the server still requests it. An interrupted ask stays
        open: the round waits for its answer until that turn, or until the ask's deadline or the device's lease ends.

        If no work is in progress, ends the next `run`, `step` or `tick`, but not the next `start`. Does not wait. The
        device can be used again. Thread-safe; may be called from a signal handler.
        """
        self._loop.stop()

    def wake(self) -> None:
        """Makes the next turn begin at once, instead of after a pause or a wait for work.

        For example when the network is back, or when what a probe of `eligibility` looks at has changed. A pause that
        the server has asked for (event `waiting` with the condition `pace`) goes on. Does not wait. Thread-safe.
        """
        self._loop.wake()

    def close(self, *, leave: bool = True) -> None:
        """Stops the device, waits for the end of its work, leaves the run and releases the state directory.

        The device does not leave while an answer has no receipt or an ask was interrupted, because leaving would close
        the ask; the server then waits until the lease ends. Called from `on_event`, `close` returns immediately, and
        the device closes when the turn ends. Leaving waits up to 7 seconds for a server that does not answer; Ctrl-C
        cuts this short.

        Args:
            leave: Whether to leave the run. With False the server keeps waiting for the answer to an open ask.
        """
        self._loop.close(leave=leave)

    def __enter__(self) -> Self:
        self._loop.check_open("__enter__")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._loop.note_ctrl_c()
        self.close()

    # --- the app's model

    @property
    def model(self) -> Any:
        """The app's model: the last delivered one, in eval mode.

        A torch module, or the model type of the app's `worker`, updated in place by deliveries. Before the first one it
        is a copy of the model that the app passed in. If the method has several variants, it is the best one on
        `validation_data`, or `general` without such data.

        Raises:
            FleetDistillError: The first access builds the model, and before the first ask checks in, which can fail as
                in `step`.
            DeviceClosedError: The device was closed before the first access.
        """
        with control_flow_as_errors("model"), self._parts.lock.held():
            return self._compute_for("model").delivered_model()

    @property
    def models(self) -> Mapping[str, Any]:
        """All delivered variants of the model by name, in eval mode.

        Most methods have one variant, `general`. classstats adds `personal`, weighted by the device's own class shares,
        and `own`, the network that the app passed in. Before the first delivery the mapping has only that network, as
        `own` with classstats and as `general` with other methods; a missing name raises ModelError, and `in` and `get`
        work as in any mapping. Until the device has worked on an ask, the mapping needs the server: the run's method
        decides on the names. `predict` uses that network without the server.

        Note:
            The fleet trains `own` only with `own_network = "taught"`.
        """
        with control_flow_as_errors("models"), self._parts.lock.held():
            return AppModels(self._compute_for("models").delivered_models())

    def _compute_for(self, member: str) -> Compute:
        """Returns the compute backend; after `close` only if no file and no call is required."""
        compute = self._backend.compute
        if not self._loop.closed:
            with self._check_in.as_link_errors(), replies_within(REPLY_SECONDS):
                return self._check_in.compute_of_app()
        if compute is None or not compute.has_state:
            raise DeviceClosedError(member, self.state_dir)
        return compute

    def _stored_compute(self) -> Compute | None:
        self._loop.check_open("predict")
        with self._check_in.as_link_errors():
            return self._check_in.stored_compute()

    def predict(self, inputs: Any) -> Any:
        """Returns the logits of the last delivered model, also without the server, and while the device trains.

        The model is that of `model`, read from `state_dir` after a restart; before the first delivery it is the app's
        own. Thread-safe, and without a lock: every call uses exactly one model. The device copies the model at the
        first call and at each later delivery, before its event `delivered`; if that fails (event `not-copied`), calls
        go on with the previous copy. If the state is damaged, or of an earlier network of the app, the delivered
        `model.onnx` predicts, with a warning in the log.

        Args:
            inputs: `[batch, *input_shape]` of any float type, on any device; a NumPy array or a torch tensor. A device
                without PyTorch accepts only arrays. Scale values as those of the training data: pixels of 0 to 255 for
                a model that was trained on 0 to 1 give wrong answers and no error, only a warning in the log, if the
                range of the training data is known.

        Returns:
            Logits `[batch, classes]` float32; an array for an array, a tensor on the same device for a tensor.

        Raises:
            DataError: The inputs are not floats, have another shape, or are not finite.
            ModelError: A device with a `worker` has no model before its first ask, or with `light_worker` before
                the first delivery; a custom worker does not support `predict`; or the model does not accept the batch,
                or gives NaN. With a `state_dir` of another network of the app, and without `model.onnx`, there is none
                either.
            StateError: The model in `state_dir` is damaged, and there is no `model.onnx` of its version; or the process
                is a fork of the one that opened the device, where PyTorch would wait for threads that it does not have.
            DeviceClosedError: The device was closed before the first call.
        """
        self._loop.check_process("predict")
        with control_flow_as_errors("predict"):
            return self._predictions.predict(inputs)

    @property
    def version(self) -> int:
        """Number of the delivered model in use; 0 before the first delivery.

        A delivery has a higher number than all earlier ones. A roll-back returns to an earlier number.
        """
        return self._predictions.version

    def roll_back(self) -> int:
        """Returns to the previous version of the delivered model in the next turn, with the event `rolled-back`.

        That turn begins at once, also while the device must not work: this ends a wait for work, and the pause after a
        turn. Replaces `model`, the model of `predict` and the ONNX files. The app keeps the earlier version until
        `roll_forward`, also after a restart: training continues from its own state, and later deliveries are stored
        with their numbers, but not used (event `kept`). Thread-safe.

        Returns:
            Number of the version that the device returns to.

        Raises:
            StateError: There is no earlier version, because there was one delivery or none, or none is kept (see
                `Deployment.keep_versions`); or it is damaged.
            DeviceClosedError: The device was closed.
        """
        with self._parts.lock.held():
            self._loop.check_open("roll_back")
            number = self._deployer.request_roll_back()
        self._loop.wake()
        return number

    def roll_forward(self) -> int:
        """Ends the effect of `roll_back`: from the next turn on the app takes deliveries again.

        The app's model becomes the newest version that was delivered, also the one that `roll_back` replaced, with the
        event `delivered`. A roll-back that no turn has carried out yet does not take place. Thread-safe.

        Returns:
            Number of the version that the app uses from the next turn on.

        Raises:
            StateError: The app takes deliveries already: there was no `roll_back`, or `roll_forward` has ended it.
            DeviceClosedError: The device was closed.
        """
        with self._parts.lock.held():
            self._loop.check_open("roll_forward")
            number = self._deployer.roll_forward()
        self._loop.wake()
        return number

    # --- data

    def replace_data(self, data: Any = None) -> None:
        """Replaces the training data, or reads them again. The next turn checks in with them before it requests work.

        That turn begins at once: this ends a wait for work, and the pause after a turn. Work in progress ends with the
        previous data. An answer without a receipt is settled first, because it was made from the previous data. The
        device keeps its model state, and `model` and `models` stay the same objects. May be called from `on_event`.
        Data that the constructor would refuse are refused at once, and after a check-in those with another shape or
        label than the run's, too; what only reading them shows raises DataError in the next turn. A run that has the
        device's private release does not use them (event `not-released`).

        Args:
            data: New training data, as in `Device(data=...)`. Without it the device reads the data that it has again; a
                device with a `worker` always does.

        Raises:
            ConfigurationError: The device has a `worker` and `data` was given.
            DataError: The data cannot be used.
            StateError: The state directory cannot be written, for example because it was deleted. The data stay.
            DeviceClosedError: The device was closed.
        """
        if data is not None and self._has_worker:
            raise ConfigurationError("replace_data expects no argument with a worker, got new data")
        check_splits(Splits(data))
        with self._parts.lock.held():
            self._loop.check_open("replace_data")
            self._check_in.check_data(data)
            self._check_in.replace_data(data)
        self._loop.wake()

    # --- what leaves the device

    @property
    def allow(self) -> tuple[str, ...]:
        """Columns that may leave the device. Assign fewer to withdraw consent, from any thread and at any time.

        No answer that is sent after the assignment contains a withdrawn column; a stored one is dropped unless sending
        has begun. This ends a wait for work, as `replace_data` does. The next `step` checks in again, and raises
        RefusedError if the run's method needs the column.

        Raises:
            ConfigurationError: A column is unknown, or not allowed at present. Open a new device to allow more.
        """
        return self._parts.consent.columns

    @allow.setter
    def allow(self, columns: Sequence[str]) -> None:
        self._parts.consent.narrow(columns)
        self._loop.wake()

    def preview(self) -> Preview:
        """Computes an answer as the run's first step requires, and returns what it contains. Nothing of it is sent.

        For the app's user, before `run`. Checks in as `step` does, because the run decides what an answer contains;
        this waits up to 7 seconds for a server that does not answer.
        Shapes, types and sizes are those of the first answer; values differ with the server's seed. In a private run
        the values have new noise, and no privacy is spent. The committed state does not change.

        Raises:
            ConfigurationError: The method or the `worker` does not support a preview, or the answer would contain a
                column that is not allowed.
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
            FleetDistillError: The check-in or the computation failed, as in `step`.
        """
        with self._loop.working("preview"), self._check_in.as_link_errors(), replies_within(REPLY_SECONDS):
            return self._handler.preview()

    @property
    def ledger(self) -> Ledger:
        """What this device has sent about its data, from all earlier processes too. Readable from any thread.

        Raises:
            StateError: The file cannot be read.
        """
        return read_ledger(self._parts.storage.load(LEDGER) or b"")

    def forget(self, *, local: bool = False) -> bool:
        """Asks the server to delete what this device has sent, erases the state directory, and closes the device.

        The server deletes before its next round, or at once if the run is over. Where only a front serves the store,
        nothing deletes until an engine's server runs, or the operator calls `fleetdistill devices forget`. Waits up to
        7 seconds for a server that does not answer.

        The privacy ledger of private runs is kept, because a release stays spent. A new `Device` with this directory is
        a new device with a new id.

        Args:
            local: Whether only to erase, without a call: for a user who wants to erase now, while the server is
                unavailable. The device's key is erased too, so it cannot ask later.

        Returns:
            Whether the server has recorded the request, or has no data of the device. If False, the server does not
            know the request: ask its operator for `fleetdistill devices forget`.

        Raises:
            LinkError: The server is unavailable; nothing is erased. Call it again later, or with `local`. A device that
                has never called a server needs none.
            RefusedError: The server refuses this device, or does not know it although a server has accepted it: it is
                another one, or has deleted the run. Nothing is erased.
            DeviceBusyError: Another call works on the device: call `stop` and wait for it first.
            DeviceClosedError: The device was closed.
            StateError: A file cannot be deleted. Opening the directory tries again.
        """
        with self._loop.working("forget"):
            sent = self.ledger.totals.messages  # a device that has sent nothing needs no server
            try:
                recorded = not sent or (not local and self._request_forgetting())
            except LinkError as error:
                text = f"{error}; nothing was erased: try again later, or only erase with forget(local=True)"
                raise LinkError(text, error.after_seconds) from error
        self.close(leave=False)
        self._predictions.forget()
        self._backend.forget()
        erase_directory(self._parts.storage.directory)
        return recorded

    def _request_forgetting(self) -> bool:
        accepted = self._parts.storage.load(PROFILE) is not None
        return request_forgetting(self._parts.link, self._parts.identity, accepted=accepted)


def _downloads(storage: Storage, server: str | Link, max_bytes: int) -> Downloads:
    if storage.has_directory or isinstance(server, str):
        return Downloads(storage.directory / DOWNLOADS, max_bytes)
    return MemoryDownloads(server)
