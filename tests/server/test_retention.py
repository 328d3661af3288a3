"""What a run leaves on the disk: the newest round's payloads, one checkpoint, the initial weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetdistill.errors import StoreError
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.simulation.fleet import RUN, simulate
from fleetdistill_server.simulation.settings import Simulation
from fleetdistill_server.store import Store


def test_payloads_of_earlier_rounds_go_and_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[Store] = []
    made = Store.in_memory()
    monkeypatch.setattr(Store, "in_memory", classmethod(lambda cls: stores.append(made) or made))
    monkeypatch.setattr(Store, "close", lambda self: None)
    simulate(Simulation(rounds=4, devices=2, seed=1, with_alone=False, with_fedavg=False, out=tmp_path))
    (store,) = stores
    uploads = store.uploads(RUN)
    assert len(uploads) == 8, "the receipts of every round stay"
    for upload in uploads:
        if upload["round"] == 4:
            assert store.blobs.open(upload["sha256"]).data_bytes == upload["data_bytes"]
        else:
            with pytest.raises(StoreError, match="is not in the store"):
                store.blobs.open(upload["sha256"])
    row = store.run(RUN)
    assert row is not None
    contract = contract_pb2.Contract.FromString(row["contract"])
    assert store.blobs.open(contract.initial_weights).data_bytes > 0
    assert len(store.blobs._states) == 1  # type: ignore[attr-defined]


def test_a_payload_that_a_later_round_or_another_run_speaks_of_is_not_spent() -> None:
    store = Store.in_memory()

    def ask(run: str, number: int, payload: bytes) -> None:
        row = {"run": run, "round": number, "step_number": 1, "device": payload.hex(), "step": "train", "expects": {}}
        store.write_asks([{**row, "payload": payload, "payload_bytes": 0, "seed": 0, "deadline_at": 0.0}])

    for run, number, payload in (("a", 1, b"1"), ("a", 1, b"2"), ("a", 1, b"3"), ("a", 2, b"2"), ("b", 1, b"3")):
        ask(run, number, payload)
    assert store.spent_payloads("a", 1) == [b"1"]


def test_a_short_round_leaves_the_last_closed_rounds_payloads_readable() -> None:
    store = Store.in_memory()
    store.begin_run("a", {})
    for _ in range(4):
        store.start_round("a", [])
    for number in (1, 2, 4):
        store.close_round("a", number, b"", [], {})
    store.close_short_round("a", 3, "too few")
    assert list(store.rounds_since_last_closed("a", 4)) == [2, 3]
    assert list(store.rounds_since_last_closed("a", 1)) == []
