"""A run of the real front, the real engine and two SDK devices, each a process, that is over in a second.

One device keeps out of the first round, which so falls short; its end is the same each time, whoever dies on the way.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from support.collector import app_provider
from support.forked import Forked, Pipe
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS
from support.stores import object_store_environment

from fleetdistill import COLUMNS, Event
from fleetdistill.compute import Compute, Computed
from fleetdistill.device import contact
from fleetdistill.errors import CannotAnswer
from fleetdistill.knowledge import Kind, ModelParameters
from fleetdistill.methods.base import Answer
from fleetdistill.replacement import Replacement
from fleetdistill.state import failpoints
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import load_run_config
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.store import Store

DEVICES = ("d0", "d1")
FRAGILE = DEVICES[0]
"""The device that dies; it also keeps out of the first round."""
_CONFIG = f"""
[run]
name = "{RUN}"
method = "fedavg"
rounds = 3
quorum = 1.0
min_devices = {len(DEVICES)}
[contract]
classes = 10
input_shape = [1, 8, 8]
knowledge_type = "float32"
[model]
extractor = ""
server = ""
device = "digits_cnn_small"
[server]
torch_device = "cpu"
compression = "none"
"""


class ParrotWorker(Compute):
    """Computes for a device without torch: says what it was sent, moved by how often it has answered.

    So an answer whose state is lost, or counts twice, makes another end of the run.
    """

    def __init__(self, name: str, contract: contract_pb2.Contract) -> None:
        super().__init__(contract)
        self._name = name
        self._count = 0

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        return contract_pb2.DeviceProfile(
            samples=3,
            classes=len(self.contract.classes),
            input_shape=self.contract.input_shape,
            model_fingerprint=self.contract.model_fingerprint,
            knowledge_types=[self.contract.knowledge_type],
            allowed_columns=sorted(allow),
        )

    def wanted_payloads(self) -> Sequence[bytes]:
        return [self.contract.initial_weights]

    def take_payload(self, sha256: bytes, parts: Mapping[str, Kind]) -> None:
        raise AssertionError("this worker wants the initial weights alone")

    def load_initial(self, parts: Mapping[str, Kind]) -> None:
        assert parts

    def state(self) -> bytes:
        return json.dumps(self._count).encode()

    delivered_state = state

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        self._count = json.loads(saved)
        self.has_state = True

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        if ask.round == 1 and self._name == FRAGILE:
            raise CannotAnswer("it keeps out of the first round")
        self._count += 1
        moved: dict[str, Kind] = {}
        if ask.step == "train":
            sent = parts["parameters"]
            assert isinstance(sent, ModelParameters)
            by = self._count / 8 + ord(self._name[-1]) / 1024
            values = {name: one + one.dtype.type(by) for name, one in sent.parameters.items()}
            moved = {"parameters": ModelParameters(parameters=values, buffers=sent.buffers)}
        return Computed(Answer(parts=moved, samples=3), self.state(), Replacement(replaced=True), self.state())

    def deliver(self, replacement: Replacement) -> None:
        assert replacement.replaced

    def delivered_model(self) -> Any:
        raise AssertionError("a parrot has no model")

    def export(self, path: Path, number: int) -> Any:
        raise AssertionError("a parrot has no model")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is run.

    Attributes:
        config: run.toml; its last section is [server].
        devices: Ids of the devices.
        worker: Computes for a device, by its id and the contract.
        prepare: Puts into the run's folder what the processes need, and returns further settings of [server].
        options: Of the devices.
        watch: Called in a device's process at each event, with the run's folder and the device's id.
    """

    config: str
    devices: Sequence[str]
    worker: Callable[[str, contract_pb2.Contract], Compute]
    prepare: Callable[[Path], Mapping[str, str]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    watch: Callable[[Path, str], None] | None = None


PARROTS = Scenario(config=_CONFIG, devices=DEVICES, worker=ParrotWorker)


@dataclass(frozen=True)
class Place:
    """Where a run lives, and where its front listens."""

    work: Path
    port: int
    location: Location = field(default_factory=Location)
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of front and engine: where the object store is, and where spans go."""

    @property
    def config(self) -> Path:
        return self.work / "run.toml"

    @property
    def store(self) -> Path:
        return self.work / "store"

    def pipe(self, name: str) -> Path:
        return self.work / f"{name}.fifo"

    def receipts(self, device: str) -> Path:
        """Where a device writes down the receipts that it hears of, one a line."""
        return self.work / f"{device}.receipts"

    def ends(self, own: str, other: str) -> str:
        """Opens the wake-up pipes of front and engine in this process."""
        return ",".join(str(os.open(self.pipe(name), os.O_RDWR | os.O_NONBLOCK)) for name in (own, other))


def _front(points: str, place: Place) -> None:
    from fleetdistill_server.front.process import main

    os.environ.update(place.environment)
    failpoints.switch_on(points)
    sys.argv = ["front", str(place.config), "--port", str(place.port), f"--wakeups={place.ends('front', 'engine')}"]
    sys.exit(main())


def _engine(points: str, place: Place) -> None:
    from fleetdistill_server.engine.process import main

    os.environ.update(place.environment)
    failpoints.switch_on(points)
    sys.argv = ["engine", str(place.config), f"--wakeups={place.ends('engine', 'front')}"]
    sys.exit(main())


def _device(points: str, place: Place, name: str, scenario: Scenario) -> None:
    def note(event: Event) -> None:
        if scenario.watch is not None:
            scenario.watch(place.work, name)
        if "receipt" in event.values:
            with place.receipts(name).open("a") as file:
                file.write(event.values["receipt"] + "\n")

    failpoints.switch_on(points)
    contact.MAX_PAUSE_SECONDS = 0.2  # a front that dies over and over again is not to be waited for longer each time
    provider = app_provider(dict(place.environment))
    device = open_device(
        server=f"127.0.0.1:{place.port}",
        worker=partial(scenario.worker, name),
        state_dir=place.work / name,
        run=RUN,
        device_id=name,
        allow=COLUMNS,
        export="never",
        on_event=note,
        tracer_provider=provider,
        **scenario.options,
    )
    with device:
        device.run()
    if provider is not None:
        provider.shutdown()


@dataclass
class SmallRun:
    """The processes of one run; made by `small_run`.

    Attributes:
        place: Where it lives.
        processes: Front, engine and devices by name.
        points: For a process, the failpoints of its first life, its second, and so on; none after these.
    """

    place: Place
    processes: dict[str, Forked]
    points: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def finish(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Runs to the end; whoever dies of a failpoint is started again at once."""
        until = time.monotonic() + seconds
        while not self._is_over():
            assert time.monotonic() < until, f"after {seconds:g} s the run is not over"
            for name, process in self.processes.items():
                if process.process is None or (not process.is_alive and process.was_killed):
                    self._start(name)
            time.sleep(0.01)

    def _start(self, name: str) -> None:
        process, points = self.processes[name], self.points.get(name, ())
        process.start(points[process.lives] if process.lives < len(points) else "")

    def _is_over(self) -> bool:
        """All but the front, which is never done by itself, have ended well."""
        others = [process for name, process in self.processes.items() if name != "front"]
        return all(other.process is not None and not other.is_alive and not other.was_killed for other in others)

    def kills(self, name: str) -> int:
        """How often a process was killed by a failpoint."""
        return self.processes[name].lives - 1


@contextmanager
def small_run(
    work: Path,
    points: Mapping[str, Sequence[str]] | None = None,
    location: Location | None = None,
    traced: Mapping[str, str] | None = None,
    scenario: Scenario = PARROTS,
) -> Iterator[SmallRun]:
    """Prepares a run in an empty folder; nothing of it lives on after the block.

    With `traced`, the variables of an exporter, all processes record spans.
    """
    work.mkdir()
    variables = {**object_store_environment(), **(traced or {})}
    place = Place(work, _free_port(), location or Location(), tuple(variables.items()))
    set_location(place.store, place.location)
    server = {"store": str(place.store), **asdict(place.location), "traces": "otlp" if traced else "off"}
    server |= scenario.prepare(work) if scenario.prepare is not None else {}
    place.config.write_text(
        scenario.config + "".join(f"{name} = {json.dumps(value)}\n" for name, value in server.items())
    )
    with store_of(place) as store:  # a device that calls before the run is there would be turned away for good
        store.runs.begin(RUN, load_run_config(place.config).fixed_part())
    pipes = [Pipe(place.pipe(name)) for name in ("front", "engine")]
    targets: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
        "front": (_front, (place,)),
        "engine": (_engine, (place,)),
        **{name: (_device, (place, name, scenario)) for name in scenario.devices},
    }
    with ExitStack() as stack:
        processes = {name: Forked(target, *arguments) for name, (target, arguments) in targets.items()}
        for process in processes.values():
            stack.callback(process.kill)
        yield SmallRun(place, processes, points or {})
    del pipes  # until here they are open


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def store_of(place: Place) -> Iterator[Store]:
    """The run's store."""
    store = Store.open(place.store)
    try:
        yield store
    finally:
        store.close()
