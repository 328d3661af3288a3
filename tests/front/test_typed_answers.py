"""What an app hears of an answer that gets no receipt: a kind and a code of its own for each reason, over real gRPC.

The SDK's `Device` calls a live front; the test plays the engine in the front's store, and a rival with the device's own
identity. `Meddling` is the link of the device: it lets the test act at a moment between two calls.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.devices import answer_waits, state_of
from support.live_front import RUN, Client, LiveFront, open_round, refused, upload_name, write_asks
from support.small_device import SmallWorker, small_device
from support.wire_samples import make_payload

from fleetdistill import Device, Step
from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.testing import EventLog
from fleetdistill.wire.codec import Payload
from fleetdistill_server.store.records import Upload
from fleetdistill_server.store.store import Store

FOREVER = 1e12  # a clock that is past every deadline


class Meddling(GrpcLink):
    """Acts once right before a named call, or in the middle of an upload."""

    def __init__(self, port: int, moment: str, act: Callable[[], None]) -> None:
        super().__init__(f"127.0.0.1:{port}")
        self._moment, self._act = moment, act

    def _at(self, moment: str) -> None:
        if moment == self._moment:
            self._moment = ""
            self._act()

    def upload_status(self, identity: Any, name: Any) -> Any:
        self._at("before asking for the status")
        return super().upload_status(identity, name)

    def upload(self, header: Any, chunks: Any, *more: Any, **named: Any) -> Any:
        receipt = super().upload(header, self._middle(chunks), *more, **named)
        self._at("after the receipt")
        return receipt

    def _middle(self, chunks: Iterator[Any]) -> Iterator[Any]:
        yield next(chunks)
        self._at("in the middle of the upload")
        yield from chunks


class Case:
    """A round with one ask for one SDK device, and what the test does to it."""

    def __init__(self, front: LiveFront, store: Store, directory: Path, name: str) -> None:
        self.front, self.store, self.directory, self.name = front, store, directory, name
        self.events = EventLog()
        self.round = 0

    def device(
        self, moment: str = "", act: Callable[[], None] = lambda: None, link: GrpcLink | None = None, **changes: Any
    ) -> Device:
        link = link or Meddling(self.front.port, moment, act)
        return small_device(self.front.port, self.directory, self.events, link, device_id=self.name, **changes)

    def open(self) -> None:
        self.round = open_round(self.store, self.name)
        write_asks(self.store, self.round, self.name)

    def turn(self, moment: str, act: Callable[[], None]) -> None:
        """The device checks in, is asked, and answers while the test acts."""
        with self.device(moment, act) as device:
            assert device.step(0) is Step.WAITED
            self.open()
            assert device.step(5.0) in (Step.ANSWERED, Step.DECLINED)
            assert not answer_waits(device)
            state = state_of(device)
            self.went_back = state == b"0"
            assert device.step(0) is Step.WAITED, "it goes on"

    def rival(self) -> Client:
        """A second process with the identity of the device."""
        client = Client(self.front.port, self.name)
        client.secret = bytes.fromhex(json.loads((self.directory / "device.json").read_text())["secret"])
        return client

    @property
    def uploads(self) -> list[Upload]:
        return [row for row in self.store.asks.uploads(RUN) if row.device == self.name]


@pytest.fixture
def case(front: LiveFront, store: Store, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Case]:
    name = f"d-{hashlib.sha256(request.node.name.encode()).hexdigest()[:8]}"
    made = Case(front, store, tmp_path / "state", name)
    yield made
    if (row := store.runs.open_round(RUN)) is not None:
        store.runs.close_short_round(RUN, row.number, "the test is over")


MOMENTS = ["before asking for the status", "in the middle of the upload"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_answer_after_the_deadline_is_late(case: Case, moment: str) -> None:
    case.turn(moment, lambda: case.store.asks.expire(RUN, FOREVER) and None)  # type: ignore[arg-type]
    dropped = case.events.of("dropped")
    assert dropped.values["code"] == "late"
    assert dropped.round == case.round
    assert "no longer accepts answers (deadline passed)" in dropped.text
    assert case.uploads == []
    assert case.went_back


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_answer_to_a_round_that_is_over_is_closed(case: Case, moment: str) -> None:
    case.turn(moment, lambda: case.store.runs.close_short_round(RUN, case.round, "too few devices"))
    dropped = case.events.of("dropped")
    assert dropped.values["code"] == "closed"
    assert "no longer accepts answers (round closed)" in dropped.text
    assert case.uploads == []
    assert case.went_back


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_answer_beside_an_accepted_one_is_superseded(case: Case, moment: str, attempt: int) -> None:
    """Under another attempt's number, and under its own: the receipt must be for its own bytes."""

    def overtake() -> None:
        case.rival().upload(upload_name(case.round, attempt=attempt), make_payload(rows=3))

    case.turn(moment, overtake)
    (row,) = case.uploads
    dropped = case.events.of("dropped")
    assert (dropped.values["code"], dropped.values["receipt"]) == ("superseded", row.receipt)
    assert f"already has an answer, attempt {attempt}, receipt {row.receipt}" in dropped.text
    assert row.sha256 == make_payload(rows=3).sha256
    assert case.went_back


def test_answer_breaking_contract_is_refused_with_its_code(case: Case) -> None:
    class Labelling(SmallWorker):
        def answer(self, *given: Any) -> Any:
            work = super().answer(*given)
            work.answer.parts["knowledge"].labels[:] = 99  # type: ignore[attr-defined]
            return work

    with case.device(worker=Labelling) as device:
        device.step(0)
        case.open()
        device.step(5.0)
    refused = case.events.of("refused")
    assert refused.values["code"] == "bad-value"
    assert refused.values["tensor"] == "knowledge/labels"
    assert case.uploads == []


def test_an_accepted_answer_tells_its_receipt_and_its_tries(case: Case) -> None:
    case.turn("", lambda: None)
    (row,) = case.uploads
    assert case.events.of("answered").values == {"receipt": row.receipt, "tries": 1}


def test_answer_resumes_after_lost_connection_and_reports_tries(case: Case) -> None:
    def cut() -> None:
        raise LinkError("the cable was pulled")

    with case.device("in the middle of the upload", cut, rows=80_000) as device:
        device.step(0)
        case.open()
        with pytest.raises(LinkError):
            device.step(5.0)
    with case.device(rows=80_000) as device:
        assert device.step(5.0) is Step.ANSWERED
    assert case.events.of("answered").values["tries"] == 2
    assert case.events.kinds().count("ask") == 1, "computed once"
    assert len(case.uploads) == 1


def test_answer_is_kept_when_server_no_longer_knows_device(case: Case) -> None:
    """Nothing is wrong with the answer: the app hears why, and it waits until the server knows the device again."""
    row: dict[str, Any] = {}

    def forget() -> None:
        row.update(case.store.database.row("SELECT * FROM devices WHERE device = ?", case.name) or {})
        case.store.database.write("UPDATE devices SET secret_hash = ? WHERE device = ?", b"?" * 32, case.name)

    with case.device("before asking for the status", forget) as device:
        device.step(0)
        case.open()
        with pytest.raises(RefusedError) as error:
            device.step(5.0)
        assert error.value.code == "bad-identity"
        assert answer_waits(device)
    case.store.database.write("UPDATE devices SET secret_hash = ? WHERE device = ?", row["secret_hash"], case.name)
    write_asks(case.store, case.round, case.name)
    with case.device() as device:
        assert device.step(5.0) is Step.ANSWERED
    assert len(case.uploads) == 1
    assert case.events.of("answered").values["receipt"] == case.uploads[0].receipt


def test_device_answers_anew_after_server_loses_its_answer(case: Case) -> None:
    with case.device() as device:
        device.step(0)
        case.open()
        device.step(5.0)
        ask = case.store.asks.get(RUN, case.round, 1, case.name)
        assert ask is not None
        case.store.asks.withdraw_upload(ask.id, "its file has another SHA-256")
        assert device.step(5.0) is Step.ANSWERED
    first, second = case.uploads
    assert (first.attempt, first.status, second.attempt, second.status) == (
        1,
        "reported",
        2,
        "acknowledged",
    )
    assert case.events.of("asked-again").values == {"first_attempt": 2}
    told = [event.values["receipt"] for event in case.events if event.kind == "answered"]
    assert told == [first.receipt, second.receipt]


def test_device_that_vanishes_and_returns_in_round_answers_once(case: Case) -> None:
    """Its process dies after the receipt; another with the same identity takes over while the round is open."""

    class Death(BaseException):
        """The process ends here."""

    def die() -> None:
        raise Death

    dying = case.device("after the receipt", die)
    dying.step(0)
    case.open()
    with pytest.raises(Death):
        dying.step(5.0)
    dying.close(leave=False)
    dying._parts.link.close()
    with case.device() as device:
        assert device.step(5.0) is Step.ANSWERED
        assert device.step(0) is Step.WAITED
    (row,) = case.uploads
    assert case.events.of("answered").values["receipt"] == row.receipt
    assert case.events.kinds().count("ask") == 1


def test_lease_ending_during_work_closes_ask_for_this_round_only(case: Case) -> None:
    def lease_ends() -> None:
        case.store.devices.mark_absent(RUN, case.name, "lease ended")

    case.turn("before asking for the status", lease_ends)
    dropped = case.events.of("dropped")
    assert dropped.values["code"] == "closed"
    assert "(lease ended)" in dropped.text
    case.store.runs.close_short_round(RUN, case.round, "too few devices")
    with case.device() as device:
        assert device.step(0) is Step.WAITED
        case.open()
        assert device.step(5.0) is Step.ANSWERED
    assert len(case.uploads) == 1


def test_upload_that_often_breaks_but_always_grows_is_continued(case: Case) -> None:
    """The server keeps what came; a slow device needs many streams for one answer, and computes it once."""

    class Short(Meddling):
        left = 6

        def upload(self, header: Any, chunks: Any, *more: Any, **named: Any) -> Any:
            self.left -= 1
            return super().upload(header, islice(chunks, 1) if self.left >= 0 else chunks, *more, **named)

    with case.device(link=Short(case.front.port, "", lambda: None), rows=180_000) as device:
        device.step(0)
        case.open()
        with pytest.raises(LinkError, match="the stream ended after"):
            device.step(5.0)
        assert device.step(5.0) is Step.ANSWERED
    assert case.events.of("answered").values["tries"] == Short.left + 1
    assert case.events.kinds().count("ask") == 1
    (row,) = case.uploads
    assert row.attempt == 1


def ask_something_else(case: Case, payload: Payload) -> None:
    """The round of the same number, as a server that was restored from a backup plays it again."""
    case.store.blobs.put(payload)
    where = (RUN, case.round, 1, case.name)
    case.store.database.write(
        "UPDATE asks SET payload = ? WHERE (run, round, step_number, device) = (?, ?, ?, ?)", payload.sha256, *where
    )


@pytest.mark.parametrize("moment", ["", "between status and upload"])
def test_answer_to_question_from_before_restore_is_refused(case: Case, moment: str) -> None:
    old, new = make_payload(rows=2), make_payload(rows=3)

    class Between(Meddling):
        def upload(self, *given: Any, **named: Any) -> Any:
            self._at("between status and upload")
            return super().upload(*given, **named)

    link = Between(case.front.port, moment or "before asking for the status", lambda: ask_something_else(case, new))
    with case.device(link=link) as device:
        device.step(0)
        case.round = open_round(case.store, case.name)
        write_asks(case.store, case.round, case.name, payload=old)
        assert device.step(5.0) is Step.DECLINED
        dropped = case.events.of("dropped")
        assert dropped.values["code"] == "closed"
        assert "the answer does not belong to the current ask, step 'train'" in dropped.text
        assert case.uploads == []
        assert state_of(device) == b"0"
        assert device.step(5.0) is Step.ANSWERED, "the ask is still open, for an answer of its own"
    assert len(case.uploads) == 1
    assert case.events.of("answered").values["receipt"] == case.uploads[0].receipt


def test_answer_without_its_question_is_accepted_for_current_ask(case: Case) -> None:
    """One of 0.1; and one that says it must say the ask's."""
    payload = make_payload(rows=2)
    with case.device() as device:
        device.step(0)
        case.round = open_round(case.store, case.name)
        write_asks(case.store, case.round, case.name, payload=payload)
        client, name = case.rival(), upload_name(case.round)
        name.payload = make_payload(rows=3).sha256
        for call in (lambda: client.status(name), lambda: client.upload(name, make_payload())):
            with refused() as result:
                call()
            assert (result[0].status, result[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "closed")
        name.payload = payload.sha256
        assert client.status(name).ask_open, "nothing but that answer was refused"
        client.upload(upload_name(case.round), make_payload())
        client.channel.close()
    assert len(case.uploads) == 1


@pytest.mark.parametrize("full", ["tries.txt", "outcome.json.new", "model.onnx.due.new"])
def test_full_disk_at_receipt_loses_neither_answer_nor_device(
    case: Case, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    with case.device() as device:
        device.step(0)
        case.open()
        with monkeypatch.context() as patch:
            fill_disk(patch, full)
            if full == "tries.txt":
                assert device.step(5.0) is Step.ANSWERED
            else:
                with pytest.raises(LinkError, match=r"the server's reply cannot be stored: .*No space left on device"):
                    device.step(5.0)
                assert answer_waits(device)
                assert case.events.kinds() == ["checked-in", "ask"]
        if full != "tries.txt":
            assert device.step(5.0) is Step.ANSWERED
        assert state_of(device) == b"1"
        (row,) = case.uploads
        assert case.events.of("answered").values["receipt"] == row.receipt
        case.store.runs.close_short_round(RUN, case.round, "too few devices")
        case.open()
        assert device.step(5.0) is Step.ANSWERED
        assert state_of(device) == b"2", "it went on from the state of the first answer"


def fill_disk(patch: pytest.MonkeyPatch, name: str) -> None:
    """No more byte fits in files of this name."""
    real_open, real_os_open = io.open, os.open

    def full(path: Any, mode: str) -> None:
        if str(path).endswith(name) and mode != "r":
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_file(path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        full(path, mode[0])
        return real_open(path, mode, *more, **named)

    def open_descriptor(path: Any, flags: int, *more: Any, **named: Any) -> int:
        full(path, "w" if flags & os.O_WRONLY else "r")
        return real_os_open(path, flags, *more, **named)

    patch.setattr(io, "open", open_file)
    patch.setattr(os, "open", open_descriptor)
