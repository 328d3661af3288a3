"""Every RPC of the protos, called by everyone, against a real front over real TLS."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.live_front import RUN, prepare_store, refusal_of, refused, upload_name, write_asks
from support.processes import wait_until
from support.secured import (
    CALL_SECONDS,
    SecuredFront,
    device_credentials,
    forged,
    make_pki,
    make_token,
    person_credentials,
    secured_front,
    serial_of,
    wait_for_expiry,
)
from support.wire_samples import in_pieces, make_contract, make_payload, make_profile

from fleetdistill.errors import RefusedError
from fleetdistill.link import x509 as device_x509
from fleetdistill.link.credentials import Credentials
from fleetdistill.link.enrolment import read_token
from fleetdistill.methods import METHODS as BUILT_IN
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import (
    contract_pb2,
    enrolment_pb2,
    knowledge_pb2,
    operations_pb2,
    service_pb2,
    service_pb2_grpc,
    tensor_pb2,
)
from fleetdistill_console.commands.methods import compare_methods
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.front.guard import Guard
from fleetdistill_server.methods.traffic import Sizes
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.security.revocation import revoke_device
from fleetdistill_server.security.roles import CALLS, Caller
from fleetdistill_server.service import run_changes
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

OTHER_RUN = "other"
TO_CANCEL = "unwanted"
TO_CREATE = run_config({"run": {"name": "created"}, "contract": {"classes": 10, "input_shape": [1, 8, 8]}})
DEVICE = "rightful"
SECRET = b"s" * 32
NEIGHBOUR = "neighbour"
FILES = (contract_pb2, enrolment_pb2, knowledge_pb2, operations_pb2, service_pb2, tensor_pb2)
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
STANDARD: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "List"  # the asyncio servicer of grpcio-health-checking has none
}
ALL = METHODS | STANDARD
_numbers = itertools.count()


@dataclass
class World:
    """A front, its store, and the credentials of everyone."""

    front: SecuredFront
    store: Store
    authority: Authority
    everyone: dict[str, Credentials]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("roles")
    authority = make_pki(folder / "pki")
    store = prepare_store(folder / "store")
    store.runs.begin(OTHER_RUN, {"made": "by hand"})
    store.runs.publish_contract(OTHER_RUN, make_contract(run=OTHER_RUN).SerializeToString())
    store.runs.begin(TO_CANCEL, {"made": "by hand"})
    for name in ("to-start", "to-pause", "to-resume"):
        section = TO_CREATE.run.model_copy(update={"name": name})
        run_changes.create(store, TO_CREATE.model_copy(update={"run": section}), start_it=name != "to-start")
    run_changes.change(store, "to-resume", RunStatus.PAUSED)
    profile = make_profile().SerializeToString()
    for run in (RUN, OTHER_RUN):
        for device in (DEVICE, NEIGHBOUR, "shut-out", "withdrawn"):
            store.devices.register(run, device, sha256(SECRET).digest(), profile)
    everyone = {
        "device": device_credentials(authority, DEVICE),
        "neighbour": device_credentials(authority, NEIGHBOUR),
        "of another run": device_credentials(authority, DEVICE, OTHER_RUN),
        "revoked device": device_credentials(authority, "shut-out"),
        "revoked certificate": device_credentials(authority, "withdrawn"),
        "operator": person_credentials(authority, Role.OPERATOR, "olga"),
        "viewer": person_credentials(authority, Role.VIEWER, "vera"),
        "revoked operator": person_credentials(authority, Role.OPERATOR, "otto"),
    }
    everyone["wrong CA"] = forged(everyone["device"], f"fleetdistill:device:{DEVICE}")
    everyone["forged operator"] = forged(everyone["operator"], "fleetdistill:operator:olga")
    store.credentials.revoke("device:shut-out", "lost")
    store.credentials.revoke("operator:otto", "left")
    store.credentials.revoke(f"serial:{serial_of(everyone['revoked certificate'])}", "copied")
    with secured_front(folder / "store", folder / "pki") as front:
        yield World(front, store, authority, everyone)
    store.close()


def call(channel: grpc.Channel, path: str, request: Any) -> Any:
    """Any method, with one message or the messages of a stream; the first answer of a stream."""
    method = ALL[path]
    answer_type = message_factory.GetMessageClass(method.output_type)
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    make = getattr(channel, kind)
    stub = make(
        path, request_serializer=lambda one: one.SerializeToString(), response_deserializer=answer_type.FromString
    )
    if method.client_streaming:
        request = iter(request if isinstance(request, list) else [request])
    answer = stub(request, timeout=CALL_SECONDS)
    if not method.server_streaming:
        return answer
    first = next(iter(answer))
    answer.cancel()
    return first


def identity_of(device: str, run: str = RUN) -> service_pb2.Identity:
    """With the right secret, so that nothing but the certificate can be wrong."""
    return service_pb2.Identity(run=run, device=device, secret=SECRET)


def asked(world: World, identity: service_pb2.Identity, payload: Payload | None = None) -> service_pb2.UploadName:
    """A fresh round in which a device was asked something."""
    number = world.store.runs.start_round(identity.run, [identity.device])
    write_asks(world.store, number, identity.device, payload=payload, run=identity.run)
    return upload_name(number)


def upload(world: World, identity: service_pb2.Identity) -> Any:
    """All messages of an upload."""
    payload = make_payload()
    return upload_messages(identity, asked(world, identity), payload, 64)


def upload_messages(
    identity: service_pb2.Identity, name: service_pb2.UploadName, payload: Payload, size: int
) -> list[service_pb2.UploadRequest]:
    header = service_pb2.UploadHeader(identity=identity, name=name, payload=payload.header(), samples=4)
    chunks = [service_pb2.UploadRequest(chunk=chunk) for chunk in in_pieces(payload, size)]
    return [service_pb2.UploadRequest(header=header), *chunks]


def download(world: World, identity: service_pb2.Identity) -> Any:
    payload = make_payload()
    asked(world, identity, payload)
    return service_pb2.DownloadRequest(identity=identity, sha256=payload.sha256)


def enrolment(world: World, identity: service_pb2.Identity) -> Any:
    token = read_token(make_token(world.store, world.front))
    key = device_x509.signing_request(device_x509.new_key())
    return enrolment_pb2.EnrolRequest(secret=token.secret, device=f"new-{next(_numbers)}", signing_request=key)


_service, _enrolment = "/fleetdistill.wire.v1.DeviceService", "/fleetdistill.wire.v1.EnrolmentService"
_operations = "/fleetdistill.wire.v1.OperationsService"
REQUESTS: dict[str, Callable[[World, service_pb2.Identity], Any]] = {
    f"{_service}/CheckIn": lambda world, one: service_pb2.CheckInRequest(identity=one, profile=make_profile()),
    f"{_service}/NextAsk": lambda world, one: service_pb2.NextAskRequest(identity=one, wait_seconds=0.0),
    f"{_service}/Heartbeat": lambda world, one: service_pb2.HeartbeatRequest(identity=one),
    f"{_service}/Leave": lambda world, one: service_pb2.LeaveRequest(identity=one),
    f"{_service}/Decline": lambda world, one: service_pb2.DeclineRequest(identity=one, round=1, step_number=1),
    f"{_service}/UploadStatus": lambda world, one: service_pb2.UploadStatusRequest(
        identity=one, name=asked(world, one)
    ),
    f"{_service}/Upload": upload,
    f"{_service}/Download": download,
    f"{_enrolment}/Enrol": enrolment,
    f"{_enrolment}/Renew": lambda world, one: enrolment_pb2.RenewRequest(
        signing_request=device_x509.signing_request(world.everyone["device"].key)
    ),
    f"{_operations}/Read": lambda world, one: operations_pb2.ReadRequest(view="run", run=RUN, most=1),
    f"{_operations}/WatchRun": lambda world, one: operations_pb2.WatchRunRequest(run=RUN),
    f"{_operations}/RevokeDevice": lambda world, one: operations_pb2.RevokeDeviceRequest(
        device="nobody-yet", confirmed=True
    ),
    f"{_operations}/CreateRun": lambda world, one: operations_pb2.CreateRunRequest(run_toml=as_toml(TO_CREATE)),
    f"{_operations}/ChangeRun": lambda world, one: operations_pb2.ChangeRunRequest(run=TO_CANCEL, status="cancelled"),
    f"{_operations}/ForgetDevice": lambda world, one: operations_pb2.ForgetDeviceRequest(run="nobody-made-it"),
    f"{_operations}/RollBackRun": lambda world, one: operations_pb2.RollBackRunRequest(run="nobody-made-it"),
    f"{_operations}/DeleteRun": lambda world, one: operations_pb2.DeleteRunRequest(run="nobody-made-it"),
    f"{_operations}/CreateTokens": lambda world, one: operations_pb2.CreateTokensRequest(count=1, expires_seconds=60),
    f"{_operations}/RevokePerson": lambda world, one: operations_pb2.RevokePersonRequest(
        role="viewer", name="nobody", confirmed=True
    ),
    f"{_operations}/ReadForOperators": lambda world, one: operations_pb2.ReadRequest(view="operators", most=1),
    f"{_operations}/ExportModel": lambda world, one: operations_pb2.ExportModelRequest(run="no-such-run"),
    f"{_operations}/BackUp": lambda world, one: operations_pb2.BackUpRequest(),
    "/grpc.health.v1.Health/Check": lambda world, one: health_pb2.HealthCheckRequest(),
    "/grpc.health.v1.Health/Watch": lambda world, one: health_pb2.HealthCheckRequest(),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": lambda world, one: (
        reflection_pb2.ServerReflectionRequest(list_services="")
    ),
}
"""How each method is asked so that its rightful caller is served."""
AUTHORISED = {
    f"{_operations}/ExportModel": "bad-message",
    f"{_operations}/RollBackRun": "unknown-run",
    f"{_operations}/ForgetDevice": "unknown-run",
    f"{_operations}/DeleteRun": "unknown-run",
}
"""What a rightful caller is told instead: an export takes a model and many seconds, see `test_copies`; and a rollback a
checkpoint, see `test_changes_from_elsewhere`."""


def documented() -> dict[str, set[str]]:
    """Who may call what, as docs/explanation/security.md says it."""
    page = (Path(__file__).parents[2] / "docs/explanation/security.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `/")]
    return {row[0].strip().strip("`"): {item.strip() for item in row[1].split(",")} for row in rows}


WHO = documented()
OF_DEVICES = [path for path in METHODS if "DeviceService/" in path]
HANDSHAKE = "UNAVAILABLE"


def test_the_page_the_table_and_the_protos_name_the_same_methods() -> None:
    assert WHO.keys() == CALLS.keys() == REQUESTS.keys() == ALL.keys()
    assert {path: {str(caller) for caller in access.callers} for path, access in CALLS.items()} == WHO


def verdict(world: World, credentials: Credentials | None, path: str, request: Any) -> str:
    """The code of our table that a call was refused with, the status of gRPC where there is none, or `served`."""
    channel = world.front.channel(credentials) if credentials else world.front.anonymous()
    with channel:
        return outcome(channel, path, request)


def outcome(channel: grpc.Channel, path: str, request: Any) -> str:
    try:
        call(channel, path, request)
    except grpc.RpcError as error:
        result = refusal_of(error)
        return result.reason or result.status.name
    return "served"


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("who", ["device", "operator", "viewer"])
def test_each_role_is_served_what_the_page_says_and_nothing_else(world: World, path: str, who: str) -> None:
    result = verdict(world, world.everyone[who], path, REQUESTS[path](world, identity_of(DEVICE)))
    assert result == (AUTHORISED.get(path, "served") if who in WHO[path] else "not-allowed")


@pytest.mark.parametrize("path", ALL)
def test_no_certificate_means_enrolment_only_and_on_its_port(world: World, path: str) -> None:
    request = REQUESTS[path](world, identity_of(DEVICE))
    assert verdict(world, None, path, request) == HANDSHAKE
    with world.front.anonymous(enrol=True) as channel:
        expected = "served" if str(Caller.ANONYMOUS) in WHO[path] else "not-allowed"
        assert outcome(channel, path, request) == expected


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("who", ["wrong CA", "forged operator"])
def test_a_certificate_of_another_ca_ends_the_handshake(world: World, path: str, who: str) -> None:
    request = REQUESTS[path](world, identity_of(DEVICE))
    assert verdict(world, world.everyone[who], path, request) == HANDSHAKE


@pytest.mark.parametrize("path", ALL)
def test_plain_text_is_not_spoken_where_tls_is(world: World, path: str) -> None:
    for port in (world.front.port, world.front.enrol_port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert outcome(channel, path, REQUESTS[path](world, identity_of(DEVICE))) == HANDSHAKE


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("who", ["revoked device", "revoked certificate", "revoked operator"])
def test_whoever_is_revoked_gets_nothing(world: World, path: str, who: str) -> None:
    device = {"revoked device": "shut-out", "revoked certificate": "withdrawn"}.get(who, DEVICE)
    result = verdict(world, world.everyone[who], path, REQUESTS[path](world, identity_of(device)))
    assert result == "revoked"


@pytest.mark.parametrize("text", ["x = " + "[" * 20_000, "x = " + "9" * 5000], ids=["nested", "digits"])
def test_a_run_toml_that_python_cannot_parse_is_refused(
    world: World, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = operations_pb2.CreateRunRequest(run_toml=text)
    with world.front.channel(world.everyone["operator"]) as channel, pytest.raises(grpc.RpcError) as error:
        call(channel, f"{_operations}/CreateRun", request)
    refusal = refusal_of(error.value)
    assert (refusal.reason, refusal.text.startswith("run.toml: ")) == ("bad-message", True)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("name", ["round", "before"])
def test_a_number_beyond_the_database_is_refused(world: World, name: str) -> None:
    request = operations_pb2.ReadRequest(view="round", run=RUN, most=1)
    setattr(request, name, 1 << 63)
    assert verdict(world, world.everyone["viewer"], f"{_operations}/Read", request) == "bad-message"


@pytest.mark.long
def test_certificate_expired_on_open_connection_allows_nothing(world: World) -> None:
    brief = device_credentials(world.authority, DEVICE, days=3 / 86_400)
    with world.front.channel(brief) as channel:
        heartbeat = f"{_service}/Heartbeat"
        assert outcome(channel, heartbeat, REQUESTS[heartbeat](world, identity_of(DEVICE))) == "served"
        wait_for_expiry(brief)
        requests = {path: make(world, identity_of(DEVICE)) for path, make in REQUESTS.items()}
        assert {path: outcome(channel, path, request) for path, request in requests.items()} == dict.fromkeys(
            ALL, "expired"
        )
    assert verdict(world, brief, heartbeat, REQUESTS[heartbeat](world, identity_of(DEVICE))) == HANDSHAKE


@pytest.mark.parametrize("path", OF_DEVICES)
def test_a_device_speaks_for_itself_only(world: World, path: str) -> None:
    request = REQUESTS[path](world, identity_of(DEVICE))
    assert verdict(world, world.everyone["neighbour"], path, request) == "not-allowed"


@pytest.mark.parametrize("path", OF_DEVICES)
def test_a_certificate_for_one_run_is_none_for_another(world: World, path: str) -> None:
    confined = world.everyone["of another run"]
    assert verdict(world, confined, path, REQUESTS[path](world, identity_of(DEVICE, RUN))) == "not-allowed"
    assert verdict(world, confined, path, REQUESTS[path](world, identity_of(DEVICE, OTHER_RUN))) == "served"


def test_a_device_cannot_have_another_ones_ask_by_its_own_name(world: World) -> None:
    """The certificate is right and so is the secret: what is asked for is somebody else's."""
    theirs = identity_of(NEIGHBOUR)
    payload = make_payload(3)
    name = asked(world, theirs, payload)
    own: dict[str, Any] = {"identity": identity_of(DEVICE)}
    requests = {
        "Download": service_pb2.DownloadRequest(**own, sha256=payload.sha256),
        "UploadStatus": service_pb2.UploadStatusRequest(**own, name=name),
        "Upload": upload_messages(identity_of(DEVICE), name, payload, 64),
    }
    result = {
        name: verdict(world, world.everyone["device"], f"{_service}/{name}", one) for name, one in requests.items()
    }
    assert result == {"Download": "not-found", "UploadStatus": "not-asked", "Upload": "not-asked"}
    decline = service_pb2.DeclineRequest(**own, round=name.round, step_number=1)
    assert verdict(world, world.everyone["device"], f"{_service}/Decline", decline) == "served"
    row = world.store.asks.get(RUN, name.round, 1, NEIGHBOUR)
    assert row is not None
    assert row.status == "open"


@pytest.mark.parametrize("path", ALL)
def test_a_refusal_says_in_words_what_was_refused_and_what_to_do(world: World, path: str) -> None:
    for who in ("device", "operator", "viewer"):
        if who in WHO[path]:
            continue
        with world.front.channel(world.everyone[who]) as channel, refused() as result:
            call(channel, path, REQUESTS[path](world, identity_of(DEVICE)))
        assert re.fullmatch(rf"{who} '[a-z-]+' may not [a-z' ]+; .* may.*", result[0].text)
        assert "fleetdistill.wire" not in result[0].text


def test_a_method_that_is_not_in_the_table_is_refused_to_all(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    guard = Guard(world.store.credentials, tls=False)
    heartbeat = f"{_service}/Heartbeat"
    assert guard.admit(heartbeat, None) is None
    monkeypatch.delitem(CALLS, heartbeat)
    with pytest.raises(RefusedError, match="a caller without TLS may not Heartbeat; nobody may"):
        guard.admit(heartbeat, None)


def test_nothing_of_a_request_is_read_before_its_caller_is_known(world: World) -> None:
    """Bytes that are no message are refused for their sender, not for what they are."""
    with world.front.channel(world.everyone["viewer"]) as channel:
        stub = channel.unary_unary(f"{_service}/CheckIn")
        with refused() as result:
            stub(b"\xff" * 100, timeout=CALL_SECONDS)
    assert result[0].reason == "not-allowed"


def test_revocation_holds_for_next_call_on_open_connection(world: World) -> None:
    world.store.devices.register(RUN, "soon-gone", sha256(SECRET).digest(), make_profile().SerializeToString())
    credentials = device_credentials(world.authority, "soon-gone")
    heartbeat = f"{_service}/Heartbeat"
    with world.front.channel(credentials) as channel:
        request = REQUESTS[heartbeat](world, identity_of("soon-gone"))
        assert outcome(channel, heartbeat, request) == "served"
        revoke_device(world.store, "soon-gone", "stolen")
        assert outcome(channel, heartbeat, request) == "revoked"


def test_a_revoked_devices_open_upload_ends_at_its_next_message(world: World) -> None:
    world.store.devices.register(RUN, "uploading", sha256(SECRET).digest(), make_profile().SerializeToString())
    identity = identity_of("uploading")
    name = asked(world, identity)
    pieces = upload_messages(identity, name, make_payload(2000), 8192)
    status = service_pb2.UploadStatusRequest(identity=identity, name=name)
    with world.front.channel(device_credentials(world.authority, "uploading")) as channel:
        stub = service_pb2_grpc.DeviceServiceStub(channel)

        def messages() -> Iterator[service_pb2.UploadRequest]:
            yield from pieces[:4]
            wait_until(lambda: stub.UploadStatus(status, timeout=CALL_SECONDS).next_byte > 0, "the first pieces")
            revoke_device(world.store, "uploading", "stolen")
            yield from pieces[4:]

        with refused() as result:
            stub.Upload(messages(), timeout=CALL_SECONDS)
    assert result[0].reason == "revoked"
    assert [row for row in world.store.asks.uploads(RUN) if row.device == "uploading"] == []


def test_a_revoked_devices_long_poll_brings_nothing(world: World) -> None:
    world.store.devices.register(RUN, "waiting", sha256(SECRET).digest(), make_profile().SerializeToString())
    request = service_pb2.NextAskRequest(identity=identity_of("waiting"), wait_seconds=2.0)
    with world.front.channel(device_credentials(world.authority, "waiting")) as channel:
        stub = service_pb2_grpc.DeviceServiceStub(channel)
        poll = stub.NextAsk.future(request, timeout=CALL_SECONDS)
        wait_until(lambda: world.store.devices.get(RUN, "waiting") is not None, "the device")
        revoke_device(world.store, "waiting", "stolen")
        with refused() as result:
            poll.result()
    assert result[0].reason == "revoked"


def test_open_download_of_revoked_device_ends_at_next_message(world: World) -> None:
    world.store.devices.register(RUN, "downloading", sha256(SECRET).digest(), make_profile().SerializeToString())
    identity, payload = identity_of("downloading"), make_payload(300_000)
    asked(world, identity, payload)
    request = service_pb2.DownloadRequest(identity=identity, sha256=payload.sha256)
    with world.front.channel(device_credentials(world.authority, "downloading")) as channel:
        messages = service_pb2_grpc.DeviceServiceStub(channel).Download(request, timeout=CALL_SECONDS)
        taken = [next(messages)]  # gRPC lets the server send a little ahead and then waits for the reader
        revoke_device(world.store, "downloading", "stolen")
        with refused() as result:
            taken.extend(messages)
    assert result[0].reason == "revoked"
    assert sum(len(item.chunk.data) for item in taken) < payload.data_bytes


def test_what_leaves_a_device_is_what_the_methods_say() -> None:
    """docs/explanation/privacy.md against the data behind `fleetdistill methods`."""
    page = (Path(__file__).parents[2] / "docs/explanation/privacy.md").read_text(encoding="utf-8")
    section = page.split("## What leaves a device, by method\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    said = {row[0]: (row[1], row[2]) for row in rows[1:]}
    known = [row for row in compare_methods(Sizes(), "float16").lists["methods"] if row["method"] in BUILT_IN]
    assert said == {row["method"]: (", ".join(row["columns"]), row["leaves_the_device"]) for row in known}
