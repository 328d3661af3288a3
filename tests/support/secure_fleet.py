"""Devices of a secure sum with their state directories, and a server that may lie, lose messages or be restarted."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from support.secured import device_credentials, save_credentials

from fleetdistill import Signer
from fleetdistill.device.events import DeviceLock, Event, Events
from fleetdistill.device.secure import ANY_TERMS, SecureSums, SecureTerms
from fleetdistill.errors import CannotAnswer, WireError
from fleetdistill.knowledge import HeadGradient, LinearHead, Parts, Plan, PrivateRows, SecureMessage
from fleetdistill.methods import config_class
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats.exchange import REFINE
from fleetdistill.methods.classstats.refined_head import gradient_sum, to_wire
from fleetdistill.methods.classstats_secure.config import CERTIFICATES, ROSTER
from fleetdistill.methods.classstats_secure.exchange import INPUT, KEYS, SHARES, UNMASK, statistics_digest
from fleetdistill.secure.member import endorse
from fleetdistill.secure.primitives import (
    from_bytes,
    lift,
    public_key,
    reconstruct,
    reduce,
    verification_key,
    weights_at_zero,
)
from fleetdistill.secure.session import KeysEntry, Masks, Parameters, session_id, session_threshold, unpack_members
from fleetdistill.state.files import Files
from fleetdistill.state.privacy_ledger import PrivacyBudget
from fleetdistill.state.secure_sessions import SecureSessions
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.methods.cohort import DeviceAnswer, PayloadFor
from fleetdistill_server.methods.secure.secure_sum import SecureSum, SumSession
from fleetdistill_server.security.pki import make_authority
from fleetdistill_server.testing import FakeCohort

CLASSES, DIMENSIONS = 3, 8
ROSTER_SECRET = bytes(range(32))
Tamper = Callable[[str, str, SecureMessage], SecureMessage]
"""Returns what arrives in place of a message, of a step, to or from a device."""


def untouched(step: str, device: str, message: SecureMessage) -> SecureMessage:
    return message


class SecureFleet:
    """Devices in one process, and the server's side of their sums.

    Args:
        directory: Folder of the state directories.
        devices: Number of devices, `device-0` and so on.
        terms: Terms of the devices; signers are added if the sum has a roster. With certificates, the devices have some
            of the CA in `directory`/pki.
        budget: Privacy budget of the devices.
        method: classstats_secure or classstats_summed.
        signers: Whether signers are added.
        now: Clock of the devices, Unix seconds.
        settings: Of the method.

    Attributes:
        terms: Terms of single devices that have others.
        refused: Reason of each refusal by step and device.
        seen: What the server has received, by step and device.
        indices: Indices of the devices of the last sum.
        entries: Their keys by index.
        holders: Indices of a device and its neighbours.
        events: Events of the devices.
        sid: Id of the last sum.
        authorities: Certificates of the CAs as the server knows them; empty at first.
    """

    def __init__(
        self,
        directory: Path,
        devices: int = 5,
        *,
        terms: SecureTerms = ANY_TERMS,
        budget: PrivacyBudget | None = None,
        method: str = "classstats_secure",
        signers: bool = True,
        now: Callable[[], float] = time.time,
        **settings: Any,
    ) -> None:
        own = {"epsilon": 5.0} if method == "classstats_secure" else {"min_samples": 2, "rows_per_direction": 3}
        self.config = config_class(method)(**{"dimensions": DIMENSIONS, **own, **settings})
        self.names = [f"device-{number}" for number in range(devices)]
        self.contract = contract_pb2.Contract(run="sums", classes=["a", "b", "c"], input_shape=[1, 8, 8])
        self.refused: dict[tuple[str, str], str] = {}
        self.seen: dict[str, dict[str, SecureMessage]] = defaultdict(dict)
        self.shares: dict[str, dict[int, dict[int, bytes]]] = {kind: defaultdict(dict) for kind in ("self", "mask")}
        self.indices: dict[str, int] = {}
        self.shared: frozenset[int] = frozenset()
        self.entries: dict[int, bytes] = {}
        self.holders: dict[str, set[int]] = {}
        self.events: list[Event] = []
        self.terms: dict[str, SecureTerms] = {}
        self.sid, self.authorities = b"", b""
        self._directory, self._terms, self._budget = directory, terms, budget
        self._signers, self._now = signers, now
        for name in self.names:
            (directory / name).mkdir(parents=True, exist_ok=True)
        if self.config.keys == CERTIFICATES:
            authority = make_authority(directory / "pki")
            for name in self.names:
                save_credentials(directory / name, device_credentials(authority, name))

    def device(self, name: str) -> SecureSums:
        """A device that has just been started, with nothing but its state directory."""
        signer = signer_of(name) if self._signers and self.config.keys == ROSTER else None
        events = Events(DeviceLock(self.events.append), name)
        terms = self.terms.get(name) or replace(self._terms, signer=signer)
        return SecureSums(self.files(name), name, terms, self._budget, events, self._now)

    def files(self, name: str) -> Files:
        return Files(self._directory / name)

    def rows(self, name: str) -> PrivateRows:
        random = np.random.default_rng(self.names.index(name))
        return PrivateRows(random.normal(size=(12, DIMENSIONS)), np.arange(12) % CLASSES, CLASSES)

    def answer(self, name: str, step: str, parts: Parts, number: int = 1) -> Parts:
        """The answer of a freshly started device. Raises CannotAnswer or WireError if it refuses."""
        rows = {"statistics": self.rows(name)} if step == KEYS else {}
        ask = Ask(round=number, step=step, seed=0, parts=decode(encode(parts)))
        return self.device(name).answer(Answer(parts=rows, samples=12), ask, self.contract, self.config).parts

    def gradient(self, name: str, head: LinearHead, left_out: Sequence[int] = ()) -> HeadGradient:
        """What a device would send of its gradient in clear."""
        rows, counted = self.rows(name), set(range(CLASSES)) - set(left_out)
        return to_wire(gradient_sum(head, rows.rows, rows.labels, counted), head, CLASSES)

    def refine(self, name: str, head: LinearHead, number: int = 1, left_out: Sequence[int] = ()) -> Any:
        """A freshly started device's masked numbers of its gradient. Raises CannotAnswer if it refuses."""
        parts = decode(encode({"head": head, "plan": Plan(values={"left_out": list(left_out)})}))
        ask = Ask(round=number, step=REFINE, seed=0, parts=parts)
        answer = Answer(parts={"gradient": self.gradient(name, head, left_out)}, samples=12)
        sent = self.device(name).answer(answer, ask, self.contract, self.config).parts["gradient"]
        assert isinstance(sent, SecureMessage)
        assert sent.gradient is not None
        return from_bytes(sent.gradient.tobytes(), self.parameters().width)

    def frozen(self, name: str) -> Any:
        """What a device has frozen: the numbers of its input with noise; None without an open sum."""
        session = SecureSessions(self.files(name)).open()
        return None if session is None else from_bytes(session.numbers, self.parameters().width)

    def digest(self) -> bytes:
        """The digest of what the numbers mean, as the server has it."""
        return statistics_digest(["a", "b", "c"], [1, 8, 8], self.config)

    def parameters(self, **changes: Any) -> Parameters:
        result: Parameters = self.config.parameters_for(len(self.names), CLASSES, DIMENSIONS)
        return replace(result, **changes)

    def sum(
        self,
        *,
        number: int = 1,
        devices: Sequence[str] | None = None,
        lost: Collection[tuple[str, str]] = (),
        down: Tamper = untouched,
        up: Tamper = untouched,
        **parameters: Any,
    ) -> SecureSum:
        """Makes a sum.

        Args:
            number: Number of the round.
            devices: Devices that are asked; all by default.
            lost: Asks that get no answer, by step and device.
            down: Changes a message of the server on its way to a device.
            up: Changes an answer of a device on its way to the server; CannotAnswer loses it.
            parameters: Changes of the sum's parameters.
        """
        cohort = FakeCohort(dict.fromkeys(self.names, lambda ask: None), number=number)

        async def ask(step: str, payload: PayloadFor, *, to: Sequence[str]) -> AsyncIterator[DeviceAnswer]:
            for name in to:
                message = (payload(name) if callable(payload) else payload or {})["session"]
                assert isinstance(message, SecureMessage)
                if step == SHARES:
                    self.indices |= {entry.device: entry.index for entry in message.entries}
                    self.entries |= {entry.index: entry.keys for entry in message.entries}
                    self.holders[name] = {entry.index for entry in message.entries}
                if (step, name) in lost:
                    continue
                shown = down(step, name, message)
                try:
                    parts = self.answer(name, step, {"session": shown}, number)
                    changed = {part: up(step, name, sent) for part, sent in parts.items()}  # type: ignore[arg-type]
                except (CannotAnswer, WireError) as reason:
                    self.refused[step, name] = str(reason)
                    continue
                self.keep(step, name, shown, next(iter(changed.values())))
                yield DeviceAnswer(name, 1, encode(changed))

        self.indices, self.entries, self.holders = {}, {}, {}
        agreed, nonce = self.parameters(**parameters), bytes([number]) * 32
        digest = self.digest()
        roster_key = bytes.fromhex(self.config.roster_key)
        session = SumSession(
            cohort,
            ask,
            agreed,
            run="sums",
            digest=digest,
            nonce=nonce,
            roster_key=roster_key,
            authorities=self.authorities,
        )
        self.cohort, self.sid = cohort, session_id("sums", number, 1, nonce, digest, agreed.pack())
        return asyncio.run(session.sum(self.names if devices is None else devices))

    def plain_sum(self, names: Sequence[str]) -> Any:
        """The sum of what the devices have frozen, as signed integers."""
        width = self.parameters().width
        return lift(reduce(np.sum([self.frozen(name) for name in names], axis=0, dtype=np.uint64), width), width)

    def opened(self, sid: bytes) -> dict[str, Any]:
        """The inputs of single devices that the server can compute from all that it has received, by device.

        It tries what a curious server can: for each device it reconstructs both secrets if it has enough shares of
        them, and then takes the device's masks away.
        """
        agreed = self.parameters()
        width, needed = agreed.width, session_threshold(len(self.indices), agreed.degree)
        masks = Masks(sid=sid, count=agreed.numbers, width=width)
        result = {}
        for name, message in self.seen[INPUT].items():
            me = self.indices[name]
            entry = KeysEntry.read(self.entries[me])
            own = _reconstruct(self.shares["self"][me], needed)
            pairs = _reconstruct(self.shares["mask"][me], needed)
            if own is None or pairs is None:
                continue
            secret = masks.mask_secret(pairs)
            assert masks.commitment(own) == entry.commitment
            assert public_key(secret) == entry.mask_key
            assert message.numbers is not None
            total = from_bytes(message.numbers.tobytes(), width) - masks.of_self(own)
            for other in self.shared & self.holders[name] - {me}:
                total -= masks.of_pair(me, secret, entry.mask_key, other, KeysEntry.read(self.entries[other]).mask_key)
            result[name] = reduce(total, width)
        return result

    def keep(self, step: str, name: str, shown: SecureMessage, sent: SecureMessage) -> None:
        """Keeps what the server learns from an answer to a message."""
        self.seen[step][name] = sent
        if step == INPUT:
            self.shared = unpack_members(shown.members, len(self.indices))
        if step != UNMASK:
            return
        assert sent.shares is not None
        survivors = unpack_members(shown.members, len(self.indices))
        for owner, share in zip(sorted(self.shared & self.holders[name]), sent.shares, strict=True):
            kind = "self" if owner in survivors else "mask"
            self.shares[kind][owner][self.indices[name]] = share.tobytes()


def signer_of(name: str) -> Signer:
    key = hashlib.sha256(name.encode()).digest()
    endorsement = endorse(ROSTER_SECRET, name, verification_key(key))
    return Signer(key=key, endorsement=endorsement, roster_key=verification_key(ROSTER_SECRET))


def _reconstruct(held: Mapping[int, bytes], needed: int) -> bytes | None:
    holders = sorted(held)[:needed]
    if len(holders) < needed:
        return None
    weights = weights_at_zero([holder + 1 for holder in holders])
    secret = reconstruct(weights, [int.from_bytes(held[holder], "little") for holder in holders])
    return secret.to_bytes(32, "little")[:31]
