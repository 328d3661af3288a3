"""What the app learns of its device: what a step did, and events."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Step(StrEnum):
    """What one `Device.step` did."""

    ANSWERED = "answered"
    WAITED = "waited"
    FINISHED = "finished"


@dataclass(frozen=True)
class Event:
    """Something the app may want to show.

    Attributes:
        kind: checked-in, proxy, extractor, ask, asked-again, scored, answered, refused, dropped, kept, delivered,
            exported, interrupted, lost-contact, stopped or finished.
        round: Round it belongs to, 0 for none.
        text: One sentence.
        values: Counts and figures.
    """

    kind: str
    round: int
    text: str
    values: dict[str, Any] = field(default_factory=dict)
