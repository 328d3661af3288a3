"""Requests that never end, from strangers and devices: they cost the front little memory, and the others nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from front.raw_http2 import RawConnection, message, raw_connection, stranger_tls
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.live_front import client_of, live_front, prepare_store, refusal_of, refused
from support.processes import wait_until
from support.secured import make_pki, secured_front

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import enrolment_pb2, enrolment_pb2_grpc
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.front.receiving import ENROLMENT_BYTES, MAX_MESSAGE_BYTES, Quota, Receiver, max_bytes

pytestmark = pytest.mark.cold_start  # the memory of a forked process says little

ENROL = "/fleetdistill.wire.v1.EnrolmentService/Enrol"
CHECK_IN = "/fleetdistill.wire.v1.DeviceService/CheckIn"
UPLOAD = "/fleetdistill.wire.v1.DeviceService/Upload"
STREAMS = 100
MAX_GROWTH_MIB = 100


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def all_but_a_byte(connection: RawConnection, path: str, size: int) -> None:
    """As many calls as a connection may have, each with a request that lacks its last byte."""
    connection.pump(20, 0.3)  # until the server's settings are known
    for _ in range(STREAMS):
        connection.begin(path, message(size, b"x" * (size - 1)))
    connection.pump(60, 1.0)


@pytest.mark.long
@pytest.mark.slow
def test_a_stranger_on_the_enrolment_port_gets_no_memory(tmp_path: Path) -> None:
    """Four connections of 100 calls, each 4 MiB less a byte: 1.7 GiB for good, before there was a bound."""
    make_pki(tmp_path / "pki")
    prepare_store(tmp_path / "store").close()
    limits = Limits(request_seconds=5.0)
    with secured_front(tmp_path / "store", tmp_path / "pki", limits=limits) as front, contextlib.ExitStack() as stack:
        before = resident_mib(front.process.pid)
        made = [stack.enter_context(raw_connection(front.enrol_port, stranger_tls())) for _ in range(4)]
        for size in (MAX_MESSAGE_BYTES, ENROLMENT_BYTES):
            for item in made:
                all_but_a_byte(item, ENROL, size)
                assert item.max_streams == 4
        assert resident_mib(front.process.pid) - before < MAX_GROWTH_MIB
        with front.anonymous(enrol=True) as channel, refused() as result:
            request = enrolment_pb2.EnrolRequest(secret=b"x" * 32, device="d1", signing_request=b"x")
            enrolment_pb2_grpc.EnrolmentServiceStub(channel).Enrol(request, timeout=30)
        assert result[0].reason == "bad-token"
        wait_until(lambda: all(_is_closed(item) for item in made), "the front to close every connection", 60)


def _is_closed(connection: RawConnection) -> bool:
    connection.pump(0.2)
    return connection.closed


def _open_streams(connection: RawConnection) -> int:
    connection.pump(0.2)
    return sum(not stream.over for stream in connection.streams.values())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("path", [pytest.param(CHECK_IN, marks=pytest.mark.long), UPLOAD])
def test_requests_that_never_end_have_a_quota_of_memory(tmp_path: Path, path: str) -> None:
    prepare_store(tmp_path / "store").close()
    limits = Limits(request_bytes_per_caller=16 << 20)
    with live_front(tmp_path / "store", limits=limits) as front, contextlib.ExitStack() as stack:
        before = resident_mib(front.process.pid)
        made = [stack.enter_context(raw_connection(front.port)) for _ in range(2)]
        for item in made:
            all_but_a_byte(item, path, MAX_MESSAGE_BYTES)
        wait_until(lambda: sum(map(_open_streams, made)) <= 4, "all to be ended but for the places of one caller", 60)
        assert resident_mib(front.process.pid) - before < 2 * MAX_GROWTH_MIB  # 800 MiB were sent, or would have been
        with client_of(front, "honest") as client:  # behind the same address
            assert client.check_in().run


@pytest.mark.long
def test_a_request_that_is_too_large_for_its_method_is_refused(tmp_path: Path) -> None:
    prepare_store(tmp_path / "store").close()
    with live_front(tmp_path / "store") as front, client_of(front) as client:
        stub = client.channel.unary_unary("/fleetdistill.wire.v1.DeviceService/Heartbeat")
        with refused() as result:
            stub(b"x" * (1 << 20), timeout=30)
    assert result[0].reason == "too-large"
    assert "has 1048576 bytes; the limit is 65536" in result[0].text


@pytest.mark.long
def test_one_caller_watches_health_with_few_streams_only(tmp_path: Path) -> None:
    prepare_store(tmp_path / "store").close()
    limits = Limits(open_calls_per_device=2)
    with live_front(tmp_path / "store", limits=limits) as front, client_of(front) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        watching = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=30) for _ in range(2)]
        assert [next(item).status for item in watching] == [health_pb2.HealthCheckResponse.SERVING] * 2
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=30))
        assert refusal_of(caught.value).reason == "too-many"
        assert client.check_in().run
        for item in watching:
            item.cancel()


# --- without a front


def receive(limits: Limits, requests: AsyncIterator[bytes], method: str = ENROL) -> bytes:
    return asyncio.run(Receiver(limits).first(requests, method, "a"))


async def _never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def _these(*requests: bytes) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


@pytest.mark.parametrize(
    ("requests", "code", "text"),
    [
        (_never, Code.INCOMPLETE, "was not complete within 0.1 s"),
        (_these, Code.BAD_MESSAGE, "ended without a request"),
        (lambda: _these(b"x" * (ENROLMENT_BYTES + 1)), Code.TOO_LARGE, "the limit is 16384"),
    ],
)
def test_what_is_no_request_is_refused(requests: Any, code: Code, text: str) -> None:
    with pytest.raises(RefusedError, match=text) as caught:
        receive(Limits(request_seconds=0.1), requests())
    assert caught.value.code == code


def test_a_request_of_the_largest_size_is_read() -> None:
    assert len(receive(Limits(), _these(b"x" * ENROLMENT_BYTES))) == ENROLMENT_BYTES == max_bytes(ENROL)


def test_later_messages_of_upload_are_no_larger_than_a_chunk() -> None:
    result = []

    async def read() -> None:
        async for item in Receiver(Limits()).all(_these(b"h" * (3 << 20), b"c" * (2 << 20)), UPLOAD, "a"):
            result.append(len(item))

    with pytest.raises(RefusedError, match="2097152 bytes; the limit is 1114112"):
        asyncio.run(read())
    assert result == [3 << 20]


def test_who_holds_most_loses_its_oldest_place() -> None:
    async def play() -> tuple[list[bool], int]:
        quota = Quota(most=4, max_per_caller=3)
        loop = asyncio.get_running_loop()
        made = []
        for caller in ("hog", "hog", "hog", "b", "c", "hog", "hog"):
            deadline = asyncio.timeout(1000)
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(deadline)
                quota.take(caller, deadline)
                made.append(deadline)
                stack.pop_all()
        late = [(item.when() or 0) <= loop.time() for item in made]
        for one in made:
            one.reschedule(None)
        for caller, one in zip(("hog", "hog", "hog", "b", "c", "hog", "hog"), made, strict=True):
            quota.give_back(caller, one)
            quota.give_back(caller, one)
        return late, quota.held

    late, held = asyncio.run(play())
    # The fifth place is c's, and the hog's oldest went for it; then the hog, again as many as all may have, its next.
    assert late == [True, True, True, False, False, False, False]
    assert held == 0


def test_a_place_whose_deadline_has_just_passed_can_be_taken() -> None:
    """Between a deadline and the end of its call others come, in the same turn of the event loop."""

    async def play() -> tuple[list[object], int]:
        quota, loop, errors = Quota(most=1, max_per_caller=1), asyncio.get_running_loop(), list[object]()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1000) as passed, asyncio.timeout(1000) as newer:
                quota.take("a", passed)
                passed.reschedule(loop.time())
                loop.call_soon(quota.take, "b", newer)
                await asyncio.Event().wait()
        quota.give_back("a", passed)
        return errors, quota.held

    assert asyncio.run(play()) == ([], 1)
