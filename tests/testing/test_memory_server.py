"""A server in the test's process: the same run as over the other memory link, faults, deadlines and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_device import open_device

from fleetdistill import Device, Step
from fleetdistill.errors import ConfigurationError, LinkError, RefusedError, RunError
from fleetdistill.models import build_model
from fleetdistill.testing import (
    CALLS,
    EventLog,
    Fault,
    FaultyLink,
    ManualClock,
    cut,
    late,
    lost,
    lost_reply,
    oversized,
    refused,
    revoked,
)
from fleetdistill_server.testing import MemoryServer

SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"method": "fedavg", "rounds": 2},
    "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
    "model": {"extractor": "", "server": "", "device": "digits_linear"},
}


def settings(**run: Any) -> dict[str, dict[str, Any]]:
    return {**SETTINGS, "run": {**SETTINGS["run"], **run}}


def device_of(link: Any, state_dir: Path, **changes: Any) -> Device:
    random = np.random.default_rng(7)
    arguments: dict[str, Any] = {
        "model": lambda: build_model("digits_linear"),
        "data": (random.random((20, 1, 8, 8), np.float32), np.arange(20) % 10),
        "allow": ["parameters", "metrics"],
        "export": "never",
    }
    return open_device(server=link, state_dir=state_dir, **{**arguments, **changes})


def state_after(faults: list[Fault], tmp_path: Path) -> bytes:
    """The device's state at the end of a run with these faults, each of which was met."""
    clock = ManualClock()
    with MemoryServer(SETTINGS, clock) as server:
        link = FaultyLink(server.link(), *faults)
        with device_of(link, tmp_path, clock=clock, device_id="d") as device:
            device.run()
        assert (server.status, link.left) == ("finished", [])
        return (tmp_path / "state.safetensors").read_bytes()


def test_a_device_runs_to_the_end(tmp_path: Path) -> None:
    events = EventLog()
    with MemoryServer(SETTINGS) as server, device_of(server.link(), tmp_path, on_event=events.append) as device:
        device.run()
        assert server.status == "finished"
        assert len(server.store.asks.uploads("test")) == 3  # two rounds and the end result
    assert events.kinds().count("delivered") == 3
    assert events.of("finished").text == "finished: 2 rounds completed"


def test_each_step_may_run_in_another_thread(tmp_path: Path) -> None:
    steps = 0
    with MemoryServer(SETTINGS) as server, device_of(server.link(), tmp_path) as device:
        while server.status != "finished" and steps < 100:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(device.step, 0.0).result()
            steps += 1
        assert server.status == "finished"


@pytest.mark.parametrize(
    "fault",
    [
        lost_reply("next_ask", 2),
        lost_reply("upload"),
        cut("download", 0),
        cut("download", 9),  # all chunks have come then, but not the end of the stream
        refused("upload", "no-space"),
        *(
            pytest.param(fault, marks=pytest.mark.long)
            for fault in (
                lost("check_in"),
                lost_reply("check_in", 2),
                lost("next_ask", 2),
                lost("upload_status"),
                lost("upload"),
                cut("upload", 0),
                cut("upload", 1),
                refused("next_ask", "too-many"),
            )
        ),
    ],
    ids=lambda fault: f"{fault.call} {fault.nth} {fault.reply_only} {fault.chunks} {type(fault.error).__name__}",
)
def test_a_fault_changes_nothing_in_what_comes_out(fault: Fault, tmp_path: Path) -> None:
    assert state_after([fault], tmp_path / "faulty") == state_after([], tmp_path / "undisturbed")


def test_several_devices_take_turns(tmp_path: Path) -> None:
    with MemoryServer(settings(min_devices=2)) as server:
        devices = [device_of(server.link(), tmp_path / name, device_id=name) for name in ("a", "b")]
        server.play(*devices)
        assert server.status == "finished"
        assert {row.device for row in server.store.asks.uploads("test")} == {"a", "b"}
        for device in devices:
            device.close()


def test_devices_whose_calls_are_lost_take_turns_too(tmp_path: Path) -> None:
    with MemoryServer(settings(min_devices=2), ManualClock()) as server:
        link = FaultyLink(server.link(), lost("check_in"), lost_reply("upload"))
        with (
            device_of(link, tmp_path / "a", device_id="a") as first,
            device_of(server.link(), tmp_path / "b", device_id="b") as second,
        ):
            server.play(first, second)
        assert (server.status, link.left) == ("finished", [])
        away = FaultyLink(server.link(), *(lost("check_in", nth) for nth in range(1, 4)))
        says = r"c did not finish in 3 steps; .* Last lost call: check_in: "
        with device_of(away, tmp_path / "c", device_id="c") as third, pytest.raises(ConfigurationError, match=says):
            server.play(third, steps=3)


def test_a_device_too_few_is_said(tmp_path: Path) -> None:
    expected = pytest.raises(ConfigurationError, match="a did not finish in 5 steps; the run has min_devices = 2")
    with MemoryServer(settings(min_devices=2)) as server, device_of(server.link(), tmp_path, device_id="a") as device:
        with expected:
            server.play(device, steps=5)
        assert device.step(0) is Step.WAITED


def test_docstring_and_page_name_every_call_that_can_fail() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/test-your-app.md").read_text(encoding="utf-8")
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    for call in CALLS:
        assert f"`{call}`" in str(FaultyLink.__doc__)
        assert f"`{call}`" in rows


def test_a_run_without_an_end_is_not_played(tmp_path: Path) -> None:
    with MemoryServer(settings(rounds=0)) as server, device_of(server.link(), tmp_path) as device:
        with pytest.raises(ConfigurationError, match=r"no end \(rounds = 0\): call device.step\(\) yourself, or set"):
            server.play(device)
        assert device.step(0) is Step.ANSWERED


def test_a_deadline_passes_when_the_clock_is_moved(tmp_path: Path) -> None:
    clock, events = ManualClock(), EventLog()
    run = settings(deadline_seconds=60.0)
    with MemoryServer(run, clock) as server:
        link = FaultyLink(server.link(), lost("upload"))
        with device_of(link, tmp_path, clock=clock, on_event=events.append) as device:
            with pytest.raises(LinkError, match="the server cannot be reached"):
                device.step(0)
            clock.advance(61.0)
            device.step(0)
            assert events.of("dropped").values["code"] == "late"
            device.run()
        assert server.status == "finished"


def test_a_run_whose_rounds_all_fall_short_fails(tmp_path: Path) -> None:
    clock = ManualClock()
    with MemoryServer(settings(deadline_seconds=60.0), clock) as server:
        faults = [lost("upload", nth) for nth in range(1, 40)]
        with device_of(FaultyLink(server.link(), *faults), tmp_path, clock=clock) as device:

            def late_again_and_again() -> None:
                for _ in range(100):
                    try:
                        device.step(0)
                    except LinkError:
                        clock.advance(61.0)

            with pytest.raises(RunError, match="10 rounds in a row fell short"):
                late_again_and_again()
            for call in (lambda: device.step(0), device.run, lambda: server.play(device), server.turn):
                with pytest.raises(RunError, match="10 rounds in a row fell short"):
                    call()
            assert server.status == "stopped"


@pytest.mark.parametrize(
    ("make", "kind", "code"),
    [(lambda clock: late(clock, 61.0), "dropped", "late"), (lambda clock: oversized(), "refused", "too-large")],
    ids=["late", "oversized"],
)
def test_after_a_rejected_answer_the_run_goes_on(make: Any, kind: str, code: str, tmp_path: Path) -> None:
    clock, events = ManualClock(), EventLog()
    with MemoryServer(settings(deadline_seconds=60.0), clock) as server:
        link = FaultyLink(server.link(), make(clock))
        with device_of(link, tmp_path, clock=clock, on_event=events.append) as device:
            device.run()
        assert (server.status, link.left) == ("finished", [])
        closed = [row.status for row in server.store.runs.rounds("test")]
        assert sorted(closed) == ["closed", "closed", "short"]
    result = [(event.kind, event.values["code"]) for event in events if event.kind in ("dropped", "refused")]
    assert result == [(kind, code)]


def test_a_revoked_device_ends_with_the_code(tmp_path: Path) -> None:
    with MemoryServer(SETTINGS) as server:
        link = FaultyLink(server.link(), revoked("upload_status"))
        with device_of(link, tmp_path) as device, pytest.raises(RefusedError) as error:
            device.run()
    assert error.value.code == "revoked"


def test_a_refusal_that_ends_a_device_reaches_the_app(tmp_path: Path) -> None:
    with MemoryServer(SETTINGS) as server:
        link = FaultyLink(server.link(), refused("next_ask", "revoked", reason="it was stolen"))
        with device_of(link, tmp_path) as device, pytest.raises(RefusedError) as error:
            device.run()
    assert (error.value.code, error.value.details) == ("revoked", {"reason": "it was stolen"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lost("uplaod"), "unknown call 'uplaod'; did you mean 'upload'?"),
        (lambda: refused("upload", "no-spaec"), "unknown code 'no-spaec'; did you mean 'no-space'?"),
        (lambda: lost("upload", 0), "nth is 0, must be at least 1"),
        (lambda: Fault("leave", None, change=lambda header: header), "change is for upload only"),
        (lambda: cut("next_ask", 1), "chunks=1.: chunks must be at least 0, for upload and download only"),
        (lambda: MemoryServer({"run": {}, "contract": {}}), "classes"),
    ],
)
def test_what_is_wrong_in_a_test_is_said(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")):
        make()


def test_waits_take_no_time_and_are_listed(tmp_path: Path) -> None:
    """Ten attempts of growing pauses: on a machine's own clock they would take over a minute."""
    clock = ManualClock(100.0)
    with MemoryServer(SETTINGS, clock) as server:
        link = FaultyLink(server.link(), *(lost("check_in", nth) for nth in range(1, 11)))
        with device_of(link, tmp_path, clock=clock) as device:
            device.run()
    assert len(clock.waits) >= 10
    assert all(first < last for first, last in zip(clock.waits[:5:2], clock.waits[2:6:2], strict=False))
    assert clock.now() == pytest.approx(100.0 + sum(clock.waits))
    with pytest.raises(ValueError, match=r"seconds is -1\.0, must be at least 0"):
        clock.advance(-1.0)


def test_an_event_that_is_not_alone_is_said() -> None:
    with pytest.raises(ValueError, match="the log has 0 events of kind 'delivered', expected 1"):
        EventLog().of("delivered")


def test_the_sdks_half_needs_neither_server_nor_torch() -> None:
    code = (
        "import sys, fleetdistill; assert 'fleetdistill.testing' not in sys.modules; import fleetdistill.testing; "
        "print(sorted({'torch', 'fleetdistill_server', 'pydantic'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "client_sdk")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[]\n"
