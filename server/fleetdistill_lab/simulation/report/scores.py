"""Computes a simulated fleet's Global, C-Gen, C-Spec and C-Per, in accuracy and F1, from confusion matrices.

Without test rows of its own, a device's own test set is the global test set with each class weighted by the class's
share of the device's training samples. Its expectation equals that of a separate test set per device, with far less
noise than a few held-out samples. With such rows, C-Spec is computed on exactly them, and all other figures on the
union of all devices' rows, F1 too. A device that did not take part in a round is scored with its latest model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import numpy as np
from typing_extensions import TypedDict  # pydantic reads those of typing from Python 3.12 only

from fleetdistill.training.figures import Confusion
from fleetdistill_lab.simulation.report.metrics import (
    CurveSummary,
    Ints,
    Margins,
    Score,
    accuracy,
    c_gen,
    c_per,
    c_spec,
    f1_macro,
    f1_weighted,
    fleet_scores,
    global_score,
    summarize,
)

Figures = TypedDict(
    "Figures",
    {
        "global": float | None,
        "c_gen": float | None,
        "c_spec": float | None,
        "c_spec_samples": float | None,
        "c_per": float | None,
    },
)
Figures.__doc__ = """CDKT-FL's figures of one round, in [0, 1]; None without such a model.

Attributes:
    global: Score of the global model.
    c_gen: C-Gen, mean score of the device models on all classes.
    c_spec: C-Spec, mean score of the device models on their own classes.
    c_spec_samples: The same, over all samples together.
    c_per: C-Per, mean of C-Gen and C-Spec.
"""


class Counted(TypedDict):
    """Devices that a round's means are over.

    Attributes:
        devices: Number of devices that were scored until then.
        untrained: Number of these that had not yet taken part, so that their initial models count.
    """

    devices: int
    untrained: int


class FleetFigures(TypedDict):
    """CDKT-FL's figures of one round for every score.

    Attributes:
        accuracy, f1_weighted, f1_macro: Figures in accuracy, in F1 as the mean over the classes weighted by their
            samples, and in F1 as the mean over the classes that are present or predicted. As in CDKT-FL's code, F1 is
            computed on each device's test data, in which a class has the device's share of it, and C-Gen is the mean
            over all pairs of a model and a device's data; so it is not F1 on the test set.
    """

    accuracy: Figures
    f1_weighted: Figures
    f1_macro: Figures


class LateFigures(TypedDict):
    """Figures over the last rounds that papers report, in accuracy; all rounds count if there are fewer.

    Attributes:
        c_gen_median, c_spec_median, c_per_median: CDKT-FL's medians of these figures over the last 20 rounds; None if
            one of all rounds has no such figure.
        ua_mean: FedD2S's average UA, the mean of C-Spec over the last 10 rounds; None if one of them has no C-Spec.
    """

    c_gen_median: float | None
    c_spec_median: float | None
    c_per_median: float | None
    ua_mean: float | None


def fleet_figures(
    device_k: Sequence[Confusion | None],
    samples_jc: Ints,
    server: Confusion | None,
    own_k: Sequence[Confusion | None] | None = None,
) -> FleetFigures:
    """Returns CDKT-FL's four figures of one round for every score.

    Args:
        device_k: For each device, its model's confusion matrix on the global test set; None for a device
            that was not scored, which counts in no figure but that of the global model.
        samples_jc: `[J, C]`, number of device j's training samples of each class, in the same order.
        server: Confusion matrix of the global model; None without one.
        own_k: For each device, its model's matrix on the device's own test rows; None for a device that has none,
            which does not count in C-Spec. None for a fleet without such rows.
    """
    if own_k is not None:
        on_own = device_k, own_k, server
        return {
            "accuracy": _figures_on_own(*on_own, accuracy),
            "f1_weighted": _figures_on_own(*on_own, f1_weighted),
            "f1_macro": _figures_on_own(*on_own, f1_macro),
        }
    parts = _on_all_parts(device_k, samples_jc, server)
    return {
        "accuracy": _figures(*parts, accuracy),
        "f1_weighted": _figures(*parts, f1_weighted),
        "f1_macro": _figures(*parts, f1_macro),
    }


def round_figures(
    device_k: Sequence[Confusion | None],
    samples_jc: Ints,
    server: Confusion | None,
    own_k: Sequence[Confusion | None] | None = None,
) -> Figures:
    """Returns CDKT-FL's four figures of one round, computed from accuracy; arguments as in `fleet_figures`."""
    if own_k is not None:
        return _figures_on_own(device_k, own_k, server, accuracy)
    return _figures(*_on_all_parts(device_k, samples_jc, server), accuracy)


def _on_all_parts(
    device_k: Sequence[Confusion | None], samples_jc: Ints, server: Confusion | None
) -> tuple[Sequence[Margins], Margins | None]:
    """Returns the device models' and the global model's margins on all own test sets."""
    scored = [number for number, counts in enumerate(device_k) if counts is not None]
    known_k = [counts for counts in device_k if counts is not None]
    return _InMixes(known_k, samples_jc[scored]), None if server is None else margins_in_mix(server, samples_jc)


class _InMixes(Sequence[Margins]):
    """The margins of each device model on all own test sets, computed when they are needed.

    Those of all models together would have a number for each pair of devices. Equal models are computed once.
    """

    def __init__(self, device_k: Sequence[Confusion], samples_jc: Ints) -> None:
        self._device_k, self._samples_jc = device_k, samples_jc
        self._last: tuple[bytes, Margins] | None = None

    def __len__(self) -> int:
        return len(self._device_k)

    @overload
    def __getitem__(self, number: int) -> Margins: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Margins]: ...
    def __getitem__(self, number: int | slice) -> Margins | Sequence[Margins]:
        if isinstance(number, slice):
            return _InMixes(self._device_k[number], self._samples_jc)
        counts = self._device_k[number]
        known = counts.cells.tobytes()
        if self._last is None or self._last[0] != known:
            self._last = known, margins_in_mix(counts, self._samples_jc)
        return self._last[1]


def margins_in_mix(counts: Confusion, samples_jc: Ints) -> Margins:
    """Returns the margins `[J, C]` of one model's confusion matrices on every device's own test set.

    Args:
        counts: The model's confusion matrix on the global test set.
        samples_jc: `[J, C]`, number of device j's training samples of each class.
    """
    true, predicted, samples = counts.cells.T
    rows_c = counts.rows
    rates_cc = np.zeros((counts.classes, counts.classes))
    rates_cc[true, predicted] = samples / rows_c[true]
    rows_jc = samples_jc * (rows_c > 0)
    return Margins(samples_jc * np.diag(rates_cc), samples_jc @ rates_cc, rows_jc.astype(np.float64))


def _figures(counts_kj: Sequence[Margins], server_j: Margins | None, score: Score) -> Figures:
    if not counts_kj:
        server = None if server_j is None else global_score(server_j, score)
        return {"global": server, "c_gen": None, "c_spec": None, "c_spec_samples": None, "c_per": None}
    result = fleet_scores(counts_kj, server_j, score)
    return {
        "global": _or_none(result.global_),
        "c_gen": _or_none(result.c_gen),
        "c_spec": _or_none(result.c_spec),
        "c_spec_samples": _or_none(result.c_spec_samples),
        "c_per": _or_none(result.c_per),
    }


def _figures_on_own(
    device_k: Sequence[Confusion | None], own_k: Sequence[Confusion | None], server: Confusion | None, score: Score
) -> Figures:
    """Returns the figures of a fleet whose devices have test rows of their own."""
    known_k = [counts for counts in device_k if counts is not None]
    tested_k = [counts for counts in own_k if counts is not None]
    generic = c_gen([Margins.stack([counts]) for counts in known_k], score) if known_k else None
    own = Margins.stack(tested_k) if tested_k else None
    specific = None if own is None else c_spec(own, score)
    return {
        "global": None if server is None else score(server),
        "c_gen": generic,
        "c_spec": specific,
        "c_spec_samples": None if own is None else c_spec(own, score, average="samples"),
        "c_per": None if generic is None or specific is None else c_per(generic, specific),
    }


def _or_none(rate: float) -> float | None:
    return None if math.isnan(rate) else rate


def summaries(by_round: Sequence[Figures]) -> dict[str, CurveSummary]:
    """Returns the summary of each figure over all rounds, by the figure's name; arguments as in `late_figures`."""
    return {name: summarize(_curve(by_round, name)) for name in Figures.__annotations__}


def _curve(by_round: Sequence[Figures], name: str) -> list[float | None]:
    rates: list[float | None] = [figures[name] for figures in by_round]  # type: ignore[literal-required]
    return rates


def late_figures(by_round: Sequence[Figures]) -> LateFigures:
    """Returns the figures over the last rounds that papers report: FedD2S's average UA and CDKT-FL's medians.

    Args:
        by_round: Figures of every completed round, computed from accuracy, in order; at least one.
    """
    c_gen, c_spec, c_per = (summarize(_curve(by_round, name)) for name in ("c_gen", "c_spec", "c_per"))
    return {
        "c_gen_median": None if c_gen.box is None else c_gen.box.median,
        "c_spec_median": None if c_spec.box is None else c_spec.box.median,
        "c_per_median": None if c_per.box is None else c_per.box.median,
        "ua_mean": c_spec.last_mean,
    }
