"""The header `traceparent` of W3C Trace Context, which carries the place in a trace with a gRPC call."""

from __future__ import annotations

import re
from typing import NamedTuple

KEY = "traceparent"
"""Key of the header in a call's metadata."""
SAMPLED = 1
"""The flag of a trace that is recorded."""
_VERSION_00 = re.compile(r"00-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")


class Place(NamedTuple):
    """A place in a trace.

    Attributes:
        trace: Id of the trace, in [1, 2**128).
        span: Id of the span, in [1, 2**64).
        sampled: Whether the trace is recorded.
    """

    trace: int
    span: int
    sampled: bool = True

    def header(self) -> str:
        """Returns the value of the header."""
        return f"00-{self.trace:032x}-{self.span:016x}-{SAMPLED if self.sampled else 0:02x}"


def place_in(metadata: object) -> Place | None:
    """Returns the place that a call's metadata name, or None without a valid header.

    The other end chose the metadata, so anything but exactly one header of version 00 counts as none.

    Args:
        metadata: Pairs of key and value, as gRPC returns them; None for none.
    """
    result = [value for key, value in metadata or () if key == KEY]  # type: ignore[attr-defined]
    matched = _VERSION_00.fullmatch(result[0]) if len(result) == 1 and isinstance(result[0], str) else None
    if matched is None:
        return None
    place = Place(int(matched["trace"], 16), int(matched["span"], 16), bool(int(matched["flags"], 16) & SAMPLED))
    return place if place.trace and place.span else None
