"""Labelled data named in run.toml: what is wrong with a file is said without a library's words."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fleetdistill.errors import DataError
from fleetdistill_server.config.labelled_file import read_labelled


def test_both_arrays_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", inputs=np.ones((2, 3), np.float32), labels=np.array([1, 0]))
    inputs, labels = read_labelled(str(tmp_path / "data.npz"))
    assert (inputs.shape, labels.tolist()) == ((2, 3), [1, 0])


def test_a_file_of_another_kind_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "make_data.py").write_text("print('no data')")
    sentence = "make_data.py' is not an .npz file; expected one with the arrays inputs and labels"
    with pytest.raises(DataError, match=f"{re.escape(sentence)}$"):
        read_labelled(str(tmp_path / "make_data.py"))


def test_a_missing_file_and_a_missing_array_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file or directory"):
        read_labelled(str(tmp_path / "none.npz"))
    np.savez(tmp_path / "half.npz", inputs=np.ones(3))
    with pytest.raises(DataError, match="labels"):
        read_labelled(str(tmp_path / "half.npz"))
