"""What a seed decides: the fleet, the terms of the run, and what befalls it when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fleetdistill.state.failpoints import FAILPOINTS

FRONT = "front"
ENGINE = "engine"
POSTGRES = "postgres"
FEDDKC_EVERY = 10
"""One seed in so many runs FedDKC with torch; all others count."""

_POINTS_OF = {FRONT: ("front.", "blob.", "disk."), ENGINE: ("engine.", "blob.", "disk."), "": ("device.", "disk.")}


class Action(StrEnum):
    """What the harness does to a process, or to the server's disk."""

    KILL = "kill"
    STOP = "stop"  # SIGSTOP, and SIGCONT after a while
    DAMAGE = "damage"  # a byte of the newest answer on the server's disk is changed
    CUT = "cut"  # no connection of the target for a while; of the front: of nobody
    FILL = "fill"  # the disk of server and devices is full for a while
    SET_CLOCK = "set-clock"  # the target's time of day is changed
    SUSPEND = "suspend"  # both clocks of the target jump forward, as after a suspension of the machine
    RESTART = "restart"  # PostgreSQL crashes and starts again


_ON_ONE_MACHINE = {
    Action.KILL: 5,
    Action.STOP: 2,
    Action.DAMAGE: 1,
    Action.CUT: 1,
    Action.FILL: 1,
    Action.SET_CLOCK: 1,
    Action.SUSPEND: 1,
}
"""How often each action comes, relative to the others."""
_MAX_SECONDS = 300.0
_LONG_STOP = 0.1
"""Share of the stops that last up to a minute."""


@dataclass(frozen=True)
class Blow:
    """One thing that happens.

    Attributes:
        after: Receipts that the devices have had in all by then.
        wait_seconds: Time from then on.
        action: What.
        target: `front`, `front-2` and so on, `engine`, `postgres`, or a device's name.
        seconds: How long a process stands still, a connection is cut or a disk is full; how far a clock is set.
    """

    after: int
    wait_seconds: float
    action: Action
    target: str
    seconds: float


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        seed: What all of it is made from.
        method: `counting` or `feddkc`.
        devices: Their names.
        rounds, steps: Of the run; asks of a counting round.
        quorum, deadline_seconds, lease_seconds: As in run.toml.
        large_share: Part of the counting answers that has several chunks.
        twice: Part of the uploads that are sent a second time.
        faulty: Part of the connections that meet a fault.
        blows: What befalls the processes, in order.
        failpoints: For each process and each of its first lives where it kills itself.
        fronts: Names of the fronts.
        max_seconds: How long the run may take.
    """

    seed: int
    method: str
    devices: tuple[str, ...]
    rounds: int
    steps: int
    quorum: float
    deadline_seconds: float
    lease_seconds: float
    large_share: float
    twice: float
    faulty: float
    blows: tuple[Blow, ...]
    failpoints: dict[str, tuple[str, ...]]
    fronts: tuple[str, ...] = (FRONT,)
    max_seconds: float = _MAX_SECONDS


def beyond_one_machine(seed: int) -> Scenario:
    """A scenario of several fronts over PostgreSQL, which crashes twice, and an object store; each front is killed."""
    rng = random.Random(f"beyond/{seed}")
    devices = tuple(f"device-{number:02d}" for number in range(6))
    fronts = (FRONT, "front-2", "front-3")
    uploads, rounds, steps = len(devices) * 4 * 2, 4, 2
    crashes = [
        Blow(after, rng.uniform(0, 0.3), Action.RESTART, POSTGRES, 0.0) for after in (uploads // 4, uploads // 2)
    ]
    kills = [_blow_on(rng, target, uploads, Action.KILL) for target in (*fronts, *fronts, ENGINE)]
    stops = [_blow_on(rng, rng.choice(fronts), uploads, Action.STOP)]
    return Scenario(
        seed=seed,
        method="counting",
        devices=devices,
        rounds=rounds,
        steps=steps,
        quorum=0.5,
        deadline_seconds=30.0,  # long, so that a busy machine completes the run
        lease_seconds=15.0,
        large_share=0.2,
        twice=0.2,
        faulty=0.3,
        blows=tuple(sorted([*crashes, *kills, *stops], key=lambda blow: blow.after)),
        failpoints={name: _failpoints(rng, name) for name in (*fronts, ENGINE, *devices)},
        fronts=fronts,
    )


def _blow_on(rng: random.Random, target: str, uploads: int, action: Action) -> Blow:
    return Blow(rng.randint(0, int(0.7 * uploads)), rng.uniform(0, 0.1), action, target, rng.uniform(0.1, 1.0))


def scenario(seed: int, length: int = 1) -> Scenario:
    """What happens with this seed, with so many times as many rounds, blows and failpoints."""
    rng = random.Random(f"chaos/{seed}")
    torch = seed % FEDDKC_EVERY == 0
    devices = tuple(f"device-{number:02d}" for number in range(rng.randint(2, 3) if torch else rng.randint(8, 12)))
    rounds, steps = (rng.randint(2, 3), 1) if torch else (rng.randint(3, 6), rng.randint(1, 3))
    rounds *= length
    uploads = len(devices) * rounds * steps
    return Scenario(
        seed=seed,
        method="feddkc" if torch else "counting",
        devices=devices,
        rounds=rounds,
        steps=steps,
        quorum=0.5 if torch else rng.choice((0.3, 0.5, 2 / 3, 0.8)),
        deadline_seconds=20.0 if torch else rng.choice((1.0, 2.0, 5.0)),
        lease_seconds=rng.choice((1.0, 2.0, 5.0)),
        large_share=rng.choice((0.05, 0.2)),
        twice=rng.choice((0.0, 0.1, 0.3)),
        faulty=rng.choice((0.0, 0.4, 0.8)),
        blows=_blows(rng, devices, uploads, length),
        failpoints={name: _failpoints(rng, name, length) for name in (FRONT, ENGINE, *devices)},
        max_seconds=_MAX_SECONDS * length,
    )


def _blows(rng: random.Random, devices: Sequence[str], uploads: int, length: int) -> tuple[Blow, ...]:
    """The first is a kill and comes early, so that it meets its target in any case."""
    first = _blow(rng, devices, rng.randint(0, min(5, uploads // 4)), Action.KILL)
    latest = max(int(0.8 * uploads), 2)
    others = [
        _blow(rng, devices, rng.randint(1, latest), rng.choices(*zip(*_ON_ONE_MACHINE.items(), strict=True))[0])
        for _ in range(rng.randint(1, 5) * length)
    ]
    return tuple(sorted([first, *others], key=lambda blow: blow.after))


def _blow(rng: random.Random, devices: Sequence[str], after: int, action: Action) -> Blow:
    target = rng.choice((FRONT, ENGINE, rng.choice(devices)))
    if action is Action.CUT and target == ENGINE:  # the engine has no connections
        target = FRONT
    return Blow(after, rng.uniform(0, 0.1), action, target, _seconds(rng, action, target in devices))


def _seconds(rng: random.Random, action: Action, of_device: bool) -> float:
    if action is Action.SET_CLOCK:
        return rng.choice((-1, 1)) * rng.choice((60.0, 3600.0, 86_400.0)) * rng.uniform(0.5, 1.5)
    if action is Action.SUSPEND:
        return rng.choice((5.0, 60.0, 3600.0)) * rng.uniform(0.5, 1.5)
    if action is Action.STOP and rng.random() < _LONG_STOP:
        return rng.uniform(5.0, 60.0)
    return rng.uniform(0.1, 3.0 if of_device or action in (Action.CUT, Action.FILL) else 1.0)


def _failpoints(rng: random.Random, target: str, length: int = 1) -> tuple[str, ...]:
    """A process dies by its own hand in some of its first lives; later ones are spared, so that the run ends."""
    kind = target.partition("-")[0]
    points = sorted(point for point in FAILPOINTS if point.startswith(_POINTS_OF.get(kind, _POINTS_OF[""])))
    share = 0.4 if kind in (FRONT, ENGINE) else 0.1
    return tuple(
        f"{rng.choice(points)}=kill@{rng.choice((1, 1, 2, 3, 5, 8, 20))}" if rng.random() < share else ""
        for _ in range(2 * length)
    )
