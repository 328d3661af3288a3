"""What the supervisor says of a process that it runs."""

from __future__ import annotations

from dataclasses import dataclass

FRONT, ENGINE = "front", "engine"
"""Names of the processes."""


@dataclass(frozen=True)
class ProcessState:
    """A process of the server.

    Attributes:
        name: `front` or `engine`.
        run: The engine's run; empty for the front.
        pid: Process id; None if it does not run.
        restarts: How often it was restarted since the server was started.
    """

    name: str
    run: str
    pid: int | None
    restarts: int
