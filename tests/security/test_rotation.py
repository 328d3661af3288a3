"""Certificates and CAs change while everything goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from support.live_front import RUN, prepare_store, upload_name, write_asks
from support.open_device import open_device
from support.processes import wait_until
from support.secured import (
    CALL_SECONDS,
    SecuredFront,
    device_credentials,
    make_pki,
    make_token,
    secured_front,
    serial_of,
    server_fingerprint,
    wait_for_expiry,
)
from support.small_device import SmallWorker
from support.wire_samples import in_pieces, make_payload, make_profile

from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.link import x509 as device_x509
from fleetdistill.link.credentials import AUTHORITIES, Credentials, load_credentials
from fleetdistill.link.enrolment import Enrolment, read_token
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.wire.v1 import enrolment_pb2, enrolment_pb2_grpc, knowledge_pb2, service_pb2, service_pb2_grpc
from fleetdistill_server.front.guard import AcceptedAuthorities
from fleetdistill_server.security.pki import SERVER, Authority, forget_old_authority, rotate_authority
from fleetdistill_server.store.store import Store

BRIEF_DAYS = 6 / 86_400
IDENTITY = service_pb2.Identity(run=RUN, device="turning", secret=b"s" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    make_pki(tmp_path / "pki")
    opened = prepare_store(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def front(store: Store, tmp_path: Path) -> Iterator[SecuredFront]:
    with secured_front(tmp_path / "store", tmp_path / "pki") as running:
        yield running


@pytest.fixture
def brief_front(store: Store, tmp_path: Path) -> Iterator[SecuredFront]:
    """Its devices' certificates live for seconds."""
    with secured_front(tmp_path / "store", tmp_path / "pki", certificate_days=BRIEF_DAYS) as running:
        yield running


def enrolment_of(front: SecuredFront, state: Path, token: str | None) -> Enrolment:
    state.mkdir(exist_ok=True)
    return Enrolment(f"127.0.0.1:{front.port}", state, IDENTITY.device, token)


def enter(link: GrpcLink) -> None:
    link.check_in(IDENTITY, make_profile())


@pytest.mark.long
@pytest.mark.slow
def test_device_renews_before_expiry_and_open_upload_continues(
    brief_front: SecuredFront, store: Store, tmp_path: Path
) -> None:
    enrolment = enrolment_of(brief_front, tmp_path / "state", make_token(store, brief_front))
    link = GrpcLink(f"127.0.0.1:{brief_front.port}", enrolment)
    enter(link)
    first = enrolment.current()
    number = store.runs.start_round(RUN, [IDENTITY.device])
    write_asks(store, number, IDENTITY.device)
    payload = make_payload()
    header = service_pb2.UploadHeader(identity=IDENTITY, name=upload_name(number), payload=payload.header(), samples=4)

    def renewed() -> bool:
        link.heartbeat(IDENTITY)  # as the SDK's heartbeat thread does while an upload is under way
        return enrolment.current() is not first

    def chunks() -> Iterator[knowledge_pb2.Chunk]:
        pieces = iter(in_pieces(payload, 64))
        yield next(pieces)
        wait_until(renewed, "the renewal")
        yield from pieces

    receipt = link.upload(header, chunks())
    assert [row.receipt for row in store.asks.uploads(RUN)] == [receipt.id]
    second = load_credentials(tmp_path / "state" / "tls")
    assert second.key == first.key
    assert serial_of(second) != serial_of(first)
    wait_for_expiry(first)
    link.heartbeat(IDENTITY)
    link.close()


@pytest.mark.long
@pytest.mark.slow
def test_expired_device_returns_only_with_fresh_token(brief_front: SecuredFront, store: Store, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with_token = enrolment_of(brief_front, state, make_token(store, brief_front))
    wait_for_expiry(with_token.current())
    with pytest.raises(RefusedError, match=r"the certificate has expired.*request a token from the operator") as result:
        enrolment_of(brief_front, state, None).current()
    assert result.value.code == "expired"
    with pytest.raises(RefusedError, match="the certificate has expired; the enrolment token is used") as result:
        with_token.current()
    assert result.value.code == "expired"
    link = GrpcLink(f"127.0.0.1:{brief_front.port}", enrolment_of(brief_front, state, None))
    with (
        open_device(server=link, worker=SmallWorker, state_dir=tmp_path / "of-the-app", device_id="turning") as device,
        pytest.raises(RefusedError, match="the certificate has expired") as result,
    ):
        device.run()  # the app is told, instead of waiting for ever
    assert result.value.code == "expired"
    back = enrolment_of(brief_front, state, make_token(store, brief_front)).current()
    assert back.key == load_credentials(state / "tls").key
    link = GrpcLink(f"127.0.0.1:{brief_front.port}", enrolment_of(brief_front, state, None))
    enter(link)
    link.close()


@pytest.mark.long
@pytest.mark.slow
def test_failed_renewal_leaves_present_certificate_in_use(store: Store, tmp_path: Path) -> None:
    days = 9 / 86_400  # a third of which is time enough for a refused connection
    with secured_front(tmp_path / "store", tmp_path / "pki", certificate_days=days) as front:
        enrolment = enrolment_of(front, tmp_path / "state", make_token(store, front))
        first = enrolment.current()
    start, ends = device_x509.life(first.chain)
    wait_until(lambda: time.time() > ends - (ends - start) / 3, "the renewal's time")
    assert enrolment.current() is first  # the server is away; the certificate is good for another second


def test_a_certificate_is_renewed_after_two_thirds_of_its_life(
    front: SecuredFront,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "fleetdistill.link.enrolment")
    enrolment = enrolment_of(front, tmp_path / "state", make_token(store, front))
    start, ends = device_x509.life(enrolment.current().chain)
    renewed = []
    for share in (0.6, 0.7):
        clock = SimpleNamespace(time=lambda now=start + share * (ends - start): now)
        monkeypatch.setattr("fleetdistill.link.enrolment.time", clock)
        enrolment.current()
        renewed.append("turning: certificate renewed" in caplog.messages)
    assert renewed == [False, True]


def test_early_renewal_gives_same_certificate_and_other_key_none(front: SecuredFront, store: Store) -> None:
    authority = Authority(front.pki)
    key = device_x509.new_key()
    first = front.enrol(read_token(make_token(store, front)).secret, "eager", key)
    with front.channel(Credentials(key, first.certificate, first.authorities)) as channel:
        stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
        own = enrolment_pb2.RenewRequest(signing_request=device_x509.signing_request(key))
        assert stub.Renew(own, timeout=CALL_SECONDS).certificate == first.certificate
        other = enrolment_pb2.RenewRequest(signing_request=device_x509.signing_request(device_x509.new_key()))
        with pytest.raises(grpc.RpcError) as result:
            stub.Renew(other, timeout=CALL_SECONDS)
    assert result.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert len(store.credentials.certificates("eager")) == 1
    assert authority.bundle == first.authorities


def test_the_servers_certificate_is_taken_up_while_it_serves(front: SecuredFront, store: Store) -> None:
    authority = Authority(front.pki)
    credentials = device_credentials(authority, IDENTITY.device)
    request = service_pb2.CheckInRequest(identity=IDENTITY, profile=make_profile())
    with front.channel(credentials) as open_before:
        stub = service_pb2_grpc.DeviceServiceStub(open_before)
        stub.CheckIn(request, timeout=CALL_SECONDS)
        before = server_fingerprint(front)
        authority.issue_server(authority.server_names(), 30.0)
        assert server_fingerprint(front) != before
        stub.CheckIn(request, timeout=CALL_SECONDS)
        with front.channel(credentials) as opened_after:
            service_pb2_grpc.DeviceServiceStub(opened_after).CheckIn(request, timeout=CALL_SECONDS)


def test_a_damaged_file_keeps_the_certificate_that_was_there(front: SecuredFront) -> None:
    before = server_fingerprint(front)
    path = front.pki / SERVER
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert server_fingerprint(front) == before
    path.unlink()
    assert server_fingerprint(front) == before
    path.write_bytes(whole)
    assert server_fingerprint(front) == before


def test_a_rotation_and_its_end_are_lines_of_the_servers_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fleetdistill.server.front")
    make_pki(tmp_path / "pki")
    authorities = AcceptedAuthorities(tmp_path / "pki" / AUTHORITIES)
    for change in (lambda pki: None, rotate_authority, forget_old_authority):
        change(tmp_path / "pki")
        assert not authorities.accept("CN=a name that is new, for which it looks at the file")
    begins = [line.partition(" certificates of: ")[0] for line in caplog.messages]
    assert begins == ["the server now accepts"] * 2
    assert [line.count("CN=") for line in caplog.messages] == [2, 1]


@pytest.mark.long
def test_a_device_of_a_forgotten_ca_returns_with_a_token(front: SecuredFront, store: Store, tmp_path: Path) -> None:
    """As after a stolen key: its connection ends with the next call, and a new token helps, with the same key."""
    server = f"127.0.0.1:{front.port}"
    enrolment = enrolment_of(front, tmp_path / "state", make_token(store, front))
    link = GrpcLink(server, enrolment)
    enter(link)
    rotate_authority(front.pki)
    link.heartbeat(IDENTITY)
    forget_old_authority(front.pki)
    text = "is of a CA that the server no longer accepts; every call with it is refused until the device is opened"
    wait_until(lambda: text in said(link), "the end of the connection")
    link.close()
    lost = GrpcLink(server, enrolment_of(front, tmp_path / "state", None))
    wait_until(lambda: "it may not admit this device's certificate" in said(lost), "what may be wrong")
    lost.close()
    key = enrolment.current().key
    again = enrolment_of(front, tmp_path / "state", make_token(store, front))
    returned = GrpcLink(server, again)
    wait_until(lambda: not said(returned), "the device to return")
    returned.close()
    assert again.current().key == key
    assert again.current().authorities.count(b"BEGIN CERTIFICATE") == 1


def said(link: GrpcLink) -> str:
    """What a call of a device says; empty if it succeeds."""
    try:
        link.heartbeat(IDENTITY)
    except LinkError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.slow
def test_the_ca_changes_without_a_call_that_fails(brief_front: SecuredFront, store: Store, tmp_path: Path) -> None:
    """The whole way: a device of the old CA works throughout, and only who never renewed is left behind."""
    front = brief_front
    enrolment = enrolment_of(front, tmp_path / "state", make_token(store, front))
    link = GrpcLink(f"127.0.0.1:{front.port}", enrolment)
    enter(link)
    first, left_behind = enrolment.current(), device_credentials(Authority(front.pki), "left-behind")
    stop, failures = threading.Event(), []

    def call_on_and_on() -> None:
        while not stop.wait(0.05):
            try:
                link.heartbeat(IDENTITY)
                fresh = GrpcLink(f"127.0.0.1:{front.port}", enrolment)  # a handshake with what it trusts at this moment
                fresh.heartbeat(IDENTITY)
                fresh.close()
            except (LinkError, RefusedError) as error:
                failures.append(error)

    caller = threading.Thread(target=call_on_and_on)
    caller.start()
    try:
        rotate_authority(front.pki)
        assert enrolment.current().authorities == first.authorities
        wait_until(lambda: enrolment.current().authorities != first.authorities, "the device to learn of the new CA")
        assert enrolment.current().authorities.count(b"BEGIN CERTIFICATE") == 2
        newcomer = tmp_path / "newcomer"
        newcomer.mkdir()
        token = make_token(store, front)
        Enrolment(f"127.0.0.1:{front.port}", newcomer, "newcomer", token).current()
        forget_old_authority(front.pki)
        wait_until(lambda: enrolment.current().authorities.count(b"BEGIN CERTIFICATE") == 1, "the end of the old CA")
    finally:
        stop.set()
        caller.join()
        link.close()
    assert failures == []
    request = service_pb2.CheckInRequest(identity=service_pb2.Identity(run=RUN, device="left-behind"))
    with front.channel(left_behind) as channel, pytest.raises(grpc.RpcError) as result:
        service_pb2_grpc.DeviceServiceStub(channel).CheckIn(request, timeout=CALL_SECONDS)
    assert result.value.code() is grpc.StatusCode.UNAVAILABLE
