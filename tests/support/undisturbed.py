"""Runs that nothing disturbs, for many tests to compare with: each is played once in a session, by whoever asks first.

The processes of a parallel session share them through a folder.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from support.fleets import RUNS, Prepared, device_files, prepare, record, run_in_memory

from fleetdistill.state.file_lock import lock_file
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class Played:
    """A run that is over; no test may change anything of it.

    Attributes:
        prepared: Its configuration, devices and folder.
        record: As `fleets.record`.
        files: As `fleets.device_files`.
        store: What it left.
    """

    prepared: Prepared
    record: dict[str, Any]
    files: dict[str, bytes]
    store: Store


@dataclass(frozen=True)
class Undisturbed:
    """Plays runs of `RUNS`; the value of the fixture `undisturbed`.

    Attributes:
        folder: Where the runs are, for all processes of the session.
    """

    folder: Path
    _played: dict[Path, Played] = field(default_factory=dict)

    def __call__(self, name: str, rounds: int | None = None, *, durable: bool = False) -> Played:
        """A run over memory, by default with as many rounds as in `RUNS`.

        Only a durable one has devices with state directories, and all payloads in its store: others end with the
        process that played them.
        """
        rounds = rounds or RUNS[name].rounds
        work = self.folder / f"{list(RUNS).index(name)}-{rounds}{'-durable' if durable else ''}"
        if work not in self._played:
            self._played[work] = self._play(work, name, rounds, durable)
        return self._played[work]

    def _play(self, work: Path, name: str, rounds: int | None, durable: bool) -> Played:
        result = work.with_suffix(".pickle")
        with _locked(work.with_suffix(".lock")):
            if not result.exists():
                prepared = prepare(replace(RUNS[name], rounds=rounds), work)
                store = run_in_memory(prepared, durable=durable)
                result.write_bytes(pickle.dumps((prepared, record(store), device_files(prepared))))
                store.close()
        prepared, found, files = pickle.loads(result.read_bytes())
        return Played(prepared, found, files, Store.open(Path(prepared[0].server.store)))


def _locked(path: Path) -> IO[Any]:
    """Waits until no other process plays the run; closing the file lets the next one go on."""
    while (lock := lock_file(path)) is None:
        time.sleep(0.05)
    return lock
