"""Versions of a device's training data, which reveal only changes to the server. Does not load torch."""

from __future__ import annotations

import hashlib
import hmac
import sys
from typing import Any

import numpy as np

_VERSION_BYTES = 16


def data_version(secret: bytes, digest: bytes) -> bytes:
    """Returns the data version sent to the server: 16 bytes of an HMAC-SHA-256 of the digest.

    The key prevents a server from testing guesses of the data.

    Args:
        secret: Secret of the device, so that two devices with equal data have different versions.
        digest: SHA-256 of the data, which never leaves the device.
    """
    return hmac.new(secret, digest, hashlib.sha256).digest()[:_VERSION_BYTES]


def digest_of(inputs: np.ndarray, labels: np.ndarray) -> bytes:
    """Returns the SHA-256 of two arrays with their types and shapes."""
    total = hashlib.sha256()
    for array in (inputs, labels):
        total.update(f"{array.dtype.str} {array.shape};".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.digest()


def digest_of_data(data: Any) -> bytes | None:
    """Returns the SHA-256 of an app's `(inputs, labels)`; None if `data` is not a pair of arrays or tensors.

    Does not call functions or read Datasets, which may load torch and delay each start of an idle device.
    """
    if not isinstance(data, tuple) or len(data) != 2:
        return None
    inputs, labels = (_as_array(one) for one in data)
    return None if inputs is None or labels is None else digest_of(inputs, labels)


def _as_array(given: Any) -> np.ndarray | None:
    torch = sys.modules.get("torch")  # an app that passes a tensor has loaded torch
    if torch is not None and isinstance(given, torch.Tensor) and given.layout == torch.strided:
        on_cpu = given.detach().cpu()
        given = (on_cpu.float() if on_cpu.dtype == torch.bfloat16 else on_cpu).numpy()
    return given if isinstance(given, np.ndarray) and not given.dtype.hasobject else None
