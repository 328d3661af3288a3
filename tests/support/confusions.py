"""Confusion matrices by hand, as rows of counts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fleetdistill.training.figures import Confusion


def matrix(rows: npt.ArrayLike) -> Confusion:
    """Returns the matrix with these counts, `[C, C]`, by true and predicted class."""
    counts = np.asarray(rows, np.int64)
    cells = np.argwhere(counts)
    return Confusion(np.column_stack([cells, counts[tuple(cells.T)]]), len(counts))


def dense(confusion: Confusion) -> list[list[int]]:
    """Returns the counts of a matrix, `[C, C]`."""
    counts = np.zeros((confusion.classes, confusion.classes), np.int64)
    counts[tuple(confusion.cells[:, :2].T)] = confusion.cells[:, 2]
    rows: list[list[int]] = counts.tolist()
    return rows
