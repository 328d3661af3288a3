"""Deletions between the storing of a payload and its receipt: a receipt means that the payload is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from intake.device_api_fleet import Fleet
from support.postgres import Postgres
from support.wire_samples import data_of, make_payload

from fleetdistill.errors import RefusedError, StoreError, StoreUnavailableError
from fleetdistill.state import failpoints
from fleetdistill.wire.codes import Code
from fleetdistill_server.store.location import Location
from fleetdistill_server.store.retention import sweep
from fleetdistill_server.store.store import Store

ANSWER, OTHER = make_payload(4), make_payload(3)


@pytest.fixture
def fleet(location: Location, tmp_path: Path) -> Iterator[Fleet]:
    store = Store.open(tmp_path, location)
    yield Fleet(store)
    store.close()


def sweep_all(fleet: Fleet) -> None:
    sweep(fleet.store, 0.0)


def crash(point: str) -> Callable[[Fleet], None]:
    """A sweep whose process dies at its first file: what it has written since its last commit is lost."""

    def sweep_and_crash(fleet: Fleet) -> None:
        with failpoints.switched_on(f"{point}=error:EIO"), pytest.raises((OSError, StoreError)):
            sweep(fleet.store, 0.0)

    return sweep_and_crash


def before_the_receipt(fleet: Fleet, strike: Callable[[Fleet], None]) -> None:
    """Lets something happen once, after the payload is stored and before the receipt is committed."""

    def once() -> None:
        fleet.before_commit = lambda: None
        strike(fleet)

    fleet.before_commit = once


@pytest.mark.parametrize("strike", [sweep_all, crash("engine.gc.after-drop")], ids=["swept", "swept by a crash"])
def test_there_is_no_receipt_for_a_payload_that_was_deleted(fleet: Fleet, strike: Callable[[Fleet], None]) -> None:
    identity = fleet.join()
    fleet.ask()
    before_the_receipt(fleet, strike)
    with pytest.raises(RefusedError, match="the payload is missing; send it again") as error:
        fleet.send(identity, ANSWER)
    assert error.value.code == Code.INCOMPLETE
    assert fleet.ask_state() == ("open", "")
    assert fleet.send(identity, ANSWER).sha256 == ANSWER.sha256
    assert data_of(fleet.store.blobs.open(ANSWER.sha256)) == data_of(ANSWER)


@pytest.mark.parametrize("strike", [sweep_all, crash("engine.gc.before-drop"), crash("engine.gc.after-drop")])
def test_a_deletion_that_began_before_is_not_mistaken_for_none(fleet: Fleet, strike: Callable[[Fleet], None]) -> None:
    """Its process has announced it, and may have deleted the same payload since it was stored."""
    identity = fleet.join()
    fleet.ask()
    fleet.store.deletions.announce()

    def delete_all(fleet: Fleet) -> None:
        with suppress(OSError, StoreError):
            strike(fleet)

    before_the_receipt(fleet, delete_all)
    with suppress(RefusedError):
        fleet.send(identity, ANSWER)
    accepted = bool(fleet.store.asks.uploads("digits"))
    assert accepted == fleet.store.blobs.has(ANSWER.sha256)


def test_payload_gets_receipt_while_others_are_deleted(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask(payload=ANSWER)  # the answer is the same, and so it is needed
    fleet.store.blobs.put(OTHER)
    before_the_receipt(fleet, sweep_all)
    assert fleet.send(identity, ANSWER).sha256 == ANSWER.sha256
    assert (fleet.store.blobs.has(ANSWER.sha256), fleet.store.blobs.has(OTHER.sha256)) == (True, False)


def test_a_sweep_ends_the_deletion_of_a_process_that_died(fleet: Fleet) -> None:
    fleet.store.blobs.put(OTHER)
    crash("engine.gc.after-drop")(fleet)
    assert fleet.store.deletions.announced()
    sweep_all(fleet)
    assert not fleet.store.deletions.announced()


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.s3
@pytest.mark.parametrize("location", ["apart"], indirect=True)
def test_a_deletion_that_loses_its_lock_deletes_nothing_more(
    fleet: Fleet, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = fleet.store.blobs.drop

    def drop_and_lose_the_connection(sha256: bytes) -> None:
        drop(sha256)
        postgres.end_sessions()

    for payload in (ANSWER, OTHER):
        fleet.store.blobs.put(payload)
    with monkeypatch.context() as patch:
        patch.setattr(fleet.store.blobs, "drop", drop_and_lose_the_connection)
        with pytest.raises(StoreUnavailableError):
            sweep_all(fleet)
    assert len(fleet.store.blobs.held()) == 1
    assert fleet.store.deletions.announced()  # so a receipt looks for its payload
    sweep_all(fleet)
    assert not fleet.store.blobs.held()


def test_deletion_in_transaction_needs_committed_announcement(fleet: Fleet) -> None:
    fleet.store.blobs.put(OTHER)
    with fleet.store.transaction():
        sweep_all(fleet)
    assert fleet.store.blobs.has(OTHER.sha256)


@pytest.mark.postgres
@pytest.mark.s3
@pytest.mark.parametrize("location", ["apart"], indirect=True)
def test_a_receipt_needs_one_request_to_the_object_store(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    identity = fleet.join()
    fleet.ask()
    caplog.set_level("INFO", "werkzeug")
    fleet.send(identity, ANSWER)
    requests = [record.getMessage().split('"')[1].split()[0] for record in caplog.records if record.name == "werkzeug"]
    assert requests == ["PUT"]
