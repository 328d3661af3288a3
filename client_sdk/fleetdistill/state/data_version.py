"""Versions of a device's training data, which reveal only changes to the server. Does not load torch."""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["data_version"]

_VERSION_BYTES = 16


def data_version(key: bytes, digest: bytes) -> bytes:
    """Returns the data version sent to the server: 16 bytes of an HMAC-SHA-256 of the digest.

    Without the key, the server cannot test a guess of the data, nor see that two devices have equal data.

    Args:
        key: Key of the device, which never leaves it; not the secret, which the server receives.
        digest: SHA-256 of the data, which never leaves the device.
    """
    return hmac.new(key, digest, hashlib.sha256).digest()[:_VERSION_BYTES]
