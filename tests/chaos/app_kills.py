"""`make kills`: kills apps with a real `Device` at random moments and checks their state directories and receipts.

python -m chaos.app_kills --kills 200 --seed 1

Front and engine are the real ones and are left alone. After each kill, a copy of the state directory is opened as the
next start would open it: the identity is the device's own, an unsent answer matches its digest, the state can be read.
At the end of a run every receipt is in the store, of an answer that is used or reported once, and the app was notified.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos import counting
from chaos.arena import Arena, Member, Outcome, as_row
from chaos.logged import RECEIPT, read_log
from chaos.run import is_good
from chaos.scenario import Action, Blow, Scenario
from support.forked import Forked

from fleetdistill.errors import FleetDistillError
from fleetdistill.state.directory import Storage
from fleetdistill.wire import payload as wire
from fleetdistill.wire.digests import Algorithm, digest

KILLS_OF_A_RUN = 25
MAX_LIFE_SECONDS = 1.5
_TORCH_EVERY = 4
"""One run of so many trains with FedDKC and torch; all others count, without torch."""


def scenario(seed: int) -> Scenario:
    """A run in which nothing happens by itself."""
    torch = seed % _TORCH_EVERY == 0
    return Scenario(
        seed=seed,
        method="feddkc" if torch else counting.NAME,
        devices=tuple(f"device-{number:02d}" for number in range(2 if torch else 3)),
        rounds=40 if torch else 12,
        steps=1 if torch else 2,
        quorum=0.3,
        deadline_seconds=20.0,
        lease_seconds=20.0,
        large_share=0.3,
        twice=0.0,
        faulty=0.0,
        blows=(),
        failpoints={},
    )


class KilledApps(Arena):
    """A run whose devices are killed at random moments, in all up to a number of times.

    Args:
        wanted: The run.
        work: An empty folder.
        kills: Largest number of kills.

    Attributes:
        moments: Counts of what the state directories held after the kills.
    """

    def __init__(self, wanted: Scenario, work: Path, kills: int) -> None:
        super().__init__(wanted, work)
        self.left = kills
        self.rng = random.Random(f"kills/{wanted.seed}")
        self.moments = dict.fromkeys(("new", "idle", "unsent answer"), 0)
        self.unreadable: list[str] = []

    def _make_member(self, name: str, forked: Forked, points: tuple[str, ...]) -> Member:
        return _App(name, forked, self) if name in self._wanted.devices else Member(name, forked, points)

    def _strike(self) -> None:
        for member in self._members.values():
            if isinstance(member, _App):
                member.kill_if_due()

    def _end_of_trouble(self) -> None:
        super()._end_of_trouble()
        self.left = 0

    def _outcome(self, wrong: list[str], seconds: float) -> Outcome:
        outcome = super()._outcome(wrong + self.unreadable, seconds)
        for name in self._wanted.devices:
            received = {item.receipt for item in read_log(self._place.log_of(name)) if item.what == RECEIPT}
            noted = self._place.receipts_of(name)
            missing = received - set(noted.read_text().split() if noted.exists() else ())
            outcome.findings.wrong += [f"{name}'s app was not notified of receipt {item}" for item in sorted(missing)]
        outcome.figures |= {f"state after a kill: {what}": count for what, count in self.moments.items()}
        return outcome

    def look_into(self, name: str) -> None:
        """Opens a copy of a device's state directory after a kill."""
        copied = self._place.work / "copied"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(copied)
        try:
            if (self._place.work / name).exists():
                shutil.copytree(self._place.work / name, copied)
            self.moments[held_in(copied, name)] += 1
        except (FleetDistillError, ValueError, KeyError, OSError) as error:
            self.unreadable.append(f"the state of {name} after a kill: {type(error).__name__}: {error}")


class _App(Member):
    """A device's process with the moment at which it is killed."""

    def __init__(self, name: str, forked: Forked, arena: KilledApps) -> None:
        super().__init__(name, forked, ())
        self._arena = arena
        self._life = self._seen = 0
        self._at = 0.0

    def kill_if_due(self) -> None:
        """Chooses a moment for each life, kills the process then, and checks what it left."""
        if self._seen < self.kills:
            self._seen = self.kills
            self._arena.look_into(self.name)
        if self._life < self.forked.lives:
            self._life = self.forked.lives
            self._at = time.monotonic() + self._arena.rng.uniform(0.0, MAX_LIFE_SECONDS)
        if self._arena.left and time.monotonic() >= self._at:
            self._at = float("inf")
            self._arena.left -= self.strike(Blow(0, 0.0, Action.KILL, self.name, 0.0))


def held_in(directory: Path, name: str) -> str:
    """Returns what a state directory holds: `new`, `idle` or `unsent answer`.

    Raises:
        FleetDistillError: A file is damaged.
        ValueError: The identity is another device's, or the answer does not match its digest.
    """
    if not (directory / "device.json").exists():
        return "new"
    with contextlib.closing(Storage(directory)) as storage:
        if storage.load_identity()["device"] != name:
            raise ValueError("its identity is another device's")
        _check_state(storage.load("state.safetensors"))
        pending = storage.outbox.pending()
        if storage.put_aside:
            raise ValueError(storage.put_aside[0].text)
        if pending is None:
            return "idle"
        with storage.outbox.answer() as payload:
            data = wire.pieces(payload.source, 0, payload.data_bytes)
            if digest(payload.parts, data, Algorithm.SHA256 if payload.sha256 else Algorithm.BLAKE3) != payload.digest:
                raise ValueError("its answer does not match its digest")
        _check_state(storage.load("outbox/candidate.safetensors"))
        return "unsent answer"


def _check_state(data: bytes | None) -> None:
    """Reads a state: JSON of a counting device, safetensors of one with torch."""
    if data is None:
        return
    if data.startswith(b"{"):
        json.loads(data)
        return
    from fleetdistill.state.state_file import unpack_state

    unpack_state(data)


def run_until(kills: int, seed: int, out: Path) -> Iterator[dict[str, Any]]:
    """Makes runs until so many apps were killed; yields each run's row."""
    done = 0
    while done < kills:
        work = out / str(seed)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        arena = KilledApps(scenario(seed), work, min(KILLS_OF_A_RUN, kills - done))
        row = as_row(asyncio.run(arena.fight()))
        done, seed = done + row["kills"], seed + 1
        if is_good(row):
            shutil.rmtree(work, ignore_errors=True)
        yield row


def last_line(rows: list[dict[str, Any]]) -> str:
    """The sums of all runs."""
    sums = {name: sum(row[name] for row in rows) for name in ("kills", "acknowledged")}
    lost, doubled, wrong = (sum(len(row[name]) for row in rows) for name in ("lost", "doubled", "wrong"))
    states = {
        name.partition(": ")[2]: sum(row["figures"][name] for row in rows)
        for name in rows[0]["figures"]
        if name.startswith("state after a kill")
    }
    held = ", ".join(f"{count} {name}" for name, count in states.items())
    text = f"kills: {sums['kills']} kills ({held}), {sums['acknowledged']} acknowledged"
    return f"{text}, {lost} lost, {doubled} doubled, {wrong} other findings"


def main() -> int:
    """Entry point of `make kills`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")
    parser.add_argument("--out", type=Path, default=Path("out/kills"))
    given = parser.parse_args()
    rows = []
    for row in run_until(given.kills, given.seed, given.out.resolve()):
        rows.append(row)
        text = f"{row['kills']} kills, {row['acknowledged']} acknowledged, {row['seconds']:.0f} s"
        print(f"seed {row['seed']} ({row['method']}): {text}", flush=True)
        for finding in (*row["lost"], *row["doubled"], *row["wrong"]):
            print(f"    {finding}", flush=True)
    print(last_line(rows))
    return 0 if all(is_good(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
