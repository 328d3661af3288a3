"""Small real fleets on the digits: the pieces of `simulate`, so that a test can disturb what lies between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fleetdistill_server.run_config import RunConfig
from fleetdistill_server.simulation.datasets import load_dataset
from fleetdistill_server.simulation.device import DeviceSpec
from fleetdistill_server.simulation.fleet import RUN, hold_out_proxy, make_run_config, make_specs
from fleetdistill_server.simulation.links import run_over_memory
from fleetdistill_server.simulation.partition import partition
from fleetdistill_server.simulation.settings import Simulation
from fleetdistill_server.store import Store

Prepared = tuple[RunConfig, list[DeviceSpec], Path]


def prepare(wanted: Simulation, work: Path) -> Prepared:
    """Configuration, devices and folder of a simulation, as `simulate` makes them."""
    work.mkdir(parents=True)
    data = load_dataset("digits", train_limit=wanted.train_limit, seed=wanted.seed)
    test_rows = slice(0, wanted.test_limit)
    data = replace(data, test_images=data.test_images[test_rows], test_labels=data.test_labels[test_rows])
    data = hold_out_proxy(wanted, data, work)
    split = partition(wanted.partition, data.train_labels.numpy(), wanted.devices, wanted.seed, alpha=wanted.alpha)
    return make_run_config(wanted, data, work), make_specs(wanted, data, split, work), work


def run_in_memory(prepared: Prepared, watch: Callable[[Store], None] = lambda store: None) -> Store:
    """The undisturbed run that every other one is compared with."""
    return run_over_memory(*prepared, watch)


def outcome(store: Store) -> tuple[bytes, list[tuple[int, str, float, int]]]:
    """What must be the same whatever happened on the way: the last checkpoint, and every accuracy."""
    row = store.run(RUN)
    assert row is not None
    assert row["status"] == "finished"
    figures = store.figures(RUN, "accuracy", "test")
    return row["checkpoint"], [(one["round"], one["device"], one["sum"], one["count"]) for one in figures]


def assert_no_upload_lost(store: Store, receipts: set[str] | None = None) -> None:
    """Every receipt is used once or reported with a reason; no ask has two; asks that were answered have one."""
    uploads = store.uploads(RUN)
    ids = [row["receipt"] for row in uploads]
    assert len(set(ids)) == len(ids)
    if receipts is not None:
        assert receipts <= set(ids)
    asks = [row["ask"] for row in uploads]
    assert len(set(asks)) == len(asks)
    used = {row["receipt"] for row in uploads if row["status"] == "used"}
    reported = {row["receipt"] for row in uploads if row["status"] == "reported" and row["reason"]}
    assert used | reported == set(ids)
    assert not used & reported
