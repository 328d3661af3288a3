"""Labelled data named in run.toml: an `.npz` file with the arrays `inputs` and `labels`."""

from __future__ import annotations

import os
import stat
import zipfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fleetdistill.errors import DataError, in_words

MAX_BYTES = 4 << 30
"""Largest size of a file, also unpacked."""


def read_labelled(file: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the arrays `inputs` and `labels` of a file, unchecked.

    Raises:
        DataError: The file is missing, no regular file, too large or damaged, or an array is missing.
    """
    try:
        # a FIFO would wait for a writer
        with open(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as opened:
            _check(file, opened)
            with np.load(opened) as arrays:
                return arrays["inputs"], arrays["labels"]
    except FileNotFoundError as error:
        raise DataError(f"{file!r} does not exist") from error
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{file!r} needs arrays inputs and labels: {in_words(error)}") from error


def _check(file: str, opened: IO[bytes]) -> None:
    status = os.fstat(opened.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{file!r} is a device, a pipe or another special file; expected an .npz file")
    if not zipfile.is_zipfile(opened):
        raise DataError(f"{file!r} is not an .npz file; expected one with the arrays inputs and labels")
    with zipfile.ZipFile(opened) as packed:
        size = max(status.st_size, sum(item.file_size for item in packed.infolist()))
    if size > MAX_BYTES:
        raise DataError(f"{file!r} has {size:,} bytes unpacked, must be at most {MAX_BYTES:,}; use fewer samples")
    opened.seek(0)
