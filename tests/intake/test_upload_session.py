"""Streams of one upload: which of them counts, and how it goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from intake.device_api_fleet import RUN, WHOLE, Fleet, feed, refused_bytes
from support.processes import PATIENCE_SECONDS
from support.wire_samples import (
    data_of,
    i32,
    in_pieces,
    make_payload,
)

from fleetdistill.errors import RefusedError, StoreError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import knowledge_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.uploads import UploadSession
from fleetdistill_server.store.store import Store


def takes(session: UploadSession, chunk: knowledge_pb2.Chunk) -> bool:
    """Whether the session is the one that counts."""
    try:
        session.feed(chunk)
    except RefusedError as refusal:
        return refusal.code != Code.OUT_OF_STEP
    return True


def test_of_two_streams_of_one_upload_the_newest_wins(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    chunks = in_pieces(payload, 16)
    older = any_fleet.begin(identity, payload)
    feed(older, chunks[:3])
    newer = any_fleet.begin(identity, payload, first_byte=48)
    with pytest.raises(RefusedError) as error:
        older.feed(chunks[3])
    assert (error.value.code, str(error.value)) == (
        Code.OUT_OF_STEP,
        "a newer stream of the same upload has replaced this one",
    )
    with pytest.raises(RefusedError, match="a newer stream"):
        older.finish()
    older.abandon()  # what the front does last must not disturb the newer one
    feed(newer, chunks[3:])
    assert newer.finish().sha256 == payload.sha256
    assert data_of(any_fleet.store.blobs.open(payload.sha256)) == data_of(payload)
    assert any_fleet.ask_state() == ("answered", "")


def test_only_one_of_two_streams_starting_at_once_writes(any_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers in one staging file could store bytes that no check has seen."""
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    stage, in_stage, go_on = any_fleet.store.blobs.stage, threading.Event(), threading.Event()

    def slow_stage(*given: Any) -> Any:
        if not in_stage.is_set():
            in_stage.set()
            go_on.wait(PATIENCE_SECONDS)
        return stage(*given)

    monkeypatch.setattr(any_fleet.store.blobs, "stage", slow_stage)
    sessions: list[UploadSession] = []
    threads = [threading.Thread(target=lambda: sessions.append(any_fleet.begin(identity, payload))) for _ in range(2)]
    threads[0].start()
    in_stage.wait(PATIENCE_SECONDS)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    chunks = in_pieces(payload, 16)
    (winner,) = (session for session in sessions if takes(session, chunks[0]))
    feed(winner, chunks[1:])
    assert data_of(any_fleet.store.blobs.open(winner.finish().sha256)) == data_of(payload)


def test_no_stream_begins_before_every_older_one_has_let_go(any_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once: the second is still ending the first when the third takes over from the second."""
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    first = any_fleet.begin(identity, payload)
    stage, abandon = any_fleet.store.blobs.stage, first.abandon
    ending, go_on = threading.Event(), threading.Event()
    first_was_over = []

    def slow_abandon() -> None:
        ending.set()
        go_on.wait(PATIENCE_SECONDS)
        abandon()

    def noted_stage(*given: Any) -> Any:
        first_was_over.append(go_on.is_set())
        return stage(*given)

    monkeypatch.setattr(first, "abandon", slow_abandon)
    monkeypatch.setattr(any_fleet.store.blobs, "stage", noted_stage)
    threads = [threading.Thread(target=lambda: any_fleet.begin(identity, payload)) for _ in range(2)]
    threads[0].start()
    ending.wait(PATIENCE_SECONDS)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert first_was_over
    assert all(first_was_over)


def test_an_upload_goes_on_where_a_broken_stream_left_it(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    chunks = in_pieces(payload, 16)
    broken = any_fleet.begin(identity, payload)
    feed(broken, chunks[:5])
    broken.abandon()
    status = any_fleet.status(identity)
    assert (status.next_byte, status.ask_open, status.HasField("receipt")) == (80, True, False)
    assert any_fleet.status(identity, attempt=2).next_byte == 0
    session = any_fleet.begin(identity, payload, first_byte=80)
    feed(session, chunks[5:])
    assert session.finish().sha256 == payload.sha256
    assert data_of(any_fleet.store.blobs.open(payload.sha256)) == data_of(payload)


def test_an_upload_survives_a_restart_of_the_front(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    chunks = in_pieces(payload, 16)
    broken = any_fleet.begin(identity, payload)
    feed(broken, chunks[:5])
    broken.abandon()
    any_fleet.api = DeviceApi(any_fleet.store)
    session = any_fleet.begin(identity, payload, first_byte=any_fleet.status(identity).next_byte)
    feed(session, chunks[5:])
    assert session.finish().sha256 == payload.sha256


@pytest.mark.parametrize("first_byte", [0, 64, 96, 10**6])
def test_upload_continuing_at_wrong_byte_must_request_status(any_fleet: Fleet, first_byte: int) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    broken = any_fleet.begin(identity, payload)
    feed(broken, in_pieces(payload, 16)[:5])
    broken.abandon()
    with pytest.raises(RefusedError) as error:
        any_fleet.begin(identity, payload, first_byte=first_byte)
    assert (error.value.code, str(error.value)) == (
        Code.OUT_OF_STEP,
        f"device d1: the upload continues at byte {first_byte}, but the server has 80 bytes; "
        "request the upload's status",
    )
    assert any_fleet.status(identity).next_byte == 80  # nothing was lost
    assert any_fleet.ask_state() == ("open", "")


def test_a_restarted_device_with_another_answer_begins_afresh(any_fleet: Fleet) -> None:
    """Same attempt number, other parts: what is staged belongs to neither."""
    identity = any_fleet.join()
    any_fleet.ask()
    broken = any_fleet.begin(identity, make_payload())
    feed(broken, in_pieces(make_payload(), 16)[:5])
    broken.abandon()
    other = make_payload(5)
    assert any_fleet.send(identity, other).sha256 == other.sha256


def test_an_ask_stages_two_attempts_at_most(any_fleet: Fleet) -> None:
    """The number of the attempt is the device's own choice."""
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    for attempt in (1, 7, 3, 2**32 - 1, 0, 1, 5):
        session = any_fleet.begin(
            identity, payload, attempt=attempt, first_byte=any_fleet.status(identity, attempt).next_byte
        )
        if session.held == 0:
            feed(session, in_pieces(payload, 16)[:5])
        session.abandon()
        assert len(any_fleet.store.blobs.staging()) <= 2
        assert any_fleet.status(identity, attempt).next_byte == 80
    assert refused_bytes(any_fleet) == 6 * 80, "what was thrown away had travelled"


def test_a_stream_of_another_attempt_takes_over_too(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    older = any_fleet.begin(identity, payload)
    newer = any_fleet.begin(identity, payload, attempt=2)
    with pytest.raises(RefusedError, match="a newer stream"):
        older.feed(in_pieces(payload, 16)[0])
    feed(newer, in_pieces(payload, 16))
    assert newer.finish().name.attempt == 2


@pytest.mark.parametrize("where", ["feed", "start", "finish"])
def test_whatever_goes_wrong_ends_the_session(any_fleet: Fleet, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(f"fleetdistill_server.intake.uploads.Ingest.{where}", fail)
    with pytest.raises(MemoryError):
        any_fleet.send(identity, payload)
    assert any_fleet.api.uploads._streams == {}
    assert any_fleet.api.limiter._calls.all == 0
    monkeypatch.undo()
    session = any_fleet.begin(identity, payload, first_byte=any_fleet.status(identity).next_byte)
    feed(session, [piece for piece in in_pieces(payload, 16) if piece.offset >= session.held])
    assert session.finish().sha256 == payload.sha256


def test_refused_upload_ends_even_if_staged_data_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(Store.open(tmp_path))
    identity = fleet.join()
    fleet.ask()

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise OSError(5, "Input/output error")

    session = fleet.begin(identity, make_payload(labels=i32([9, 0, 0, 0])))
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(StoreError, match="deleting a staged upload"):
        feed(session, in_pieces(make_payload(labels=i32([9, 0, 0, 0])), WHOLE))
    assert fleet.api.uploads._streams == {}
    fleet.store.close()


def test_reading_staged_upload_fails_only_with_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(Store.open(tmp_path))
    identity = fleet.join()
    fleet.ask()
    fleet.begin(identity, make_payload()).abandon()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(StoreError, match="reading the staged upload"):
        fleet.status(identity)
    monkeypatch.undo()
    fleet.store.close()


def test_a_session_that_was_refused_takes_nothing_more(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    session = any_fleet.begin(identity, make_payload(labels=i32([9, 0, 0, 0])))
    with pytest.raises(RefusedError, match="label 9"):
        feed(session, in_pieces(make_payload(labels=i32([9, 0, 0, 0])), WHOLE))
    with pytest.raises(RefusedError):
        session.finish()
    session.abandon()
    assert any_fleet.store.asks.uploads(RUN) == []
