"""All exceptions of fleetdistill, as one tree.

    FleetDistillError
    ├── ConfigurationError       a setting or argument is invalid
    ├── ModelError               a local model does not fit the SDK or the run
    ├── DataError                data of the app, a data set or a partition cannot be used
    │   └── NoSamplesError       the app has no training samples yet
    ├── KnowledgeError           features, logits or labels have unusable values
    ├── ExportError              an ONNX export failed
    ├── StateError               a device's state directory cannot be used
    │   ├── DamagedStateError    a file of the state directory is damaged
    │   └── NoRoomError          the state directory has no room
    ├── WireError                a message violates the protocol
    │   ├── PayloadTooLargeError a payload exceeds a size limit
    │   └── PeerError            what another device of a secure sum sent cannot be used
    ├── LinkError                the server is unavailable; retry later
    ├── RefusedError             the server refused a request
    ├── CannotAnswer             a device cannot answer an ask (handled by `Device`)
    │   ├── PrivacyBudgetError   the answer would exceed the device's privacy budget
    │   └── SumRefusedError      the device refuses a step of a secure sum
    ├── WorkInterrupted          work must end now and is done again later (handled by `Device`)
    ├── DeviceBusyError          another call works on the device
    ├── DeviceClosedError        the device was closed
    ├── StoreError               the server's store failed
    │   ├── DamagedError         stored data are missing or corrupt
    │   ├── NoSpaceError         the server's disk is full
    │   └── StoreUnavailableError the server's database or object store cannot be reached
    ├── SecureSumError           a secure sum cannot be unmasked
    ├── RunError                 a run cannot start or continue
    └── QuorumNotReached         too few devices answered a step

An app needs to catch only `FleetDistillError`: exceptions of grpc, SQLite, pydantic and torch do not reach it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "CannotAnswer",
    "ConfigurationError",
    "DamagedError",
    "DamagedStateError",
    "DataError",
    "DeviceBusyError",
    "DeviceClosedError",
    "ExportError",
    "FleetDistillError",
    "KnowledgeError",
    "LinkError",
    "ModelError",
    "NoRoomError",
    "NoSamplesError",
    "NoSpaceError",
    "PayloadTooLargeError",
    "PeerError",
    "PrivacyBudgetError",
    "QuorumNotReached",
    "RefusedError",
    "RunError",
    "SecureSumError",
    "StateError",
    "StoreError",
    "StoreUnavailableError",
    "SumRefusedError",
    "WireError",
    "WorkInterrupted",
    "in_words",
]


def in_words(error: Exception) -> str:
    """Returns the text of an error; for an OSError without the errno, as in `No such file or directory (NAME)`."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror} ({error.filename})"


class FleetDistillError(Exception):
    """Base class of all exceptions of the SDK and the server. All of them can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[FleetDistillError], args: tuple[object, ...]) -> FleetDistillError:
    """Returns an unpickled error. Its constructor may take other arguments than the text in `args`."""
    return kind.__new__(kind, *args)


class ConfigurationError(FleetDistillError):
    """A setting or an argument is unknown, has the wrong type or is out of range."""


class ModelError(FleetDistillError):
    """A local model does not meet the requirements of the SDK or the run."""


class DataError(FleetDistillError):
    """The app's data, a data set or a partition cannot be used."""


class NoSamplesError(DataError):
    """The app has no training samples, or its code raised OSError instead of reading them.

    `Device.run` waits and reads the data again; reading `Device.model` may raise it.
    """

    def __init__(self, text: str = "data has no samples; the device takes part as soon as there is one") -> None:
        super().__init__(text)


class KnowledgeError(FleetDistillError):
    """Knowledge (features, logits or labels) contains unusable values, such as NaN or infinity."""


class ExportError(FleetDistillError):
    """An ONNX export failed, or the file's outputs differ from the model's."""


class StateError(FleetDistillError):
    """A device's state directory cannot be used: it is in use or damaged, or belongs to another run or a newer SDK."""


class DamagedStateError(StateError):
    """A file of the state directory is damaged, and the device must not continue without it. It is not changed.

    Attributes:
        path: Path of the file.
        reason: What is wrong with the file, without its path; empty if unknown.
    """

    def __init__(self, path: Path, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.path, self.reason = path, reason


class NoRoomError(StateError):
    """The state directory has no room: the disk is full, or the data exceed `Budgets(spool_bytes=...)`."""


class WireError(FleetDistillError):
    """A message violates the protocol, for example its shape, checksum, size or encoding."""


class PayloadTooLargeError(WireError):
    """A payload exceeds the size limit.

    Attributes:
        size_bytes: Size of the payload's tensors, in bytes.
        limit_bytes: Maximum size, in bytes.
    """

    def __init__(
        self,
        size_bytes: int,
        limit_bytes: int,
        remedy: str = "send fewer samples per round, use half precision, or raise the limit",
    ) -> None:
        super().__init__(f"the payload is {size_bytes} bytes, the limit is {limit_bytes} bytes; {remedy}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class PeerError(WireError):
    """What another device of a secure sum sent, a key or a box, cannot be used.

    Attributes:
        index: Index of that device in the session.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class LinkError(FleetDistillError):
    """The server is unreachable, did not reply in time, or temporarily refuses requests. Retry later.

    Attributes:
        after_seconds: Minimum wait before a retry as requested by the server, in seconds; 0 if it requested none.
        code: Code of a temporary refusal, such as `not-ready` while the run is being prepared; empty without a reply.
    """

    def __init__(self, message: str, after_seconds: float = 0.0, code: str = "") -> None:
        super().__init__(message)
        self.after_seconds = after_seconds
        self.code = code


class RefusedError(FleetDistillError):
    """The server refused a request. Repeating the same request usually fails again.

    Attributes:
        code: Machine-readable reason, one of `fleetdistill.wire.codes.Code`.
        details: Details by name, such as `tensor` and `row`.
    """

    def __init__(self, code: str, message: str, details: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.details = details or {}


class DeviceBusyError(FleetDistillError):
    """Another call works on the device.

    One call at a time of `run`, `start`, `step`, `tick`, `preview` and `forget` works on a device.

    Attributes:
        call: Name of the method that was refused.
        working: Name of the method that works on the device.
    """

    def __init__(self, call: str, working: str) -> None:
        super().__init__(
            f"Device.{call} was called while Device.{working} works on the device; "
            "only one thread at a time can do so. Call it again after the other one has ended: stop() ends it, and "
            "join() waits for the end of start()"
        )
        self.call, self.working = call, working


class DeviceClosedError(FleetDistillError):
    """The device was closed; the app needs a new one.

    Attributes:
        member: Name of the method or property that was refused.
    """

    def __init__(self, member: str, state_dir: object) -> None:
        super().__init__(f"Device.{member} was used after close; create a new Device with state_dir {str(state_dir)!r}")
        self.member = member


class StoreError(FleetDistillError):
    """The server's store cannot perform an operation, for example because it is locked or damaged."""


class DamagedError(StoreError):
    """A payload or checkpoint is missing from the store, or does not match its digest.

    Attributes:
        sha256: Expected SHA-256 of the data, 32 bytes.
    """

    def __init__(self, sha256: bytes, message: str) -> None:
        super().__init__(message)
        self.sha256 = sha256


class NoSpaceError(StoreError):
    """The server's disk is full, or has less free space than the operator's limit."""


class StoreUnavailableError(StoreError):
    """The server's database or object store, on another machine, cannot be reached at present."""


class SecureSumError(FleetDistillError):
    """A secure sum cannot be unmasked: too few shares of a secret came back, or too many of them are wrong."""


class RunError(FleetDistillError):
    """A run cannot start or continue, for example because its configuration changed."""


class CannotAnswer(FleetDistillError):
    """A device half cannot answer an ask. The device declines the ask and skips the round.

    Raised by handlers and handled by `Device`; it does not reach the app.
    """


class PrivacyBudgetError(CannotAnswer):
    """A private release would exceed the device's privacy budget, so the device declines the ask.

    Its text is always the same, because it is sent to the server.

    Attributes:
        spent: Epsilon of the releases so far.
        wanted: Epsilon of these and the new one together.
    """

    def __init__(self, spent: float, wanted: float) -> None:
        super().__init__("privacy budget used up")
        self.spent, self.wanted = spent, wanted


class SumRefusedError(CannotAnswer):
    """A device refuses a step of a secure sum, so the device declines the ask and sends nothing else in this sum.

    Its text does not depend on the device's rows, because it is sent to the server.
    """


class WorkInterrupted(FleetDistillError):
    """Work must end now: the app stopped the device, or a condition of its policy no longer holds.

    Raised by `fleetdistill.interruption.check_may_continue` and handled by `Device`; it does not reach the app. The
    committed state is unchanged, and the same work done again gives the same result.

    Attributes:
        condition: Name of the condition, such as `charging` or `stopped`.
        seconds: Seconds until the work may continue; None if unknown, infinite if waiting does not help.
    """

    def __init__(self, message: str, condition: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.condition, self.seconds = condition, seconds


class QuorumNotReached(FleetDistillError):
    """Fewer devices answered a step than the quorum requires.

    Attributes:
        answered: Number of devices that answered.
        needed: Number of devices that the quorum requires.
    """

    def __init__(self, step: str, answered: int, needed: int) -> None:
        devices = "device" if answered == 1 else "devices"
        super().__init__(f"step {step!r}: {answered} {devices} answered, the quorum is {needed}")
        self.answered = answered
        self.needed = needed
