"""The session `demo` of the published test vectors, and a whole session in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fleetdistill.secure.member import Member
from fleetdistill.secure.primitives import wrap
from fleetdistill.secure.session import Parameters, Roster, neighbours, session_id, session_threshold
from fleetdistill_server.methods.secure.secure_sum import Unmasked, unmask

WIDTH = 6
NONCE, CONTRACT = bytes(range(32)), bytes(range(32, 64))
PARAMETERS = Parameters(
    mode=0,
    width=WIDTH,
    keys=0,
    classes=3,
    dimensions=2,
    grid_bits=8,
    clip_bits=5,
    count_bits=0,
    row_bits=20,
    least=4,
    honest=0,
    most=5,
    degree=0,
)
SID = session_id("demo", 7, 1, NONCE, CONTRACT, PARAMETERS.pack())
INPUTS = [np.array([(7 * i + 3 * j) % 11 - 5 for j in range(12)]) for i in range(5)]


def demo_members() -> list[Member]:
    return [Member(bytes([i + 1]) * 32, wrap(x, WIDTH), SID, WIDTH, 100 + i) for i, x in enumerate(INPUTS)]


@dataclass
class Session:
    """All messages of a session whose devices may stop to answer.

    Attributes:
        members: The devices; `device-0` and so on.
        degree: Neighbours of each; 0 for all.
        lost: By step (2 shares, 3 input, 5 unmask) the devices that do not answer it, nor any later one.
    """

    members: Sequence[Member]
    sid: bytes = SID
    width: int = WIDTH
    degree: int = 0
    lost: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        devices = len(self.members)
        digits = len(str(devices - 1))
        ids = tuple(f"device-{index:0{digits}}" for index in range(devices))
        keys = tuple(member.keys_entry(name) for member, name in zip(self.members, ids, strict=True))
        self.roster = Roster(self.sid, ids, keys)
        self.threshold = session_threshold(devices, self.degree)
        self.near = [neighbours(self.sid, devices, self.degree)(index) for index in range(devices)]
        self.entries = [{other: keys[other] for other in near} for near in self.near]
        self.sealed = {
            index: member.boxes(index, self.entries[index], self.roster.digest, self.threshold)
            for index, member in enumerate(self.members)
            if index not in self.lost.get(2, ())
        }
        self.shared = frozenset(self.sealed)
        present = [index for index in self.sealed if index not in self.lost.get(3, ())]
        self.masked = {
            index: self.members[index].masked_numbers(
                index, self.entries[index], self.roster.digest, self.received(index)
            )
            for index in present
        }
        self.survivors = frozenset(self.masked)
        self.answers = {index: self.answer(index) for index in present if index not in self.lost.get(5, ())}

    def received(self, index: int) -> dict[int, bytes]:
        """Boxes for a device by sender."""
        return {other: self.sealed[other][index] for other in self.near[index] if other in self.sealed}

    def answer(self, index: int, survivors: frozenset[int] | None = None) -> dict[int, bytes]:
        """A device's shares for unmasking."""
        return self.members[index].unmasking_shares(
            index,
            self.entries[index],
            self.roster.digest,
            self.threshold,
            self.received(index),
            self.survivors if survivors is None else survivors,
        )

    def unmask(self) -> Unmasked:
        """What the server finds."""
        return unmask(self.roster, self.degree, self.shared, self.masked, self.answers, self.width)
