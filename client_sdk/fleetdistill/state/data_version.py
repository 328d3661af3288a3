"""Names a device's rows, so that a server learns when they have changed and nothing else of them. Loads no torch."""

from __future__ import annotations

import hashlib
import hmac
import sys
from typing import Any

import numpy as np

_VERSION_BYTES = 16


def data_version(secret: bytes, digest: bytes) -> bytes:
    """What the server knows the rows of a digest by. Keyed, so that nobody can try out which rows they are.

    Args:
        secret: The device's own, so two devices with the same rows have two versions.
        digest: Of the rows; it stays on the device.
    """
    return hmac.new(secret, digest, hashlib.sha256).digest()[:_VERSION_BYTES]


def digest_of(inputs: np.ndarray, labels: np.ndarray) -> bytes:
    """SHA-256 over two arrays with their types and shapes."""
    total = hashlib.sha256()
    for array in (inputs, labels):
        total.update(f"{array.dtype.str} {array.shape};".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.digest()


def digest_of_given(data: Any) -> bytes | None:
    """The same of what an app has given as its data; None where that is no pair of arrays or tensors.

    A function or a Dataset is not called: that may need torch, and time, at every start of an idle device.
    """
    if not isinstance(data, tuple) or len(data) != 2:
        return None
    inputs, labels = (_as_array(one) for one in data)
    return None if inputs is None or labels is None else digest_of(inputs, labels)


def _as_array(given: Any) -> np.ndarray | None:
    torch = sys.modules.get("torch")  # who gives a tensor has loaded it
    if torch is not None and isinstance(given, torch.Tensor) and given.layout == torch.strided:
        here = given.detach().cpu()
        given = (here.float() if here.dtype == torch.bfloat16 else here).numpy()
    return given if isinstance(given, np.ndarray) and not given.dtype.hasobject else None
