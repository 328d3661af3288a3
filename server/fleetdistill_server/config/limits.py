"""What one device, and all devices together, may ask of the server at a time: `[limits]` of run.toml."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The `[limits]` of run.toml; docs/reference/run-toml.md says what each means."""

    open_calls: int = 20_000
    open_calls_per_device: int = 8
    open_calls_per_connection: int = 100
    uploads_per_hour: int = 3_600_000
    uploads_per_hour_per_device: int = 36_000
    bytes_in_flight: int = 64 << 30
    bytes_in_flight_per_device: int = 4 << 30
    devices: int = 100_000
    enrolments_at_once: int = 8  # half of the front's threads
    enrolments_per_minute: int = 600
    refusals_per_hour: int = 20
    stall_seconds: float = 120.0
    handshake_seconds: float = 20.0
    idle_seconds: float = 600.0
    connections: int = 20_000
    enrol_connections: int = 2_000
    request_bytes: int = 256 << 20
    request_bytes_per_caller: int = 64 << 20
    request_seconds: float = 30.0
    new_devices_per_minute: int = 600
    new_devices_per_minute_per_address: int = 300

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Reads what `str` wrote."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))
