"""What gRPC itself enforces before a call reaches us: connections, streams, handshakes, windows."""

from __future__ import annotations

import math

from fleetdistill_server.config.limits import Limits
from fleetdistill_server.service.processes import open_files

_DAY = 24 * 3600.0
# Files that are not connections: the database, uploads under way, pipes.
_OTHER_FILES = 1024
_ENROLMENT_STREAMS = 4
_WINDOW_BYTES = 16 << 10

Options = list[tuple[str, int]]


def channel_options(limits: Limits) -> Options:
    """What gRPC enforces on the port of the devices.

    A connection that does not finish its handshake, or that makes no call, is closed; so is one whose other end no
    longer answers pings. Connections leave room for the files of the store.
    """
    return [
        ("grpc.server.max_pending_requests", limits.open_calls),
        ("grpc.server.max_pending_requests_hard_limit", 2 * limits.open_calls),
        ("grpc.max_concurrent_streams", limits.open_calls_per_connection),
        ("grpc.max_allowed_incoming_connections", _connections(limits.connections)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle_seconds)),
        *_of_both_ports(limits),
    ]


def enrolment_options(limits: Limits) -> Options:
    """The same on the enrolment port, whose callers have shown nothing: a connection is good for one enrolment."""
    return [
        ("grpc.server.max_pending_requests", limits.enrolments_at_once),
        ("grpc.max_concurrent_streams", _ENROLMENT_STREAMS),
        ("grpc.max_allowed_incoming_connections", _connections(limits.enrol_connections)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.handshake_seconds)),
        ("grpc.max_connection_age_ms", _milliseconds(limits.request_seconds)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(limits.request_seconds)),
        *_of_both_ports(limits),
    ]


def _of_both_ports(limits: Limits) -> Options:
    return [
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.handshake_seconds)),
        ("grpc.keepalive_time_ms", _milliseconds(limits.stall_seconds / 2)),
        ("grpc.keepalive_timeout_ms", _milliseconds(limits.handshake_seconds)),
        # What a stream may bring that nobody reads yet. Measuring the link would let a fast one bring megabytes.
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
    ]


def _connections(wanted: int) -> int:
    return min(wanted, max(open_files() - _OTHER_FILES, _OTHER_FILES))


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(min(seconds, _DAY) * 1000))
