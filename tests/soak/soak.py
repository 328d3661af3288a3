"""`make soak`: the real front and engine serve a fleet that never rests; their memory and open files must not grow.

    python -m soak.soak --minutes 30

Devices run the SDK with the torch-free counting method of the chaos runs. They join, leave, stand still, are killed and
come back, and now and then one goes for good and a new one joins. Ends with one line, and with a status other than 0
where the robust slope of a figure, over the uploads after the warm-up, amounts to more than its bound. Growth is held
against work done and not against time, so it does not matter how busy the machine is.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import counting, members
from chaos.members import DeviceTerms, Place
from soak.slope import Point, theil_sen
from support.forked import Forked

from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.service.processes import front_environment
from fleetdistill_server.store.store import Store

RUN = "soak"
MEMORY_BOUND = 6 << 20
"""Bytes that the slope of resident memory may amount to over the measured uploads."""
FILES_BOUND = 5
"""Open files that their slope may amount to over the measured uploads."""
DEVICES = 8
LEASE_SECONDS = 2.0
_WARM_UP = 1 / 5  # of all uploads
_LOOK_SECONDS = 0.05
_MAX_SAMPLE_SECONDS = 3.0
_SHORTEST_SAMPLE_SECONDS = 0.25
_KEPT_ANSWERS = 100


@dataclass(frozen=True)
class Figure:
    """One figure of one process over the measured uploads.

    Attributes:
        name: What it is.
        last: Its last value.
        growth: What its slope amounts to over them.
        bound: What it may amount to.
    """

    name: str
    last: float
    growth: float
    bound: float

    @property
    def is_good(self) -> bool:
        """Within the bound."""
        return self.growth <= self.bound


@dataclass
class Outcome:
    """What a soak found.

    Attributes:
        seconds: The whole time.
        rounds, uploads: Of the whole run.
        figures: Of front and engine.
        wrong: What went wrong beside them.
    """

    seconds: float
    rounds: int
    uploads: int
    figures: list[Figure]
    wrong: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Nothing grew and nothing broke."""
        return not self.wrong and all(figure.is_good for figure in self.figures)

    def line(self) -> str:
        """The last line."""
        shown = "; ".join(f"{figure.name} {_text(figure.last)} {_text(figure.growth, '+')}" for figure in self.figures)
        told = "good" if self.is_good else "; ".join(self.wrong) or "GREW"
        return f"soak: {self.seconds:.0f} s, {self.rounds} rounds, {self.uploads} uploads; {shown}; {told}"


def _text(value: float, sign: str = "") -> str:
    return f"{value / 1e6:{sign}.1f} MB" if abs(value) >= 10_000 else f"{value:{sign}.1f}"


@dataclass(frozen=True)
class Extent:
    """When a soak ends: after so many seconds or uploads, whichever comes first."""

    seconds: float
    uploads: float

    @property
    def pause(self) -> float:
        """Seconds between two looks at front and engine."""
        if math.isinf(self.seconds):
            return _SHORTEST_SAMPLE_SECONDS
        return min(max(self.seconds / 600, _SHORTEST_SAMPLE_SECONDS), _MAX_SAMPLE_SECONDS)


class Churning:
    """One device that comes and goes."""

    def __init__(self, place: Place, number: int, port: int) -> None:
        terms = DeviceTerms(f"device-{number:04}", RUN, port, number, 0.05)
        self._forked = members.device(place, terms)
        self._start_at = 0.0
        self._go_on_at = 0.0

    def look_after(self) -> None:
        """Starts it, or lets it go on, if it is time."""
        now = time.monotonic()
        if self._go_on_at and self._go_on_at <= now:
            self._go_on_at = 0.0
            self._signal(signal.SIGCONT)
        if not self._forked.is_alive and now >= self._start_at:
            self._forked.start()

    def disturb(self, rng: random.Random) -> None:
        """Kills it, makes it leave, or makes it stand still; it comes back."""
        what = rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP))
        self._signal(what)
        self._start_at = time.monotonic() + rng.uniform(0.0, 1.0)
        if what is signal.SIGSTOP:
            self._go_on_at = time.monotonic() + rng.uniform(0.2, 3.0)

    def end(self) -> None:
        """Ends it for good."""
        self._forked.kill()

    def _signal(self, number: signal.Signals) -> None:
        process = self._forked.process
        if process is not None and process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)


class Watched:
    """One server process and its figures over the uploads."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self._folder = Path(f"/proc/{pid}")
        self._memory: list[Point] = []
        self._files: list[Point] = []

    def sample(self, uploads: int) -> None:
        """Looks at it."""
        pages = int((self._folder / "statm").read_text().split()[1])
        self._memory.append((uploads, pages * resource.getpagesize()))
        self._files.append((uploads, len(os.listdir(self._folder / "fd"))))

    def figures(self) -> list[Figure]:
        """Growth of both figures after the warm-up."""
        kinds = (("memory", self._memory, MEMORY_BOUND), ("files", self._files, FILES_BOUND))
        result = []
        for name, points, bound in kinds:
            later = [point for point in points if point[0] >= _WARM_UP * points[-1][0]]
            growth = theil_sen(later) * (later[-1][0] - later[0][0]) if len(later) > 1 else float("inf")
            result.append(Figure(f"{self.name}'s {name}", points[-1][1] if points else 0.0, growth, bound))
        return result


def soak(
    work: Path, *, seconds: float = math.inf, uploads: float = math.inf, seed: int = 1, leak: bool = False
) -> Outcome:
    """Serves a restless fleet for a while and watches front and engine.

    Args:
        work: A folder for the run; it is made anew.
        seconds: How long, warm-up included.
        uploads: How many uploads, warm-up included; it ends with whichever comes first.
        seed: Decides who is disturbed when.
        leak: The front leaks memory and files at every call, so that a test can see that it is found.
    """
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    place, port = Place(work), _free_port()
    place.config_of("engine").write_text(as_toml(_config(place)))
    began = time.monotonic()
    pipes = members.make_pipes(place)
    front, engine = _start_front(place, port, leak), Forked(_run_engine, place)
    engine.start()
    fleet = [Churning(place, number, port) for number in range(DEVICES)]
    try:
        assert engine.process is not None
        assert engine.process.pid is not None
        watched = [Watched("front", front.pid), Watched("engine", engine.process.pid)]

        def serving() -> bool:
            return front.poll() is None and engine.is_alive

        _serve(place, port, watched, fleet, random.Random(f"soak/{seed}"), Extent(seconds, uploads), serving)
        wrong = [] if serving() else ["front or engine ended before time"]
    finally:
        for item in fleet:
            item.end()
        engine.kill()
        front.kill()
        front.wait()
        del pipes
    return _outcome(place, time.monotonic() - began, [figure for item in watched for figure in item.figures()], wrong)


def _serve(
    place: Place,
    port: int,
    watched: list[Watched],
    fleet: list[Churning],
    rng: random.Random,
    extent: Extent,
    serving: Callable[[], bool],
) -> None:
    """Keeps the fleet restless."""
    store = Store.open(place.store)
    began, uploads = time.monotonic(), 0
    next_sample, next_blow, number = began, began + 1.0, len(fleet)
    while (now := time.monotonic()) < began + extent.seconds and uploads < extent.uploads and serving():
        for device in fleet:
            device.look_after()
        if now >= next_sample:
            next_sample, uploads = now + extent.pause, int(store.database.value("SELECT count(*) FROM uploads"))
            for item in watched:
                item.sample(uploads)
        if now >= next_blow:
            next_blow = now + rng.uniform(0.2, 1.5)
            victim = rng.randrange(len(fleet))
            if rng.random() < 0.1:
                fleet[victim].end()
                fleet[victim], number = Churning(place, number, port), number + 1
            else:
                fleet[victim].disturb(rng)
        time.sleep(_LOOK_SECONDS)
    store.close()


def _outcome(place: Place, seconds: float, figures: list[Figure], wrong: list[str]) -> Outcome:
    store = Store.open(place.store)
    try:
        rounds = store.runs.completed_rounds(RUN)
        uploads = len(store.asks.uploads(RUN))
    finally:
        store.close()
    return Outcome(seconds, rounds, uploads, figures, wrong if rounds else [*wrong, "no round was completed"])


def _config(place: Place) -> Any:
    counting.register()
    return run_config(
        {
            "run": {
                "name": RUN,
                "method": counting.NAME,
                "rounds": 2**31,
                "min_devices": DEVICES // 2,
                "quorum": 0.5,
                "deadline_seconds": 2.0,
            },
            "contract": {"classes": 2, "input_shape": [1], "knowledge_type": "float32"},
            "method": {"steps": 2, "large_share": 0.1, "ballast_bytes": 1 << 20},
            "server": {"lease_seconds": LEASE_SECONDS, "store": str(place.store), "torch_device": "cpu"},
        }
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _start_front(place: Place, port: int, leak: bool) -> subprocess.Popen[bytes]:
    """A process of its own from the start, with nothing in it that a server's front would not have."""
    pipes = [os.open(place.pipe(name), os.O_RDWR | os.O_NONBLOCK) for name in ("front", "engine")]
    module = "soak.leaks" if leak else "fleetdistill_server.front"
    serve = [str(place.config_of("engine")), "--port", str(port)]
    try:
        with place.output_of("front").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, *serve, f"--wakeups={pipes[0]},{pipes[1]}"],
                pass_fds=pipes,
                stdout=output,
                stderr=output,
                env=front_environment(),
            )
    finally:
        for end in pipes:
            os.close(end)


def _run_engine(points: str, place: Place) -> None:
    """The counting method keeps the names of all answers, for the checker; here it keeps the latest."""
    from chaos.counting_server import CountingServer

    count = CountingServer.round

    async def count_and_forget(self: CountingServer, cohort: Any) -> None:
        self.used = self.used[-_KEPT_ANSWERS:]
        await count(self, cohort)

    CountingServer.round = count_and_forget  # type: ignore[method-assign]
    members._run_engine(points, place)


def main() -> int:
    """Entry point of `make soak`."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    parser.add_argument("--leak", action="store_true", help="break the front on purpose")
    given = parser.parse_args()
    outcome = soak(given.out.resolve(), seconds=60 * given.minutes, seed=given.seed, leak=given.leak)
    print(outcome.line())
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
