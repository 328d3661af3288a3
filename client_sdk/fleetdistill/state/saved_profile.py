"""The last accepted check-in of a device, so that an idle device does not need its model and data.

profile.bin    "\\0crc", the CRC-32C of the rest (4 bytes, little-endian), and the profile
"""

from __future__ import annotations

import google_crc32c
from google.protobuf.message import DecodeError

from fleetdistill.state.files import Files
from fleetdistill.state.format import damaged_error
from fleetdistill.wire.v1 import contract_pb2

PROFILE = "profile.bin"
_MARK = b"\0crc"
_EARLIER = b"\n"  # the first byte of a profile of formats 1 and 2, which had no checksum


def save_profile(files: Files, profile: contract_pb2.DeviceProfile) -> None:
    """Saves an accepted profile durably."""
    data = profile.SerializeToString()
    files.save(PROFILE, _MARK + google_crc32c.value(data).to_bytes(4, "little") + data)


def load_profile(files: Files) -> contract_pb2.DeviceProfile | None:
    """Returns the last accepted profile, or None if there is none. Raises DamagedStateError for a damaged file."""
    data = files.load(PROFILE)
    if data is None:
        return None
    path, content = files.directory / PROFILE, data
    if not data.startswith(_EARLIER):
        content = data[8:]
        if data[:8] != _MARK + google_crc32c.value(content).to_bytes(4, "little"):
            raise damaged_error(path, "it does not match its checksum")
    try:
        return contract_pb2.DeviceProfile.FromString(content)
    except DecodeError as error:
        raise damaged_error(path, error) from error
