"""What a run leaves on the disk: the newest round's payloads, its newest checkpoints, the initial weights."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.wire_samples import make_contract, make_metrics, make_payload

from fleetdistill.errors import ConfigurationError, RunError, StoreError
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.store import retention
from fleetdistill_server.store.blobs import StoredBlob
from fleetdistill_server.store.file_blobs import FileBlobs
from fleetdistill_server.store.location import Location
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.retention import Freed, Pruned, free_after_round, prune, sweep
from fleetdistill_server.store.round_store import RoundStore
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store


@pytest.mark.long
def test_payloads_of_earlier_rounds_go_and_the_newest_stay(tmp_path: Path) -> None:
    fleet = Simulation(
        method="feddkc", rounds=4, devices=2, seed=1, durable=True, with_alone=False, with_fedavg=False, out=tmp_path
    )
    simulate(fleet)
    store = Store.open(tmp_path / "work" / "store")
    uploads = store.asks.uploads(RUN)
    assert len(uploads) == 8, "the receipts of every round stay"
    for upload in uploads:
        if upload.round == 4:
            assert store.blobs.open(upload.sha256).data_bytes == upload.data_bytes
        else:
            with pytest.raises(StoreError, match="is not in the store"):
                store.blobs.open(upload.sha256)
    row = store.runs.get(RUN)
    assert row is not None
    contract = contract_pb2.Contract.FromString(row.contract)
    assert store.blobs.open(contract.initial_weights).data_bytes > 0
    assert [checkpoint.round for checkpoint in store.runs.checkpoints(RUN)] == [2, 3, 4]
    states = {checkpoint.sha256 for checkpoint in store.runs.checkpoints(RUN)}
    asked = {item.payload for item in store.asks.of_step(RUN, 4, 1)}
    newest = {upload.sha256 for upload in uploads if upload.round == 4}
    assert {item.sha256 for item in store.blobs.held()} == {contract.initial_weights, *asked, *newest, *states}
    assert len(states) == 3
    store.close()


def test_simulation_keeps_its_checkpoint_until_a_round_is_saved(tmp_path: Path) -> None:
    """A process that is killed before the commit resumes from it."""
    simulation = RoundStore(tmp_path)
    simulation.runs.begin(RUN, {})
    first, second = (simulation.blobs.put_state(data) for data in (b"first", b"second"))
    simulation.save()
    free_after_round(simulation, RUN, [first])
    assert simulation.blobs.has(first)
    simulation.close()  # as after a kill: what is not saved is gone
    again = RoundStore(tmp_path)
    assert again.blobs.get_state(first) == b"first"
    free_after_round(again, RUN, [first])
    again.save()
    assert not again.blobs.has(first)
    assert again.blobs.get_state(second) == b"second", "it was not named"
    again.close()


# --- which rounds are kept


@pytest.fixture
def store(location: Location, tmp_path: Path) -> Iterator[Store]:
    """In memory, which is enough for what is the same in files, or in PostgreSQL and an object store."""
    made = Store.in_memory() if location == Location() else Store.open(tmp_path / "apart", location)
    made.runs.begin(RUN, {})
    yield made
    made.close()


def play(store: Store, states: str, run: str = RUN) -> dict[int, bytes]:
    """Rounds that end as the letters say: closed, short, or open; returns the payload of each one's only ask."""
    asked = {}
    for state in states:
        number = store.runs.start_round(run, ["d1"])
        payload = make_payload(number)
        store.blobs.put(payload)
        asked[number] = payload.sha256
        write_ask(store, run, number, payload.sha256)
        if state == "c":
            store.runs.close_round(run, number, b"", [], {})
        elif state == "s":
            store.runs.close_short_round(run, number, "too few")
    return asked


def write_ask(store: Store, run: str, number: int, payload: bytes, step_number: int = 1) -> None:
    row: dict[str, Any] = {
        "run": run,
        "round": number,
        "step_number": step_number,
        "device": "d1",
        "step": "train",
        "expects": {},
    }
    store.asks.add([Ask(**row, payload=payload, seed=0, deadline_at=time.time() + 600)])


def readable(store: Store, asked: dict[int, bytes]) -> list[int]:
    return [number for number, sha256 in asked.items() if store.blobs.has(sha256)]


@pytest.mark.parametrize(
    ("states", "keep", "kept"),
    [
        ("ccc", 1, [3]),
        ("ccc", 2, [2, 3]),
        ("ccc", 5, [1, 2, 3]),
        ("cco", 1, [2, 3]),
        ("csso", 1, [1, 2, 3, 4]),  # slow devices may still fetch what the newest closed round told them
        ("ccsc", 1, [4]),
        ("ss", 1, [1, 2]),
    ],
)
def test_the_newest_closed_rounds_and_all_after_them_are_kept(
    store: Store, states: str, keep: int, kept: list[int]
) -> None:
    store.runs.set_keep_rounds(RUN, keep)
    asked = play(store, states)
    freed = sweep(store, 0.0)
    assert readable(store, asked) == kept
    assert freed.payloads == len(asked) - len(kept)


def test_what_a_later_round_or_another_run_speaks_of_stays(store: Store) -> None:
    store.runs.begin("other", {})
    asked = play(store, "ccccc")
    write_ask(store, RUN, 5, asked[1], step_number=2)
    store.runs.start_round("other", ["d1"])
    write_ask(store, "other", 1, asked[2])
    free_after_round(store, RUN)
    assert readable(store, asked) == [1, 2, 3, 5], "a round frees what it replaced"
    sweep(store, 0.0)
    assert readable(store, asked) == [1, 2, 5], "a sweep also what a crash left"


def test_what_a_contract_names_stays_for_as_long_as_its_run(store: Store) -> None:
    named = ("initial_weights", "proxy_digest", "extractor_file")
    payloads = {name: make_payload(rows) for rows, name in enumerate(named, 1)}
    for payload in (*payloads.values(), make_payload(9)):
        store.blobs.put(payload)
    digests = {name: payload.sha256 for name, payload in payloads.items()}
    store.runs.publish_contract(RUN, make_contract(**digests).SerializeToString())
    assert sweep(store, 0.0).payloads == 1, "the one that it does not name"
    assert {item.sha256 for item in store.blobs.held()} == set(digests.values())
    store.runs.set_status(RUN, RunStatus.FINISHED, "0 rounds completed")
    assert prune(store, RUN, whole=True).freed.payloads == len(named)


# --- what crashes leave


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Store]:
    made = Store.open(tmp_path / "store")
    made.runs.begin(RUN, {})
    yield made
    made.close()


def staged_keys(store: Store) -> list[str]:
    return sorted(item.key for item in store.blobs.staging())


def test_orphan_is_removed_when_old_and_stays_while_young(on_disk: Store) -> None:
    """The front renames a payload into place before it commits the receipt's row."""
    payload = make_payload()
    on_disk.blobs.put(payload)
    assert sweep(on_disk) == Freed()
    assert on_disk.blobs.has(payload.sha256)
    assert sweep(on_disk, 0.0).payloads == 1
    assert not on_disk.blobs.has(payload.sha256)


def test_putting_again_makes_young_again(on_disk: Store) -> None:
    payload = make_payload()
    on_disk.blobs.put(payload)
    (first,), looked = on_disk.blobs.held(), time.time()
    time.sleep(0.2)
    on_disk.blobs.put(payload)
    (again,), looked_again = on_disk.blobs.held(), time.time()
    assert looked_again - again.age_seconds > looked - first.age_seconds + 0.1, "the moment that its age counts from"


def test_what_is_put_again_while_a_sweep_goes_on_is_young(
    on_disk: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is about to ask with a payload that nothing has spoken of for long."""
    payload = make_payload()
    on_disk.blobs.put(payload)
    monkeypatch.setattr(FileBlobs, "age_seconds", lambda self, sha256: 2 * retention.GRACE_SECONDS)
    listed = [dataclasses.replace(item, age_seconds=2 * retention.GRACE_SECONDS) for item in on_disk.blobs.held()]
    engine = Store.open(tmp_path / "store")

    def held() -> list[StoredBlob]:
        engine.blobs.put(payload)
        monkeypatch.undo()
        return listed

    monkeypatch.setattr(on_disk.blobs, "held", held)
    assert sweep(on_disk) == Freed()
    assert engine.blobs.has(payload.sha256)
    engine.close()


def test_what_is_deleted_while_it_is_put_again_is_written_anew(on_disk: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = make_payload()
    on_disk.blobs.put(payload)
    path = on_disk.blobs.path_of(payload.sha256)  # type: ignore[attr-defined]
    renew = os.utime

    def too_late(what: Path) -> None:
        path.unlink()
        renew(what)

    monkeypatch.setattr(os, "utime", too_late)
    on_disk.blobs.put(payload)
    assert on_disk.blobs.open(payload.sha256, verify=True).data_bytes == payload.data_bytes


def test_what_is_staged_goes_once_its_ask_takes_no_answer(on_disk: Store) -> None:
    on_disk.runs.start_round(RUN, ["d1"])
    payload = make_payload()
    for step in (1, 2):
        row: dict[str, Any] = {
            "run": RUN,
            "round": 1,
            "step_number": step,
            "device": "d1",
            "step": "train",
            "expects": {},
        }
        on_disk.asks.add([Ask(**row, seed=0, deadline_at=1e12)])
    for key in ("ask-1-attempt-1", "ask-1-attempt-2", "ask-2-attempt-1", "put-abc-1", "state-1"):
        staging = on_disk.blobs.stage(key, payload.parts)
        staging.append(b"x")
        staging.close()
    on_disk.asks.close(1, "deadline passed")
    freed = sweep(on_disk)
    assert staged_keys(on_disk) == ["ask-2-attempt-1", "put-abc-1", "state-1"]
    assert (freed.staged, freed.bytes > 0) == (2, True)
    sweep(on_disk, 0.0)
    assert staged_keys(on_disk) == ["ask-2-attempt-1"], "a dead process's pieces go when they are old"


def test_a_sweep_leaves_all_alone_while_another_process_needs_it(on_disk: Store, tmp_path: Path) -> None:
    on_disk.blobs.put(make_payload())
    with Store.open(tmp_path / "store").blobs.exclusive() as alone:
        assert alone
        assert sweep(on_disk, 0.0) == Freed()
    assert sweep(on_disk, 0.0).payloads == 1


# --- pruning


def events_and_figures(store: Store, asked: dict[int, bytes]) -> None:
    for number in asked:
        store.history.add_event(RUN, "late", "a sentence", number=number, device="d1")
        store.history.add_figures(RUN, number, "d1", make_metrics())


def told(store: Store) -> tuple[list[int], list[int]]:
    events = [row.round for row in store.history.events(RUN)]
    return events, [row.round for row in store.history.figures(RUN, "accuracy", "test")]


def test_pruning_gives_up_old_rounds_and_keeps_their_receipts(store: Store) -> None:
    store.runs.set_keep_rounds(RUN, 9)
    asked = play(store, "cccco")
    store.asks.accept_upload(1, 1, asked[2], 10, 1)
    events_and_figures(store, asked)
    would = prune(store, RUN, keep_rounds=2, dry_run=True)
    assert told(store) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert readable(store, asked) == [1, 2, 3, 4, 5]
    pruned = prune(store, RUN, keep_rounds=2)
    assert pruned == would
    assert (pruned.rounds, pruned.freed.payloads) == (2, 2)
    assert (pruned.events, pruned.figures) == (2, 2)
    assert told(store) == ([3, 4, 5], [3, 4, 5])
    assert readable(store, asked) == [3, 4, 5]
    assert [row.number for row in store.runs.rounds(RUN)] == [1, 2, 3, 4, 5]
    assert prune(store, RUN, keep_rounds=2) == Pruned()


def test_a_second_pruning_counts_the_rounds_that_are_left(store: Store) -> None:
    play(store, "ccccc")
    assert [prune(store, RUN, keep_rounds=keep).rounds for keep in (3, 2, 1)] == [2, 1, 1]


def test_pruning_by_age_leaves_young_rounds(store: Store) -> None:
    asked = play(store, "cccc")
    store.database.write("UPDATE rounds SET ended_at = ended_at - 86400 * 40 WHERE round = 1")
    assert prune(store, RUN, keep_rounds=1, older_than_seconds=30 * 86_400.0).rounds == 1
    assert readable(store, asked) == [2, 3, 4]


def test_pruning_by_age_keeps_old_rounds_that_are_to_be_kept(store: Store) -> None:
    """Rounds 1 to 3 of four are old enough; of these the newest two are among the three that stay anyway."""
    asked = play(store, "cccc")
    store.database.write("UPDATE rounds SET ended_at = ended_at - 86400 * 40 WHERE round < 4")
    assert prune(store, RUN, keep_rounds=3, older_than_seconds=30 * 86_400.0).rounds == 1
    assert readable(store, asked) == [2, 3, 4]


def test_a_run_that_goes_on_keeps_what_it_needs(store: Store) -> None:
    asked = play(store, "cco")
    with pytest.raises(RunError, match=r"need its newest closed round: set --keep-rounds to at least 1"):
        prune(store, RUN, keep_rounds=0)
    assert readable(store, asked) == [1, 2, 3]
    with pytest.raises(ConfigurationError, match="there is no run 'nonsense'; runs in the store: "):
        prune(store, "nonsense")


def test_finished_run_can_be_deleted_whole_and_spares_others(store: Store) -> None:
    store.runs.begin("other", {})
    for run in (RUN, "other"):
        store.runs.set_checkpoint(run, store.blobs.put_state(b"the same state"))
    asked = play(store, "cc")
    own = store.blobs.put_state(b"its own state")
    store.runs.set_checkpoint(RUN, own)
    store.runs.set_status(RUN, RunStatus.FINISHED, "2 rounds completed")
    events_and_figures(store, asked)
    assert prune(store, RUN, keep_rounds=1).rounds == 1
    pruned = prune(store, RUN, whole=True)
    assert (pruned.rounds, pruned.events, pruned.figures) == (2, 1, 1), "all rounds, and what was left of them"
    assert pruned.freed.payloads == 2
    assert store.runs.names() == ["other"]
    assert store.blobs.get_state(store.runs.existing("other").checkpoint) == b"the same state"
    assert readable(store, asked) == []


def test_pruning_beside_a_server_leaves_the_young_to_its_sweeps(on_disk: Store) -> None:
    asked = play(on_disk, "ccc")
    would = prune(on_disk, RUN, keep_rounds=1, served=True, dry_run=True)
    pruned = prune(on_disk, RUN, keep_rounds=1, served=True)
    assert pruned == would
    assert (pruned.freed, pruned.later.payloads, pruned.later.bytes > 0) == (Freed(), 2, True)
    assert readable(on_disk, asked) == [1, 2, 3], "the server may be about to speak of them"
    assert prune(on_disk, RUN, keep_rounds=1, served=True).rounds == 0, "their events are gone"
    sweep(on_disk, 0.0)
    assert readable(on_disk, asked) == [3]


def test_pruning_beside_a_server_deletes_what_is_old(on_disk: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = play(on_disk, "ccc")
    monkeypatch.setattr(retention, "GRACE_SECONDS", 0.0)
    pruned = prune(on_disk, RUN, keep_rounds=1, served=True)
    assert (pruned.freed.payloads, pruned.later) == (2, Freed())
    assert readable(on_disk, asked) == [3]
