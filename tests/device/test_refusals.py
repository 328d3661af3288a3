"""What a device does about refusals and unkind links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device.sdk_fleet import RUN, Crash, Fleet, crashing_link, make_device, stubborn_link, tiny_data
from support.devices import answer_waits, compute_of
from support.hostile_server import LyingLink, ask, device_at

from fleetdistill import Step
from fleetdistill.errors import (
    LinkError,
)
from fleetdistill.testing import EventLog, FaultyLink, ManualClock, refused
from fleetdistill.wire.codes import Code, is_final, status_of
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.intake.memory_link import MemoryLink


@pytest.mark.parametrize("call", ["check_in", "next_ask", "upload_status", "download"])
@pytest.mark.parametrize("code", sorted(code for code in Code if not is_final(code)))
def test_a_refusal_that_passes_ends_nothing_at_any_call(fleet: Fleet, tmp_path: Path, call: str, code: Code) -> None:
    fleet.ask("d")
    link = FaultyLink(MemoryLink(fleet.api), refused(call, code, after_seconds="7"))
    clock = ManualClock()
    with make_device(fleet, tmp_path, link=link, clock=clock) as device:
        if call != "upload_status" or status_of(code) in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            with pytest.raises(LinkError, match="was refused with") as error:
                device.step(0)
            assert error.value.after_seconds == 7.0
            calls = link.calls.copy()
            assert device.step(0) is Step.WAITED, "the server requested a pause"
            assert device.step(4.0) is Step.WAITED, "no longer than it was told to wait"
            assert clock.now() == pytest.approx(4.0)
            assert link.calls == calls
            clock.advance(3.0)
        assert device.step(0) is Step.ANSWERED, "sent again at once, or at the next turn"
    assert link.left == []
    assert len(fleet.store.asks.uploads(RUN)) == 1


def test_a_damaged_transfer_is_sent_again_at_once(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    with make_device(fleet, tmp_path, link=stubborn_link(fleet.api, "checksum", 2)) as device:
        assert device.step(0) is Step.ANSWERED
    assert len(fleet.store.asks.uploads(RUN)) == 1


def test_full_disk_at_server_keeps_answer_in_outbox(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    with make_device(fleet, tmp_path, link=stubborn_link(fleet.api, "no-space", 1)) as device:
        with pytest.raises(LinkError, match="no-space"):
            device.step(0)
        assert answer_waits(device)
        assert fleet.store.asks.uploads(RUN) == []
        assert device.step(0) is Step.ANSWERED
    assert len(fleet.store.asks.uploads(RUN)) == 1


def test_waiting_answer_is_taken_though_app_has_fewer_samples(fleet: Fleet, tmp_path: Path) -> None:
    """It was made of the data of before; what the device has now is told once it is settled."""
    crashing = make_device(fleet, tmp_path, link=crashing_link(fleet.api, "before sending"))
    fleet.ask("d")
    with pytest.raises(Crash):
        crashing.step(0)
    crashing.close(leave=False)
    with make_device(fleet, tmp_path, data=tiny_data(9)) as device:
        device.models  # noqa: B018  (the app looks before the device has settled anything)
        device.step(0)
        assert declared_samples(fleet) == 24
        fleet.ask("d")
        device.step(0)
        assert declared_samples(fleet) == 9
    assert [row.samples for row in fleet.store.asks.uploads(RUN)] == [24, 9]
    assert fleet.store.history.events(RUN, "refused") == []


def test_restored_server_refuses_one_answer_and_hears_of_samples(fleet: Fleet, tmp_path: Path) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
        profile = profile_in(fleet)
        profile.samples = 23  # as the backup has it
        fleet.store.database.write("UPDATE devices SET profile = ? WHERE run = ?", profile.SerializeToString(), RUN)
        for _ in range(2):
            fleet.ask("d")
            device.step(0)
    assert [event.kind for event in events if event.kind in ("refused", "answered")] == ["refused", "answered"]
    assert declared_samples(fleet) == 24


def profile_in(fleet: Fleet) -> contract_pb2.DeviceProfile:
    row = fleet.store.devices.get(RUN, "d")
    assert row is not None
    return contract_pb2.DeviceProfile.FromString(row.profile)


def declared_samples(fleet: Fleet) -> int:
    return profile_in(fleet).samples


def test_refused_answer_is_event_and_its_training_does_not_count(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    events = EventLog()
    with make_device(fleet, tmp_path, events, link=stubborn_link(fleet.api, "bad-value", 1)) as device:
        before = compute_of(device).module.state_dict()["stages.0.weight"].clone()
        assert device.step(0) is Step.DECLINED
        assert events[-1].kind == "refused"
        assert events[-1].values["code"] == "bad-value"
        assert device.model is not None
        assert torch.equal(compute_of(device).module.state_dict()["stages.0.weight"], before)


@pytest.mark.parametrize("code", [Code.NOT_READY, Code.TOO_MANY, Code.INTERNAL])
@pytest.mark.parametrize("member", ["preview", "model", "models", "forget"])
def test_every_member_raises_a_temporary_refusal_as_link_error(
    fleet: Fleet, tmp_path: Path, member: str, code: Code
) -> None:
    call = "leave" if member == "forget" else "check_in"
    link = FaultyLink(MemoryLink(fleet.api), refused(call, code, after_seconds="7"))
    with make_device(fleet, tmp_path, link=link) as device:
        if member == "forget":  # a device that has sent nothing needs no server
            device.step(0)
        uses: dict[str, Callable[[], Any]] = {"preview": device.preview, "forget": device.forget}
        use = uses.get(member, lambda: getattr(device, member))
        with pytest.raises(LinkError, match="was refused with") as error:
            use()
        assert error.value.after_seconds == 7.0
        use()


def test_a_receipt_of_another_attempt_is_none_of_this_answer(tmp_path: Path) -> None:
    """Another process with the identity of the device has sent the same bytes."""
    link = LyingLink(ask())
    link.change_receipt = lambda receipt: setattr(receipt.name, "attempt", 2)
    device, events = device_at(link, tmp_path)
    with device:
        device.run()
    (dropped,) = [event for event in events if event.kind == "dropped"]
    assert dropped.values["code"] == Code.SUPERSEDED
    assert events.texts("answered") == []
