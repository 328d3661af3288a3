"""What one caller may cost the others: limits for each device and for all, slow senders, half-open connections."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import resource
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import pytest
import zstandard
from front.virtual_time import run_in_virtual_time
from support.live_front import (
    RUN,
    Client,
    LiveFront,
    as_messages,
    client_of,
    live_front,
    open_round,
    prepare_store,
    refusal_of,
    refused,
    upload_name,
    write_asks,
)
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS, wait_until
from support.secured import (
    CALL_SECONDS,
    SecuredFront,
    device_credentials,
    make_pki,
    make_token,
    person_credentials,
    secured_front,
)
from support.wire_samples import in_pieces, make_contract, make_identity, make_payload, make_profile

from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.link import x509 as device_x509
from fleetdistill.link.credentials import Credentials
from fleetdistill.link.downloads import Downloads
from fleetdistill.link.enrolment import read_token
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.wire.codes import AFTER_SECONDS, MAX_AFTER_SECONDS, Code, after_seconds
from fleetdistill.wire.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    knowledge_pb2,
    operations_pb2,
    operations_pb2_grpc,
    service_pb2,
    service_pb2_grpc,
)
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.front.streams import with_progress_deadline
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.limiter import Allowance, Limiter
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.store.store import Store

ONE, OTHER = ("run", "d1"), ("run", "d2")
PIECE = 64
MANY = 1000


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def too_many(call: Any, *given: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        call(*given)
    assert caught.value.code == Code.TOO_MANY
    assert after_seconds(caught.value.details) > 0
    return caught.value


# --- counting


def test_a_device_has_its_share_of_open_calls_and_gets_it_back() -> None:
    limiter = Limiter(Limits(open_calls_per_device=2))
    first, _ = limiter.open_call(ONE), limiter.open_call(ONE)
    refusal = too_many(limiter.open_call, ONE)
    assert "d1" in str(refusal)
    assert "the limit is 2" in str(refusal)
    limiter.open_call(OTHER)
    first.release()
    limiter.open_call(ONE)


def test_all_devices_together_have_a_limit_too() -> None:
    limiter = Limiter(Limits(open_calls=2))
    held = [limiter.open_call(("run", name)) for name in ("d1", "d2")]
    too_many(limiter.open_call, ("run", "d3"))
    for place in held:
        place.release()
    limiter.open_call(("run", "d3"))


def test_a_place_is_given_back_once() -> None:
    limiter = Limiter(Limits(open_calls_per_device=1))
    with limiter.open_call(ONE) as place:
        place.release()
        limiter.open_call(ONE)
    too_many(limiter.open_call, ONE)


@pytest.mark.parametrize("limits", [Limits(bytes_in_flight_per_device=100), Limits(bytes_in_flight=100)])
def test_bytes_under_way_are_bounded_but_one_upload_may_come(limits: Limits) -> None:
    limiter = Limiter(limits)
    large = limiter.hold_bytes(ONE, 1000)
    too_many(limiter.hold_bytes, ONE, 1)
    large.release()
    with limiter.hold_bytes(ONE, 60), limiter.hold_bytes(ONE, 40):
        too_many(limiter.hold_bytes, ONE, 1)


def test_the_bytes_of_all_devices_are_bounded_together() -> None:
    limiter = Limiter(Limits(bytes_in_flight=100))
    with limiter.hold_bytes(ONE, 60), limiter.hold_bytes(OTHER, 40):
        refusal = too_many(limiter.hold_bytes, ("run", "d3"), 1)
    assert "would have 101 bytes of all devices' uploads in progress, the limit is 100" in str(refusal)
    limiter.hold_bytes(("run", "d3"), 100)


def test_a_device_may_not_use_up_the_bytes_of_others() -> None:
    limiter = Limiter(Limits(bytes_in_flight_per_device=100))
    limiter.hold_bytes(ONE, 1000)
    limiter.hold_bytes(OTHER, 1000)


def test_uploads_of_an_hour_come_back_with_time() -> None:
    clock = Clock()
    limiter = Limiter(Limits(uploads_per_hour_per_device=2), clock)
    limiter.begin_upload(ONE)
    limiter.begin_upload(ONE)
    refusal = too_many(limiter.begin_upload, ONE)
    assert after_seconds(refusal.details) == pytest.approx(1800)
    limiter.begin_upload(OTHER)
    clock.now += 1800
    limiter.begin_upload(ONE)
    too_many(limiter.begin_upload, ONE)


def test_all_devices_together_have_their_uploads_of_an_hour_too() -> None:
    clock = Clock()
    limiter = Limiter(Limits(uploads_per_hour=3, uploads_per_hour_per_device=2), clock)
    for who in (ONE, ONE, OTHER):
        limiter.begin_upload(who)
    refusal = too_many(limiter.begin_upload, OTHER)
    assert "the server has started 3 uploads within an hour" in str(refusal)
    assert after_seconds(refusal.details) == pytest.approx(1200)
    clock.now += 1200
    too_many(limiter.begin_upload, ONE)  # it still has none, and takes none from the others
    limiter.begin_upload(OTHER)


def test_stranger_enrolments_are_bounded_at_once_and_per_minute() -> None:
    clock = Clock()
    limiter = Limiter(Limits(enrolments_at_once=2, enrolments_per_minute=3), clock)
    first, second = limiter.begin_enrolment(), limiter.begin_enrolment()
    assert "the limit is 2" in str(too_many(limiter.begin_enrolment))
    first.release()
    third = limiter.begin_enrolment()
    second.release()
    third.release()
    refusal = too_many(limiter.begin_enrolment)
    assert "the server has started 3 enrolments within a minute" in str(refusal)
    assert after_seconds(refusal.details) == pytest.approx(20)
    clock.now += 20
    limiter.begin_enrolment()


def test_an_allowance_is_never_more_than_an_hours() -> None:
    clock = Clock()
    allowance = Allowance(3, clock)
    assert allowance.take(ONE) == 0
    clock.now += 1e9
    assert [allowance.take(ONE) == 0 for _ in range(4)] == [True, True, True, False]


def test_limits_may_change_between_two_starts_of_a_run() -> None:
    given = {"run": {"name": "r"}, "contract": {"classes": 2, "input_shape": [1, 8, 8]}}
    changed = run_config({**given, "limits": {"uploads_per_hour": 7}})
    assert changed.limits.uploads_per_hour == 7
    assert changed.fixed_part() == run_config(given).fixed_part()


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("2.5", 2.5), ("-1", 0.0), ("nan", 0.0), ("inf", 0.0), ("soon", 0.0), ("1e9", MAX_AFTER_SECONDS)],
)
def test_a_device_believes_only_sensible_moments(said: str, seconds: float) -> None:
    assert after_seconds({AFTER_SECONDS: said}) == seconds
    assert after_seconds({}) == 0.0


# --- streams that make no headway


def take_all(messages: AsyncIterator[int], seconds: float, enough: int) -> list[int]:
    """Counts each message as so many bytes."""
    taken: list[int] = []

    async def take() -> None:
        async for message in with_progress_deadline(messages, seconds, lambda: sum(taken), enough):
            taken.append(message)

    run_in_virtual_time(take())
    return taken


async def _paced(sizes: list[int], pause: float) -> AsyncIterator[int]:
    for size in sizes:
        await asyncio.sleep(pause)
        yield size


def test_stream_that_brings_enough_may_take_any_time() -> None:
    assert take_all(_paced([10] * 8, 0.05), 0.2, 10) == [10] * 8


def test_a_stream_of_crumbs_is_ended() -> None:
    with pytest.raises(RefusedError) as caught:
        take_all(_paced([1] * 1000, 0.02), 0.2, 1000)
    assert caught.value.code == Code.INCOMPLETE


def test_a_stream_that_brings_nothing_is_ended() -> None:
    with pytest.raises(RefusedError) as caught:
        take_all(_paced([1], 60), 0.1, 1)
    assert caught.value.code == Code.INCOMPLETE


def test_the_servers_own_time_does_not_count() -> None:
    async def take() -> int:
        number = 0
        async for _ in with_progress_deadline(_paced([1] * 5, 0.0), 0.2, lambda: 0, 100):
            await asyncio.sleep(0.1)
            number += 1
        return number

    assert run_in_virtual_time(take()) == 5


# --- a live front with tight limits

TIGHT = Limits(
    open_calls_per_device=2,
    uploads_per_hour_per_device=5,
    devices=30,
    refusals_per_hour=3,
    stall_seconds=2.0,  # an honest sender on a busy machine is never so slow
    handshake_seconds=2.0,
    idle_seconds=4.0,
    request_bytes=1 << 30,  # the quota of slow requests has tests of its own
    request_bytes_per_caller=1 << 30,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = prepare_store(tmp_path_factory.mktemp("tight") / "store")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def front(directory: Path) -> Iterator[LiveFront]:
    with live_front(directory, limits=TIGHT) as running:
        yield running


def ask(store: Store, client: Client) -> service_pb2.UploadName:
    number = open_round(store, client.device)
    write_asks(store, number, client.device)
    return upload_name(number)


def hold(seconds: float = 60.0) -> Iterator[service_pb2.UploadRequest]:
    """A sender that has fallen silent."""
    threading.Event().wait(seconds)
    yield from ()


def test_one_long_poll_too_many_is_told_when_to_come_back(client: Client) -> None:
    waiting = [client.start_next_ask(20.0) for _ in range(2)]
    time.sleep(0.3)
    with refused() as result:
        client.next_ask(20.0)
    for call in waiting:
        call.cancel()
    assert (result[0].status, result[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too-many")
    assert float(result[0].details[AFTER_SECONDS]) > 0
    wait_until(lambda: _polls(client), "the places to be free again")


def _polls(client: Client) -> bool:
    try:
        return client.next_ask(0.0).WhichOneof("next") is not None
    except grpc.RpcError:
        return False


def test_an_upload_too_many_waits_and_is_not_lost(client: Client, store: Store) -> None:
    for _ in range(TIGHT.uploads_per_hour_per_device):
        client.upload(ask(store, client), make_payload())
    name = ask(store, client)
    with refused() as result:
        client.upload(name, make_payload())
    assert result[0].reason == "too-many"
    assert client.status(name).ask_open
    row = store.asks.get(RUN, name.round, 1, client.device)
    assert row is not None
    assert row.status == "open"


@pytest.mark.long
@pytest.mark.parametrize("brought", ["nothing", "header", "some"])
def test_a_sender_that_falls_silent_is_ended_and_may_go_on_later(client: Client, store: Store, brought: str) -> None:
    """On a busy machine a sender may count as silent before its last piece; then it sends the rest in a next call."""
    name, payload = ask(store, client), make_payload(rows=50)
    pieces = {"nothing": 0, "header": 0, "some": 3}[brought]

    def send(first: int) -> Iterator[service_pb2.UploadRequest]:
        if brought != "nothing":
            yield client.header(name, payload, first_byte=first * PIECE)
        yield from as_messages(in_pieces(payload, PIECE)[first:pieces])
        yield from hold()

    held = -1
    while held < pieces:
        with refused() as result:
            client.stub.Upload(send(max(held, 0)), timeout=PATIENCE_SECONDS)
        assert (result[0].status, result[0].reason) == (grpc.StatusCode.ABORTED, "incomplete")
        now, rest = divmod(client.status(name).next_byte, PIECE)
        assert rest == 0
        assert max(held, 0) <= now <= pieces
        held = now
    assert client.upload(name, payload, held * PIECE).sha256 == payload.sha256


@pytest.mark.long
def test_a_sender_of_crumbs_is_ended(client: Client, store: Store) -> None:
    name, payload = ask(store, client), make_payload(rows=50)

    def crumbs() -> Iterator[service_pb2.UploadRequest]:
        yield client.header(name, payload)
        for message in as_messages(in_pieces(payload, 4)):
            time.sleep(0.1)
            yield message

    with refused() as result:
        client.stub.Upload(crumbs(), timeout=PATIENCE_SECONDS)
    assert result[0].reason == "incomplete"
    assert client.status(name).next_byte > 0


@pytest.mark.long
def test_a_download_that_nobody_takes_is_ended_and_goes_on_later(client: Client, store: Store) -> None:
    payload = make_payload(rows=1_000_000)
    number = open_round(store, client.device)
    write_asks(store, number, client.device, payload=payload)
    request = service_pb2.DownloadRequest(identity=client.identity, sha256=payload.sha256)
    stream = client.stub.Download(request, timeout=PATIENCE_SECONDS)
    time.sleep(3 * TIGHT.stall_seconds)
    with refused() as result:
        for _ in stream:
            pass
    assert (result[0].status, result[0].reason) == (grpc.StatusCode.ABORTED, "incomplete")
    *_, last = client.download(payload.sha256, payload.data_bytes - 10)
    assert len(last.chunk.data) == 10


class SlowLink(GrpcLink):
    """Stops taking its first download for longer than the server waits."""

    slow = True

    def _chunks(self, stream: Any) -> Iterator[Any]:
        if self.slow:
            self.slow = False
            time.sleep(3 * TIGHT.stall_seconds)
        return super()._chunks(stream)


@pytest.mark.long
def test_a_device_goes_on_with_a_download_that_was_too_slow(
    client: Client, front: LiveFront, store: Store, tmp_path: Path
) -> None:
    payload = make_payload(rows=1_000_000)
    write_asks(store, open_round(store, client.device), client.device, payload=payload)
    link = SlowLink(f"127.0.0.1:{front.port}")
    result = Downloads(tmp_path, 1 << 30).fetch(link, client.identity, payload.sha256)
    assert (result.sha256, link.slow) == (payload.sha256, False)
    link.close()


@pytest.mark.long
def test_refusals_of_device_are_noted_up_to_bound_then_counted(client: Client, store: Store) -> None:
    for _ in range(10):
        with refused():
            client.upload(upload_name(10**6), make_payload())
        with refused():
            client.status(upload_name(10**6))
    noted = [row for row in store.history.events(RUN, "refused") if row.device == client.device]
    assert len(noted) <= TIGHT.refusals_per_hour
    others = TIGHT.uploads_per_hour_per_device + 10 - TIGHT.refusals_per_hour
    # The front writes the count every few seconds, perhaps also while the calls are made.
    wait_until(lambda: _left_out(store, client.device).startswith(f"{others} "), "the count of the others")


def _left_out(store: Store, device: str) -> str:
    return "".join(row.text for row in store.history.events(RUN, "refusals-left-out") if row.device == device)


def test_strangers_share_one_allowance_of_notes(front: LiveFront, store: Store) -> None:
    with client_of(front) as client:
        for number in range(20):
            client.device = f"stranger-{number}"
            with refused():
                client.check_in(classes=9)
    noted = [row for row in store.history.events(RUN, "refused") if row.device.startswith("stranger")]
    assert len(noted) <= TIGHT.refusals_per_hour
    assert store.devices.get(RUN, "stranger-1") is None


def everything_in(store: Store) -> dict[str, list[Any]]:
    """The rows of every table; the file itself changes in the front's own time, too."""
    tables = store.database.rows("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    return {table["name"]: store.database.rows(f"SELECT * FROM {table['name']}") for table in tables}


def test_whoever_is_not_registered_writes_nothing(front: LiveFront, directory: Path, store: Store) -> None:
    before = everything_in(store)
    with client_of(front, "nobody") as client:
        client.secret = b"x" * 32
        for call in (
            lambda: client.next_ask(0.0),
            lambda: client.status(upload_name(1)),
            lambda: client.download(b"d"),
        ):
            with refused() as result:
                call()
            assert result[0].status is grpc.StatusCode.UNAUTHENTICATED
    time.sleep(0.2)
    assert everything_in(store) == before


def test_a_run_takes_so_many_devices_and_no_more() -> None:
    store = Store.in_memory()
    store.runs.begin(RUN, {})
    store.runs.publish_contract(RUN, make_contract(run=RUN).SerializeToString())
    api = DeviceApi(store, limits=Limits(devices=1))
    identity = make_identity("d1")
    request = service_pb2.CheckInRequest(identity=identity, profile=make_profile())
    identity = make_identity("d1", api.check_in(request).secret)
    api.sessions._registered.clear()  # the count is looked up once a second
    too_many(api.check_in, service_pb2.CheckInRequest(identity=make_identity("d2"), profile=make_profile()))
    api.check_in(service_pb2.CheckInRequest(identity=identity, profile=make_profile()))
    store.close()


def test_new_ids_per_minute_are_bounded_per_address_and_for_all() -> None:
    clock = Clock()
    limiter = Limiter(Limits(new_devices_per_minute=3, new_devices_per_minute_per_address=2), clock)
    limiter.begin_device("a")
    limiter.begin_device("a")
    assert after_seconds(too_many(limiter.begin_device, "a").details) == pytest.approx(30)
    limiter.begin_device("b")
    assert "the server has started 3" in str(too_many(limiter.begin_device, "b"))
    clock.now += 30
    limiter.begin_device("a")


def test_a_new_id_refused_for_all_costs_its_address_nothing() -> None:
    limiter = Limiter(Limits(new_devices_per_minute=1, new_devices_per_minute_per_address=1), Clock())
    limiter.begin_device("a")
    said = [str(too_many(limiter.begin_device, "b")) for _ in range(2)]
    assert all("the server has started 1 check-ins of new ids" in item for item in said)


def test_ids_that_cost_nothing_do_not_fill_the_store(tmp_path: Path) -> None:
    prepare_store(tmp_path / "store").close()
    limits = Limits(new_devices_per_minute_per_address=10)
    with live_front(tmp_path / "store", limits=limits) as front, client_of(front) as client:
        client.check_in()
        secret = client.secret
        reasons = []
        for number in range(100):
            client.device, client.secret = f"new-{number}", b""
            try:
                client.check_in()
            except grpc.RpcError as error:
                reasons.append(refusal_of(error).reason)
        client.device, client.secret = "d1", secret
        assert client.check_in().run, "a device that is known comes in"
    assert set(reasons) == {"too-many"}
    store = Store.open(tmp_path / "store")
    assert store.devices.count(RUN) == 101 - len(reasons)
    assert len(reasons) > 50
    assert not store.history.events(RUN)
    store.close()


# --- half-open connections


@contextlib.contextmanager
def connections(port: int, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that say at most this, and then nothing."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)))
            made[-1].sendall(first)
        yield made


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it; what it said before is thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PING = b"\0\0\x08\6\0\0\0\0\0" + bytes(8)
EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.fixture(scope="module")
def waiting_front(directory: Path) -> Iterator[LiveFront]:
    """One that closes what has not begun to speak, and nothing else."""
    with live_front(directory, limits=Limits(handshake_seconds=1.0)) as running:
        yield running


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"", marks=pytest.mark.long, id="nothing"),
        pytest.param(PREFACE[:10], id="half a preface"),
        pytest.param(PREFACE, marks=pytest.mark.long, id="a preface"),
    ],
)
def test_thousand_never_begun_connections_do_not_stop_others(
    waiting_front: LiveFront, client: Client, first: bytes
) -> None:
    with connections(waiting_front.port, MANY, first) as made:
        with client_of(waiting_front, client.device) as another:
            another.secret = client.secret
            assert another.next_ask(0.0).WhichOneof("next") == "come_back"
        wait_until(lambda: all(map(is_closed, made)), "the front to close every one of them")


@pytest.mark.long
@pytest.mark.slow
def test_thousand_never_calling_connections_do_not_stop_others(front: LiveFront, client: Client) -> None:
    with connections(front.port, MANY, PREFACE + EMPTY_SETTINGS) as made:
        with client_of(front, client.device) as another:
            another.secret = client.secret
            assert another.next_ask(0.0).WhichOneof("next") == "come_back"
        wait_until(lambda: all(map(is_closed, made)), "the front to close every one of them")


@pytest.mark.long
@pytest.mark.slow
def test_connection_that_answers_pings_but_never_calls_is_closed(front: LiveFront) -> None:
    states: list[grpc.ChannelConnectivity] = []
    with grpc.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        channel.subscribe(states.append, try_to_connect=True)
        wait_until(lambda: grpc.ChannelConnectivity.READY in states, "the connection")
        wait_until(lambda: states[-1] is grpc.ChannelConnectivity.IDLE, "the front to close it")


@pytest.mark.slow
@pytest.mark.long
def test_a_hundred_silent_uploads_hold_no_thread_of_the_pool(front: LiveFront, client: Client, store: Store) -> None:
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(4):
            one = stack.enter_context(client_of(front, client.device))
            silent += [one.stub.Upload.future(hold(), timeout=PATIENCE_SECONDS) for _ in range(25)]
        assert client.upload(ask(store, client), make_payload()).id
        for call in silent:
            assert call.exception(timeout=PATIENCE_SECONDS).code() is grpc.StatusCode.ABORTED


@pytest.mark.slow
def test_message_unpacking_to_too_much_is_refused_without_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare_store(tmp_path / "store").close()
    packings = (grpc.Compression.Gzip, grpc.Compression.Deflate)
    with live_front(tmp_path / "store") as running:
        for packing, method in itertools.product(packings, ("CheckIn", "NextAsk", "Heartbeat", "Upload") * 4):
            with grpc.insecure_channel(f"127.0.0.1:{running.port}", compression=packing) as channel:
                call = channel.stream_unary(f"/fleetdistill.wire.v1.DeviceService/{method}")
                with pytest.raises(grpc.RpcError) as refusal:
                    call(iter([bytes(6 << 20)]), timeout=PATIENCE_SECONDS)
                assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("mebibytes", [2, 1024])
def test_a_chunk_that_unpacks_to_too_much_costs_no_memory(client: Client, store: Store, mebibytes: int) -> None:
    name, payload = ask(store, client), make_payload()
    packer = zstandard.ZstdCompressor(level=19).compressobj(size=mebibytes << 20)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(mebibytes)) + packer.flush()
    chunk = knowledge_pb2.Chunk(data=bomb, crc32c=google_crc32c.value(bomb), compression=knowledge_pb2.COMPRESSION_ZSTD)
    with refused() as result:
        client.send([client.header(name, payload), service_pb2.UploadRequest(chunk=chunk)])
    assert result[0].reason == Code.BAD_MESSAGE
    assert f"states a size of {mebibytes << 20} bytes, must be 1 to 1048576" in result[0].text


# --- strangers, on both ports of TLS

SECRET = b"s" * 32


def runs_of(stub: Any) -> list[str]:
    pages = stub.Read(operations_pb2.ReadRequest(view="runs", most=1), timeout=CALL_SECONDS)
    return [json.loads(row)["run"] for page in pages for row in page.rows]


@dataclass
class Secured:
    """A front with TLS, a device and an operator that it knows."""

    front: SecuredFront
    store: Store
    device: Credentials
    operator: Credentials

    def heartbeat(self) -> None:
        """A call of the device on a connection of its own."""
        identity = service_pb2.Identity(run=RUN, device="known", secret=SECRET)
        with self.front.channel(self.device) as channel:
            stub = service_pb2_grpc.DeviceServiceStub(channel)
            stub.Heartbeat(service_pb2.HeartbeatRequest(identity=identity), timeout=CALL_SECONDS)

    def list_runs(self) -> list[str]:
        """A call of the operator on a connection of its own."""
        with self.front.channel(self.operator) as channel:
            stub = operations_pb2_grpc.OperationsServiceStub(channel)
            return runs_of(stub)

    def request(self, device: str) -> enrolment_pb2.EnrolRequest:
        """An enrolment with a token and a key of its own."""
        secret, key = read_token(make_token(self.store, self.front)).secret, device_x509.new_key()
        return enrolment_pb2.EnrolRequest(
            secret=secret, device=device, signing_request=device_x509.signing_request(key)
        )


@contextlib.contextmanager
def secured(folder: Path, limits: Limits) -> Iterator[Secured]:
    authority = make_pki(folder / "pki")
    store = prepare_store(folder / "store")
    store.devices.register(RUN, "known", sha256(SECRET).digest(), make_profile().SerializeToString())
    people = device_credentials(authority, "known"), person_credentials(authority, Role.OPERATOR, "olga")
    with secured_front(folder / "store", folder / "pki", limits=limits) as front:
        yield Secured(front, store, *people)
    store.close()


def test_strangers_share_few_enrolments_at_no_cost_to_others(tmp_path: Path) -> None:
    limits = Limits(enrolments_at_once=2, enrolments_per_minute=4)
    with secured(tmp_path, limits) as world, world.front.anonymous(enrol=True) as channel:
        stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
        requests = [world.request(f"new-{number}") for number in range(3)]
        with world.store.transaction():  # the front's commits wait for its end, and the enrolments with them
            calls = [stub.Enrol.future(request, timeout=CALL_SECONDS) for request in requests]
            wait_until(lambda: any(call.done() for call in calls), "one to be refused")
            (surplus,) = [call for call in calls if call.done()]
            under_way = [call for call in calls if call is not surplus]
            assert refusal_of(surplus.exception()).reason == "too-many"
            under_way[0].cancel()  # who hangs up gives no work back
            assert _reason(stub, requests[0]) == "too-many"
            world.heartbeat()
        assert under_way[1].result().certificate
        tokens = world.store.credentials.tokens
        wait_until(lambda: sum(token.device is not None for token in tokens()) == 2, "both enrolments")
        garbage = enrolment_pb2.EnrolRequest(secret=b"x" * 32, device="x", signing_request=b"x" * 1000)
        reasons = [_reason(stub, garbage), _reason(stub, garbage)]
        while (reason := _reason(stub, garbage)) == "bad-token":  # on a slow machine the minute brings another one
            pass
        assert [*reasons, reason] == ["bad-token", "bad-token", "too-many"]
        world.heartbeat()
        assert world.list_runs() == [RUN]


def _reason(stub: Any, request: enrolment_pb2.EnrolRequest) -> str:
    with refused() as result:
        stub.Enrol(request, timeout=CALL_SECONDS)
    return result[0].reason


def _client_hello() -> bytes:
    """What a client says first."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="localhost").do_handshake()
    return said.read()


HELLO = _client_hello()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("secured"), Limits(handshake_seconds=1.0)) as running:
        yield running


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("port", ["port", "enrol_port"])
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"", marks=pytest.mark.long, id="nothing"),
        pytest.param(HELLO[:100], id="half a hello"),
        pytest.param(HELLO, marks=pytest.mark.long, id="a hello"),
    ],
)
def test_thousand_unfinished_handshakes_do_not_stop_others(world: Secured, port: str, first: bytes) -> None:
    with connections(getattr(world.front, port), MANY, first) as made:
        world.heartbeat()
        assert world.list_runs() == [RUN]
        with world.front.anonymous(enrol=True) as channel:
            stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
            assert stub.Enrol(world.request(f"{port}-{len(first)}"), timeout=CALL_SECONDS).certificate
        wait_until(lambda: all(map(is_closed, made)), "the front to close every one of them")


@pytest.mark.long
def test_a_caller_that_pings_and_reads_nothing_is_closed(tmp_path: Path) -> None:
    """On the enrolment port, which strangers reach: the replies to its pings would fill the memory."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with secured(tmp_path, Limits(handshake_seconds=1.0, request_seconds=1.0, stall_seconds=2.0)) as world:
        place = ("127.0.0.1", world.front.enrol_port)
        with socket.create_connection(place, PATIENCE_SECONDS) as plain, context.wrap_socket(plain) as caller:
            assert caller.selected_alpn_protocol() == "h2"
            caller.sendall(PREFACE + EMPTY_SETTINGS)
            with pytest.raises(OSError, match=r"reset|pipe|EOF"):
                caller.sendall(PING * 10_000_000)  # 170 MB
        with world.front.anonymous(enrol=True) as channel:
            stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
            assert stub.Enrol(world.request("honest"), timeout=CALL_SECONDS).certificate


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("port", ["port", "enrol_port"])
def test_address_keeps_few_unknown_connections_and_known_stay(tmp_path: Path, port: str) -> None:
    limits = Limits(unknown_connections=300, unknown_connections_per_address=150, handshake_seconds=3600.0)
    with secured(tmp_path, limits) as world, world.front.channel(world.operator) as channel:
        runs = operations_pb2_grpc.OperationsServiceStub(channel)
        assert runs_of(runs) == [RUN]
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        with connections(getattr(world.front, port), 300, b"") as made:
            wait_until(lambda: sum(map(is_closed, made)) >= 113, "the front to close all but 150 and a quarter more")
            assert sum(map(is_closed, made)) < 300
            world.heartbeat()  # a new connection of somebody known from the same address
            assert runs_of(runs) == [RUN]
        assert set(states) <= {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE}


# --- the device


@pytest.mark.long
def test_a_backup_that_nobody_takes_ends_and_blocks_no_other(tmp_path: Path) -> None:
    with secured(tmp_path, Limits(stall_seconds=TIGHT.stall_seconds)) as made:
        write_asks(made.store, open_round(made.store, "known"), "known", payload=make_payload(rows=1_000_000))
        with made.front.channel(made.operator) as channel, made.front.channel(made.operator) as other:
            stalled = operations_pb2_grpc.OperationsServiceStub(channel).BackUp(operations_pb2.BackUpRequest())
            next(stalled)
            result: list[operations_pb2.FilePart] = []

            def copied() -> list[operations_pb2.FilePart]:
                with contextlib.suppress(grpc.RpcError):  # another backup is in progress
                    result.extend(
                        operations_pb2_grpc.OperationsServiceStub(other).BackUp(operations_pb2.BackUpRequest())
                    )
                return result

            wait_until(copied, "the other backup")
            assert result[-1].report
            time.sleep(3 * TIGHT.stall_seconds)
            with refused() as refusals:
                for _ in stalled:
                    pass
    assert (refusals[0].status, refusals[0].reason) == (grpc.StatusCode.ABORTED, "incomplete")


def test_device_waits_as_long_as_told_and_keeps_its_answer(tmp_path: Path) -> None:
    class Busy:
        remote = False

        def check_in(self, *_: Any) -> Any:
            raise RefusedError(Code.TOO_MANY, "come back", {AFTER_SECONDS: "7.5"})

        def interrupt(self) -> None: ...

        def close(self) -> None: ...

    with (
        open_device(
            server=Busy(),
            worker=lambda contract: None,
            state_dir=tmp_path / "d1",
        ) as device,
        pytest.raises(LinkError) as caught,
    ):
        device.step()
    assert caught.value.after_seconds == 7.5
