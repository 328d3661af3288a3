"""The files of simulated devices' data are mapped, so that processes share their memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.data.samples import read_samples
from fleetdistill.training.tensor_data import TensorData, tensor_data_of
from fleetdistill_lab.simulation.spec.arrays import load_arrays, save_arrays


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
