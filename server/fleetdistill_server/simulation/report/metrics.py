"""Figures of a fleet, as pure functions of what its models answered: counts go in, rates come out.

A confusion matrix `[C, C]` counts true classes in rows and answers in columns. Axes in names: `k` device models, `j`
test parts (part j is device j's), `cc` a confusion matrix. T is the union of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError

Ints = npt.NDArray[np.int64]
Cells = Ints | npt.NDArray[np.float64]
"""Counted rows, or weighted ones."""
Score = Callable[[Cells], float]
"""Confusion matrix [C, C] -> a rate in [0, 1], NaN for no rows."""


def confusion(labels: npt.ArrayLike, answers: npt.ArrayLike, classes: int) -> Ints:
    """Counts `[C, C]` of one model's answers on one test part.

    Args:
        labels, answers: `[rows]` whole numbers in `[0, C)`.
        classes: C.
    """
    pairs = np.asarray(labels, np.int64) * classes + np.asarray(answers, np.int64)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes).astype(np.int64)


def accuracy(counts_cc: Cells) -> float:
    """Share of rows whose answer is their class."""
    rows = float(counts_cc.sum())
    return float(np.trace(counts_cc)) / rows if rows else float("nan")


def f1_by_class(counts_cc: Cells) -> npt.NDArray[np.float64]:
    """F1 = 2 TP / (2 TP + FP + FN) of each class `[C]`, 0 where that is 0 / 0."""
    hits = np.diag(counts_cc).astype(np.float64)
    either = counts_cc.sum(0) + counts_cc.sum(1)
    scores: npt.NDArray[np.float64] = np.divide(2 * hits, either, out=np.zeros_like(hits), where=either > 0)
    return scores


def f1_weighted(counts_cc: Cells) -> float:
    """F1 of the classes, weighted by their rows: what CDKT-FL's code reports."""
    rows = counts_cc.sum(1)
    return float((rows * f1_by_class(counts_cc)).sum() / rows.sum()) if rows.sum() else float("nan")


def f1_macro(counts_cc: Cells) -> float:
    """Mean F1 over the classes that are present or answered."""
    seen = (counts_cc.sum(0) + counts_cc.sum(1)) > 0
    return float(f1_by_class(counts_cc)[seen].mean()) if seen.any() else float("nan")


def mean_over_parts(counts_jcc: Cells, score: Score = accuracy) -> float:
    """Unweighted mean of a score over test parts `[J, C, C]`; parts without rows are left out."""
    scores = [score(counts) for counts in counts_jcc if counts.sum()]
    return float(np.mean(scores)) if scores else float("nan")


def c_spec(own_kcc: Cells, score: Score = accuracy, average: str = "devices") -> float:
    """C-Spec: each device model on its own test part, over devices alike (`devices`) or over all rows (`samples`).

    With `devices` and accuracy this is FedD2S's average UA as well.
    """
    _check_average(average)
    return mean_over_parts(own_kcc, score) if average == "devices" else score(own_kcc.sum(0))


def c_gen(counts_kjcc: Cells, score: Score = accuracy) -> float:
    """C-Gen: each device model on everybody's test data, the mean over devices.

    Accuracy is counted on T; any other score, as F1, is the mean over all pairs of a model and a part.
    """
    if score is accuracy:
        return mean_over_parts(counts_kjcc.sum(1), accuracy)
    return mean_over_parts(counts_kjcc.reshape(-1, *counts_kjcc.shape[2:]), score)


def c_per(generic: float, specific: float) -> float:
    """C-Per of one round: the mean of C-Gen and C-Spec. Take the median over rounds of this, not this of medians."""
    return (generic + specific) / 2


@dataclass(frozen=True, kw_only=True)
class FleetScores:
    """CDKT-FL's four figures of one round in one score; `global_` is NaN where the fleet has no global model.

    Attributes:
        c_spec: Over devices alike, or as the caller of `fleet_scores` wanted it; `c_per` is of this one.
        c_spec_samples: Over samples.
        empty_parts: Devices without test rows; they are left out of unweighted means.
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
    """Global, C-Gen, C-Spec and C-Per of one round.

    Args:
        counts_kjcc: `[K, K, C, C]`, device model k on part j.
        server_jcc: `[K, C, C]`, the global model on part j: accuracy pooled over T, F1 the mean over parts.
        score: `accuracy`, `f1_weighted` or `f1_macro`.
        average: Of C-Spec, `devices` or `samples`.
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
    """Median over the rounds first to last, both counted from 1 and included."""
    return float(np.median(curve[first - 1 : last]))


def _check_average(average: str) -> None:
    if average not in ("devices", "samples"):
        raise ConfigurationError(f"unknown average {average!r}, expected devices or samples")
