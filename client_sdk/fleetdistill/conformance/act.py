"""State of one round of the scripted run."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetdistill.conformance.received import ReceivedAnswer
from fleetdistill.conformance.script import Scene
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import service_pb2


@dataclass
class Act:
    """What has happened in a round.

    Attributes:
        scene: The ask and its fault.
        number: Number of the round.
        payload: Payload of the ask.
        answer: The current attempt.
        done: Whether the ask is closed.
        faulted: Whether the fault has happened.
        attempt: Number of the current attempt; 0 before the first call.
        next_byte: Offset in the last reply to `UploadStatus`, until an upload uses it; None if there is none.
        not_before: Earliest time of the next upload, on the monotonic clock.
        downloads: Number of downloads of the payload.
        sent_bytes: Tensor bytes sent in the downloads.
        receipt: The receipt; without an id before the answer is complete.
    """

    scene: Scene
    number: int
    payload: Payload
    answer: ReceivedAnswer
    done: bool = False
    faulted: bool = False
    attempt: int = 0
    next_byte: int | None = None
    not_before: float = 0.0
    downloads: int = 0
    sent_bytes: int = 0
    receipt: service_pb2.Receipt = field(default_factory=service_pb2.Receipt)
