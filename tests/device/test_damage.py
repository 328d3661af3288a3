"""A damaged file of a state directory is put aside and reported, or stops the device; it never changes the model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from device.sdk_fleet import Fleet, equal, make_device, tiny_data, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from support.open_device import open_device
from support.private_fleet import PrivateFleet, RowsWorker

from fleetdistill import Device, Event
from fleetdistill.device import inspect
from fleetdistill.device.command import main
from fleetdistill.errors import DamagedStateError, LinkError, RefusedError, StateError
from fleetdistill.state.state_check import STATES
from fleetdistill.testing import EventLog, FaultyLink, lost
from fleetdistill_server.intake.memory_link import MemoryLink

STOPS = ("device.json", "state.safetensors", "delivered.safetensors", "sample_ids.bin")
"""Identity and what was learned: the device must not continue without them."""
CONTINUES = (
    "profile.bin",
    "contract.bin",
    "ledger.jsonl",
    "outbox/manifest.json",
    "outbox/header.bin",
    "outbox/data.bin",
    "outbox/candidate.safetensors",
    "outbox/delivered.safetensors",
)
CACHES = ("rows.txt", "outbox/tries.txt")
"""Written without fsync, and made again from the rest without a report."""
LATER = ("last_outcome.json",)
"""Read with the next ask."""


class Made:
    """A fleet, the directory of a device with a committed state and an answer that waits, and its models."""

    def __init__(self, folder: Path) -> None:
        self.fleet, self.directory = Fleet(), folder / "made"
        with make_device(self.fleet, self.directory) as device:
            device.step(0)
            self.fleet.ask("d")
            device.step(0)
        device = make_device(self.fleet, self.directory, link=FaultyLink(MemoryLink(self.fleet.api), lost("upload")))
        device.step(0)
        self.fleet.ask("d")
        with pytest.raises(LinkError):
            device.step(0)
        self.before = weights(device)
        device.close(leave=False)
        with self.opened(self.copy(folder / "after"), EventLog()) as device:
            device.step(0)
            self.after = weights(device)
        assert not equal(self.before, self.after)

    def copy(self, target: Path) -> Path:
        return Path(shutil.copytree(self.directory, target))

    def turn(self, directory: Path, events: EventLog) -> tuple[StateError | None, dict[str, torch.Tensor]]:
        """One turn of a device with this directory: the error that stopped it, or the model that it has then."""
        try:
            with self.opened(directory, events) as device:
                device.step(0)
                assert device.device_id == "d"
                return None, weights(device)
        except StateError as error:
            return error, {}

    def opened(self, directory: Path, events: EventLog) -> Device:
        return make_device(self.fleet, directory, events, device_id=None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def test_every_file_has_a_rule(made: Made) -> None:
    files = {str(path.relative_to(made.directory)) for path in made.directory.rglob("*") if path.is_file()}
    ours = {*STOPS, *CONTINUES, *CACHES, *LATER, "lock"}
    records = {"model.onnx.due", "deployed.json", "versions/deployed.json"}
    assert {name for name in files - ours if not name.startswith("downloads/")} <= records
    assert ours <= files


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_a_changed_bit_or_a_cut_never_changes_the_model_silently(
    made: Made, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Afterwards the model is that of the last receipt or of the waiting one; otherwise the app has an error."""
    name = data.draw(st.sampled_from((*STOPS, *CONTINUES, *CACHES, *LATER)))
    directory = made.copy(tmp_path_factory.mktemp("damaged") / "state")
    whole = (directory / name).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :]
    (directory / name).write_bytes(whole[:at] if data.draw(st.booleans()) else changed)
    shown = inspect(directory)
    events = EventLog()
    error, result = made.turn(directory, events)
    if error is not None:
        assert name in STOPS or "newer SDK" in str(error)
        assert str(directory) in str(error)
        assert len(str(error).split()) < 60
        assert shown.damage
        return
    reports = [event for event in events if event.kind in ("damaged", "refused", "dropped")]
    assert equal(result, made.after) or (equal(result, made.before) and reports)
    assert all(Path(event.values["kept_as"]).exists() for event in reports if event.kind == "damaged")


@pytest.mark.parametrize("name", STOPS)
def test_irreplaceable_state_stops_device_and_stays_in_place(made: Made, tmp_path: Path, name: str) -> None:
    directory = made.copy(tmp_path / "state")
    shutil.rmtree(directory / "outbox")  # its answer would replace the damaged state with the next one
    (directory / name).write_bytes(b"\xff" * 100)
    for _ in range(2):
        error, _ = made.turn(directory, EventLog())
        assert isinstance(error, DamagedStateError)
        assert error.path == directory / name
        assert str(error).startswith(f"{directory / name} is damaged: ")
        assert str(error).count(str(directory)) == 1
    assert any(str(directory / name) in text for text in inspect(directory).damage)
    assert (directory / name).read_bytes() == b"\xff" * 100


@pytest.mark.parametrize("name", STATES)
def test_a_missing_state_is_no_untrained_model(made: Made, tmp_path: Path, name: str) -> None:
    """A model was delivered, so its version would be that of a model that the app does not have."""
    directory = made.copy(tmp_path / "state")
    shutil.rmtree(directory / "outbox")
    (directory / name).unlink()
    inputs, _ = tiny_data()
    with made.opened(directory, EventLog()) as device:
        for call in (lambda: device.predict(inputs), lambda: device.model):
            with pytest.raises(DamagedStateError, match=f"{name} is damaged: it is missing, and a model was delivered"):
                call()
        assert any(name in text for text in inspect(directory).damage)
        assert device.forget() is True, "as the error advises"
    with made.opened(directory, EventLog()) as device:
        assert device.version == 0
        device.step(0)
        assert device.predict(inputs).shape == (len(inputs), 3)


@pytest.mark.parametrize("name", CONTINUES)
def test_what_a_device_can_do_without_is_put_aside_and_reported(made: Made, tmp_path: Path, name: str) -> None:
    directory = made.copy(tmp_path / "state")
    (directory / name).write_bytes(b"\xff" * 100)
    events: list[Event] = []
    with make_device(made.fleet, directory, on_event=events.append, device_id=None) as device:
        device.step(0)
        device.step(0)
    (damaged,) = [event for event in events if event.kind == "damaged"]
    kept = Path(damaged.values["kept_as"])
    assert (kept / Path(name).name if kept.is_dir() else kept).read_bytes() == b"\xff" * 100
    assert damaged.text.count("is damaged") == damaged.text.count(str(directory)) == 1
    assert "it is kept as" in damaged.text
    assert "restore the file" not in damaged.text, "the device continues without it"
    assert inspect(directory).set_aside


def test_a_damaged_last_outcome_is_put_aside_with_the_next_ask(tmp_path: Path) -> None:
    fleet, events = Fleet(), EventLog()
    with make_device(fleet, tmp_path, events) as device:
        for _ in range(2):
            device.step(0)
            fleet.ask("d")
            device.step(0)
            (tmp_path / "last_outcome.json").write_bytes(b"{}")
    assert events.kinds().count("damaged") == 1
    assert events.kinds().count("answered") == 2
    assert (tmp_path / "last_outcome.json.damaged-1").read_bytes() == b"{}"


def test_damaged_privacy_ledger_or_release_stops_private_device(tmp_path: Path) -> None:
    fleet = PrivateFleet()
    given: dict[str, Any] = {"worker": RowsWorker, "export": "never", "device_id": "d"}
    with open_device(server=MemoryLink(fleet.api), state_dir=tmp_path / "a", **given) as device:
        device.step(0)
        fleet.ask()
        device.step(0)
    for name in ("privacy.json", "released.npz"):
        directory = Path(shutil.copytree(tmp_path / "a", tmp_path / name))
        whole = (directory / name).read_bytes()
        (directory / name).write_bytes(whole.replace(b'"mu": 0', b'"mu": 1') if b'"mu"' in whole else whole[:-40])
        with open_device(server=MemoryLink(fleet.api), state_dir=directory, **given) as device:
            device.step(0)
            (directory / "released.npz").unlink() if name == "privacy.json" else None
            fleet.ask()
            with pytest.raises(StateError, match=f"{name} is damaged"):
                device.step(0)
        assert (directory / name).exists()


def test_app_is_told_of_privacy_ledger_deleted_beside_release(tmp_path: Path) -> None:
    fleet = PrivateFleet()
    given: dict[str, Any] = {"export": "never", "device_id": "d", "state_dir": tmp_path}
    with open_device(server=MemoryLink(fleet.api), **given | {"worker": RowsWorker}) as device:
        device.step(0)
        fleet.ask()
        device.step(0)
    (tmp_path / "privacy.json").unlink()

    class OtherRows(RowsWorker):
        def __init__(self, contract: Any) -> None:
            super().__init__(contract)
            self._rows[0] += 1

    for worker in (RowsWorker, OtherRows):
        with open_device(server=MemoryLink(fleet.api), **given | {"worker": worker}) as device:
            device.step(0)
            fleet.ask()
            with pytest.raises(StateError, match=r"privacy\.json is missing"):
                device.step(0)
    assert not (tmp_path / "privacy.json").exists()


def test_weights_of_another_bit_are_noticed(made: Made, tmp_path: Path) -> None:
    """Without a checksum, one flipped bit of a weight would be another model."""
    directory = made.copy(tmp_path / "state")
    state = bytearray((directory / "state.safetensors").read_bytes())
    state[-3] ^= 1
    (directory / "state.safetensors").write_bytes(state)
    with pytest.raises(StateError, match="does not match its checksum"), made.opened(directory, EventLog()) as device:
        assert isinstance(device.model, torch.nn.Module)


@pytest.mark.parametrize("name", ["profile.bin", "contract.bin", "ledger.jsonl", *STATES])
def test_files_of_a_device_without_its_id_begin_no_second(made: Made, tmp_path: Path, name: str) -> None:
    """The rows of the first one stay merged, so those of a second one would count twice."""
    (tmp_path / "state").mkdir()
    shutil.copy(made.directory / name, tmp_path / "state" / name)
    error, _ = made.turn(tmp_path / "state", EventLog())
    assert isinstance(error, DamagedStateError)
    assert error.path == tmp_path / "state" / "device.json"
    assert str(error).startswith(f"{error.path} is missing, but {name} shows that a device has used this directory")
    assert "Restore it from a backup" in str(error)
    assert "forget DIR --local" in str(error)
    with (
        make_device(made.fleet, tmp_path / "state", device_id="d") as device,
        pytest.raises(RefusedError, match="secret"),
    ):
        device.step(0)


def test_missing_or_damaged_id_can_be_erased_as_advised(made: Made, tmp_path: Path) -> None:
    for change in (Path.unlink, lambda path: path.write_bytes(b"\xff{")):
        directory = made.copy(tmp_path / "state")
        change(directory / "device.json")
        assert any("device.json is " in text for text in inspect(directory).damage)
        assert main(["forget", str(directory), "--local", "--yes"]) == 0
        with made.opened(directory, EventLog()) as device:
            assert device.device_id != "d"
        shutil.rmtree(directory)
