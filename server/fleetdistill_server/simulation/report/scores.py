"""A simulated fleet's figures from what its models answered: Global, C-Gen, C-Spec and C-Per, in accuracy and F1.

A device's own test part is the global test part in the device's mix of classes: its rows of a class count as much as
the class does among the device's training samples. That has the same mean as a test part of the device's own, and far
less noise than the fifth of some fifty samples. A device that a round did not take is scored with the model that it
has: the one of its last round, or the one that it started from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fleetdistill_server.simulation.report.metrics import (
    Cells,
    Ints,
    Score,
    accuracy,
    f1_macro,
    f1_weighted,
    fleet_scores,
    median_of_rounds,
)

SCORES: Mapping[str, Score] = {"accuracy": accuracy, "f1_weighted": f1_weighted, "f1_macro": f1_macro}
_LAST_ROUNDS_OF_UA = 10
_LAST_ROUNDS_OF_MEDIANS = 20

Figures = dict[str, float | None]
"""`global`, `c_gen`, `c_spec` (over devices alike), `c_spec_samples` (over samples) and `c_per`: rates in [0, 1]; None
where there is no such model."""
FleetFigures = dict[str, Figures]
"""Score -> figures of one round."""


def in_class_mix(counts_cc: Ints, samples_jc: Ints) -> Cells:
    """One model's confusion matrix on every device's own test part.

    Args:
        counts_cc: `[C, C]`, the model's on the global test part.
        samples_jc: `[J, C]`, training samples of each class that device j has.

    Returns:
        `[J, C, C]` float64; part j weighs as much as device j has samples of classes that the test part has too.
    """
    rows_c = counts_cc.sum(axis=1, keepdims=True)
    rates_cc = np.divide(counts_cc, rows_c, out=np.zeros(counts_cc.shape), where=rows_c > 0)
    return np.asarray(samples_jc[:, :, None] * rates_cc, dtype=np.float64)


def fleet_figures(device_kcc: Sequence[Ints], samples_jc: Ints, server_cc: Ints | None) -> FleetFigures:
    """CDKT-FL's four figures of one round in every score.

    Args:
        device_kcc: For each device its model's confusion matrix `[C, C]` on the global test part.
        samples_jc: `[J, C]`, training samples of each class that device j has, in the same order.
        server_cc: The global model's; None where there is none.
    """
    parts = _on_all_parts(device_kcc, samples_jc, server_cc)
    return {name: _figures(*parts, score) for name, score in SCORES.items()}


def round_figures(device_kcc: Sequence[Ints], samples_jc: Ints, server_cc: Ints | None) -> Figures:
    """The accuracies of `fleet_figures`."""
    return _figures(*_on_all_parts(device_kcc, samples_jc, server_cc), accuracy)


def _on_all_parts(device_kcc: Sequence[Ints], samples_jc: Ints, server_cc: Ints | None) -> tuple[Cells, Cells | None]:
    """The devices' models `[K, J, C, C]` and the global one `[J, C, C]` on every device's own test part."""
    counts_kjcc = np.stack([in_class_mix(counts_cc, samples_jc) for counts_cc in device_kcc], dtype=np.float64)
    return counts_kjcc, None if server_cc is None else in_class_mix(server_cc, samples_jc)


def _figures(counts_kjcc: Cells, server_jcc: Cells | None, score: Score) -> Figures:
    found = fleet_scores(counts_kjcc, server_jcc, score)
    figures = {
        "global": found.global_,
        "c_gen": found.c_gen,
        "c_spec": found.c_spec,
        "c_spec_samples": found.c_spec_samples,
        "c_per": found.c_per,
    }
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def late_figures(by_round: Sequence[Figures]) -> Figures:
    """What papers report of the last rounds: FedD2S's average UA, and CDKT-FL's medians.

    Args:
        by_round: Figures in accuracy of every completed round, in order, at least one.

    Returns:
        `ua_mean`: mean of C-Spec over the last 10 rounds, or all of fewer; `c_gen_median`, `c_spec_median` and
        `c_per_median` over the last 20.
    """
    rounds, late = len(by_round), {}
    for name in ("c_gen", "c_spec", "c_per"):
        curve = [figures[name] for figures in by_round]
        known = [value for value in curve if value is not None]
        first = max(1, rounds - _LAST_ROUNDS_OF_MEDIANS + 1)
        late[f"{name}_median"] = median_of_rounds(known, first, rounds) if len(known) == rounds else None
    last = [figures["c_spec"] for figures in by_round[-_LAST_ROUNDS_OF_UA:]]
    late["ua_mean"] = None if None in last else float(np.mean([value for value in last if value is not None]))
    return late
