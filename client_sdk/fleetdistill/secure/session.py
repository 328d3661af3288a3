"""A session of a secure sum: parameters, id, devices, who is whose neighbour, messages to sign, and masks.

Integers are little-endian and unsigned. A device's index is its place in the bytewise order of the devices' ids.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.secure.primitives import Numbers, agree, hkdf, mask, sha256, tag, threshold

__all__ = ["LIMITED", "PRIVATE", "Masks", "Parameters"]

PRIVATE = 1
"""Each device adds its part of the noise."""
LIMITED = 2
"""No noise; each device limits the rank of its second moment before it is summed."""
_MODES = {0: "full", PRIVATE: "private", LIMITED: "limited"}
_BLOCK = struct.Struct("<BBBBHHBBBBIIIHHdd")
_VERSION = 1
_MIN_DEVICES = 3
_MAX_EPSILON = 100.0
_MIN_DEGREE = 10
_BARE_ENTRY, _SIGNED_ENTRY = 100, 196
MAX_LOG2_LEAKED = -40
"""Largest log2 of the probability that a ring lets the corrupt devices learn a secret, or falls apart."""
MAX_LOG2_NO_SUM = -20
"""Largest log2 of the probability that a ring loses a sum: it costs a round only."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What all devices of a session agree on; part of the session id, and so of every key and signature.

    Attributes:
        mode: PRIVATE or LIMITED.
        width: Bytes of a number, in [4, 8].
        keys: Who vouches for a device's public key: 0 the server, 1 a certificate of the run's CA, 2 a list signed by a
            key of the app.
        classes: C, in [1, 65535].
        dimensions: D, numbers of a row, in [1, 65535].
        grid_bits: g, in [1, 20]: a row's numbers are multiples of 2^-g.
        clip_bits: A row's numbers are at most 2^clip_bits, in [0, 16]; 0 in private sessions, whose rows have length 1.
        count_bits: A count is a multiple of 2^-count_bits, in [0, 20]; 0 without noise.
        row_bits: log2 of the largest number of rows of all devices, in [1, 40].
        least: Devices without which there is no sum, at least 3.
        honest: Devices whose noise the guarantee counts on, in [1, least]; 0 without noise.
        most: Largest number of devices, in [least, 65535].
        degree: Neighbours of a device, even and below `most`; 0 if every device is every other's.
        epsilon: Of the guarantee, in (0, 100]; 0 without noise.
        delta: Of the guarantee, in (0, 1); 0 without noise.

    Raises:
        ConfigurationError: A value is out of range.
    """

    mode: int
    width: int
    keys: int
    classes: int
    dimensions: int
    grid_bits: int
    clip_bits: int
    count_bits: int
    row_bits: int
    least: int
    honest: int
    most: int
    degree: int
    epsilon: float = 0.0
    delta: float = 0.0

    def __post_init__(self) -> None:
        ranges = {
            "mode": (0, LIMITED),
            "width": (4, 8),
            "keys": (0, 2),
            "classes": (1, 0xFFFF),
            "dimensions": (1, 0xFFFF),
            "grid_bits": (1, 20),
            "clip_bits": (0, 0 if self.mode == PRIVATE else 16),
            "count_bits": (0, 20 if self.mode == PRIVATE else 0),
            "row_bits": (1, 40),
            "least": (_MIN_DEVICES, 0xFFFF),
            "honest": (1, self.least) if self.mode == PRIVATE else (0, 0),
            "most": (self.least, 0xFFFF),
            "degree": (0, max(0, self.most - 1)),
        }
        for name, (lowest, highest) in ranges.items():
            if not lowest <= getattr(self, name) <= highest:
                raise ConfigurationError(
                    f"{name} of a {_MODES.get(self.mode, 'secure')} sum must be in [{lowest}, {highest}], got "
                    f"{getattr(self, name)!r}"
                )
        if self.degree % 2:
            raise ConfigurationError(f"degree must be even, for as many neighbours on each side, got {self.degree}")
        if self.mode == PRIVATE and not (0 < self.epsilon <= _MAX_EPSILON and 0 < self.delta < 1):
            raise ConfigurationError(
                f"epsilon must be in (0, {_MAX_EPSILON:g}] and delta in (0, 1), got {self.epsilon!r} and {self.delta!r}"
            )
        if self.mode != PRIVATE and struct.pack("<dd", self.epsilon, self.delta) != bytes(16):
            raise ConfigurationError(
                f"a sum without noise has epsilon and delta 0, got {self.epsilon!r} and {self.delta!r}"
            )

    @property
    def numbers(self) -> int:
        """Numbers of a device: C counts, C D sums and the upper triangle of the second moment."""
        return self.classes * (1 + self.dimensions) + self.dimensions * (self.dimensions + 1) // 2

    @property
    def max_rows(self) -> int:
        """Rows of one device beyond which a sum without noise could overflow."""
        return int(2**self.row_bits // self.most)

    def pack(self) -> bytes:
        """Returns the parameters as 44 bytes."""
        *integers, epsilon, delta = astuple(self)
        return _BLOCK.pack(_VERSION, *integers, 0, epsilon, delta)

    @classmethod
    def unpack(cls, block: bytes) -> Parameters:
        """Returns the parameters of a block. Raises WireError if its length, its version or a field is wrong."""
        if len(block) != _BLOCK.size:
            raise WireError(f"the parameters of a secure sum take {_BLOCK.size} bytes, got {len(block)}")
        version, *values, reserved, epsilon, delta = _BLOCK.unpack(block)
        if version != _VERSION:
            raise WireError(f"version {version} of secure sums is not known, only {_VERSION}; update the SDK")
        if reserved:
            raise WireError(f"the reserved field of a secure sum's parameters must be 0, got {reserved}")
        if values[0] not in (PRIVATE, LIMITED):
            raise WireError(f"mode of a secure sum must be {PRIVATE} or {LIMITED}, got {values[0]}")
        names = list(cls.__dataclass_fields__)
        try:
            return cls(**dict(zip(names, [*values, epsilon, delta], strict=True)))
        except ConfigurationError as error:
            raise WireError(str(error)) from error


def session_id(run: str, round: int, attempt: int, nonce: bytes, contract_digest: bytes, block: bytes) -> bytes:
    """Returns the session id, 32 bytes.

    Args:
        run: Name of the run.
        round: Below 2^64.
        attempt: Below 2^32.
        nonce: 32 public bytes, from the run's seed.
        contract_digest: SHA-256 of what the devices' numbers mean, 32 bytes.
        block: `Parameters.pack`.
    """
    where = struct.pack("<QI", round, attempt)
    return sha256(tag("session"), _with_length(run), where, nonce, contract_digest, block)


def _with_length(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<H", len(data)) + data


# --- the devices


class KeysEntry(NamedTuple):
    """What a device publishes in a session.

    Attributes:
        share_key: X25519 public key that boxes to the device are sealed with.
        mask_key: X25519 public key of its pair masks.
        commitment: To its self seed.
        rows: Lower bound of its rows; 0 in private sessions.
        identity: Ed25519 public key; None without signatures.
    """

    share_key: bytes
    mask_key: bytes
    commitment: bytes
    rows: int
    identity: bytes | None

    @classmethod
    def read(cls, entry: bytes) -> KeysEntry:
        """Returns the fields of an entry of 100 or 196 bytes. Raises WireError for another length."""
        if len(entry) not in (_BARE_ENTRY, _SIGNED_ENTRY):
            raise WireError(f"the keys of a device take {_BARE_ENTRY} or {_SIGNED_ENTRY} bytes, got {len(entry)}")
        identity = entry[_BARE_ENTRY : _BARE_ENTRY + 32] or None
        return cls(entry[:32], entry[32:64], entry[64:96], int.from_bytes(entry[96:100], "little"), identity)


@dataclass(frozen=True)
class Roster:
    """The devices that sent keys.

    Attributes:
        sid: Session id.
        ids: Ids of the devices, in bytewise order.
        entries: Their keys in the same order.

    Raises:
        WireError: The ids are not in order or not distinct, or `check_distinct` finds something.
    """

    sid: bytes
    ids: tuple[str, ...]
    entries: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.entries):
            raise WireError(f"{len(self.ids)} devices need as many keys, got {len(self.entries)}")
        order = [name.encode() for name in self.ids]
        if order != sorted(order):
            raise WireError("the devices of a roster must be in the bytewise order of their ids")
        check_distinct(self.ids, self.entries)

    @cached_property
    def indices(self) -> dict[str, int]:
        """The devices' indices by id."""
        return {name: index for index, name in enumerate(self.ids)}

    @cached_property
    def digest(self) -> bytes:
        """What all devices must agree on about each other, 32 bytes."""
        devices = (sha256(_with_length(name), entry) for name, entry in zip(self.ids, self.entries, strict=True))
        return sha256(tag("roster"), self.sid, struct.pack("<I", len(self.ids)), *devices)


def check_distinct(ids: Sequence[str], entries: Sequence[bytes]) -> None:
    """Raises WireError if two devices have one id or one public key, or if only some have signed theirs."""
    found = [KeysEntry.read(entry) for entry in entries]
    columns: dict[str, Sequence[object]] = {
        "id": ids,
        "key": [key for one in found for key in (one.share_key, one.mask_key)],
        "identity": [one.identity for one in found if one.identity is not None],
    }
    for name, values in columns.items():
        if len(set(values)) != len(values):
            raise WireError(f"two devices of a secure sum have the same {name}")
    if len({len(entry) for entry in entries}) > 1:
        raise WireError("some devices of a secure sum have signed their keys and others have not")


def rounded_rows(rows: int) -> int:
    """Returns a number of rows rounded down to its two leading bits, as a device without noise tells it."""
    unused = max(0, rows.bit_length() - 2)
    return rows >> unused << unused


def pack_members(members: Iterable[int], devices: int) -> bytes:
    """Returns a bitmap of indices below `devices`: device i is bit i mod 8 of byte i // 8."""
    bitmap = sum(1 << index for index in set(members))
    return bitmap.to_bytes((devices + 7) // 8, "little")


def unpack_members(bitmap: bytes, devices: int) -> frozenset[int]:
    """Returns the indices of a bitmap. Raises WireError for a wrong length, or a bit of no device."""
    if len(bitmap) != (devices + 7) // 8:
        raise WireError(f"a bitmap of {devices} devices takes {(devices + 7) // 8} bytes, got {len(bitmap)}")
    number = int.from_bytes(bitmap, "little")
    if number >> devices:
        raise WireError(f"a bitmap of {devices} devices has a bit beyond them")
    return frozenset(index for index in range(devices) if number >> index & 1)


# --- neighbours


def neighbours(sid: bytes, devices: int, degree: int) -> Callable[[int], list[int]]:
    """Returns the function that gives the neighbours of an index, ascending.

    Args:
        sid: Session id, which puts the ring in a random order.
        devices: Number of devices.
        degree: Neighbours of a device, half of them to each side in the ring; every other device for 0 and from
            `devices - 1` on.
    """
    if is_complete(devices, degree):
        return lambda index: [other for other in range(devices) if other != index]
    order = sorted(range(devices), key=lambda index: sha256(tag("graph"), sid, struct.pack("<I", index)))
    places = {index: place for place, index in enumerate(order)}
    steps = [step for step in range(-(degree // 2), degree // 2 + 1) if step]
    return lambda index: sorted(order[(places[index] + step) % devices] for step in steps)


def is_connected(members: Collection[int], near: Callable[[int], list[int]]) -> bool:
    """Returns whether the members are one group of neighbours; of several, their masks would give the sum of each.

    Args:
        members: Indices, at least one.
        near: Gives the neighbours of an index.
    """
    left = set(members)
    reached = [left.pop()]
    while reached:
        found = left.intersection(near(reached.pop()))
        left -= found
        reached += found
    return not left


def is_complete(devices: int, degree: int) -> bool:
    """Returns whether every device is every other's neighbour."""
    return degree == 0 or degree >= devices - 1


def session_threshold(devices: int, degree: int) -> int:
    """Returns how many holders of a device's secrets must answer; the device itself is one of them."""
    return threshold(devices if is_complete(devices, degree) else degree + 1)


def ring_degree(devices: int, corrupt: float, lost: float) -> int:
    """Returns the smallest number of neighbours, from 10 on, with which a ring of devices is safe.

    Bounds the probability that more holders of one secret are corrupt than may be (2^-40), that too few of them are
    left (2^-20), and that half a neighbourhood in a row is corrupt or lost (2^-40).

    Args:
        devices: n.
        corrupt: Fraction of devices that work together with the server, in [0, 1).
        lost: Fraction of devices that vanish, in [0, 1).

    Raises:
        ConfigurationError: A fraction is out of range, or no ring is safe.
    """
    for name, fraction in (("corrupt", corrupt), ("lost", lost)):
        if not 0 <= fraction < 1:
            raise ConfigurationError(f"{name} must be a fraction in [0, 1), got {fraction!r}")
    bad, gone = math.floor(corrupt * devices), math.floor(lost * devices)
    for degree in range(_MIN_DEGREE, devices - 1, 2):
        needed = threshold(degree + 1)
        learnt = sum(_draws(devices - 1, bad, degree, hit) for hit in range(needed, degree + 1))
        stuck = sum(_draws(devices, devices - gone, degree + 1, hit) for hit in range(needed))
        apart = math.prod(range(bad + gone, bad + gone - degree // 2, -1)) if bad + gone >= degree // 2 else 0
        if (
            devices * learnt << -MAX_LOG2_LEAKED <= math.comb(devices - 1, degree)
            and devices * stuck << -MAX_LOG2_NO_SUM <= math.comb(devices, degree + 1)
            and devices * apart << -MAX_LOG2_LEAKED <= math.perm(devices, degree // 2)
        ):
            return degree
    raise ConfigurationError(
        f"no ring of {devices} devices is safe with {corrupt:g} of them corrupt and {lost:g} lost; use a complete graph"
    )


def _draws(all_: int, marked: int, drawn: int, hit: int) -> int:
    """Returns the number of ways to draw with exactly `hit` marked ones."""
    return math.comb(marked, hit) * math.comb(all_ - marked, drawn - hit)


# --- messages to sign


def keys_message(sid: bytes, device_id: str, body: bytes) -> bytes:
    """Returns what a device signs about its keys, the first 100 bytes of its entry."""
    return tag("keys") + sid + _with_length(device_id) + body


def survivors_message(
    sid: bytes, roster_digest: bytes, devices: int, shared: Iterable[int], survivors: Iterable[int]
) -> bytes:
    """Returns what a device signs before it gives a share away.

    Args:
        sid: Session id.
        roster_digest: `Roster.digest`.
        devices: Number of devices of the roster.
        shared: Indices of the devices that sent boxes.
        survivors: Indices of the devices whose numbers are in the sum.
    """
    bitmaps = pack_members(shared, devices) + pack_members(survivors, devices)
    return tag("survivors") + sid + roster_digest + struct.pack("<I", devices) + bitmaps


# --- What hides a device's numbers: a mask of its own and one for each pair of neighbours, which cancel in the sum.


@dataclass(frozen=True, kw_only=True)
class Masks:
    """The masks of a session, as its devices add them and the server takes them away.

    Attributes:
        sid: Session id, 32 bytes.
        count: Numbers of a device.
        width: Bytes of a number, 4 to 8.
        label: Distinguishes the pair masks of further sums over the same devices, 32 bytes; empty for the first sum.
    """

    sid: bytes
    count: int
    width: int
    label: bytes = b""

    def mask_secret(self, mask_seed: bytes) -> bytes:
        """Returns the X25519 secret of a device's pair masks, from its 31-byte mask seed."""
        return hkdf(mask_seed, self.sid, tag("mask key"))

    def commitment(self, self_seed: bytes) -> bytes:
        """Returns the 32 bytes by which the server recognises a device's 31-byte self seed."""
        return sha256(tag("self commitment"), self.sid, self_seed)

    def of_self(self, self_seed: bytes) -> Numbers:
        """Returns what a device adds for itself."""
        return mask(hkdf(self_seed, self.sid, tag("self mask")), self.count, self.width)

    def of_pair(self, index: int, secret: bytes, public: bytes, other: int, other_public: bytes) -> Numbers:
        """Returns what the device `index` adds for its neighbour `other`: the negative of what the neighbour adds.

        Args:
            index: Index of the device.
            secret: Its `mask_secret`.
            public: The secret's public key.
            other: Index of the neighbour.
            other_public: Public key of the neighbour's mask secret.

        Returns:
            Numbers modulo 2^64, which are right modulo 2^(8 width).

        Raises:
            WireError: The neighbour's public key is not one of X25519.
        """
        lower, higher = (public, other_public) if index < other else (other_public, public)
        key = hkdf(agree(secret, other_public), self.sid, tag("pair mask") + self.label + lower + higher)
        numbers = mask(key, self.count, self.width)
        return numbers if index < other else np.negative(numbers)
