"""A device uses at most what the app's budgets allow, also if it is killed, and calls when the server asks it to."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_server import LyingLink, ask, device_at, model, terms
from support.open_device import open_device
from support.processes import python
from support.small_device import SmallWorker

from fleetdistill import Budgets, Eligibility, Event, Step
from fleetdistill.clock import SystemClock
from fleetdistill.device.permission import Permission
from fleetdistill.device.probes import resident_bytes
from fleetdistill.device.usage import PACE, USAGE, Pace, Usage
from fleetdistill.errors import ConfigurationError, LinkError
from fleetdistill.state.files import Files
from fleetdistill.testing import FaultyLink, ManualClock, refused
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

pytestmark = pytest.mark.timeout(120)  # a limit that does not hold makes a device work for ever

MORNING = datetime(2026, 1, 1, 8).timestamp()
DAY = 86_400.0
MAX_MESSAGE = 1000
"""More bytes than any message of the small run."""


@pytest.fixture(autouse=True)
def every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetdistill.device.permission.CHECK_SECONDS", 0.0)


def ticking(clock: ManualClock, seconds: float = 1.0) -> Eligibility:
    """A policy that always holds, and whose every check takes some time of a clock."""

    def tick() -> bool:
        clock.advance(seconds)
        return True

    return Eligibility(probes={"tick": tick})


# --- the arguments


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"bytes_per_day": 0}, "bytes_per_day is 0, expected an integer of at least 1"),
        ({"bytes_per_day": 1e6}, "bytes_per_day is 1000000.0, expected an integer"),
        ({"compute_seconds_per_day": math.inf}, "compute_seconds_per_day is inf, expected a finite number above 0"),
        ({"compute_seconds_per_day": 0}, "compute_seconds_per_day is 0"),
        ({"memory_bytes": True}, "memory_bytes is True"),
        ({"threads": 0}, "threads is 0"),
        ({"niceness": -5}, "niceness is -5"),
        ({"niceness": 20}, "niceness is 20, must be 1 to 19"),
    ],
)
def test_budgets_out_of_range_are_an_error_at_construction(given: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Budgets(**given)


def test_budgets_that_this_machine_cannot_hold_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "psutil", None)
        with pytest.raises(ConfigurationError, match="memory_bytes requires psutil"):
            Budgets(memory_bytes=1 << 30)
    for platform in ("darwin", "win32"):
        monkeypatch.setattr(sys, "platform", platform)
        with pytest.raises(ConfigurationError, match=f"niceness requires Linux; on {platform}"):
            Budgets(niceness=10)


# --- counters


AMOUNTS = st.lists(st.tuples(st.sampled_from(["bytes", "compute_seconds"]), st.floats(0, 200), st.booleans()))


@settings(max_examples=50, deadline=None)
@given(amounts=AMOUNTS)
def test_killed_process_has_counted_at_least_what_it_used(amounts: list[tuple[str, float, bool]]) -> None:
    limits, used, kills = {"bytes": 1000, "compute_seconds": 100.0}, {"bytes": 0.0, "compute_seconds": 0.0}, 0
    with TemporaryDirectory() as folder:
        usage = Usage(Files(Path(folder)), ManualClock(), limits)
        for name, amount, killed in amounts:
            usage.add(name, amount)
            used[name] += amount
            if killed:  # only what is in the file survives
                usage, kills = Usage(Files(Path(folder)), ManualClock(), limits), kills + 1
        exceeded = usage.exceeded()
    if any(used[name] >= limit for name, limit in limits.items()):
        assert exceeded
    if all(used[name] + (kills + 1) * limit / 20 < limit for name, limit in limits.items()):
        assert not exceeded


def test_counters_restart_at_midnight_and_are_exact_after_close(tmp_path: Path) -> None:
    clock, files = ManualClock(time=MORNING), Files(tmp_path)
    usage = Usage(files, clock, {"bytes": 100})
    usage.add("bytes", 99)
    usage.settle()
    again = Usage(files, clock, {"bytes": 100})
    assert not again.exceeded()
    again.add("bytes", 1)
    assert again.exceeded() == "bytes"
    clock.advance(16 * 3600 - 1)
    assert again.exceeded() == "bytes"
    clock.advance(1)
    assert not again.exceeded()
    assert not Usage(files, clock, {"bytes": 100}).exceeded()


def test_a_kill_after_midnight_gives_no_budget_back(tmp_path: Path) -> None:
    """What was written ahead on the day before does not hide the use of the new day."""
    clock, files = ManualClock(time=MORNING), Files(tmp_path)
    usage = Usage(files, clock, {"bytes": 100})
    usage.add("bytes", 90)
    clock.advance(16 * 3600)
    usage.add("bytes", 60)
    killed = Usage(files, clock, {"bytes": 100})  # only what is in the file survives
    assert not killed.exceeded()
    killed.add("bytes", 40)
    assert killed.exceeded() == "bytes"


def test_a_used_up_budget_says_how_long_it_is_to_midnight(tmp_path: Path) -> None:
    clock = ManualClock(time=MORNING)
    permission = Permission(Files(tmp_path), clock, None, Budgets(bytes_per_day=100))
    permission.usage.add("bytes", 100)
    waits = []
    for hours in (0, 15):
        clock.advance(3600.0 * hours)
        hold = permission.hold()
        assert hold is not None
        waits.append((hold.condition, hold.seconds))
    assert waits == [("bytes_per_day", 16 * 3600.0), ("bytes_per_day", 3600.0)]


def test_computing_after_the_last_check_counts(tmp_path: Path) -> None:
    clock, files = ManualClock(time=MORNING), Files(tmp_path)
    permission = Permission(files, clock, None, Budgets(compute_seconds_per_day=10))
    permission.compute(lambda: clock.advance(4))
    assert json.loads((tmp_path / USAGE).read_text())["compute_seconds"] >= 4

    def fails() -> None:
        clock.advance(6)
        raise ValueError("after the last check")

    with pytest.raises(ValueError, match="after the last check"):
        permission.compute(fails)
    hold = permission.budget_hold()
    assert hold is not None
    assert hold.condition == "compute_seconds_per_day"


def test_a_kill_while_a_counter_is_written_gives_no_budget_back(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from fleetdistill.device.usage import Usage
from fleetdistill.clock import SystemClock
from fleetdistill.state import failpoints
from fleetdistill.state.files import Files
usage = Usage(Files(Path({str(tmp_path)!r})), SystemClock(), {{"bytes": 1000}})
usage.add("bytes", 995)
failpoints.switch_on("disk.before-rename=kill")
usage.add("bytes", 100)
"""
    with pytest.raises(AssertionError):
        python(script)
    assert Usage(Files(tmp_path), SystemClock(), {"bytes": 1000}).exceeded() == "bytes"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"day": "2026-01-01", "bytes": -1, "compute_seconds": 0}'])
def test_damaged_counters_count_as_used_up_until_midnight(tmp_path: Path, content: bytes) -> None:
    (tmp_path / USAGE).write_bytes(content)
    clock = ManualClock(time=MORNING)
    link = FaultyLink(LyingLink(ask()))
    device, events = device_at(link, tmp_path, budgets=Budgets(bytes_per_day=1 << 30), clock=clock)
    with device:
        assert device.step() is Step.WAITED
        assert not link.calls
        assert "damaged" in [event.kind for event in events], "not only at midnight"
        device.run()
    assert clock.now() >= 16 * 3600
    assert (tmp_path / f"{USAGE}.damaged-1").read_bytes() == content
    (waiting,) = events.texts("waiting")
    assert "bytes_per_day (1073741824) is used up until midnight" in waiting
    assert any("the budgets of today count as used up" in event.text for event in events if event.kind == "damaged")


# --- budgets of a device


def test_bytes_are_limited_per_day_and_answer_resumes_next_day(tmp_path: Path) -> None:
    clock = ManualClock(time=MORNING)
    link = LyingLink(*(ask(round=number, deadline_seconds=10 * DAY) for number in (1, 1, 2, 2, 3, 3)))
    days: dict[str, list[int]] = {}
    used: list[float] = []

    def on_event(event: Event) -> None:
        days.setdefault(event.kind, []).append(int((8 * 3600 + clock.now()) // DAY))
        if event.kind == "waiting":
            used.append(json.loads((tmp_path / USAGE).read_text())["bytes"])

    budgets = Budgets(bytes_per_day=1500)
    device, _ = device_at(link, tmp_path, budgets=budgets, on_event=on_event, clock=clock)
    with device:
        for _ in range(100_000):  # steps of 5 seconds while a budget is used up
            if len({upload.name.round for upload in link.uploads}) == 3:
                break
            device.step()
    assert days["waiting"] == sorted(set(days["waiting"])), "once a day"
    assert len(set(days["answered"])) == len(days["answered"]) >= 3
    assert not link.declined
    assert all(1500 <= count < 1500 + MAX_MESSAGE + 1500 / 20 for count in used), used


@pytest.mark.parametrize("bytes_per_day", range(1900, 4100, 200))
def test_no_ask_is_left_open_by_a_budget_until_midnight(tmp_path: Path, bytes_per_day: int) -> None:
    """Wherever the budget ends, in a download, the work or an upload: the deadline is long before midnight."""
    clock = ManualClock(time=MORNING)
    link = LyingLink(*(ask(round=number, deadline_seconds=600) for number in range(1, 30)))
    device, events = device_at(link, tmp_path, budgets=Budgets(bytes_per_day=bytes_per_day), clock=clock)
    with device:
        for _ in range(100):
            if events.texts("waiting"):
                break
            device.step()
        asked = {event.round for event in events if event.kind == "ask"}
        answered = {event.round for event in events if event.kind == "answered"}
        assert asked
        assert events.texts("waiting")
        assert asked - answered == {declined.round for declined in link.declined}
        device.step()
        assert link.left == 1, "no later round waits for it"


def last_wait(tmp_path: Path, bytes_per_day: int) -> str:
    """What a device waits for after three days with this budget."""
    clock = ManualClock(time=MORNING)
    device, events = device_at(LyingLink(), tmp_path, budgets=Budgets(bytes_per_day=bytes_per_day), clock=clock)
    with device:
        for _ in range(100_000):
            if clock.now() > 3 * DAY:
                break
            device.step()
    return events.texts("waiting")[-1]


def test_check_in_over_the_budget_of_a_day_is_named(tmp_path: Path) -> None:
    text = "one check-in alone has {} bytes, more than bytes_per_day ({}); raise the budget; the device waits"
    said = last_wait(tmp_path / "small", 20)
    found = re.search(r"has (\d+) bytes", said)
    assert found, said
    size = int(found[1])
    assert size > 20
    assert said == text.format(size, 20)
    assert last_wait(tmp_path / "less", size - 1) == text.format(size, size - 1)
    assert last_wait(tmp_path / "enough", size) == f"bytes_per_day ({size}) is used up until midnight; the device waits"


def test_answer_over_the_budget_of_a_day_is_declined_at_once(tmp_path: Path) -> None:
    """It could not be sent on this day, and would hold the round."""
    clock, link = ManualClock(time=MORNING), LyingLink(ask(deadline_seconds=10 * DAY))
    rows = np.random.default_rng(0).random((600, 4)).astype(np.float32), np.arange(600) % 3
    device, events = device_at(link, tmp_path, budgets=Budgets(bytes_per_day=5000), clock=clock, data=rows)
    with device:
        assert device.step() is Step.DECLINED
        assert not events.texts("waiting"), "the budget is not used up"
    (declined,) = link.declined
    text = r"the payload is (\d+) bytes, the limit is 5000 bytes; the answer must fit in a day: raise Budgets"
    found = re.match(text, declined.reason)
    assert found, declined.reason
    assert int(found[1]) > 5000
    assert events.texts("dropped") == [declined.reason]
    assert not link.uploads


def test_answer_that_compression_brings_into_budget_is_sent(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    zeros = np.zeros((600, 4), np.float32), np.zeros(600, np.int64)
    link = LyingLink(ask(deadline_seconds=10 * DAY), terms=terms(compression=knowledge_pb2.COMPRESSION_ZSTD))
    device, _ = device_at(link, tmp_path, budgets=Budgets(bytes_per_day=7000), data=zeros)
    with device:
        assert device.step() is Step.ANSWERED
    assert link.uploads[0].payload.data_bytes > 7000


def test_an_ask_over_the_budget_of_a_day_is_declined(tmp_path: Path) -> None:
    clock = ManualClock(time=MORNING)
    link = LyingLink(ask(deadline_seconds=10 * DAY), terms=terms(settings={"local_epochs": 10**12}))
    budgets = Budgets(compute_seconds_per_day=30)
    device, events = device_at(link, tmp_path, budgets=budgets, eligibility=ticking(clock), clock=clock)
    with device:
        assert device.step() is Step.DECLINED
        began = clock.now()
        assert began < 60
        device.run()
    (declined,) = link.declined
    assert declined.reason == "the ask takes longer than compute_seconds_per_day (30); raise the budget"
    assert clock.now() > 15 * 3600, "the budget of the day is used up"
    assert events[-1].kind == "finished"


@pytest.mark.parametrize(
    ("budgets", "reason"),
    [
        (Budgets(seconds_per_ask=5), "the ask takes longer than this device's limit of 5 seconds; raise it with"),
        (Budgets(compute_seconds_per_day=5), "the ask takes longer than compute_seconds_per_day (5); raise the budget"),
    ],
)
def test_limit_holds_for_work_without_a_check(tmp_path: Path, budgets: Budgets, reason: str) -> None:
    clock = ManualClock(time=MORNING)

    class SlowWorker(SmallWorker):
        def answer(self, *given: Any) -> Any:
            clock.advance(6)
            return super().answer(*given)

    link = LyingLink(ask(deadline_seconds=10 * DAY))
    given: dict[str, Any] = {"worker": SlowWorker, "budgets": budgets, "clock": clock, "export": "never"}
    with open_device(server=link, state_dir=tmp_path, **given) as device:
        assert device.step() is Step.DECLINED
    assert link.declined[0].reason.startswith(reason)
    assert not link.uploads
    assert not (tmp_path / "outbox" / "manifest.json").exists()


def test_ask_interrupted_by_daily_budget_is_answered_next_day(tmp_path: Path) -> None:
    clock = ManualClock(time=MORNING)
    asks = [ask(round=number, deadline_seconds=10 * DAY) for number in (1, 2, 2)]
    link = LyingLink(*asks)
    undisturbed = LyingLink(ask(), ask(round=2))
    device, _ = device_at(undisturbed, tmp_path / "a")
    with device:
        device.run()
    took = seconds_of_an_ask(tmp_path / "b")
    budgets = Budgets(compute_seconds_per_day=1.5 * took)
    device, events = device_at(link, tmp_path / "c", budgets=budgets, eligibility=ticking(clock), clock=clock)
    with device:
        device.run()
    assert not link.declined
    assert [event.values["condition"] for event in events if event.kind == "waiting"] == ["compute_seconds_per_day"]
    assert [upload.payload.sha256 for upload in link.uploads] == [
        upload.payload.sha256 for upload in undisturbed.uploads
    ]
    assert clock.now() > 16 * 3600


def seconds_of_an_ask(state_dir: Path) -> float:
    """Seconds of computing for one ask, where every check takes one second."""
    clock = ManualClock(time=MORNING)
    budgets = Budgets(compute_seconds_per_day=1000)
    device, _ = device_at(LyingLink(ask()), state_dir, budgets=budgets, eligibility=ticking(clock), clock=clock)
    with device:
        device.run()
    seconds: float = json.loads((state_dir / USAGE).read_text())["compute_seconds"]
    assert seconds > 2
    return seconds


def test_memory_is_checked_before_work_and_during_it(tmp_path: Path) -> None:
    link = LyingLink(ask(), terms=terms(settings={"local_epochs": 10**12}))
    device, events = device_at(link, tmp_path / "a", budgets=Budgets(memory_bytes=1 << 20), clock=ManualClock())
    with device:
        assert device.step() is Step.WAITED
    assert "bytes of memory, more than memory_bytes (1048576)" in events.texts("waiting")[0]

    held: list[np.ndarray] = []
    used = resident_bytes()
    assert used is not None
    budgets = Budgets(memory_bytes=used + (300 << 20))

    def on_event(event: Any) -> None:
        if event.kind == "ask":
            held.append(np.ones(400 << 17))  # 400 MiB

    device, _ = device_at(link, tmp_path / "b", budgets=budgets, on_event=on_event, clock=ManualClock())
    with device:
        assert device.step() is Step.DECLINED
        held.clear()
    (declined,) = link.declined
    assert "bytes of memory, more than memory_bytes" in declined.reason


def test_a_run_that_requires_more_threads_is_refused_at_check_in(tmp_path: Path) -> None:
    device, _ = device_at(LyingLink(terms=terms(threads=3)), tmp_path, budgets=Budgets(threads=2))
    with device, pytest.raises(ConfigurationError, match=r"3 threads, but this device allows 2.*Budgets\(threads"):
        device.step()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have a niceness on Linux only")
def test_only_the_thread_that_computes_is_nice(tmp_path: Path) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    digests, own = [], niceness()
    wanted = min(own + 3, 19)
    for name, budgets in (("a", None), ("b", Budgets(niceness=wanted))):
        seen: set[int] = set()
        watched = model()
        watched.register_forward_pre_hook(lambda *_, seen=seen: seen.add(niceness()))
        link = LyingLink(ask())
        device, _ = device_at(link, tmp_path / name, model=watched, budgets=budgets)
        with device:
            device.run()
        digests.append(link.uploads[0].payload.sha256)
        assert niceness() == own
        assert (wanted in seen) is (budgets is not None) or wanted == own
    assert digests[0] == digests[1]


# --- the server's pace


def come_back(seconds: float) -> service_pb2.NextAskResponse:
    pause = service_pb2.ComeBack(after_seconds=seconds, before_seconds=seconds)
    return service_pb2.NextAskResponse(come_back=pause)


class Stopped(ManualClock):
    """The clock of a device that ends while it waits."""

    def wait(self, event: threading.Event, seconds: float) -> None: ...


@pytest.mark.parametrize("requested", ["come-back", "refusal"])
def test_restarted_device_calls_no_earlier_than_server_asked(tmp_path: Path, requested: str) -> None:
    faults = [refused("next_ask", "too-many", after_seconds="600")] if requested == "refusal" else []
    clock: ManualClock = Stopped(time=MORNING)
    device, _ = device_at(FaultyLink(LyingLink(come_back(600)), *faults), tmp_path, clock=clock)
    if requested == "come-back":
        device.step()
    else:
        with pytest.raises(LinkError):
            device.step()
    device.close()

    clock = ManualClock(time=MORNING + 200)
    link = FaultyLink(LyingLink(ask()))
    device, events = device_at(link, tmp_path, clock=clock)
    with device:
        for _ in range(1000):
            if clock.now() >= 399:
                break
            assert not link.calls
            assert device.step() is Step.WAITED
        device.run()
    assert clock.now() == pytest.approx(400)
    assert [event.kind for event in events][:3] == ["waiting", "resumed", "checked-in"]
    assert events[0].values == {"condition": "pace", "seconds": pytest.approx(400)}


def test_a_changed_system_time_never_makes_the_pause_longer(tmp_path: Path) -> None:
    Pace(Files(tmp_path), ManualClock(time=MORNING)).set(600)
    for shift, expected in ((-1e9, 600.0), (0, 600.0), (599, 1.0), (1e9, 0.0)):
        assert Pace(Files(tmp_path), ManualClock(time=MORNING + shift)).remaining() == pytest.approx(expected)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"not_before": NaN, "seconds": 5}', b'{"not_before": 1}'])
def test_a_damaged_pace_is_put_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PACE).write_bytes(content)
    assert Pace(Files(tmp_path), ManualClock()).remaining() == 0
    assert (tmp_path / f"{PACE}.damaged-1").read_bytes() == content
