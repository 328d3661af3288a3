"""What a `Device` needs of whatever computes for it. `fleetdistill.device.torch_compute` does it with PyTorch.

An app that computes with something else gives `Device(worker=...)`: a function that takes the run's contract and
returns an object with this protocol.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fleetdistill.errors import CannotAnswer
from fleetdistill.knowledge import Kind
from fleetdistill.methods.base import Answer
from fleetdistill.replacement import Replacement
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from fleetdistill.training.figures import Counts
    from fleetdistill.training.onnx_file import OnnxReport

__all__ = ["Compute", "Computed", "MakeCompute", "NamesRows", "faults_decline"]

logger = logging.getLogger(__name__)

_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What Python, numpy and torch raise of numbers that fit nothing; an app's own kinds of errors are not among them."""


@contextlib.contextmanager
def faults_decline(what: str) -> Iterator[None]:
    """Turns a fault of the computing within into `CannotAnswer`: what a server sent must not end an app.

    A fault of the app's model is taken for one too: the log has its traceback, and the app's event its words.

    Args:
        what: What is computed, for the sentence.
    """
    try:
        yield
    except _FAULTS as error:
        logger.warning("%s failed", what, exc_info=error)
        said = str(error).strip().split("\n")[0][:300]
        raise CannotAnswer(
            f"{what} failed with {type(error).__name__}: {said}; the server sent what does not fit this device, or "
            "the app's model has a fault: the log has the traceback"
        ) from error


@dataclass(frozen=True)
class Computed:
    """What came of an ask.

    Attributes:
        answer: What goes to the server.
        state: Model and method after it; counts once the answer has its receipt.
        replacement: What becomes of the app's model then; None where the round goes on.
        delivered: The app's new model, where it is replaced.
        scores: How the model does on the app's test and validation data, by split, where the round ends with it; a
            further answer of the method by `SPLIT/NAME`.
    """

    answer: Answer
    state: bytes
    replacement: Replacement | None = None
    delivered: bytes | None = None
    scores: Mapping[str, Counts] = field(default_factory=dict)


class Compute(Protocol):
    """Does a device's computing: holds model and method, answers asks, and packs its state into bytes.

    The device keeps these bytes, and hands them back after a crash; it never looks into them. Errors must be
    `FleetDistillError`s; a `CannotAnswer` or `KnowledgeError` out of `answer` declines the ask, others end the run.

    Attributes:
        contract: The run's terms.
        has_state: Whether the device's committed state is loaded. The device sets it when it has kept a first state.
    """

    contract: contract_pb2.Contract
    has_state: bool

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        """The device's profile for the check-in; the same bytes each time for the same model and data."""

    def wanted_payloads(self) -> Sequence[bytes]:
        """Digests of the contract's payloads that it works with: initial weights, proxy set, extractor file.

        The device fetches no other, and keeps all but the initial weights, which are used once.
        """

    def has_payload(self, sha256: bytes) -> bool:
        """Whether it has taken a payload that it wants; never asked about the initial weights."""

    def take_payload(self, sha256: bytes, parts: Mapping[str, Kind]) -> None:
        """Takes a payload that it wants, whose bytes were held against the contract's digest; before any state."""

    def load_initial(self, parts: Mapping[str, Kind]) -> None:
        """Takes the weights that every device of the run starts from, if it wants them and has no state yet."""

    def state(self) -> bytes:
        """All that the next answer depends on."""

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        """Takes up what `state` and `delivered_state` gave, and sets `has_state`."""

    def forget_state(self) -> None:
        """Clears `has_state`: what was learned since the last receipt does not count."""

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        """Answers an ask from the state of the last receipt, with nothing in it that `allow` keeps back."""

    def deliver(self, replacement: Replacement) -> None:
        """Replaces the app's model, or keeps it: the last answer has its receipt."""

    def delivered_model(self) -> Any:
        """What `Device.model` returns."""

    def delivered_models(self) -> Mapping[str, Any]:
        """What `Device.models` returns."""

    def delivered_state(self) -> bytes:
        """The app's model, as `restore` takes it."""

    def export(self, path: Path, number: int) -> OnnxReport:
        """Writes the delivered model as ONNX after round `number`; not called with `export_onnx="never"`.

        Where an app has several, each is written beside it under its name.
        """


@runtime_checkable
class NamesRows(Protocol):
    """What a `Compute` may do beside: then the server learns when the device has other rows than before."""

    def data_digest(self) -> bytes:
        """SHA-256 over all training inputs and labels: the same bytes for the same rows. It stays on the device."""


MakeCompute = Callable[[contract_pb2.Contract], Compute]
