"""Files of inputs and labels, which every process maps instead of reading a copy of its own."""

from __future__ import annotations

import ctypes
import mmap
import threading
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

_ALIGNMENT = 64  # of an array in the file, as of a new array in memory
_LOCAL_HEADER = 30  # bytes of a ZIP member's header before its name
_parsing = threading.Lock()
"""CPython's parser, which reads the header of an array, fails now and then with SystemError in several threads."""
_PADDING_ID = b"FD"  # of the extra field that aligns a member


def save_arrays(file: Path, inputs: np.ndarray, labels: np.ndarray) -> str:
    """Writes inputs and labels as an uncompressed `.npz` whose arrays can be mapped; returns its path."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in (("inputs", inputs), ("labels", labels)):
            _add(archive, f"{name}.npy", np.ascontiguousarray(array))
    return str(file)


def _add(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    header = BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(array))
    member = zipfile.ZipInfo(name)
    at = archive.fp.tell() + _LOCAL_HEADER + len(name) + 4 + header.tell()  # type: ignore[union-attr]  # opened above
    padding = -at % _ALIGNMENT
    member.extra = _PADDING_ID + padding.to_bytes(2, "little") + bytes(padding)
    member.file_size = header.tell() + array.nbytes
    with archive.open(member, "w") as out:
        out.write(header.getvalue())
        if array.size:
            out.write(array.reshape(-1).view(np.uint8).data)


def slice_of(file: str, first: int, stop: int) -> str:
    """Returns the name of some rows of a file, for `load_arrays`."""
    return f"{file}[{first}:{stop}]"


def split_slice(name: str | Path) -> tuple[str, slice]:
    """Returns the file and the rows of a name from `slice_of`; all rows of any other file."""
    file, bracket, rows = str(name).removesuffix("]").rpartition("[")
    if not bracket or not str(name).endswith("]"):
        return str(name), slice(None)
    first, _, stop = rows.partition(":")
    return file, slice(int(first), int(stop))


def load_arrays(name: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and labels of a file of `save_arrays`, or of some of its rows, named by `slice_of`.

    The arrays are private copies that the system makes page by page, on a write: processes that only read the same
    file share its memory.
    """
    file, rows = split_slice(name)
    with open(file, "rb") as opened, zipfile.ZipFile(opened) as archive, _parsing:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        inputs, labels = (_map_file(mapped, archive.getinfo(f"{name}.npy")) for name in ("inputs", "labels"))
    return inputs[rows], labels[rows]


def _map_file(mapped: mmap.mmap, member: zipfile.ZipInfo) -> np.ndarray:
    at = member.header_offset
    mapped.seek(at + _LOCAL_HEADER + sum(int.from_bytes(mapped[at + n : at + n + 2], "little") for n in (26, 28)))
    npy.read_magic(mapped)
    shape, _, dtype = npy.read_array_header_1_0(mapped)
    # Not an array of the mapping: the SDK copies batches of mapped arrays, because an app's may exceed its memory.
    memory = (ctypes.c_char * len(mapped)).from_buffer(mapped)
    array: np.ndarray = np.ndarray(shape, dtype, memory, mapped.tell())  # type: ignore[arg-type]  # has a buffer
    return np.require(array, requirements="A")
