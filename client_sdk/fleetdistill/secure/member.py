"""One device in a session. All that it sends follows from its root, its numbers and what it is sent.

A device keeps root and numbers on its disk, so that after a crash it sends the same bytes again and never hides two
inputs with one mask. That it answers a step once only, its record of answers ensures, not this module.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from fleetdistill.errors import PeerError, WireError
from fleetdistill.secure.primitives import (
    PRIME,
    SECRET_BYTES,
    SHARE_BYTES,
    Numbers,
    agree,
    coefficients,
    hkdf,
    public_key,
    reduce,
    seal,
    share,
    sign,
    tag,
    unseal,
    verification_key,
    verify_signature,
)
from fleetdistill.secure.session import KeysEntry, Masks, keys_message

__all__ = ["Member", "endorse", "is_endorsed"]


class Member:
    """A device's half of a session, without a transport.

    `index` is the device's own; `entries` are its neighbours' keys by their indices, without its own; `boxes` are those
    for this device by sender.
    """

    def __init__(
        self, root: bytes, numbers: Numbers, sid: bytes, width: int, rows: int = 0, identity: bytes | None = None
    ) -> None:
        """Derives the device's secrets.

        Args:
            root: 32 bytes of the operating system, never used in another session.
            numbers: `[d]` uint64, the input modulo 2^(8 width).
            sid: Session id, 32 bytes.
            width: Bytes of a number, 4 to 8.
            rows: Rounded number of rows to tell; 0 in private sessions.
            identity: 32 secret bytes of an Ed25519 key; None where keys are not signed.
        """
        self._root, self._numbers, self._sid, self._width = root, numbers, sid, width
        self._rows, self._identity = rows, identity
        self._masks = Masks(sid=sid, count=len(numbers), width=width)
        self._mask_seed = hkdf(root, sid, tag("mask seed"), SECRET_BYTES)
        self._self_seed = hkdf(root, sid, tag("self seed"), SECRET_BYTES)
        self._share_secret = hkdf(root, sid, tag("share key"))
        self._mask_secret = self._masks.mask_secret(self._mask_seed)
        self._share_key, self._mask_key = public_key(self._share_secret), public_key(self._mask_secret)

    def keys_entry(self, device_id: str) -> bytes:
        """Returns the device's keys: 100 bytes, with an identity 196."""
        body = (
            self._share_key + self._mask_key + self._masks.commitment(self._self_seed) + struct.pack("<I", self._rows)
        )
        if self._identity is None:
            return body
        signature = sign(self._identity, keys_message(self._sid, device_id, body))
        return body + verification_key(self._identity) + signature

    def boxes(self, index: int, entries: Mapping[int, bytes], roster_digest: bytes, threshold: int) -> dict[int, bytes]:
        """Returns a sealed box of 80 bytes for each neighbour, with its shares of this device's two secrets.

        Raises:
            PeerError: A neighbour's public key is not one of X25519.
        """
        points = self._shares(roster_digest, threshold)
        return {
            other: seal(
                self._box_key(other, KeysEntry.read(entry), roster_digest, sends=True),
                b"".join(points(other)),
                self._between(index, other),
            )
            for other, entry in entries.items()
        }

    def masked_numbers(
        self, index: int, entries: Mapping[int, bytes], roster_digest: bytes, boxes: Mapping[int, bytes]
    ) -> Numbers:
        """Returns the input with the masks of this device and of the pairs with all senders of boxes.

        Raises:
            PeerError: A neighbour's key or box cannot be used.
        """
        self._opened(index, entries, roster_digest, boxes)
        total = self._numbers + self._masks.of_self(self._self_seed)
        for other in boxes:
            theirs = KeysEntry.read(entries[other]).mask_key
            with _sent_by(other):
                total += self._masks.of_pair(index, self._mask_secret, self._mask_key, other, theirs)
        return reduce(total, self._width)

    def masked_further(
        self, index: int, entries: Mapping[int, bytes], members: frozenset[int], numbers: Numbers, label: bytes
    ) -> Numbers:
        """Returns numbers of a further sum, with a mask for each pair of this device and a member of the first sum.

        Nobody can take these masks away but all members together: they cancel if the numbers of all come in, and no
        secret of a member's masks has been shared with the server. Of fewer, the server learns nothing.

        Args:
            index: Of this device.
            entries: Keys of the neighbours.
            members: Indices of the devices whose numbers are in the first sum.
            numbers: `[e]` uint64, modulo 2^(8 width).
            label: `Masks.label` of the sum, 32 bytes, never used for other numbers.

        Raises:
            WireError: This device is not among the members.
            PeerError: A neighbour's key cannot be used.
        """
        if index not in members:
            raise WireError("this device is asked for numbers of a sum that it is not in")
        masks, total = replace(self._masks, count=len(numbers), label=label), numbers.copy()
        for other in sorted(members & entries.keys()):
            theirs = KeysEntry.read(entries[other]).mask_key
            with _sent_by(other):
                total += masks.of_pair(index, self._mask_secret, self._mask_key, other, theirs)
        return reduce(total, self._width)

    def unmasking_shares(
        self,
        index: int,
        entries: Mapping[int, bytes],
        roster_digest: bytes,
        threshold: int,
        boxes: Mapping[int, bytes],
        survivors: frozenset[int],
    ) -> dict[int, bytes]:
        """Returns one share of 32 bytes for each sender of a box and for the device itself.

        It is the share of the self seed of a survivor, and of the mask seed of a device that is none: never both.

        Args:
            index: Of this device.
            entries: Keys of the neighbours.
            roster_digest: `Roster.digest`.
            threshold: `session_threshold`.
            boxes: As in `masked_numbers`.
            survivors: Indices of all devices whose numbers are in the sum.

        Raises:
            WireError: This device is not among the survivors.
            PeerError: A neighbour's key or box cannot be used.
        """
        if index not in survivors:
            raise WireError("this device is asked to unmask a sum that it is not in")
        held = {
            **self._opened(index, entries, roster_digest, boxes),
            index: self._shares(roster_digest, threshold)(index),
        }
        return {other: pair[other in survivors] for other, pair in held.items()}

    def sign(self, message: bytes) -> bytes:
        """Returns the identity's signature, 64 bytes. Raises WireError in a session without signatures."""
        if self._identity is None:
            raise WireError("this session has no signatures, so nothing is signed")
        return sign(self._identity, message)

    def _shares(self, roster_digest: bytes, threshold: int) -> Callable[[int], tuple[bytes, bytes]]:
        """Returns what gives a holder's shares of the mask seed and of the self seed."""
        polynomials = [
            (int.from_bytes(secret, "little"), coefficients(hkdf(self._root, roster_digest, tag(name)), threshold))
            for secret, name in ((self._mask_seed, "mask shares"), (self._self_seed, "self shares"))
        ]

        def shares_of(holder: int) -> tuple[bytes, bytes]:
            mask_share, self_share = (
                share(secret, above, holder + 1).to_bytes(SHARE_BYTES, "little") for secret, above in polynomials
            )
            return mask_share, self_share

        return shares_of

    def _opened(
        self, index: int, entries: Mapping[int, bytes], roster_digest: bytes, boxes: Mapping[int, bytes]
    ) -> dict[int, tuple[bytes, bytes]]:
        """Returns each sender's shares of its mask seed and of its self seed."""
        if not boxes.keys() <= entries.keys():
            raise WireError("a box comes from a device that is no neighbour of this one")
        result = {}
        for sender, box in boxes.items():
            key = self._box_key(sender, KeysEntry.read(entries[sender]), roster_digest, sends=False)
            with _sent_by(sender):
                content = unseal(key, box, self._between(sender, index))
                pair = content[:SHARE_BYTES], content[SHARE_BYTES:]
                if any(len(one) != SHARE_BYTES or int.from_bytes(one, "little") >= PRIME for one in pair):
                    raise WireError("a box does not hold two shares")
            result[sender] = pair
        return result

    def _box_key(self, other: int, entry: KeysEntry, roster_digest: bytes, *, sends: bool) -> bytes:
        """Returns the key of the box to or from another device."""
        keys = (self._share_key, entry.share_key) if sends else (entry.share_key, self._share_key)
        with _sent_by(other):
            return hkdf(agree(self._share_secret, entry.share_key), roster_digest, tag("share box") + b"".join(keys))

    def _between(self, sender: int, receiver: int) -> bytes:
        return self._sid + struct.pack("<II", sender, receiver)


def verify_keys_entry(entry: bytes, sid: bytes, device_id: str) -> bool:
    """Returns whether an entry is signed, for this session and device, by the identity in it. Never raises."""
    body, identity, signature = entry[:100], entry[100:132], entry[132:]
    return verify_signature(identity, keys_message(sid, device_id, body), signature)


def endorse(roster_secret: bytes, device_id: str, public_key: bytes) -> bytes:
    """Returns the endorsement of a device, 64 bytes; call it where devices are provisioned, never on the server.

    Args:
        roster_secret: Secret Ed25519 key of the roster, 32 bytes.
        device_id: Id of the device, `Device(device_id=...)`.
        public_key: Public Ed25519 key of the device, 32 bytes.
    """
    return sign(roster_secret, _endorsement_message(device_id, public_key))


def is_endorsed(roster_key: bytes, device_id: str, public_key: bytes, endorsement: bytes) -> bool:
    """Returns whether a roster's public key has endorsed a device's public key. Never raises."""
    return verify_signature(roster_key, _endorsement_message(device_id, public_key), endorsement)


def _endorsement_message(device_id: str, public_key: bytes) -> bytes:
    name = device_id.encode()
    return tag("endorsement") + struct.pack("<H", len(name)) + name + public_key


@contextmanager
def _sent_by(index: int) -> Iterator[None]:
    """Names the device whose message cannot be used."""
    try:
        yield
    except WireError as error:
        raise PeerError(index, str(error)) from error
