"""The connections of several devices in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from support.live_front import Client, LiveFront, live_front, prepare_store
from support.processes import PATIENCE_SECONDS, free_port, wait_until

from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.link.grpc_link import Connection, GrpcLink
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.config.limits import Limits


@pytest.fixture
def front(tmp_path: Path) -> Iterator[LiveFront]:
    """A front with one open call per connection, and one per device."""
    prepare_store(tmp_path).close()
    with live_front(tmp_path, limits=Limits(open_calls_per_connection=1, open_calls_per_device=1)) as running:
        yield running


@pytest.fixture
def clients(front: LiveFront) -> Iterator[list[Client]]:
    """Two devices that have checked in."""
    made = [Client(front.port, device) for device in ("d1", "d2")]
    for client in made:
        client.check_in()
    yield made
    for client in made:
        client.channel.close()


def is_polling(client: Client) -> bool:
    """Whether the server holds a call of the device, and therefore refuses another one."""
    try:
        client.next_ask(0.0)
    except grpc.RpcError:
        return True
    return False


def test_calls_of_device_do_not_wait_for_others_in_process(front: LiveFront, clients: list[Client]) -> None:
    links = [GrpcLink(f"127.0.0.1:{front.port}") for _ in clients]
    ended: list[LinkError] = []

    def poll() -> None:
        while not ended:
            try:
                links[0].next_ask(clients[0].identity, 60.0)
            except LinkError as error:
                ended.append(error)
            except RefusedError:
                continue  # `is_polling` has a call open

    polling = threading.Thread(target=poll)
    polling.start()
    wait_until(lambda: is_polling(clients[0]), "the first device's long poll")
    links[1].heartbeat(clients[1].identity)
    links[0].interrupt()
    polling.join(PATIENCE_SECONDS)
    for link in links:
        link.close()
    assert len(ended) == 1


def test_first_call_after_an_outage_reaches_the_server() -> None:
    """It does not wait for gRPC, which tries to connect again after up to two seconds."""

    abort = lambda request, context: context.abort(grpc.StatusCode.INTERNAL, "reached")  # noqa: E731
    handler = grpc.method_handlers_generic_handler(
        "fleetdistill.wire.v1.DeviceService", {"Heartbeat": grpc.unary_unary_rpc_method_handler(abort)}
    )
    port = free_port()
    link, identity = GrpcLink(f"127.0.0.1:{port}"), service_pb2.Identity()
    for _ in range(4):
        with pytest.raises(LinkError, match="nothing listens on this port"):
            link.heartbeat(identity)
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, [handler])
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        with pytest.raises(LinkError, match="INTERNAL, reached"):
            link.heartbeat(identity)
        server.stop(None).wait()
    link.close()


def test_links_share_a_connection_which_none_of_them_closes(front: LiveFront, clients: list[Client]) -> None:
    server = f"127.0.0.1:{front.port}"
    shared = Connection(server)
    links = [GrpcLink(server, shared=shared) for _ in clients]
    links[0].close()
    links[1].heartbeat(clients[1].identity)
    shared.close()
    with pytest.raises(LinkError, match="is closed"):
        links[1].heartbeat(clients[1].identity)
