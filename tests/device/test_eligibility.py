"""A device works only while the app's conditions hold, and loses nothing when they do not."""

from __future__ import annotations

import json
import random
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from device.sdk_fleet import RUN, Fleet, make_device
from hypothesis import example, given
from hypothesis import strategies as st
from support.fleets import RUNS, device_files, prepare, record, run_in_memory
from support.hostile_server import LyingLink, ask, device_at, terms
from support.long import long_except
from support.open_device import open_device

from fleetdistill import Device, Eligibility, Event, Step
from fleetdistill.compute import light_worker
from fleetdistill.device.eligibility import Conditions, seconds_until
from fleetdistill.device.probes import OtherLoad
from fleetdistill.errors import ConfigurationError
from fleetdistill.testing import EventLog, FaultyLink, ManualClock
from fleetdistill_lab.simulation.spec import device as spec_device
from fleetdistill_server.testing import MemoryServer

NOON = datetime(2026, 1, 1, 12)


@pytest.fixture
def every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conditions are probed at every check, not only every quarter of a second."""
    monkeypatch.setattr("fleetdistill.device.permission.CHECK_SECONDS", 0.0)


def reason(eligibility: Eligibility, now: datetime = NOON) -> str:
    hold = Conditions(eligibility, Path()).hold(now)
    return "" if hold is None else hold.text


# --- the policy


@pytest.mark.parametrize(
    ("name", "settings", "good", "bad", "text"),
    [
        ("charging", {"charging": True}, True, False, "the device is not charging"),
        ("unmetered", {"unmetered": True}, True, False, "the network is metered"),
        ("idle", {"idle": True}, True, False, "the device is not idle"),
        ("temperature", {"max_temperature": 40}, 40.0, 40.1, "the temperature is 40 °C, above 40 °C"),
        ("free_memory", {"min_free_memory": 9}, 9, 8, "8 bytes of memory are available, fewer than 9"),
        ("free_disk", {"min_free_disk": 9}, 9, 8, "8 bytes of disk space are free, fewer than 9"),
        ("screen-off", {}, True, False, "screen-off does not hold"),
    ],
)
def test_a_condition_holds_by_the_apps_probe(name: str, settings: Any, good: Any, bad: Any, text: str) -> None:
    assert reason(Eligibility(**settings, probes={name: lambda: good})) == ""
    assert reason(Eligibility(**settings, probes={name: lambda: bad})) == text
    assert reason(Eligibility(**settings, probes={name: lambda: None})) == (
        f"{name} cannot be measured: its probe returned None"
    )
    of_numpy = np.array([good, bad])
    assert reason(Eligibility(**settings, probes={name: lambda: of_numpy[0]})) == ""
    assert reason(Eligibility(**settings, probes={name: lambda: of_numpy[1]})) == text


@pytest.mark.parametrize("value", ["41.5\n", [41.5], True, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "settings", [{"max_temperature": 45}, {"min_free_memory": 9}, {"min_free_disk": 9}], ids=lambda one: next(iter(one))
)
def test_a_probe_without_a_number_does_not_hold(settings: dict[str, Any], value: Any) -> None:
    (name,) = (setting.partition("_")[2] for setting in settings)
    text = f"{name} cannot be used: its probe returned {value!r}, expected a finite number"
    assert reason(Eligibility(**settings, probes={name: lambda: value})) == text


def test_a_probe_that_fails_does_not_hold_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    conditions = Conditions(Eligibility(unmetered=True, probes={"unmetered": lambda: bool(1 // 0)}), Path())
    for _ in range(3):
        hold = conditions.hold(NOON)
        assert hold is not None
        assert hold.text.startswith("unmetered cannot be measured: its probe raised ZeroDivisionError: ")
    assert [record.message for record in caplog.records] == [
        "the probe of unmetered failed; the condition does not hold"
    ]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"unmetered": True}, r"cannot measure 'unmetered'; pass Eligibility\(probes=\{'unmetered': function\}\)"),
        ({"hours": ("22:00", "24:00")}, r"hours is \('22:00', '24:00'\), expected two times"),
        ({"hours": ("22:00",)}, "expected two times"),
        ({"hours": ("06:00", "06:00")}, "expected two different times"),
        ({"max_temperature": float("nan")}, "max_temperature is nan, expected a finite number"),
        ({"min_free_disk": -1}, "min_free_disk is -1, must be above 0"),
        ({"min_free_memory": "4 GB"}, "min_free_memory is '4 GB', expected a finite number"),
        ({"probes": {"charging": lambda: True}}, "probes has 'charging', but that condition is not set"),
        ({"probes": {"a b": lambda: True}}, "probes has 'a b'"),
        ({"probes": {"screen-off": True}}, "expected names with functions"),
    ],
)
def test_senseless_policy_is_an_error_at_construction(settings: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Eligibility(**settings)


@given(
    now=st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)),
    start=st.integers(0, 1439),
    length=st.integers(1, 1439),
)
@example(now=datetime(2026, 1, 1, 17), start=9 * 60, length=8 * 60)  # the second time is outside,
@example(now=datetime(2026, 1, 1, 6), start=22 * 60, length=8 * 60)  # also past midnight,
@example(now=datetime(2026, 1, 1, 22), start=22 * 60, length=8 * 60)  # and the first inside
def test_hours_hold_from_the_first_time_to_the_second(now: datetime, start: int, length: int) -> None:
    times = [f"{minute // 60 % 24:02}:{minute % 60:02}" for minute in (start, start + length)]
    inside = (now.hour * 60 + now.minute - start) % 1440 < length
    wait = seconds_until((times[0], times[1]), now)
    assert (wait == 0) is inside
    assert wait <= 86_400
    if wait:
        begin = now + timedelta(seconds=wait)
        assert (begin.hour * 60 + begin.minute, begin.second) == (start, 0)


# --- the machine's probes


def test_memory_and_disk_of_this_machine_are_measured() -> None:
    assert reason(Eligibility(min_free_memory=1, min_free_disk=1)) == ""
    assert "bytes of memory are available, fewer than" in reason(Eligibility(min_free_memory=1 << 60))
    assert "bytes of disk space are free, fewer than" in reason(Eligibility(min_free_disk=1 << 60))


def test_battery_and_temperature_are_those_of_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    battery = SimpleNamespace(power_plugged=True)
    sensors = {"cpu": [SimpleNamespace(current=40.0), SimpleNamespace(current=55.0)], "broken": []}
    sensors["broken"].append(SimpleNamespace(current=-273.0))
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: sensors, raising=False)
    policy = Eligibility(charging=True, max_temperature=55)
    assert reason(policy) == ""
    battery.power_plugged = False
    assert reason(policy) == "the device is not charging"
    battery.power_plugged, sensors["cpu"][1].current = True, 70.0
    assert reason(policy) == "the temperature is 70 °C, above 55 °C"


@pytest.mark.parametrize("missing", ["psutil", "function", "sensor"])
def test_condition_this_machine_cannot_measure_needs_a_probe(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "psutil":
        monkeypatch.setitem(sys.modules, "psutil", None)
    for name, nothing in (("sensors_battery", None), ("sensors_temperatures", {})):
        if missing == "function":
            monkeypatch.delattr(psutil, name, raising=False)
        elif missing == "sensor":
            monkeypatch.setattr(psutil, name, lambda nothing=nothing: nothing, raising=False)
    conditions: dict[str, dict[str, Any]] = {"charging": {"charging": True}, "temperature": {"max_temperature": 50}}
    for name, settings in conditions.items():
        with pytest.raises(ConfigurationError, match=f"this machine cannot measure '{name}'.*psutil"):
            Eligibility(**settings)
        assert Eligibility(**settings, probes={name: lambda: 1})
        with pytest.raises(ConfigurationError, match=f"and probes has '{name[1:]}'; did you mean '{name}'\\?"):
            Eligibility(**settings, probes={"screen-off": lambda: True, name[1:]: lambda: 1})


def test_a_machine_is_idle_by_the_load_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetdistill.device.probes.WINDOW_SECONDS", 0.0)
    machine = SimpleNamespace(user=0.0, system=0.0, idle=0.0, iowait=0.0)
    own = SimpleNamespace(user=0.0, system=0.0)

    class Times(tuple[float, ...]):
        idle, iowait = property(lambda self: machine.idle), property(lambda self: machine.iowait)

    fake = SimpleNamespace(
        cpu_times=lambda: Times((machine.user, machine.system, machine.idle, machine.iowait)),
        Process=lambda: SimpleNamespace(cpu_times=lambda: SimpleNamespace(**vars(own))),
    )
    load = OtherLoad(fake)
    for others, mine, expected in [(0, 100, True), (25, 75, True), (26, 0, False), (0, 0, True), (100, 0, False)]:
        machine.user, own.user = machine.user + others + mine, own.user + mine
        machine.idle += 100 - others - mine
        assert load.is_low() is expected


# --- before work


def test_a_device_that_is_not_eligible_makes_no_call(tmp_path: Path) -> None:
    clock = ManualClock()
    link = FaultyLink(LyingLink(ask()))
    policy = Eligibility(probes={"evening": lambda: clock.now() > 60})
    device, events = device_at(link, tmp_path, eligibility=policy, clock=clock)
    with device:
        while clock.now() < 60:
            assert device.step() is Step.WAITED
            assert not link.calls
        device.run()
    waiting, resumed, *others = events
    assert (waiting.kind, waiting.text) == ("waiting", "evening does not hold; the device waits")
    assert waiting.values == {"condition": "evening"}
    assert (resumed.kind, resumed.values) == ("resumed", {"condition": "evening"})
    assert others[-1].kind == "finished"


def test_a_device_waits_for_its_hours(tmp_path: Path) -> None:
    clock = ManualClock(time=datetime(2026, 1, 1, 21, 58, 30).timestamp())
    device, events = device_at(
        LyingLink(ask()), tmp_path, eligibility=Eligibility(hours=("22:00", "06:00")), clock=clock
    )
    with device:
        device.run()
    assert clock.waits == [60.0, 30.0]
    assert events[0].values == {"condition": "hours", "seconds": 90.0}
    assert "it is outside the hours 22:00 to 06:00" in events[0].text


def test_the_server_does_not_expect_a_device_that_waits(fleet: Fleet, tmp_path: Path) -> None:
    eligible = [True]
    policy = Eligibility(probes={"mine": lambda: eligible[0]})
    with make_device(fleet, tmp_path, eligibility=policy, clock=ManualClock()) as device:
        assert device.step(0) is Step.WAITED
        assert fleet.store.devices.present(RUN) == ["d"]
        eligible[0] = False
        assert device.step(0) is Step.WAITED
        assert fleet.store.devices.present(RUN) == []
        eligible[0] = True
        assert device.step(0) is Step.WAITED
        assert fleet.store.devices.present(RUN) == ["d"]


def test_a_device_that_waits_for_long_leaves_once(tmp_path: Path) -> None:
    eligible, link = [True], LyingLink(ask(), ask(round=2))
    policy = Eligibility(probes={"mine": lambda: eligible[0]})
    device, _ = device_at(link, tmp_path, eligibility=policy, clock=ManualClock())
    with device:
        assert device.step(0) is Step.ANSWERED
        for left in (1, 2):
            eligible[0] = False
            for _ in range(3):
                assert device.step(0) is Step.WAITED
            assert link.left == left
            eligible[0] = True
            device.step(0)


# --- during work


def fails_at(*numbers: int) -> Callable[[], bool]:
    """A probe that returns False at the calls of these numbers, from 1."""
    calls = iter(range(1, 1 << 60))
    return lambda: next(calls) not in numbers


@pytest.mark.usefixtures("every_check")
def test_interrupted_ask_is_answered_later_with_equal_result(tmp_path: Path) -> None:
    undisturbed = LyingLink(ask())
    device, _ = device_at(undisturbed, tmp_path / "a")
    with device:
        device.run()
    link = LyingLink(ask(), ask(), ask())  # a server offers an open ask until it is answered
    events, checks = EventLog(), Counter[int]()

    def probe() -> bool:
        asked = events.kinds().count("ask")
        checks[asked] += 1
        return (asked, checks[asked]) not in [(1, 2), (1, 3), (1, 4), (2, 5)]

    policy, clock = Eligibility(probes={"mine": probe}), ManualClock()
    device, _ = device_at(link, tmp_path / "b", eligibility=policy, clock=clock, on_event=events.append)
    with device:
        while not link.uploads:
            device.step()
            assert not link.declined
    assert [kind for kind in events.kinds() if kind in ("ask", "waiting", "resumed")] == [
        *("ask", "waiting", "resumed"),
        *("ask", "waiting", "resumed"),
        "ask",
    ]
    assert link.uploads[0].payload.sha256 == undisturbed.uploads[0].payload.sha256
    assert link.uploads[0].name.attempt == 1
    assert link.left == 1, "while it owed an answer it did not leave"


@pytest.mark.parametrize("kind", ["answered", "delivered", "exported"])
@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_device_stopped_after_its_receipt_leaves(kind: str, end: str, tmp_path: Path) -> None:
    """What the app gets of the answer is completed at the next start: the run waits for nothing."""
    link = LyingLink(*(ask(round=number) for number in range(1, 4)))
    calls: list[str] = []

    def on_event(event: Event) -> None:
        if event.kind == kind and not calls:
            calls.append(kind)
            getattr(device, end)()

    device, _ = device_at(link, tmp_path, export="round", on_event=on_event)
    with device:
        device.run()
    assert calls
    assert (len(link.uploads), link.left) == (1, 1)


class Flipping:
    """Probe of a device that is not eligible once during each ask, at a random one of its first checks.

    Args:
        latest: Number of these checks; 0 for a device that is always eligible.
    """

    def __init__(self, latest: int = 12) -> None:
        self.latest = latest
        self.random, self.left, self.times, self.ask = random.Random(3), 0, 0, ""

    def note(self, event: Event) -> None:
        """Draws the check at which a new ask is interrupted."""
        if event.kind in ("answered", "dropped"):
            self.left = 0
        if event.kind == "ask" and "step" in event.values:
            ask = f"{event.round} {event.values['step']}"
            self.left = self.random.randint(1, self.latest) if self.latest and ask != self.ask else 0
            self.ask = ask

    def __call__(self) -> bool:
        self.left -= 1
        self.times += self.left == 0
        return self.left != 0


def interrupted(flips: list[Flipping], **given: Any) -> Device:
    flip, on_event = Flipping(), given.pop("on_event")
    flips.append(flip)

    def note(event: Event) -> None:
        flip.note(event)
        on_event(event)

    policy = Eligibility(probes={"mine": flip})
    return open_device(**{**given, "clock": ManualClock()}, on_event=note, eligibility=policy)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("every_check")
@pytest.mark.parametrize(
    "name",
    long_except(["fedavg", "cdkt", "feddkc", "feddkd", "fedd2s", "dafkd distilling", "classstats"], "fedavg", "fedd2s"),
)
def test_a_run_of_interrupted_devices_is_the_same_to_the_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices of every method are interrupted once in each ask, while they download, train or send."""
    flips: list[Flipping] = []
    plain, disturbed = prepare(RUNS[name], tmp_path / "a"), prepare(RUNS[name], tmp_path / "b")
    with closing(run_in_memory(plain)) as store:
        expected = record(store)
    monkeypatch.setattr(spec_device, "Device", partial(interrupted, flips))
    with closing(run_in_memory(disturbed, durable=True)) as store:
        assert record(store) == expected
    assert device_files(plain) == device_files(disturbed)
    assert sum(flip.times for flip in flips) >= 2


@pytest.mark.long
@pytest.mark.usefixtures("every_check")
@pytest.mark.parametrize("kind", ["light", "light and private"])
def test_interrupted_device_without_pytorch_gives_same_answer(kind: str, tmp_path: Path) -> None:
    private = "private" in kind
    data = np.random.default_rng(0).random((300, 1, 8, 8), np.float32), np.arange(300) % 4
    results = []
    for name in ("plain", "disturbed"):
        flip = Flipping(1 if name == "disturbed" else 0)
        events = EventLog()

        def note(event: Event, flip: Flipping = flip, events: EventLog = events) -> None:
            flip.note(event)
            events.append(event)

        settings: dict[str, dict[str, Any]] = {
            "run": {"method": "classstats_private" if private else "classstats"},
            "contract": {"classes": 4, "input_shape": [1, 8, 8]},
            "method": {"epsilon": 20.0} if private else {},
        }
        with MemoryServer(settings) as server:
            with open_device(
                server=server.link(),
                worker=light_worker(data),
                state_dir=tmp_path / name,
                device_id="d",
                export="never",
                on_event=note,
                eligibility=Eligibility(probes={"mine": flip}),
                clock=ManualClock(),
            ) as device:
                device.run()
            assert server.status == "finished"
            results.append([row.sha256 for row in server.store.asks.uploads("test")])
        assert (events.kinds().count("waiting") > 0) is (name == "disturbed")
        if private:
            releases = json.loads((tmp_path / name / "privacy.json").read_text())["releases"]
            assert len(releases) == 1
    assert private or results[0] == results[1]
    assert results[0]


@pytest.mark.usefixtures("every_check")
def test_a_call_without_a_reply_is_cancelled(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        policy = Eligibility(probes={"mine": fails_at(2, 3)})
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        device, events = device_at(address, tmp_path, eligibility=policy, clock=ManualClock())
        with device:
            assert device.step() is Step.WAITED
    assert [event.kind for event in events] == ["waiting"]


@pytest.mark.usefixtures("every_check")
@pytest.mark.parametrize(
    ("deadline", "declined"),
    [
        (16 * 3600 + 3600, False),
        (16 * 3600 + 300, True),  # from the ask on, which came nearly ten minutes before the hours ended
        (3600, True),
    ],
)
def test_ask_is_declined_only_if_deadline_precedes_next_hours(tmp_path: Path, deadline: float, declined: bool) -> None:
    clock = ManualClock(time=datetime(2026, 1, 1, 5, 50).timestamp())
    link = LyingLink(ask(deadline_seconds=deadline), terms=terms(settings={"local_epochs": 10**12}))

    def passing() -> bool:
        clock.advance(10)
        return True

    policy = Eligibility(hours=("22:00", "06:00"), probes={"passing": passing})
    device, events = device_at(link, tmp_path, eligibility=policy, clock=clock)
    with device:
        assert device.step() is (Step.DECLINED if declined else Step.WAITED)
        assert device.step() is Step.WAITED
    assert [item.reason for item in link.declined] == ["it is outside the hours 22:00 to 06:00"] * declined
    assert [event.kind for event in events][-1] == "waiting"
