"""Recovers the sum of a session from masked numbers and shares: nothing else of a device.

Shares of a wrong value are found by the commitments and public keys that the devices published before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np

from fleetdistill.errors import SecureSumError
from fleetdistill.secure.masks import Masks
from fleetdistill.secure.primitives import Numbers, public_key, reduce
from fleetdistill.secure.session import KeysEntry, Roster, neighbours, session_threshold
from fleetdistill.secure.shares import SECRET_BYTES, SHARE_BYTES, reconstruct, weights_at_zero

__all__ = ["Unmasked", "unmask"]

_MAX_SETS = 1000
"""Sets of holders that are tried for one secret."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Unmasked:
    """The sum of a session.

    Attributes:
        total: `[d]` uint64, the sum modulo 2^(8 width) over the devices whose masked numbers came in.
        wrong_shares: Indices of the devices that gave a wrong share, ascending.
    """

    total: Numbers
    wrong_shares: tuple[int, ...]


def unmask(
    roster: Roster,
    degree: int,
    shared: frozenset[int],
    masked: Mapping[int, Numbers],
    answers: Mapping[int, Mapping[int, bytes]],
    width: int,
) -> Unmasked:
    """Returns the sum of the devices whose masked numbers came in; the same for every order of the answers.

    Args:
        roster: The devices that sent keys.
        degree: Neighbours of a device; 0 if every device is every other's.
        shared: Indices of the devices that sent boxes.
        masked: `[d]` masked numbers by device, at least one, all in `shared`.
        answers: By holder, its share of 32 bytes of each device's secret: of the self seed of a device in `masked`, of
            the mask seed of any other in `shared`.
        width: Bytes of a number.

    Raises:
        SecureSumError: Too few shares of a secret came in, or no set of holders gives it.
        PeerError: The public key of a device's masks cannot be used.
    """
    total: Numbers = np.asarray(np.sum(list(masked.values()), axis=0, dtype=np.uint64))
    masks = Masks(sid=roster.sid, count=len(total), width=width)
    entries = [KeysEntry.read(entry) for entry in roster.entries]
    near = neighbours(roster.sid, len(entries), degree)
    secrets = _Secrets(answers, session_threshold(len(entries), degree))

    def seeds_self(device: int) -> Callable[[bytes], bool]:
        return lambda seed: masks.commitment(seed) == entries[device].commitment

    def seeds_masks(device: int) -> Callable[[bytes], bool]:
        return lambda seed: public_key(masks.mask_secret(seed)) == entries[device].mask_key

    for device in sorted(shared):
        if device in masked:
            total -= masks.of_self(secrets.find(device, roster.ids[device], seeds_self(device)))
            continue
        secret = masks.mask_secret(secrets.find(device, roster.ids[device], seeds_masks(device)))
        for other in near(device):
            if other in masked:  # the negative of what the survivor added
                total += masks.of_pair(device, secret, entries[device].mask_key, other, entries[other].mask_key)
    return Unmasked(total=reduce(total, width), wrong_shares=tuple(sorted(secrets.wrong)))


class _Secrets:
    """Reconstructs secrets from the shares of their holders.

    Attributes:
        wrong: Holders that gave a wrong share.
    """

    def __init__(self, answers: Mapping[int, Mapping[int, bytes]], threshold: int) -> None:
        self.wrong: set[int] = set()
        self._answers, self._threshold = answers, threshold
        self._weights: dict[tuple[int, ...], list[int]] = {}

    def find(self, device: int, name: str, fits: Callable[[bytes], bool]) -> bytes:
        """Returns the secret of a device that fits what the device published, 31 bytes. Raises SecureSumError."""
        holders = [holder for holder in sorted(self._answers) if device in self._answers[holder]]
        if len(holders) < self._threshold:
            raise SecureSumError(
                f"only {len(holders)} of {self._threshold} shares of a secret of {name} came in, so there is no sum"
            )
        for left_out in islice(self._left_out(holders), _MAX_SETS):
            chosen = [holder for holder in holders if holder not in left_out][: self._threshold]
            secret = self._reconstruct(device, chosen)
            if not any(secret[SECRET_BYTES:]) and fits(secret[:SECRET_BYTES]):
                self.wrong.update(left_out)
                return secret[:SECRET_BYTES]
        raise SecureSumError(f"no {self._threshold} shares of a secret of {name} fit its keys, so there is no sum")

    def _left_out(self, holders: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yields the holders to leave out: none, then one, then two; first those that were wrong before.

        A set has the first holders that are not left out, so that leaving out others that it lacks changes nothing.
        """
        yield ()
        spare = len(holders) - self._threshold
        for count in range(1, min(spare, 2) + 1):
            in_use = holders[: self._threshold + count - 1]
            yield from combinations(sorted(in_use, key=lambda holder: (holder not in self.wrong, holder)), count)

    def _reconstruct(self, device: int, holders: Sequence[int]) -> bytes:
        key = tuple(holders)
        if key not in self._weights:
            self._weights[key] = weights_at_zero([holder + 1 for holder in holders])
        shares = [int.from_bytes(self._answers[holder][device], "little") for holder in holders]
        return reconstruct(self._weights[key], shares).to_bytes(SHARE_BYTES, "little")
