"""Devices whose work is done in other processes: their compute backend, and the submission of work ahead of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from fleetdistill import COLUMNS
from fleetdistill.compute.base import Compute, Computed
from fleetdistill.device.private import hides_rows, private_columns
from fleetdistill.errors import RunError
from fleetdistill.knowledge import Kind
from fleetdistill.replacement import Replacement
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.backends.backend import (
    Backend,
    Description,
    MakeBackend,
    PackedPayload,
    Result,
    RunData,
    Task,
)
from fleetdistill_lab.simulation.spec.compute import Shared
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_compute
from fleetdistill_server.intake.device_api import DeviceApi

AHEAD = 256
"""Number of devices whose work is started before they need it, so that no worker waits for a slow device."""


class RemoteWork:
    """Submits devices' tasks to a backend.

    The devices run one after another in the simulation's process, as without a backend. `start` submits the next task
    of a device before its turn. A result is used only for exactly the task that the device then asks for.

    Args:
        api: The server's side of the device API.
        run: Name of the run.
        make_backend: Makes the backend, at the first task.
    """

    def __init__(self, api: DeviceApi, run: str, make_backend: MakeBackend) -> None:
        self._api = api
        self._store = api.store
        self._run = run
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._started: dict[str, tuple[Task, Future[Result]]] = {}
        self._computed: dict[str, bytes] = {}  # last ask that was computed, by device: its answer may not be sent yet
        self._packed: tuple[bytes, PackedPayload] | None = None

    def start(self, spec: DeviceSpec, contents: Mapping[str, bytes]) -> None:
        """Starts the work that a device needs next, if there is any.

        Args:
            spec: The device.
            contents: Its saved state; empty for a new device.
        """
        if spec.name not in self._started and (task := self._next_task(spec, contents)) is not None:
            self._started[spec.name] = task, self._submit(task)

    def _next_task(self, spec: DeviceSpec, contents: Mapping[str, bytes]) -> Task | None:
        state, delivered = contents.get("state.safetensors"), contents.get("delivered.safetensors")
        result = self._store.asks.next_open(self._run, spec.name)
        if result is not None:
            ask = service_pb2.Ask(**{name: getattr(result, name) for name in (*_FIELDS, "payload")})
            task = self.answer_task(spec, state, delivered, ask, self._allow())
            return None if self._computed.get(spec.name) == task.ask else task
        return None if contents else Task(spec, prepare_only=True)

    def _allow(self) -> tuple[str, ...]:
        """Returns the columns that answers may contain in this run."""
        hidden = hides_rows(self._api.sessions.contract(self._run))
        return private_columns(COLUMNS) if hidden else COLUMNS

    def answer_task(
        self, spec: DeviceSpec, state: bytes | None, delivered: bytes | None, ask: service_pb2.Ask, allow: Sequence[str]
    ) -> Task:
        """Returns the task to answer an ask. Its deadline and the like do not change the answer and are left out."""
        same = service_pb2.Ask(**{name: getattr(ask, name) for name in (*_FIELDS, "payload")})
        payload = self._payload(ask.payload) if ask.payload else None
        return Task(spec, state, delivered, same.SerializeToString(), tuple(allow), payload=payload)

    def _payload(self, sha256: bytes) -> PackedPayload:
        if self._packed is None or self._packed[0] != sha256:
            self._packed = sha256, PackedPayload.of(self._store.blobs.open(sha256))
        return self._packed[1]

    def started(self, device: str) -> Result | None:
        """Waits for the work that was started for a device and returns its result; None if there is none."""
        return _result(self._started[device][1]) if device in self._started else None

    def result(self, task: Task) -> Result:
        """Returns the result of a task, which may have been started ahead of time.

        Raises:
            RunError: The task cannot be computed.
        """
        started = self._started.pop(task.spec.name, None)
        if task.ask:
            self._computed[task.spec.name] = task.ask
        if started is not None and started[0] == task:
            return _result(started[1])
        return _result(self._submit(task))

    def _submit(self, task: Task) -> Future[Result]:
        if self._backend is None:
            self._backend = self._make_backend(self._run_data())
        return self._backend.submit(task)

    def _run_data(self) -> RunData:
        contract = self._api.sessions.contract(self._run)
        wanted = {contract.initial_weights, contract.proxy_digest} - {b""}
        payloads = {sha256: PackedPayload.of(self._store.blobs.open(sha256)) for sha256 in wanted}
        return RunData(contract.SerializeToString(), payloads)

    def close(self) -> None:
        """Ends the backend."""
        if self._backend is not None:
            self._backend.close()


_FIELDS = ("round", "step_number", "step", "seed")


def _result(future: Future[Result]) -> Result:
    result = future.result()
    if result.fault:
        raise RunError(f"{result.fault}; the traceback is in the worker's output")
    return result


class RemoteCompute(Compute):
    """`Compute` for a device whose asks a backend answers; it holds no model, only packed states.

    Args:
        spec: The device.
        work: Submits the tasks.
        contract: The run's contract.
    """

    def __init__(self, spec: DeviceSpec, work: RemoteWork, contract: contract_pb2.Contract) -> None:
        super().__init__(contract)
        self._spec, self._work = spec, work
        self._description: Description | None = None
        self._state: bytes | None = None
        self._delivered: bytes | None = None
        self._first: tuple[bytes, bytes] | None = None
        self._computed: Computed | None = None
        self._taken: set[bytes] = set()  # payloads that the device has downloaded

    def _described(self) -> Description:
        if self._description is None:
            result = self._work.started(self._spec.name)
            if result is None or result.description is None:
                result = _check(self._work.result(Task(self._spec, prepare_only=True)))
            self._description = result.description
        assert self._description is not None  # or an error
        return self._description

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        profile = contract_pb2.DeviceProfile.FromString(self._described().profile)
        del profile.allowed_columns[:]
        profile.allowed_columns.extend(sorted(allow))
        return profile

    def data_digest(self) -> bytes:
        return self._described().data_digest

    def wanted_payloads(self) -> Sequence[bytes]:
        return self._described().wanted_payloads

    def has_payload(self, sha256: bytes) -> bool:
        return sha256 in self._taken

    def take_payload(self, sha256: bytes, parts: Mapping[str, Kind]) -> None:
        """Records the download; the workers have the contract's payloads."""
        self._taken.add(sha256)

    def load_initial(self, parts: Mapping[str, Kind]) -> None:
        self._state = self._delivered = None
        self.has_state = True

    def state(self) -> bytes:
        return self._state if self._state is not None else self._first_state()[0]

    def delivered_state(self) -> bytes:
        return self._delivered if self._delivered is not None else self._first_state()[1]

    def _first_state(self) -> tuple[bytes, bytes]:
        if self._first is None:
            result = self._work.started(self._spec.name)
            if result is None or result.first is None:
                result = _check(self._work.result(Task(self._spec)))
            self._first = result.first
        assert self._first is not None  # the task has no state
        return self._first

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        self._state, self._delivered = saved, delivered
        self.has_state = True

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        result = _check(self._work.result(self._work.answer_task(self._spec, self._state, self._delivered, ask, allow)))
        assert result.computed is not None  # or an error
        self._computed, self._state = result.computed, result.computed.state
        return result.computed

    def deliver(self, replacement: Replacement) -> None:
        assert self._computed is not None  # called for its answer
        if replacement.replaced:
            self._delivered = self._computed.delivered

    def delivered_model(self) -> Any:
        return self._local().delivered_model()

    def delivered_models(self) -> Mapping[str, Any]:
        return self._local().delivered_models()

    def _local(self) -> Compute:
        """Returns a compute backend in this process, with the device's state."""
        made = make_compute(self._spec, self.contract, Shared())
        made.restore(self.state(), self.delivered_state())
        return made


def _check(result: Result) -> Result:
    if result.error is not None:
        raise result.error
    return result
