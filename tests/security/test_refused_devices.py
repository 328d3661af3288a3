"""A device that the server refuses before the device API is an event of a run; a stranger writes none."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from support.live_front import RUN, prepare_store, refused
from support.processes import wait_until
from support.secured import CALL_SECONDS, SecuredFront, device_credentials, make_pki, make_token, secured_front
from support.wire_samples import in_pieces, make_contract, make_payload

from fleetdistill.errors import RefusedError, StoreUnavailableError
from fleetdistill.link import x509 as device_x509
from fleetdistill.link.credentials import Credentials
from fleetdistill.link.enrolment import read_token
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import service_pb2, service_pb2_grpc
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.front.tls import note_refusals
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.store.records import Event
from fleetdistill_server.store.store import Store

OTHER = "other"
LIMITS = Limits(refusals_per_hour=5)


@dataclass
class Service:
    """A front with TLS and its store, which has two runs."""

    front: SecuredFront
    store: Store
    authority: Authority

    def events(self, device: str) -> list[Event]:
        """The refusals of a device in all runs."""
        return [
            row for run in (RUN, OTHER) for row in self.store.history.events(run, "refused") if row.device == device
        ]

    def event(self, device: str) -> tuple[str, str, str]:
        """Run, code and text of a device's only refusal."""
        (row,) = wait_until(lambda: self.events(device), "the event")
        return row.run, row.code, row.text

    def poll(self, credentials: Credentials, device: str, run: str, times: int = 1) -> None:
        """Asks for work, which is refused."""
        with self.front.channel(credentials) as channel:
            stub = service_pb2_grpc.DeviceServiceStub(channel)
            for _ in range(times):
                with refused():
                    stub.NextAsk(_request(device, run), timeout=CALL_SECONDS)

    def enrol(self, token: str, device: str) -> None:
        """Enrols with a key of its own."""
        self.front.enrol(read_token(token).secret, device, device_x509.new_key())


def _request(device: str, run: str) -> service_pb2.NextAskRequest:
    return service_pb2.NextAskRequest(identity=service_pb2.Identity(run=run, device=device, secret=b"s" * 32))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("refused")
    authority = make_pki(folder / "pki")
    store = prepare_store(folder / "store")
    store.runs.begin(OTHER, {"made": "by hand"})
    store.runs.publish_contract(OTHER, make_contract(run=OTHER).SerializeToString())
    with secured_front(folder / "store", folder / "pki", limits=LIMITS) as front:
        yield Service(front, store, authority)
    store.close()


def test_a_revoked_device_is_an_event_of_its_run(service: Service) -> None:
    service.store.credentials.revoke("device:lost", "stolen")
    service.poll(device_credentials(service.authority, "lost", OTHER), "lost", OTHER)
    assert service.event("lost") == (OTHER, Code.REVOKED, "device 'lost' was revoked; contact the operator")


def test_a_revoked_device_of_any_run_is_found_by_its_run(service: Service) -> None:
    service.store.devices.register(RUN, "known", b"hash", b"")
    service.store.credentials.revoke("device:known", "stolen")
    service.poll(device_credentials(service.authority, "known"), "known", RUN)
    assert service.event("known")[:2] == (RUN, Code.REVOKED)


def test_a_device_of_another_run_is_an_event_of_the_requested(service: Service) -> None:
    service.poll(device_credentials(service.authority, "astray", OTHER), "astray", RUN)
    text = f"the certificate is for run '{OTHER}', but the request is for run '{RUN}'"
    assert service.event("astray") == (RUN, Code.NOT_ALLOWED, text)


def test_a_run_that_is_not_there_leaves_that_of_the_certificate(service: Service) -> None:
    service.poll(device_credentials(service.authority, "nowhere", OTHER), "nowhere", "no-such-run")
    assert service.event("nowhere")[:2] == (OTHER, Code.NOT_ALLOWED)


def test_an_upload_to_another_run_is_one_event(service: Service) -> None:
    identity = service_pb2.Identity(run=RUN, device="sender", secret=b"s" * 32)
    header = service_pb2.UploadHeader(identity=identity)
    chunks = [service_pb2.UploadRequest(chunk=chunk) for chunk in in_pieces(make_payload(), 64)]
    pieces = [service_pb2.UploadRequest(header=header), *chunks]
    with service.front.channel(device_credentials(service.authority, "sender", OTHER)) as channel, refused():
        service_pb2_grpc.DeviceServiceStub(channel).Upload(iter(pieces), timeout=CALL_SECONDS)
    assert service.event("sender")[:2] == (RUN, Code.NOT_ALLOWED)


def test_a_used_token_is_an_event_and_an_unknown_one_is_not(service: Service) -> None:
    token = make_token(service.store, service.front, run=OTHER)
    service.enrol(token, "first")
    with refused():
        service.enrol(token, "second")
    run, code, text = service.event("second")
    assert (run, code) == (OTHER, Code.BAD_TOKEN)
    assert text.startswith("the enrolment token is used; ")
    with refused():
        service.front.enrol(b"x" * 32, "third", device_x509.new_key())
    assert service.events("first") == service.events("third") == []


def test_a_caller_without_a_certificate_writes_no_event(service: Service) -> None:
    before = service.store.history.events(RUN)
    with service.front.anonymous(enrol=True) as channel, pytest.raises(grpc.RpcError):
        service_pb2_grpc.DeviceServiceStub(channel).NextAsk(_request("stranger", RUN), timeout=CALL_SECONDS)
    service.poll(device_credentials(service.authority, "marker", RUN), "marker", OTHER)  # its event comes later
    service.event("marker")
    assert service.events("stranger") == []
    assert service.store.history.events(RUN) == before


def test_repeated_refusals_of_a_device_keep_to_the_quota(service: Service) -> None:
    service.store.devices.register(RUN, "stubborn", b"hash", b"")
    service.store.credentials.revoke("device:stubborn", "stolen")
    service.poll(device_credentials(service.authority, "stubborn", RUN), "stubborn", RUN, times=100)

    def left_out() -> str:
        rows = service.store.history.events(RUN, "refusals-left-out")
        return "".join(row.text for row in rows if row.device == "stubborn")

    wait_until(lambda: left_out().startswith("95 "), "the count of the others")
    assert len(service.events("stubborn")) == LIMITS.refusals_per_hour


class Call:
    """A call on a connection with a device's certificate."""

    def __init__(self, chain: bytes) -> None:
        self._chain = chain

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._chain]}


def test_refusals_while_the_store_is_away_raise_nothing(tmp_path: Path) -> None:
    """The call was refused; that its event is lost must not fill the log with tracebacks."""
    tried, raised = list[object](), list[object]()

    class Away(DeviceApi):
        def note_refusal(self, *refused: object, **more: object) -> None:
            tried.append(refused)
            raise StoreUnavailableError("away")

    async def refuse() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
        note_refusals(Away(store), pool)("/NextAsk", Call(chain), RefusedError(Code.REVOKED, "revoked"), None)
        while not tried:
            await asyncio.sleep(0.01)

    chain = device_credentials(make_pki(tmp_path / "pki"), "d", RUN).chain
    with closing(Store.open(tmp_path / "store")) as store, ThreadPoolExecutor(1) as pool:
        asyncio.run(refuse())
    gc.collect()  # a future reports an error that nobody took when it is deleted
    assert raised == []
