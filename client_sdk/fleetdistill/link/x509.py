"""The X.509 functions of a device, based on the `cryptography` package (extra `tls`)."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["UnsupportedAlgorithm", "check_fits", "life", "new_key", "signing_request"]


def new_key() -> bytes:
    """Returns a new ECDSA P-256 key in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def signing_request(key: bytes) -> bytes:
    """Returns a PKCS #10 request in DER, with the public key only. Raises ValueError for an invalid key."""
    private = serialization.load_pem_private_key(key, None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(private, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def check_fits(key: bytes, chain: bytes, authorities: bytes) -> None:
    """Raises ValueError unless a PEM chain begins with the key's certificate, which one of `authorities` has signed."""
    first, *_ = x509.load_pem_x509_certificates(chain)
    private = serialization.load_pem_private_key(key, None)
    if first.public_key() != private.public_key():
        raise ValueError("the certificate does not match the private key")
    try:
        trusted = x509.load_pem_x509_certificates(authorities)
    except ValueError as error:
        raise ValueError(f"the trusted CA certificates cannot be read ({error})") from error
    if not any(_is_signed_by(first, authority) for authority in trusted):
        raise ValueError("the certificate is from none of the trusted CAs")
    life(chain)


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def life(chain: bytes) -> tuple[float, float]:
    """Returns the validity of the first certificate in a PEM: start and end in Unix seconds. Raises ValueError."""
    certificate = x509.load_pem_x509_certificate(chain)
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
