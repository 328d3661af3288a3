"""Kills of the front at random moments while an operator changes runs over mTLS; part of `make run-kills`.

After each kill the call is repeated until it is answered, and then once more. No change may be without an entry in the
list of operators' calls, every answered call has one, and the run is as the last answered call left it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from support.processes import PATIENCE_SECONDS, children, free_port
from support.secured import make_pki
from support.serving import FRONT, serve, write_config

from fleetdistill.errors import FleetDistillError, LinkError
from fleetdistill_server.operations.client import connect
from fleetdistill_server.operations.source import Source
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.service.creation import NewRun
from fleetdistill_server.store.records import OperatorCall
from fleetdistill_server.store.states import ACTIVE, RunStatus
from fleetdistill_server.store.store import Store

_CREATING, _STARTED, _ABSENT = "fleetdistill_server.engine.creation", "started", "absent"
_FIRST, _CLONE = "first", "clone"


@dataclass(frozen=True)
class Call:
    """A call, which gets the run's name, and the state in which it leaves the run."""

    name: str
    make: Callable[[Source, str], object]
    leaves: str
    seconds: float = 0.03
    """The kill is up to this much later, so that it is mostly before the answer."""


def _change(status: RunStatus, leaves: str) -> Call:
    return Call("ChangeRun", lambda source, run: source.change(run, status), leaves)


_START, _PAUSE = _change(RunStatus.RUNNING, _STARTED), _change(RunStatus.PAUSED, RunStatus.PAUSED)
_STOP = _change(RunStatus.STOPPED, RunStatus.STOPPED)
_DELETE = Call("DeleteRun", lambda source, run: source.delete(run), _ABSENT, 0.05)
_NEXT: dict[str, list[Call]] = {
    RunStatus.CREATED: [_START, _STOP, _DELETE],
    _STARTED: [_PAUSE, _STOP, _DELETE],
    RunStatus.PAUSED: [_START, _STOP, _DELETE],
    RunStatus.STOPPED: [_START, _DELETE],
}
"""Calls that are possible in a state of a run."""


class OperatorKiller:
    """A served store with TLS, an operator elsewhere, and kills of the front while it answers.

    Args:
        folder: Its folder `store` may have a store.
        chance: Chooses calls and moments.
        kept: Created runs of the store, which are led but not deleted; without them runs are created, cloned and
            deleted too, which takes a process with torch each time.

    Attributes:
        kills: How often a process was killed before the call was answered, by the call.
    """

    def __init__(self, folder: Path, chance: random.Random, kept: Sequence[str] = ()) -> None:
        self._folder, self._store, self._chance = folder, folder / "store", chance
        self._address = f"127.0.0.1:{free_port()}"
        self._stack = ExitStack()
        self._answered = Counter[str]()
        self._states: dict[str, str] = dict.fromkeys(kept, RunStatus.CREATED) or dict.fromkeys(
            (_FIRST, _CLONE), _ABSENT
        )
        self._kept = kept
        self.kills = Counter[str]()

    def __enter__(self) -> Self:
        authority = make_pki(self._folder / "pki")
        authority.issue_person(Role.OPERATOR, "olga", 1.0, self._folder / "olga")
        self._server = self._stack.enter_context(serve(self._config())).process.pid
        self._repeat(Call("", lambda source, _: source.runs(), ""), "")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def kill(self, count: int) -> None:
        """Makes calls, until the front was killed during so many of them."""
        while sum(self.kills.values()) < count:
            run = self._chance.choice(list(self._states))
            call = self._next(run)
            before, made = self.state(run), self._made(call.name)
            self._kill_during(call, run)
            assert self.state(run) == before or self._made(call.name) > made, f"{call.name} has no entry"
            for _ in range(2):
                self._repeat(call, run)
                self._answered[call.name] += 1
                result = self.state(run)
                assert result == call.leaves, f"{run} is {result} after {call.name}, expected {call.leaves}"
            self._states[run] = call.leaves
            assert {state: self.state(state) for state in self._states} == self._states
            assert self._done() >= self._answered, "an answered call has no entry"

    def state(self, run: str) -> str:
        """The state of a run as the calls leave it."""
        with closing(Store.open(self._store)) as store:
            status = store.runs.status(run) or _ABSENT
        return _STARTED if status in ACTIVE else status

    def _next(self, run: str) -> Call:
        """A call that is possible now."""
        state = self._states[run]
        if state != _ABSENT:
            return self._chance.choice([item for item in _NEXT[state] if item.leaves != _ABSENT or not self._kept])
        start = self._chance.random() < 0.5
        leaves = _STARTED if start else RunStatus.CREATED
        if run == _CLONE and self._states[_FIRST] != _ABSENT:
            clone = NewRun(settings={"run": {"name": run}}, start=start, clone_of=_FIRST)
            return Call("CreateRun", lambda source, _: source.create(clone), leaves, 2.0)
        settings = tomllib.loads(write_config(self._folder, run_name=run).read_text())
        del settings["server"]
        new = NewRun(settings=settings, start=start)
        return Call("CreateRun", lambda source, _: source.create(new), leaves, 2.0)

    def _kill_during(self, call: Call, run: str) -> None:
        """Makes a call and kills the front, or the process that creates a run, before the call is answered or not."""
        fronts = children(self._server, FRONT)
        calling = threading.Thread(target=self._try, args=(call, run))
        calling.start()
        time.sleep(self._chance.uniform(0, call.seconds))
        creates = call.name == "CreateRun" and self._chance.random() < 0.5
        victims = (creates and [pid for front in fronts for pid in children(front, _CREATING)]) or fronts
        self.kills[call.name] += calling.is_alive() and bool(victims)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        calling.join()

    def _try(self, call: Call, run: str) -> None:
        with contextlib.suppress(FleetDistillError), connect(self._address, self._folder / "olga") as source:
            call.make(source, run)

    def _repeat(self, call: Call, run: str) -> None:
        """Makes a call until it is answered."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                with connect(self._address, self._folder / "olga") as source:
                    call.make(source, run)
                return
            except LinkError:
                assert time.monotonic() < until, f"no front answers {call.name}"
                time.sleep(0.05)

    def _made(self, name: str) -> int:
        """The number of entries of a call, whatever its result."""
        return sum(row.call == name and not row.is_refused for row in self._entries())

    def _done(self) -> Counter[str]:
        """The number of entries with the result `done` of each call."""
        return Counter(row.call for row in self._entries() if row.result.startswith("done"))

    def _entries(self) -> list[OperatorCall]:
        with closing(Store.open(self._store)) as store:
            return store.operator_calls.newest(before=None, call="", text="olga", most=100_000)

    def _config(self) -> Path:
        settings = {"listen": self._address, "enrol_listen": "127.0.0.1:0", "torch_device": "cpu"}
        settings |= {"pki": str(self._folder / "pki"), "store": str(self._store)}
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        path = self._folder / "server.toml"
        path.write_text("\n".join(["[server]", *lines, "engines_at_once = 1", "keep_free_bytes = 0"]))
        return path
