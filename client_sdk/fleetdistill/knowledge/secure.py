"""The kind of part of a secure sum; `fleetdistill.secure` has the arithmetic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.kind import Array, Kind, PartData, PartSchema, declared_shapes
from fleetdistill.wire.schema import ROWS, UINT8, Shapes, Tensors, TensorSchema
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

__all__ = ["BOX_BYTES", "KEYS_BYTES", "MAX_KEYS_BYTES", "SHARE_BYTES", "SIGNATURE_BYTES", "SIGNED_KEYS_BYTES"]

KEYS_BYTES = 100
"""Size of a device's keys."""
SIGNED_KEYS_BYTES = 260
"""Size of a device's keys with its Ed25519 key, signature and an endorsement of 64 bytes."""
MAX_KEYS_BYTES = SIGNED_KEYS_BYTES + 2048
"""Largest size of the same with a certificate at the end, whose size differs by device."""
BOX_BYTES = 80
SHARE_BYTES = 32
SIGNATURE_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class SecureEntry:
    """What the server says of one device of a secure sum; see `SecureEntry` in `knowledge.proto`.

    Attributes:
        index: Index of the device in the sum.
        device: Id of the device; empty in the last step.
        keys: 100 or 196 bytes; empty in the last step.
        endorsement: 64 bytes with signed keys, and a certificate of at most 2,048 bytes if certificates vouch for them;
            else empty.
        signature: 64 bytes in the last step with signed keys, else empty.
    """

    index: int
    device: str = ""
    keys: bytes = b""
    endorsement: bytes = b""
    signature: bytes = b""


@dataclass(frozen=True, kw_only=True)
class SecureMessage(Kind):
    """One message of a secure sum; which fields it has depends on its step.

    A part of a device's answer has one tensor, with the part's name.

    Attributes:
        parameters: The sum's parameters, 44 bytes.
        nonce: Public random bytes, 32.
        entries: The devices of the sum; in a ring, in the second step, the receiver and its neighbours.
        roster: Digest of the entries of all devices, 32 bytes.
        devices: Number of devices of the sum, in the second step.
        members: Bitmap of the devices of this step.
        keys: `[100]` or `[260]` uint8; `[261 to 2308]` with a certificate.
        boxes: `[k, 80]` uint8.
        numbers: `[numbers * width]` uint8.
        signature: `[64]` uint8.
        shares: `[k, 32]` uint8.
        gradient: `[(C (D + 1) + 2) * width]` uint8.
    """

    wire_name = "secure_message"
    possible_columns = ("class_statistics", "counts", "gradients")
    description = "class sums under a mask"

    parameters: bytes = b""
    nonce: bytes = b""
    entries: list[SecureEntry] = field(default_factory=list)
    roster: bytes = b""
    devices: int = 0
    members: bytes = b""
    keys: Array | None = None
    boxes: Array | None = None
    numbers: Array | None = None
    signature: Array | None = None
    shares: Array | None = None
    gradient: Array | None = None

    def columns(self) -> tuple[str, ...]:
        """See `Kind.columns`."""
        return _columns("numbers" if self.gradient is None else "gradient")

    @classmethod
    def schema(
        cls, name: str, shape: tuple[int, ...], *, most: int = 0, features: Shapes = MappingProxyType({})
    ) -> PartSchema:
        """Returns the schema of a part of a device's answer.

        Args:
            name: Name of the part and of its tensor.
            shape: Shape of the tensor; of `boxes` and `shares` for a number of devices, of `keys` for some certificate.
            most: Largest size of the first axis, if it differs by device or sum.
            features: Feature column that the numbers are computed from, if the run's models have it.
        """
        return PartSchema(
            kind=cls,
            tensors={name: TensorSchema((UINT8,), shape)},
            columns=_columns(name),
            features=features,
            declared={name: (most, *shape[1:]) if most else shape},
        )

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`: one tensor with the part's name."""
        present = {item.name for item, _ in part.secure_message.ListFields()}
        if present != {part.name}:
            text = f"part {part.name!r} has {', '.join(sorted(present)) or 'no field'}, expected only {part.name}"
            raise RefusedError(Code.BAD_MESSAGE, text)
        shape = declared_shapes(part, contract).get(part.name)
        if shape is None:
            raise RefusedError(Code.BAD_MESSAGE, f"part {part.name!r} is not one of the run's secure sums")
        return {part.name: TensorSchema((UINT8,), (ROWS, *shape[1:]) if _varies(part.name, shape) else shape)}

    @classmethod
    def check_data(
        cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, data: PartData, samples: int | None
    ) -> None:
        """See `Kind.check_data`: bounds the sizes that the contract does not fix, and checks every share."""
        shape = declared_shapes(part, contract)[part.name]
        if not _varies(part.name, shape):
            return
        rows = data.array(part.name)
        if len(rows) > shape[0]:
            text = f"part {part.name!r} has {len(rows)} rows, in a sum of this run there are at most {shape[0]}"
            raise RefusedError(Code.BAD_TENSOR, text)
        if part.name == "keys" and len(rows) <= SIGNED_KEYS_BYTES:
            text = f"part 'keys' has {len(rows)} bytes, with a certificate there are more than {SIGNED_KEYS_BYTES}"
            raise RefusedError(Code.BAD_TENSOR, text)
        if part.name == "shares" and (wrong := _outside_field(rows)).any():
            text = f"part {part.name!r}, row {int(wrong.argmax())}: a share must be a number below 2^255 - 19"
            raise RefusedError(Code.BAD_VALUE, text)


def _columns(name: str) -> tuple[str, ...]:
    """Returns the columns in a part, by its name."""
    return ("gradients",) if name == "gradient" else ("class_statistics", "counts")


def _varies(name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether a declared shape is the largest: of a row for each device, or of keys with a certificate."""
    return len(shape) > 1 or (name == "keys" and shape[0] > SIGNED_KEYS_BYTES)


def _outside_field(shares: Array) -> Array:
    """Returns for each share `[k, 32]` whether it is no number below 2^255 - 19; `[k]` bool."""
    words = np.ascontiguousarray(shares).view("<u8")  # [k, 4]
    ones = np.uint64(2**64 - 1)
    full = (words[:, 1] == ones) & (words[:, 2] == ones) & (words[:, 3] == np.uint64(2**63 - 1))
    return np.asarray((words[:, 3] >> np.uint64(63) == 1) | (full & (words[:, 0] >= np.uint64(2**64 - 19))))
