"""The compute backend of a simulated device whose work is done in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleetdistill.compute.base import Compute, Computed
from fleetdistill.knowledge import Kind
from fleetdistill.replacement import Replacement
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.backends.backend import Description, Result, Task
from fleetdistill_lab.simulation.backends.remote_work import RemoteWork
from fleetdistill_lab.simulation.spec.compute import Shared
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_compute


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
