"""What hides a device's numbers: a mask of its own and one for each pair of neighbours, which cancel in the sum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fleetdistill.secure.primitives import Numbers, agree, hkdf, mask, sha256, tag

__all__ = ["Masks"]


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
