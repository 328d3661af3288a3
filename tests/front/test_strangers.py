"""Which connections of unknown callers a front closes, without a front."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time

import pytest

from fleetdistill_server.config.limits import Limits
from fleetdistill_server.front.strangers import Strangers


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs TCP_INFO, as on Linux")
def test_longest_silent_connections_are_closed_first() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        strangers = Strangers(Limits(unknown_connections=8, unknown_connections_per_address=4))
        strangers.watch(listener.getsockname()[1])

        def connect() -> socket.socket:
            made = stack.enter_context(socket.create_connection(listener.getsockname()))
            accepted.append(stack.enter_context(listener.accept()[0]))
            time.sleep(0.03)  # longer than the kernel's clock tick
            return made

        accepted: list[socket.socket] = []
        silent = [connect() for _ in range(7)]
        accepted[0].close()
        accepted[1].close()
        handshaking = connect()  # takes the lowest free file numbers for its two ends
        assert accepted[-1].fileno() < accepted[2].fileno()
        silent[3].sendall(b"a hello")
        time.sleep(0.03)
        strangers.before_handshake()
        assert [number for number, made in enumerate(silent) if _is_closed(made)] == [0, 1, 2, 4]
        assert not _is_closed(handshaking)


@pytest.mark.skipif(sys.platform != "linux", reason="needs packet filters of sockets, as on Linux")
def test_none_connects_until_those_over_the_limits_are_closed() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        strangers = Strangers(Limits(unknown_connections=16, unknown_connections_per_address=8))
        strangers.watch(listener.getsockname()[1])
        accepted = []
        for _ in range(12):
            stack.enter_context(socket.create_connection(listener.getsockname(), 30))
            accepted.append(stack.enter_context(listener.accept()[0]))
        strangers.before_handshake()
        with pytest.raises(TimeoutError):
            socket.create_connection(listener.getsockname(), 0.5)
        for connection in accepted[:4]:
            connection.close()
        stack.enter_context(socket.create_connection(listener.getsockname(), 30))


def _is_closed(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and connection.recv(1) == b""
