"""Certificates that vouch for keys of a secure sum: what binds, and every reason to refuse one."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, utils
from hypothesis import given
from hypothesis import strategies as st
from support.secured import device_credentials, forged, make_pki, person_credentials

from fleetdistill.errors import WireError
from fleetdistill.link.credentials import Credentials
from fleetdistill.secure.certificate import certify, check_certified
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.security.pki import CA_KEY, Authority, make_authority, rotate_authority

KEY = bytes(range(32))
NOW = datetime.datetime(2026, 6, 15, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
MESSAGE = b"fleetdistill/secagg/1/identity\x00" + KEY


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ca") / "pki")


def issued(
    authority: Authority,
    key: Any,
    uris: Sequence[str] = ("fleetdistill:device:cam",),
    life: tuple[datetime.datetime, datetime.datetime] = (NOW - DAY, NOW + DAY),
) -> bytes:
    """A certificate of the CA as nobody asks it for one, in DER."""
    signing = serialization.load_pem_private_key((authority.directory / CA_KEY).read_bytes(), None)
    issuer = x509.load_der_x509_certificate(authority.der).subject
    builder = x509.CertificateBuilder().subject_name(issuer).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(7).not_valid_before(life[0]).not_valid_after(life[1])
    names = [x509.UniformResourceIdentifier(uri) for uri in uris]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signing, hashes.SHA256()).public_bytes(serialization.Encoding.DER)  # type: ignore[arg-type]


def bound(key: ec.EllipticCurvePrivateKey, certificate: bytes, message: bytes = MESSAGE) -> bytes:
    """The binding as the specification has it, written out: r and s in 32 bytes each, then the certificate."""
    r, s = utils.decode_dss_signature(key.sign(message, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big") + certificate


def check(authority: Authority, endorsement: bytes, device: str = "cam", now: datetime.datetime = NOW) -> None:
    check_certified(authority.bundle, "sums", device, KEY, endorsement, now.timestamp())


def now_of(credentials: Credentials) -> datetime.datetime:
    return x509.load_pem_x509_certificate(credentials.chain).not_valid_before_utc + DAY / 2


def test_a_binding_has_the_form_of_the_specification(authority: Authority) -> None:
    own = device_credentials(authority, "cam")
    endorsement, certificate = certify(own.key, own.chain, KEY), x509.load_pem_x509_certificate(own.chain)
    assert endorsement[64:] == certificate.public_bytes(serialization.Encoding.DER)
    r, s = (int.from_bytes(half, "big") for half in (endorsement[:32], endorsement[32:64]))
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    key.verify(utils.encode_dss_signature(r, s), MESSAGE, ec.ECDSA(hashes.SHA256()))
    check(authority, endorsement, now=now_of(own))
    other = ec.generate_private_key(ec.SECP256R1())
    check(authority, bound(other, issued(authority, other)))


def refusals() -> dict[str, tuple[Callable[[Authority, ec.EllipticCurvePrivateKey], bytes], str]]:
    """How an endorsement can be wrong: what makes it, and what the refusal says."""

    def of(*uris: str) -> Callable[[Authority, ec.EllipticCurvePrivateKey], bytes]:
        return lambda ca, key: bound(key, issued(ca, key, uris))

    def in_time(start: int, end: int) -> Callable[[Authority, ec.EllipticCurvePrivateKey], bytes]:
        return lambda ca, key: bound(key, issued(ca, key, life=(NOW + start * DAY, NOW + end * DAY)))

    def with_key(own: Any) -> Callable[[Authority, ec.EllipticCurvePrivateKey], bytes]:
        return lambda ca, key: bound(key, issued(ca, own))

    not_p256, not_signed = "its key is not ECDSA P-256", "its key has not signed the device's key of this sum"
    unreadable = "it cannot be read"
    return {
        "another name": (of("fleetdistill:device:cam2"), "it is of fleetdistill:device:cam2"),
        "a name that begins alike": (of("fleetdistill:device:ca"), "it is of fleetdistill:device:ca"),
        "an operator": (of("fleetdistill:operator:cam"), "it is of fleetdistill:operator:cam"),
        "nobody": (of(), "it is of nobody"),
        "two devices": (of("fleetdistill:device:cam", "fleetdistill:device:x"), "it is of fleetdistill:device:cam, "),
        "another run": (
            of("fleetdistill:device:cam", "fleetdistill:run:other"),
            "it is for another run: fleetdistill:",
        ),
        "expired": (in_time(-5, -2), "it was valid until 2026-06-13, by this device's clock"),
        "not valid yet": (in_time(2, 5), "it is valid from 2026-06-17 on, by this device's clock"),
        "P-384": (with_key(ec.generate_private_key(ec.SECP384R1())), not_p256),
        "RSA": (with_key(rsa.generate_private_key(65537, 2048)), not_p256),
        "Ed25519": (with_key(ed25519.Ed25519PrivateKey.generate()), not_p256),
        "another key of the certificate": (with_key(ec.generate_private_key(ec.SECP256R1())), not_signed),
        "another Ed25519 key": (lambda ca, key: bound(key, issued(ca, key), MESSAGE[:-1] + b"x"), not_signed),
        "without the tag": (lambda ca, key: bound(key, issued(ca, key), KEY), not_signed),
        "zeros": (lambda ca, key: bytes(64) + issued(ca, key), not_signed),
        "no certificate": (lambda ca, key: bound(key, b""), unreadable),
        "a cut certificate": (lambda ca, key: bound(key, issued(ca, key)[:-1]), unreadable),
        "bytes after it": (lambda ca, key: bound(key, issued(ca, key) + b"\0"), unreadable),
        "nothing": (lambda ca, key: b"", unreadable),
        "too long": (lambda ca, key: bound(key, bytes(2049)), "it has 2049 bytes, at most 2048 are allowed"),
    }


@pytest.mark.parametrize("case", list(refusals()))
def test_every_fault_has_its_sentence(authority: Authority, case: str) -> None:
    make, says = refusals()[case]
    with pytest.raises(WireError) as refused:
        check(authority, make(authority, ec.generate_private_key(ec.SECP256R1())))
    assert str(refused.value).startswith(says)


def test_a_certificate_of_another_ca_is_refused(authority: Authority, tmp_path: Path) -> None:
    genuine = device_credentials(authority, "cam")
    for stranger in (
        device_credentials(make_authority(tmp_path / "other"), "cam"),
        forged(genuine, "fleetdistill:device:cam"),
    ):
        with pytest.raises(WireError, match="it is not from a CA that this device trusts"):
            check(authority, certify(stranger.key, stranger.chain, KEY), now=now_of(genuine))


def test_operators_and_servers_are_no_devices(tmp_path: Path) -> None:
    authority = make_pki(tmp_path / "pki")
    operator = person_credentials(authority, Role.OPERATOR, "cam")
    with pytest.raises(WireError, match="it is of fleetdistill:operator:cam"):
        check(authority, certify(operator.key, operator.chain, KEY), now=now_of(operator))


@pytest.mark.parametrize(("hours", "valid"), [(-47, True), (-49, False), (47, True), (49, False)])
def test_clocks_may_be_wrong_by_a_day(authority: Authority, hours: int, valid: bool) -> None:
    """The certificate is valid for a day before and after NOW."""
    key = ec.generate_private_key(ec.SECP256R1())
    endorsement, now = bound(key, issued(authority, key)), NOW + datetime.timedelta(hours=hours)
    if valid:
        check(authority, endorsement, now=now)
    else:
        with pytest.raises(WireError, match="by this device's clock"):
            check(authority, endorsement, now=now)


def test_both_cas_of_a_rotation_are_trusted(tmp_path: Path) -> None:
    old = make_pki(tmp_path / "pki")
    before = device_credentials(old, "cam")
    new = rotate_authority(tmp_path / "pki")
    after = device_credentials(new, "cam")
    for own in (before, after):
        check(new, certify(own.key, own.chain, KEY), now=now_of(own))
    with pytest.raises(WireError, match="not from a CA"):
        check(old, certify(after.key, after.chain, KEY), now=now_of(after))


def test_the_longest_names_fit(authority: Authority) -> None:
    own = device_credentials(authority, "d" * 64, "r" * 64)
    endorsement = certify(own.key, own.chain, KEY)
    assert len(endorsement) < 64 + 1024
    check_certified(authority.bundle, "r" * 64, "d" * 64, KEY, endorsement, now_of(own).timestamp())


@given(place=st.integers(0, 600), bit=st.integers(0, 7))
def test_one_changed_bit_is_refused(authority: Authority, place: int, bit: int) -> None:
    own = device_credentials(authority, "cam")
    endorsement = bytearray(certify(own.key, own.chain, KEY))
    endorsement[place % len(endorsement)] ^= 1 << bit
    with pytest.raises(WireError):
        check(authority, bytes(endorsement), now=now_of(own))


def test_a_signature_with_unused_bits_is_refused(authority: Authority) -> None:
    """The library ignores them; the same certificate would have two forms."""
    endorsement = b"1"
    while endorsement[-1] & 1:  # a signature that ends with a bit of 0, as every other one
        own = device_credentials(authority, "cam")
        endorsement = certify(own.key, own.chain, KEY)
    signature = x509.load_der_x509_certificate(endorsement[64:]).signature
    changed = bytearray(endorsement)
    changed[-len(signature) - 1] = 1
    check(authority, endorsement, now=now_of(own))
    with pytest.raises(WireError, match="its signature is not in whole bytes"):
        check(authority, bytes(changed), now=now_of(own))


@given(garbage=st.binary(max_size=2200))
def test_no_bytes_raise_anything_else(authority: Authority, garbage: bytes) -> None:
    with pytest.raises(WireError):
        check(authority, garbage)
    with pytest.raises(WireError):
        check_certified(garbage, "sums", "cam", KEY, bytes(64) + authority.der, NOW.timestamp())


def test_an_own_certificate_that_cannot_be_used_is_an_error(authority: Authority) -> None:
    own = device_credentials(authority, "cam")
    with pytest.raises(WireError, match="this device's own certificate cannot be read"):
        certify(own.key, b"no certificate", KEY)
    form = serialization.PrivateFormat.PKCS8
    other = ec.generate_private_key(ec.SECP384R1())
    pem = other.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with pytest.raises(WireError, match="own certificate is not ECDSA P-256"):
        certify(pem, own.chain, KEY)
