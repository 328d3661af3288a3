"""Metadata and a SHA-256 at the end of a deployed ONNX file.

An ONNX file is a protobuf message, so metadata entries can be appended to it without the package `onnx`. The last entry
is the digest of all bytes before it. It detects a file that is incomplete or damaged, which onnxruntime may load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from fleetdistill.errors import ModelError
from fleetdistill.wire.protobuf_fields import field

_DIGEST = "sha256"
_METADATA_PROPS = 14  # ModelProto.metadata_props, a message
_KEY, _VALUE = 1, 2  # StringStringEntryProto, strings


def stamp(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """Returns an ONNX file with further metadata, and the digest of its content as the last entry."""
    content = data + b"".join(_entry(key, value) for key, value in metadata.items())
    return content + _entry(_DIGEST, hashlib.sha256(content).hexdigest())


def check_stamp(data: bytes) -> None:
    """Raises ModelError unless the file ends with the digest of its content."""
    size = len(_entry(_DIGEST, "0" * 64))
    if data[-size:] != _entry(_DIGEST, hashlib.sha256(data[:-size]).hexdigest()):
        raise ModelError("the file is incomplete or damaged: it does not end with the SHA-256 of its content")


def _entry(key: str, value: str) -> bytes:
    fields = b"".join(field(number, text.encode()) for number, text in ((_KEY, key), (_VALUE, value)))
    return field(_METADATA_PROPS, fields)
