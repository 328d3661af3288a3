"""The files of simulated devices' data are mapped, so that processes share their memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.data.samples import read_samples
from fleetdistill.training.tensor_data import TensorData, tensor_data_of
from fleetdistill_lab.simulation.spec.arrays import load_arrays, save_arrays, slice_of, split_slice
from fleetdistill_lab.simulation.spec.compute import Shared


@given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=4), dtype=st.sampled_from(["f2", "f4", "f8", "i8"]))
def test_files_keep_arrays_and_align_them(tmp_path_factory, shape: list[int], dtype: str) -> None:
    inputs = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    file = save_arrays(tmp_path_factory.mktemp("arrays") / "data.npz", inputs, labels := np.arange(shape[0]))
    read = load_arrays(file)
    with np.load(file) as archive:  # any other program can read the file
        for result, wanted, plain in zip(read, (inputs, labels), (archive["inputs"], archive["labels"]), strict=True):
            assert result.dtype == wanted.dtype
            assert np.array_equal(result, wanted)
            assert np.array_equal(plain, wanted)
            assert result.ctypes.data % 64 == 0


def test_training_reads_the_mapped_memory(tmp_path: Path) -> None:
    file = save_arrays(tmp_path / "data.npz", np.ones((3, 2), np.float32), np.array([0, 1, 0]))
    inputs, labels = load_arrays(file)
    data = tensor_data_of(read_samples((inputs, labels)))
    assert isinstance(data, TensorData)
    assert data.inputs.data_ptr() == inputs.ctypes.data
    assert str(file) in Path("/proc/self/maps").read_text()


def test_a_change_of_the_arrays_leaves_the_file(tmp_path: Path) -> None:
    file = save_arrays(tmp_path / "data.npz", np.ones((3, 2), np.float32), np.array([0, 1, 0]))
    torch.from_numpy(load_arrays(file)[0]).zero_()
    assert load_arrays(file)[0].all()


def test_files_of_numpy_can_be_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", inputs=np.eye(3, dtype=np.float32), labels=np.arange(3))
    inputs, labels = load_arrays(tmp_path / "data.npz")
    assert inputs.flags.aligned
    assert np.array_equal(inputs, np.eye(3))
    assert labels.tolist() == [0, 1, 2]


# --- some rows of a file


@given(rows=st.integers(0, 30), data=st.data())
def test_named_rows_are_those_of_the_file(tmp_path_factory, rows: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(first, rows))
    inputs, labels = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2), np.arange(rows) % 3
    file = save_arrays(tmp_path_factory.mktemp("a[b]") / "data[1:2].npz", inputs, labels)
    name = slice_of(str(file), first, stop)
    assert split_slice(name) == (str(file), slice(first, stop))
    part = load_arrays(name)
    assert np.array_equal(part[0], inputs[first:stop])
    assert np.array_equal(part[1], labels[first:stop])
    assert [len(array) for array in load_arrays(file)] == [rows, rows]


@pytest.mark.parametrize("name", ["data.npz", "data[1:2].npz", "[0:1]/data.npz"])
def test_a_name_without_rows_is_the_whole_file(name: str) -> None:
    assert split_slice(name) == (name, slice(None))


@pytest.mark.parametrize(("first", "stop"), [(0, 5), (3, 80), (70, 150), (0, 150), (40, 40)])
def test_part_of_samples_is_those_rows_read_on_their_own(first: int, stop: int) -> None:
    """More than the first samples that are kept apart, and than one chunk of digests."""
    inputs = np.random.default_rng(0).random((150, 1, 4, 4), np.float32)
    labels = np.random.default_rng(1).integers(0, 5, 150)
    part = read_samples((inputs, labels)).part(slice(first, stop))
    alone = read_samples((inputs[first:stop], labels[first:stop]))
    assert len(part) == len(alone) == stop - first
    assert part.digest == alone.digest
    assert part.input_shape == alone.input_shape
    assert part.transform is alone.transform is None
    for name in ("labels", "first", "digests"):
        assert np.array_equal(getattr(part, name), getattr(alone, name)), name
        assert getattr(part, name).dtype == getattr(alone, name).dtype, name
    data, expected = tensor_data_of(part), tensor_data_of(alone)
    assert isinstance(data, TensorData)
    assert isinstance(expected, TensorData)
    assert torch.equal(data.inputs, expected.inputs)
    assert torch.equal(data.labels, expected.labels)
    assert data.digest == expected.digest
    if stop > first:
        assert data.inputs.data_ptr() == inputs[first:].ctypes.data, "nothing is copied"


def test_devices_of_a_process_read_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = np.random.default_rng(0).random((40, 3), np.float32), np.arange(40) % 4
    file, read = str(save_arrays(tmp_path / "data.npz", inputs, labels)), list[str]()

    def noted(name: str) -> tuple[np.ndarray, np.ndarray]:
        read.append(name)
        return load_arrays(name)

    monkeypatch.setattr("fleetdistill_lab.simulation.spec.compute.load_arrays", noted)
    shared = Shared()
    for first in (0, 10, 25):
        part = shared.samples(slice_of(file, first, first + 10))
        assert part.digest == read_samples((inputs[first : first + 10], labels[first : first + 10])).digest
    assert len(shared.samples(file)) == 40
    assert read == [file]
