"""Rows as whole numbers, their sums, and how many bytes these take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from methods.classstats_secure.session_settings import LIMITED_SUM, PRIVATE_SUM

from fleetdistill.errors import ConfigurationError, KnowledgeError
from fleetdistill.knowledge import HeadGradient
from fleetdistill.methods.classstats.shared_statistics import from_wire, merge, moments_of, to_wire
from fleetdistill.methods.classstats_private.sums import unit_rows
from fleetdistill.methods.classstats_secure.encoding import (
    bits_needed,
    decode,
    exact_numbers,
    gradient_numbers,
    gradient_of_sum,
    limited_numbers,
    moments_of_sums,
    rows_on_grid,
    unit_rows_on_grid,
    width_for,
)
from fleetdistill.secure.primitives import lift, wrap

A = np.array([[1, 0, 2], [3, 1, 2], [2, 2, 5], [0, 1, 3]], dtype=float)
B = np.array([[4, 1, 0], [6, 3, 1], [0, 5, 1], [1, 4, 1], [2, 6, 1]], dtype=float)
LABELS_A, LABELS_B = np.array([0, 0, 0, 0]), np.array([0, 0, 1, 1, 1])


def steps(rows):
    return rows_on_grid(rows, 8, 5)[0]


# --- rows


def test_sa08_numbers_on_the_grid():
    found, clipped = rows_on_grid(np.array([[0.001, 0.5 / 256, 1.5 / 256, -40, 32]]), 8, 5)
    assert found.tolist() == [[0, 0, 2, -8192, 8192]]
    assert clipped == 1


def test_a_row_that_is_not_finite_is_named():
    with pytest.raises(KnowledgeError, match="row 1 of the features is not finite"):
        rows_on_grid(np.array([[0.0], [np.inf]]), 8, 5)


def test_sa12_unit_rows_on_the_grid():
    rows = np.array([[0.6, -0.8], [1, 0]])
    assert unit_rows_on_grid(rows, 16).tolist() == [[39321, -52428], [65536, 0]]
    assert unit_rows_on_grid(np.array([[0.6, 0.8]]), 2).tolist() == [[2, 3]]


def test_a_row_that_is_too_long_is_shortened_step_by_step():
    """At 4 steps for a length of 1: (4, 4) has the square 32; the first of the equals goes first, to (2, 3) with 13."""
    assert unit_rows_on_grid(np.array([[1.0, 1.0], [-1.0, 0.0]]), 2).tolist() == [[2, 3], [-4, 0]]


rows = st.lists(st.lists(st.floats(-1e200, 1e200), min_size=3, max_size=3), min_size=1, max_size=8)


@given(rows=rows, grid_bits=st.integers(1, 20), stretch=st.floats(1, 1.001))
def test_no_row_is_longer_than_one(rows, grid_bits, stretch):
    """Exactly, in Python's integers; rounding alone moves no number by a step."""
    units = unit_rows(np.array(rows))
    long = unit_rows_on_grid(units * stretch, grid_bits).tolist()
    assert all(sum(number * number for number in row) <= 4**grid_bits for row in long)
    found = unit_rows_on_grid(units, grid_bits)
    assert (np.abs(found) <= np.abs(units) * 2**grid_bits).all()
    assert (np.abs(found - units * 2**grid_bits) < 2).all()


# --- sums


def test_sa08_exact_numbers():
    found = exact_numbers(steps(A), LABELS_A, 2, 0).tolist()
    sums, moment = [1536, 1024, 3072, 0, 0, 0], [917504, 458752, 1179648, 393216, 983040, 2752512]
    assert found == [4, 0, *sums, *moment]


def test_sa08_moments_of_the_sum():
    total = exact_numbers(steps(A), LABELS_A, 2, 0) + exact_numbers(steps(B), LABELS_B, 2, 0)
    found = moments_of_sums(decode(lift(wrap(total, 6), 6), LIMITED_SUM))
    rows, labels = np.vstack([A, B]), np.concatenate([LABELS_A, LABELS_B])
    centred = rows - np.stack([rows[labels == label].mean(axis=0) for label in labels])
    assert found.labels == (0, 1)
    assert found.counts.tolist() == [6, 3]
    assert found.df == 7
    assert found.means == pytest.approx(np.array([[16 / 6, 8 / 6, 13 / 6], [1, 5, 1]]), abs=1e-12)
    assert found.covariance == pytest.approx(centred.T @ centred / 7, abs=1e-12)
    assert found.covariance[0] == pytest.approx([3.6190476, 1.2380952, -1.5238095], abs=5.1e-8)


@given(data=st.data())
def test_who_has_which_row_does_not_change_the_sum(data):
    devices = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(1, 12))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    all_steps, labels = steps(generator.normal(size=(size, 3)) * 20), generator.integers(0, 2, size)
    owner = np.array(data.draw(st.lists(st.integers(0, devices - 1), min_size=size, max_size=size)))
    parts = [exact_numbers(all_steps[owner == one], labels[owner == one], 2, 0) for one in range(devices)]
    assert np.sum(parts, axis=0).tolist() == exact_numbers(all_steps, labels, 2, 0).tolist()


def test_sa08_twenty_devices_sum_to_the_whole():
    generator = np.random.default_rng(3)
    features = generator.normal(size=(3000, 64)) @ generator.normal(size=(64, 64)) / 4 + generator.normal(size=64)
    labels, parts = generator.integers(0, 10, 3000), np.array_split(generator.permutation(3000), 20)
    whole = exact_numbers(steps(features), labels, 10, 0)
    assert np.array_equal(sum(exact_numbers(steps(features[one]), labels[one], 10, 0) for one in parts), whole)
    found = moments_of_sums(decode(whole, replace(LIMITED_SUM, classes=10, dimensions=64)))
    exact = moments_of(features, labels)
    assert np.abs(found.covariance - exact.covariance).max() < 2.5e-4


def test_numbers_beyond_float64_are_exact():
    large = np.full((3, 2), 2**28 + 1)
    found = exact_numbers(large, np.zeros(3, int), 1, 0).tolist()
    assert found == [3, 3 * (2**28 + 1), 3 * (2**28 + 1), *[3 * (2**28 + 1) ** 2] * 3]


def test_sa13_total_of_two_private_devices():
    parameters = replace(PRIVATE_SUM, classes=2, dimensions=2, grid_bits=8, count_bits=4)
    first, second = np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([[1.0, 0.0], [-1.0, 1.0]])
    noise = [[3, -2, 10, -7, 5, 0, 100, -50, 25], [-1, 4, -3, 8, 0, 9, -60, 70, 40]]
    sent = [
        wrap(exact_numbers(unit_rows_on_grid(unit_rows(rows), 8), np.array([0, 1]), 2, 4) + np.array(drawn), 6)
        for rows, drawn in zip((first, second), noise, strict=True)
    ]
    total = lift(sent[0] + sent[1], 6)
    assert total.tolist() == [34, 34, 416, 205, -176, 446, 121746, -1529, 139978]
    sums = decode(total, parameters)
    assert sums.counts.tolist() == [2.125, 2.125]
    assert sums.sums == pytest.approx(np.array([[1.625, 0.8007812], [-0.6875, 1.7421875]]), abs=5.1e-8)
    moment = np.array([[1.8576965, -0.0233307], [-0.0233307, 2.1358948]])
    assert sums.second_moment == pytest.approx(moment, abs=5.1e-8)


# --- the limited second moment


def limited(rows, labels, **changes):
    settings = {"min_samples": 1, "rank": 2, "rows_per_direction": 2, **changes}
    return limited_numbers(steps(rows), labels, 2, 8, **settings)


def test_a_limited_part_is_what_the_device_sends_today():
    """Up to half a step of the second moment, which df divides."""
    sums = decode(limited(B, LABELS_B), LIMITED_SUM)
    today = from_wire(to_wire(moments_of(B, LABELS_B), 2, 2))
    found = moments_of_sums(sums)
    assert (found.labels, found.df, found.counts.tolist()) == (today.labels, today.df, today.counts.tolist())
    assert found.covariance == pytest.approx(today.covariance, abs=0.5 / 4**8 / found.df + 1e-12)


def test_limited_parts_sum_to_their_merge():
    """With exact means in place of those in float16; each device rounds its second moment by half a step."""
    generator = np.random.default_rng(5)
    devices = [(generator.normal(size=(30, 3)) + 1, generator.integers(0, 2, 30)) for _ in range(4)]
    total = np.sum([limited(*device) for device in devices], axis=0)
    parts = []
    for features, labels in devices:
        exact = moments_of(steps(features) / 2**8, labels)
        parts.append(replace(exact, covariance=from_wire(to_wire(exact, 2, 2)).covariance))
    found, wanted = moments_of_sums(decode(total, LIMITED_SUM)), merge(parts)
    assert found.means == pytest.approx(wanted.means, abs=1e-12)
    assert found.covariance == pytest.approx(wanted.covariance, abs=4 * 0.5 / 4**8 / found.df + 1e-12)


def test_small_classes_are_left_out_of_a_limited_part():
    found = limited(B, LABELS_B, min_samples=3).tolist()
    assert found == limited(B[2:], LABELS_B[2:]).tolist()
    assert found[:2] == [0, 3]
    assert not limited(B, LABELS_B, min_samples=4).any()


# --- gradients


def a_gradient(seed: int, rows: int, scale: float = 1.0) -> HeadGradient:
    generator = np.random.default_rng(seed)
    shape = (LIMITED_SUM.classes, LIMITED_SUM.dimensions + 1)
    return HeadGradient(gradient=generator.normal(size=shape), scale=scale, loss=2.5 * rows, rows=rows)


@given(seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=6), log_scale=st.integers(-3, 5))
def test_summed_gradients_are_the_sum_of_the_gradients(seeds, log_scale):
    """Each device rounds to half a step of 4^-g at most; rows are exact."""
    sent = [a_gradient(seed, rows=1000 + seed, scale=2.0**log_scale) for seed in seeds]
    found = gradient_of_sum(np.sum([gradient_numbers(one, LIMITED_SUM) for one in sent], axis=0), LIMITED_SUM)
    exact = np.sum([one.gradient * one.scale for one in sent], axis=0)
    half_steps = len(sent) * 0.5 / 4.0**LIMITED_SUM.grid_bits
    assert np.abs(found.gradient * found.scale - exact).max() <= half_steps * (1 + 1e-9)
    assert abs(found.loss - sum(one.loss for one in sent)) <= half_steps
    assert found.rows == sum(one.rows for one in sent)


def test_hand_worked_numbers_of_a_gradient():
    parameters = replace(LIMITED_SUM, classes=2, dimensions=1, grid_bits=2, clip_bits=1)
    sent = HeadGradient(gradient=np.array([[0.5, -0.25], [3.0, -9.0]]), scale=2.0, loss=4.03, rows=3)
    assert gradient_numbers(sent, parameters).tolist() == [16, -8, 96, -192, 64, 3]  # at most 3 rows of 4


def test_no_gradient_exceeds_what_its_rows_may_have():
    sent = HeadGradient(gradient=np.full((2, 2), 1e30), scale=1.0, loss=1e30, rows=2**14)
    parameters = replace(LIMITED_SUM, classes=2, dimensions=1)
    numbers = gradient_numbers(sent, parameters)
    largest = 2**14 * 4 ** (parameters.clip_bits + parameters.grid_bits)
    assert numbers.tolist() == [largest] * 5 + [2**14]


# --- widths

PLAIN = [((8, 5, 20), 48, 6), ((8, 5, 24), 52, 7), ((6, 5, 20), 44, 6), ((6, 3, 20), 40, 5), ((8, 6, 24), 54, 7)]


@pytest.mark.parametrize(("settings", "bits", "width"), PLAIN)
def test_sa09_widths_without_noise(settings, bits, width):
    """1 + ceil(log2(2^(row bits + 2 (grid bits + clip bits)) + 1)): a sign, and one bit more than the power of two."""
    grid_bits, clip_bits, row_bits = settings
    parameters = replace(LIMITED_SUM, grid_bits=grid_bits, clip_bits=clip_bits, row_bits=row_bits)
    assert bits_needed(parameters) == bits == 2 + row_bits + 2 * (grid_bits + clip_bits)
    assert width_for(parameters) == width


@pytest.mark.parametrize(
    ("grid_bits", "row_bits", "bits", "width"), [(16, 20, 54, 7), (12, 20, 46, 6), (16, 24, 58, 8)]
)
def test_sa09_widths_with_noise(grid_bits, row_bits, bits, width):
    parameters = replace(PRIVATE_SUM, grid_bits=grid_bits, row_bits=row_bits, epsilon=0.3)
    assert bits_needed(parameters) == bits
    assert width_for(parameters) == width


@given(grid_bits=st.integers(1, 9), clip_bits=st.integers(0, 6), row_bits=st.integers(1, 30))
def test_the_largest_number_fits_its_width(grid_bits, clip_bits, row_bits):
    parameters = replace(LIMITED_SUM, grid_bits=grid_bits, clip_bits=clip_bits, row_bits=row_bits)
    largest = 2 ** (row_bits + 2 * (grid_bits + clip_bits))
    values = np.array([largest, -largest])
    assert lift(wrap(values, width_for(parameters)), width_for(parameters)).tolist() == values.tolist()


def test_numbers_of_nine_bytes_are_refused():
    with pytest.raises(ConfigurationError, match="take 66 bits, at most 64 are possible; lower grid_bits, clip_bits"):
        width_for(replace(LIMITED_SUM, row_bits=38))
    with pytest.raises(ConfigurationError, match="lower grid_bits or row_bits"):
        width_for(replace(PRIVATE_SUM, row_bits=40))
