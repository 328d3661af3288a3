"""The processes of a chaos run: the real front, the real engine and the SDK's own `Device`, forked from one that has
imported everything, since an import of torch for each of them would take an hour.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chaos import clocks, counting
from chaos.logged import Log, LoggedLink
from chaos.mutations import MUTATIONS
from chaos.scenario import ENGINE
from support.forked import Forked, Pipe
from support.open_device import open_device

from fleetdistill import COLUMNS, Device, Event, FleetDistillError
from fleetdistill.state import failpoints
from fleetdistill_server.store.location import Location

if TYPE_CHECKING:
    from fleetdistill_lab.simulation.spec.device import DeviceSpec


@dataclass(frozen=True)
class Place:
    """Where a run lives, for its processes.

    Attributes:
        work: Its folder.
        mutation: What is broken on purpose in front and engine, empty for nothing.
        location: Where the store is; None for files in its directory.
        environment: Variables of the server's processes.
    """

    work: Path
    mutation: str = ""
    location: Location | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def disk(self) -> Path:
        """What server and devices write to; a file system of its own if it is to be full now and then."""
        return self.work / "disk"

    @property
    def store(self) -> Path:
        """The server's store."""
        return self.disk / "store"

    def clock_of(self, name: str) -> Path:
        """The offsets of a process's clocks."""
        return self.work / f"{name}.clock"

    def store_of(self, name: str) -> Path:
        """The store's directory on the host of a process: beyond one machine, every front has its own."""
        return self.store if self.location is None or name == ENGINE else self.work / f"store-of-{name}"

    def config_of(self, name: str) -> Path:
        """The run.toml of a front or engine."""
        return self.work / f"{name}.toml"

    def pipe(self, name: str) -> Path:
        """The wake-up pipe that a server process reads."""
        return self.work / f"{name}.fifo"

    def log_of(self, name: str) -> Path:
        """What a device sent and had acknowledged."""
        return self.work / f"{name}.jsonl"

    def receipts_of(self, name: str) -> Path:
        """The receipts of which a device's app was notified, one a line."""
        return self.work / f"{name}.receipts"

    def output_of(self, name: str) -> Path:
        """What a process said."""
        return self.work / f"{name}.log"


@dataclass(frozen=True)
class DeviceTerms:
    """What a device process needs to know.

    Attributes:
        name: Its id.
        run: Name of the run.
        port: Where its proxy listens.
        seed: Of the run.
        twice: Part of its uploads that it sends a second time.
        spec: Model and data of a device with torch; None for a counting one.
    """

    name: str
    run: str
    port: int
    seed: int
    twice: float
    spec: DeviceSpec | None = None


def front(place: Place, name: str, port: int) -> Forked:
    """A front, on this port in all its lives."""
    return Forked(_run_front, place, name, port)


def engine(place: Place) -> Forked:
    """The engine."""
    return Forked(_run_engine, place)


def device(place: Place, terms: DeviceTerms) -> Forked:
    """A device."""
    return Forked(_run_device, place, terms)


def make_pipes(place: Place) -> tuple[Pipe, Pipe]:
    """The wake-up pipes of front and engine, which stay open as long as they are held."""
    return Pipe(place.pipe("front")), Pipe(place.pipe("engine"))


def _run_front(points: str, place: Place, name: str, port: int) -> None:
    os.environ.update(place.environment)
    from fleetdistill_server.front.process import main

    _begin(name, points, place)
    ends = f"{_open(place.pipe('front'))},{_open(place.pipe('engine'))}"
    _main(main, ["front", str(place.config_of(name)), "--port", str(port), f"--wakeups={ends}"])


def _run_engine(points: str, place: Place) -> None:
    os.environ.update(place.environment)
    from chaos import counting_server

    from fleetdistill_server.engine.process import main

    _begin("engine", points, place)
    counting_server.register()
    ends = f"{_open(place.pipe('engine'))},{_open(place.pipe('front'))}"
    _main(main, ["engine", str(place.config_of(ENGINE)), f"--wakeups={ends}"])


def _run_device(points: str, place: Place, terms: DeviceTerms) -> None:
    from fleetdistill_server.service.processes import end_with_parent

    _begin(terms.name, points, place)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    end_with_parent()
    rng = random.Random(f"{terms.seed}/{terms.name}/{os.getpid()}")
    link = LoggedLink(f"127.0.0.1:{terms.port}", Log(place.log_of(terms.name)), rng, terms.twice)
    try:
        made = _make_device(place, terms, link)
        signal.signal(signal.SIGTERM, lambda number, frame: made.stop())
        with made:
            made.run()
    except FleetDistillError as error:
        print(f"{terms.name}: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _make_device(place: Place, terms: DeviceTerms, link: LoggedLink) -> Device:
    state_dir = place.disk / terms.name

    def note(event: Event) -> None:
        if "receipt" in event.values:
            with place.receipts_of(terms.name).open("a") as file:
                file.write(event.values["receipt"] + "\n")

    if terms.spec is None:
        counting.register()
        return open_device(
            server=link,
            worker=counting.CountingWorker,
            state_dir=state_dir,
            run=terms.run,
            device_id=terms.name,
            allow=COLUMNS,
            export="never",
            on_event=note,
        )
    from fleetdistill_lab.simulation.spec.arrays import load_arrays
    from fleetdistill_lab.simulation.spec.device import build_device_model

    spec, data = terms.spec, load_arrays(terms.spec.data_file)
    return open_device(
        server=link,
        model=lambda: build_device_model(spec, data[0].shape[1:]),
        data=data,
        test_data=load_arrays(spec.test_file),
        state_dir=state_dir,
        run=terms.run,
        device_id=terms.name,
        allow=COLUMNS,
        export="never",
        on_event=note,
    )


def _begin(name: str, points: str, place: Place) -> None:
    """What every process does first: says what it says into a file of its own, and arms what it shall die of."""
    output = os.open(place.output_of(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    clocks.follow(place.clock_of(name), since_boot=random.Random(os.getpid()).uniform(0, 1e6))
    failpoints.switch_on(points)
    if place.mutation and name in MUTATIONS[place.mutation]:
        MUTATIONS[place.mutation][name]()


def _main(main: Callable[[], int], arguments: list[str]) -> None:
    sys.argv = arguments
    sys.exit(main())


def _open(pipe: Path) -> int:
    return os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
