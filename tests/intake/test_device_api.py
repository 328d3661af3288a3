"""What devices are asked, and which devices are present."""

from __future__ import annotations

import logging
import time

import pytest
from intake.device_api_fleet import RUN, Fleet, silence
from support.wire_samples import (
    i32,
    make_identity,
    make_payload,
    make_profile,
)

from fleetdistill.errors import RefusedError, StoreError
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.security.revocation import revoke_device
from fleetdistill_server.store.records import Device
from fleetdistill_server.store.states import RunStatus

# --- asks


def test_an_ask_tells_what_to_do(fleet: Fleet) -> None:
    identity = fleet.join()
    assert fleet.api.next_ask(identity) is None
    payload = make_payload()
    fleet.ask(payload=payload)
    response = fleet.api.next_ask(identity)
    assert response is not None
    ask = response.ask
    assert (ask.round, ask.step_number, ask.step, ask.seed, ask.completed_rounds) == (1, 1, "train", 7, 0)
    assert (ask.payload, ask.payload_bytes) == (payload.sha256, payload.data_bytes)
    assert 590 < ask.deadline_seconds <= 600


def test_a_poll_that_finds_nothing_reads_the_devices_row_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every idle device does this again and again."""
    identity, read, looked_up = fleet.join(), fleet.api.store.devices.get, list[str]()

    def device(run: str, name: str) -> Device | None:
        looked_up.append(name)
        return read(run, name)

    monkeypatch.setattr(fleet.api.store.devices, "get", device)
    assert fleet.api.next_ask(identity) is None
    assert looked_up == ["d1"]


def test_a_run_that_is_over_says_why_once_nothing_is_asked(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    fleet.store.runs.set_status(RUN, RunStatus.FINISHED, "30 rounds completed")
    assert fleet.api.next_ask(identity) is not None
    fleet.send(identity, make_payload())
    response = fleet.api.next_ask(identity)
    assert response is not None
    assert response.finished == "finished: 30 rounds completed"


def test_devices_of_stopped_run_are_told_to_return_later_and_why(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.store.runs.set_status(RUN, RunStatus.STOPPED, "the engine failed 6 times" + "!" * 5000)
    response = fleet.api.next_ask(identity)
    assert response is not None
    come_back = response.come_back
    assert 0 < come_back.after_seconds < come_back.before_seconds <= 60
    assert come_back.reason.startswith("the run is stopped until its operator restarts it: the engine failed 6")
    assert len(come_back.reason) == 1000
    fleet.store.runs.set_status(RUN, RunStatus.RUNNING, "started again")
    assert fleet.api.next_ask(identity) is None


@pytest.mark.parametrize("lease", [4.0, 60.0])
def test_devices_of_stopped_run_return_before_their_lease_ends(fleet: Fleet, lease: float) -> None:
    """Otherwise each of them is an event with every pause, for as long as the run is stopped."""
    identity = fleet.join()
    fleet.store.runs.set_status(RUN, RunStatus.STOPPED, "the engine failed 6 times")
    fleet.api.sessions.lease_seconds = lease
    response = fleet.api.next_ask(identity)
    assert response is not None
    assert response.come_back.before_seconds <= lease / 2


def test_device_to_forget_does_not_wait_for_stopped_run(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.store.runs.set_status(RUN, RunStatus.STOPPED, "the engine failed 6 times")
    fleet.store.devices.ask_to_forget(RUN, identity.device)
    response = fleet.api.next_ask(identity)
    assert response is not None
    assert "its deletion was requested" in response.finished


def test_a_heartbeat_tells_whether_the_work_still_counts(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    beat = service_pb2.HeartbeatRequest(identity=identity)
    assert fleet.api.heartbeat(beat).ask_open
    fleet.store.asks.close(1, "deadline passed")
    assert not fleet.api.heartbeat(beat).ask_open


# --- presence


def test_ended_lease_closes_open_asks_and_is_an_event(fleet: Fleet) -> None:
    fleet.join("d1")
    fleet.join("d2")
    fleet.ask("d1", "d2")
    silence(fleet, "d1")
    wakes = fleet.wakes
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d2"]
    assert (fleet.ask_state("d1"), fleet.ask_state("d2")) == (("out", "lease ended"), ("open", ""))
    (event,) = fleet.store.history.events(RUN, "lease-ended")
    assert (event.device, event.text) == ("d1", "d1 made no call for 60 s")
    assert fleet.wakes > wakes
    fleet.api.sessions.end_leases()
    assert len(fleet.store.history.events(RUN)) == 1


def test_the_server_s_own_pause_is_charged_to_nobody(fleet: Fleet) -> None:
    """Stopped for ten minutes, or waiting for its disk: it could not have heard them."""
    identity = fleet.join("d1")
    fleet.join("d2")
    fleet.ask("d1", "d2")
    fleet.api.sessions.end_leases()
    fleet.clock.advance(600)
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1", "d2"]
    for _ in range(70):
        fleet.clock.advance(1)
        fleet.api.heartbeat(service_pb2.HeartbeatRequest(identity=identity))
        fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1"], "d2 had a whole lease to call after the pause"
    assert fleet.ask_state("d2") == ("out", "lease ended")


def test_disk_delay_during_sweep_ends_no_lease(fleet: Fleet) -> None:
    fleet.join("d1")
    fleet.api.sessions.end_leases()
    fleet.clock.advance(6)  # it is time to write down who called, and that takes long

    def hang() -> None:
        fleet.clock.advance(600)

    fleet.before_commit = hang
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1"]


def test_many_leases_end_in_one_commit_except_of_recent_caller(fleet: Fleet) -> None:
    names = [f"d{number}" for number in range(5)]
    joined = {name: fleet.join(name) for name in names}
    fleet.ask(*names)
    silence(fleet, *names)
    commits: list[int] = []

    def call() -> None:
        commits.append(1)
        if len(commits) == 1:
            fleet.api.heartbeat(service_pb2.HeartbeatRequest(identity=joined["d3"]))

    fleet.before_commit = call
    fleet.api.sessions.end_leases()
    assert len(commits) == 1
    assert fleet.store.devices.present(RUN) == ["d3"]
    assert fleet.ask_state("d3") == ("open", "")
    assert [event.device for event in fleet.store.history.events(RUN, "lease-ended")] == ["d0", "d1", "d2", "d4"]


def test_a_lease_whose_end_could_not_be_written_ends_later(fleet: Fleet) -> None:
    fleet.join("d1")
    fleet.api.sessions.end_leases()
    silence(fleet, "d1")

    def fail() -> None:
        fleet.before_commit = lambda: None
        raise StoreError("the disk is full")

    fleet.before_commit = fail
    with pytest.raises(StoreError):
        fleet.api.sessions.end_leases()
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == []


@pytest.mark.parametrize("call", ["next_ask", "heartbeat", "status"])
def test_every_call_renews_the_lease(fleet: Fleet, call: str) -> None:
    identity = fleet.join()
    fleet.ask()
    silence(fleet, "d1")
    if call == "next_ask":
        fleet.api.next_ask(identity)
    elif call == "heartbeat":
        fleet.api.heartbeat(service_pb2.HeartbeatRequest(identity=identity))
    else:
        fleet.status(identity)
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1"]


def test_device_with_ended_lease_is_out_for_round_but_not_run(fleet: Fleet) -> None:
    """It was suspended or cut off for a while and simply goes on calling."""
    identity = fleet.join()
    fleet.ask()
    silence(fleet, "d1")
    fleet.api.sessions.end_leases()
    wakes = fleet.wakes
    assert fleet.api.next_ask(identity) is None
    assert fleet.store.devices.present(RUN) == ["d1"]
    assert fleet.wakes > wakes  # a run may wait for devices
    silence(fleet, "d1")
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == []


def test_a_device_that_leaves_is_gone_at_once(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    fleet.api.leave(service_pb2.LeaveRequest(identity=identity))
    assert fleet.store.devices.present(RUN) == []
    assert fleet.ask_state() == ("out", "device left")
    fleet.api.sessions.end_leases()
    assert fleet.store.history.events(RUN) == []  # leaving is nothing out of the ordinary


@pytest.mark.parametrize("call", ["heartbeat", "check_in"])
def test_running_call_does_not_bring_revoked_device_back(fleet: Fleet, call: str) -> None:
    """The guard lets it in, the revocation lands, and then the device API has its turn."""
    identity = fleet.join()
    fleet.store.devices.mark_absent(RUN, "d1", "lease ended")

    def revoke() -> None:
        revoke_device(fleet.store, "d1", "stolen")

    fleet.before_commit = revoke
    if call == "heartbeat":
        fleet.api.heartbeat(service_pb2.HeartbeatRequest(identity=identity))
    else:
        fleet.check_in(secret=identity.secret)
    assert fleet.store.devices.present(RUN) == []
    fleet.ask()
    assert fleet.ask_state() == ("out", "device revoked")


def test_device_declining_ask_leaves_only_that_ask_with_reason(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    decline = service_pb2.DeclineRequest(identity=identity, round=1, step_number=1, reason="no teacher " * 1000)
    other = service_pb2.DeclineRequest(identity=identity, round=1, step_number=2, reason="of another ask")
    fleet.api.decline(other)
    assert fleet.ask_state() == ("open", ""), "a device that is late must not close what it was asked since"
    fleet.api.decline(decline)
    assert fleet.ask_state() == ("out", "declined")
    (event,) = fleet.store.history.events(RUN)
    assert (event.kind, event.device) == ("declined", identity.device)
    assert event.text.startswith("step 'train': no teacher no teacher")
    assert len(event.text) < 600
    assert fleet.store.devices.present(RUN) == [identity.device], "present all the time: the next round takes it"
    assert fleet.api.next_ask(identity) is None
    fleet.api.decline(decline)
    assert len(fleet.store.history.events(RUN)) == 1


def test_after_a_restart_present_devices_have_a_fresh_lease(fleet: Fleet) -> None:
    fleet.join()
    restarted = DeviceApi(fleet.store, lease_seconds=0.0)
    restarted.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1"]
    restarted.sessions.adopt_present_devices()
    time.sleep(0.01)
    restarted.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == []


# --- downloads


def test_what_the_events_say_can_be_read_by_a_machine(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    with pytest.raises(RefusedError):
        fleet.send(identity, make_payload(labels=i32([0, 0, 7, 0])))
    (event,) = fleet.store.history.events(RUN)
    assert event.code == "bad-value"
    assert event.text == "device d1: label 7 outside [0, 3) at row 2 of knowledge/labels"


def test_log_lines_of_events_about_an_ask_have_its_id(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """Ask 1 is declined, ask 2 has a bad answer, ask 3 is late."""
    caplog.set_level(logging.INFO, "fleetdistill.server.events")
    identity = fleet.join()
    fleet.ask()
    fleet.api.decline(service_pb2.DeclineRequest(identity=identity, round=1, step_number=1))
    fleet.ask(step_number=2)
    with pytest.raises(RefusedError):
        fleet.send(identity, make_payload(labels=i32([0, 0, 7, 0])), step_number=2)
    fleet.ask(step_number=3)
    fleet.store.asks.expire(RUN, time.time() + 10_000)
    records = [record for record in caplog.records if record.name == "fleetdistill.server.events"]
    told = [tuple(getattr(record, f"about_{name}") for name in ("event", "round", "ask")) for record in records]
    assert told == [("declined", 1, 1), ("refused", 1, 2), ("late", 1, 3)]


# --- devices registered together


def test_registered_devices_are_asked_and_known_by_their_secrets(fleet: Fleet) -> None:
    secrets = {f"d{number}": bytes([number]) * 32 for number in (1, 2, 3)}
    fleet.api.register(RUN, [(device, secret, make_profile()) for device, secret in secrets.items()])
    assert fleet.wakes == 1
    rows = {row.id: row for row in fleet.store.devices.all(RUN)}
    assert rows.keys() == secrets.keys()
    assert {row.profile for row in rows.values()} == {make_profile().SerializeToString()}
    fleet.ask("d1", "d2")
    for device in ("d1", "d2"):
        response = fleet.api.next_ask(make_identity(device, secrets[device]))
        assert response is not None
        assert response.ask.step == "train"
    before = fleet.store.devices.get(RUN, "d3")
    assert before is not None
    assert fleet.check_in("d3", secrets["d3"]).secret in (b"", secrets["d3"])
    after = fleet.store.devices.get(RUN, "d3")
    assert after is not None
    assert (after.secret_hash, after.profile) == (before.secret_hash, before.profile)
    with pytest.raises(RefusedError):
        fleet.check_in("d2", b"x" * 32)


def test_one_profile_that_does_not_fit_registers_none(fleet: Fleet) -> None:
    other = make_profile()
    other.classes += 1
    with pytest.raises(RefusedError):
        fleet.api.register(RUN, [("d1", b"1" * 32, make_profile()), ("d2", b"2" * 32, other)])
    assert fleet.store.devices.all(RUN) == []
