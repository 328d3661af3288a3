"""A device that names no run, or says what it can do, at a server whose store has several runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_front import RUN, LiveFront, live_front
from support.open_device import open_device
from support.small_device import small_device

from fleetdistill import COLUMNS, Abilities, Device
from fleetdistill.errors import ConfigurationError, LinkError, RefusedError
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.models import build_model
from fleetdistill.testing import EventLog
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

ROOT = Path(__file__).parents[2]
DIGITS = Abilities(classes=10, input_shape=(1, 8, 8))


def test_a_device_without_a_run_joins_the_served_one(
    front: LiveFront, store: Store, directory: Path, tmp_path: Path
) -> None:
    store.runs.begin("interrupted", {})
    with small_device(front.port, tmp_path / "a", EventLog(), run="") as device:
        with pytest.raises(RefusedError, match="the server has several runs"):
            device.step(0)
        with serve_lock.take(directory, RUN):
            device.step(0)
    assert store.devices.get(RUN, "d1") is not None


def begin(store: Store, name: str, classes: list[str], model: str = "digits_linear") -> None:
    """Starts a run of FedAvg as its engine does."""
    config = run_config(
        {
            "run": {"name": name, "method": "fedavg", "rounds": 1},
            "contract": {"classes": classes, "input_shape": [1, 8, 8]},
            "model": {"extractor": "", "server": "", "device": model},
        }
    )
    store.runs.begin(name, config.fixed_part())
    contract, initial, _ = make_contract(config, build_method(config))
    assert initial is not None
    store.blobs.put(initial)
    store.runs.publish_contract(name, contract.SerializeToString())


@pytest.fixture
def several(tmp_path: Path) -> Iterator[tuple[Store, LiveFront]]:
    """A front over two runs: ten digits, and whether they are odd."""
    store = Store.open(tmp_path / "several")
    begin(store, "digits", [str(item) for item in range(10)])
    begin(store, "parity", ["even", "odd"])
    with live_front(tmp_path / "several") as running:
        yield store, running
    store.close()


def digits() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).random((20, 1, 8, 8)).astype(np.float32), np.arange(20) % 10


def take_part(running: LiveFront, state: Path, run: Any, classes: int = 10) -> Device:
    data = digits()[0], digits()[1] % classes
    model = lambda: build_model("digits_linear", classes=classes)  # noqa: E731
    server = f"127.0.0.1:{running.port}"
    return open_device(server=server, run=run, model=model, data=data, state_dir=state, allow=COLUMNS, export="never")


@pytest.mark.parametrize(
    ("abilities", "run"),
    [
        (DIGITS, "digits"),
        (Abilities(classes=["even", "odd"], input_shape=[1, 8, 8], model="digits_linear"), "parity"),
    ],
)
def test_a_device_is_given_the_run_that_it_fits_and_stays_there(
    several: tuple[Store, LiveFront], tmp_path: Path, abilities: Abilities, run: str
) -> None:
    store, running = several
    classes = 2 if abilities.names else 10
    with take_part(running, tmp_path / "a", abilities, classes) as device:
        device.step(0)
        name = device.device_id
    assert store.devices.get(run, name) is not None
    begin(store, "as-well", [str(item) for item in range(10)])
    with take_part(running, tmp_path / "a", abilities, classes) as device:
        device.step(0)
    assert store.devices.get("as-well", name) is None


@pytest.mark.parametrize(
    ("abilities", "says"),
    [
        (
            Abilities(classes=3, input_shape=(1, 8, 8)),
            "'digits': the device has 3 classes, the run 10; 'parity': the device has 3 classes, the run 2",
        ),
        (Abilities(classes=10, input_shape=(64,)), r"the device has input shape \[64\], the run \[1, 8, 8\]"),
        (
            Abilities(classes=["odd", "even"], input_shape=(1, 8, 8)),
            "class 0 is 'odd' on the device",
        ),
        (
            Abilities(classes=10, input_shape=(1, 8, 8), model="digits_cnn"),
            "the device has model 'digits_cnn', the run 'digits_linear'",
        ),
    ],
)
def test_a_device_that_fits_no_run_is_told_what_differs(
    several: tuple[Store, LiveFront], tmp_path: Path, abilities: Abilities, says: str
) -> None:
    with take_part(several[1], tmp_path / "a", abilities) as device, pytest.raises(RefusedError, match=says) as result:
        device.step(0)
    assert result.value.code == "unknown-run"


def test_a_device_that_fits_several_runs_is_told_their_names(several: tuple[Store, LiveFront], tmp_path: Path) -> None:
    store, running = several
    begin(store, "again", [str(item) for item in range(10)])
    with take_part(running, tmp_path / "a", DIGITS) as device:
        with pytest.raises(RefusedError, match="2 open runs fit the device: digits, again; set Server"):
            device.step(0)
        store.runs.set_status("again", RunStatus.FINISHED, "all rounds done")
        device.step(0)
    assert store.devices.count("digits") == 1


def test_a_device_waits_for_a_run_that_is_being_prepared(several: tuple[Store, LiveFront], tmp_path: Path) -> None:
    store, running = several
    store.runs.begin("unknown-yet", {})
    waiting = pytest.raises(LinkError, match="no run fits the device yet: runs are being prepared")
    with take_part(running, tmp_path / "a", Abilities(classes=5, input_shape=(1, 8, 8))) as device, waiting:
        device.step(0)


def test_a_device_refuses_a_run_that_an_earlier_server_names(
    front: LiveFront, store: Store, tmp_path: Path, directory: Path
) -> None:
    """A server that does not know the field names its served run."""

    class Earlier:
        def __init__(self, link: Any) -> None:
            self._link = link

        def check_in(self, identity: Any, profile: Any) -> Any:
            identity.ClearField("abilities")
            identity.run = RUN
            result = self._link.check_in(identity, profile)
            identity.abilities.CopyFrom(DIGITS.message())
            identity.run = ""
            return result

        def __getattr__(self, name: str) -> Any:
            return getattr(self._link, name)

    link = Earlier(GrpcLink(f"127.0.0.1:{front.port}"))
    refuses = pytest.raises(ConfigurationError, match=r"offers run 'digits', which does not fit .* the run 3")
    with small_device(front.port, tmp_path / "a", EventLog(), link=link, run=DIGITS) as device, refuses:
        device.step(0)


def test_a_device_with_a_worker_of_its_own_is_given_a_run(front: LiveFront, store: Store, tmp_path: Path) -> None:
    """As a device without PyTorch is: what it can do is all that the choice needs."""
    store.runs.set_status("interrupted", RunStatus.FINISHED, "over")
    abilities = Abilities(classes=3, input_shape=(1, 8, 8))
    with small_device(front.port, tmp_path / "a", EventLog(), run=abilities, device_id="chosen") as device:
        device.step(0)
    assert store.devices.get(RUN, "chosen") is not None


@pytest.mark.parametrize(
    "given",
    [
        {"classes": 0},
        {"classes": 10_001},
        {"classes": True},
        {"classes": "ten"},
        {"classes": []},
        {"classes": ["a", 1]},
        {"input_shape": ()},
        {"input_shape": (1, 0)},
        {"input_shape": 8},
        {"model": 3},
    ],
)
def test_abilities_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"Abilities\({next(iter(given))}=\.\.\.\) is "):
        Abilities(**{"classes": 10, "input_shape": (1, 8, 8), **given})


def test_two_runs_are_two_devices_as_the_page_says(
    several: tuple[Store, LiveFront], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/reference/device.md").read_text(encoding="utf-8")
    (code,) = re.findall(r'^```python title="two_runs.py"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    store, running = several
    monkeypatch.chdir(tmp_path)
    images, labels = digits()
    exec(code.replace("127.0.0.1:50051", f"127.0.0.1:{running.port}"), {"images": images, "labels": labels})
    assert [store.devices.count(run) for run in ("digits", "parity")] == [1, 1]
