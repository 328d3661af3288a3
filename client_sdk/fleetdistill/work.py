"""What a `Device` needs of whatever computes for it. `fleetdistill.worker` does it with PyTorch.

An app that computes with something else gives `Device(worker=...)`: a function that takes the run's contract and
returns an object with this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fleetdistill.knowledge import Kind
from fleetdistill.methods.base import Answer
from fleetdistill.verdict import Verdict
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from torch import nn

    from fleetdistill.local_training import Counts
    from fleetdistill.onnx_export import OnnxReport


@dataclass(frozen=True)
class Work:
    """What came of an ask.

    Attributes:
        answer: What goes to the server.
        state: Model and method after it; counts once the answer has its receipt.
        verdict: What becomes of the app's model then; None where the round goes on.
        delivered: The app's new model, where the verdict replaces it.
        scores: How the model does on the app's test and validation data, by split, where the round ends with it; a
            further answer of the method by `SPLIT/NAME`.
    """

    answer: Answer
    state: bytes
    verdict: Verdict | None = None
    delivered: bytes | None = None
    scores: Mapping[str, Counts] = field(default_factory=dict)


class DeviceWorker(Protocol):
    """Does a device's computing: holds model and method, answers asks, and packs its state into bytes.

    The device keeps these bytes, and hands them back after a crash; it never looks into them. Errors must be
    `FleetDistillError`s; a `CannotAnswer` or `KnowledgeError` out of `answer` declines the ask, others end the run.

    Attributes:
        contract: The run's terms.
        has_state: Whether the device's committed state is loaded. The device sets it when it has kept a first state.
    """

    contract: contract_pb2.Contract
    has_state: bool

    @property
    def has_proxy(self) -> bool:
        """Whether it has the run's proxy set; asked only where the run has one."""

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        """What the device says of itself at check-in; the same bytes each time for the same model and data."""

    def take_proxy(self, parts: Mapping[str, Kind]) -> None:
        """Takes the run's proxy set, whose payload was held against the contract's digest."""

    def load_initial(self, parts: Mapping[str, Kind]) -> None:
        """Takes the weights that every device of the run starts from."""

    def state(self) -> bytes:
        """All that the next answer depends on."""

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        """Takes up what `state` and `delivered_state` gave, and sets `has_state`."""

    def forget_state(self) -> None:
        """Clears `has_state`: what was learned since the last receipt does not count."""

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Work:
        """Answers an ask from the state of the last receipt, with nothing in it that `allow` keeps back."""

    def deliver(self, verdict: Verdict) -> None:
        """Carries out the verdict on the last answer, which has its receipt."""

    def delivered_model(self) -> nn.Module:
        """What `Device.model` returns."""

    def delivered_models(self) -> Mapping[str, nn.Module]:
        """What `Device.models` returns."""

    def delivered_state(self) -> bytes:
        """The app's model, as `restore` takes it."""

    def export(self, path: Path, number: int) -> OnnxReport:
        """Writes the delivered model as ONNX after round `number`; not called with `export_onnx="never"`.

        Where an app has several, each is written beside it under its name.
        """


@runtime_checkable
class NamesRows(Protocol):
    """What a `DeviceWorker` may do beside: then the server learns when the device has other rows than before."""

    def data_digest(self) -> bytes:
        """SHA-256 over all training inputs and labels: the same bytes for the same rows. It stays on the device."""


MakeWorker = Callable[[contract_pb2.Contract], DeviceWorker]
