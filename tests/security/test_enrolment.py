"""From a token to a device that takes part: one-time, bound to a key and an id, pinned to the CA, and never lost."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.live_front import RUN, Refusal, prepare_store, refused, write_asks
from support.open_device import open_device
from support.secured import (
    CALL_SECONDS,
    SecuredFront,
    make_pki,
    make_token,
    secured_front,
    server_key,
)
from support.small_device import SmallWorker
from support.sqlite import tables_of
from support.wire_samples import make_contract
from typer.testing import CliRunner

from fleetdistill import COLUMNS, Device, Step
from fleetdistill.device.loop import REPLY_SECONDS
from fleetdistill.errors import ConfigurationError, LinkError, RefusedError, StateError
from fleetdistill.link import x509 as device_x509
from fleetdistill.link.credentials import Credentials, load_credentials
from fleetdistill.link.enrolment import Enrolment, read_token, write_token
from fleetdistill.testing import EventLog
from fleetdistill.wire.v1 import enrolment_pb2, enrolment_pb2_grpc, service_pb2, service_pb2_grpc
from fleetdistill_server.cli.app import app
from fleetdistill_server.security.certificates import Role, holder_of
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.security.revocation import revoke_device
from fleetdistill_server.security.tokens import create_tokens
from fleetdistill_server.store.store import Store


@dataclass
class Service:
    """A front with TLS and its store."""

    front: SecuredFront
    store: Store
    authority: Authority

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.front.port}"

    def token(self, **settings: Any) -> str:
        return make_token(self.store, self.front, **settings)

    def secret(self, **settings: Any) -> bytes:
        return read_token(self.token(**settings)).secret

    def refusal(self, secret: bytes, device: str, key: bytes) -> Refusal:
        with refused() as result:
            self.front.enrol(secret, device, key)
        return result[0]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("enrolment")
    authority = make_pki(folder / "pki")
    store = prepare_store(folder / "store")
    with secured_front(folder / "store", folder / "pki") as front:
        yield Service(front, store, authority)
    store.close()


def make_device(service: Service, state_dir: Path, **settings: Any) -> Device:
    given = {"server": service.address, "worker": SmallWorker, "allow": COLUMNS, "export": "never", **settings}
    return open_device(state_dir=state_dir, **given)


def ask(store: Store, device: str, run: str = RUN) -> None:
    write_asks(store, store.runs.start_round(run, [device]), device, run=run)


# --- the device of an app


@pytest.mark.parametrize(("port", "is_valid"), [(0, False), (1, True), (65_535, True), (65_536, False)])
def test_a_token_names_a_port_that_exists(port: int, is_valid: bool) -> None:
    token = write_token(enrolment_pb2.EnrolmentToken(secret=bytes(32), port=port, ca=b"ca"))
    with contextlib.nullcontext() if is_valid else pytest.raises(ConfigurationError, match="token is invalid"):
        assert read_token(token).port == port


def test_device_enrols_takes_part_and_returns_without_token(service: Service, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(service.token() + "\n")
    events = EventLog()
    with make_device(service, tmp_path / "state", device_id="app", enrolment=token, on_event=events.append) as device:
        assert device.step(0) is Step.WAITED
        ask(service.store, "app")
        assert device.step(5.0) is Step.ANSWERED
    token.unlink()
    with make_device(service, tmp_path / "state") as again:
        assert again.device_id == "app"
        assert again.step(0) is Step.WAITED
        ask(service.store, "app")
        assert again.step(5.0) is Step.ANSWERED
    assert events.kinds() == ["checked-in", "ask", "answered", "delivered"]
    assert len([row for row in service.store.asks.uploads(RUN) if row.device == "app"]) == 2


def test_key_is_made_on_device_and_only_its_owner_can_read_it(service: Service, tmp_path: Path) -> None:
    with make_device(service, tmp_path, device_id="private", enrolment=service.token()) as device:
        device.step(0)
    kept = load_credentials(tmp_path / "tls")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    assert modes == {"identity.pem": 0o600, "ca.pem": 0o600}
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    holder = holder_of(kept.chain)
    assert holder is not None
    assert (holder.role, holder.name, holder.run) == ("device", "private", "")
    (certificate,) = service.store.credentials.certificates("private")
    assert certificate.pem == kept.chain
    assert b"PRIVATE" not in certificate.pem


def test_a_device_that_has_a_key_never_speaks_plain_text(service: Service, tmp_path: Path) -> None:
    """Killed between making its key and having its certificate, it asks for a token and does nothing else."""
    real = read_token(service.token())
    nowhere = write_token(enrolment_pb2.EnrolmentToken(secret=real.secret, ca=real.ca, port=1))
    with make_device(service, tmp_path, device_id="half", enrolment=nowhere) as device, pytest.raises(LinkError):
        device.step(0)
    with pytest.raises(ConfigurationError, match=r"'half' has no valid certificate.*`fleetdistill enrol`"):
        make_device(service, tmp_path)


def test_an_enrolment_in_tick_waits_seconds_for_a_reply(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Hangs:
        def __init__(self, channel: grpc.Channel) -> None:
            del channel

        def Enrol(self, request: enrolment_pb2.EnrolRequest, timeout: float) -> None:
            waits.append(timeout)
            raise LinkError("no reply")

    monkeypatch.setattr(enrolment_pb2_grpc, "EnrolmentServiceStub", Hangs)
    with make_device(service, tmp_path, enrolment=service.token()) as device:
        assert device.tick() is Step.WAITED
    assert set(waits) == {REPLY_SECONDS}


def test_a_token_for_one_device_is_worth_nothing_to_another(service: Service, tmp_path: Path) -> None:
    made = create_tokens(service.store, service.authority, service.front.enrol_port, 1, 600, "", ["camera-7"])
    secret, key = read_token(made[0]).secret, device_x509.new_key()
    refusal = service.refusal(secret, "thief", device_x509.new_key())
    assert (refusal.reason, "not valid for device id 'thief'" in refusal.text) == ("bad-token", True)
    assert service.front.enrol(secret, "camera-7", key).certificate
    assert not service.store.credentials.has_device("thief")


def test_command_binds_tokens_to_devices_and_to_an_existing_run(service: Service, tmp_path: Path) -> None:
    service.authority.issue_person(Role.OPERATOR, "binder", 1.0, tmp_path / "binder")
    store = ["--store", str(service.front.store_dir), "--pki", str(service.front.pki)]
    server = ["--server", service.address, "--identity", str(tmp_path / "binder")]
    for where in (store, server):
        words = ["enrol", "--device", f"a-{len(where)}", "--device", f"b-{where[0]}", *where]
        tokens = CliRunner().invoke(app, words).stdout.split()
        assert [bound(service, token) for token in tokens] == [f"a-{len(where)}", f"b-{where[0]}"]
        done = CliRunner().invoke(app, ["enrol", "--run", "nowhere", *where])
        assert (done.exit_code, done.stdout) == (1, "")
        assert "there is no run 'nowhere'; runs in the store: " in done.stderr
        assert CliRunner().invoke(app, ["enrol", "--device", "a b", *where]).exit_code == 1


def bound(service: Service, token: str) -> str:
    kept = service.store.credentials.token(sha256(read_token(token).secret).digest())
    assert kept is not None
    return kept.for_device


def test_a_token_for_one_run_confines_its_device_to_it(service: Service, tmp_path: Path) -> None:
    service.store.runs.begin("other", {"made": "by hand"})
    service.store.runs.publish_contract("other", make_contract(run="other").SerializeToString())
    with make_device(service, tmp_path / "a", device_id="bound", enrolment=service.token(run="other")) as device:
        assert device.step(0) is Step.WAITED  # it names no run, and gets the one of its certificate
    assert service.store.devices.get("other", "bound") is not None
    with (
        make_device(
            service, tmp_path / "b", device_id="strays", run=RUN, enrolment=service.token(run="other")
        ) as strays,
        pytest.raises(RefusedError, match=r"the certificate is for run 'other'"),
    ):
        strays.step(0)


def test_a_revoked_device_is_told_so(service: Service, tmp_path: Path) -> None:
    with make_device(service, tmp_path, device_id="told", run=RUN, enrolment=service.token()) as device:
        device.step(0)
        revoke_device(service.store, "told", "stolen")
        with pytest.raises(RefusedError, match=r"'told' was revoked") as result:
            device.run()
    assert result.value.code == "revoked"
    (event,) = service.store.history.events(RUN, "revoked")
    assert "stolen" in event.text


# --- the token


def test_a_token_is_good_for_one_device(service: Service) -> None:
    secret, key = service.secret(), device_x509.new_key()
    service.front.enrol(secret, "first", key)
    assert service.refusal(secret, "second", device_x509.new_key()).reason == "bad-token"
    assert service.refusal(secret, "second", key).reason == "bad-token"
    assert service.refusal(secret, "first", device_x509.new_key()).reason == "bad-token"
    assert service.store.credentials.certificates("second") == []


def test_a_lost_answer_is_asked_for_again(service: Service) -> None:
    secret, key = service.secret(), device_x509.new_key()
    first = service.front.enrol(secret, "lossy", key)
    assert service.front.enrol(secret, "lossy", key) == first
    assert len(service.store.credentials.certificates("lossy")) == 1


def test_of_devices_that_use_one_token_at_once_one_is_enrolled(service: Service) -> None:
    secret, enrolled = service.secret(), []

    def attempt(name: str) -> None:
        try:
            service.front.enrol(secret, name, device_x509.new_key())
        except grpc.RpcError:
            return
        enrolled.append(name)

    threads = [threading.Thread(target=attempt, args=(f"racer-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(enrolled) == 1
    token = service.store.credentials.token(sha256(secret).digest())
    assert token is not None
    assert token.device == enrolled[0]


@pytest.mark.parametrize("spoil", ["unknown", "expired", "revoked", "empty"])
def test_a_token_that_is_not_live_is_refused(service: Service, spoil: str) -> None:
    secret = service.secret(seconds=0.05 if spoil == "expired" else 600)
    if spoil == "unknown":
        secret = os.urandom(32)
    if spoil == "empty":
        secret = b""
    if spoil == "expired":
        time.sleep(0.06)
    if spoil == "revoked":
        assert service.store.credentials.revoke_tokens(sha256(secret).hexdigest()[:16]) == 1
    refusal = service.refusal(secret, "late", device_x509.new_key())
    assert refusal.reason == "bad-token"
    assert "ask the operator for a new token" in refusal.text
    assert service.store.credentials.certificates("late") == []


def test_the_store_keeps_no_secret(service: Service) -> None:
    secret = service.secret()
    service.front.enrol(secret, "secretive", device_x509.new_key())
    tables_of(service.store).conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for path in service.front.store_dir.rglob("store.sqlite*"):
        assert secret not in path.read_bytes()


# --- the id


def test_an_id_belongs_to_the_first_key_that_enrolled_with_it(service: Service) -> None:
    key = device_x509.new_key()
    service.front.enrol(service.secret(), "owned", key)
    thief = service.secret()
    refusal = service.refusal(thief, "owned", device_x509.new_key())
    assert (refusal.reason, "is enrolled with another key" in refusal.text) == ("bad-identity", True)
    service.front.enrol(thief, "thief", device_x509.new_key())  # the refused attempt has not used the token up
    service.front.enrol(service.secret(), "owned", key)  # its owner may, for instance after its certificate expired


def test_a_revoked_id_cannot_come_back(service: Service) -> None:
    key = device_x509.new_key()
    service.front.enrol(service.secret(), "banned", key)
    revoke_device(service.store, "banned", "stolen")
    assert service.refusal(service.secret(), "banned", key).reason == "revoked"
    revoke_device(service.store, "never-seen", "on a list")
    assert service.refusal(service.secret(), "never-seen", device_x509.new_key()).reason == "revoked"


@pytest.mark.parametrize("name", ["", "a" * 65, "../../etc/passwd", "a/b", "x:operator:eve", "\u00e4", "a b", "a\n"])
def test_hostile_ids_are_refused_and_make_no_file(service: Service, name: str) -> None:
    # The server's own files come and go beside the call (the database's, a lock, the heartbeat); their names are fixed.
    own = {"gc.lock", "front.beat"}
    before = set(service.front.store_dir.parent.rglob("*"))
    assert service.refusal(service.secret(), name, device_x509.new_key()).reason == "bad-identity"
    new = {path.name for path in set(service.front.store_dir.parent.rglob("*")) - before}
    assert not {file for file in new if not file.startswith("store.sqlite") and file not in own}


def test_of_a_signing_request_only_the_key_counts(service: Service) -> None:
    """It asks to be an operator, and for another name; the certificate says who the token makes it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    from fleetdistill.wire.v1 import enrolment_pb2_grpc

    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.UniformResourceIdentifier("fleetdistill:operator:eve"), x509.DNSName("localhost")]
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "eve")])
    )
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    request = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    with service.front.anonymous(enrol=True) as channel:
        answer = enrolment_pb2_grpc.EnrolmentServiceStub(channel).Enrol(
            enrolment_pb2.EnrolRequest(secret=service.secret(), device="modest", signing_request=request),
            timeout=CALL_SECONDS,
        )
    given = x509.load_pem_x509_certificate(answer.certificate)
    alternative = given.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(alternative) == [x509.UniformResourceIdentifier("fleetdistill:device:modest")]
    assert not given.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert given.subject.rfc4514_string() == "CN=modest"


@pytest.mark.parametrize(
    "request_", [b"", b"\x30\x00", bytes(range(64)), b"x" * 5000], ids=["empty", "sequence", "garbage", "long"]
)
def test_invalid_signing_request_is_refused_and_token_stays(service: Service, request_: bytes) -> None:
    from fleetdistill.wire.v1 import enrolment_pb2_grpc

    secret = service.secret()
    with service.front.anonymous(enrol=True) as channel, refused() as result:
        enrolment_pb2_grpc.EnrolmentServiceStub(channel).Enrol(
            enrolment_pb2.EnrolRequest(secret=secret, device="broken", signing_request=request_), timeout=CALL_SECONDS
        )
    assert result[0].reason == "bad-message"
    service.front.enrol(secret, f"mended-{len(request_)}", device_x509.new_key())


# --- the server, as a device sees it


def test_a_token_is_worth_nothing_to_a_server_of_another_ca(service: Service, tmp_path: Path) -> None:
    """Somebody on the way pretends to be the server: the device tells it nothing, the token least of all."""
    make_pki(tmp_path / "pki")
    real = read_token(service.token())
    with secured_front(tmp_path / "store", tmp_path / "pki") as pretender:
        fake = enrolment_pb2.EnrolmentToken(secret=real.secret, ca=real.ca, port=pretender.enrol_port)
        state = tmp_path / "state"
        state.mkdir()
        enrolment = Enrolment(f"127.0.0.1:{pretender.port}", state, "careful", write_token(fake))
        with pytest.raises(LinkError, match=r"certificate is not from a trusted CA"):
            enrolment.current()
    token = service.store.credentials.token(sha256(real.secret).digest())
    assert token is not None
    assert token.device is None


@pytest.mark.parametrize("text", ["", "fd1-", "fd1-AAAA", "fd1-!!!", "token", "fd1-AAAA or fd1-BBBB"])
def test_what_is_no_token_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="the enrolment token is invalid") as result:
        read_token(path)
    assert "AAAA" not in str(result.value)
    assert result.value.__cause__ is None


def test_a_file_of_several_tokens_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("fd1-AAAA\nfd1-BBBB\n")
    with pytest.raises(
        ConfigurationError, match="these are 2 enrolment tokens, one for each device; pass one of"
    ) as result:
        read_token(tmp_path / "tokens")
    assert "AAAA" not in str(result.value)


def test_enrolment_port_as_server_is_refused_and_spends_no_token(service: Service, tmp_path: Path) -> None:
    token = service.token()
    wrong = f"127.0.0.1:{read_token(token).port}"
    with pytest.raises(ConfigurationError, match=f"server is '{wrong}', which is the enrolment port; pass the port of"):
        make_device(service, tmp_path / "d", server=wrong, enrolment=token)
    assert not (tmp_path / "d").exists()
    assert service.front.enrol(read_token(token).secret, "spared", device_x509.new_key())


def test_the_enrolment_port_names_itself(service: Service) -> None:
    with (
        grpc.secure_channel(
            f"127.0.0.1:{service.front.enrol_port}", grpc.ssl_channel_credentials(service.authority.bundle)
        ) as channel,
        refused() as result,
    ):
        check_in = channel.unary_unary("/fleetdistill.wire.v1.DeviceService/CheckIn")
        check_in(b"", timeout=CALL_SECONDS)
    assert "this is the enrolment port; use the port of [server] listen" in result[0].text


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"neither a token, .* nor a file with one: .*nowhere: No such file"):
        read_token(tmp_path / "nowhere")


def test_damaged_keys_are_a_sentence(service: Service, tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "identity.pem").write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    with pytest.raises(StateError, match=r"identity.pem is damaged: its key cannot be read"):
        make_device(service, tmp_path, enrolment=service.token())


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("ca.pem", b"MII", b"AAA", "the trusted CA certificates cannot be read"),
        ("ca.pem", b"BEGIN", b"", "the trusted CA certificates cannot be read"),
        ("identity.pem", b"CERTIFICATE-----\nMII", b"CERTIFICATE-----\nAAA", "its certificate cannot be read"),
    ],
)
def test_damaged_certificates_stop_the_device_and_stay(
    service: Service, tmp_path: Path, name: str, old: bytes, new: bytes, text: str
) -> None:
    with make_device(service, tmp_path, run=RUN, enrolment=service.token()) as device:
        device.step(0)
    path = tmp_path / "tls" / name
    damaged = path.read_bytes().replace(old, new)
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(StateError, match=text):
        make_device(service, tmp_path, run=RUN)
    assert path.read_bytes() == damaged


# --- nothing of this in a log


@pytest.mark.slow
def test_no_log_shows_a_secret_a_token_or_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All that front and SDK say at the level DEBUG while a device enrols, takes part, is refused and revoked."""
    authority, store, log = make_pki(tmp_path / "pki"), prepare_store(tmp_path / "store"), tmp_path / "front.log"
    caplog.set_level("DEBUG")
    with secured_front(tmp_path / "store", tmp_path / "pki", log=log) as front:
        service = Service(front, store, authority)
        token, used = service.token(), service.token()
        with make_device(service, tmp_path / "state", device_id="quiet", enrolment=token) as device:
            device.step(0)
            ask(store, "quiet")
            device.step(0)
            secret = device._parts.identity.secret
        service.refusal(read_token(token).secret, "other", device_x509.new_key())
        service.refusal(read_token(used).secret, "quiet", device_x509.new_key())
        kept = load_credentials(tmp_path / "state" / "tls")
        with front.channel(kept) as channel, refused():
            wrong = service_pb2.Identity(run=RUN, device="other", secret=secret)
            service_pb2_grpc.DeviceServiceStub(channel).Heartbeat(
                service_pb2.HeartbeatRequest(identity=wrong), timeout=CALL_SECONDS
            )
        revoke_device(store, "quiet", "test")
        with make_device(service, tmp_path / "state") as device, pytest.raises(RefusedError):
            device.step(0)
    store.close()
    said = log.read_text() + caplog.text
    assert "quiet" in said
    assert_silent(said, [token, used], [secret, read_token(token).secret, read_token(used).secret], kept, front)


def assert_silent(said: str, tokens: list[str], secrets: list[bytes], kept: Credentials, front: SecuredFront) -> None:
    assert "PRIVATE KEY" not in said
    for token in tokens:
        assert token[:40] not in said
    for secret in secrets:
        assert secret.hex() not in said
        assert repr(secret)[2:-1] not in said
    keys = [kept.key, server_key(front.pki), (front.pki / "ca-key.pem").read_bytes()]
    for key in keys:
        assert key.splitlines()[1].decode() not in said
    assert kept.key.decode() not in repr(kept)
