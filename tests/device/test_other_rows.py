"""An app that replaces its rows: which version the server knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device.sdk_fleet import RUN, Fleet, equal, make_device, tiny_data, weights

from fleetdistill import Event, Step
from fleetdistill.data.samples import digest_of_arrays
from fleetdistill.device.backend import Backend
from fleetdistill.errors import (
    ConfigurationError,
    DataError,
    LinkError,
)
from fleetdistill.state.saved_profile import data_version
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.intake.memory_link import MemoryLink


def version_of(fleet: Fleet, device: str = "d") -> bytes:
    """The data version that the server knows."""
    row = fleet.store.devices.get(RUN, device)
    assert row is not None
    return contract_pb2.DeviceProfile.FromString(row.profile).data_version


def test_the_same_rows_have_one_version_and_two_devices_have_two(fleet: Fleet, tmp_path: Path) -> None:
    result = []
    for state_dir, name in (("a", "a"), ("a", "a"), ("b", "b")):
        with make_device(fleet, tmp_path / state_dir, device_id=name, data=tiny_data()) as device:
            device.step(0)
        result.append(version_of(fleet, name))
    assert result[0] == result[1] != result[2]
    assert {len(item) for item in result} == {16}


def test_the_server_cannot_test_a_guess_of_the_rows(fleet: Fleet, tmp_path: Path) -> None:
    """All that the server has is the secret: the version of the right rows under it is not the version that it got."""
    with make_device(fleet, tmp_path, data=tiny_data()) as device:
        device.step(0)
        secret, digest = bytes.fromhex(saved(tmp_path)["secret"]), digest_of_arrays(tiny_data())
    assert digest is not None
    assert version_of(fleet) == data_version(bytes.fromhex(saved(tmp_path)["data_key"]), digest)
    assert version_of(fleet) != data_version(secret, digest)


def saved(directory: Path) -> Any:
    return json.loads((directory / "device.json").read_text())


@pytest.mark.parametrize("rows", [tiny_data(), lambda: tiny_data(), tuple(map(torch.from_numpy, tiny_data()))])
def test_a_version_is_of_the_rows_however_they_are_given(fleet: Fleet, tmp_path: Path, rows: Any) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        first = version_of(fleet)
        device.replace_data(rows)
        device.step(0)
    assert version_of(fleet) == first


@pytest.mark.parametrize("other", [tiny_data(seed=3), tiny_data(23), (tiny_data()[0], tiny_data()[1][::-1].copy())])
def test_replaced_rows_are_told_at_next_step_and_learning_stays(
    fleet: Fleet, tmp_path: Path, other: tuple[np.ndarray, np.ndarray]
) -> None:
    with make_device(fleet, tmp_path) as device:
        fleet.ask("d")
        device.step(0)
        first, learned = version_of(fleet), weights(device)
        device.replace_data(other)
        assert version_of(fleet) == first
        assert device.step(0) is Step.WAITED
        assert version_of(fleet) != first
        assert equal(weights(device), learned)
        fleet.ask("d")
        device.step(0)
    assert [row.samples for row in fleet.store.asks.uploads(RUN)] == [24, len(other[1])]


def test_answer_of_old_rows_is_settled_before_new_ones_are_told(fleet: Fleet, tmp_path: Path) -> None:
    class Cut(MemoryLink):
        cut = True

        def upload(self, header: Any, chunks: Any) -> Any:
            if self.cut:
                raise LinkError("the way is cut")
            assert version_of(fleet) == first, "while this answer waits, the server knows the rows that it was made of"
            return super().upload(header, chunks)

    link = Cut(fleet.api)
    with make_device(fleet, tmp_path, link=link) as device:
        fleet.ask("d")
        with pytest.raises(LinkError):
            device.step(0)
        first = version_of(fleet)
        device.replace_data(tiny_data(12))
        link.cut = False
        assert device.step(0) is Step.ANSWERED
        assert [row.samples for row in fleet.store.asks.uploads(RUN)] == [24]
        device.step(0)
        assert version_of(fleet) != first


def test_rows_may_be_replaced_from_within_any_event(fleet: Fleet, tmp_path: Path) -> None:
    """Whatever is under way then comes to its end, and the rows of the last call are told."""
    asked = 0

    def replace(event: Event) -> None:
        nonlocal asked
        asked += 1
        device.replace_data(tiny_data(seed=asked))

    with make_device(fleet, tmp_path, on_event=replace, export="round") as device:
        for _ in range(2):
            fleet.ask("d")
            while not fleet.store.asks.uploads(RUN) or fleet.store.asks.open_ids():
                device.step(0)
        device.step(0)
        device.step(0)
        told = version_of(fleet)
        device.replace_data(tiny_data(seed=asked))
        device.step(0)
    assert version_of(fleet) == told
    assert [row.samples for row in fleet.store.asks.uploads(RUN)] == [24, 24]


@pytest.mark.parametrize("told", [True, False], ids=["by the digest", "by the app before it died"])
def test_restarted_device_with_other_rows_says_so_unasked(fleet: Fleet, tmp_path: Path, told: bool) -> None:
    """Arrays are looked at; of what a function would give, the app has said that it is new."""
    first: Any = tiny_data() if told else tiny_data
    other: Any = tiny_data(seed=3) if told else lambda: tiny_data(seed=3)
    with make_device(fleet, tmp_path, data=first) as device:
        device.step(0)
        before = version_of(fleet)
        if not told:
            device.replace_data(other)
    with make_device(fleet, tmp_path, data=other) as device:
        assert version_of(fleet) == before
        assert device.step(0) is Step.WAITED
        assert version_of(fleet) != before


def test_restarted_device_with_same_rows_makes_no_worker(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
    monkeypatch.setattr(Backend, "make", lambda device, contract: pytest.fail("nobody has asked for work"))
    with make_device(fleet, tmp_path) as device:
        assert device.step(0) is Step.WAITED


def test_lost_or_damaged_note_of_rows_costs_only_a_look(fleet: Fleet, tmp_path: Path) -> None:
    note = tmp_path / "rows.txt"
    with make_device(fleet, tmp_path) as device:
        device.step(0)
    right, version = note.read_bytes(), version_of(fleet)
    for damage in (None, b"", b"\xff\xfe", right[:20], right + b"0", right.replace(b"\n", b"")):
        note.unlink() if damage is None else note.write_bytes(damage)
        with make_device(fleet, tmp_path) as device:
            device.step(0)
        assert (note.read_bytes(), version_of(fleet)) == (right, version)


def test_rows_that_do_not_fit_are_refused_until_others_are_given(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        wrong = (np.zeros((3, 5), np.float32), np.zeros(3, np.int64))
        with pytest.raises(DataError, match=r"^data: the inputs have shape \[5\], but run"):
            device.replace_data(wrong)
        with pytest.raises(DataError, match=r"^data: label 99 at row 2 is outside"):
            device.replace_data((tiny_data(3)[0], np.array([0, 1, 99])))
        assert device.step(0) is Step.WAITED, "it goes on with the data that it has"
        device.replace_data(lambda: wrong)
        for _ in range(2):
            with pytest.raises(DataError, match=r"data: the inputs have shape \[5\]"):
                device.step(0)
        device.replace_data(tiny_data(12))
        assert device.step(0) is Step.WAITED


def test_without_new_data_the_present_ones_are_read_again(fleet: Fleet, tmp_path: Path) -> None:
    samples = list(zip(*tiny_data(), strict=True))
    with make_device(fleet, tmp_path, data=samples) as device:
        device.step(0)
        first = version_of(fleet)
        samples.append(samples[0])
        device.step(0)
        assert version_of(fleet) == first, "a device that waits does not read its data"
        device.replace_data()
        device.step(0)
        assert version_of(fleet) != first


def test_reading_again_does_not_undo_a_replacement(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        device.replace_data(tiny_data(12))
        device.replace_data()
        device.step(0)
        replaced = version_of(fleet)
        device.replace_data(tiny_data(12))
        device.step(0)
        assert version_of(fleet) == replaced


def test_a_worker_has_its_own_data(fleet: Fleet, tmp_path: Path) -> None:
    given = {"model": None, "data": None, "test_data": None}
    with make_device(fleet, tmp_path, worker=lambda contract: None, **given) as device:
        with pytest.raises(ConfigurationError, match="expects no argument with a worker, got new data"):
            device.replace_data(tiny_data())
        device.replace_data()
