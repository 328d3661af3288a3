"""The operator's own labelled data, `[evaluation] data`."""

from __future__ import annotations

import zipfile

import numpy as np
import torch

from fleetdistill.errors import ConfigurationError, DataError, in_words
from fleetdistill.training.local_training import TensorData, as_tensor_data


def first_of_each_class(data: TensorData, count: int) -> TensorData:
    """The first `count` rows of each class, in their order, fewer where there are fewer."""
    labels = data.labels.numpy()
    chosen = [row for label in np.unique(labels) for row in np.flatnonzero(labels == label)[:count]]
    rows = torch.tensor(sorted(chosen), dtype=torch.int64)
    return TensorData(data.inputs[rows], data.labels[rows])


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
