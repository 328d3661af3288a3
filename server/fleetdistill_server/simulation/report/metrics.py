"""Computes a fleet's metrics from confusion matrices; all functions are pure.

A confusion matrix `[C, C]` counts true classes in rows and predictions in columns. Suffixes name axes: `k` device
models, `j` test sets (set j belongs to device j), `cc` a confusion matrix. T is the union of all test sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError

Ints = npt.NDArray[np.int64]
Cells = Ints | npt.NDArray[np.float64]
"""Cells of a confusion matrix: counts or weights."""
Score = Callable[[Cells], float]
"""Maps a confusion matrix [C, C] to a rate in [0, 1]; NaN if the matrix is empty."""


def confusion(labels: npt.ArrayLike, predictions: npt.ArrayLike, classes: int) -> Ints:
    """Returns the confusion matrix `[C, C]` of a model's predictions.

    Args:
        labels: `[rows]` true classes, integers in `[0, C)`.
        predictions: `[rows]` predicted classes, integers in `[0, C)`.
        classes: C.
    """
    pairs = np.asarray(labels, np.int64) * classes + np.asarray(predictions, np.int64)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes).astype(np.int64)


def accuracy(counts_cc: Cells) -> float:
    """Returns the fraction of rows that are predicted correctly."""
    rows = float(counts_cc.sum())
    return float(np.trace(counts_cc)) / rows if rows else float("nan")


def f1_by_class(counts_cc: Cells) -> npt.NDArray[np.float64]:
    """Returns F1 = 2 TP / (2 TP + FP + FN) of each class `[C]`; 0 for classes where this is 0 / 0."""
    hits = np.diag(counts_cc).astype(np.float64)
    either = counts_cc.sum(0) + counts_cc.sum(1)
    scores: npt.NDArray[np.float64] = np.divide(2 * hits, either, out=np.zeros_like(hits), where=either > 0)
    return scores


def f1_weighted(counts_cc: Cells) -> float:
    """Returns the mean F1 of the classes, weighted by their numbers of samples, as CDKT-FL's code reports it."""
    rows = counts_cc.sum(1)
    return float((rows * f1_by_class(counts_cc)).sum() / rows.sum()) if rows.sum() else float("nan")


def f1_macro(counts_cc: Cells) -> float:
    """Returns the mean F1 over the classes that are present or predicted."""
    seen = (counts_cc.sum(0) + counts_cc.sum(1)) > 0
    return float(f1_by_class(counts_cc)[seen].mean()) if seen.any() else float("nan")


def mean_over_parts(counts_jcc: Cells, score: Score = accuracy) -> float:
    """Returns the unweighted mean of a score over test sets `[J, C, C]`; empty test sets are left out."""
    scores = [score(counts) for counts in counts_jcc if counts.sum()]
    return float(np.mean(scores)) if scores else float("nan")


def c_spec(own_kcc: Cells, score: Score = accuracy, average: str = "devices") -> float:
    """Returns C-Spec, the score of each device model on the device's own test set.

    With `devices` and accuracy, this equals FedD2S's average UA.

    Args:
        own_kcc: `[K, C, C]`, device model k on test set k.
        score: The score.
        average: `devices` for the unweighted mean over devices, or `samples` for the score of all rows together.

    Raises:
        ConfigurationError: `average` is unknown.
    """
    _check_average(average)
    return mean_over_parts(own_kcc, score) if average == "devices" else score(own_kcc.sum(0))


def c_gen(counts_kjcc: Cells, score: Score = accuracy) -> float:
    """Returns C-Gen, the mean score of the device models on all devices' test data.

    Accuracy is computed on T; any other score is the mean over all pairs of a model and a test set.

    Args:
        counts_kjcc: `[K, J, C, C]`, device model k on test set j.
        score: The score.
    """
    if score is accuracy:
        return mean_over_parts(counts_kjcc.sum(1), accuracy)
    return mean_over_parts(counts_kjcc.reshape(-1, *counts_kjcc.shape[2:]), score)


def c_per(generic: float, specific: float) -> float:
    """Returns C-Per of one round, the mean of C-Gen and C-Spec; over rounds, take the median of C-Per itself."""
    return (generic + specific) / 2


@dataclass(frozen=True, kw_only=True)
class FleetScores:
    """CDKT-FL's four metrics of one round for one score.

    Attributes:
        global_: Score of the global model.
        c_gen: C-Gen.
        c_spec: C-Spec, averaged as requested from `fleet_scores`.
        c_spec_samples: C-Spec over samples.
        c_per: Mean of `c_gen` and `c_spec`.
        empty_parts: Number of devices with an empty test set, which unweighted means leave out.
    """

    global_: float
    c_gen: float
    c_spec: float
    c_spec_samples: float
    c_per: float
    empty_parts: int


def fleet_scores(
    counts_kjcc: Cells, server_jcc: Cells | None = None, score: Score = accuracy, average: str = "devices"
) -> FleetScores:
    """Returns Global, C-Gen, C-Spec and C-Per of one round.

    Args:
        counts_kjcc: `[K, K, C, C]`, device model k on test set j.
        server_jcc: `[K, C, C]`, the global model on test set j; None if there is no global model.
        score: `accuracy`, `f1_weighted` or `f1_macro`. The global model's accuracy is computed on T, its F1 as the
            mean over test sets.
        average: Averaging of C-Spec, `devices` or `samples`.

    Raises:
        ConfigurationError: `average` is unknown.
    """
    own_kcc = np.stack([row_jcc[number] for number, row_jcc in enumerate(counts_kjcc)])
    generic, specific = c_gen(counts_kjcc, score), c_spec(own_kcc, score, average)
    server = np.zeros_like(own_kcc) if server_jcc is None else server_jcc
    return FleetScores(
        global_=accuracy(server.sum(0)) if score is accuracy else mean_over_parts(server, score),
        c_gen=generic,
        c_spec=specific,
        c_spec_samples=c_spec(own_kcc, score, average="samples"),
        c_per=c_per(generic, specific),
        empty_parts=int((own_kcc.sum((1, 2)) == 0).sum()),
    )


def median_of_rounds(curve: Sequence[float], first: int, last: int) -> float:
    """Returns the median over rounds `first` to `last`, counted from 1 and inclusive."""
    return float(np.median(curve[first - 1 : last]))


def _check_average(average: str) -> None:
    if average not in ("devices", "samples"):
        raise ConfigurationError(f"unknown average {average!r}, expected devices or samples")
