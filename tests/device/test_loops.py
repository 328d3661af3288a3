"""The loops of a device: in the background, in the app's own loop, and what ends them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from device.sdk_fleet import RUN, Fleet, make_device
from device.waiting import WaitingLink
from support.hostile_server import DATA, LyingLink, ask, device_at, model
from support.processes import PATIENCE_SECONDS, module_path, wait_until
from torch import nn

from fleetdistill import COLUMNS, Budgets, Device, Event, Step
from fleetdistill.device.contact import MAX_PAUSE_SECONDS
from fleetdistill.device.loop import POLL_SECONDS
from fleetdistill.errors import (
    ConfigurationError,
    DeviceBusyError,
    DeviceClosedError,
    LinkError,
    ModelError,
    StateError,
)
from fleetdistill.testing import EventLog, FaultyLink, ManualClock, lost, refused
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.states import RunStatus

COME_BACK = service_pb2.NextAskResponse(come_back=service_pb2.ComeBack(after_seconds=7, before_seconds=7))


def in_thread(function: Callable[[], Any]) -> list[Any]:
    """Runs a function in another thread; returns a list with its result or its exception."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    return result


# --- start, stop, join


def test_a_device_runs_in_the_background(tmp_path: Path) -> None:
    link, threads = LyingLink(ask(), ask(round=2)), set()
    device, _ = device_at(link, tmp_path, on_event=lambda event: threads.add(threading.current_thread().name))
    with device:
        assert device.join(), "a device that was not started has no thread to wait for"
        device.start()
        assert device.join(PATIENCE_SECONDS)
    assert len(link.uploads) == 2
    assert threads == {f"fleetdistill {device.device_id}"}


def test_stop_and_start_pause_and_continue(tmp_path: Path) -> None:
    link = WaitingLink()
    device, events = device_at(link, tmp_path)
    with device:
        for number in (1, 2):
            device.start()
            assert link.polling.wait(PATIENCE_SECONDS)
            assert not device.join(0)
            device.stop()
            assert device.join(PATIENCE_SECONDS)
            link.asks.append(ask(round=number))
        device.stop()  # applies to a `run` or `step`, and not to a later `start`
        link.asks.append(service_pb2.NextAskResponse(finished="over"))
        device.start()
        assert device.join(PATIENCE_SECONDS)
    assert len(link.uploads) == 2
    assert not events.texts("lost-contact"), "a cancelled request is not a lost contact"


def test_background_exception_is_event_log_record_and_join_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    def fail() -> nn.Module:
        raise OSError("the app's disk is full")

    device, _ = device_at(LyingLink(ask()), tmp_path, model=fail, on_event=events.append)
    with device:
        device.start()
        for _ in range(2):
            with pytest.raises(ModelError, match="model: the function raised OSError: the app's disk is full"):
                device.join(PATIENCE_SECONDS)
        assert events[-1] == Event("failed", 0, events[-1].text, {"error": "ModelError"})
        assert "the app's disk is full" in events[-1].text
    assert "the background thread ended with ModelError: model: the function raised OSError" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("seconds", ["5", None, float("nan"), -1, 61])
def test_a_wrong_time_to_wait_is_refused_before_any_call(tmp_path: Path, seconds: Any) -> None:
    device, _ = device_at(LyingLink(ask()), tmp_path)
    with device, pytest.raises(ConfigurationError, match=r"wait_seconds is .*, (must be in|expected a number)"):
        device.step(seconds)


@pytest.mark.parametrize("timeout", ["1", -1, True, float("nan")])
def test_a_wrong_timeout_of_join_is_refused(tmp_path: Path, timeout: Any) -> None:
    with device_at(LyingLink(), tmp_path)[0] as device, pytest.raises(ConfigurationError, match="timeout is"):
        device.join(timeout)


def test_a_run_that_ends_without_a_delivery_says_so(tmp_path: Path) -> None:
    device, events = device_at(LyingLink(service_pb2.NextAskResponse(finished="1 rounds completed")), tmp_path)
    with device:
        device.run()
    (text,) = events.texts("finished")
    assert text.startswith("1 rounds completed; the app's own model is in use, because no model was delivered")


def test_failing_callback_ends_no_run_and_is_told_once_per_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    def fail(event: Event) -> None:
        events.append(event)
        raise ValueError(f"no {event.kind}")

    device, _ = device_at(LyingLink(ask()), tmp_path, on_event=fail)
    with device:
        device.start()
        assert device.join(PATIENCE_SECONDS)
        assert device.version == 1
    reports = [event for event in events if event.kind == "callback-failed"]
    others = [event for event in events if event.kind != "callback-failed"]
    assert [report.values for report in reports] == [{"event": other.kind, "error": "ValueError"} for other in others]
    assert [report.round for report in reports] == [other.round for other in others]
    assert "on_event failed for the event 'answered' with ValueError: no answered" in [
        report.text for report in reports
    ]
    assert "ValueError: no answered" in caplog.text
    failures = [record for record in caplog.records if record.message.startswith("on_event failed")]
    assert [bool(record.exc_info) for record in failures] == [True] + [False] * (2 * len(others) - 1)


def test_leaving_the_with_block_ends_the_background_thread(tmp_path: Path) -> None:
    link = WaitingLink()
    with device_at(link, tmp_path)[0] as device:
        device.start()
        assert link.polling.wait(PATIENCE_SECONDS)
    assert device.join(0)
    with device_at(LyingLink(), tmp_path)[0] as again:  # the state directory is free
        again.run()


APP = """
import atexit
import sys
from pathlib import Path
from threading import Thread
from time import sleep

from device.waiting import WaitingLink
from support.hostile_server import device_at

link = WaitingLink()
device, events = device_at(link, Path(sys.argv[1]))
starter = Thread(target=device.start, daemon=True)
starter.start()
assert link.polling.wait(60)
atexit.register(lambda: print("stopped before exit handlers:", device.join(0), "left:", link.left))
Thread(target=lambda: (sleep(1), print("stopped before another thread:", device.join(0)))).start()
"""


def test_an_app_that_ends_without_close_stops_its_device(tmp_path: Path) -> None:
    """After the app's own threads, and before handlers that PyTorch registers when a device first computes."""
    script = tmp_path / "app.py"
    for end, code in (("", 0), ("sys.exit(3)", 3)):
        script.write_text(APP + end)
        command: list[str | Path] = [sys.executable, script, tmp_path / "state"]
        environment = {**os.environ, **module_path()}
        app = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, env=environment, text=True)
        told = ["stopped before another thread: False", "stopped before exit handlers: True left: 1"]
        assert (app.returncode, app.stderr, app.stdout.splitlines()) == (code, "", told)


# --- one at a time


def test_a_second_call_is_refused_while_one_works(tmp_path: Path) -> None:
    link = WaitingLink()
    device, _ = device_at(link, tmp_path)
    with device:
        device.start()
        assert link.polling.wait(PATIENCE_SECONDS)
        for call in (device.run, device.step, device.tick, device.start):
            with pytest.raises(DeviceBusyError, match=f"Device.{call.__name__} was called while Device.start works"):
                call()
        assert link.polling.is_set(), "the background thread was not disturbed"


def test_callback_cannot_work_on_device_or_wait_for_itself(tmp_path: Path) -> None:
    others: list[str] = []

    def call(event: Event) -> None:
        for method in (device.step, device.tick, device.run, device.start, device.join):
            with pytest.raises(DeviceBusyError) as error:
                method()
            others.append(error.value.call)

    device, _ = device_at(LyingLink(), tmp_path, on_event=call)
    with device:
        device.start()
        assert device.join(PATIENCE_SECONDS)
    assert others == ["step", "tick", "run", "start", "join"] * 2  # checked-in and finished


@pytest.mark.skipif(not hasattr(os, "fork"), reason="without fork")
def test_a_fork_of_the_app_does_not_work_on_its_device(tmp_path: Path) -> None:
    device, _ = device_at(LyingLink(), tmp_path)

    def call(reports: Any) -> None:
        for method in (device.step, device.tick, device.run, device.start, partial(device.predict, DATA[0])):
            try:
                reports.put(repr(method()))
            except StateError as error:
                reports.put(str(error))

    forking = multiprocessing.get_context("fork")
    with device:
        device.predict(DATA[0])  # after which PyTorch has threads, for which a fork would wait
        reports = forking.Queue()
        child = forking.Process(target=call, args=(reports,))
        child.start()
        for name in ("step", "tick", "run", "start", "predict"):
            expected = (
                f"Device.{name} was called in process {child.pid}, a fork of process {os.getpid()}, which has opened"
            )
            assert reports.get(timeout=PATIENCE_SECONDS).startswith(f"{expected} {tmp_path}; call it there")
        child.join(PATIENCE_SECONDS)
        device.run()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="without fork")
def test_close_in_a_fork_leaves_the_device_to_the_app(tmp_path: Path) -> None:
    """The thread of `start` is not in the fork, where nothing would ever end its work."""
    link = WaitingLink()
    device, _ = device_at(link, tmp_path)

    def end(reports: Any) -> None:
        try:
            device.join(PATIENCE_SECONDS)
        except StateError as error:
            reports.put(str(error))
        device.close()
        with device:
            pass
        reports.put("closed")

    forking = multiprocessing.get_context("fork")
    with device:
        device.start()
        assert link.polling.wait(PATIENCE_SECONDS)
        reports = forking.Queue()
        child = forking.Process(target=end, args=(reports,))
        child.start()
        assert "Device.join was called in process" in reports.get(timeout=PATIENCE_SECONDS)
        assert reports.get(timeout=PATIENCE_SECONDS) == "closed"
        child.join(PATIENCE_SECONDS)
        assert not device.join(0), "it goes on"
        assert link.left == 0
    assert link.left == 1


# --- tick


def test_tick_never_waits(tmp_path: Path) -> None:
    clock = ManualClock()
    waits: list[float] = []

    class Noting(LyingLink):
        def next_ask(self, identity: Any, wait_seconds: float) -> Any:
            waits.append(wait_seconds)
            return super().next_ask(identity, wait_seconds)

    link = Noting(COME_BACK, ask(), ask(step="dream", round=2), ask(step="dream", round=2))
    device, _ = device_at(link, tmp_path, clock=clock)
    with device:
        assert [device.tick() for _ in range(3)] == [Step.WAITED] * 3
        assert waits == [0.0], "one request, because the server wants the next one 7 seconds later"
        assert device.pause_seconds == 7
        clock.advance(7)
        assert device.pause_seconds == 0
        assert [device.tick() for _ in range(4)] == [Step.ANSWERED, *[Step.DECLINED] * 2, Step.WAITED]
        clock.advance(0.5)  # the pause after a repeated ask that the device declined before
        assert device.tick() is Step.FINISHED
    assert clock.waits == []
    assert len(link.uploads) == 1


def test_tick_and_run_report_lost_and_returned_contact(tmp_path: Path) -> None:
    for name in ("tick", "run"):
        clock = ManualClock()
        link = FaultyLink(LyingLink(ask()), *(lost("next_ask", nth) for nth in (1, 2)), lost("upload"))
        device, events = device_at(link, tmp_path / name, clock=clock)
        with device:
            if name == "run":
                device.run()
            else:
                while device.tick() is not Step.FINISHED:
                    clock.advance(0.25)
        told = [event for event in events if "contact" in event.kind]
        assert [event.kind for event in told] == ["lost-contact", "contact-returned"] * 2
        kinds = [event.kind for event in events]
        assert kinds[kinds.index("answered") - 1] == "contact-returned"
        assert all(0 < event.values["seconds"] <= 4 for event in told[1::2])


@pytest.mark.parametrize("name", ["tick", "run"])
def test_server_that_is_not_ready_is_no_lost_contact(tmp_path: Path, name: str) -> None:
    clock = ManualClock()
    faults = [lost("check_in", 1), *(refused("check_in", "not-ready", nth) for nth in (2, 3)), lost("check_in", 4)]
    device, events = device_at(FaultyLink(LyingLink(ask()), *faults), tmp_path, clock=clock)
    with device:
        if name == "run":
            device.run()
        else:
            while device.tick() is not Step.FINISHED:
                clock.advance(0.25)
    kinds = [event.kind for event in events]
    told = ["lost-contact", "contact-returned", "waiting", "lost-contact", "contact-returned", "resumed", "checked-in"]
    assert kinds[: len(told)] == told
    assert events.texts("waiting")[0].endswith("refused with 'not-ready' (scripted fault); the device keeps asking")
    assert [event.values for event in events if event.kind in ("waiting", "resumed")] == [{"condition": "server"}] * 2


def test_return_of_contact_does_not_wait_for_work(tmp_path: Path) -> None:
    """The first request after a lost one is answered at once; a server holds the others until there is work."""
    waits: list[tuple[bool, list[str]]] = []
    nothing = service_pb2.NextAskResponse(come_back=service_pb2.ComeBack())

    class Failing(LyingLink):
        def next_ask(self, identity: Any, wait_seconds: float) -> Any:
            waits.append((wait_seconds > 0, [event.kind for event in events if "contact" in event.kind]))
            if len(waits) == 2:
                raise LinkError("refused")
            return super().next_ask(identity, wait_seconds)

    device, events = device_at(Failing(nothing, nothing, nothing), tmp_path, clock=ManualClock())
    with device:
        device.run()
    told = ["lost-contact", "contact-returned"]
    assert waits == [(True, []), (True, []), (False, told[:1]), (True, told), (True, told)]


def test_time_without_contact_begins_with_first_of_all_errors(tmp_path: Path) -> None:
    """Refused for ten seconds, then timed out for fifteen: two reports of the loss, and one of 25 seconds."""
    clock, errors = ManualClock(), [LinkError("refused"), LinkError("timed out")]

    class Failing(LyingLink):
        def next_ask(self, identity: Any, wait_seconds: float) -> Any:
            if errors:
                raise errors.pop(0)
            return super().next_ask(identity, wait_seconds)

    device, events = device_at(Failing(ask()), tmp_path, clock=clock)
    with device:
        for seconds in (10.0, 15.0, 0.0):
            device.tick()
            clock.advance(seconds)
    told = [event for event in events if "contact" in event.kind]
    assert [event.kind for event in told] == ["lost-contact", "lost-contact", "contact-returned"]
    assert told[-1].values["seconds"] == 25.0


def test_an_app_ends_the_pause_without_contact(fleet: Fleet, tmp_path: Path) -> None:
    """For a callback that says that the network is back."""
    link = FaultyLink(MemoryLink(fleet.api), *(lost("check_in", nth) for nth in range(1, 6)))
    with make_device(fleet, tmp_path, link=link, clock=ManualClock()) as device:
        for calls in range(1, 6):
            device.tick()
            assert (link.calls["check_in"], device.pause_seconds > 0) == (calls, True)
            device.wake()
        fleet.ask("d")
        assert device.tick() is Step.ANSWERED


def test_causes_that_change_at_once_are_one_report(tmp_path: Path) -> None:
    clock, errors = ManualClock(), [LinkError(text) for text in ("cancelled", "refused", "refused", "timed out")]

    class Failing(LyingLink):
        def next_ask(self, identity: Any, wait_seconds: float) -> Any:
            raise errors.pop(0)

    device, events = device_at(Failing(), tmp_path, clock=clock)
    with device:
        for seconds in (1.0, 3.0, 16.0, 0.0):
            device.tick()
            clock.advance(seconds)
    assert not errors
    assert [text.split(";")[0] for text in events.texts("lost-contact")] == ["cancelled", "timed out"]


def test_pauses_without_contact_double_up_to_the_longest(tmp_path: Path) -> None:
    """Each is drawn from the upper half of its range, so that a fleet does not call at once."""
    clock = ManualClock()

    class Failing(LyingLink):
        def next_ask(self, identity: Any, wait_seconds: float) -> Any:
            raise LinkError("refused")

    device, _ = device_at(Failing(ask()), tmp_path, clock=clock)
    with device:
        for longest in (0.5, 1.0, 2.0, 4.0, 8.0, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS):
            device.tick()
            assert longest / 2 <= device.pause_seconds <= longest
            clock.advance(longest)


def test_pauses_are_shorter_while_the_server_is_not_ready(tmp_path: Path) -> None:
    clock = ManualClock()
    link = FaultyLink(LyingLink(ask()), *(refused("check_in", "not-ready", nth) for nth in range(1, 8)))
    device, _ = device_at(link, tmp_path, clock=clock)
    with device:
        for longest in (0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0):
            device.tick()
            assert longest / 2 <= device.pause_seconds <= longest
            clock.advance(longest)
        assert device.tick() is Step.ANSWERED


class Deadlines:
    """Refuses every check-in, and keeps how long each caller would have waited."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.called = threading.Event()

    def check_in(self, request: bytes, context: Any) -> bytes:
        self.seconds.append(context.time_remaining())
        self.called.set()
        context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        return b""


@pytest.fixture
def deadlines() -> Iterator[tuple[Deadlines, str]]:
    calls, server = Deadlines(), grpc.server(ThreadPoolExecutor(2))
    handlers = {"CheckIn": grpc.unary_unary_rpc_method_handler(calls.check_in)}
    name = service_pb2.DESCRIPTOR.services_by_name["DeviceService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield calls, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_calls_of_an_apps_own_loop_wait_seconds_for_a_reply(deadlines: tuple[Deadlines, str], tmp_path: Path) -> None:
    """A server that hangs would stop the app's loop for the half minute that a thread of the device can wait."""
    calls, address = deadlines
    device, _ = device_at(address, tmp_path)
    with device:
        assert device.tick() is Step.WAITED
        assert len(calls.seconds) == 1, "gRPC tries again after a pause, in which the app's loop would stand still"
        with pytest.raises(LinkError):
            device.step(1.0)
        assert 0 < max(calls.seconds) <= 5.1  # gRPC rounds
        calls.called.clear()
        device.start()
        assert calls.called.wait(PATIENCE_SECONDS)
        device.stop()
        assert device.join(PATIENCE_SECONDS)
    assert calls.seconds[-1] > 10


@pytest.mark.parametrize("call", [Device.preview, lambda device: device.model, lambda device: device.models])
def test_a_preview_and_a_model_wait_seconds_for_a_reply(
    deadlines: tuple[Deadlines, str], tmp_path: Path, call: Callable[[Device], object]
) -> None:
    calls, address = deadlines
    with device_at(address, tmp_path)[0] as device, pytest.raises(LinkError):
        call(device)
    assert 0 < max(calls.seconds) <= 5.1  # gRPC rounds


@pytest.mark.parametrize("wanted", ["a pause of the server", "a budget"])
def test_a_step_waits_no_longer_than_it_is_told(tmp_path: Path, wanted: str) -> None:
    link = LyingLink(COME_BACK, ask())
    budgets = None
    if wanted == "a budget":  # of a day that is over in seven seconds
        link = LyingLink(ask())
        budgets = Budgets(bytes_per_day=10**9)
        (tmp_path / "usage.json").write_bytes(b"{")
    clock = ManualClock(time=datetime(2026, 3, 2, 23, 59, 53).timestamp())
    device, _ = device_at(link, tmp_path, clock=clock, budgets=budgets)
    with device:
        for seconds, now in ((0.25, 0.25), (0, 0.25), (0.5, 0.75)):
            assert device.step(seconds) is Step.WAITED
            assert clock.now() == now
        assert len(link.asks) == 1
        assert device.step(20) is Step.ANSWERED, "the pause is over before the wait"
        assert clock.now() == 7


def test_a_step_after_repeated_declines_waits_no_longer_either(tmp_path: Path) -> None:
    clock = ManualClock()
    link = LyingLink(*[ask(step="dream")] * 4)
    device, _ = device_at(link, tmp_path, clock=clock)
    with device:
        assert [device.step(0) for _ in range(3)] == [Step.DECLINED, Step.DECLINED, Step.WAITED]
        assert (len(link.declined), clock.now()) == (2, 0)
        assert device.pause_seconds == 0.5
        assert device.step(0.5) is Step.DECLINED


# --- stop and close


def test_each_stop_ends_one_turn(tmp_path: Path) -> None:
    device, _ = device_at(LyingLink(ask(), ask(round=2)), tmp_path)
    with device:
        device.stop()
        assert device.step() is Step.PAUSED
        assert device.step() is Step.ANSWERED
        device.stop()
        device.run()  # returns immediately
        assert device.tick() is Step.ANSWERED
        device.run()


def test_close_in_another_thread_ends_run(tmp_path: Path) -> None:
    link = WaitingLink()
    device, _ = device_at(link, tmp_path)
    running = threading.Thread(target=device.run)
    running.start()
    assert link.polling.wait(PATIENCE_SECONDS)
    device.close()
    running.join(PATIENCE_SECONDS)
    assert not running.is_alive()


@pytest.mark.parametrize("loop", ["run", "step", "tick", "start"])
def test_a_callback_may_close_the_device(tmp_path: Path, loop: str) -> None:
    devices: list[Device] = []
    devices.append(device_at(LyingLink(ask()), tmp_path, on_event=lambda event: devices[0].close())[0])
    getattr(devices[0], loop)()
    assert devices[0].join(PATIENCE_SECONDS)
    with pytest.raises(DeviceClosedError):
        devices[0].step()
    device_at(LyingLink(), tmp_path)[0].close()  # the state directory is free


def test_after_close_members_answer_or_say_device_is_closed(tmp_path: Path) -> None:
    device, _ = device_at(LyingLink(ask()), tmp_path / "used")
    with device:
        device.run()
    calls: list[Callable[[], Any]] = [device.run, device.step, device.tick, device.start]
    calls += [partial(device.replace_data, DATA), device.__enter__]
    for call in calls:
        with pytest.raises(DeviceClosedError, match="used after close; create a new Device"):
            call()
    device.stop()
    device.close()
    assert device.join(0)
    assert device.state_dir == tmp_path / "used"
    assert device.model is device.models["general"], "a loaded model stays usable"

    unused, _ = device_at(LyingLink(), tmp_path / "unused")
    unused.close()
    for name in ("model", "models"):
        with pytest.raises(DeviceClosedError, match=f"Device.{name} was used after close"):
            getattr(unused, name)
    with pytest.raises(DeviceClosedError, match=r"Device\.predict was used after close"):
        unused.predict(0)


def test_data_replaced_by_other_thread_do_not_disturb_work(tmp_path: Path) -> None:
    """Also if the app then reads the model: it would be built around the module that is being trained."""

    def replace_and_read(device: Device) -> Any:
        device.replace_data(DATA)
        return device.model

    def answers(state_dir: Path, *, replaced: bool) -> list[bytes]:
        devices: list[Device] = []

        def note(event: Event) -> None:
            if replaced and event.kind == "ask":
                assert in_thread(partial(replace_and_read, devices[0])) == [devices[0].model]

        link = LyingLink(ask())
        devices.append(device_at(link, state_dir, model=model(), on_event=note)[0])
        with devices[0]:
            devices[0].run()
        return [header.payload.sha256 for header in link.uploads]

    assert answers(tmp_path / "a", replaced=True) == answers(tmp_path / "b", replaced=False)


class NotingLink(WaitingLink):
    """Notes its calls, and the samples or the number of columns that a check-in declares."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def check_in(self, identity: Any, profile: Any) -> Any:
        if profile is not None:
            self.calls.append((profile.samples, len(profile.allowed_columns)))
        return super().check_in(identity, profile)

    def next_ask(self, identity: Any, wait_seconds: float) -> Any:
        self.calls.append("next_ask")
        return super().next_ask(identity, wait_seconds)


def use_less_data(device: Device) -> None:
    device.replace_data((DATA[0][:6], DATA[1][:6]))


def allow_less(device: Device) -> None:
    device.allow = COLUMNS[:2]


ALL = (len(DATA[0]), len(COLUMNS))
CHANGES = [(use_less_data, (6, len(COLUMNS))), (allow_less, (len(DATA[0]), 2))]


@pytest.mark.parametrize(("change", "declared"), CHANGES)
def test_new_data_and_fewer_columns_end_the_wait_for_work(
    tmp_path: Path, change: Callable[[Device], None], declared: tuple[int, int]
) -> None:
    link = NotingLink()
    device, _ = device_at(link, tmp_path)
    with device:
        device.start()
        assert link.polling.wait(PATIENCE_SECONDS)
        change(device)
        wait_until(lambda: link.calls[-1] == "next_ask" and len(link.calls) > 2, "the next request for work")
        assert link.calls == [ALL, "next_ask", declared, "next_ask"]


@pytest.mark.parametrize(("change", "declared"), CHANGES)
def test_a_change_just_before_the_wait_for_work_is_not_missed(
    tmp_path: Path, change: Callable[[Device], None], declared: tuple[int, int]
) -> None:
    link, devices, kinds = NotingLink(), list[Device](), list[str]()

    def note(event: Event) -> None:
        kinds.append(event.kind)
        if kinds == ["checked-in"]:
            change(devices[0])

    devices.append(device_at(link, tmp_path, on_event=note)[0])
    with devices[0] as device:
        assert device.step() is Step.WAITED
        device.start()
        assert link.polling.wait(PATIENCE_SECONDS)
        assert link.calls == [ALL, declared, "next_ask"]


def test_the_end_of_a_run_is_told_and_exported_once(tmp_path: Path) -> None:
    """Again if the operator has continued the run."""
    over = [service_pb2.NextAskResponse(finished="over")] * 2
    link = LyingLink(ask(), *over, service_pb2.NextAskResponse(come_back=service_pb2.ComeBack()), *over, ask(round=2))
    device, events = device_at(link, tmp_path, export="finish")
    with device:
        steps = [device.tick() for _ in range(9)]
    assert steps.count(Step.FINISHED) == 6
    assert [event.kind for event in events if event.kind in ("delivered", "exported", "finished")] == [
        *("delivered", "exported", "finished"),
        "finished",
        *("delivered", "exported", "finished"),
    ]


# --- signals


def test_no_signal_handler_is_left_or_set_by_another_thread(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def note(event: Event) -> None:
        seen[threading.current_thread().name] = signal.getsignal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    device, _ = device_at(LyingLink(ask()), tmp_path / "main", on_event=note)
    with device:
        device.run()
    assert seen.pop("MainThread") is not before
    assert signal.getsignal(signal.SIGINT) is before
    for name, changes in (("start", {}), ("opt-out", {"handle_ctrl_c": False})):
        device, _ = device_at(LyingLink(ask()), tmp_path / name, on_event=note)
        with device:
            device.run(**changes) if changes else device.start()
            assert device.join(PATIENCE_SECONDS)
    assert set(seen.values()) == {before}
    assert len(seen) == 2


def test_an_apps_own_handler_for_ctrl_c_is_respected(tmp_path: Path) -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        device, _ = device_at(LyingLink(), tmp_path, on_event=lambda event: signal.raise_signal(signal.SIGINT))
        with device:
            device.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [signal.SIGINT] * 2


# --- what an app is told while nothing happens


def test_first_contact_precedes_check_in_and_returns_nothing(fleet: Fleet, tmp_path: Path) -> None:
    events, clock = EventLog(), ManualClock()
    away = FaultyLink(MemoryLink(fleet.api), lost("check_in"), lost("next_ask", 2))
    with make_device(fleet, tmp_path, events, link=away, clock=clock) as device:
        for _ in range(5):
            device.tick()
            clock.advance(MAX_PAUSE_SECONDS)
    told = [
        (event.kind, event.text.split(" after ")[0])
        for event in events
        if "contact" in event.kind or "check" in event.kind
    ]
    assert [kind for kind, _ in told] == [
        *("lost-contact", "contact-returned", "checked-in"),
        *("lost-contact", "contact-returned"),
    ]
    assert told[0][1].startswith("no contact since the start: check_in: the server cannot be reached")
    assert told[1][1] == "the server can be reached"
    assert told[3][1].startswith("next_ask: the server cannot be reached")
    assert told[4][1] == "the server can be reached again"


def test_server_with_a_new_store_is_no_lost_contact(fleet: Fleet, tmp_path: Path) -> None:
    """It replies that it does not know the device, which then checks in again."""
    events, clock, link = EventLog(), ManualClock(), MemoryLink(fleet.api)
    with make_device(fleet, tmp_path, events, link=link, clock=clock) as device:
        device.tick()
        events.clear()
        MemoryLink.__init__(link, Fleet().api)  # as if its address led to another server
        for _ in range(4):
            device.tick()
            clock.advance(1)
    assert events.kinds() == ["waiting", "resumed", "checked-in"]
    assert events[0].values == {"condition": "server"}
    assert events[0].text.startswith("the server does not know this device any more: its store is new, or restored")
    assert events[0].text.endswith("; the device checks in again")


def test_a_wait_for_other_devices_is_an_event_at_each_end(fleet: Fleet, tmp_path: Path) -> None:
    events, clock = EventLog(), ManualClock()
    with make_device(fleet, tmp_path, events, clock=clock) as device:
        device.tick()
        clock.advance(POLL_SECONDS - 1)
        device.tick()
        assert events.kinds()[-1] == "checked-in", "a short wait is nothing to tell"
        for _ in range(3):
            clock.advance(1)
            device.tick()
        assert events.kinds()[-2:] == ["checked-in", "waiting"]
        assert events[-1].text == "no work for this device at the moment; it keeps asking, and nothing needs to be done"
        fleet.ask("d")
        device.tick()
        assert [event.values for event in events if event.kind in ("waiting", "resumed")] == [{"condition": "work"}] * 2
        assert events.kinds().index("resumed") < events.kinds().index("ask")


def test_a_stopped_run_is_told_once_and_is_no_wait_for_work(fleet: Fleet, tmp_path: Path) -> None:
    events, clock = EventLog(), ManualClock()
    with make_device(fleet, tmp_path, events, clock=clock) as device:
        device.tick()
        fleet.store.runs.set_status(RUN, RunStatus.STOPPED, "the disk is full")
        for _ in range(3):
            clock.advance(600)
            device.tick()
    assert events.kinds() == ["checked-in", "stopped"]
