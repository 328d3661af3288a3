"""The server's certificate authority (CA): a directory with all files that TLS needs.

    ca.pem        accepted CA certificates, newest first; two certificates during a CA rotation
    ca-key.pem    private key of the signing CA, mode 0600; required for enrolment and renewal
    server.pem    the server's key and certificate and, during a CA rotation, the link certificate from the old CA;
                  mode 0600
    served-store  path of the store that a server of this PKI has served last
    ROLE-NAME/    identity of a person: identity.pem (key and certificate, mode 0600) and ca.pem

Keys are ECDSA P-256. A certificate names its holder in a URI among its alternative names, `fleetdistill:ROLE:NAME`. A
device's certificate can restrict it to a run with `fleetdistill:run:NAME`. The server reads
roles and names only from certificates, and uses only the public key of a signing request.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetdistill.errors import ConfigurationError, in_words
from fleetdistill.link.credentials import AUTHORITIES, IDENTITY, write_private
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.state.durable import make_directory
from fleetdistill_server.security.certificates import URI_SCHEME, Issued, Role, check_hosts, fingerprint, general_name

__all__ = ["SERVER", "Authority", "make_authority"]

CA_KEY = "ca-key.pem"
SERVER = "server.pem"
CA_DAYS = 3650.0
SERVER_DAYS = 365.0
PERSON_DAYS = 365.0
_ALWAYS = ("localhost", "127.0.0.1")
# Devices' clocks differ, so certificates are backdated, by at most a tenth of their validity.
_BACKDATED_SECONDS = 300.0
_DAY_SECONDS = 86_400.0


class Authority:
    """The certificate authority in a directory.

    Raises:
        ConfigurationError: The directory contains no CA, or its files cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with _readable(directory):
            self.bundle = (directory / AUTHORITIES).read_bytes()
            self._key = _private_key((directory / CA_KEY).read_bytes())
            self._certificates = x509.load_pem_x509_certificates(self.bundle)
        own = [certificate for certificate in self._certificates if certificate.public_key() == self._key.public_key()]
        if not own:
            raise ConfigurationError(f"{directory}: {CA_KEY} is not the key of a certificate in {AUTHORITIES}")
        self._own = own[0]

    @property
    def der(self) -> bytes:
        """The signing CA's certificate in DER form, for enrolment tokens."""
        return self._own.public_bytes(serialization.Encoding.DER)

    @property
    def created_at(self) -> float:
        """When the signing CA was created, in seconds since 1970; tokens from before contain another one."""
        return self._own.not_valid_before_utc.timestamp() + _BACKDATED_SECONDS

    @property
    def is_rotating(self) -> bool:
        """Whether a CA rotation is in progress: certificates of an old CA are accepted too."""
        return len(self._certificates) > 1

    def sign_device(self, key: ec.EllipticCurvePublicKey, device: str, run: str, days: float) -> Issued:
        """Signs a device's certificate.

        Args:
            key: The device's public key.
            device: Id of the device.
            run: Run that the device is restricted to; empty for all runs.
            days: Validity of the certificate in days, above 0.
        """
        uris = [_uri(Role.DEVICE, device), *([_uri("run", run)] if run else [])]
        signed = self._sign(key, device, [x509.UniformResourceIdentifier(uri) for uri in uris], days)
        return Issued(
            pem=_pem(signed),
            serial=f"{signed.serial_number:x}",
            public_key=fingerprint(key),
            issued_at=signed.not_valid_before_utc.timestamp(),
            expires_at=signed.not_valid_after_utc.timestamp(),
        )

    def issue_person(self, role: Role, name: str, days: float, out: Path) -> None:
        """Creates the identity of an operator or viewer: a new key, its certificate, and the CA certificates.

        Raises:
            ConfigurationError: The name or the role is invalid, or the files cannot be written.
        """
        if role is Role.DEVICE:
            raise ConfigurationError(
                "--role is device; devices create their own keys: enrol them with `fleetdistill enrol`"
            )
        if not is_name(name):
            raise ConfigurationError(f"--name is {name!r}, must be {NAME_RULE}")
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(_uri(role, name))]
        signed = self._sign(key.public_key(), name, names, days)
        with _readable(out):
            make_directory(out)
            write_private(out / AUTHORITIES, self.bundle)
            write_private(out / IDENTITY, _key_pem(key) + _pem(signed))

    def issue_server(self, names: Sequence[str], days: float) -> None:
        """Creates a new key and certificate for the server, valid for these host names and addresses.

        Raises:
            ConfigurationError: A name is not a host name or address, or the file cannot be written.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        wanted = [general_name(name) for name in dict.fromkeys([*names, *_ALWAYS])]
        signed = self._sign(key.public_key(), "fleetdistill server", wanted, days, ExtendedKeyUsageOID.SERVER_AUTH)
        with _readable(self.directory):
            write_private(self.directory / SERVER, _key_pem(key) + _pem(signed) + self._link())

    def server_names(self) -> list[str]:
        """Returns the host names and addresses in the current server certificate."""
        with _readable(self.directory):
            present = x509.load_pem_x509_certificate((self.directory / SERVER).read_bytes())
            names = present.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return [
            *names.get_values_for_type(x509.DNSName),
            *(str(item) for item in names.get_values_for_type(x509.IPAddress)),
        ]

    def _link(self) -> bytes:
        """Returns the link certificate: this CA signed by the previous CA, for clients that trust only the latter."""
        path = self.directory / _link_name(self._own)
        return path.read_bytes() if path.exists() else b""

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        common_name: str,
        names: Sequence[x509.GeneralName],
        days: float,
        usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.CLIENT_AUTH,
    ) -> x509.Certificate:
        """Signs a certificate for one use; it expires no later than the CA."""
        issuer = self._own
        builder = _builder(common_name, issuer.subject, key, days, until=issuer.not_valid_after_utc)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def make_authority(directory: Path, days: float = CA_DAYS) -> Authority:
    """Creates a CA in a directory.

    Args:
        directory: Directory of the PKI; created if necessary.
        days: Validity of the CA's certificate in days.

    Raises:
        ConfigurationError: The directory already contains a CA, or the directory cannot be written.
    """
    if (directory / CA_KEY).exists() or (directory / AUTHORITIES).exists():
        raise ConfigurationError(
            f"{directory} already contains a CA; choose another directory, or use `fleetdistill pki rotate-ca`"
        )
    key, certificate = _new_ca(days)
    with _readable(directory):
        make_directory(directory)
        write_private(directory / CA_KEY, _key_pem(key))
        write_private(directory / AUTHORITIES, _pem(certificate))
    return Authority(directory)


def rotate_authority(directory: Path, days: float = CA_DAYS) -> Authority:
    """Starts a CA rotation: a new CA signs certificates, and the old one is still accepted.

    Devices receive the new CA with their next renewal. The server's certificate is signed again immediately and
    includes the link certificate for clients that trust only the old CA. `forget_old_authority` completes the rotation.

    Raises:
        ConfigurationError: There is no CA, a rotation is in progress, or the directory cannot be written.
    """
    old = Authority(directory)
    if old.is_rotating:
        raise ConfigurationError(
            f"{directory}: a CA rotation is in progress; complete it first with `fleetdistill pki forget-old-ca`"
        )
    key, certificate = _new_ca(days)
    link = _certify(certificate, old._key, old._own)
    names = old.server_names()
    check_hosts(names)  # before anything changes
    with _readable(directory):  # in this order, so that the old CA keeps signing after a crash
        write_private(directory / _link_name(certificate), _pem(link))
        write_private(directory / AUTHORITIES, _pem(certificate) + old.bundle)
        write_private(directory / CA_KEY, _key_pem(key))
    new = Authority(directory)
    new.issue_server(names, SERVER_DAYS)
    return new


def forget_old_authority(directory: Path) -> None:
    """Completes a CA rotation: only certificates signed by the current CA are accepted.

    Raises:
        ConfigurationError: No rotation is in progress, or the directory cannot be written.
    """
    authority = Authority(directory)
    if not authority.is_rotating:
        raise ConfigurationError(f"{directory} has only one CA; there is no old CA to remove")
    with _readable(directory):
        write_private(directory / AUTHORITIES, _pem(authority._own))
        (directory / _link_name(authority._own)).unlink(missing_ok=True)


def without(directory: Path, missing: str) -> str:
    """Returns that a PKI lacks a file, with what gets it again: `pki init` refuses a directory that has a CA."""
    if not any((directory / name).exists() for name in (CA_KEY, AUTHORITIES)):
        remedy = "restore your copy of this directory if devices have enrolled: a new CA shuts them out. Else create a "
        remedy += f"PKI with `fleetdistill pki init --pki {directory}`"
    elif missing == SERVER:
        remedy = f"issue it again with `fleetdistill pki renew-server --pki {directory} --names HOST`"
    else:
        remedy = "restore it from your copy of this directory; without one, create a PKI in another directory with "
        remedy += "`fleetdistill pki init`, set [server] pki, and enrol the devices again"
    return f"{directory} has no {missing}; {remedy}"


def _new_ca(days: float) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    # A unique name distinguishes the two CAs in one bundle.
    common_name = f"fleetdistill CA {fingerprint(key.public_key()).hex()[:8]}"
    return key, _ca_builder(common_name, None, key.public_key(), days).sign(key, hashes.SHA256())


def _certify(
    certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate
) -> x509.Certificate:
    """Signs another CA's certificate; the result expires no later than the issuer."""
    public_key = certificate.public_key()
    assert isinstance(public_key, ec.EllipticCurvePublicKey)
    (common_name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    builder = _ca_builder(str(common_name.value), issuer.subject, public_key, CA_DAYS, until=issuer.not_valid_after_utc)
    return builder.sign(key, hashes.SHA256())


def _ca_builder(
    common_name: str,
    issuer: x509.Name | None,
    key: ec.EllipticCurvePublicKey,
    days: float,
    until: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    builder = _builder(common_name, issuer, key, days, until)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # only signs certificates
    return builder.add_extension(usage, critical=True)


def _builder(
    common_name: str,
    issuer: x509.Name | None,
    key: ec.EllipticCurvePublicKey,
    days: float,
    until: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    life = days * _DAY_SECONDS
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(seconds=life)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(seconds=min(_BACKDATED_SECONDS, life / 10)))
        .not_valid_after(min(end, until) if until else end)
    )


def _link_name(certificate: x509.Certificate) -> str:
    return f"link-{certificate.serial_number:x}.pem"


def _uri(kind: str, name: str) -> str:
    return f"{URI_SCHEME}:{kind}:{name}"


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not ECDSA")
    return key


@contextlib.contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Converts file and format errors to ConfigurationError, without quoting contents, which can be keys."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigurationError(without(directory, os.path.basename(error.filename or ""))) from error
    except OSError as error:
        raise ConfigurationError(f"cannot use directory {directory}: {in_words(error)}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"a file in {directory} is damaged, or is not a key or certificate of this PKI; restore it from a backup"
        ) from error
