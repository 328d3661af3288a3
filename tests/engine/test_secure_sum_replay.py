"""Secure sums of SDK devices whose engine or devices die: the sum is that of what the devices have frozen, once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.driving import Drive, run_engine
from engine.fragile import Crash, Fuse
from support.fleets import assert_no_upload_lost, prepare

from fleetdistill import Device, Event
from fleetdistill.device.events import DeviceLock
from fleetdistill.methods.classstats_private.sums import to_wire
from fleetdistill.methods.classstats_secure.encoding import decode
from fleetdistill.methods.classstats_secure.exchange import INPUT, KEYS, SHARES
from fleetdistill.secure.member import Member
from fleetdistill.secure.primitives import from_bytes, lift, reduce
from fleetdistill.secure.session import Parameters
from fleetdistill.state import failpoints
from fleetdistill.state.files import Files
from fleetdistill.state.secure_sessions import SecureSessions
from fleetdistill.state.state_file import unpack_state
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

DEVICES = 3


def wanted(keys: str) -> Simulation:
    return Simulation(
        method="classstats_secure",
        settings={"epsilon": 20.0, "dimensions": 32, "keys": keys},
        devices=DEVICES,
        rounds=1,
        train_limit=400,
        test_limit=20,
        alpha=100.0,
        models=("digits_linear",),
        score="none",
        with_alone=False,
        with_fedavg=False,
    )


def summing(method: str) -> Simulation:
    noise = {"epsilon": 20.0} if method == "classstats_secure" else {}
    return replace(wanted("unsigned"), method=method, settings={**noise, "dimensions": 32}, devices=5)


@dataclass
class Fleet:
    """A store and devices with state directories; a device that dies is started again.

    Attributes:
        frozen: Inputs that the devices have frozen, by id of the sum and device.
        deaths: Number of deaths.
    """

    keys: str
    work: Path
    simulation: Simulation | None = None
    store: Store = field(default_factory=Store.in_memory)
    frozen: dict[bytes, dict[str, bytes]] = field(default_factory=dict)
    deaths: int = 0

    def __post_init__(self) -> None:
        self.config, self.specs, _ = prepare(self.simulation or wanted(self.keys), self.work)
        self.api = DeviceApi(self.store)

    def note_frozen(self) -> None:
        for spec in self.specs:
            session = SecureSessions(Files(Path(spec.state_dir))).open()
            if session is not None:
                known = self.frozen.setdefault(session.sid, {}).setdefault(spec.name, session.numbers)
                assert known == session.numbers, "one input for a sum"

    def assert_right(self) -> None:
        """The merge has one sum: of the inputs that the devices had frozen for it."""
        row = self.store.runs.get(RUN)
        assert row is not None
        assert row.status == "finished"
        state: Any = unpack_state(self.store.blobs.get_state(row.checkpoint))
        ((name, (part, _)),) = state["parts"].items()
        (sid,) = (one for one in self.frozen if one.hex().startswith(name.removeprefix("sum ")))
        members = [self.frozen[sid][device] for device in state["members"]]
        assert len(members) == DEVICES
        assert {item.status for item in self.store.asks.uploads(RUN)} <= {"used", "reported"}  # of short rounds
        parameters = parameters_of(self.config)
        width = parameters.width
        total = reduce(np.sum([from_bytes(one, width) for one in members], axis=0, dtype=np.uint64), width)
        expected = to_wire(decode(lift(total, width), parameters), part["mu"], discrete=True)
        for field_name in ("counts", "sums", "second_moment"):
            assert np.array_equal(part[field_name].numpy(), getattr(expected, field_name)), field_name
        assert_no_upload_lost(self.store)


def parameters_of(config: RunConfig) -> Parameters:
    method: Any = config.method_config()
    parameters: Parameters = method.parameters(
        10, method.dimensions, least=method.fewest(DEVICES), honest=method.honest(DEVICES)
    )
    return parameters


class Restarting:
    """A device that is started again after it died."""

    def __init__(self, fleet: Fleet, spec: DeviceSpec) -> None:
        self._fleet, self._spec = fleet, spec
        self._device: Device | None = None

    def step(self, wait_seconds: float) -> None:
        if self._device is None:
            self._device = make_device(self._spec, MemoryLink(self._fleet.api))
        try:
            self._device.step(wait_seconds)
        except DeviceDied:
            self._fleet.deaths += 1
            self.close()

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None


class DeviceDied(BaseException):
    """The device's process dies at a failpoint."""


@contextlib.contextmanager
def devices_of(fleet: Fleet) -> Iterator[list[Restarting]]:
    devices = [Restarting(fleet, spec) for spec in fleet.specs]
    try:
        yield devices
    finally:
        for device in devices:
            device.close()


def run_fleet(fleet: Fleet, blows_at: int = -1) -> int:
    """Runs until the end, with a second engine if the first one dies; returns the number of its steps."""
    fuse = Fuse(blows_at)
    with devices_of(fleet) as devices:
        with contextlib.suppress(Crash):
            run_engine(fleet.store, fleet.config, Drive(devices, fuse, on_wait=fleet.note_frozen))
        if blows_at > 0:
            run_engine(fleet.store, fleet.config, Drive(devices, on_wait=fleet.note_frozen))
    return fuse.touched


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("keys", ["unsigned", "certificates", "roster"])
def test_the_engine_may_die_at_every_step_of_a_sum(keys: str, tmp_path: Path) -> None:
    undisturbed = Fleet(keys, tmp_path / "undisturbed")
    steps = run_fleet(undisturbed)
    undisturbed.assert_right()
    for moment in range(1, steps + 1, 2):
        fleet = Fleet(keys, tmp_path / str(moment))
        run_fleet(fleet, blows_at=moment)
        fleet.assert_right()
        assert len(fleet.frozen) == 1, "the sum goes on with the stored answers"
        fleet.store.close()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("method", ["classstats_secure", "classstats_summed"])
def test_a_sum_is_kept_when_nobody_gets_the_class_space(method: str, tmp_path: Path) -> None:
    """The round falls short after the sum, and one device does not come back: no second sum shows the difference."""
    fleet = Fleet("unsigned", tmp_path / "work", summing(method))
    run = fleet.config.run.model_copy(update={"deadline_seconds": 4.0, "max_short_rounds": 2})
    fleet.config = fleet.config.model_copy(update={"run": run})
    with devices_of(fleet) as devices:
        drive = Drive(devices)

        def leave() -> None:
            fleet.note_frozen()
            number = fleet.store.runs.open_number(RUN)
            made = any(event.kind == "secure-sum" for event in fleet.store.history.events(RUN))
            if number == 1:
                drive.away = set(range(5)) if made else set()
            else:
                drive.away = {4} if made else set()

        drive.on_wait = leave
        run_engine(fleet.store, fleet.config, drive)
    row = fleet.store.runs.get(RUN)
    assert row is not None
    assert row.status == "finished"
    assert len(fleet.frozen) == 1, "no device has begun a second sum"
    assert [event.round for event in fleet.store.history.events(RUN) if event.kind == "secure-sum"] == [1]
    state: Any = unpack_state(fleet.store.blobs.get_state(row.checkpoint))
    assert len(state["parts"]) == 1
    assert len(state["members"]) == 5


@pytest.mark.slow
@pytest.mark.long
def test_a_short_round_leaves_no_payload_of_its_sum(tmp_path: Path) -> None:
    """Two of five devices are gone before they send their masked input, and the engine dies after this round."""
    fleet = Fleet("unsigned", tmp_path / "work", summing("classstats_secure"))
    run = fleet.config.run.model_copy(update={"deadline_seconds": 4.0})
    fleet.config = fleet.config.model_copy(update={"run": run})
    with devices_of(fleet) as devices:
        drive = Drive(devices)

        def leave() -> None:
            drive.away = {3, 4} if any(ask.step == INPUT for ask in fleet.store.asks.of_run(RUN)) else set()
            if any(item.status == "short" for item in fleet.store.runs.rounds(RUN)):
                raise Crash

        drive.on_wait = leave
        with pytest.raises(Crash):
            run_engine(fleet.store, fleet.config, drive)
    (short,) = fleet.store.runs.rounds(RUN)
    assert short.status == "short"
    uploads = fleet.store.asks.uploads(RUN)
    assert {item.step for item in uploads} == {KEYS, SHARES, INPUT}
    held = {item.sha256 for item in fleet.store.blobs.held()}
    assert not held & {item.sha256 for item in uploads}
    assert_no_upload_lost(fleet.store)


@pytest.mark.slow
@pytest.mark.long
def test_the_engine_reads_whose_boxes_did_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others decline, and the next round has a sum without the sender, though the engine dies in between.

    The apps of those that decline have the same sentence in an event.
    """
    fleet, real = Fleet("unsigned", tmp_path / "work", summing("classstats_summed")), Member.boxes
    emit, dropped = DeviceLock.emit, list[str]()

    def note(lock: DeviceLock, event: Event) -> None:
        dropped.extend([event.text] if event.kind == "dropped" else [])
        emit(lock, event)

    monkeypatch.setattr(DeviceLock, "emit", note)

    def boxes(member: Member, index: int, entries: Mapping[int, bytes], *arguments: Any) -> dict[int, bytes]:
        made = real(member, index, entries, *arguments)
        spoilt = index == 1 and len(entries) == 4  # the second of five devices, in the first sum
        return {other: bytes(80) if spoilt else box for other, box in made.items()}

    monkeypatch.setattr(Member, "boxes", boxes)
    fuse = Fuse()

    def die() -> None:
        if fuse.blows_at < 0 and fleet.store.history.events(RUN, "declined"):
            fuse.blows_at = fuse.touched + 3

    with devices_of(fleet) as devices:
        with contextlib.suppress(Crash):
            run_engine(fleet.store, fleet.config, Drive(devices, fuse, on_wait=die))
        assert fuse.touched == fuse.blows_at
        run_engine(fleet.store, fleet.config, Drive(devices))
    row = fleet.store.runs.existing(RUN)
    state: Any = unpack_state(fleet.store.blobs.get_state(row.checkpoint))
    names = sorted(spec.name for spec in fleet.specs)
    assert sorted(state["members"]) == [names[0], *names[2:]]
    assert {event.device for event in fleet.store.history.events(RUN, "wrong-share")} == {names[1]}
    declined = fleet.store.history.events(RUN, "declined")
    assert sorted(event.device for event in declined) == [names[0], *names[2:]]
    says = f"step 'secure_input': what device {names[1]!r} sent in this sum cannot be used: "
    assert all(event.text.startswith(says) for event in declined)
    assert sorted(dropped) == sorted(event.text.removeprefix("step 'secure_input': ") for event in declined)


@pytest.mark.slow
@pytest.mark.long
def test_devices_may_die_at_every_failpoint_of_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices die once at each failpoint of their own. With a roster, a sum that falls short would be charged again."""
    fleet, died = Fleet("unsigned", tmp_path / "work"), set[str]()

    def hit(name: str) -> None:
        own = name.startswith(("device.secure.", "device.outbox.", "device.promote.", "device.upload."))
        if own and name not in died:
            died.add(name)
            raise DeviceDied

    monkeypatch.setattr(failpoints, "hit", hit)
    run_fleet(fleet)
    fleet.assert_right()
    assert fleet.deaths == len(died) >= 5
    assert {"device.secure.after-freeze", "device.secure.after-step", "device.secure.after-end"} <= died
