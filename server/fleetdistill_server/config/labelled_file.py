"""Labelled data that an operator names in run.toml: an `.npz` with the arrays `inputs` and `labels`."""

from __future__ import annotations

import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetdistill.errors import DataError, in_words


def read_labelled(file: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Reads both arrays, unchecked.

    Raises:
        DataError: The file is missing or damaged, or lacks an array.
    """
    try:
        if not zipfile.is_zipfile(file):
            with open(file, "rb"):  # a missing file is named as such
                raise DataError(f"{file!r} needs arrays inputs and labels: it is not an .npz file")
        with np.load(file) as arrays:
            return arrays["inputs"], arrays["labels"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{file!r} needs arrays inputs and labels: {in_words(error)}") from error
