"""Bounds the connections of unknown callers: those that have not made a call with a valid certificate yet.

gRPC accepts each connection and uses about 45 KiB for its handshake, which it keeps for later ones. It calls the front
before each handshake, which closes connections if there are too many, and lets no further ones arrive until gRPC has
closed these: gRPC accepts connections faster than it begins their handshakes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote

from fleetdistill_server.config.limits import Limits

_OPEN_FILES = "/dev/fd"
_MAPPED = "::ffff:"
"""How an IPv6 socket writes an IPv4 address."""

_LAST_ACK = struct.Struct("=56xI")
"""The field `tcpi_last_ack_recv` of Linux' `struct tcp_info`."""

# From Linux' asm-generic/socket.h; the module `socket` does not have them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_RETURN_0 = ctypes.create_string_buffer(struct.pack("@HBBI", 0x06, 0, 0, 0))
"""An instruction of a packet filter, Linux' `struct sock_filter`: keep no byte of the packet."""
_DROP_ALL = struct.pack("@HP", 1, ctypes.addressof(_RETURN_0))
"""The filter of this one instruction, Linux' `struct sock_fprog`."""

_PAUSE_SECONDS = 10.0
"""Longest pause: gRPC closes a connection that was shut down within milliseconds, on a busy machine within seconds."""
_LOOK_SECONDS = 0.01

Peer = tuple[str, int]
"""Address and port of the other end of a connection."""


class Strangers:
    """The connections of unknown callers to the ports with TLS. Used by several threads.

    Args:
        limits: How many of them may be open, in all and from one address.
    """

    def __init__(self, limits: Limits) -> None:
        self._most, self._max_per_address = limits.unknown_connections, limits.unknown_connections_per_address
        self._count_after = self._quarter = max(1, min(self._most, self._max_per_address) // 4)
        self._unknown = 0  # as of the last look at the sockets
        self._ports: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._known: set[Peer] = set()
        self._closed: set[Peer] = set()  # gRPC has not noticed yet
        self._new = 0
        self._open_files = 0  # once gRPC has closed those in `_closed`
        self._paused = False
        self._listeners: list[int] = []  # file descriptors; empty where there are no packet filters

    def watch(self, *ports: int) -> None:
        """Bounds the connections to these ports from now on.

        The kernel's queue of connections that gRPC has not accepted becomes as short as a quarter of the limits: a
        pause does not stop what has been queued.
        """
        self._ports = frozenset(ports)
        for number, listener in _sockets() if sys.platform == "linux" else ():
            if _listens(listener, self._ports):
                listener.listen(self._quarter)
                self._listeners.append(number)
        self._open_files = _open_files()

    def know(self, peer: str) -> None:
        """Notes that the caller at the other end of a connection is known; `peer` is gRPC's name for that end."""
        address, _, port = unquote(peer).partition(":")[2].rpartition(":")
        if port.isdecimal():
            self._known.add((address.strip("[]"), int(port)))

    def before_handshake(self) -> None:
        """Notes a new connection, and closes others if there are too many.

        The sockets are looked at after each quarter of the limits only, and less often if there are many of them,
        because that takes 3 µs for each. Where half of a limit may have been reached, new connections wait until some
        have been closed (on Linux): gRPC accepts thousands before it has begun the handshakes of the first ones.
        """
        with self._lock:
            self._new += 1
            arrived = max(self._new, _open_files() - self._open_files)
            if arrived < self._count_after or self._paused:
                return
            self._new = 0
            if self._listeners and self._unknown + arrived > 2 * self._quarter:
                self._pause()
            self._close_some()
            if self._paused and self._closed:
                threading.Thread(target=self._resume_later, name="resume connections", daemon=True).start()
            elif self._paused:
                self._resume()

    def _pause(self) -> None:
        """Lets the kernel drop packets that would make a connection; their senders send them again after a second."""
        self._paused = True
        self._filter(_SO_ATTACH_FILTER, _DROP_ALL)

    def _resume_later(self) -> None:
        """Ends the pause once gRPC has closed what was shut down."""
        end = time.monotonic() + _PAUSE_SECONDS
        while _open_files() > self._open_files + self._quarter and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        with self._lock:
            self._resume()

    def _resume(self) -> None:
        self._filter(_SO_DETACH_FILTER, 0)
        self._paused = False

    def _filter(self, option: int, value: int | bytes) -> None:
        for number in self._listeners:
            with contextlib.suppress(OSError), _borrow_socket(number) as listener:
                if _listens(listener, self._ports):  # else the server has ended
                    listener.setsockopt(socket.SOL_SOCKET, option, value)

    def _close_some(self) -> None:
        """Keeps the connections of each address that sent something last, and of all addresses equally many.

        A caller whose handshake is under way is therefore kept before those that say nothing.
        """
        result = {peer: number for number, port, peer in _connections() if port in self._ports}
        self._count_after = max(self._quarter, len(result) // 16)
        self._known = {peer for peer in list(self._known) if peer in result}
        self._closed &= result.keys()
        unknown = result.keys() - self._known - self._closed
        counts: Counter[str] = Counter()
        ranked = []
        for peer in sorted(unknown, key=lambda peer: _silent_ms(result[peer])):
            ranked.append((counts[peer[0]], peer))
            counts[peer[0]] += 1
        ranked.sort(key=lambda one: one[0])
        kept = {peer for rank, peer in ranked[: self._most] if rank < self._max_per_address}
        self._unknown = len(kept)
        for peer in unknown - kept:
            _shut_down(result[peer], peer)
            self._closed.add(peer)
        self._open_files = _open_files() - len(self._closed)


def _connections() -> Iterator[tuple[int, int, Peer]]:
    """Yields file descriptor, own port and peer of each connection of this process."""
    for number, borrowed in _sockets():
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            yield number, *_ends(borrowed)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yields the sockets of this process."""
    for name in os.listdir(_OPEN_FILES):
        with contextlib.suppress(OSError), _borrow_socket(int(name)) as borrowed:  # else another kind of file
            yield int(name), borrowed


def _listens(listener: socket.socket, ports: frozenset[int]) -> bool:
    own = listener.getsockname()
    accepts = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(accepts) and isinstance(own, tuple) and own[1] in ports


def _open_files() -> int:
    """Returns the number of this process's open files."""
    with contextlib.suppress(OSError):
        if size := os.stat("/proc/self/fd").st_size:  # 0 before Linux 6.2
            return size
    return len(os.listdir(_OPEN_FILES))


def _silent_ms(number: int) -> int:
    """Milliseconds since a packet of the other end arrived; 0 if it is closed, and on systems without TCP_INFO."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    with contextlib.suppress(OSError), _borrow_socket(number) as seen:
        info = seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
        return int(_LAST_ACK.unpack(info)[0])
    return 0


def _shut_down(number: int, peer: Peer) -> None:
    with contextlib.suppress(OSError), _borrow_socket(number) as seen:
        if _ends(seen)[1] == peer:  # else gRPC has closed it, and the number belongs to another file
            seen.shutdown(socket.SHUT_RDWR)  # gRPC reads the end of the connection and closes it


@contextlib.contextmanager
def _borrow_socket(number: int) -> Iterator[socket.socket]:
    """Opens a file descriptor of gRPC as a socket. Raises OSError if it is none."""
    seen = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=number)
    try:
        yield seen
    finally:
        seen.detach()


def _ends(connection: socket.socket) -> tuple[int, Peer]:
    """Returns the own port and the peer of a connection. Raises OSError if it is none."""
    own, peer = connection.getsockname(), connection.getpeername()
    if not (isinstance(own, tuple) and isinstance(peer, tuple)):  # a Unix socket has paths
        raise OSError
    return own[1], (peer[0].removeprefix(_MAPPED), peer[1])
