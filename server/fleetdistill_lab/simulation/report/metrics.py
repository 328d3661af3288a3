"""Computes a fleet's metrics from confusion matrices, accuracies of devices and curves; all functions are pure.

Suffixes name axes: `k` device models, `j` test sets (set j belongs to device j), `c` classes. T is the union of all
test sets.

torchmetrics computes from predictions; what is kept of a run are counts, also of classes in a device's mix, which are
no predictions of anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError
from fleetdistill.training.figures import Confusion

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Margins:
    """What the scores need of a confusion matrix, or of several: far smaller, for pairs of all models and test sets.

    Attributes:
        hits: `[..., C]`, rows of each class that are predicted correctly.
        predicted: `[..., C]`, rows that are predicted to be of each class.
        rows: `[..., C]`, rows of each class.
    """

    hits: Ints | Floats
    predicted: Ints | Floats
    rows: Ints | Floats

    @classmethod
    def of(cls, counts: Confusion | Margins) -> Margins:
        """Returns the margins of a confusion matrix."""
        return counts if isinstance(counts, Margins) else cls(counts.hits, counts.predicted, counts.rows)

    @classmethod
    def stack(cls, parts: Sequence[Confusion | Margins]) -> Margins:
        """Returns the margins `[parts, C]` of several matrices."""
        of = [cls.of(part) for part in parts]
        hits, predicted, rows = zip(*((part.hits, part.predicted, part.rows) for part in of), strict=True)
        return cls(np.stack(hits), np.stack(predicted), np.stack(rows))

    def part(self, number: int) -> Margins:
        """Returns the margins of one of several matrices, copied: a view would keep those of all matrices in memory."""
        return Margins(self.hits[number].copy(), self.predicted[number].copy(), self.rows[number].copy())

    def total(self) -> Margins:
        """Returns the margins of the sum of several matrices."""
        return Margins(self.hits.sum(0), self.predicted.sum(0), self.rows.sum(0))


Score = Callable[[Confusion | Margins], float]
"""Maps a confusion matrix to a rate in [0, 1]; NaN if the matrix is empty."""


def accuracy(counts: Confusion | Margins) -> float:
    """Returns the fraction of rows that are predicted correctly; NaN without rows."""
    if isinstance(counts, Confusion):  # a report has hundreds of thousands
        rows = counts.count
        return counts.correct / rows if rows else math.nan
    return float(_accuracies(counts))


def accuracy_or_none(counts: Confusion | None) -> float | None:
    """Returns the accuracy of a confusion matrix; None if there is no matrix."""
    return None if counts is None else accuracy(counts)


def accuracy_by_class(counts_k: Sequence[Confusion]) -> list[float | None] | None:
    """Returns the mean accuracy of several models on each class.

    Args:
        counts_k: A confusion matrix of each model.

    Returns:
        The mean for each class, None for a class without rows; None without models.
    """
    if not counts_k:
        return None
    of = [Margins.of(counts) for counts in counts_k]
    means_c = np.mean([_divide(one.hits, one.rows, np.nan) for one in of], axis=0)
    return [None if math.isnan(mean) else mean for mean in means_c.tolist()]


def f1_by_class(counts: Confusion | Margins) -> Floats:
    """Returns F1 = 2 TP / (2 TP + FP + FN) of each class `[..., C]`; 0 for classes where this is 0 / 0."""
    result = Margins.of(counts)
    return _divide(2 * result.hits, result.predicted + result.rows, 0.0)


def f1_weighted(counts: Confusion | Margins) -> float:
    """Returns the mean F1 of the classes, weighted by their numbers of samples, as CDKT-FL's code reports it."""
    return float(_weighted_f1(Margins.of(counts)))


def f1_macro(counts: Confusion | Margins) -> float:
    """Returns the mean F1 over the classes that are present or predicted."""
    return float(_macro_f1(Margins.of(counts)))


def _accuracies(of: Margins) -> Floats:
    return _divide(of.hits.sum(-1), of.rows.sum(-1), np.nan)


def _weighted_f1(of: Margins) -> Floats:
    return _divide((of.rows * f1_by_class(of)).sum(-1), of.rows.sum(-1), np.nan)


def _macro_f1(of: Margins) -> Floats:
    return _divide(f1_by_class(of).sum(-1), ((of.predicted + of.rows) > 0).sum(-1), np.nan)


def _divide(numbers: Ints | Floats, by: Ints | Floats, otherwise: float) -> Floats:
    """Returns the quotients, or `otherwise` where the divisor is 0."""
    filled = np.full(np.shape(numbers), otherwise)
    return np.asarray(np.divide(numbers, by, out=filled, where=np.asarray(by) > 0), np.float64)


_BY_PART: Mapping[Score, Callable[[Margins], Floats]] = {
    accuracy: _accuracies,
    f1_weighted: _weighted_f1,
    f1_macro: _macro_f1,
}
"""For each score, the function that computes it for several matrices together, `[J]`."""


def mean_over_parts(counts_j: Margins, score: Score = accuracy) -> float:
    """Returns the unweighted mean of a score over test sets `[J, C]`; empty test sets are left out."""
    scores = _BY_PART[score](counts_j)[counts_j.rows.sum(-1) > 0]
    return float(np.mean(scores)) if len(scores) else float("nan")


def c_spec(own_k: Margins, score: Score = accuracy, average: str = "devices") -> float:
    """Returns C-Spec, the score of each device model on the device's own test set.

    With `devices` and accuracy, this equals FedD2S's average UA.

    Args:
        own_k: `[K, C]`, device model k on test set k.
        score: The score.
        average: `devices` for the unweighted mean over devices, or `samples` for the score of all rows together.

    Raises:
        ConfigurationError: `average` is unknown.
    """
    if average not in ("devices", "samples"):
        raise ConfigurationError(f"unknown average {average!r}, expected devices or samples")
    return mean_over_parts(own_k, score) if average == "devices" else score(own_k.total())


def c_gen(counts_kj: Iterable[Margins], score: Score = accuracy) -> float:
    """Returns C-Gen, the mean score of the device models on all devices' test data.

    Accuracy is computed on T; any other score is the mean over all pairs of a model and a test set.

    Args:
        counts_kj: For each device model, its margins `[J, C]` on all test sets. The same sets are empty for all.
        score: The score.
    """
    if score is accuracy:
        scores = [accuracy(model.total()) for model in counts_kj]
    else:
        scores = [mean_over_parts(model, score) for model in counts_kj]
    known = [score for score in scores if not np.isnan(score)]
    return float(np.mean(known)) if known else float("nan")


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
    counts_kj: Sequence[Margins],
    server_j: Margins | None = None,
    score: Score = accuracy,
    average: str = "devices",
) -> FleetScores:
    """Returns Global, C-Gen, C-Spec and C-Per of one round.

    Args:
        counts_kj: For each device model, its margins `[K, C]` on all test sets.
        server_j: `[K, C]`, the global model on test set j; None if there is no global model.
        score: `accuracy`, `f1_weighted` or `f1_macro`. The global model's accuracy is computed on T, its F1 as the
            mean over test sets.
        average: Averaging of C-Spec, `devices` or `samples`.

    Raises:
        ConfigurationError: `average` is unknown.
    """
    own = Margins.stack([one.part(number) for number, one in enumerate(counts_kj)])
    generic, specific = c_gen(counts_kj, score), c_spec(own, score, average)
    nothing = np.zeros_like(own.hits)
    server = Margins(nothing, nothing, nothing) if server_j is None else server_j
    return FleetScores(
        global_=global_score(server, score),
        c_gen=generic,
        c_spec=specific,
        c_spec_samples=c_spec(own, score, average="samples"),
        c_per=c_per(generic, specific),
        empty_parts=int((own.rows.sum(-1) == 0).sum()),
    )


def global_score(server_j: Margins, score: Score = accuracy) -> float:
    """Returns the score of the global model `[J, C]`: accuracy on T, any other score as the mean over test sets."""
    return accuracy(server_j.total()) if score is accuracy else mean_over_parts(server_j, score)


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """How evenly accuracies in [0, 1] are spread over devices.

    Attributes:
        bins: Number of devices with an accuracy in each of [0, 0.1), [0.1, 0.2), ..., [0.9, 1], as in FedD2S, fig. 4.
        std: Population standard deviation.
        worst: Mean over the worst tenth of the devices, rounded down, but at least one device.
        jain: Jain's index, (sum a)^2 / (N sum a^2), from 1 / N to 1; 1 if all accuracies are equal.

    References:
        Jain, Chiu and Hawe, A Quantitative Measure of Fairness and Discrimination, DEC-TR-301, 1984.
    """

    bins: list[int]
    std: float
    worst: float
    jain: float


def fairness_of(accuracies: Sequence[float]) -> Fairness | None:
    """Returns how evenly accuracies, one for each device, are spread; None without devices."""
    if not accuracies:
        return None
    ascending = np.sort(accuracies)
    bins = np.minimum((10 * ascending + 1e-9).astype(np.int64), 9)  # a rounded 0.3 is in [0.3, 0.4)
    best = float(ascending[-1])
    shares = ascending / best if best else np.ones(len(ascending))  # squares of tiny rates would lose their digits
    return Fairness(
        bins=np.bincount(bins, minlength=10).tolist(),
        std=float(np.std(ascending)),
        worst=float(np.mean(ascending[: max(1, len(ascending) // 10)])),
        jain=float(np.sum(shares)) ** 2 / (len(shares) * float(np.sum(shares**2))),
    )


def top_k_predictions(logits_nc: npt.ArrayLike, labels_n: npt.ArrayLike, k: int) -> Ints:
    """Returns predictions that are correct where the top k classes contain the true class, for `confusion`.

    They do where fewer than k classes have a strictly larger logit than the true class, as in FedDKC's evaluation. The
    other samples get the class with the largest logit, the lowest one of equals.

    Args:
        logits_nc: Logits `[n, C]`, finite.
        labels_n: True classes `[n]`, integers in `[0, C)`.
        k: At least 1 and below C.

    Raises:
        ConfigurationError: `k` is out of range; with C or more classes to choose, every prediction is correct.
    """
    logits, labels = np.asarray(logits_nc), np.asarray(labels_n, np.int64)
    check_top_k(k, logits.shape[1])
    larger = (logits > np.take_along_axis(logits, labels[:, None], axis=1)).sum(axis=1)
    return np.where(larger < k, labels, logits.argmax(axis=1)).astype(np.int64)


def check_top_k(k: int, classes: int) -> None:
    """Raises ConfigurationError unless `1 <= k < classes`."""
    if not 1 <= k < classes:
        raise ConfigurationError(
            f"top_k is {k}, must be at least 1 and below {classes}, the number of classes: the true class is always "
            f"among {classes}"
        )


def rounds_to(curve: Sequence[float | None], target: float) -> int | None:
    """Returns the first round, from 1, in which a curve reaches the target, even if it falls again; None if none does.

    Args:
        curve: The metric after each round; None where it is unknown.
        target: Value to reach, inclusive.
    """
    return next((number for number, value in enumerate(curve, 1) if value is not None and value >= target), None)


@dataclass(frozen=True, kw_only=True)
class BoxPlot:
    """A curve's last 20 rounds.

    Attributes:
        minimum, maximum: Extremes.
        lower_quartile, median, upper_quartile: Quartiles, interpolated linearly.
    """

    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float


@dataclass(frozen=True, kw_only=True)
class CurveSummary:
    """The figures of a curve that papers report, side by side: the best round on test data is optimistic.

    Attributes:
        final: Value after the last round; None if it is unknown.
        best, best_round: Largest known value, and the first round, from 1, that has it; None if none is known.
        last_mean: Mean over the last 10 rounds, or over all if there are fewer; None unless all of them are known.
        box: The last 20 rounds, or all if there are fewer; None unless all of them are known.
    """

    final: float | None = None
    best: float | None = None
    best_round: int | None = None
    last_mean: float | None = None
    box: BoxPlot | None = None


_ROUNDS_OF_MEAN = 10
_ROUNDS_OF_BOX = 20


def summarize(curve: Sequence[float | None]) -> CurveSummary:
    """Returns a curve's final and best value, and the mean and the quartiles of its last rounds."""
    known = [value for value in curve if value is not None]
    if not known:
        return CurveSummary()
    best = max(known)
    late, last = _known(curve[-_ROUNDS_OF_MEAN:]), _known(curve[-_ROUNDS_OF_BOX:])
    return CurveSummary(
        final=curve[-1],
        best=best,
        best_round=rounds_to(curve, best),
        last_mean=float(np.mean(late)) if late else None,
        box=_box(last) if last else None,
    )


def _known(values: Sequence[float | None]) -> list[float]:
    """Returns the values, or none if any is None."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _box(values: Sequence[float]) -> BoxPlot:
    low, lower, median, upper, high = np.percentile(values, [0, 25, 50, 75, 100]).tolist()
    return BoxPlot(minimum=low, lower_quartile=lower, median=median, upper_quartile=upper, maximum=high)
