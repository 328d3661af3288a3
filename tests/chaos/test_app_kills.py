"""A small part of `make kills`, and that its checks find what they look for."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from chaos.app_kills import held_in, last_line, run_until
from chaos.run import is_good
from support.wire_samples import make_payload

from fleetdistill.errors import StateError
from fleetdistill.state.directory import Storage
from fleetdistill.state.outbox import Pending


@pytest.mark.long
@pytest.mark.slow
def test_killed_apps_keep_their_state_and_lose_no_receipt(tmp_path: Path) -> None:
    rows = list(run_until(10, 1, tmp_path))
    assert all(is_good(row) for row in rows), rows
    assert sum(row["kills"] for row in rows) == 10
    assert sum(row["acknowledged"] for row in rows) > 10
    assert last_line(rows).endswith("0 lost, 0 doubled, 0 other findings")


def state_of(folder: Path, device: str = "d", *, answer: bool = False) -> Path:
    """A state directory, closed."""
    with contextlib.closing(Storage(folder)) as storage:
        storage.save_identity({"device": device, "run": "r"})
        if answer:
            storage.outbox.put(Pending(round=1, step_number=1, attempt=1, samples=4), make_payload(), b"{}")
    return folder


def test_what_a_directory_holds_is_found(tmp_path: Path) -> None:
    assert held_in(tmp_path / "missing", "d") == "new"
    assert held_in(state_of(tmp_path / "idle"), "d") == "idle"
    assert held_in(state_of(tmp_path / "answer", answer=True), "d") == "unsent answer"


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("device.json", StateError),
        ("outbox/manifest.json", ValueError),
        ("outbox/data.bin", ValueError),
        ("outbox/candidate.safetensors", ValueError),
    ],
)
def test_a_damaged_file_is_found(file: str, error: type[Exception], tmp_path: Path) -> None:
    path = state_of(tmp_path / "state", answer=True) / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(error):
        held_in(tmp_path / "state", "d")


def test_another_devices_identity_is_found(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another device's"):
        held_in(state_of(tmp_path / "state", "e"), "d")
