"""Labelled data named in run.toml: what is wrong with a file is said without a library's words."""

from __future__ import annotations

import os
import re
import resource
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
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
    with pytest.raises(DataError, match=r"none\.npz' does not exist"):
        read_labelled(str(tmp_path / "none.npz"))
    np.savez(tmp_path / "half.npz", inputs=np.ones(3))
    with pytest.raises(DataError, match="labels"):
        read_labelled(str(tmp_path / "half.npz"))


@pytest.mark.parametrize("kind", ["/dev/zero", "fifo", "directory"])
def test_a_file_that_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    file = kind if kind == "/dev/zero" else str(tmp_path / kind)
    if kind == "fifo":
        os.mkfifo(file)
    if kind == "directory":
        os.mkdir(file)
    with at_most_more(1 << 30), pytest.raises(DataError, match=re.escape(file)):
        read_labelled(file)


@contextmanager
def at_most_more(memory: int) -> Iterator[None]:
    """Raises MemoryError if the block takes more memory: of what has no end, a reader would fill the machine's."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_file_that_is_small_only_while_it_is_packed_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as packed:
        packed.writestr("inputs.npy", b"x")
        packed.writestr("labels.npy", b"x")
    data = bytearray((tmp_path / "bomb.npz").read_bytes())
    first = data.index(b"PK\x01\x02")  # the sizes in the central directory are those that readers believe
    data[first + 24 : first + 28] = (0xFFFF_FFFE).to_bytes(4, "little")
    second = data.index(b"PK\x01\x02", first + 4)
    data[second + 24 : second + 28] = (0x0FFF_FFFF).to_bytes(4, "little")
    (tmp_path / "bomb.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"must be at most 4,294,967,296"):
        read_labelled(str(tmp_path / "bomb.npz"))
