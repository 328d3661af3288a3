"""A front with TLS over a PKI that was made on the fly, and channels of everyone who may or may not speak to it."""

from __future__ import annotations

import contextlib
import datetime
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.live_front import write_server_config
from support.processes import PATIENCE_SECONDS

from fleetdistill.link import x509 as device_x509
from fleetdistill.link.credentials import AUTHORITIES, DEVICE_FOLDER, IDENTITY, Credentials, load_credentials, split
from fleetdistill.wire.v1 import enrolment_pb2, enrolment_pb2_grpc
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.security.certificates import Role, read_request
from fleetdistill_server.security.pki import SERVER, Authority, make_authority
from fleetdistill_server.security.tokens import create_tokens
from fleetdistill_server.service.processes import front_environment
from fleetdistill_server.store.store import Store

CALL_SECONDS = PATIENCE_SECONDS
DEVICE_DAYS = 30.0


def make_pki(directory: Path) -> Authority:
    """A CA with a server certificate for the loopback."""
    authority = make_authority(directory)
    authority.issue_server([], 30.0)
    return authority


def device_credentials(authority: Authority, device: str, run: str = "", days: float = DEVICE_DAYS) -> Credentials:
    """What a device has after enrolment, without the calls."""
    key = device_x509.new_key()
    public_key = read_request(device_x509.signing_request(key))
    return Credentials(key, authority.sign_device(public_key, device, run, days).pem, authority.bundle)


def person_credentials(authority: Authority, role: Role, name: str, days: float = 1.0) -> Credentials:
    """What `fleetdistill pki issue` gives to a person."""
    folder = authority.directory / f"{role}-{name}"
    authority.issue_person(role, name, days, folder)
    return load_credentials(folder)


def save_credentials(state_dir: Path, credentials: Credentials) -> None:
    """What enrolment leaves in a device's state directory."""
    folder = state_dir / DEVICE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / IDENTITY).write_bytes(credentials.key + credentials.chain)
    (folder / AUTHORITIES).write_bytes(credentials.authorities)


def forged(credentials: Credentials, uri: str) -> Credentials:
    """The same CA in name only: signed by a stranger's key, for whom the stranger likes."""
    key = ec.generate_private_key(ec.SECP256R1())
    genuine = x509.load_pem_x509_certificate(credentials.chain)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(genuine.subject).issuer_name(genuine.issuer)
    builder = builder.public_key(key.public_key()).serial_number(genuine.serial_number)
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    certificate = builder.add_extension(names, critical=False).sign(
        ec.generate_private_key(ec.SECP256R1()), hashes.SHA256()
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Credentials(private, certificate.public_bytes(pem), credentials.authorities)


@dataclass
class SecuredFront:
    """A front process with TLS, on the same ports through restarts."""

    store_dir: Path
    pki: Path
    certificate_days: float = DEVICE_DAYS
    lease_seconds: float = 60.0
    limits: Limits = Limits()  # noqa: RUF009  (it is frozen)
    log: Path | None = None
    data_directories: Sequence[str] = (".",)
    port: int = 0
    enrol_port: int = 0
    process: subprocess.Popen[str] = field(init=False)

    def start(self) -> None:
        """Starts the process and waits until it listens."""
        server = ServerSection(
            listen=f"127.0.0.1:{self.port}",
            lease_seconds=self.lease_seconds,
            pki=str(self.pki),
            enrol_listen=f"127.0.0.1:{self.enrol_port}",
            certificate_days=self.certificate_days,
            data_directories=list(self.data_directories),
        )
        config = write_server_config(self.store_dir, ServerConfig(server=server, limits=self.limits))
        log_level = "DEBUG" if self.log else "INFO"
        command = [sys.executable, "-m", "fleetdistill_server.front", str(config), "--log-level", log_level]
        errors = self.log.open("ab") if self.log else None
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=front_environment()
        )
        if errors:
            errors.close()
        assert self.process.stdout is not None
        words = dict(self.process.stdout.readline().split() for _ in range(2))
        self.port, self.enrol_port = int(words["listening"]), int(words["enrolling"])

    def stop(self) -> None:
        """Ends the process."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def channel(self, credentials: Credentials) -> grpc.Channel:
        """A channel with a certificate, to the port of the devices."""
        return grpc.secure_channel(f"127.0.0.1:{self.port}", credentials.channel())

    def anonymous(self, enrol: bool = False) -> grpc.Channel:
        """A channel that trusts the CA and shows no certificate."""
        port = self.enrol_port if enrol else self.port
        return grpc.secure_channel(
            f"127.0.0.1:{port}", grpc.ssl_channel_credentials((self.pki / "ca.pem").read_bytes())
        )

    def enrol(self, secret: bytes, device: str, key: bytes) -> enrolment_pb2.EnrolResponse:
        """The raw call."""
        request = device_x509.signing_request(key)
        with self.anonymous(enrol=True) as channel:
            answer: enrolment_pb2.EnrolResponse = enrolment_pb2_grpc.EnrolmentServiceStub(channel).Enrol(
                enrolment_pb2.EnrolRequest(secret=secret, device=device, signing_request=request), timeout=CALL_SECONDS
            )
        return answer


@contextlib.contextmanager
def secured_front(store_dir: Path, pki: Path, **settings: Any) -> Iterator[SecuredFront]:
    """Runs a front with TLS until the end of the block."""
    front = SecuredFront(store_dir, pki, **settings)
    front.start()
    try:
        yield front
    finally:
        front.stop()


def make_token(store: Store, front: SecuredFront, seconds: float = 600.0, run: str = "") -> str:
    """One enrolment token."""
    return create_tokens(store, Authority(front.pki), front.enrol_port, 1, seconds, run)[0]


def server_fingerprint(front: SecuredFront) -> bytes:
    """SHA-256 of the certificate that the server shows now."""
    import ssl

    return sha256(ssl.get_server_certificate(("127.0.0.1", front.enrol_port)).encode()).digest()


def serial_of(credentials: Credentials) -> str:
    """Serial number of a certificate in hex."""
    return f"{x509.load_pem_x509_certificate(credentials.chain).serial_number:x}"


def wait_for_expiry(credentials: Credentials) -> None:
    """Returns once a certificate has expired."""
    _, ends = device_x509.life(credentials.chain)
    while time.time() <= ends:
        time.sleep(0.05)


def server_key(pki: Path) -> bytes:
    """The server's private key, PEM."""
    return split((pki / SERVER).read_bytes())[0]
