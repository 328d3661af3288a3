"""The last accepted check-in of a device: what it described, the version of its data, and the contract of its run.

With the profile an idle device does not need its model and data; with the contract it predicts without the server.

profile.bin, contract.bin    "\\0crc", the CRC-32C of the rest (4 bytes, little-endian), and the message
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TypeVar

import google_crc32c
from google.protobuf.message import DecodeError, Message

from fleetdistill.state.files import Files
from fleetdistill.state.format import damaged_error
from fleetdistill.wire.v1 import contract_pb2

__all__ = ["data_version", "save_profile"]

PROFILE, CONTRACT = "profile.bin", "contract.bin"
_MARK = b"\0crc"
_EARLIER = b"\n"  # the first byte of a profile of formats 1 and 2, which had no checksum
M = TypeVar("M", bound=Message)


def save_profile(files: Files, profile: contract_pb2.DeviceProfile) -> None:
    """Saves an accepted profile durably."""
    files.save(PROFILE, _pack(profile))


def load_profile(files: Files) -> contract_pb2.DeviceProfile | None:
    """Returns the last accepted profile, or None if there is none. Raises DamagedStateError for a damaged file."""
    return _load(files, PROFILE, contract_pb2.DeviceProfile)


def save_contract(files: Files, contract: contract_pb2.Contract) -> None:
    """Saves the contract of the device's run durably."""
    files.save(CONTRACT, _pack(contract))


def load_contract(files: Files) -> contract_pb2.Contract | None:
    """Returns the contract of the device's run, or None if there is none. Raises DamagedStateError for damage."""
    return _load(files, CONTRACT, contract_pb2.Contract)


def _pack(message: Message) -> bytes:
    data = message.SerializeToString()
    return bytes(_MARK + google_crc32c.value(data).to_bytes(4, "little") + data)


def _load(files: Files, name: str, kind: type[M]) -> M | None:
    data = files.load(name)
    if data is None:
        return None
    path, content = files.directory / name, data
    if not data.startswith(_EARLIER):
        content = data[8:]
        if data[:8] != _MARK + google_crc32c.value(content).to_bytes(4, "little"):
            raise damaged_error(path, "it does not match its checksum")
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise damaged_error(path, error) from error


# --- Versions of a device's training data, which reveal only changes to the server. Does not load torch.

_VERSION_BYTES = 16


def data_version(key: bytes, digest: bytes) -> bytes:
    """Returns the data version sent to the server: 16 bytes of an HMAC-SHA-256 of the digest.

    Without the key, the server cannot test a guess of the data, nor see that two devices have equal data.

    Args:
        key: Key of the device, which never leaves it; not the secret, which the server receives.
        digest: SHA-256 of the data, which never leaves the device.
    """
    return hmac.new(key, digest, hashlib.sha256).digest()[:_VERSION_BYTES]
