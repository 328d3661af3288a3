"""`Compute`, the base class of a device's compute backends.

`fleetdistill.compute.torch_compute` derives from it with PyTorch. An app that uses another framework passes
`Device(worker=...)`, a function that takes the run's contract and returns an object of a class that derives from it.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetdistill.control_flow import CONTROL_FLOW
from fleetdistill.deployment.settings import Deployment
from fleetdistill.errors import CannotAnswer, ConfigurationError, ExportError, ModelError
from fleetdistill.knowledge import GENERAL, Kind
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.replacement import Replacement
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from fleetdistill.deployment.quantization import CheckData
    from fleetdistill.training.figures import Counts
    from fleetdistill.training.onnx_file import OnnxReport

__all__ = ["Compute", "Computed", "MakeCompute", "faults_decline"]

logger = logging.getLogger(__name__)

FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    *CONTROL_FLOW,
)
"""Exceptions that Python, NumPy and torch raise for unsuitable values; an app's own exceptions are excluded."""


_logged: set[str] = set()
"""Faults whose traceback is in the log; a model that fails in every round fills it with one line each."""
_MAX_LOGGED = 100


@contextlib.contextmanager
def faults_decline(what: str) -> Iterator[None]:
    """Turns computation errors in the block into `CannotAnswer`, so that a server's values cannot end an app.

    This includes errors in the app's model; their traceback is logged the first time, then one line.

    Args:
        what: Name of the computation, for the message.
    """
    try:
        yield
    except FAULTS as error:
        message = str(error).strip().split("\n")[0][:300]
        name = f"{what} failed with {type(error).__name__}: {message}"
        logger.warning("%s", name, exc_info=None if name in _logged else error)
        if len(_logged) < _MAX_LOGGED:
            _logged.add(name)
        raise CannotAnswer(
            f"{name}; either the server's values do not fit this device, "
            "or the app's model, or a method of your own, is faulty. See the traceback in the log"
        ) from error


@dataclass(frozen=True)
class Computed:
    """Result of an ask.

    Attributes:
        answer: Answer to send to the server.
        state: Packed state of model and method after the answer; committed when the answer has a receipt.
        replacement: Whether the app's model is replaced with the receipt; None if the round continues.
        delivered: Packed new model of the app if the app's model is replaced, else None.
        scores: Scores of the round's model on the app's test and validation data by split, if the answer ends the
            round. Further variants are under `SPLIT/VARIANT`.
    """

    answer: Answer
    state: bytes
    replacement: Replacement | None = None
    delivered: bytes | None = None
    scores: Mapping[str, Counts] = field(default_factory=dict)


class Compute(ABC):
    """Compute backend of a device: holds model and method, answers asks, and packs its state into bytes.

    The device stores these bytes without reading them, and passes them to `restore` after a crash. Errors must be
    subclasses of `FleetDistillError`. A `CannotAnswer` or `KnowledgeError` raised by `answer` declines the ask; others
    end `run`. Methods that are not abstract may be left out; without them the device lacks what they are for.

    Args:
        contract: Contract of the run.

    Attributes:
        contract: Contract of the run.
        has_state: Whether the device's committed state is loaded. The device sets it after it saved a first state.
    """

    def __init__(self, contract: contract_pb2.Contract) -> None:
        self.contract = contract
        self.has_state = False

    # --- data

    @abstractmethod
    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        """Returns the device's profile for the check-in; equal bytes for equal model and data."""

    def data_digest(self) -> bytes:
        """Returns the SHA-256 of all training inputs and labels, which lets the server detect changed data.

        It never leaves the device. Empty if the backend does not compute one.
        """
        return b""

    @property
    def sample_count(self) -> int | None:
        """Number of training samples; the device waits for samples while it is 0.

        None for a backend that reads its data only once: if the app replaces them, the device makes a new backend.
        """
        return None

    def reread_data(self, data: Any) -> bool:
        """Reads the training data again; called before each ask if `sample_count` is not None.

        Args:
            data: `Device(data=...)`, or the argument of `replace_data`; None for a worker, which has its own data.

        Returns:
            Whether a sample was added, removed or changed.

        Raises:
            DataError: The data cannot be used; the previous data remain in use.
        """
        return False

    # --- payloads of the contract

    def wanted_payloads(self) -> Sequence[bytes]:
        """Returns the digests of the contract's payloads to download: initial weights, proxy set or extractor file.

        The device stores all of them except the initial weights, which are used once.
        """
        return ()

    def has_payload(self, sha256: bytes) -> bool:
        """Returns whether `take_payload` was called with this payload; not called for the initial weights."""
        return False

    def take_payload(self, sha256: bytes, parts: Mapping[str, Kind]) -> None:  # noqa: B027  (may be left out)
        """Loads a wanted payload, already verified against its digest; called before any state is loaded."""

    def has_initial(self) -> bool:
        """Returns whether the model has the run's initial weights to the bit, so that they need not be downloaded."""
        return False

    def load_initial(self, parts: Mapping[str, Kind]) -> None:  # noqa: B027  (may be left out)
        """Loads the initial weights of the run, if they are wanted and there is no saved state."""

    # --- state

    @abstractmethod
    def state(self) -> bytes:
        """Returns the packed state, which contains everything that the next answer depends on."""

    @abstractmethod
    def delivered_state(self) -> bytes:
        """Returns the packed model of the app, for `restore`."""

    @abstractmethod
    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        """Restores the results of earlier calls of `state` and `delivered_state`, and sets `has_state`."""

    def forget_state(self) -> None:
        """Discards training since the last receipt: clears `has_state`, so that the device calls `restore`."""
        self.has_state = False

    # --- answers

    @abstractmethod
    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        """Answers an ask from the committed state; the answer contains only columns in `allow`."""

    def first_ask(self) -> Ask:
        """Returns an ask like the first one of the run, made without the server, for `Device.preview`.

        Raises:
            ConfigurationError: The backend has no preview.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no preview; define first_ask of fleetdistill.compute.Compute"
        )

    # --- the app's model

    def deliver(self, replacement: Replacement) -> None:  # noqa: B027  (may be left out)
        """Replaces or keeps the app's model; called when the round's last answer has a receipt."""

    def delivered_model(self) -> Any:
        """Returns the value of `Device.model`.

        Raises:
            ModelError: The backend has no model, or none yet.
        """
        raise ModelError(f"the worker {type(self).__name__} has no model; add the method delivered_model")

    def delivered_models(self) -> Mapping[str, Any]:
        """Returns the variants in `Device.models`, by name."""
        return {GENERAL: self.delivered_model()}

    def frozen_model(self) -> Callable[[Any], Any]:
        """Returns a copy of `delivered_model` that later deliveries do not change, for `Device.predict`.

        The copy maps a batch of inputs to logits in the same type, NumPy array or torch tensor, and is thread-safe.

        Raises:
            ModelError: The backend has no predictions, or no model yet.
        """
        raise ModelError(
            f"the worker {type(self).__name__} does not support predict; add the method frozen_model of "
            "fleetdistill.compute.Compute"
        )

    def input_range(self) -> tuple[float, float] | None:
        """Returns the range of the training inputs' values, for the warning of `Device.predict`; None if unknown."""
        return None

    def use_deployment(self, deployment: Deployment) -> None:
        """Applies `max_accuracy_drop` to decisions on replacement, and `opset` and `dynamic_size` to exports.

        Raises:
            ConfigurationError: The backend supports only `keep_versions` and `export`, and another setting is not the
                default.
        """
        if replace(deployment, keep_versions=1, export="never") != Deployment(keep_versions=1, export="never"):
            raise ConfigurationError(
                f"the worker {type(self).__name__} supports only keep_versions and export of Deployment; "
                "add the methods use_deployment, accuracy_of and check_data of fleetdistill.compute.Compute"
            )

    def accuracy_of(self, delivered: bytes) -> float | None:
        """Returns the accuracy on the validation data of a result of `delivered_state`; None without such data."""
        return None

    def check_data(self) -> CheckData:
        """Returns the data that check and calibrate a quantised file; called only if `use_deployment` allows one.

        Raises:
            ExportError: The backend has none.
        """
        raise ExportError(f"the worker {type(self).__name__} has no data to check a file; add the method check_data")

    def export(self, path: Path, number: int) -> OnnxReport:
        """Writes the app's model as ONNX after round `number`; not called with `Deployment(export="never")`.

        If there are several variants, each is also written as `VARIANT.onnx` in the directory of `path`.

        Raises:
            ExportError: The model cannot be exported.
        """
        raise ExportError(f"the worker {type(self).__name__} has no ONNX export; add the method export")


MakeCompute = Callable[[contract_pb2.Contract], Compute]
