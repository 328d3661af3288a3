"""The section `[limits]` of run.toml: limits on the load from one device and from all devices."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetdistill_server.config.section import Section

__all__ = ["Limits"]


class Limits(Section):
    """The section `[limits]` of run.toml. It may change between starts; see docs/reference/run-toml.md."""

    open_calls: Annotated[int, Field(ge=1, lt=2**30)] = 20_000
    open_calls_per_device: Annotated[int, Field(ge=1)] = 8
    open_calls_per_connection: Annotated[int, Field(ge=1, lt=2**31)] = 100
    uploads_per_hour: Annotated[int, Field(ge=1)] = 3_600_000
    uploads_per_hour_per_device: Annotated[int, Field(ge=1)] = 36_000
    bytes_in_flight: Annotated[int, Field(ge=1)] = 64 << 30
    bytes_in_flight_per_device: Annotated[int, Field(ge=1)] = 4 << 30
    devices: Annotated[int, Field(ge=1)] = 100_000
    enrolments_at_once: Annotated[int, Field(ge=1)] = 8  # half of the front's threads
    enrolments_per_minute: Annotated[int, Field(ge=1)] = 600
    refusals_per_hour: Annotated[int, Field(ge=1)] = 20
    stall_seconds: Annotated[float, Field(gt=0)] = 120.0
    handshake_seconds: Annotated[float, Field(gt=0)] = 20.0
    idle_seconds: Annotated[float, Field(gt=0)] = 600.0
    connections: Annotated[int, Field(ge=1, lt=2**31)] = 20_000
    unknown_connections: Annotated[int, Field(ge=1, lt=2**31)] = 1_000  # 45 MiB
    unknown_connections_per_address: Annotated[int, Field(ge=1)] = 500
    request_bytes: Annotated[int, Field(ge=1)] = 256 << 20
    request_bytes_per_caller: Annotated[int, Field(ge=1)] = 64 << 20
    request_seconds: Annotated[float, Field(gt=0)] = 30.0
    new_devices_per_minute: Annotated[int, Field(ge=1)] = 600
    new_devices_per_minute_per_address: Annotated[int, Field(ge=1)] = 300
