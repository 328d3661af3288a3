"""What a device sends is in its ledger first; and what an app withdraws does not leave any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device.sdk_fleet import ALLOW, RUN, Crash, Fleet, crashing_link, make_device
from support.devices import answer_waits, state_of
from support.open_device import open_device
from support.private_fleet import PrivateFleet, RowsWorker

from fleetdistill import Device, Step
from fleetdistill.errors import ConfigurationError, LinkError, NoRoomError, RefusedError
from fleetdistill.state.sent_ledger import SentLedger
from fleetdistill.testing import EventLog, FaultyLink, lost, lost_reply, refused
from fleetdistill.wire.codec import decode
from fleetdistill_server.intake.memory_link import MemoryLink


def answers(device: Device) -> list[Any]:
    return [entry for entry in device.ledger.entries if entry.kind == "answer"]


# --- the ledger


def test_an_answer_is_in_the_ledger_before_its_bytes_leave(fleet: Fleet, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watching(MemoryLink):
        def upload(self, header: Any, chunks: Iterator[Any]) -> Any:
            seen.extend(answers(device))
            return super().upload(header, chunks)

    fleet.ask("d")
    with make_device(fleet, tmp_path, link=Watching(fleet.api)) as device:
        device.step(0)
        (before,), (after,) = seen, answers(device)
    (upload,) = fleet.store.asks.uploads(RUN)
    assert (before.outcome, after.outcome, after.receipt) == ("may have been sent", "received", upload.receipt)
    assert (after.run, after.round, after.step, after.samples) == (RUN, 1, "train", 24)
    assert after.columns == {"knowledge": ["features", "logits", "labels"], "metrics": ["metrics"]}
    assert after.sha256 == upload.sha256.hex()
    assert after.bytes > fleet.store.blobs.open(upload.sha256).data_bytes > 0


def test_the_ledger_has_what_a_check_in_and_a_decline_say(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        fleet.ask("d", step="no-such-step")
        device.step(0)
        check_in, declined = device.ledger.entries
        totals = device.ledger.totals
    assert (check_in.kind, check_in.run, check_in.samples) == ("check-in", RUN, 24)
    assert (declined.kind, declined.step, declined.outcome) == ("decline", "no-such-step", "sent")
    assert "has no handler for step" in declined.text
    assert totals.messages == {"check-in": 1, "decline": 1}


def test_a_check_in_without_a_reply_is_recorded_once(fleet: Fleet, tmp_path: Path) -> None:
    def check_ins() -> list[str]:
        return [entry.outcome for entry in device.ledger.entries if entry.kind == "check-in"]

    with make_device(fleet, tmp_path) as device:
        device.step(0)
        assert check_ins() == ["sent"]
    away = FaultyLink(MemoryLink(fleet.api), *(lost("check_in", nth) for nth in (1, 2, 3)))
    with make_device(fleet, tmp_path, link=away) as device:
        for _ in range(3):
            with pytest.raises(LinkError):
                device.step(0)
            assert check_ins() == ["sent", "may have been sent"]
        device.step(0)
        assert check_ins() == ["sent", "sent"]
    busy = FaultyLink(MemoryLink(fleet.api), refused("check_in", "too-many"))
    with make_device(fleet, tmp_path, link=busy) as device:
        with pytest.raises(LinkError):
            device.step(0)
        assert check_ins() == ["sent"] * 3, "a server that refuses it has it"


@pytest.mark.parametrize("fault", [lost("upload"), lost_reply("upload")], ids=["lost", "lost reply"])
def test_an_answer_without_receipt_may_have_been_sent(fleet: Fleet, tmp_path: Path, fault: Any) -> None:
    fleet.ask("d")
    with make_device(fleet, tmp_path, link=FaultyLink(MemoryLink(fleet.api), fault)) as device:
        with pytest.raises(LinkError):
            device.step(0)
        assert [answer.outcome for answer in answers(device)] == ["may have been sent"]
        device.step(0)
        assert [answer.outcome for answer in answers(device)] == ["received"]


def test_a_refused_answer_is_in_the_ledger_with_the_servers_code(fleet: Fleet, tmp_path: Path) -> None:
    class Late(MemoryLink):
        def upload(self, header: Any, chunks: Iterator[Any]) -> Any:
            raise RefusedError("late", "too late")

    fleet.ask("d")
    with make_device(fleet, tmp_path, link=Late(fleet.api)) as device:
        device.step(0)
        assert [(answer.outcome, answer.code) for answer in answers(device)] == [("refused", "late")]


def test_what_cannot_be_recorded_is_not_sent(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise NoRoomError("the disk is full")

    fleet.ask("d")
    with make_device(fleet, tmp_path) as device:
        with monkeypatch.context() as patch:
            patch.setattr(SentLedger, "begin_answer", full)
            with pytest.raises(LinkError, match="cannot be recorded before it is sent: the disk is full"):
                device.step(0)
        assert not fleet.store.asks.uploads(RUN)
        device.step(0)
        assert [answer.outcome for answer in answers(device)] == ["received"]


def test_decline_that_cannot_be_recorded_says_nothing_of_data(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise NoRoomError("the disk is full")

    with make_device(fleet, tmp_path) as device:
        device.step(0)
        fleet.ask("d", step="no-such-step")
        monkeypatch.setattr(SentLedger, "record", full)
        device.step(0)
    (declined,) = fleet.store.history.events(RUN, "declined")
    assert declined.text == "step 'no-such-step': the device's disk is full"


def test_a_killed_device_finds_its_entry_and_completes_it(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    crashing = make_device(fleet, tmp_path, link=crashing_link(fleet.api, "after the receipt was given"))
    with pytest.raises(Crash):
        crashing.step(0)
    crashing.close(leave=False)
    with make_device(fleet, tmp_path) as device:
        assert [answer.outcome for answer in answers(device)] == ["may have been sent"]
        device.step(0)
        assert [answer.outcome for answer in answers(device)] == ["received"]


def test_private_device_records_what_it_sends_not_what_it_has(tmp_path: Path) -> None:
    fleet = PrivateFleet()
    given: dict[str, Any] = {"worker": RowsWorker, "device_id": "d", "export": "never"}
    device = open_device(server=MemoryLink(fleet.api), state_dir=tmp_path, **given)
    with device:
        device.step(0)
        fleet.ask()
        device.step(0)
        (sent,) = answers(device)
        assert {entry.samples for entry in device.ledger.entries} == {1}
    assert sent.columns == {"statistics": ["class_statistics", "counts"]}


# --- allow


def test_withdrawn_column_leaves_next_answer_and_server_is_told(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        device.allow = ("features", "logits", "labels")
        fleet.ask("d")
        device.step(0)
        (upload,) = fleet.store.asks.uploads(RUN)
        assert set(decode(fleet.store.blobs.open(upload.sha256))) == {"knowledge"}
        assert allowed_at_the_server(fleet) == ["features", "labels", "logits"]
        assert device.allow == ("features", "logits", "labels")


def allowed_at_the_server(fleet: Fleet) -> list[str]:
    from fleetdistill.wire.v1 import contract_pb2

    row = fleet.store.devices.get(RUN, "d")
    assert row is not None
    return list(contract_pb2.DeviceProfile.FromString(row.profile).allowed_columns)


@pytest.mark.parametrize("wider", [("features", "counts"), ("everything",)])
def test_allow_cannot_be_widened_while_the_device_is_open(fleet: Fleet, tmp_path: Path, wider: tuple[str, ...]) -> None:
    with make_device(fleet, tmp_path) as device:
        with pytest.raises(ConfigurationError, match="allow"):
            device.allow = wider
        device.allow = ("features",)
        with pytest.raises(ConfigurationError, match="logits would be added; close the device"):
            device.allow = ("features", "logits")
        assert device.allow == ("features",)


def test_run_needing_withdrawn_column_stops_device_with_refusal(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        device.allow = ("features", "logits")
        for _ in range(2):
            with pytest.raises(RefusedError, match="labels") as refusal:
                device.step(0)
            assert refusal.value.code == "column-not-allowed"


def test_withdrawn_column_drops_stored_answer_and_declines_ask(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    events = EventLog()
    with make_device(fleet, tmp_path, events, link=FaultyLink(MemoryLink(fleet.api), lost("upload_status"))) as device:
        with pytest.raises(LinkError):
            device.step(0)
        assert answer_waits(device)
        committed = state_of(device)
        device.allow = ("features", "logits", "labels")
        assert device.step(0) is Step.DECLINED
        assert not answer_waits(device)
        assert state_of(device) == committed
        assert answers(device) == []
        (dropped,) = [event for event in events if event.kind == "dropped"]
    assert dropped.values["code"] == "column-not-allowed"
    assert "metrics, which the app no longer allows" in dropped.text
    assert [row.kind for row in fleet.store.history.events(RUN, "declined")] == ["declined"]
    assert not fleet.store.asks.uploads(RUN)


def test_restart_with_fewer_columns_drops_stored_answer(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    crashing = make_device(fleet, tmp_path, link=crashing_link(fleet.api, "before sending"))
    with pytest.raises(Crash):
        crashing.step(0)
    crashing.close(leave=False)
    events = EventLog()
    with make_device(fleet, tmp_path, events, allow=("features", "logits", "labels")) as device:
        device.step(0)
    assert "dropped" in events.kinds()
    assert not fleet.store.asks.uploads(RUN)


def test_columns_withdrawn_during_training_do_not_leave(fleet: Fleet, tmp_path: Path) -> None:
    """The answer is computed with the columns of before, and checked against those of after."""

    def withdraw(event: Any) -> None:
        if event.kind == "ask":
            thread = threading.Thread(target=lambda: setattr(device, "allow", ALLOW[:3]))
            thread.start()
            thread.join()

    fleet.ask("d")
    with make_device(fleet, tmp_path, on_event=withdraw) as device:
        device.step(0)
        (sent,) = answers(device)
        assert sent.columns == {"knowledge": ["features", "logits", "labels"]}
