"""The table of sample ids."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.errors import StateError
from fleetdistill.state.files import Files
from fleetdistill.state.sample_ids import FILE, SampleIds


def digests(samples: list[int]) -> np.ndarray:
    return np.array([[sample] * 16 for sample in samples], np.uint8).reshape(-1, 16)


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=6))
def test_ids_are_unique_stable_and_never_used_again(readings: list[list[int]]) -> None:
    """Over any sequence of readings, each after a restart: of each sample, as many ids stay as copies of it stay."""
    with TemporaryDirectory() as folder:
        before: dict[int, int] = {}
        used: set[int] = set()
        for samples in readings:
            ids = SampleIds(Files(Path(folder))).of(digests(samples)).tolist()
            now = dict(zip(ids, samples, strict=True))
            assert len(now) == len(samples)
            assert all(now[item] == before[item] for item in now.keys() & before.keys())
            assert not (now.keys() - before.keys()) & used
            for sample in range(10):
                stayed = [item for item in now.keys() & before.keys() if now[item] == sample]
                assert len(stayed) == min(samples.count(sample), list(before.values()).count(sample))
            before, used = now, used | now.keys()


def test_table_takes_24_bytes_a_sample_and_only_owner_reads_it(tmp_path: Path) -> None:
    SampleIds(Files(tmp_path)).of(np.random.default_rng(0).integers(0, 256, (1000, 16), np.uint8))
    status = (tmp_path / FILE).stat()
    assert status.st_size == 36 + 24 * 1000
    assert status.st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b"x" + b[1:], lambda b: b[:20]])
def test_damaged_table_is_error_because_ids_could_be_used_twice(tmp_path: Path, damage) -> None:
    table = SampleIds(Files(tmp_path))
    table.of(digests([1, 2]))
    (tmp_path / FILE).write_bytes(damage((tmp_path / FILE).read_bytes()))
    with pytest.raises(StateError, match=r"sample_ids.bin is damaged"):
        table.of(digests([1, 2]))
