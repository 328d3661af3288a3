"""Figures of a membership attack, by numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fleetdistill_lab.audit.linkage import Scored, known_shares, linkage, wilson


def scored(row, *decoys):
    return Scored(row, np.array(decoys, dtype=float))


def test_a_row_above_all_its_decoys_is_linked():
    result = linkage([scored(3, 1, 2), scored(2, 1, 2), scored(0, 1, 2), scored(1.5, 1, 2)])
    assert result.linked == 0.25
    assert result.auc == (1 + 0.75 + 0 + 0.5) / 4
    assert result.tpr1 == 0.25
    assert (result.rows, result.decoys) == (4, 2)


def test_one_decoy_in_a_hundred_may_be_above_for_tpr1():
    decoys = [0.0] * 99 + [5.0]
    result = linkage([scored(1, *decoys), scored(-1, *decoys)])
    assert (result.linked, result.tpr1) == (0, 0.5)


def test_scores_without_information_give_chance():
    generator = np.random.default_rng(0)
    result = linkage([Scored(generator.normal(), generator.normal(size=99)) for _ in range(2000)])
    assert result.interval[0] < 0.01 < result.interval[1]
    assert result.auc == pytest.approx(0.5, abs=0.02)


def test_wilson_interval():
    """z = 1.96, 5 of 10: (0.5 + 0.19207) / 1.38415 -+ 1.96 sqrt(0.025 + 0.009604) / 1.38415."""
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=5e-6)
    assert wilson(0, 300) == pytest.approx((0.0, 0.012643), abs=5e-6)


def test_shares_of_classes():
    true = np.array([[0.75, 0.25], [1.0, 0.0]])
    assert known_shares(true, true) == 1
    assert known_shares(np.full((2, 2), 0.5), true) == 0
    assert known_shares(np.array([[0.5, 0.5], [1.0, 0.0]]), true) == 0.5


def test_devices_with_uniform_shares_give_nothing_away():
    uniform = np.full((2, 4), 0.25)
    assert known_shares(uniform, uniform) == 0
