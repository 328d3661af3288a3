"""The store's rows as typed records. Each class makes its records from rows in `from_row`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fleetdistill_server.store.database import Row
from fleetdistill_server.store.states import RunStatus


@dataclass(frozen=True, slots=True)
class Run:
    """A row of the table `runs`, without the complete configuration, which `RunControl.setup` returns.

    Times are in seconds since 1970.

    Attributes:
        name: Name of the run.
        config: The run's settings by section; the run does not start with other settings.
        contract: Serialized `Contract`; empty until the engine has prepared the run.
        status: What the run does.
        reason: Why it has this status; empty without a reason.
        completed_rounds: Number of completed rounds.
        next_round: Number of the round that is opened next.
        checkpoint: SHA-256 of the checkpoint after the last closed round; empty before the first checkpoint.
        engine: Fencing token of the engine that owns the run; None without an engine.
        created_at: Time of the registration.
        paused_at: Time of the pause, until an engine continues the run; None if it is not paused.
        keep_rounds: Number of the newest closed rounds whose payloads are kept.
        kept_from: First round that `runs prune` kept.
        waits_since: Since when the run waits for devices; None if it does not wait.
        waits_for: Number of devices that must be present before the run continues; 0 if it waits for any change of its
            devices, None if it does not wait.
    """

    name: str
    config: dict[str, Any]
    contract: bytes
    status: RunStatus
    reason: str
    completed_rounds: int
    next_round: int
    checkpoint: bytes
    engine: str | None
    created_at: float
    paused_at: float | None
    keep_rounds: int
    kept_from: int
    waits_since: float | None
    waits_for: int | None

    @classmethod
    def from_row(cls, row: Row) -> Run:
        """Returns the record of a row that has all columns."""
        return cls(
            name=row["name"],
            config=json.loads(row["config"]),
            contract=row["contract"] or b"",
            status=RunStatus(row["status"]),
            reason=row["reason"] or "",
            completed_rounds=row["completed_rounds"],
            next_round=row["next_round"],
            checkpoint=row["checkpoint"] or b"",
            engine=row["engine"],
            created_at=row["created_at"],
            paused_at=row["paused_at"],
            keep_rounds=row["keep_rounds"],
            kept_from=row["kept_from"],
            waits_since=row["waits_since"],
            waits_for=row["waits_for"],
        )

    @property
    def method(self) -> str:
        """Name of the run's method."""
        return str(self.config.get("run", {}).get("method", ""))

    @property
    def max_rounds(self) -> int | None:
        """Number of completed rounds after which the run is finished; None to run until it is stopped."""
        return self.config.get("run", {}).get("rounds") or None
