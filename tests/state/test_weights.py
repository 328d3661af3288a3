"""State files that refer to shared weights: their content comes back to the byte, or the damage is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.errors import StateError
from fleetdistill.state.files import Files
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.state.weights import MIN_FILE_BYTES, keep_weights, load_state, without_weights

FROZEN = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (3, 5000, MIN_FILE_BYTES // 4)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    result = Files(tmp_path_factory.mktemp("state"))
    keep_weights(result, [pack_state(FROZEN), pack_state([*FROZEN, torch.ones(2000)])])
    return result


def folder_bytes(files: Files) -> int:
    return sum(path.stat().st_size for path in files.directory.rglob("*") if path.is_file())


@given(order=st.lists(st.integers(0, 3), max_size=6), seed=st.integers(0, 9))
def test_a_state_comes_back_with_its_shared_weights(files: Files, order: list[int], seed: int) -> None:
    new = torch.randn(4000, generator=torch.Generator().manual_seed(seed))
    state = pack_state({number: [*FROZEN, new][which] for number, which in enumerate(order)})
    before = folder_bytes(files)
    files.save("state.safetensors", without_weights(files, state))
    assert load_state(files, "state.safetensors") == state
    assert folder_bytes(files) - before < 1 << 15
    (files.directory / "state.safetensors").unlink()


def test_what_a_killed_start_has_kept_is_deleted(files: Files) -> None:
    (files.directory / "weights" / ("0" * 64)).write_bytes(bytes(MIN_FILE_BYTES))
    keep_weights(files, [pack_state(FROZEN)])
    assert len(list((files.directory / "weights").iterdir())) == 1


@pytest.mark.parametrize("size", [100, MIN_FILE_BYTES // 4 - 1000], ids=["other format", "small"])
def test_other_states_stay_as_they_are(tmp_path: Path, size: int) -> None:
    state = np.arange(size).tobytes() if size == 100 else pack_state(torch.zeros(size))
    files = Files(tmp_path)
    keep_weights(files, [state[:MIN_FILE_BYTES]] if size == 100 else [state])
    assert without_weights(files, state) == state


@pytest.mark.parametrize("missing", [False, True], ids=["damaged", "missing"])
def test_a_state_without_its_weights_names_the_file(tmp_path: Path, missing: bool) -> None:
    files, state = Files(tmp_path), pack_state(FROZEN)
    keep_weights(files, [state])
    files.save("state.safetensors", without_weights(files, state))
    (path,) = (tmp_path / "weights").iterdir()
    path.unlink() if missing else path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StateError, match=f"weights/{path.name}"):
        load_state(files, "state.safetensors")


def test_a_damaged_reference_gives_no_other_state(files: Files) -> None:
    state = pack_state(FROZEN)
    stored = without_weights(files, state)
    for at in range(len(stored)):
        changed = bytearray(stored)
        changed[at] ^= 1
        files.save("state.safetensors", bytes(changed))
        try:
            content = load_state(files, "state.safetensors") or b""
            unpack_state(content)
        except StateError:
            continue
        assert content == state
