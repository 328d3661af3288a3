"""`make sums`: makes secure sums while asks and answers get lost and come again, and looks for wrong or opened ones.

python -m chaos.secure_sums --sessions 1000 --seed 1

Each session has 3 to 12 devices with their state directories, every device is started anew for each ask, and keys are
unsigned and of a roster in turns, with noise and without in pairs of sessions. A sum must equal the plain sum of its
members' frozen inputs, number for number, and be made exactly if enough devices were heard in every step. From all that
the server has received, with or without a sum, it may not compute one device's input; a repeated ask must get the same
bytes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from support.secure_fleet import SecureFleet, Tamper, untouched

from fleetdistill.errors import CannotAnswer, QuorumNotReached, SecureSumError
from fleetdistill.knowledge import SecureMessage
from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, STEPS, UNMASK
from fleetdistill.secure.primitives import lift
from fleetdistill.secure.session import session_threshold
from fleetdistill.wire.codec import encode

LOSSES = (0.0, 0.02, 0.06, 0.2)
REPEATED = 0.1
LOST = "the answer was lost"


@dataclass
class Session:
    """What happened in one session.

    Attributes:
        seed: Of the session.
        devices: Number of devices.
        keys: Who vouches for the devices' keys.
        method: classstats_secure or, without noise, classstats_summed.
        members: Number of devices in the sum; 0 without a sum.
        lost: Number of lost asks and answers.
        repeated: Number of asks that came twice.
        wrong: What must not be.
    """

    seed: int
    devices: int
    keys: str
    method: str
    members: int = 0
    lost: int = 0
    repeated: int = 0
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
        """The members of the sum; none if too few devices are heard in a step."""
        fleet = self._fleet
        least = fleet.parameters().least
        roster = self.heard(KEYS, fleet.names)
        needed = session_threshold(len(roster), 0)
        shared = self.heard(SHARES, roster)
        members = self.heard(INPUT, shared)
        signed = self.heard(CHECK, members) if fleet.config.signs_keys else members
        enough = min(len(roster), len(members)) >= least and len(shared) >= max(least, needed)
        return members if enough and len(self.heard(UNMASK, signed)) >= needed else []


def play(directory: Path, seed: int, after: Tamper = untouched) -> Session:
    """Makes one sum.

    Args:
        directory: An empty folder.
        seed: Even seeds have unsigned keys, odd ones a roster; half of both have noise.
        after: Changes an answer that arrives.
    """
    rng = random.Random(f"sums/{seed}")
    method = ("classstats_secure", "classstats_summed")[seed // 2 % 2]
    session = Session(seed, rng.randint(3, 12), ("unsigned", "roster")[seed % 2], method)
    fleet = SecureFleet(directory, session.devices, method=method, keys=session.keys)
    weather = Weather(fleet, rng, after)
    expected = weather.expected()
    try:
        result = fleet.sum(lost=weather.lost_asks, down=weather.down, up=weather.up)
        session.members = len(result.devices)
        total = lift(result.total, fleet.parameters().width)
        if not np.array_equal(total, fleet.plain_sum(result.devices)):
            session.wrong.append("the sum is not the plain sum of its members")
        if list(result.devices) != sorted(expected):
            session.wrong.append(f"the sum has the members {', '.join(result.devices)}, not {', '.join(expected)}")
    except (QuorumNotReached, SecureSumError) as error:
        if expected:
            session.wrong.append(f"there is no sum: {error}")
    session.wrong += [f"the server can open the input of {name}" for name in fleet.opened(fleet.sid)]
    session.wrong += weather.unequal
    refused = {place: reason for place, reason in fleet.refused.items() if reason != LOST}
    session.wrong += [f"{name} refused {step!r}: {reason}" for (step, name), reason in refused.items()]
    session.lost = len(weather.lost_asks | weather.lost_answers)
    session.repeated = len(weather.repeated)
    return session


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
    text = f"sums: {len(sessions)} sessions, {len(made)} sums of {members} of {asked} devices"
    return f"{text}, {len(sessions) - len(made)} without a sum; {lost} lost, {repeated} repeated; {wrong} findings"


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
            print(
                f"seed {session.seed} ({session.devices} devices, {session.keys}, {session.method}): {finding}",
                flush=True,
            )
    print(last_line(done))
    return 1 if any(session.wrong for session in done) else 0


if __name__ == "__main__":
    sys.exit(main())
