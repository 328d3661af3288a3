"""A TCP proxy on the loopback that spoils connections: for tests of what a device and a server survive.

What happens to a connection is decided by the proxy's seed, the connection's number and the byte offset in one of its
directions, never by the clock; so the same traffic meets the same faults. A flipped bit or repeated bytes may be told
to hit bulk data only: over plain text nothing protects the rest of a message, which TLS does and no checksum of ours
is for. Where bulk begins depends on how the kernel cuts the stream, and so does what exactly they hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

BLOCK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class Kind(StrEnum):
    """What can happen to a connection."""

    DROP = "drop"  # taken and closed at once
    DELAY = "delay"
    DUPLICATE = "duplicate"
    TRUNCATE = "truncate"  # the end comes early, as if the other side had closed
    RESET = "reset"
    THROTTLE = "throttle"
    FLIP = "flip"
    HALF_OPEN = "half-open"  # everything vanishes, the connection stays


class Way(StrEnum):
    """A direction."""

    UP = "up"  # to the server
    DOWN = "down"


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one connection.

    Attributes:
        kind: What.
        way: In which direction; a half-open connection is so in both.
        at: Byte of that direction at which it happens.
        seconds: How long a delay, a throttling or a half-open state lasts; the latter ends with a reset.
        count: Bytes that are repeated, or that a throttled connection carries a second; which bit is flipped.
        bulk: For a flipped bit and repeated bytes: only within a piece of at least so many bytes, at or after `at`.
    """

    kind: Kind
    way: Way = Way.UP
    at: int = 0
    seconds: float = 0.5
    count: int = 1000
    bulk: int = 0


FaultsOf = Callable[[int], Sequence[Fault]]
"""What happens to the n-th connection, counted from 1."""


def seeded_faults(seed: str, share: float, max_seconds: float, furthest_byte: int) -> FaultsOf:
    """Faults for a share of all connections, chosen by seed and number; spoiled bytes hit bulk data only.

    Args:
        seed: Names the sequence.
        share: Part of the connections that meets a fault, in [0, 1].
        max_seconds: Most that a delay, a throttling or a half-open state lasts.
        furthest_byte: Faults lie before this offset, half of them in the first hundredth.
    """

    def faults_of(number: int) -> Sequence[Fault]:
        rng = random.Random(f"{seed}/{number}")
        if rng.random() >= share:
            return ()
        at = int(furthest_byte * rng.random() ** 6.6)  # half lie below 1 %
        return (
            Fault(
                kind=rng.choice(list(Kind)),
                way=rng.choice(list(Way)),
                at=at,
                seconds=max_seconds * rng.uniform(0.1, 1.0),
                count=rng.choice((1, 9, 1000)) if rng.random() < 0.5 else 30_000,
                bulk=4096,
            ),
        )

    return faults_of


class FaultProxy:
    """Stands before a server on this machine, or before several as a load balancer: connections go to each in turn.

    Attributes:
        server_ports: Where the servers listen. A connection goes to the next server that accepts it.
        port: Where it listens.
        occurred: How many faults of each kind have really happened.
    """

    def __init__(self, *server_ports: int, faults_of: FaultsOf = lambda number: ()) -> None:
        self.server_ports = server_ports
        self.port = 0
        self.occurred: Counter[Kind] = Counter()
        self._faults_of = faults_of
        self._accepted = 0
        self._is_cut = False
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.calm()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def calm(self) -> None:
        """From now on nothing happens to new connections; those that are open are reset."""
        self._faults_of = lambda number: ()
        self.go_on()
        self._reset_all()

    def cut(self) -> None:
        """Resets all connections, and every new one at once, until `go_on`."""
        self._is_cut = True
        self._reset_all()

    def go_on(self) -> None:
        """Ends a cut."""
        self._is_cut = False

    def _reset_all(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted += 1
        faults = list(self._faults_of(self._accepted))
        task = asyncio.create_task(self._serve(reader, writer, faults))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: list[Fault]) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        if any(fault.kind is Kind.DROP for fault in faults):
            self.occurred[Kind.DROP] += 1
            writer.close()
            return
        to_server = await self._connect()
        if to_server is None:  # the servers are away
            writer.close()
            return
        connection = _Connection((reader, writer), to_server, faults, self.occurred)
        self._connections.add(connection)
        try:
            await connection.carry()
        finally:
            self._connections.discard(connection)

    async def _connect(self) -> _Ends | None:
        for number in range(len(self.server_ports)):
            port = self.server_ports[(self._accepted + number) % len(self.server_ports)]
            with contextlib.suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
        return None


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    def __init__(self, client: _Ends, server: _Ends, faults: list[Fault], occurred: Counter[Kind]) -> None:
        self._client, self._server = client, server
        self._faults = faults
        self._occurred = occurred
        self._vanishing = False

    async def carry(self) -> None:
        """Carries both directions until both have ended, or one was broken."""
        up = asyncio.create_task(self._pump(Way.UP, self._client[0], self._server[1]))
        down = asyncio.create_task(self._pump(Way.DOWN, self._server[0], self._client[1]))
        try:
            await asyncio.gather(up, down)
        except (OSError, _Ended):
            pass
        finally:
            for task in (up, down):
                task.cancel()
            for _, writer in (self._client, self._server):
                writer.close()

    def reset(self) -> None:
        """Breaks both sides with RST."""
        for _, writer in (self._client, self._server):
            sock = writer.get_extra_info("socket")
            if sock is not None and not writer.transport.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _pump(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        position = 0
        while data := await reader.read(BLOCK_BYTES):
            end = position + len(data)
            for fault in [fault for fault in self._faults if fault.way is way and fault.at < end]:
                data = await self._apply(fault, data, max(fault.at - position, 0), writer)
            position = end
            await self._forward(data, writer)
        if not self._vanishing and writer.can_write_eof():
            writer.write_eof()

    async def _forward(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if not self._vanishing:
            writer.write(data)
            await writer.drain()

    async def _apply(self, fault: Fault, data: bytes, at: int, writer: asyncio.StreamWriter) -> bytes:
        """Lets a fault happen at byte `at` of a block; returns what is still to be forwarded."""
        if fault.kind in (Kind.FLIP, Kind.DUPLICATE):
            if len(data) < fault.bulk:
                return data  # the next block may be large enough
            at = max(at, len(data) // 2) if fault.bulk else at
        self._faults.remove(fault)
        self._occurred[fault.kind] += 1
        before, after = data[:at], data[at:]
        match fault.kind:
            case Kind.FLIP:
                return before + bytes([after[0] ^ (1 << fault.count % 8)]) + after[1:]
            case Kind.DUPLICATE:
                return before + after[: fault.count] + after
        await self._forward(before, writer)
        return await self._disturb(fault, after, writer)

    async def _disturb(self, fault: Fault, rest: bytes, writer: asyncio.StreamWriter) -> bytes:
        match fault.kind:
            case Kind.DELAY:
                await asyncio.sleep(fault.seconds)
            case Kind.TRUNCATE:
                raise _Ended
            case Kind.RESET:
                self.reset()
                raise _Ended
            case Kind.HALF_OPEN:
                self._vanishing = True
                asyncio.get_running_loop().call_later(fault.seconds, self.reset)
            case Kind.THROTTLE:
                return await self._throttle(fault, rest, writer)
        return rest

    async def _throttle(self, fault: Fault, rest: bytes, writer: asyncio.StreamWriter) -> bytes:
        """Tenths of a second: a drop of bytes in each, for as long as the fault lasts or there are bytes."""
        drop = max(fault.count // 10, 1)
        for _ in range(round(fault.seconds * 10)):
            if not rest:
                break
            await self._forward(rest[:drop], writer)
            rest = rest[drop:]
            await asyncio.sleep(0.1)
        return rest


class _Ended(Exception):
    """A fault has ended the connection."""
