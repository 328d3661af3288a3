"""Certificates of a run's CA that vouch for the devices' Ed25519 keys in a secure sum.

The key of a device's certificate, with which the device authenticates itself in TLS, signs its Ed25519 key. Whoever has
the CA's key can invent devices, so this protects against everybody else. Only the server knows which certificates are
revoked.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from fleetdistill.errors import WireError
from fleetdistill.secure.primitives import tag

__all__ = ["certify", "check_certified"]

BINDING_BYTES = 64
MAX_CERTIFICATE_BYTES = 2048
CLOCK_TOLERANCE = timedelta(days=1)
"""Time by which the clocks of devices may differ, so that certificates are valid for so much longer, on both sides."""
_DEVICE_URI, _RUN_URI = "fleetdistill:device:", "fleetdistill:run:"
_INVALID = (
    *(ValueError, TypeError, UnsupportedAlgorithm),
    *(x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType),
)
_HALF = BINDING_BYTES // 2


def certify(key: bytes, chain: bytes, public_key: bytes) -> bytes:
    """Returns the endorsement of a device's Ed25519 key by its certificate: binding ‖ certificate.

    The binding is the signature of the public key, 64 bytes: r ‖ s of ECDSA with P-256 and SHA-256, each 32 bytes,
    big-endian (IEEE P1363). The certificate is in DER, at most 2,048 bytes.

    Args:
        key: The certificate's private key, PEM.
        chain: The certificate and possibly others, PEM.
        public_key: The Ed25519 key, 32 bytes.

    Raises:
        WireError: The key is not ECDSA P-256, the certificate is too large, or one of them cannot be read.
    """
    try:
        private = serialization.load_pem_private_key(key, None)
        certificate = x509.load_pem_x509_certificate(chain).public_bytes(serialization.Encoding.DER)
    except _INVALID as error:
        raise WireError("this device's own certificate cannot be read") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or not isinstance(private.curve, ec.SECP256R1):
        raise WireError("the key of this device's own certificate is not ECDSA P-256")
    _check_size(certificate)
    r, s = decode_dss_signature(private.sign(_message(public_key), ec.ECDSA(SHA256())))
    return r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big") + certificate


def check_certified(
    authorities: bytes, run: str, device_id: str, public_key: bytes, endorsement: bytes, now: float
) -> None:
    """Checks that a device's certificate vouches for its Ed25519 key.

    Args:
        authorities: Certificates of the trusted CAs, PEM.
        run: Name of the run.
        device_id: Id of the device.
        public_key: The device's Ed25519 key, 32 bytes.
        endorsement: As `certify` returns it.
        now: Unix time in seconds. Devices' clocks may be wrong by a day.

    Raises:
        WireError: It does not; the text says why, with "it" for the certificate.
    """
    binding, der = endorsement[:BINDING_BYTES], endorsement[BINDING_BYTES:]
    _check_size(der)
    try:
        certificate = x509.load_der_x509_certificate(der)
        issued = any(_has_issued(authority, certificate) for authority in x509.load_pem_x509_certificates(authorities))
        key, uris = certificate.public_key(), _uris(certificate)
    except _INVALID as error:
        raise WireError("it cannot be read") from error
    if not der.endswith(b"\0" + certificate.signature):  # a bit string with unused bits is another form of the same
        raise WireError("its signature is not in whole bytes")
    if not issued:
        raise WireError("it is not from a CA that this device trusts")
    if [uri for uri in uris if uri.startswith(_DEVICE_URI)] != [_DEVICE_URI + device_id]:
        raise WireError(f"it is of {', '.join(uris) or 'nobody'}")
    if any(uri.startswith(_RUN_URI) and uri != _RUN_URI + run for uri in uris):
        raise WireError(f"it is for another run: {', '.join(uris)}")
    time = datetime.fromtimestamp(now, UTC)
    if time < certificate.not_valid_before_utc - CLOCK_TOLERANCE:
        raise WireError(f"it is valid from {certificate.not_valid_before_utc:%Y-%m-%d} on, by this device's clock")
    if time > certificate.not_valid_after_utc + CLOCK_TOLERANCE:
        raise WireError(f"it was valid until {certificate.not_valid_after_utc:%Y-%m-%d}, by this device's clock")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise WireError("its key is not ECDSA P-256")
    signature = encode_dss_signature(int.from_bytes(binding[:_HALF], "big"), int.from_bytes(binding[_HALF:], "big"))
    try:
        key.verify(signature, _message(public_key), ec.ECDSA(SHA256()))
    except InvalidSignature:
        raise WireError("its key has not signed the device's key of this sum") from None


def _message(public_key: bytes) -> bytes:
    return tag("identity") + public_key


def _check_size(certificate: bytes) -> None:
    if len(certificate) > MAX_CERTIFICATE_BYTES:
        raise WireError(f"it has {len(certificate)} bytes, at most {MAX_CERTIFICATE_BYTES} are allowed")


def _has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, *_INVALID):
        return False
    return True


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)
