"""`make run-kills`: pauses and resumes runs and kills commands, front, supervisor and engines at random moments.

python -m chaos.run_changes --kills 100 --seed 1

After each kill the command is repeated, and the supervisor started again if it was killed. Every run must end with the
checkpoint of a run that nobody disturbed, with no round short, and with every receipt of its devices used once. A
quarter of the kills hit the front while it answers an operator from elsewhere (`chaos.operators`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

from chaos.operators import OperatorKiller
from support.answering import AnsweringFleet
from support.processes import COMMAND, children, free_port, wait_until
from support.serving import ENGINE, FRONT, Served, serve, write_config

from fleetdistill_server.store.store import Store

CHANGED = "changed"
_MAX_SECONDS = 1.0
_KILLS_OF_A_RUN = 20
_ROUNDS = 4
_CHANGING = ("created_at", "queued_at", "paused_at", "engine", "setup")


def server_toml(folder: Path, port: int = 0) -> Path:
    """A server of two engines."""
    path = folder / "server.toml"
    store = json.dumps(str(folder / "store"))
    path.write_text(f"[server]\nlisten = '127.0.0.1:{port}'\nstore = {store}\nengines_at_once = 2\n")
    return path


def summary(store: Store) -> Any:
    """All that a repeated command must leave as it is: runs, rounds and events, without times, tokens and callers."""
    rows = store.database.rows("SELECT * FROM runs ORDER BY created_at, name")
    events = {
        name: [(row.kind, row.text.partition("by ")[0]) for row in store.history.events(name)]
        for name in store.runs.names()
    }
    rounds = {name: [(row.number, row.status) for row in store.runs.rounds(name)] for name in store.runs.names()}
    return [{key: row[key] for key in row if key not in _CHANGING} for row in rows], events, rounds


def checkpoint_of(store: Store) -> bytes:
    """Digest of the run's last checkpoint."""
    row = store.runs.get(CHANGED)
    assert row is not None
    return bytes(row.checkpoint)


class Killer:
    """A served store, two devices, and kills at random moments.

    Attributes:
        kills: How often each kind of process was killed.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder = folder
        self._chance = chance
        self._config = server_toml(folder, free_port())
        self._stack = ExitStack()
        self._log = self._stack.enter_context((folder / "commands.log").open("ab"))
        self._server: Served | None = None
        self.kills = Counter[str]()

    def __enter__(self) -> Self:
        self._serve()
        assert self._server is not None
        self.fleet = self._stack.enter_context(AnsweringFleet(self._server.port(), CHANGED, 2))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._serving.close()

    def kill(self, count: int) -> None:
        """Leads the run and kills so many processes."""
        paused = False
        while sum(self.kills.values()) < count:
            words = ["start" if paused else "pause", CHANGED]
            if not self._has_ended():
                self._kill_one(words)
                paused = not paused
            else:  # repeated commands are refused from now on; processes are killed all the same
                self._kill_one([])
            time.sleep(self._chance.uniform(0, _MAX_SECONDS))

    def repeat(self, words: list[str]) -> None:
        """Runs a command to its end, unless the run has ended."""
        done = subprocess.run(self._command(words), capture_output=True, text=True)
        assert done.returncode == 0 or self._has_ended(), done.stderr

    def rounds(self) -> list[str]:
        """The statuses of the run's rounds; all receipts of the devices are of used answers."""
        with closing(Store.open(self._folder / "store")) as store:
            used = [row.receipt for row in store.asks.uploads(CHANGED) if row.status == "used"]
            heard = [receipt for device in self.fleet.devices for receipt in device.receipts]
            assert set(heard) <= set(used), "an acknowledged answer is lost"
            assert len(used) == len(set(used)) == 2 * len(store.runs.rounds(CHANGED))
            return [row.status for row in store.runs.rounds(CHANGED)]

    def _serve(self) -> None:
        self._serving = ExitStack()
        self._server = self._serving.enter_context(serve(self._config))
        self._server.port()

    def _kill_one(self, words: list[str]) -> None:
        victim = self._chance.choice(["command", "front", "engine", "supervisor"] if words else ["front", "supervisor"])
        command = subprocess.Popen(self._command(words), stdout=self._log, stderr=self._log) if words else None
        time.sleep(self._chance.uniform(0, 0.3))
        if self._kill(victim, command):
            self.kills[victim] += 1
        if command is not None:
            command.wait()
            self.repeat(words)
        assert self._server is not None
        if self._server.process.poll() is not None:
            self._serving.close()
            self._serve()

    def _kill(self, victim: str, command: subprocess.Popen[bytes] | None) -> bool:
        """Kills a process; returns False if there is none of its kind at this moment."""
        assert self._server is not None
        server = self._server.process.pid
        result = {
            "command": lambda: [command.pid] if command is not None and command.poll() is None else [],
            "supervisor": lambda: [server],
            "front": lambda: children(server, FRONT),
            "engine": lambda: children(server, ENGINE),
        }[victim]()
        with contextlib.suppress(ProcessLookupError):
            for pid in result[:1]:
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def _command(self, words: list[str]) -> list[str]:
        return [*COMMAND, "runs", *words, "--store", str(self._folder / "store")]

    def _has_ended(self) -> bool:
        with closing(Store.open(self._folder / "store")) as store:
            return store.runs.existing(CHANGED).status == "finished"


def _play(folder: Path, seed: int, kills: int) -> tuple[bytes, Counter[str]]:
    """Plays a run with so many kills; returns its checkpoint and the kills."""
    with Killer(folder, random.Random(seed)) as killer:
        write_config(folder, run_name=CHANGED, run_rounds=_ROUNDS)
        created = [*COMMAND, "runs", "create", str(folder / "run.toml"), "--start", "--store", str(folder / "store")]
        subprocess.run(created, check=True, stdout=subprocess.DEVNULL)
        killer.kill(kills)
        killer.repeat(["start", CHANGED])
        with closing(Store.open(folder / "store")) as store:
            wait_until(lambda: store.runs.existing(CHANGED).status == "finished", "the run to finish")
            checkpoint = checkpoint_of(store)
    assert killer.rounds() == ["closed"] * _ROUNDS
    return checkpoint, killer.kills


def _kill_for_operators(folder: Path, seed: int, kills: int) -> None:
    """Kills the front so often during an operator's calls; an AssertionError tells what was not as it must be."""
    folder.mkdir()
    with OperatorKiller(folder, random.Random(seed)) as killer:
        killer.kill(kills)
    print(f"{kills} kills during an operator's calls {dict(killer.kills)}; each change has its entry", flush=True)


def main() -> int:
    """Runs until there were so many kills; returns 1 if a run ended otherwise than the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    total, number, seed, differ = Counter[str](), 0, given.seed, 0
    for_operators = given.kills // 4
    of_runs = given.kills - for_operators
    with tempfile.TemporaryDirectory() as name:
        _kill_for_operators(Path(name) / "operators", seed, for_operators)
        (Path(name) / "0").mkdir()
        expected, _ = _play(Path(name) / "0", seed, 0)
        while sum(total.values()) < of_runs:
            number += 1
            folder = Path(name) / str(number)
            folder.mkdir()
            checkpoint, kills = _play(folder, seed + number, min(_KILLS_OF_A_RUN, of_runs - sum(total.values())))
            total += kills
            differ += checkpoint != expected
            print(
                f"run {number}: {dict(kills)}, {'as undisturbed' if checkpoint == expected else 'DIFFERS'}", flush=True
            )
    print(f"{sum(total.values())} kills {dict(total)} in {number} runs; {differ} runs ended otherwise than undisturbed")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
