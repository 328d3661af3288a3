"""Every fault of the proxy really happens to a connection, and the same seed brings the same faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from chaos.fault_proxy import Fault, FaultProxy, Kind, Way, seeded_faults
from support.processes import PATIENCE_SECONDS

DATA = bytes(range(256)) * 40
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """Keeps what each connection brings until its end, then sends it back.

    Attributes:
        received: Bytes by connection, in the order in which these came.
        broken: How many connections were reset.
    """

    def __init__(self) -> None:
        self.received: list[bytearray] = []
        self.broken = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = bytearray()
        self.received.append(kept)
        try:
            while data := await reader.read(1 << 16):
                kept += data
            writer.write(bytes(kept))
            await writer.drain()
        except ConnectionError:
            self.broken += 1
        writer.close()


@contextlib.asynccontextmanager
async def proxied(*faults: Fault) -> AsyncIterator[tuple[FaultProxy, Server]]:
    """A server behind a proxy whose first connection meets these faults."""
    server = Server()
    async with (
        await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening,
        FaultProxy(
            listening.sockets[0].getsockname()[1], faults_of=lambda number: faults if number == 1 else ()
        ) as proxy,
    ):
        yield proxy, server


async def connect(proxy: FaultProxy) -> Ends:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def exchange(proxy: FaultProxy, data: bytes = DATA) -> bytes:
    """Sends data, ends, and returns what comes back."""
    reader, writer = await connect(proxy)
    writer.write(data)
    writer.write_eof()
    try:
        return await reader.read(-1)
    finally:
        writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def running(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Makes an asyncio test an ordinary one."""

    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@running
async def test_without_a_fault_everything_comes_through_both_ways() -> None:
    async with proxied() as (proxy, server):
        assert await exchange(proxy) == DATA
        assert bytes(server.received[0]) == DATA
        assert not proxy.occurred


@running
async def test_dropped_connection_misses_server_and_next_one_arrives() -> None:
    async with proxied(Fault(Kind.DROP)) as (proxy, server):
        reader, writer = await connect(proxy)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert not server.received
        assert await exchange(proxy) == DATA
        assert proxy.occurred == {Kind.DROP: 1}


@running
async def test_a_delay_holds_back_what_comes_after_its_byte() -> None:
    async with proxied(Fault(Kind.DELAY, at=100, seconds=0.5)) as (proxy, server):
        _, writer = await connect(proxy)
        writer.write(DATA)
        await until(lambda: bool(server.received) and len(server.received[0]) >= 100)
        assert bytes(server.received[0]) == DATA[:100]
        await until(lambda: bytes(server.received[0]) == DATA)
        writer.close()


@running
async def test_bytes_are_duplicated_where_the_fault_says() -> None:
    async with proxied(Fault(Kind.DUPLICATE, at=10, count=5)) as (proxy, server):
        await exchange(proxy)
        assert bytes(server.received[0]) == DATA[:15] + DATA[10:]


@running
async def test_one_bit_is_flipped_where_the_fault_says() -> None:
    async with proxied(Fault(Kind.FLIP, Way.DOWN, at=7, count=3)) as (proxy, server):
        back = await exchange(proxy)
        assert bytes(server.received[0]) == DATA
        assert back == DATA[:7] + bytes([DATA[7] ^ 8]) + DATA[8:]


@running
async def test_a_flip_that_wants_bulk_leaves_small_pieces_alone() -> None:
    async with proxied(Fault(Kind.FLIP, at=0, count=3, bulk=4096)) as (proxy, server):
        _, writer = await connect(proxy)
        writer.write(b"small")
        await until(lambda: bool(server.received) and bytes(server.received[0]) == b"small")
        writer.write(DATA)
        await until(lambda: bool(server.received) and len(server.received[0]) == 5 + len(DATA))
        writer.close()
        differing = [at for at, byte in enumerate(server.received[0]) if byte != (b"small" + DATA)[at]]
        assert len(differing) == 1
        assert differing[0] > 5


@running
async def test_truncated_connection_ends_as_if_other_side_closed() -> None:
    async with proxied(Fault(Kind.TRUNCATE, at=100)) as (proxy, server):
        with contextlib.suppress(ConnectionError):  # what was still on its way to the proxy is refused
            await exchange(proxy)
        await until(lambda: bool(server.received) and len(server.received[0]) == 100)
        assert server.broken == 0


@running
async def test_a_reset_breaks_both_sides() -> None:
    async with proxied(Fault(Kind.RESET, at=100)) as (proxy, server):
        reader, writer = await connect(proxy)
        writer.write(DATA)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await until(lambda: server.broken == 1)
        writer.close()


@running
async def test_a_throttled_connection_brings_its_bytes_in_small_drops() -> None:
    async with proxied(Fault(Kind.THROTTLE, at=0, seconds=0.3, count=1000)) as (proxy, server):
        _, writer = await connect(proxy)
        writer.write(DATA)
        await until(lambda: bool(server.received) and bool(server.received[0]))
        assert len(server.received[0]) < len(DATA)
        await until(lambda: bytes(server.received[0]) == DATA)
        writer.close()


@running
async def test_half_open_connection_carries_nothing_until_reset() -> None:
    async with proxied(Fault(Kind.HALF_OPEN, at=100, seconds=0.5)) as (proxy, server):
        reader, writer = await connect(proxy)
        writer.write(DATA)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert len(server.received[0]) <= 100
        assert proxy.occurred == {Kind.HALF_OPEN: 1}
        writer.close()


@running
async def test_calm_resets_open_connections_and_spares_next_ones() -> None:
    async with proxied(Fault(Kind.DELAY, at=0, seconds=1000)) as (proxy, _):
        reader, writer = await connect(proxy)
        writer.write(DATA)
        await until(lambda: bool(proxy.occurred))
        proxy.calm()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert await exchange(proxy) == DATA
        writer.close()


@running
async def test_a_server_that_is_away_is_a_closed_connection() -> None:
    async with proxied() as (proxy, _):
        there, proxy.server_ports = proxy.server_ports, (1,)
        with contextlib.suppress(ConnectionError):
            assert await exchange(proxy) == b""
        proxy.server_ports = there
        assert await exchange(proxy) == DATA


def test_a_seed_decides_the_faults_and_every_kind_comes_up() -> None:
    def faults(seed: str) -> list[Fault]:
        faults_of = seeded_faults(seed, share=0.5, max_seconds=2.0, furthest_byte=1 << 22)
        return [fault for number in range(1, 400) for fault in faults_of(number)]

    assert faults("1") == faults("1") != faults("2")
    assert {fault.kind for fault in faults("1")} == set(Kind)
    assert {fault.way for fault in faults("1")} == set(Way)
    assert 150 < len(faults("1")) < 250
    assert all(fault.bulk for fault in faults("1") if fault.kind in (Kind.FLIP, Kind.DUPLICATE))
