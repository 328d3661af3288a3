"""The server's side of one secure sum: five asks, after which it knows the sum and no device's part of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Protocol

import numpy as np

from fleetdistill.errors import PeerError, QuorumNotReached, SecureSumError, WireError
from fleetdistill.knowledge import SecureEntry, SecureMessage
from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, UNMASK, blamed_in
from fleetdistill.secure.certificate import check_certified
from fleetdistill.secure.member import is_endorsed, verify_keys_entry
from fleetdistill.secure.primitives import (
    SECRET_BYTES,
    SHARE_BYTES,
    Numbers,
    from_bytes,
    public_key,
    reconstruct,
    reduce,
    verify_signature,
    weights_at_zero,
)
from fleetdistill.secure.session import (
    KeysEntry,
    Masks,
    Parameters,
    Roster,
    is_complete,
    is_connected,
    neighbours,
    pack_members,
    session_id,
    session_threshold,
    survivors_message,
)
from fleetdistill_server.figures import SumFigures
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, PayloadFor
from fleetdistill_server.texts import UNREVIEWED, counted

__all__ = ["Unmasked", "unmask"]
_SIGNED_ENTRY = 196


class AskDevices(Protocol):
    """Asks a step of devices; `Deliveries.ask` of a cohort."""

    def __call__(self, step: str, payload: PayloadFor, *, to: Sequence[str]) -> AsyncIterator[DeviceAnswer]:
        """Yields the answers in device-id order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureSum:
    """A sum that was made.

    Attributes:
        total: `[d]` uint64, the sum modulo 2^(8 width).
        devices: Ids of the devices in the sum.
        sid: Id of the sum.
        roster: Digest of the devices' keys.
        wrong_shares: Ids of the devices that gave a wrong share.
    """

    total: Numbers
    devices: tuple[str, ...]
    sid: bytes
    roster: bytes
    wrong_shares: tuple[str, ...]


class SumSession:
    """One sum over the devices that are asked.

    Args:
        cohort: The round's cohort.
        ask: Asks a step of devices.
        parameters: The sum's parameters.
        run: Name of the run.
        digest: `statistics_digest` of the run.
        nonce: 32 public bytes.
        roster_key: Public Ed25519 key of the roster, 32 bytes; empty if the server does not know it, or there is none.
        authorities: Certificates of the CAs that the devices' certificates are from, PEM; empty as for `roster_key`.

    Attributes:
        sid: Id of the sum, 32 bytes.
        spent: Ids of the devices whose numbers may be in a sum: those that have given their shares, and all that are in
            it once it is unmasked.
        blamed: Ids of the devices whose keys or boxes another device could not use, by the reason of its decline.
    """

    def __init__(
        self,
        cohort: Cohort,
        ask: AskDevices,
        parameters: Parameters,
        *,
        run: str,
        digest: bytes,
        nonce: bytes,
        roster_key: bytes = b"",
        authorities: bytes = b"",
    ) -> None:
        self._run, self._roster_key, self._authorities = run, roster_key, authorities
        self._cohort, self._ask, self._parameters, self._nonce = cohort, ask, parameters, nonce
        self.sid = session_id(run, cohort.round, 1, nonce, digest, parameters.pack())
        self.spent: set[str] = set()
        self.blamed: set[str] = set()
        self._asked_devices: dict[str, int] = {}
        self._answered: dict[str, int] = {}
        self._dropped: dict[str, list[str]] = {}
        self._roster = b""
        self._began = time.monotonic()

    async def sum(self, devices: Sequence[str]) -> SecureSum:
        """Returns the sum over those of the devices that answer the first three steps.

        Raises:
            QuorumNotReached: Too few devices answered a step; nothing of any device is known.
            SecureSumError: The shares that came in do not unmask the sum.
        """
        self._began = time.monotonic()
        roster, endorsements = await self._keys(devices)
        self._roster = roster.digest
        boxes = await self._shares(roster, endorsements)
        masked = await self._inputs(roster, boxes)
        survivors = frozenset(masked)
        signatures = await self._signatures(roster, frozenset(boxes), survivors) if self._is_signed else {}
        answers = await self._unmasking_shares(roster, frozenset(boxes), survivors, signatures)
        try:
            result = unmask(roster, self._parameters.degree, frozenset(boxes), masked, answers, self._parameters.width)
        except PeerError as error:
            raise SecureSumError(f"device {roster.ids[error.index]!r}: {error}") from error
        members = tuple(roster.ids[index] for index in sorted(masked))
        self.spent.update(members)
        return SecureSum(
            total=result.total,
            devices=members,
            sid=self.sid,
            roster=roster.digest,
            wrong_shares=tuple(roster.ids[index] for index in result.wrong_shares),
        )

    def figures(self, failure: Exception | None = None) -> SumFigures:
        """Returns what became of the sum, after `sum`.

        Args:
            failure: What `sum` raised, or why its result is thrown away; None for a sum that was made.
        """
        text, parameters, answered = "" if failure is None else str(failure), self._parameters, self._answered
        if isinstance(failure, QuorumNotReached):
            step, asked = next(reversed(self._asked_devices.items()))
            text = f"{failure.answered} of {counted(asked, 'device')} answered {step}, {failure.needed} were needed"
        return SumFigures(
            asked=self._asked_devices[KEYS],
            keys=answered.get(KEYS),
            boxes=answered.get(SHARES),
            inputs=answered.get(INPUT),
            signatures=answered.get(CHECK),
            shares=answered.get(UNMASK),
            min_devices=parameters.least,
            threshold=session_threshold(answered[KEYS], parameters.degree) if SHARES in self._asked_devices else None,
            noise_shares=parameters.honest or None,
            dropped=self._dropped,
            seconds=round(time.monotonic() - self._began, 3),
            failure=text,
            sid=self.sid.hex(),
            roster=self._roster.hex(),
        )

    async def _keys(self, devices: Sequence[str]) -> tuple[Roster, dict[str, bytes]]:
        """Step 1: returns the devices' keys, and their endorsements by id."""
        message = SecureMessage(parameters=self._parameters.pack(), nonce=self._nonce)
        keys = {
            answer.device: _tensor(answer, "keys").tobytes()
            async for answer in self._asked(KEYS, {"session": message}, devices, self._parameters.least)
        }
        size = _SIGNED_ENTRY if self._is_signed else len(next(iter(keys.values())))
        reasons = {device: self._why_not_endorsed(device, sent) for device, sent in keys.items()}
        for device, reason in reasons.items():
            if reason:
                del keys[device]
                text = f"{device}: {reason}; it is left out of the sum {UNREVIEWED}"
                self._cohort.event("not-endorsed", text, device)
        self._check_enough(KEYS, len(keys), self._parameters.least)
        ids = sorted(keys, key=str.encode)
        try:
            roster = Roster(self.sid, tuple(ids), tuple(keys[device][:size] for device in ids))
        except WireError as error:
            raise SecureSumError(f"the devices' keys cannot be used: {error}") from error
        return roster, {device: keys[device][size:] for device in ids}

    def _why_not_endorsed(self, device: str, sent: bytes) -> str:
        """Returns why the other devices will not accept a device's keys, as far as the server can tell, or nothing."""
        if not self._is_signed:
            return ""
        entry, endorsement = sent[:_SIGNED_ENTRY], sent[_SIGNED_ENTRY:]
        if not verify_keys_entry(entry, self.sid, device):
            return "it has not signed its keys"
        if self._roster_key and not is_endorsed(self._roster_key, device, entry[100:132], endorsement):
            return "the roster has not endorsed its key"
        if self._authorities:
            try:
                check_certified(self._authorities, self._run, device, entry[100:132], endorsement, time.time())
            except WireError as error:
                return f"its certificate cannot be used: {error}"
        return ""

    async def _shares(self, roster: Roster, endorsements: Mapping[str, bytes]) -> dict[int, dict[int, bytes]]:
        """Step 2: returns the boxes by index of the sender and of the receiver."""
        entries = [
            SecureEntry(index=index, device=device, keys=entry, endorsement=endorsements[device])
            for index, (device, entry) in enumerate(zip(roster.ids, roster.entries, strict=True))
        ]
        near = self._near(roster)

        def message(device: str) -> Mapping[str, SecureMessage]:
            index = roster.indices[device]
            listed = [entries[other] for other in sorted([index, *near(index)])]
            return {"session": SecureMessage(entries=listed, roster=roster.digest, devices=len(entries))}

        payload = message if self._is_ring(roster) else message(roster.ids[0])  # one list for all, stored once
        result: dict[int, dict[int, bytes]] = {}
        async for answer in self._asked(SHARES, payload, roster.ids, self._parameters.least):
            index, rows = roster.indices[answer.device], _tensor(answer, "boxes")
            receivers = near(index)
            if len(rows) == len(receivers):
                result[index] = {other: row.tobytes() for other, row in zip(receivers, rows, strict=True)}
            else:
                text = (
                    f"{answer.device} sent {len(rows)} boxes for {len(receivers)} devices, and is left out of the sum"
                )
                self._cohort.event("wrong-share", f"{text} {UNREVIEWED}", answer.device)
        self._check_enough(SHARES, len(result), max(self._parameters.least, self._threshold(roster)))
        return result

    async def _inputs(self, roster: Roster, boxes: Mapping[int, Mapping[int, bytes]]) -> dict[int, Numbers]:
        """Step 3: returns the masked numbers by index."""
        members, near = pack_members(boxes, len(roster.ids)), self._near(roster)

        def message(device: str) -> Mapping[str, SecureMessage]:
            index = roster.indices[device]
            rows = b"".join(boxes[sender][index] for sender in near(index) if sender in boxes)
            return {"session": SecureMessage(members=members, boxes=np.frombuffer(rows, np.uint8).reshape(-1, 80))}

        devices = [roster.ids[index] for index in sorted(boxes)]
        result = {
            roster.indices[answer.device]: from_bytes(_tensor(answer, "numbers").tobytes(), self._parameters.width)
            async for answer in self._asked(INPUT, message, devices, self._parameters.least)
        }
        if not is_connected(result, near):
            raise SecureSumError("the devices that are left in the ring would give several sums")
        return result

    async def _signatures(self, roster: Roster, shared: frozenset[int], survivors: frozenset[int]) -> dict[int, bytes]:
        """Step 4: returns the devices' valid signatures of the list of the sum, by index."""
        message = SecureMessage(members=pack_members(survivors, len(roster.ids)))
        devices = [roster.ids[index] for index in sorted(survivors)]
        text = survivors_message(self.sid, roster.digest, len(roster.ids), shared, survivors)
        result = {}
        async for answer in self._asked(CHECK, {"session": message}, devices, self._threshold(roster)):
            index, signature = roster.indices[answer.device], _tensor(answer, "signature").tobytes()
            if verify_signature(roster.entries[index][100:132], text, signature):
                result[index] = signature
        self._check_enough(CHECK, len(result), self._threshold(roster))
        return result

    async def _unmasking_shares(
        self, roster: Roster, shared: frozenset[int], survivors: frozenset[int], signatures: Mapping[int, bytes]
    ) -> dict[int, dict[int, bytes]]:
        """Step 5: returns the shares by index of the holder and of the device that they are of."""
        entries = [SecureEntry(index=index, signature=signature) for index, signature in sorted(signatures.items())]
        message = SecureMessage(members=pack_members(survivors, len(roster.ids)), entries=entries)
        present = signatures if self._is_signed else survivors
        devices = [roster.ids[index] for index in sorted(present)]
        near, result = self._near(roster), dict[int, dict[int, bytes]]()
        async for answer in self._asked(UNMASK, {"session": message}, devices, self._threshold(roster)):
            self.spent.add(answer.device)
            index, rows = roster.indices[answer.device], _tensor(answer, "shares")
            owners = sorted(shared.intersection([index, *near(index)]))
            if len(rows) == len(owners):
                result[index] = {other: row.tobytes() for other, row in zip(owners, rows, strict=True)}
            else:
                text = f"{answer.device} sent {len(rows)} shares of {len(owners)} devices, which are not used"
                self._cohort.event("wrong-share", f"{text} {UNREVIEWED}", answer.device)
        self._check_enough(UNMASK, len(result), self._threshold(roster))
        return result

    async def _asked(
        self, step: str, payload: PayloadFor, devices: Sequence[str], needed: int
    ) -> AsyncIterator[DeviceAnswer]:
        """Asks a step, yields the answers, and notes who did not answer. Raises QuorumNotReached."""
        answered = []
        self._asked_devices[step] = len(devices)
        async for answer in self._ask(step, payload, to=devices):
            answered.append(answer.device)
            yield answer
        if missing := sorted(set(devices) - set(answered)):
            self._dropped[step] = missing
            reasons = self._cohort.declined(step)
            named = {device: blamed_in(reasons.get(device, "")) for device in missing}
            self.blamed |= {other for device, other in named.items() if other in devices and other != device}
        self._check_enough(step, len(answered), needed)

    def _check_enough(self, step: str, answered: int, needed: int) -> None:
        self._answered[step] = answered
        if answered < needed:
            raise QuorumNotReached(step, answered, needed)

    def _threshold(self, roster: Roster) -> int:
        return session_threshold(len(roster.ids), self._parameters.degree)

    def _near(self, roster: Roster) -> Callable[[int], list[int]]:
        return neighbours(roster.sid, len(roster.ids), self._parameters.degree)

    def _is_ring(self, roster: Roster) -> bool:
        return not is_complete(len(roster.ids), self._parameters.degree)

    @property
    def _is_signed(self) -> bool:
        return self._parameters.keys > 0


def _tensor(answer: DeviceAnswer, name: str) -> np.ndarray:
    array = getattr(answer.part(name, SecureMessage), name)
    assert array is not None  # checked by the front
    return np.asarray(array)


# --- Recovers the sum of a session from masked numbers and shares: nothing else of a device.
#
# Shares of a wrong value are found by the commitments and public keys that the devices published before.

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
