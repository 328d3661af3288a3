"""The tests on what devices have sent of their classes: each one by hand, laws, and attacks on whole runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from fleetdistill.knowledge import Array
from fleetdistill_server.methods.classstats.merge import (
    Centres,
    DeviceStatistics,
    LeftOut,
    capped,
    middle_values,
    screen,
)


def sent(means: Mapping[int, Sequence[float]], *, trace: float = 1.0, count: Any = 10) -> DeviceStatistics:
    """Of classes by label; the count of each class, or one of all."""
    labels = tuple(sorted(means))
    return DeviceStatistics(
        labels=labels,
        counts=np.broadcast_to(np.asarray(count, np.int64), len(labels)).copy(),
        means=np.array([means[label] for label in labels], np.float16),
        trace=trace,
    )


NEAR = {0: [1.0, 0.0], 1: [0.0, 1.0], 2: [1.0, 1.0]}


def gone(left_out: Sequence[LeftOut]) -> list[tuple[str, tuple[int, ...]]]:
    return [(item.device, item.labels) for item in left_out]


# --- (a) counts


def test_a_counts_go_down_to_three_times_the_median_device() -> None:
    """ROB-4: of 10, 20, 30 and 10^9 the median is 25."""
    counts = {"a": [10], "b": [12, 8], "c": [30], "d": [10**9 - 4 * 10**8, 4 * 10**8]}
    fleet = {name: sent({label: [1.0, 0.0] for label in range(len(one))}, count=one) for name, one in counts.items()}
    result = capped(fleet, 3.0)
    assert [result[name].counts.tolist() for name in counts] == [[10], [12, 8], [30], [45, 30]]
    assert all(result[name] is fleet[name] for name in "abc")


def test_a_every_class_keeps_a_row() -> None:
    fleet = {name: sent({0: [1.0, 0.0]}, count=5) for name in "ab"}
    fleet["c"] = sent(NEAR, count=[10**6, 5, 5])
    assert capped(fleet, 3.0)["c"].counts.tolist() == [15, 1, 1]


def test_nobody_is_nothing_to_cap() -> None:
    assert capped({}, 3.0) == {}


# --- (b) length and spread


def test_b_a_device_of_a_wide_covariance_is_left_out() -> None:
    """Each device's trace counts once, however many classes it claims: the median of five is 1."""
    fleet = {name: sent({0: [1.0, 0.0]}) for name in "abe"}
    fleet |= {"c": sent(NEAR, trace=4.1), "d": sent(NEAR, trace=4.0)}
    kept, left_out = screen(fleet, "gross")
    assert gone(left_out) == [("c", (0, 1, 2))]
    assert left_out[0].reason == "its covariance has trace 4.1, the limit is 4, 4 times the median"
    assert kept == {name: fleet[name] for name in "abed"}


def test_b_means_that_are_four_times_too_long_are_left_out() -> None:
    """Means (0, 4) and (0, 5): no covariance is larger, and half of them are nearest to their own centre (0, 1.2)."""
    near = {0: [0.0, 1.0], 1: [0.0, 1.2]}
    fleet = {name: sent(near) for name in "abd"}
    kept, left_out = screen({**fleet, "c": sent({0: [0.0, 4.0], 1: [0.0, 5.0]})}, "gross")
    assert gone(left_out) == [("c", (0, 1))]
    assert left_out[0].reason.startswith("its longest class mean has length 5, the limit is 4.801, 4 times")
    assert sorted(kept) == ["a", "b", "d"]
    assert screen({**fleet, "c": sent({0: [0.0, 4.0], 1: [0.0, 4.75]})}, "gross")[1] == []


# --- (c) nearest centre


def fleet_with(last: DeviceStatistics) -> dict[str, DeviceStatistics]:
    return {**{name: sent(NEAR) for name in "abc"}, "d": last}


@pytest.mark.parametrize(
    ("means", "share", "gross", "strict"),
    [
        ({0: [1.0, 0.0], 1: [0.0, 1.0], 2: [1.0, 1.0]}, 1, False, False),
        ({0: [1.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 1.0]}, 1 / 3, False, True),
        ({0: [0.0, 1.0], 1: [1.0, 0.0]}, 0, True, True),
        ({0: [1.0, 0.0], 1: [1.0, 0.1]}, 1 / 2, False, False),
        ({0: [0.0, 1.0]}, None, False, False),
        ({0: [0.0, 1.0], 7: [1.0, 0.0]}, None, False, False),
    ],
    ids=["honest", "two of three swapped", "two swapped", "one wrong", "one class", "one class that others have"],
)
def test_c_the_share_of_means_at_their_own_centre_decides(
    means: dict[int, list[float]], share: float | None, gross: bool, strict: bool
) -> None:
    fleet = fleet_with(sent(means))
    near = Centres(fleet, {}, shifted=False).near(fleet["d"])
    assert (near and near.share) == share
    assert gone(screen(fleet, "gross")[1]) == ([("d", tuple(means))] if gross else [])
    _, left_out = screen(fleet, "strict")
    assert any("nearest to the centre of their class" in item.reason for item in left_out) == strict


def test_c_the_reason_has_the_figures() -> None:
    swapped = sent({0: [0.0, 1.0], 1: [1.0, 0.0]})
    _, (one,) = screen(fleet_with(swapped), "gross")
    text = "0 of its 2 class means are nearest to the centre of their class, a share of 0; at least 0.25 is required"
    assert one.reason == text


def five(places: Array) -> DeviceStatistics:
    return sent({label: places[label] for label in range(5)})


def test_c_gross_allows_means_shifted_alike_and_strict_does_not() -> None:
    """Shifted towards class 4 by twice their length all are nearest to its centre; among themselves they lie right."""
    place = 2 * np.eye(5)
    fleet = {**{name: five(place) for name in "abc"}, "d": five(place + 2 * place[4])}
    assert Centres(fleet, {}, shifted=False).near(fleet["d"]) == (1, 5)
    assert Centres(fleet, {}, shifted=True).near(fleet["d"]) == (5, 5)
    assert screen(fleet, "gross")[1] == []
    assert gone(screen(fleet, "strict")[1])[0] == ("d", (0, 1, 2, 3, 4))


def test_c_shift_excuses_neither_two_classes_nor_misplaced_means() -> None:
    """Two flipped to a similar pair are shifted by much the same; five rolled ones and a shift are off by both."""
    place = 2 * np.eye(5)
    similar = {0: [0.0, 0.0], 1: [0.0, 0.5], 2: [9.0, 0.0], 3: [9.0, 0.5]}
    fleet = {**{name: sent(similar) for name in "abc"}, "d": sent({2: similar[0], 3: similar[1]})}
    assert gone(screen(fleet, "gross")[1]) == [("d", (2, 3))]
    rolled = five(np.roll(place, -1, axis=0) + place[4])
    fleet = {**{name: five(place) for name in "abc"}, "d": rolled}
    assert gone(screen(fleet, "gross")[1]) == [("d", (0, 1, 2, 3, 4))]


def test_c_device_wrong_about_most_classes_goes_first() -> None:
    """Two liars claim five classes, four of them rolled, so one of five means is right: a share of 0.2.

    Of each class there are two honest holders. Of the others of either the liars are the majority: a share of 0. By the
    smallest share one of them would go first, and the liars would stay.
    """
    place = 2 * np.eye(5)
    rolled = sent({label: place[label % 4 + 1 if label else 0] for label in range(5)})
    held = {"a": (1, 2), "b": (3, 4), "c": (1, 3), "d": (2, 4)}
    honest = {name: sent({label: place[label] for label in labels}) for name, labels in held.items()}
    fleet = {**honest, "y": rolled, "z": rolled}
    centres = Centres(fleet, {}, shifted=False)
    assert [centres.near(fleet[name]) for name in "adyz"] == [(0, 2), (0, 2), (1, 5), (1, 5)]
    kept, left_out = screen(fleet, "gross")
    assert gone(left_out) == [("y", (0, 1, 2, 3, 4)), ("z", (0, 1, 2, 3, 4))]
    assert sorted(kept) == list(held)


def test_c_the_worst_goes_first_and_honest_ones_stay() -> None:
    """With two liars of five the centres of class 0 and 1 are half wrong; without the first they are right again."""
    swapped = {0: [0.0, 1.0], 1: [1.0, 0.0], 2: [1.0, 1.0]}
    half = {0: [0.0, 1.0], 1: [1.0, 0.0]}
    fleet = {**{name: sent(NEAR) for name in "abc"}, "d": sent(half), "e": sent(half)}
    kept, left_out = screen(fleet, "gross")
    assert gone(left_out) == [("d", (0, 1)), ("e", (0, 1))]
    assert sorted(kept) == ["a", "b", "c"]
    fleet = {**{name: sent(NEAR) for name in "abc"}, "d": sent(swapped)}
    assert screen(fleet, "gross")[1] == []  # a third of its means is right


def test_c_no_more_than_half_of_the_devices_are_left_out() -> None:
    """Two against two: whoever is looked at has two of three others against it, until two are left."""
    swapped = sent({0: [0.0, 1.0], 1: [1.0, 0.0]})
    kept, left_out = screen({"a": sent(NEAR), "b": sent(NEAR), "c": swapped, "d": swapped}, "gross")
    assert len(kept) == len(left_out) == 2


def test_of_two_devices_neither_is_left_out() -> None:
    fleet = {
        "a": sent(NEAR),
        "b": sent({0: [0.0, 90.0], 1: [90.0, 0.0]}, trace=500.0),
    }
    kept, left_out = screen(fleet, "strict")
    assert (kept, left_out) == (fleet, [])


# --- (d) distance


def test_d_strict_leaves_out_single_classes_that_lie_far_off() -> None:
    """Of ten rows a class with trace 1 the unit is sqrt(1 / 10 + 0.05) = 0.387: at 1.2 from the median it is 3.1."""
    shifted = {0: [1.0, 0.0], 1: [0.0, 1.0], 2: [1.0 + 1.2, 1.0]}
    fleet = fleet_with(sent(shifted))
    kept, left_out = screen(fleet, "strict")
    assert gone(left_out) == [("d", (2,))]
    assert left_out[0].reason == "its class means are too far from the median device's: 3.1 (class 2, limit 3)"
    assert kept["d"].labels == (0, 1)
    assert screen(fleet, "gross") == (fleet, [])
    within = fleet_with(sent({**shifted, 2: [1.0 + 1.15, 1.0]}))  # 2.97
    assert screen(within, "strict")[1] == []


def test_d_limit_is_three_times_median_where_all_lie_apart() -> None:
    """Means 0, 1, 2, 3, 8: from the median 2 they lie 2, 1, 0, 1, 6 units, 6 is more than 3 times 1 and than 3."""
    unit = float(np.sqrt(1 / 20 + 0.05))
    places = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 8}
    fleet = {name: sent({0: [place * unit, 0.0]}, count=20) for name, place in places.items()}
    assert gone(screen(fleet, "strict")[1]) == [("e", (0,))]
    wider = {name: sent({0: [4 * place * unit, 0.0]}, count=20) for name, place in places.items() if name != "e"}
    assert screen(wider, "strict")[1] == []  # 8, 4, 0, 4: no more than 3 times 4


def test_d_means_without_spread_are_not_compared() -> None:
    """There is no unit to measure their distance in."""
    fleet = fleet_with(sent({0: [1.0, 0.0], 1: [0.0, 1.0], 2: [3.0, 1.0]}, trace=0.0))
    fleet = {name: sent(dict(zip(one.labels, one.means, strict=True)), trace=0.0) for name, one in fleet.items()}
    assert screen(fleet, "strict")[1] == []


# --- (e) trusted centres


def test_e_trusted_centres_outvote_any_number_of_liars() -> None:
    """Three liars of four; without the operator's rows the honest one is left out."""
    swapped = sent({0: [0.0, 1.0], 1: [1.0, 0.0]})
    fleet = {"a": sent(NEAR), **dict.fromkeys("bcd", swapped)}
    trusted = {label: np.array(mean) for label, mean in NEAR.items()}
    assert gone(screen(fleet, "gross", trusted)[1]) == [("b", (0, 1)), ("c", (0, 1))]  # half of four at most
    assert gone(screen({"a": sent(NEAR), "b": swapped, "c": swapped}, "gross", trusted)[1]) == [("b", (0, 1))]
    alone = {"a": sent(NEAR), "b": swapped}
    assert gone(screen(alone, "gross", trusted)[1]) == [("b", (0, 1))]
    assert screen(alone, "gross")[1] == []


# --- laws


@given(seed=st.integers(0, 2**32 - 1), devices=st.integers(1, 7))
def test_the_median_of_the_others_is_that_of_all_without_one(seed: int, devices: int) -> None:
    generator = np.random.default_rng(seed)
    means = list(generator.integers(-3, 4, size=(devices, 5)).astype(np.float16))  # with ties
    fleet = {str(number): sent({0: mean}) for number, mean in enumerate(means)}
    centres = Centres(fleet, {}, shifted=False)
    assert len(middle_values(means)) == min(devices, 2 + devices % 2)
    for number, mean in enumerate(means):
        others = [one.astype(np.float64) for other, one in enumerate(means) if other != number]
        result = centres.without({0: mean.astype(np.float64)})
        assert result.keys() == ({0} if others else set())
        if others:
            assert_array_equal(result[0], np.median(others, axis=0))
    assert_array_equal(centres.without({})[0], np.median(np.stack(means).astype(np.float64), axis=0))


def random_fleet(seed: int, devices: int) -> dict[str, DeviceStatistics]:
    generator = np.random.default_rng(seed)
    fleet = {}
    for number in range(devices):
        labels = np.flatnonzero(generator.random(5) < 0.7).tolist() or [0]
        means: dict[int, Array] = {c: 2 * np.eye(5)[c] + generator.normal(0, 0.4, 5) for c in labels}
        trace = float(generator.choice([1.0, 1.5, 9.0], p=[0.6, 0.3, 0.1]))
        count = generator.integers(5, 500, size=len(labels))
        fleet[f"d{number}"] = sent(means, trace=trace, count=count)  # type: ignore[arg-type]
    return fleet


@given(
    seed=st.integers(0, 2**32 - 1),
    devices=st.integers(1, 8),
    robust=st.sampled_from(["gross", "strict"]),
    order=st.randoms(use_true_random=False),
)
def test_the_verdict_does_not_depend_on_the_order_and_adds_up(seed: int, devices: int, robust: str, order: Any) -> None:
    fleet = random_fleet(seed, devices)
    names = list(fleet)
    order.shuffle(names)
    kept, left_out = screen(fleet, robust)
    again, also = screen({name: fleet[name] for name in names}, robust)
    assert sorted(gone(left_out)) == sorted(gone(also))
    assert {name: one.labels for name, one in kept.items()} == {name: one.labels for name, one in again.items()}
    for name, one in fleet.items():
        out = [label for device, labels in gone(left_out) if device == name for label in labels]
        assert sorted([*out, *(kept[name].labels if name in kept else ())]) == sorted(one.labels)
    if not left_out:
        assert all(kept[name] is one for name, one in fleet.items())


@given(seed=st.integers(0, 2**32 - 1), devices=st.integers(1, 8), cap=st.floats(1, 9))
def test_nobody_counts_above_cap_and_those_below_are_unchanged(seed: int, devices: int, cap: float) -> None:
    fleet = random_fleet(seed, devices)
    totals = {name: int(one.counts.sum()) for name, one in fleet.items()}
    most = cap * float(np.median(list(totals.values())))
    for name, one in capped(fleet, cap).items():
        assert (one is fleet[name]) == (totals[name] <= most)
        assert int(one.counts.sum()) <= max(most, 0) + len(one.labels)
        assert (one.counts >= 1).all()
