"""Limits that gRPC enforces before a call reaches the server's code: connections, streams, handshakes, windows."""

from __future__ import annotations

import math

from fleetdistill_server.config.limits import Limits
from fleetdistill_server.service.processes import open_files

_DAY = 24 * 3600.0
# Open files other than connections: the database, uploads in progress, pipes.
_OTHER_FILES = 1024
_ENROLMENT_STREAMS = 4
# Unread bytes of a stream. A device's chunks wait for the network less often than with the enrolment port's 16 KiB.
_WINDOW_BYTES = 64 << 10
_ENROLMENT_WINDOW_BYTES = 16 << 10

Options = list[tuple[str, int]]


def channel_options(limits: Limits) -> Options:
    """Returns the gRPC options of the port for devices.

    gRPC closes connections that do not finish the handshake, make no call, or do not reply to pings. The number of
    connections is limited, so that file descriptors remain for the store.
    """
    return [
        ("grpc.server.max_pending_requests", limits.open_calls),
        ("grpc.server.max_pending_requests_hard_limit", 2 * limits.open_calls),
        ("grpc.max_concurrent_streams", limits.open_calls_per_connection),
        ("grpc.max_allowed_incoming_connections", _connections(limits.connections)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle_seconds)),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        *_of_both_ports(limits),
    ]


def enrolment_options(limits: Limits) -> Options:
    """Returns the gRPC options of the enrolment port, whose callers are not authenticated."""
    return [
        ("grpc.server.max_pending_requests", limits.enrolments_at_once),
        ("grpc.max_concurrent_streams", _ENROLMENT_STREAMS),
        ("grpc.max_allowed_incoming_connections", _connections(limits.unknown_connections)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.handshake_seconds)),
        ("grpc.max_connection_age_ms", _milliseconds(limits.request_seconds)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(limits.request_seconds)),
        ("grpc.http2.lookahead_bytes", _ENROLMENT_WINDOW_BYTES),
        *_of_both_ports(limits),
    ]


def _of_both_ports(limits: Limits) -> Options:
    return [
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.handshake_seconds)),
        ("grpc.keepalive_time_ms", _milliseconds(limits.stall_seconds / 2)),
        ("grpc.keepalive_timeout_ms", _milliseconds(limits.handshake_seconds)),
        # With the BDP probe, the window would grow, and a fast link could buffer megabytes.
        ("grpc.http2.bdp_probe", 0),
    ]


def _connections(wanted: int) -> int:
    return min(wanted, max(open_files() - _OTHER_FILES, _OTHER_FILES))


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(min(seconds, _DAY) * 1000))
