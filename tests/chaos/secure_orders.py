"""A server that asks the devices of secure sums in any order: whatever it asks, a device never gives too much.

It begins several sums of one round and of others, mixes keys, boxes, lists and signatures of all that it has heard, and
asks for gradients in between. Of each device it must not get

- both kinds of share of one device from one holder in a sum, nor enough of both kinds,
- without noise, its masked statistics in a second sum once it may be in a first,
- with noise, its masked statistics in a sum that is not in its privacy ledger, or of which two share one entry,
- more gradients than the run says, or any before it has given its shares.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from chaos.secure_sums import random_head
from support.secure_fleet import SecureFleet

from fleetdistill.errors import CannotAnswer, WireError
from fleetdistill.knowledge import SecureEntry, SecureMessage
from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, UNMASK
from fleetdistill.secure.session import Roster, pack_members, session_id, session_threshold
from fleetdistill.state.privacy_ledger import PrivacyLedger

ROUNDS = NONCES = 2
ASTRAY, CHANGE = 0.15, 0.02
"""How often it asks another step than the next, and goes on to another sum."""
HEADS = 3
"""Heads that the server knows; a run allows two gradients."""


@dataclass
class Heard:
    """What the server has of one sum.

    Attributes:
        keys: Entry and endorsement by device.
        boxes: Boxes by list of devices, sender and receiver.
        signatures: By list of devices, of those that sent boxes and of those in the sum, and by device.
        inputs: Devices that have sent their masked statistics.
        shared: Devices that have given their shares.
        shares: Kinds of share by list of devices, owner and holder.
    """

    keys: dict[str, bytes] = field(default_factory=dict)
    boxes: dict[tuple[tuple[str, ...], str], dict[str, bytes]] = field(default_factory=dict)
    signatures: dict[tuple[Any, ...], dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    inputs: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    shares: dict[tuple[Any, ...], set[str]] = field(default_factory=lambda: defaultdict(set))


class Adversary:
    """Asks at random, and keeps what it hears.

    Args:
        fleet: Devices in sums, with two gradients if they are without noise.
        rng: Of what is asked.

    Attributes:
        answered: Number of answers by step.
        wrong: What it should not have got.
    """

    def __init__(self, fleet: SecureFleet, rng: random.Random) -> None:
        self._fleet, self._rng = fleet, rng
        self._sums = {(number, nonce): Heard() for number in range(1, ROUNDS + 1) for nonce in range(NONCES)}
        self._lists: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # what a device was last asked with, by step
        self._gradients: dict[str, set[int]] = defaultdict(set)
        self._has_noise = fleet.config.guarantee is not None
        last = [] if self._has_noise else ["refine"]
        self._order = [KEYS, SHARES, INPUT, *([CHECK] if fleet.config.signs_keys else []), UNMASK, *last]
        self._asked: Counter[tuple[tuple[int, int], str]] = Counter()
        self._done: dict[tuple[tuple[int, int], str], set[str]] = defaultdict(set)
        self._current = (1, 0)
        self.answered: Counter[str] = Counter()
        self.wrong: list[str] = []

    def ask(self) -> None:
        """Asks one device one step of one sum: mostly the next one of the sum that it is at, else any."""
        which, name, step = self._current, *self._next(self._current)
        if self._rng.random() < ASTRAY:
            which, name = self._rng.choice(list(self._sums)), self._rng.choice(self._fleet.names)
            step = self._rng.choice(self._order)
        if self._rng.random() < CHANGE:
            self._current = self._rng.choice(list(self._sums))
        self._asked[which, name] += 1
        try:
            if step == "refine":
                self._refine(which, name)
            else:
                getattr(self, f"_{step}")(which, self._sums[which], name)
        except (CannotAnswer, WireError):
            return
        self._done[which, name].add(step)
        self.answered[step] += 1

    def _next(self, which: tuple[int, int]) -> tuple[str, str]:
        """The device that was asked least in a sum, and its next step."""
        name = min(self._fleet.names, key=lambda one: self._asked[which, one])
        left = [step for step in self._order if step not in self._done[which, name]]
        return name, (left or self._order[-1:])[0]

    def _answer(self, which: tuple[int, int], name: str, step: str, message: SecureMessage) -> Any:
        parts = self._fleet.answer(name, step, {"session": message}, which[0])
        (sent,) = parts.values()
        return sent

    def _secure_keys(self, which: tuple[int, int], heard: Heard, name: str) -> None:
        message = SecureMessage(parameters=self._fleet.parameters().pack(), nonce=bytes([which[1]]) * 32)
        sent = self._answer(which, name, KEYS, message).keys.tobytes()
        if heard.keys.setdefault(name, sent) != sent:
            self.wrong.append(f"{name} has two keys in one sum")

    def _secure_shares(self, which: tuple[int, int], heard: Heard, name: str) -> None:
        names = self._some(sorted(heard.keys), name)
        size = 196 if self._fleet.config.signs_keys else 100
        keys = [heard.keys[one] for one in names]
        digest = self._roster(which, heard, names).digest
        entries = [
            SecureEntry(index=index, device=one, keys=own[:size], endorsement=own[size:])
            for index, (one, own) in enumerate(zip(names, keys, strict=True))
        ]
        message = SecureMessage(entries=entries, roster=digest, devices=len(names))
        rows = self._answer(which, name, SHARES, message).boxes
        others = [one for one in names if one != name]
        heard.boxes[names, name] = dict(zip(others, (row.tobytes() for row in rows), strict=True))
        self._lists[SHARES, which, name] = (names,)

    def _secure_input(self, which: tuple[int, int], heard: Heard, name: str) -> None:
        (names,) = self._lists.get((SHARES, which, name), ((),))
        senders = self._some([one for one in names if (names, one) in heard.boxes], name)
        rows = [heard.boxes[names, one][name] for one in senders if one != name]
        members = pack_members((names.index(one) for one in senders), len(names))
        boxes = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 80)
        self._answer(which, name, INPUT, SecureMessage(members=members, boxes=boxes))
        heard.inputs.add(name)
        self._lists[INPUT, which, name] = (names, senders)
        if self._has_noise:
            self._check_ledger(which, name)
            return
        for other, one in self._sums.items():
            if other != which and name in (one.inputs if self._fleet.config.signs_keys else one.shared):
                self.wrong.append(f"{name} may be in two sums, {other} and {which}")

    def _check_ledger(self, which: tuple[int, int], name: str) -> None:
        releases = PrivacyLedger(self._fleet.files(name)).releases
        sent = [other for other, one in self._sums.items() if name in one.inputs]
        if sorted(release.sum for release in releases) != sorted(self._sid(other).hex() for other in sent):
            self.wrong.append(f"{name} has sent to {sent}, and has {len(releases)} releases in its ledger")
        if {release.mu for release in releases} - {self._fleet.config.guarantee.mu}:
            self.wrong.append(f"{name} has charged another sum than {which}")

    def _secure_check(self, which: tuple[int, int], heard: Heard, name: str) -> None:
        names, senders = self._lists.get((INPUT, which, name), ((), ()))
        survivors = self._some([one for one in senders if one in heard.inputs], name)
        members = pack_members((names.index(one) for one in survivors), len(names))
        sent = self._answer(which, name, CHECK, SecureMessage(members=members))
        heard.signatures[names, senders, survivors][names.index(name)] = sent.signature.tobytes()
        self._lists[CHECK, which, name] = (survivors,)

    def _secure_unmask(self, which: tuple[int, int], heard: Heard, name: str) -> None:
        names, senders = self._lists.get((INPUT, which, name), ((), ()))
        (survivors,) = self._lists.get((CHECK, which, name), (self._some(list(senders), name),))
        signed = heard.signatures[names, senders, survivors]
        entries = [SecureEntry(index=index, signature=own) for index, own in sorted(signed.items())]
        members = pack_members((names.index(one) for one in survivors), len(names))
        entries = entries if self._fleet.config.signs_keys else []
        rows = self._answer(which, name, UNMASK, SecureMessage(members=members, entries=entries)).shares
        heard.shared.add(name)
        for owner, _ in zip(sorted(senders), rows, strict=True):
            kind = "self" if owner in survivors else "mask"
            heard.shares[names, owner, kind].add(name)
            self._check_shares(heard, names, owner)

    def _check_shares(self, heard: Heard, names: tuple[str, ...], owner: str) -> None:
        of_self, of_masks = heard.shares[names, owner, "self"], heard.shares[names, owner, "mask"]
        if of_self & of_masks:
            self.wrong.append(f"{of_self & of_masks} gave both kinds of share of {owner}")
        if self._fleet.config.signs_keys and min(len(of_self), len(of_masks)) >= session_threshold(len(names), 0):
            self.wrong.append(f"both secrets of {owner} are known")

    def _refine(self, which: tuple[int, int], name: str) -> None:
        number = self._rng.randrange(HEADS)
        self._fleet.refine(name, random_head(self._fleet, number), which[0], [0] * self._rng.randrange(2))
        self._gradients[name].add(number)
        if not any(name in one.shared for one in self._sums.values()):
            self.wrong.append(f"{name} sent a gradient before its shares")
        if len(self._gradients[name]) > self._fleet.config.refine_steps:
            self.wrong.append(f"{name} sent gradients at {len(self._gradients[name])} heads")

    def _some(self, names: Sequence[str], name: str) -> tuple[str, ...]:
        """Mostly all of them, else without one or two others."""
        left_out = self._rng.sample(list(names), min(len(names), self._rng.choice([0] * 12 + [1, 2])))
        return tuple(sorted(one for one in names if one == name or one not in left_out))

    def _roster(self, which: tuple[int, int], heard: Heard, names: Sequence[str]) -> Roster:
        size = 196 if self._fleet.config.signs_keys else 100
        return Roster(self._sid(which), tuple(names), tuple(heard.keys[one][:size] for one in names))

    def _sid(self, which: tuple[int, int]) -> bytes:
        nonce, block = bytes([which[1]]) * 32, self._fleet.parameters().pack()
        return session_id("sums", which[0], 1, nonce, self._fleet.digest(), block)


def play(fleet: SecureFleet, seed: int, asks: int) -> Adversary:
    """Asks so often."""
    adversary = Adversary(fleet, random.Random(f"orders/{seed}"))
    for _ in range(asks):
        adversary.ask()
    return adversary
