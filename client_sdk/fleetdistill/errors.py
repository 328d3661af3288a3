"""Every error that fleetdistill raises, as one tree under `FleetDistillError`.

An app catches `FleetDistillError` and knows that nothing of grpc, sqlite or torch gets past it. Each
message names the value, where it was found, what was expected and what to do.
"""

from __future__ import annotations

__all__ = [
    "CannotAnswer",
    "ConfigurationError",
    "DamagedError",
    "DataError",
    "ExportError",
    "FleetDistillError",
    "KnowledgeError",
    "LinkError",
    "ModelError",
    "NoRoomError",
    "NoSpaceError",
    "PayloadTooLargeError",
    "QuorumNotReached",
    "RefusedError",
    "RunError",
    "StateError",
    "StoreError",
    "WireError",
]


def in_words(error: Exception) -> str:
    """What the operating system or a library says, without a number that nobody knows: `No such file (NAME)`."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror} ({error.filename})"


class FleetDistillError(Exception):
    """Root of all errors of the SDK and of the server."""


class ConfigurationError(FleetDistillError):
    """A setting is unknown, of the wrong type or out of range."""


class ModelError(FleetDistillError):
    """A local model does not fit what the SDK or the run expects of it."""


class DataError(FleetDistillError):
    """Data given by the app, or a data set or partition, cannot be used."""


class KnowledgeError(FleetDistillError):
    """Knowledge (features, logits, labels) holds values that no method can use."""


class ExportError(FleetDistillError):
    """An ONNX export failed or does not agree with the PyTorch model."""


class StateError(FleetDistillError):
    """A device's state directory cannot be used: locked, of another run, of a newer SDK, or damaged."""


class NoRoomError(StateError):
    """The state directory has no room: the disk is full, or an answer is over the device's own bound."""


class WireError(FleetDistillError):
    """A message breaks the protocol: shape, checksum, size, encoding."""


class PayloadTooLargeError(WireError):
    """A payload does not fit the limit.

    Attributes:
        size_bytes: Tensor bytes of the payload.
        limit_bytes: Most bytes that are taken.
    """

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"the payload is {size_bytes} bytes, the limit is {limit_bytes}; "
            "send fewer samples per round, half precision, or raise the limit"
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class LinkError(FleetDistillError):
    """The server could not be reached, did not answer in time or refuses for now. Trying again later may work.

    Attributes:
        after_seconds: Earliest moment that the server has named for that, in seconds from now; 0 where it named none.
    """

    def __init__(self, message: str, after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class RefusedError(FleetDistillError):
    """The server understood and said no; trying the same again will not work.

    Attributes:
        code: Machine-readable reason, one of `fleetdistill.wire.codes`.
        details: Further facts, such as the tensor and the row.
    """

    def __init__(self, code: str, message: str, details: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.details = details or {}


class StoreError(FleetDistillError):
    """The server's store cannot do what was asked, for instance because the disk is full."""


class DamagedError(StoreError):
    """A payload or a checkpoint has gone from the store, or is not what its digest names.

    Attributes:
        sha256: The digest.
    """

    def __init__(self, sha256: bytes, message: str) -> None:
        super().__init__(message)
        self.sha256 = sha256


class NoSpaceError(StoreError):
    """The server's disk is full, or as full as its operator lets it become."""


class RunError(FleetDistillError):
    """A run cannot start or go on, for instance because its configuration changed."""


class CannotAnswer(FleetDistillError):
    """A device half cannot answer one ask, through no fault of the app; the device is out for the round.

    Raised by a handler; `Device` declines the ask and goes on, so an app never sees it.
    """


class QuorumNotReached(FleetDistillError):
    """Fewer devices answered a step than the quorum asks for.

    Attributes:
        answered: Devices that answered.
        needed: Devices that had to.
    """

    def __init__(self, step: str, answered: int, needed: int) -> None:
        super().__init__(f"step {step!r}: {answered} devices answered, the quorum is {needed}")
        self.answered = answered
        self.needed = needed
