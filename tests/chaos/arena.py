"""Runs one scenario to its end: real processes, fault proxies between them, killed, stopped and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos import counting, members
from chaos.checker import Findings, Key, check
from chaos.clocks import Offsets
from chaos.fault_proxy import FaultProxy, seeded_faults
from chaos.logged import SENT, ReceiptCounter, read_log
from chaos.members import DeviceTerms, Place
from chaos.scenario import ENGINE, Action, Blow, Scenario
from chaos.services import Services
from support.forked import Forked

from fleetdistill.wire import payload as wire
from fleetdistill.wire.digests import Algorithm, digest, has_blake3
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.service.processes import EXIT_CANNOT_LISTEN, EXIT_STORE_AWAY
from fleetdistill_server.store.file_blobs import FileBlobs
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.store import Store

RUN = "chaos"
_LOOK_SECONDS = 0.05
_MAX_FAILURES = 5
_DISK_BYTES = 1 << 30
_AFTERMATH_SECONDS = 5.0
"""Time after a full disk in which processes may end with an error of it; supervisor and apps start them again."""
_MAX_END_SECONDS = 5.0
_MAX_FAULT_SECONDS = 3.0
_FURTHEST_BYTE = 4 << 20


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        seed, method: Of the scenario.
        findings: Of the checker; `wrong` has what the harness saw, too.
        kills: Processes that died of SIGKILL.
        faults: Faults of connections that really happened, by kind.
        seconds: How long it took.
        figures: Counts for the summary.
    """

    seed: int
    method: str
    findings: Findings
    kills: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    figures: dict[str, int] = field(default_factory=dict)


class Member:
    """One process with the lives that it has had."""

    def __init__(self, name: str, forked: Forked, points: tuple[str, ...]) -> None:
        self.name = name
        self.forked = forked
        self.kills = 0
        self.failures: list[int] = []
        self.done = False
        self._points = points
        self._start_at = 0.0
        self._continue_at = math.inf

    def look_after(self, rng: random.Random) -> None:
        """Starts it if it is due, notes how it died, and lets a stopped one go on."""
        now = time.monotonic()
        if self._continue_at <= now:
            self.go_on()
        process = self.forked.process
        if self.done or (process is not None and process.is_alive()):
            return
        if process is not None and self._start_at == math.inf:
            self._note_end(process.exitcode)
            self._start_at = now + rng.uniform(0.0, 0.3)
        if not self.done and now >= self._start_at:
            lives = self.forked.lives
            self.forked.start(self._points[lives] if lives < len(self._points) else "")
            self._start_at = math.inf

    def _note_end(self, code: int | None) -> None:
        self._continue_at = math.inf
        if code == -signal.SIGKILL:
            self.kills += 1
        elif code == 0:
            self.done = True
        elif code is not None:
            self.failures.append(code)

    def strike(self, blow: Blow) -> bool:
        """Lets a blow happen; False if there is no process to meet just now."""
        if blow.action is Action.KILL:
            return self._signal(signal.SIGKILL)
        if not self._signal(signal.SIGSTOP):
            return False
        self._continue_at = time.monotonic() + blow.seconds
        return True

    def go_on(self) -> None:
        """Ends a stop."""
        self._continue_at = math.inf
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> bool:
        """False if there is no process, or it ends by itself just now."""
        process = self.forked.process
        if process is None or not process.is_alive() or process.pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
            return True
        return False

    def terminate(self) -> None:
        """Asks the process to end."""
        self.go_on()
        if self.forked.process is not None:
            self.forked.process.terminate()


class Disk:
    """A folder, with a small file system of its own where it is to be full now and then.

    Args:
        folder: The folder; made here.
        own: Whether the disk will be filled. Mounting needs root; without it, nothing fills the disk.

    Attributes:
        troubled_until: Until when processes may fail for lack of space.
    """

    def __init__(self, folder: Path, *, own: bool) -> None:
        self._folder, self._filler = folder, folder / "filler"
        self.troubled_until = 0.0
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
        self._mounted = own and subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def fill(self) -> bool:
        """Takes all space that is left; returns whether it could."""
        if not self._mounted:
            return False
        self.troubled_until = math.inf
        with self._filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                free = os.statvfs(self._folder).f_bavail * os.statvfs(self._folder).f_frsize
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), max(free, 4096))
        return True

    def clear(self) -> None:
        """Gives the space back."""
        if self.troubled_until == math.inf:
            self.troubled_until = time.monotonic() + _AFTERMATH_SECONDS
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Turns the file system into a plain folder with its files."""
        self.clear()
        if self._mounted:
            kept = self._folder.with_suffix(".kept")
            shutil.copytree(self._folder, kept, symlinks=True)
            subprocess.run(["umount", str(self._folder)], check=True)
            self._folder.rmdir()
            kept.rename(self._folder)
            self._mounted = False


class Arena:
    """One run of one scenario. `fight` it once.

    Args:
        wanted: What is to happen.
        work: An empty folder.
        mutation: What is broken in the server on purpose.
        services: What the server needs of other machines; None for a server on one.
    """

    def __init__(self, wanted: Scenario, work: Path, mutation: str = "", services: Services | None = None) -> None:
        self._wanted = wanted
        self._services = services
        self._place = Place(work, mutation) if services is None else services.place(work)
        self._rng = random.Random(f"arena/{wanted.seed}")
        self._config, self._specs = _prepare(wanted, work)
        self._blows = list(wanted.blows)
        self._proxies: dict[str, FaultProxy] = {}
        self._receipts = ReceiptCounter([self._place.log_of(name) for name in wanted.devices])
        self._damaged: set[bytes] = set()
        self._disk = Disk(self._place.disk, own=any(blow.action is Action.FILL for blow in wanted.blows))
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self.happened: Counter[str] = Counter()
        self._due: list[tuple[float, Blow]] = []
        self.forgiven = 0

    async def fight(self) -> Outcome:
        """Runs it to its end and checks what it left behind."""
        began = time.monotonic()
        wrong: list[str] = []
        async with AsyncExitStack() as stack:
            stack.callback(self._disk.close)
            self._begin()
            pipes = members.make_pipes(self._place)
            await self._open_proxies(stack)
            self._members = self._make_members()
            try:
                await self._play(wrong, began)
            finally:
                self._end_processes()
            del pipes
            return self._outcome(wrong, time.monotonic() - began)

    def _begin(self) -> None:
        """What the supervisor does before it starts any process."""
        for name in (*self._wanted.fronts, ENGINE):
            directory = self._place.store_of(name)
            set_location(directory, self._place.location or Location())
            server = self._config.server.model_copy(update={"store": str(directory)})
            self._place.config_of(name).write_text(as_toml(self._config.model_copy(update={"server": server})))
        store = Store.open(self._place.store)
        store.runs.begin(self._config.run.name, self._config.fixed_part())
        store.close()

    async def _open_proxies(self, stack: AsyncExitStack) -> None:
        self._ports = {name: _free_port() for name in self._wanted.fronts}
        for name in self._wanted.devices:
            seed = f"{self._wanted.seed}/{name}"
            faults_of = seeded_faults(seed, self._wanted.faulty, _MAX_FAULT_SECONDS, _FURTHEST_BYTE)
            proxy = FaultProxy(*self._ports.values(), faults_of=faults_of)
            self._proxies[name] = await stack.enter_async_context(proxy)

    def _make_members(self) -> dict[str, Member]:
        points = self._wanted.failpoints
        made = {name: members.front(self._place, name, port) for name, port in self._ports.items()}
        made[ENGINE] = members.engine(self._place)
        for name in self._wanted.devices:
            terms = DeviceTerms(
                name,
                self._config.run.name,
                self._proxies[name].port,
                self._wanted.seed,
                self._wanted.twice,
                self._specs.get(name),
            )
            made[name] = members.device(self._place, terms)
        return {name: self._make_member(name, forked, points.get(name, ())) for name, forked in made.items()}

    def _make_member(self, name: str, forked: Forked, points: tuple[str, ...]) -> Member:
        return Member(name, forked, points)

    # --- while it runs

    async def _play(self, wrong: list[str], began: float) -> None:
        calm = False
        while not self._is_over():
            for member in self._members.values():
                member.look_after(self._rng)
            for name in self._wanted.fronts:
                self._move_to_a_free_port(name)
            self._forgive()
            self._strike()
            if self._members[ENGINE].done and not calm:
                calm = True
                self._end_of_trouble()
            if any(len(member.failures) >= _MAX_FAILURES for member in self._members.values()):
                break
            if time.monotonic() - began > self._wanted.max_seconds:
                left = ", ".join(member.name for member in self._members.values() if not member.done)
                wrong.append(f"the run was not over after {self._wanted.max_seconds:g} s; it waits for {left}")
                break
            await asyncio.sleep(_LOOK_SECONDS)

    def _is_over(self) -> bool:
        return all(member.done for name, member in self._members.items() if name not in self._wanted.fronts)

    def _move_to_a_free_port(self, name: str) -> None:
        """Another process of this machine may have taken the port before the front's first life did."""
        front = self._members[name]
        if EXIT_CANNOT_LISTEN in front.failures:
            front.failures.remove(EXIT_CANNOT_LISTEN)
            self._ports[name] = _free_port()
            front.forked = members.front(self._place, name, self._ports[name])
            for proxy in self._proxies.values():
                proxy.server_ports = tuple(self._ports.values())

    def _forgive(self) -> None:
        """An engine may end while its database is away or locked; the supervisor then starts another one."""
        failures = self._members[ENGINE].failures
        if self._services is not None and failures and self.forgiven < self._services.restarts:
            self.forgiven += 1
            failures.pop()
        while EXIT_STORE_AWAY in failures:  # a front was stopped for long while it wrote
            failures.remove(EXIT_STORE_AWAY)
            self.happened["ends of engines whose database was locked"] += 1
        if time.monotonic() < self._disk.troubled_until:
            for member in self._members.values():
                self.happened["ends of processes at a full disk"] += len(member.failures)
                member.failures.clear()

    def _strike(self) -> None:
        receipts, now = self._receipts.count(), time.monotonic()
        while self._blows and self._blows[0].after <= receipts:
            blow = self._blows.pop(0)
            self._due.append((now + blow.wait_seconds, blow))
        for at, blow in [item for item in self._due if item[0] <= now]:
            if self._happen(blow):
                self._due.remove((at, blow))
        for at, end in [end for end in self._ends if end[0] <= now]:
            self._ends.remove((at, end))
            end()

    def _happen(self, blow: Blow) -> bool:
        """False for a blow that finds nobody and waits until there is."""
        if blow.action is Action.DAMAGE:
            self._damage_newest()
            return True
        if blow.action is Action.RESTART:
            assert self._services is not None
            return self._services.restart()
        if blow.action is Action.CUT:
            self._cut(blow)
        elif blow.action is Action.FILL:
            if not self._disk.fill():
                return True
            self._ends.append((time.monotonic() + blow.seconds, self._disk.clear))
        elif blow.action in (Action.SET_CLOCK, Action.SUSPEND):
            self._set_clock(blow)
        else:
            return self._members[blow.target].strike(blow)
        self.happened[f"times of {blow.action}"] += 1
        return True

    def _cut(self, blow: Blow) -> None:
        named = [self._proxies[blow.target]] if blow.target in self._proxies else list(self._proxies.values())
        for proxy in named:
            proxy.cut()
            self._ends.append((time.monotonic() + blow.seconds, proxy.go_on))

    def _set_clock(self, blow: Blow) -> None:
        path = self._place.clock_of(blow.target)
        offsets = Offsets.read(path)
        offsets.wall += blow.seconds
        offsets.boot += blow.seconds if blow.action is Action.SUSPEND else 0.0
        offsets.write(path)

    def _damage_newest(self) -> None:
        """Changes a byte of the newest answer at rest; whether the engine has read it already is left to chance."""
        sent = {item.sha256 for name in self._wanted.devices for item in read_log(self._place.log_of(name))} - {""}
        blobs = FileBlobs(self._place.store / "blobs")
        newest = max(map(blobs.path_of, map(bytes.fromhex, sent)), key=_changed_at, default=None)
        with contextlib.suppress(OSError):  # none is there, the server deletes it at this moment, or the disk is full
            if newest is not None:
                data, copy = bytearray(newest.read_bytes()), self._place.disk / "damaged"
                data[-1] ^= 1
                copy.write_bytes(data)
                copy.replace(newest)  # what the engine has mapped stays as it was, as do pages in the kernel's cache
                self._damaged.add(bytes.fromhex(newest.stem))

    def _end_of_trouble(self) -> None:
        """The engine is done: from now on all is well, so that every device can hear of it."""
        self._blows.clear()
        self._due.clear()
        self._ends.clear()
        self._disk.clear()
        for proxy in self._proxies.values():
            proxy.calm()
        for member in self._members.values():
            member.go_on()

    def _end_processes(self) -> None:
        everyone = [member for member in self._members.values() if member.forked.is_alive]
        for member in everyone:
            member.terminate()
        until = time.monotonic() + _MAX_END_SECONDS
        for member in everyone:
            assert member.forked.process is not None
            member.forked.process.join(max(until - time.monotonic(), 0.0))
            member.forked.kill()

    # --- afterwards

    def _outcome(self, wrong: list[str], seconds: float) -> Outcome:
        logs = {name: read_log(self._place.log_of(name)) for name in self._wanted.devices}
        store = Store.open(self._place.store)
        try:
            used = _used(store, self._config)
            findings = check(logs, map(asdict, store.asks.uploads(self._config.run.name)), used)
            findings.wrong += wrong + self._failures() + _unfinished(store, self._config)
            findings.wrong += _damaged(store, self._damaged)
            figures = {**_figures(store, self._config), "answers damaged on the disk": len(self._damaged)}
            figures |= dict(self.happened)
            if self._services is not None:
                figures["restarts of PostgreSQL"] = self._services.restarts
            records = [item for log in logs.values() for item in log]
            figures["uploads sent"] = sum(record.what == SENT for record in records)
            figures["uploads resumed at a later byte"] = sum(record.first_byte > 0 for record in records)
        finally:
            store.close()
        everyone = self._members.values()
        kills = sum(member.kills for member in everyone)
        if not kills:
            findings.wrong.append("nothing was killed")
        faults: Counter[str] = Counter()
        for proxy in self._proxies.values():
            faults.update({str(kind): count for kind, count in proxy.occurred.items()})
        return Outcome(self._wanted.seed, self._wanted.method, findings, kills, faults, seconds, figures)

    def _failures(self) -> list[str]:
        return [
            f"{member.name} ended with {code}: {_last_line(self._place.output_of(member.name))}"
            for member in self._members.values()
            for code in member.failures
        ]


def _prepare(wanted: Scenario, work: Path) -> tuple[RunConfig, Mapping[str, Any]]:
    """Configuration of the run, and the specs of devices with torch."""
    run = {"quorum": wanted.quorum, "deadline_seconds": wanted.deadline_seconds}
    server = {"lease_seconds": wanted.lease_seconds, "store": str(Place(work).store), "torch_device": "cpu"}
    if any(blow.action is Action.FILL for blow in wanted.blows):
        server["keep_free_bytes"] = 0  # so that the disk is really full
    if wanted.method == counting.NAME:
        return _counting_config(wanted, run, server), {}
    from support.fleets import SMALL, prepare

    small = replace(SMALL, method=wanted.method, devices=len(wanted.devices), rounds=wanted.rounds, seed=wanted.seed)
    config, specs, _ = prepare(small, work / "data")
    config = config.model_copy(
        update={"run": config.run.model_copy(update=run), "server": config.server.model_copy(update=server)}
    )
    return config, dict(zip(wanted.devices, specs, strict=True))


def _counting_config(wanted: Scenario, run: Mapping[str, Any], server: Mapping[str, Any]) -> RunConfig:
    """Not through `run_config`: only the run's own processes know the method."""
    return RunConfig.model_validate(
        {
            "run": {
                "name": RUN,
                "method": counting.NAME,
                "rounds": wanted.rounds,
                "seed": wanted.seed,
                "min_devices": max(2, len(wanted.devices) // 2),
                **run,
            },
            "contract": {"classes": 2, "input_shape": [1], "knowledge_type": "float32"},
            "method": {"steps": wanted.steps, "large_share": wanted.large_share, "ballast_bytes": 3 << 19},
            "server": server,
        }
    )


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _used(store: Store, config: RunConfig) -> list[Key] | None:
    """What the counting method says that it has used, from the state of its last checkpoint."""
    row = store.runs.get(config.run.name)
    if config.run.method != counting.NAME or row is None or not row.checkpoint:
        return None
    from fleetdistill.state.state_file import unpack_state

    state = unpack_state(store.blobs.get_state(row.checkpoint))
    return [(device, number, step, sha256) for device, number, step, sha256 in state["used"]]


def _unfinished(store: Store, config: RunConfig) -> list[str]:
    run = store.runs.get(config.run.name)
    if run is None:
        return ["the run does not exist"]
    result = str(run.status), run.completed_rounds
    return [] if result == ("finished", config.run.rounds) else [f"the run ended as {result}: {run.reason}"]


def _damaged(store: Store, on_purpose: Container[bytes]) -> list[str]:
    """The answers of the newest closed round of every run are still there, whole but for what was damaged here."""
    damaged = []
    for run in store.runs.all():
        closed = [row.number for row in store.runs.rounds(run.name) if row.status == "closed"]
        for row in store.asks.uploads(run.name):
            if row.status == "used" and row.round == max(closed) and row.sha256 not in on_purpose:
                payload = store.blobs.open(row.sha256)
                algorithm = Algorithm.BLAKE3 if has_blake3() else Algorithm.SHA256
                result = digest(payload.parts, wire.pieces(payload.source, 0, payload.data_bytes), algorithm)
                if result != row.sha256:
                    damaged.append(f"{row.device}'s answer of round {row.round} is damaged in the store")
    return damaged


def _figures(store: Store, config: RunConfig) -> dict[str, int]:
    name = config.run.name
    uploads = Counter(row.status for row in store.asks.uploads(name))
    rounds = Counter(row.status for row in store.runs.rounds(name))
    events = Counter(row.kind for row in store.history.events(name))
    return {
        **{f"uploads {status}": count for status, count in uploads.items()},
        **{f"rounds {status}": count for status, count in rounds.items()},
        **{f"events {kind}": count for kind, count in events.items()},
    }


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-1] if lines else "it said nothing"


def as_row(outcome: Outcome) -> dict[str, Any]:
    """As plain data for the summary."""
    return {
        "seed": outcome.seed,
        "method": outcome.method,
        "acknowledged": outcome.findings.acknowledged,
        "lost": list(outcome.findings.lost.values()),
        "doubled": list(outcome.findings.doubled.values()),
        "wrong": outcome.findings.wrong,
        "kills": outcome.kills,
        "faults": dict(outcome.faults),
        "figures": outcome.figures,
        "seconds": round(outcome.seconds, 1),
    }
