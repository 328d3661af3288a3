"""What may change between two starts of a run: the operator's settings, and before a completed round everything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.driving import DriveDevices
from support.fleets import RUN, RUNS, Prepared, outcome, prepare, run_in_memory

from fleetdistill.device import Step
from fleetdistill.errors import RunError
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.service.registration import is_prepared, register
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import Ask, Run
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

OPERATED: dict[str, Any] = {
    "rounds": 40,
    "min_devices": 3,
    "devices_per_round": 5,
    "over_selection": 1.5,
    "quorum": 0.5,
    "deadline_seconds": 60.0,
    "threads": 2,
}


def config(contract: Any = (), **run: Any) -> RunConfig:
    values = {"classes": 10, "input_shape": [1, 8, 8], **dict(contract)}
    return run_config({"run": {"name": "digits", "rounds": 3, **run}, "contract": values})


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store.in_memory()
    yield made
    made.close()


def row_of(store: Store) -> Run:
    return store.runs.existing("digits")


def begin(store: Store, completed: int = 0) -> None:
    """A run with a contract and so many completed rounds."""
    register(store, config())
    store.runs.publish_contract("digits", contract_pb2.Contract(run="digits", rounds=3, threads=1).SerializeToString())
    for _ in range(completed):
        store.runs.close_round("digits", store.runs.start_round("digits", ["a"]), b"checkpoint", [], {})


def state(store: Store) -> tuple[Any, ...]:
    return row_of(store), store.runs.rounds("digits"), store.history.events("digits")


def test_a_new_run_is_entered_and_found_again(store: Store) -> None:
    register(store, config())
    before = state(store)
    register(store, config())
    assert state(store) == before
    assert row_of(store).status == "preparing"


@pytest.mark.parametrize("name", OPERATED)
def test_what_the_operator_decides_may_change_at_each_start(store: Store, name: str) -> None:
    begin(store, completed=1)
    register(store, config(**{name: OPERATED[name]}))
    assert row_of(store).config["run"][name] == OPERATED[name]
    (event,) = store.history.events("digits", "settings-changed")
    assert event.text.startswith(f"run.{name} was ")
    assert event.text.endswith(f", is {OPERATED[name]}; an engine of the run reads its settings when it starts")
    assert row_of(store).completed_rounds == 1


def test_devices_read_changed_rounds_and_threads_in_the_contract(store: Store) -> None:
    begin(store, completed=1)
    register(store, config(rounds=40, threads=2))
    contract = contract_pb2.Contract.FromString(row_of(store).contract)
    assert (contract.run, contract.rounds, contract.threads) == ("digits", 40, 2)


@pytest.mark.parametrize("rounds", [4, 0])
def test_a_finished_run_goes_on_with_more_rounds(store: Store, rounds: int) -> None:
    begin(store, completed=3)
    store.runs.set_status("digits", RunStatus.FINISHED, "3 rounds completed")
    register(store, config())
    assert row_of(store).status == "finished"
    register(store, config(rounds=rounds))
    assert (row_of(store).status, row_of(store).reason) == ("running", "")


@pytest.mark.parametrize(("status", "least"), [("running", 3), ("finished", 2)])
def test_fewer_rounds_than_are_completed_are_refused(store: Store, status: str, least: int) -> None:
    begin(store, completed=2)
    store.runs.set_status("digits", RunStatus(status), "")
    before = state(store)
    with pytest.raises(RunError) as error:
        register(store, config(rounds=least - 1))
    assert str(error.value) == (
        f"run 'digits' has completed 2 rounds, but [run] rounds is {least - 1}; set it to at least {least}, or end "
        "the run with `fleetdistill runs cancel digits`"
    )
    assert state(store) == before


CHANGED = {
    "seed": config(seed=1),
    "method": config(method="fedavg"),
    "classes": config({"classes": 3}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_a_run_is_may_not_change_after_a_round(store: Store, name: str) -> None:
    begin(store, completed=1)
    before = state(store)
    with pytest.raises(RunError, match=rf"run 'digits' exists with another configuration: (run|contract)\.{name} was "):
        register(store, CHANGED[name])
    assert state(store) == before
    assert not is_prepared(store, CHANGED[name])


def test_a_refusal_names_only_what_may_not_change(store: Store) -> None:
    begin(store, completed=1)
    with pytest.raises(RunError) as error:
        register(store, config(seed=1, rounds=50))
    assert "rounds" not in str(error.value)


@pytest.mark.parametrize("name", CHANGED)
def test_before_a_round_is_completed_a_run_is_replaced(store: Store, name: str) -> None:
    begin(store)
    store.devices.register("digits", "a", b"hash", b"")
    store.runs.close_short_round("digits", store.runs.start_round("digits", ["a"]), "nobody answered")
    register(store, CHANGED[name])
    row = row_of(store)
    assert (row.status, row.contract, row.next_round) == ("preparing", b"", 1)
    assert row.config == CHANGED[name].fixed_part()
    assert (store.runs.rounds("digits"), store.devices.all("digits")) == ([], [])
    (event,) = store.history.events("digits")
    assert event.kind == "run-replaced"
    assert f".{name} was " in event.text
    assert "state_dir" not in event.text


def test_a_run_whose_rounds_were_undone_is_not_replaced(store: Store) -> None:
    begin(store)
    store.runs.set_checkpoint("digits", b"first")
    store.runs.set_keep_checkpoints("digits", 3)
    store.runs.close_round("digits", store.runs.start_round("digits", ["a"]), b"checkpoint", [], {})
    store.runs.roll_back("digits", 0)
    before = state(store)
    with pytest.raises(RunError, match="exists with another configuration"):
        register(store, CHANGED["seed"])
    assert state(store) == before


def test_a_replacement_says_that_devices_had_answered(store: Store) -> None:
    begin(store)
    number = store.runs.start_round("digits", ["a"])
    ask: Row = {"run": "digits", "round": number, "step_number": 1, "device": "a", "step": "train", "expects": {}}
    store.asks.add([Ask(**ask, seed=1, deadline_at=1e12)])
    asked = store.asks.get("digits", number, 1, "a")
    assert asked is not None
    store.asks.accept_upload(asked.id, 1, bytes(32), 10, 1)
    register(store, CHANGED["seed"])
    (event,) = store.history.events("digits")
    assert event.text.endswith("; 1 answer was deleted, so the device that sent it needs a new state_dir")


def test_a_run_is_prepared_once_it_has_a_contract(store: Store) -> None:
    assert not is_prepared(store, config())
    register(store, config())
    assert not is_prepared(store, config())
    begin(store)
    assert is_prepared(store, config())
    assert is_prepared(store, config(rounds=9))
    assert not is_prepared(store, config(seed=9))


# --- with devices


def run_on(store: Store, prepared: Prepared, rounds: int) -> None:
    """Serves a run until so many rounds are completed, with devices that are started anew, as apps are."""
    settings = prepared[0].model_copy(update={"run": prepared[0].run.model_copy(update={"rounds": rounds})})
    with contextlib.ExitStack() as stack:
        api = DeviceApi(store)
        devices = [stack.enter_context(make_device(spec, MemoryLink(api))) for spec in prepared[1]]
        engine = Engine(store, settings, DriveDevices(devices, lambda: None), max_short_rounds=3)
        asyncio.run(engine.run())
        for device in devices:
            while device.step(0.0) is not Step.FINISHED:
                pass


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "feddkc"])
def test_extended_finished_run_ends_like_one_that_had_all_rounds(tmp_path: Path, method: str) -> None:
    """FedAvg's first last round delivers a model to the devices; the rounds after it know nothing of that."""
    whole = run_in_memory(prepare(replace(RUNS[method], rounds=3), tmp_path / "whole"))
    parts = Store.in_memory()
    prepared = prepare(RUNS[method], tmp_path / "parts")
    for rounds in (2, 3):
        run_on(parts, prepared, rounds)
    assert [row.status for row in parts.runs.rounds(RUN)] == ["closed"] * 3
    assert outcome(parts)[0] == outcome(whole)[0]
    for item in (whole, parts):
        item.close()
