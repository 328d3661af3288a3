"""Ids of a round's trace and of its spans, which every process derives alike without shared state.

A process that is killed and restarted therefore continues the same trace, and a span can be the parent of another
process's span before it has ended.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from fleetdistill.spans import Place

_SPAN_BYTES, _TRACE_BYTES = 8, 16


@dataclass(frozen=True)
class RoundIds:
    """The ids of one round.

    Attributes:
        run: Name of the run.
        created_at: When the run was created, in seconds since 1970; tells a run from a later one of the same name.
        number: Number of the round.
    """

    run: str
    created_at: float
    number: int

    @cached_property
    def trace(self) -> int:
        """Id of the round's trace."""
        return self._derive(_TRACE_BYTES, "trace")

    @cached_property
    def round(self) -> int:
        """Id of the span of the round, the root of its trace."""
        return self._derive(_SPAN_BYTES, "round")

    def ask(self, step_number: int, device: str) -> int:
        """Returns the id of the span of a device's ask."""
        return self._derive(_SPAN_BYTES, "ask", step_number, device)

    def place(self, span: int, sampled: bool) -> Place:
        """Returns the place of a span in this trace."""
        return Place(self.trace, span, sampled)

    def _derive(self, size: int, *what: object) -> int:
        name = json.dumps(["fleetdistill", self.run, self.created_at, self.number, *what])
        return int.from_bytes(sha256(name.encode()).digest()[:size]) or 1  # 0 is invalid
