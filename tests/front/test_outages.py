"""PostgreSQL is stopped while a front serves: every call is refused for now, and succeeds when it is back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from support.live_front import (
    CALL_SECONDS,
    RUN,
    Client,
    client_of,
    live_front,
    open_round,
    prepare_store,
    refused,
    upload_name,
    write_asks,
)
from support.postgres import Postgres
from support.processes import wait_until
from support.wire_samples import make_payload

from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.store.location import Location, set_location

pytestmark = [pytest.mark.slow, pytest.mark.postgres]
ANSWER, MODEL = make_payload(4), make_payload(3)
NAME = upload_name(1)


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    if reason := Postgres.missing():
        pytest.skip(reason)
    with Postgres.start() as server:
        yield server


CALLS: dict[str, Callable[[Client], object]] = {
    "CheckIn": Client.check_in,
    "Heartbeat": lambda client: client.stub.Heartbeat(service_pb2.HeartbeatRequest(identity=client.identity)),
    "NextAsk": lambda client: client.next_ask(0.0),
    "Download": lambda client: client.download(MODEL.sha256),
    "UploadStatus": lambda client: client.status(NAME),
    "Upload": lambda client: client.upload(NAME, ANSWER),
    "Decline": lambda client: client.stub.Decline(
        service_pb2.DeclineRequest(identity=client.identity, round=1, step_number=2, reason="no battery"),
        timeout=CALL_SECONDS,
    ),
    "Leave": lambda client: client.stub.Leave(service_pb2.LeaveRequest(identity=client.identity), timeout=CALL_SECONDS),
}
"""Every call of the device service, in an order in which each can succeed."""


def test_every_call_is_refused_for_now_while_postgres_is_away(own_server: Postgres, tmp_path: Path) -> None:
    assert set(CALLS) == {one.name for one in service_pb2.DESCRIPTOR.services_by_name["DeviceService"].methods}
    with own_server.schema() as url:
        set_location(tmp_path, Location(database=url))
        store = prepare_store(tmp_path)
        with live_front(tmp_path) as front, client_of(front) as client:
            client.check_in()
            number = open_round(store, client.device)
            for step_number in (1, 2):
                write_asks(store, number, client.device, step_number=step_number, payload=MODEL)
            own_server.stop()
            for call in CALLS.values():
                with refused() as found:
                    call(client)
                assert (found[0].status, found[0].reason) == (grpc.StatusCode.UNAVAILABLE, "not-ready")
            own_server.start_again()
            wait_until(lambda: _succeeds(CALLS["CheckIn"], client), "the front to be connected again")
            receipt = [call(client) for call in CALLS.values()][list(CALLS).index("Upload")]
        (row,) = store.asks.uploads(RUN)
        assert isinstance(receipt, service_pb2.Receipt)
        assert (row["receipt"], row["status"]) == (receipt.id, "acknowledged")
        store.close()


def _succeeds(call: Callable[[Client], object], client: Client) -> bool:
    try:
        call(client)
    except grpc.RpcError:
        return False
    return True
