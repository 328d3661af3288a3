"""`make sums`: makes secure sums while asks and answers get lost and come again, and looks for wrong or opened ones.

python -m chaos.secure_sums --sessions 1000 --seed 1

Each session has 3 to 12 devices with their state directories, every device is started anew for each ask, and keys are
unsigned and of a roster in turns, with noise and without in pairs of sessions; every third unsigned one is a ring of 13
to 24 devices. A sum must equal the plain sum of its
members' frozen inputs, number for number, and be made exactly if enough devices were heard in every step. From all that
the server has received, with or without a sum, it may not compute one device's input; a repeated ask must get the same
bytes. After each sum without noise its devices sum a gradient at two heads: it must be number for number that of all of
them if all are heard, and as far from that of those who are heard as random numbers are if not. At the end the fleet is
asked for a second sum: no device that has given its shares may be in it, since it was not told that the first failed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support.secure_fleet import SecureFleet, Tamper, untouched

from fleetdistill.errors import CannotAnswer, QuorumNotReached, SecureSumError, SumRefusedError
from fleetdistill.knowledge import LinearHead, SecureMessage
from fleetdistill.methods.classstats_secure.config import COMPLETE, RING
from fleetdistill.methods.classstats_secure.encoding import gradient_numbers
from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, STEPS, UNMASK
from fleetdistill.secure.primitives import lift, reduce
from fleetdistill.secure.session import session_threshold
from fleetdistill.wire.codec import encode

LOSSES = (0.0, 0.02, 0.06, 0.2)
HEADS = 2
REPEATED = 0.1
LOST = "the answer was lost"
ALONE = "too few devices sent shares"
"""Of a device in a ring whose neighbours are gone; it is no member then."""


@dataclass
class Session:
    """What happened in one session.

    Attributes:
        seed: Of the session.
        devices: Number of devices.
        keys: Who vouches for the devices' keys.
        graph: Who exchanges shares with whom.
        method: classstats_secure or, without noise, classstats_summed.
        members: Number of devices in the sum; 0 without a sum.
        lost: Number of lost asks and answers.
        repeated: Number of asks that came twice.
        gradients: Number of sums of gradients.
        wrong: What must not be.
    """

    seed: int
    devices: int
    keys: str
    graph: str
    method: str
    members: int = 0
    lost: int = 0
    repeated: int = 0
    gradients: int = 0
    wrong: list[str] = field(default_factory=list)


class Weather:
    """Loses asks and answers of a fleet, and repeats asks."""

    def __init__(self, fleet: SecureFleet, rng: random.Random, after: Tamper) -> None:
        loss = rng.choice(LOSSES)
        places = [(step, name) for step in STEPS for name in fleet.names]
        lost = [place for place in places if rng.random() < loss]
        self.lost_asks = {place for place in lost if rng.random() < 0.5}
        self.lost_answers = set(lost) - self.lost_asks
        self.repeated = {place for place in places if rng.random() < REPEATED}
        self.unequal: list[str] = []
        self._fleet, self._after = fleet, after
        self._first: dict[tuple[str, str], bytes] = {}

    def down(self, step: str, name: str, message: SecureMessage) -> SecureMessage:
        """Lets a device answer an ask whose answer the server does not get, before it is asked again."""
        if (step, name) in self.repeated:
            with suppress(SumRefusedError):  # it refuses again
                (sent,) = self._fleet.answer(name, step, {"session": message}).values()
                self._first[step, name] = encode({"session": sent}).sha256
        return message

    def up(self, step: str, name: str, sent: SecureMessage) -> SecureMessage:
        """Compares an answer with the one to the same ask before; raises CannotAnswer if it is lost."""
        again = encode({"session": sent}).sha256
        if self._first.get((step, name), again) != again:
            self.unequal.append(f"{name} answered {step!r} with other bytes when it was asked again")
        if (step, name) in self.lost_answers:
            raise CannotAnswer(LOST)
        return self._after(step, name, sent)

    def heard(self, step: str, names: list[str]) -> list[str]:
        """The devices whose answer to a step arrives."""
        return [name for name in names if (step, name) not in self.lost_asks | self.lost_answers]

    def expected(self) -> list[str]:
        """The members of the sum, once it was tried; none if too few devices are heard in a step."""
        fleet = self._fleet
        agreed, indices = fleet.parameters(), fleet.indices
        roster = self.heard(KEYS, fleet.names)
        if len(roster) < agreed.least:
            return []
        needed = session_threshold(len(roster), agreed.degree)
        shared = self.heard(SHARES, roster)

        def holders(name: str, present: list[str]) -> int:
            return sum(indices[other] in fleet.holders[name] for other in present)

        members = [name for name in self.heard(INPUT, shared) if holders(name, shared) >= needed]
        signed = self.heard(CHECK, members) if fleet.config.signs_keys else members
        last = self.heard(UNMASK, signed)
        enough = min(len(shared), len(members)) >= agreed.least
        return members if enough and all(holders(name, last) >= needed for name in shared) else []


def play(directory: Path, seed: int, after: Tamper = untouched) -> Session:
    """Makes one sum.

    Args:
        directory: An empty folder.
        seed: Even seeds have unsigned keys, odd ones a roster; half of both have noise.
        after: Changes an answer that arrives.
    """
    rng = random.Random(f"sums/{seed}")
    method = ("classstats_secure", "classstats_summed")[seed // 2 % 2]
    is_ring = seed % 6 == 0
    devices = rng.randint(13, 24) if is_ring else rng.randint(3, 12)
    graph: dict[str, Any] = {"graph": RING, "max_in_sum": devices} if is_ring else {}
    session = Session(seed, devices, ("unsigned", "roster")[seed % 2], RING if is_ring else COMPLETE, method)
    refine: dict[str, Any] = {"refine": "gradients", "refine_steps": HEADS} if method == "classstats_summed" else {}
    fleet = SecureFleet(directory, devices, method=method, keys=session.keys, **graph, **refine)
    weather = Weather(fleet, rng, after)
    try:
        result = fleet.sum(lost=weather.lost_asks, down=weather.down, up=weather.up)
        session.members = len(result.devices)
        expected = weather.expected()
        total = lift(result.total, fleet.parameters().width)
        if not np.array_equal(total, fleet.plain_sum(result.devices)):
            session.wrong.append("the sum is not the plain sum of its members")
        if list(result.devices) != sorted(expected):
            session.wrong.append(f"the sum has the members {', '.join(result.devices)}, not {', '.join(expected)}")
        for number in range(HEADS if refine else 0):
            sum_gradients(fleet, result.devices, random_head(fleet, seed + number), rng, session)
    except (QuorumNotReached, SecureSumError) as error:
        if weather.expected():
            session.wrong.append(f"there is no sum: {error}")
    session.wrong += [f"the server can open the input of {name}" for name in fleet.opened(fleet.sid)]
    session.wrong += weather.unequal
    known = (LOST, ALONE) if is_ring else (LOST,)
    refused = {place: reason for place, reason in fleet.refused.items() if not reason.startswith(known)}
    session.wrong += [f"{name} refused {step!r}: {reason}" for (step, name), reason in refused.items()]
    session.wrong += second_sum(fleet)
    session.lost = len(weather.lost_asks | weather.lost_answers)
    session.repeated = len(weather.repeated)
    return session


def second_sum(fleet: SecureFleet) -> list[str]:
    """Asks for a second sum, and returns which of its devices may be in the first."""
    gave_shares = set(fleet.seen[UNMASK])
    try:
        again = fleet.sum(number=2)
    except (QuorumNotReached, SecureSumError):
        return []
    return [f"{name} is in a second sum" for name in again.devices if name in gave_shares]


def sum_gradients(
    fleet: SecureFleet, members: Sequence[str], head: LinearHead, rng: random.Random, session: Session
) -> None:
    """Sums the gradient of a finished sum's devices, some of which may not be heard."""
    loss, masked = rng.choice(LOSSES) / 2, {}
    for name in members:
        with suppress(SumRefusedError):  # of a device that has not given its shares
            masked[name] = fleet.refine(name, head)
            if rng.random() < REPEATED and not np.array_equal(fleet.refine(name, head), masked[name]):
                session.wrong.append(f"{name} masked its gradient otherwise when it was asked again")
    heard = [name for name in masked if rng.random() >= loss]
    if not heard:
        return
    parameters = fleet.parameters()
    plain = np.sum([gradient_numbers(fleet.gradient(name, head), parameters) for name in heard], axis=0)
    summed = np.asarray(np.sum([masked[name] for name in heard], axis=0, dtype=np.uint64))
    rest = np.abs(lift(reduce(summed, parameters.width), parameters.width) - plain)
    if len(heard) == len(members):
        session.gradients += 1
        if rest.any():
            session.wrong.append("the sum of the gradients is not the plain sum of its devices'")
    elif np.median(rest) < 2 ** (8 * parameters.width - 6):
        session.wrong.append(f"something is known of the gradients of {len(heard)} of {len(members)} devices")


def random_head(fleet: SecureFleet, seed: int) -> LinearHead:
    """A head for the fleet's classes and features."""
    parameters, generator = fleet.parameters(), np.random.default_rng(seed)
    return LinearHead(
        labels=list(range(parameters.classes)),
        counts=np.full(parameters.classes, 20, np.int32),
        mean=np.zeros(parameters.dimensions, np.float16),
        weights=generator.normal(size=(parameters.classes, parameters.dimensions + 1)).astype(np.float16),
    )


def play_all(sessions: int, seed: int, out: Path) -> Iterator[Session]:
    """Makes so many sums with successive seeds; keeps the state directories of wrong ones."""
    for number in range(seed, seed + sessions):
        directory = out / str(number)
        shutil.rmtree(directory, ignore_errors=True)
        session = play(directory, number)
        if not session.wrong:
            shutil.rmtree(directory)
        yield session


def last_line(sessions: list[Session]) -> str:
    """The sums of all sessions."""
    made = [session for session in sessions if session.members]
    members, asked = sum(session.members for session in made), sum(session.devices for session in made)
    lost, repeated = sum(session.lost for session in sessions), sum(session.repeated for session in sessions)
    wrong = sum(len(session.wrong) for session in sessions)
    gradients = sum(session.gradients for session in sessions)
    text = f"sums: {len(sessions)} sessions, {len(made)} sums of {members} of {asked} devices"
    text = f"{text}, {len(sessions) - len(made)} without a sum; {gradients} sums of gradients"
    return f"{text}; {lost} lost, {repeated} repeated; {wrong} findings"


def main() -> int:
    """Entry point of `make sums`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first session")
    parser.add_argument("--out", type=Path, default=Path("out/sums"))
    given = parser.parse_args()
    done = []
    for session in play_all(given.sessions, given.seed, given.out.resolve()):
        done.append(session)
        for finding in session.wrong:
            kind = f"{session.devices} devices, {session.keys}, {session.graph}, {session.method}"
            print(f"seed {session.seed} ({kind}): {finding}", flush=True)
    print(last_line(done))
    return 1 if any(session.wrong for session in done) else 0


if __name__ == "__main__":
    sys.exit(main())
