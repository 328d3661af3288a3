"""The operator's own labelled data, `[evaluation] data`."""

from __future__ import annotations

import zipfile

import numpy as np

from fleetdistill.errors import ConfigurationError, DataError, in_words
from fleetdistill.local_training import TensorData, as_tensor_data


def load_evaluation(file: str, classes: int) -> TensorData:
    """Reads `inputs` and `labels` of an `.npz`.

    Raises:
        ConfigurationError: The file is missing or damaged.
    """
    try:
        with np.load(file) as arrays:
            return as_tensor_data((arrays["inputs"], arrays["labels"]), classes)
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, DataError) as error:
        raise ConfigurationError(
            f"[evaluation] data: {file!r} needs arrays inputs and labels: {in_words(error)}"
        ) from error
