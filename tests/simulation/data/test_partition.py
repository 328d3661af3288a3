"""Partitions: oracles, which were computed independently, hand-worked cases, laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab import Simulation
from fleetdistill_lab.simulation.data.dealing import (
    counts_from_pools,
    cut_sizes,
    deal_classes,
    largest_remainder,
    mask_full_devices,
)
from fleetdistill_lab.simulation.data.partition import (
    PARTITIONS,
    check_partition_settings,
    class_shards,
    classes_random,
    classes_window,
    dirichlet_by_class,
    dirichlet_per_device,
    iid,
    partition,
    partition_parameters,
)
from fleetdistill_lab.simulation.data.split import Ints, Partition

TEN_BY_100 = np.repeat(np.arange(10), 100)
PARAMETERS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet_by_class": {"alpha": 0.5, "min_size": 1},
    "dirichlet_per_device": {"alpha": 0.5},
    "classes_window": {"classes_per_device": 2},
    "classes_random": {"classes_per_device": 2},
    "class_shards": {"classes_per_device": 2},
    "by_client": {"clients": np.arange(1000) % 20},
}
DRAWN = set(PARTITIONS) - {"by_client"}  # which follows the data set alone
WHOLE_DATA = ("iid", "dirichlet_by_class", "dirichlet_per_device")
BY_CLASSES = ("classes_window", "classes_random", "class_shards")


def _mean_largest_share(split: Partition, labels: Ints, classes: int) -> float:
    counts = split.class_counts(labels, classes)
    return float((counts.max(axis=1) / counts.sum(axis=1)).mean())


class TestOracles:
    def test_partition_cuts(self) -> None:
        first, second = cut_sizes(np.array([0.25, 0.25, 0.5]), 10), cut_sizes(np.array([0.05, 0.15, 0.8]), 6)
        assert first.tolist() == [2, 3, 5]
        assert second.tolist() == [0, 1, 5]
        assert (first + second).tolist() == [2, 4, 10]

    def test_partition_mask(self) -> None:
        masked = mask_full_devices(np.array([0.2, 0.2, 0.6]), np.array([2, 3, 6]), 16 / 3)
        np.testing.assert_allclose(masked, [0.5, 0.5, 0.0])

    def test_partition_largest_remainder(self) -> None:
        assert largest_remainder(np.array([0.62, 0.25, 0.13]), 10).tolist() == [6, 3, 1]

    @pytest.mark.parametrize(
        ("alpha", "sizes"),
        [
            (0.1, (67, 153, 102, 46, 145, 106, 155, 107, 17, 102)),
            (1.0, (102, 118, 98, 102, 79, 101, 112, 80, 97, 111)),
        ],
    )
    def test_splits_by_class(self, alpha: float, sizes: tuple[int, ...]) -> None:
        assert dirichlet_by_class(TEN_BY_100, 10, alpha, 7).sizes == sizes

    @pytest.mark.parametrize(("alpha", "share"), [(0.1, 0.632), (1.0, 0.345)])
    def test_splits_per_device(self, alpha: float, share: float) -> None:
        split = dirichlet_per_device(TEN_BY_100, 10, alpha, 7, rounding="floor")
        assert split.sizes == (100,) * 10
        assert _mean_largest_share(split, TEN_BY_100, 10) == pytest.approx(share, abs=1e-9)

    @pytest.mark.parametrize(
        ("alpha", "share", "effective"),
        [
            (0.05, 0.784, 1.83),
            (0.1, 0.664, 2.50),
            (0.5, 0.382, 5.43),
            (1.0, 0.293, 6.96),
            (10.0, 0.154, 9.57),
        ],
    )
    def test_shares_have_the_expected_shape(self, alpha: float, share: float, effective: float) -> None:
        """Mean largest share and e^entropy of 2,000 draws from Dir(alpha · 1_10).

        Without balance, the shares of each class over ten devices are such draws.
        """
        rows = np.arange(2_000_000).reshape(2000, 1000)
        parts = deal_classes(list(rows), 10, alpha, np.random.default_rng(0), balance=False)
        shares = np.stack([np.bincount(mine // 1000, minlength=2000) for mine in parts], axis=1) / 1000
        assert shares.max(axis=1).mean() == pytest.approx(share, abs=0.02)
        entropies = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=1)
        assert np.exp(entropies).mean() == pytest.approx(effective, abs=0.1)

    @pytest.mark.parametrize(("alpha", "exhausted", "free"), [(0.1, 0.632, 0.664), (1.0, 0.345, 0.293)])
    def test_pools_run_out_for_later_devices_only(self, alpha: float, exhausted: float, free: float) -> None:
        """The first device's shares are a free draw; the mean over all devices is near the oracle's for one seed."""
        splits = [dirichlet_per_device(TEN_BY_100, 10, alpha, seed) for seed in range(400)]
        shares = np.stack([split.class_counts(TEN_BY_100, 10).max(axis=1) / 100 for split in splits])
        assert shares[:, 0].mean() == pytest.approx(free, abs=0.02)
        assert shares.mean() == pytest.approx(exhausted, abs=0.05)

    def test_partition_two_of_ten(self) -> None:
        counts = classes_window(TEN_BY_100, 4, 2, 0).class_counts(TEN_BY_100, 10)
        assert [np.flatnonzero(row).tolist() for row in counts] == [[0, 1], [1, 2], [2, 3], [3, 4]]

    def test_window_of_fifty_devices_gives_each_class_ten_holders(self) -> None:
        counts = classes_window(TEN_BY_100, 50, 2, 0).class_counts(TEN_BY_100, 10)
        assert ((counts > 0).sum(axis=0) == 10).all()
        assert (counts[counts > 0] == 10).all()

    def test_partition_shards_of_twenty_devices(self) -> None:
        """Two shards for each of 20 devices are 4 pieces of each of 10 classes: 25 rows of 100, one class or two."""
        counts = class_shards(TEN_BY_100, 20, 2, 0).class_counts(TEN_BY_100, 10)
        assert set(counts.ravel().tolist()) <= {0, 25, 50}
        assert (counts.sum(axis=1) == 50).all()
        assert (counts.sum(axis=0) == 100).all()

    def test_splits_shards_can_be_of_one_class(self) -> None:
        """7 of 50 devices in an independent draw; at random 4 of 49 pieces left match the first: 4.1 of 50."""
        alike = [
            (class_shards(TEN_BY_100, 50, 2, seed).class_counts(TEN_BY_100, 10) > 0).sum(axis=1) == 1
            for seed in range(40)
        ]
        assert np.mean(np.sum(alike, axis=1)) == pytest.approx(50 * 9 / 99, abs=1.0)


class TestLaws:
    @given(
        kind=st.sampled_from(WHOLE_DATA),
        labels=st.lists(st.integers(0, 5), min_size=60, max_size=200),
        devices=st.integers(1, 6),
        seed=st.integers(0, 2**32 - 1),
    )
    @settings(max_examples=100)
    def test_lists_are_disjoint_sorted_and_repeatable(
        self, kind: str, labels: list[int], devices: int, seed: int
    ) -> None:
        split = partition(kind, labels, devices, seed, **PARAMETERS[kind])
        again = partition(kind, labels, devices, seed, **PARAMETERS[kind])
        dealt = np.concatenate(split.indices)
        used = len(labels) // devices * devices if kind == "dirichlet_per_device" else len(labels)
        assert len(np.unique(dealt)) == len(dealt) == used
        assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in split.indices)
        assert all(np.array_equal(a, b) for a, b in zip(split.indices, again.indices, strict=True))
        assert (len(split.indices), split.kind) == (devices, kind)

    @given(kind=st.sampled_from(sorted(DRAWN - {"iid"})), order=st.randoms(use_true_random=False))
    @settings(max_examples=20)
    def test_the_order_of_rows_does_not_change_class_counts(self, kind: str, order: Any) -> None:
        labels = np.repeat(np.arange(4), [40, 30, 50, 20])
        shuffled = labels.tolist()
        order.shuffle(shuffled)
        first, second = (partition(kind, y, 4, 3, **PARAMETERS[kind]).class_counts(y, 4) for y in (labels, shuffled))
        assert np.array_equal(first, second)

    @given(
        kind=st.sampled_from(BY_CLASSES),
        sizes=st.lists(st.integers(30, 60), min_size=4, max_size=4),
        devices=st.sampled_from([2, 4, 6, 8]),
        held=st.sampled_from([2, 4]),
        seed=st.integers(0, 2**32 - 1),
    )
    @settings(max_examples=100)
    def test_device_holds_given_class_count_and_all_rows_are_used(
        self, kind: str, sizes: list[int], devices: int, held: int, seed: int
    ) -> None:
        labels = np.repeat(np.arange(4), sizes)
        split = partition(kind, labels, devices, seed, classes_per_device=held)
        counts = split.class_counts(labels, 4)
        dealt = np.concatenate(split.indices)
        assert len(np.unique(dealt)) == len(dealt)
        assert ((counts > 0).sum(axis=1) <= held).all()
        if kind != "class_shards":
            assert ((counts > 0).sum(axis=1) == held).all()
        held_by_anyone = counts.any(axis=0)
        assert (counts.sum(axis=0) == np.where(held_by_anyone, sizes, 0)).all()
        again = partition(kind, labels, devices, seed, classes_per_device=held)
        assert all(np.array_equal(a, b) for a, b in zip(split.indices, again.indices, strict=True))

    @given(weights=st.lists(st.floats(0, 1), min_size=1, max_size=12), count=st.integers(0, 10_000))
    def test_sizes_sum_to_the_count_and_stay_close(self, weights: list[float], count: int) -> None:
        shares = np.array(weights) + 1e-3
        shares /= shares.sum()
        for sizes in (cut_sizes(shares, count), largest_remainder(shares, count)):
            assert sizes.sum() == count
            assert (np.abs(sizes - shares * count) < 1 + 1e-6).all()

    @given(
        pools=st.lists(st.integers(0, 30), min_size=2, max_size=8).filter(any),
        seed=st.integers(0, 1000),
        fraction=st.floats(0, 1),
        rounding=st.sampled_from(["largest_remainder", "floor"]),
    )
    def test_pools_are_never_overdrawn(self, pools: list[int], seed: int, fraction: float, rounding: str) -> None:
        prior = np.random.default_rng(seed).dirichlet(np.full(len(pools), 0.05))
        size = int(fraction * sum(pools))
        taken = counts_from_pools(prior, np.array(pools), size, rounding)
        assert taken.sum() == size
        assert ((taken >= 0) & (taken <= pools)).all()

    def test_different_seeds_differ(self) -> None:
        for kind in DRAWN:
            parameters = PARAMETERS[kind]
            first, second = (partition(kind, TEN_BY_100, 10, seed, **parameters) for seed in (0, 1))
            assert not np.array_equal(first.indices[0], second.indices[0]), kind


class TestClasses:
    """The partitions by which a device holds some classes only."""

    def test_windows_of_cifar_100_start_ten_classes_apart(self) -> None:
        labels = np.repeat(np.arange(100), 20)
        counts = classes_window(labels, 10, 30, 0, stride=10).class_counts(labels, 100)
        assert np.flatnonzero(counts[9]).tolist() == [*range(20), *range(90, 100)]
        assert (counts.sum(axis=0) == 20).all()

    def test_random_classes_leave_no_class_without_a_holder(self) -> None:
        for seed in range(10):
            counts = classes_random(TEN_BY_100, 10, 6, seed).class_counts(TEN_BY_100, 10)
            assert (counts.sum(axis=0) == 100).all()
            assert all(counts[k, k] > 0 for k in range(10))

    def test_random_classes_are_the_seeds(self) -> None:
        """The seed decides which classes a device has, not only which of their rows."""
        held = [classes_random(TEN_BY_100, 10, 4, seed).class_counts(TEN_BY_100, 10) > 0 for seed in (0, 0, 1, 2)]
        assert (held[0] == held[1]).all()
        assert (held[0] != held[2]).any()
        assert (held[2] != held[3]).any()

    @pytest.mark.parametrize("sigma", [1.0, 2.0])
    def test_lognormal_shares_follow_ten_rows_of_each_class(self, sigma: float) -> None:
        """As in CDKT-FL's code; of 2,000 rows and ten holders, 100 come first."""
        labels = np.repeat(np.arange(10), 2000)
        counts = classes_window(labels, 50, 2, 0, unbalanced=sigma).class_counts(labels, 10)
        assert ((counts > 0).sum(axis=1) == 2).all()
        assert counts[counts > 0].min() >= 10
        assert (counts.sum(axis=0) == 2000).all()

    def test_a_class_with_few_rows_gives_each_holder_an_even_share(self) -> None:
        """Five rows for two holders: two each, and one by lognormal shares."""
        labels = np.repeat([0, 1], 5)
        counts = classes_window(labels, 2, 2, 0, unbalanced=3.0).class_counts(labels, 2)
        assert sorted(counts.ravel().tolist()) == [2, 2, 3, 3]

    def test_lognormal_shares_are_unequal(self) -> None:
        even = classes_window(TEN_BY_100, 10, 2, 0).sizes
        uneven = classes_window(TEN_BY_100, 10, 2, 0, unbalanced=1.0).sizes
        assert set(even) == {100}
        assert max(uneven) > 2 * min(uneven)
        assert sum(uneven) == 1000

    @pytest.mark.parametrize("kind", BY_CLASSES)
    def test_classes_per_device_out_of_range(self, kind: str) -> None:
        with pytest.raises(ConfigurationError, match=r"classes_per_device is 0"):
            partition(kind, TEN_BY_100, 10, 0, classes_per_device=0)

    def test_more_classes_than_there_are(self) -> None:
        for deal in (classes_window, classes_random, class_shards):
            with pytest.raises(ConfigurationError, match="must be between 1 and 10, the number of classes"):
                deal(TEN_BY_100, 5, 11, 0)

    def test_shards_that_do_not_come_out_even(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"7 devices with 3 shards each need 21 shards.*not a multiple of the 10 classes"
        ):
            class_shards(TEN_BY_100, 7, 3, 0)

    def test_a_device_without_rows_is_refused(self) -> None:
        labels = np.array([0, 1, 1, 1, 0, 1])
        with pytest.raises(DataError, match="cannot give every device 1 or more rows: classes_window"):
            classes_window(labels, 6, 1, 0)
        with pytest.raises(DataError, match="cannot give every device 1 or more rows: class_shards"):
            class_shards(labels, 6, 1, 0)

    def test_stride_and_spread_out_of_range(self) -> None:
        with pytest.raises(ConfigurationError, match="stride is 0"):
            classes_window(TEN_BY_100, 5, 2, 0, stride=0)
        with pytest.raises(ConfigurationError, match=r"unbalanced is -1\.0"):
            classes_random(TEN_BY_100, 5, 2, 0, unbalanced=-1.0)

    def test_what_a_partition_needs_to_be_told(self) -> None:
        assert {kind: partition_parameters(kind) for kind in PARTITIONS} == {
            kind: tuple(name for name in values if name != "min_size") for kind, values in PARAMETERS.items()
        }


class TestTraps:
    def test_rounding_gives_a_masked_last_device_nothing(self) -> None:
        """0.1 is added ten times to 0.9999999999999999, so a plain floor would leave row 10 to device 11."""
        shares = np.array([0.1] * 10 + [0.0])
        assert np.cumsum(shares)[-1] < 1
        assert cut_sizes(shares, 10).tolist() == [1] * 10 + [0]

    @pytest.mark.parametrize("alpha", [0.1, 1e-4])
    def test_balance_gives_a_full_device_nothing_more(self, alpha: float) -> None:
        """Two devices, classes of 10 each, even share 10: who holds 10 or more after class 0 gets none of class 1.

        At alpha 1e-4 all of class 1's mass often lies on the full device, and renormalising would divide by 0.
        """
        labels = np.repeat([0, 1], 10)
        for seed in range(50):
            counts = dirichlet_by_class(labels, 2, alpha, seed, min_size=0).class_counts(labels, 2)
            assert not counts[counts[:, 0] >= 10, 1].any(), seed

    def test_the_minimum_size_holds(self) -> None:
        for seed in range(20):
            assert min(dirichlet_by_class(TEN_BY_100, 16, 0.1, seed, min_size=10).sizes) >= 10

    def test_giving_up_says_what_to_change(self) -> None:
        with pytest.raises(DataError, match=r"cannot give every device 10 or more rows: 3 draws.*larger alpha"):
            dirichlet_by_class(TEN_BY_100, 90, 0.05, 0, max_tries=3)
        with pytest.raises(DataError, match="cannot give every device 101 or more rows: 10 devices need 1010 rows"):
            dirichlet_by_class(TEN_BY_100, 10, 1.0, 0, min_size=101)

    def test_largest_remainder_keeps_the_prior_with_many_classes(self) -> None:
        """100 classes, 100 rows a device: rounding down hands most of a device's rows to its largest class."""
        labels = np.repeat(np.arange(100), 100)
        fair, floor = (
            _mean_largest_share(dirichlet_per_device(labels, 100, 1.0, 0, rounding=name), labels, 100)
            for name in ("largest_remainder", "floor")
        )
        assert fair < 0.15 < floor

    def test_the_share_of_an_empty_pool_goes_to_the_others(self) -> None:
        """Wanted 5, 3, 2 but one is left of class 0: 1, 3, 2, then 4 more as .6 : .4, that is 2 and 2."""
        taken = counts_from_pools(np.array([0.5, 0.3, 0.2]), np.array([1, 10, 10]), 10)
        assert taken.tolist() == [1, 5, 4]

    def test_a_mix_that_has_run_out_takes_from_what_is_left(self) -> None:
        """Two of class 0, then 4 from pools of 6 and 2, that is 3 and 1."""
        assert counts_from_pools(np.array([1.0, 0.0, 0.0]), np.array([2, 6, 2]), 6).tolist() == [2, 3, 1]

    def test_the_remainder_is_left_over(self) -> None:
        split = dirichlet_per_device(TEN_BY_100[:998], 10, 0.5, 0)
        assert split.sizes == (99,) * 10

    def test_lognormal_sizes_are_unequal_and_fit(self) -> None:
        sizes = dirichlet_per_device(TEN_BY_100, 10, 0.5, 0, unbalanced=1.0).sizes
        assert len(set(sizes)) > 5
        assert 990 < sum(sizes) <= 1000
        with pytest.raises(DataError, match="cannot give every device 1 or more rows"):
            dirichlet_per_device(TEN_BY_100, 100, 0.5, 0, unbalanced=8.0)

    def test_iid_sizes_differ_by_one_at_most(self) -> None:
        assert sorted(iid(TEN_BY_100, 7, 0).sizes) == [142] + [143] * 6


def halves(labels: Any, devices: int, seed: int, alpha: float, *, first: int = 0) -> list[Any]:
    """A partition of an app: all rows in the order of a seed, and `first` of them to nobody."""
    assert alpha > 0
    rows = np.random.default_rng(seed).permutation(len(labels))
    return np.array_split(rows[first:], devices)


def faulty(labels: Any, devices: int, seed: int, what: str = "") -> list[Any]:
    rows = [part.tolist() for part in np.array_split(np.arange(len(labels)), devices)]
    if not what:
        raise KeyError("no such split")
    return {
        "few": rows[1:],
        "empty": [[], *rows[1:]],
        "floats": [np.array(rows[0], float), *rows[1:]],
        "twice": [[*rows[0], rows[1][0]], *rows[1:]],
        "outside": [[*rows[0], len(labels)], *rows[1:]],
        "negative": [[5, -1, 7], *rows[1:]],
    }[what]


def needing(labels: Any, devices: int, seed: int, sigma: float) -> list[Any]:
    return []


class TestOwn:
    """A partition of one's own."""

    KIND = f"{__name__}:halves"

    def test_its_rows_are_those_that_it_returns(self) -> None:
        split = partition(self.KIND, TEN_BY_100, 5, seed=3, alpha=0.5, first=10)
        assert split.kind == self.KIND
        assert split.parameters == {"devices": 5, "seed": 3, "alpha": 0.5, "first": 10}
        expected = halves(TEN_BY_100, 5, 3, 0.5, first=10)
        assert all(np.array_equal(a, np.sort(b)) for a, b in zip(split.indices, expected, strict=True))

    def test_its_settings_are_those_of_the_simulation(self) -> None:
        assert partition_parameters(self.KIND) == ("alpha",)
        check_partition_settings(self.KIND, {"first": 3})
        with pytest.raises(ConfigurationError, match=r"\[partition\] unknown setting 'frist'; did you mean 'first'"):
            check_partition_settings(self.KIND, {"frist": 3})
        with pytest.raises(ConfigurationError, match="needs sigma, which is no setting of"):
            partition_parameters(f"{__name__}:needing")

    @pytest.mark.parametrize(
        ("what", "says"),
        [
            ("few", "returned 4 parts for 5 devices"),
            ("empty", r"returned float64 of shape \[0\] for device 0, expected a vector of at least one row number"),
            ("floats", r"returned float64 of shape \[200\] for device 0"),
            ("twice", "gave row 200 more than once"),
            ("outside", "gave device 0 row 1000, but the data have rows 0 to 999"),
            ("negative", "gave device 0 row -1, but the data have rows 0 to 999"),
        ],
    )
    def test_rows_that_cannot_be_used_are_named(self, what: str, says: str) -> None:
        with pytest.raises(DataError, match=f"partition '{__name__}:faulty' {says}"):
            partition(f"{__name__}:faulty", TEN_BY_100, 5, 0, what=what)

    def test_what_it_raises_is_told(self) -> None:
        with pytest.raises(ConfigurationError, match="raised KeyError: 'no such split'"):
            partition(f"{__name__}:faulty", TEN_BY_100, 5, 0)
        with pytest.raises(ConfigurationError, match=r"unknown partition 'half'.*, or package\.module:function"):
            partition("half", TEN_BY_100, 5, 0)
        with pytest.raises(ConfigurationError, match="has no function 'thirds'"):
            partition(f"{__name__}:thirds", TEN_BY_100, 5, 0)

    def test_a_simulation_takes_the_function_itself(self) -> None:
        wanted = Simulation(method="fedavg", partition=halves, alpha=0.3)
        assert wanted.partition == wanted.partition_path == self.KIND
        with pytest.raises(ConfigurationError, match="not a function at the top level of a module"):
            Simulation(method="fedavg", partition=lambda labels, devices, seed: [])


class TestArguments:
    def test_a_partition_carries_all_that_it_follows_from(self) -> None:
        split = dirichlet_by_class(TEN_BY_100, 5, 0.5, 9)
        assert split.parameters == {
            "devices": 5,
            "seed": 9,
            "alpha": 0.5,
            "min_size": 10,
            "balance": True,
            "max_tries": 1000,
        }
        parameters: dict[str, Any] = dict(split.parameters)
        again = partition(split.kind, TEN_BY_100, **parameters)
        assert all(np.array_equal(a, b) for a, b in zip(split.indices, again.indices, strict=True))

    @pytest.mark.parametrize("kind", ["dirichlet_by_class", "dirichlet_per_device"])
    @pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
    def test_alpha_out_of_range(self, kind: str, alpha: float) -> None:
        with pytest.raises(ConfigurationError, match=f"alpha is {alpha}"):
            partition(kind, TEN_BY_100, 5, 0, alpha=alpha)

    @pytest.mark.parametrize("kind", sorted(PARTITIONS))
    def test_devices_out_of_range(self, kind: str) -> None:
        with pytest.raises(ConfigurationError, match="devices is 0"):
            partition(kind, TEN_BY_100, 0, 0, **PARAMETERS[kind])
        with pytest.raises(DataError, match="1001 devices cannot share 1000 rows"):
            partition(kind, TEN_BY_100, 1001, 0, **PARAMETERS[kind])

    @pytest.mark.parametrize(
        ("labels", "message"),
        [([0.0, 1.0], "float64"), ([[0], [1]], r"shape \[2, 1\]"), ([0, -2], "label -2 at row 1 is negative")],
    )
    def test_labels_that_cannot_be_used(self, labels: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            iid(labels, 1, 0)

    def test_unknown_names_list_the_known_ones(self) -> None:
        with pytest.raises(ConfigurationError, match="unknown partition 'pieces', expected one of iid, dirichlet"):
            partition("pieces", TEN_BY_100, 5, 0)
        with pytest.raises(ConfigurationError, match="unexpected keyword argument 'alfa'"):
            partition("dirichlet_by_class", TEN_BY_100, 5, 0, alpha=1.0, alfa=1.0)
        with pytest.raises(ConfigurationError, match="missing a required argument: 'alpha'"):
            partition("dirichlet_by_class", TEN_BY_100, 5, 0)
        with pytest.raises(ConfigurationError, match="unknown rounding 'up'"):
            partition("dirichlet_per_device", TEN_BY_100, 5, 0, alpha=1.0, rounding="up")

    @pytest.mark.parametrize(
        ("kind", "given", "message"),
        [
            ("dirichlet_by_class", {"min_sise": 1}, "[partition] unknown setting 'min_sise'; did you mean 'min_size'?"),
            ("dirichlet_by_class", {"min_size": "few"}, "[partition] min_size is 'few', expected int"),
            ("dirichlet_by_class", {"min_size": True}, "[partition] min_size is True, expected int"),
            ("dirichlet_by_class", {"balance": 0}, "[partition] balance is 0, expected bool"),
            ("dirichlet_by_class", {"alpha": 1.0}, "[partition] has alpha, which is a setting of the simulation"),
            ("dirichlet_per_device", {"rounding": 1}, "[partition] rounding is 1, expected str"),
            ("dirichlet_per_device", {"rounding": "up"}, "unknown rounding 'up'"),
            ("dirichlet_per_device", {"unbalanced": -0.5}, "[partition] unbalanced is -0.5, must be at least 0"),
            ("classes_window", {"stride": 0}, "[partition] stride is 0, must be at least 1"),
            ("iid", {"stride": 2}, "[partition] has stride, but the partition iid has no settings there"),
            ("class_shards", {"devices": 2}, "the partition class_shards has no settings there"),
        ],
    )
    def test_further_settings_are_checked(self, kind: str, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError) as refused:
            check_partition_settings(kind, given)
        assert message in str(refused.value)

    def test_whole_number_is_a_float_too(self) -> None:
        check_partition_settings("classes_window", {"unbalanced": 1, "stride": 10})

    @pytest.mark.parametrize("change", [{"min_size": -1}, {"max_tries": 0}])
    def test_by_class_settings_out_of_range(self, change: dict[str, int]) -> None:
        with pytest.raises(ConfigurationError, match="must be at least"):
            partition("dirichlet_by_class", TEN_BY_100, 5, 0, alpha=1.0, **change)

    def test_unbalanced_out_of_range(self) -> None:
        with pytest.raises(ConfigurationError, match=r"unbalanced is -0\.1"):
            dirichlet_per_device(TEN_BY_100, 5, 1.0, 0, unbalanced=-0.1)


class TestByClient:
    def test_device_has_rows_of_one_client_and_the_rest_is_unused(self) -> None:
        clients = [7, 3, 7, 9, 3, 3]
        split = partition("by_client", [0, 1, 0, 1, 0, 1], 2, 0, clients=clients)
        assert [rows.tolist() for rows in split.indices] == [[1, 4, 5], [0, 2]]

    def test_more_devices_than_clients_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="devices is 3, but the data set has 2 clients"):
            partition("by_client", [0, 1, 0], 3, 0, clients=[1, 2, 1])

    @pytest.mark.parametrize("clients", [None, [1, 2]])
    def test_a_data_set_that_does_not_tell_is_refused(self, clients: list[int] | None) -> None:
        with pytest.raises(DataError, match="needs a data set with train_clients"):
            partition("by_client", [0, 1, 0], 1, 0, clients=clients)
