"""PostgreSQL is stopped while a front serves: every call is refused for now, and succeeds when it is back."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
from support.answering import AnsweringFleet
from support.dashboards import TOKEN, dashboard
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
from support.processes import COMMAND, PATIENCE_SECONDS, wait_until
from support.serving import completed, serve, write_config
from support.wire_samples import make_payload
from typer.testing import CliRunner

from fleetdistill.errors import StoreUnavailableError
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.cli.app import app
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.postgres]
ANSWER, MODEL = make_payload(4), make_payload(3)
NAME = upload_name(1)


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


@pytest.mark.long
def test_every_call_is_refused_for_now_while_postgres_is_away(own_postgres: Postgres, tmp_path: Path) -> None:
    assert set(CALLS) == {method.name for method in service_pb2.DESCRIPTOR.services_by_name["DeviceService"].methods}
    with own_postgres.schema() as url:
        set_location(tmp_path, Location(database=url))
        store = prepare_store(tmp_path)
        with live_front(tmp_path) as front, client_of(front) as client:
            client.check_in()
            number = open_round(store, client.device)
            for step_number in (1, 2):
                write_asks(store, number, client.device, step_number=step_number, payload=MODEL)
            own_postgres.stop()
            for call in CALLS.values():
                with refused() as result:
                    call(client)
                assert (result[0].status, result[0].reason) == (grpc.StatusCode.UNAVAILABLE, "not-ready")
            own_postgres.start_again()
            wait_until(lambda: _succeeds(CALLS["CheckIn"], client), "the front to be connected again")
            receipt = [call(client) for call in CALLS.values()][list(CALLS).index("Upload")]
        (row,) = store.asks.uploads(RUN)
        assert isinstance(receipt, service_pb2.Receipt)
        assert (row.receipt, row.status) == (receipt.id, "acknowledged")
        store.close()


def health(port: int) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["health", f"127.0.0.1:{port}"])
    return done.exit_code, done.output


@pytest.mark.long
def test_database_outage_is_said_everywhere_within_15_seconds(own_postgres: Postgres, tmp_path: Path) -> None:
    """By what is asked again and again within 15 s; by a command at its first call."""
    told = "fleetdistill.database is NOT_SERVING"

    def command(*words: str) -> str:
        done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        return f"exit code {done.returncode}: {done.stdout}{done.stderr}"

    with own_postgres.schema() as url:
        config = write_config(tmp_path, server_database=url)
        store = ("--store", str(tmp_path / "store"))
        with contextlib.ExitStack() as opened:
            port = opened.enter_context(serve(config)).port()
            web = opened.enter_context(httpx.Client(base_url=opened.enter_context(dashboard(tmp_path, *store))))
            web.post("/login", data={"token": TOKEN})
            wait_until(lambda: web.get("/health").status_code == 200, "a healthy server")
            assert told not in health(port)[1]
            own_postgres.stop()
            stopped = time.monotonic()
            for surface in (
                lambda: told in health(port)[1],
                lambda: web.get("/health").status_code == 503,
            ):
                wait_until(surface, "the outage to be told", 15 - (time.monotonic() - stopped))
            assert "the front is NOT_SERVING, it refuses calls" in health(port)[1]
            listed = command("runs", "list", *store)
            assert listed.startswith("exit code 1: ")
            assert "error: the database is not available: " in listed
            examined = command("doctor", str(config))
            assert examined.startswith("exit code 1: ")
            assert "the database is not available: " in examined
            own_postgres.start_again()
            wait_until(lambda: told not in health(port)[1], "the database to be seen again")
            wait_until(lambda: web.get("/health").status_code == 200, "a healthy server")


@pytest.mark.long
def test_server_of_one_run_outlives_database_and_says_so_once(own_postgres: Postgres, tmp_path: Path) -> None:
    with own_postgres.schema() as url, serve(write_config(tmp_path, server_database=url)) as server:
        with AnsweringFleet(server.port(), "served", 2):
            store = Store.open(tmp_path / "store")
            wait_until(lambda: completed(store) >= 1, "a round")
            own_postgres.stop()
            wait_until(lambda: "the store cannot be used; retrying" in "".join(server.said), "the supervisor to see it")
            wait_until(lambda: "the store does not answer" in "".join(server.said), "the front to see it")
            own_postgres.start_again()
            before = wait_until(lambda: _quietly(lambda: completed(store)), "the database")
            wait_until(lambda: _quietly(lambda: completed(store) > before), "the next round")
            wait_until(lambda: "the store can be used again" in "".join(server.said), "the end in the log")
            assert server.process.poll() is None
            assert store.history.events("served", "engine-failed") == []
            store.close()
        lines = [line.split(" ", 3)[-1] for line in "".join(server.said).splitlines() if " WARNING " in line]
        for text in ("the store cannot be used; retrying", "the store can be used again", "the store does not answer"):
            assert sum(line.startswith(text) for line in lines) == 1, lines


def _quietly(work: Callable[[], int]) -> int:
    with contextlib.suppress(StoreUnavailableError):
        return work()
    return 0


def _succeeds(call: Callable[[Client], object], client: Client) -> bool:
    try:
        call(client)
    except grpc.RpcError:
        return False
    return True
