"""Simulated devices that share a process keep nothing in files, and lose nothing by it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.fleets import MECHANISMS, REPRODUCIBLE, SMALL, device_files, prepare, record, run_in_memory
from support.long import long_except
from support.undisturbed import Undisturbed

from fleetdistill_lab.simulation.links.links import run_over_memory
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.store.store import Store

FLEET = replace(SMALL, method="feddkc", devices=3, train_limit=90)
"""Devices of FedDKC keep their optimiser, so a state that is lost or used twice changes the result."""


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", long_except(REPRODUCIBLE, "classstats in one exchange", "fedavg", "feddkc", long=MECHANISMS)
)
def test_a_durable_run_gives_the_same_to_the_bit(undisturbed: Undisturbed, name: str) -> None:
    fast, durable = undisturbed(name), undisturbed(name, durable=True)
    assert fast.record == durable.record
    assert fast.files == durable.files


def test_only_a_durable_run_has_state_directories(tmp_path: Path) -> None:
    wanted = replace(FLEET, rounds=1)
    fast, durable = (prepare(wanted, tmp_path / kind) for kind in ("fast", "durable"))
    with closing(run_in_memory(fast)) as one, closing(run_in_memory(durable, durable=True)) as other:
        assert record(one) == record(other)
        assert device_files(fast) == device_files(durable)
    assert not [path for path in fast[2].iterdir() if path.name.startswith("device-")]
    kept = files_of(durable[2] / "device-0")
    assert {"device.json", "state.safetensors", "ledger.jsonl", "lock"} <= kept
    assert not {name for name in kept if name.endswith(".onnx")}, "the report exports what is wanted"
    payloads = {path.stem for path in (fast[2] / "store").rglob("*.safetensors")}
    assert len(payloads) == len(files_of(fast[2] / "store") - {"store.sqlite"}) > 0, "checkpoints only"


def test_simulation_has_the_payloads_of_its_newest_rounds_only(tmp_path: Path) -> None:
    """One payload for all devices and three answers a round; before, each round's stayed in memory to the end."""
    held: dict[int, int] = {}

    def watch(store: Store) -> None:
        assert store.blobs.staging() == [], "answers are handed over whole"
        held[store.runs.completed_rounds(RUN)] = len(store.blobs.held())

    prepared = prepare(replace(FLEET, method="fedavg", rounds=8), tmp_path / "work")
    with closing(run_in_memory(prepared, watch)) as store:
        checkpoints = {item.sha256.hex() for item in store.runs.checkpoints(RUN)}
    assert held[6] == held[4] == held[2], held
    files = {path.stem for path in (prepared[2] / "store").rglob("*.safetensors")}
    assert files == checkpoints, "the files of earlier checkpoints are gone"


@pytest.mark.parametrize("max_open", [1, 2])
def test_devices_closed_between_rounds_continue_where_they_were(tmp_path: Path, max_open: int) -> None:
    all_open, few = (prepare(FLEET, tmp_path / kind) for kind in ("all", "few"))
    with (
        closing(run_in_memory(all_open)) as one,
        closing(run_over_memory(*few, lambda store: None, max_open=max_open)) as other,
    ):
        assert record(one) == record(other)
        assert device_files(all_open) == device_files(few)


class Killed(BaseException):
    """Nothing catches it, so nothing is saved after it."""


@pytest.mark.long
@pytest.mark.parametrize("answers", [1, 2])
def test_a_run_that_dies_within_a_round_repeats_that_round(tmp_path: Path, answers: int) -> None:
    whole, broken = (prepare(replace(FLEET, rounds=3), tmp_path / kind) for kind in ("whole", "broken"))

    def die(store: Store) -> None:
        result = [row.round for row in store.asks.uploads(RUN)]
        if result.count(2) == answers:
            raise Killed

    with pytest.raises(Killed):
        run_over_memory(*broken, die)
    with closing(Store.open(Path(broken[0].server.store))) as left:
        assert {row.round for row in left.asks.uploads(RUN)} == {1}, "the answers of a broken round are not saved"
    with closing(run_in_memory(whole)) as one, closing(run_in_memory(broken)) as other:
        assert record(one) == record(other)
        assert device_files(whole) == device_files(broken)


def test_another_process_can_read_store_of_running_simulation(tmp_path: Path) -> None:
    prepared, seen = prepare(replace(FLEET, rounds=2), tmp_path / "work"), []

    def look(store: Store) -> None:
        with closing(Store.open(Path(prepared[0].server.store))) as other:
            row = other.runs.get(RUN)
            seen.append(None if row is None else row.completed_rounds)

    run_in_memory(prepared, look).close()
    assert sorted({item for item in seen if item is not None}) == [0, 1, 2]
