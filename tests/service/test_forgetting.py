"""A server deletes the data of a device of a run that is over, without a command of its operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_device import open_device
from support.processes import wait_until
from support.served import RUN, supervised

from fleetdistill import Device
from fleetdistill.compute import light_worker
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "run": {"method": "classstats", "rounds": 1, "min_devices": 1},
    "contract": {"classes": 10, "input_shape": [1, 8, 8]},
}


def device_of(address: str, state: Path) -> Device:
    images = np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32)
    worker = light_worker((images, np.arange(60) % 10))
    return open_device(server=address, run=RUN, device_id="leaver", worker=worker, state_dir=state, export="never")


def files(work: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in (work / "store" / "blobs").rglob("*") if path.is_file()} - {"gc"}


def needed(store: Store) -> set[str]:
    """Digests of the files that have nothing of a device: the last state and the payloads of the contract."""
    row = store.runs.get(RUN)
    assert row is not None
    contract = contract_pb2.Contract.FromString(row.contract)
    payloads = {contract.initial_weights, contract.proxy_digest, contract.extractor_file} - {b""}
    return {item.hex() for item in {row.checkpoint, *payloads}}


@pytest.mark.long
@pytest.mark.parametrize("restarted", [False, True])
def test_server_forgets_device_of_a_finished_run(tmp_path: Path, restarted: bool) -> None:
    (tmp_path / "server").mkdir()
    work = tmp_path / "server"
    with supervised(work, SETTINGS) as (address, _):
        with device_of(address, tmp_path / "state") as device:
            device.run()
        store = Store.open(work / "store")
        assert files(work) > needed(store), "what the device has sent and received"
        if not restarted:
            assert device_of(address, tmp_path / "state").forget() is True
            wait_until(lambda: not store.devices.to_forget(RUN), "the device is forgotten")
            check_forgotten(store, work)
    if restarted:
        store.devices.ask_to_forget(RUN, "leaver")  # the server ended before it could
        with supervised(work, SETTINGS):
            wait_until(lambda: not store.devices.to_forget(RUN), "the device is forgotten")
            check_forgotten(store, work)
    store.close()


def check_forgotten(store: Store, work: Path) -> None:
    said = (work / "server.log").read_text
    line = "the device's part in the method's state and its payloads were deleted"
    wait_until(lambda: line in said(), "the deletion in the server's log")
    (logged,) = [text for text in said().splitlines() if line in text]
    assert logged.endswith(f"run={RUN} device=leaver event=forgotten")
    assert [event.device for event in store.history.events(RUN, "forgotten")] == ["leaver"]
    assert files(work) == needed(store)
    row = store.runs.get(RUN)
    assert row is not None
    assert row.status == "finished"
