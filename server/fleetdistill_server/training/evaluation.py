"""Reads the operator's own labelled data, as set in `[evaluation] data`."""

from __future__ import annotations

import numpy as np
import torch

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.training.local_training import TensorData, as_tensor_data
from fleetdistill_server.config.labelled_file import read_labelled
from fleetdistill_server.figures import Figure

TEACHER_ACCURACY = Figure("Teacher accuracy", unit="accuracy", digits=4, of="mean")
"""Accuracy of what the server teaches a device with, on the labelled rows that it is judged by; mean over devices."""


def first_of_each_class(data: TensorData, count: int) -> TensorData:
    """Returns the first `count` rows of each class, in their original order; fewer if a class has fewer."""
    labels = data.labels.numpy()
    chosen = [row for label in np.unique(labels) for row in np.flatnonzero(labels == label)[:count]]
    rows = torch.tensor(sorted(chosen), dtype=torch.int64)
    return TensorData(data.inputs[rows], data.labels[rows])


def load_evaluation(file: str, classes: int) -> TensorData:
    """Reads `inputs` and `labels` from an `.npz` file.

    Raises:
        ConfigurationError: The file is missing or damaged.
    """
    try:
        return as_tensor_data(read_labelled(file), classes)
    except DataError as error:
        raise ConfigurationError(f"[evaluation] data: {error}") from error
