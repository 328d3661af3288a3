"""The primitives of secure sums: HKDF, X25519, Ed25519, ChaCha20, shares, and numbers modulo 2^(8 width).

Numbers are uint64 arrays; on the wire each has `width` bytes, 4 to 8, little-endian.

References:
    RFC 5869 (HKDF), RFC 7748 (X25519), RFC 8032 (Ed25519), RFC 8439 (ChaCha20 and Poly1305).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetdistill.errors import ConfigurationError, WireError

__all__ = ["Numbers", "from_bytes", "lift", "reduce", "threshold", "to_bytes", "verification_key", "wrap"]

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise ConfigurationError("secure sums need the package cryptography: pip install 'fleetdistill[tls]'") from error


Numbers = NDArray[np.uint64]
"""Numbers modulo 2^(8 width)."""
_PREFIX = b"fleetdistill/secagg/1/"
_NO_NONCE = bytes(12)  # every key seals one box
_START = bytes(16)  # counter and nonce 0: every key makes one stream


def tag(name: str) -> bytes:
    """Returns the bytes that keep one use of a hash, key or signature apart from all others."""
    return _PREFIX + name.encode() + b"\0"


def sha256(*parts: bytes) -> bytes:
    """Returns the SHA-256 of the joined parts, 32 bytes."""
    return hashlib.sha256(b"".join(parts)).digest()


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """Returns `length` bytes of HKDF-SHA256."""
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(secret)


def stream(key: bytes, length: int) -> bytes:
    """Returns the first bytes of the ChaCha20 stream of a 32-byte key, with counter and nonce 0."""
    return Cipher(algorithms.ChaCha20(key, _START), mode=None).encryptor().update(bytes(length))


# --- keys, boxes and signatures


def public_key(secret: bytes) -> bytes:
    """Returns the X25519 public key of 32 secret bytes."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, public: bytes) -> bytes:
    """Returns what X25519 makes of a secret and another's public key, 32 bytes.

    Raises:
        WireError: The public key is none, or leaves nothing secret (a point of small order).
    """
    try:
        return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise WireError("a public key of another device is not one of X25519") from error


def seal(key: bytes, content: bytes, associated: bytes) -> bytes:
    """Returns content in a box of ChaCha20-Poly1305, 16 bytes longer. A key may seal one box only."""
    return ChaCha20Poly1305(key).encrypt(_NO_NONCE, content, associated)


def unseal(key: bytes, box: bytes, associated: bytes) -> bytes:
    """Returns a box's content. Raises WireError unless key and associated data are those that it was sealed with."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NO_NONCE, box, associated)
    except InvalidTag as error:
        raise WireError("a box does not open") from error


def verification_key(identity: bytes) -> bytes:
    """Returns the Ed25519 public key of an identity, 32 secret bytes."""
    return Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()


def sign(identity: bytes, message: bytes) -> bytes:
    """Returns the Ed25519 signature of a message by an identity, 64 bytes."""
    return Ed25519PrivateKey.from_private_bytes(identity).sign(message)


def verify_signature(public: bytes, message: bytes, signature: bytes) -> bool:
    """Returns whether the Ed25519 signature of a message is that of a public key. Never raises."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


# --- numbers


def mask(key: bytes, count: int, width: int) -> Numbers:
    """Returns `count` numbers of the stream of a key."""
    return from_bytes(stream(key, count * width), width)


def from_bytes(data: bytes, width: int) -> Numbers:
    """Returns the numbers of `width` bytes each. Raises WireError if the length is not a multiple of the width."""
    if len(data) % width:
        raise WireError(f"numbers of {width} bytes take a multiple of {width} bytes, got {len(data)}")
    wide = np.zeros((len(data) // width, 8), dtype=np.uint8)
    wide[:, :width] = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
    return wide.view("<u8")[:, 0].astype(np.uint64)


def to_bytes(numbers: Numbers, width: int) -> bytes:
    """Returns numbers with `width` bytes each."""
    wide = np.ascontiguousarray(numbers, dtype="<u8").view(np.uint8).reshape(-1, 8)
    return wide[:, :width].tobytes()


def reduce(numbers: Numbers, width: int) -> Numbers:
    """Returns numbers modulo 2^(8 width); uint64 arithmetic reduces modulo 2^64."""
    return numbers & np.uint64(2 ** (8 * width) - 1)


def wrap(values: NDArray[np.int64], width: int) -> Numbers:
    """Returns signed integers modulo 2^(8 width)."""
    return reduce(np.ascontiguousarray(values, dtype=np.int64).view(np.uint64), width)


def lift(numbers: Numbers, width: int) -> NDArray[np.int64]:
    """Returns the signed integers in [-2^(8 width - 1), 2^(8 width - 1)) of numbers modulo 2^(8 width)."""
    unused = 64 - 8 * width
    return (numbers << np.uint64(unused)).view(np.int64) >> np.int64(unused)


# --- Shamir's shares of a secret over the integers modulo 2^255 - 19.
#
# A secret is 31 bytes, read as a little-endian integer; a share is a value of a polynomial whose constant term is the
# secret. Python's integers do not compute in constant time: nobody else can time them here.

PRIME = 2**255 - 19
SHARE_BYTES = 32
SECRET_BYTES = 31
_COEFFICIENT_BYTES = 64  # twice the field's length, so that reduction leaves no bias


def threshold(holders: int) -> int:
    """Returns how many of the holders must answer, floor(2 holders / 3) + 1."""
    return 2 * holders // 3 + 1


def coefficients(key: bytes, threshold: int) -> list[int]:
    """Returns the `threshold - 1` coefficients above the constant term, from a key of 32 bytes."""
    data = stream(key, _COEFFICIENT_BYTES * (threshold - 1))
    starts = range(0, len(data), _COEFFICIENT_BYTES)
    return [int.from_bytes(data[start : start + _COEFFICIENT_BYTES], "little") % PRIME for start in starts]


def share(secret: int, coefficients: Sequence[int], point: int) -> int:
    """Returns the polynomial's value at a point, the holder's index plus 1."""
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * point + coefficient) % PRIME
    return (total * point + secret) % PRIME


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """Returns each share's Lagrange weight for the constant term, modulo PRIME; the points are distinct and not 0."""
    product = 1
    for point in points:
        product = product * point % PRIME
    weights = []
    for point in points:
        below = point
        for other in points:
            if other != point:
                below = below * (other - point) % PRIME
        weights.append(product * pow(below, -1, PRIME) % PRIME)
    return weights


def reconstruct(weights: Sequence[int], shares: Sequence[int]) -> int:
    """Returns the constant term, of shares in the order of `weights_at_zero`."""
    return sum(weight * value for weight, value in zip(weights, shares, strict=True)) % PRIME
