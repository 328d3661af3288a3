"""Labelled data named in run.toml: an `.npz` file with the arrays `inputs` and `labels`."""

from __future__ import annotations

import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetdistill.errors import DataError, in_words


def read_labelled(file: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the arrays `inputs` and `labels` of a file, unchecked.

    Raises:
        DataError: The file is missing or damaged, or an array is missing.
    """
    try:
        if not zipfile.is_zipfile(file):
            with open(file, "rb"):  # reports a missing file as such
                raise DataError(f"{file!r} is not an .npz file; expected one with the arrays inputs and labels")
        with np.load(file) as arrays:
            return arrays["inputs"], arrays["labels"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{file!r} needs arrays inputs and labels: {in_words(error)}") from error
