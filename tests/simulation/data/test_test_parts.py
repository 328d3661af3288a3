"""Test rows of the devices' own: shares worked by hand, and the laws that all ways of dealing them keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdistill.errors import DataError
from fleetdistill_lab.simulation.data.datasets import Dataset
from fleetdistill_lab.simulation.data.partition import classes_window, dirichlet_by_class, iid
from fleetdistill_lab.simulation.data.split import Ints, Partition
from fleetdistill_lab.simulation.data.test_parts import LOCAL_TESTS, deal_tests, hold_out_test


def data_of(train: Any, test: Any, classes: int = 4) -> Dataset:
    """Images are the numbers of their rows; those of the test set are negative."""
    train_labels, test_labels = torch.tensor(np.asarray(train)), torch.tensor(np.asarray(test))
    return Dataset(
        "numbers",
        torch.arange(len(train_labels)).float()[:, None],
        train_labels,
        -1 - torch.arange(len(test_labels)).float()[:, None],
        test_labels,
        tuple(map(str, range(classes))),
    )


def parts(dealt: Any) -> list[Ints]:
    """Numbers of the images that each device tests on."""
    stops = np.cumsum(dealt.own_tests)
    assert stops[-1] == len(dealt.data.test_labels)
    return np.split(dealt.data.test_images[:, 0].numpy().astype(np.int64), stops[:-1])


def class_counts(dealt: Any, labels: Ints, classes: int = 4) -> list[list[int]]:
    return [np.bincount(labels[np.abs(rows) - (rows < 0)], minlength=classes).tolist() for rows in parts(dealt)]


TRAIN = np.repeat(np.arange(4), [40, 30, 20, 10])
TEST = np.repeat(np.arange(4), [20, 15, 10, 5])


class TestByHand:
    def test_global_changes_nothing(self) -> None:
        data, split = data_of(TRAIN, TEST), iid(TRAIN, 5, 0)
        dealt = deal_tests("global", data, split, 0)
        assert (dealt.data, dealt.split, dealt.own_tests) == (data, split, ())

    def test_local_split_takes_a_fifth_of_each_class(self) -> None:
        rows = np.arange(100)
        train, test = hold_out_test(TRAIN, rows, 3)
        assert np.bincount(TRAIN[test]).tolist() == [8, 6, 4, 2]
        assert sorted([*train, *test]) == rows.tolist()

    def test_a_single_row_of_a_class_makes_the_split_random(self) -> None:
        """Then the number of rows of each class differs from seed to seed, and the single row may be a test row."""
        labels = np.array([0] * 10 + [1] * 9 + [2])
        counts = {
            tuple(np.bincount(labels[hold_out_test(labels, np.arange(20), seed)[1]], minlength=3)) for seed in range(40)
        }
        assert all(sum(item) == 4 for item in counts)
        assert len({item[0] for item in counts}) > 2
        assert {item[2] for item in counts} == {0, 1}

    @pytest.mark.parametrize(("rows", "tests"), [(1, 0), (2, 0), (3, 1), (7, 1), (8, 2), (10, 2)])
    def test_a_fifth_is_rounded_to_the_nearest_row(self, rows: int, tests: int) -> None:
        train, test = hold_out_test(np.zeros(rows, np.int64), np.arange(rows), 0)
        assert (len(train), len(test)) == (rows - tests, tests)

    def test_local_like_has_the_shares_of_the_training_rows(self) -> None:
        """Device 0 has 1/4, device 1 3/4 of class 0, and device 1 all of class 1; half as many test rows."""
        train, test = [0] * 8 + [1] * 4, [0] * 4 + [1] * 2
        split = Partition("any", (np.arange(2), np.arange(2, 12)), {})
        dealt = deal_tests("local_like", data_of(train, test, 2), split, 0)
        assert class_counts(dealt, np.array(test), 2) == [[1, 0], [3, 2]]

    def test_local_labels_gives_an_equal_share_of_each_held_class(self) -> None:
        """20, 15, 10 and 5 test rows over 3 devices are 6, 5, 3 and 1 of each class that a device holds."""
        split = classes_window(TRAIN, 3, 2, 0)
        dealt = deal_tests("local_labels", data_of(TRAIN, TEST), split, 0)
        assert class_counts(dealt, TEST) == [[6, 5, 0, 0], [0, 5, 3, 0], [0, 0, 3, 1]]

    def test_local_client_follows_the_training_rows(self) -> None:
        """Device 0 has client 3 and device 1 client 7; client 9 has no device, and a client may have no test rows."""
        clients = torch.tensor([7, 3, 7, 9, 3, 5])
        data = replace(data_of([0] * 6, [0] * 5, 2), train_clients=clients, test_clients=torch.tensor([7, 9, 3, 7, 7]))
        split = Partition("by_client", (np.array([1, 4]), np.array([0, 2]), np.array([5])), {})
        dealt = deal_tests("local_client", data, split, 0)
        assert [rows.tolist() for rows in parts(dealt)] == [[-3], [-1, -4, -5], []]
        assert dealt.data.test_clients is not None
        assert dealt.data.test_clients.tolist() == [3, 7, 7, 7]

    def test_local_split_keeps_the_clients_of_its_rows(self) -> None:
        data = replace(data_of(TRAIN, TEST), train_clients=torch.arange(100) // 50)
        split = Partition("by_client", (np.arange(50), np.arange(50, 100)), {})
        dealt = deal_tests("local_split", data, split, 0)
        assert dealt.data.test_clients is not None
        assert dealt.data.test_clients.tolist() == [0] * 10 + [1] * 10


class TestRefusals:
    def test_no_device_would_have_a_test_row(self) -> None:
        data, split = data_of([0, 1] * 20, [0, 1]), iid(np.array([0, 1] * 20), 10, 0)
        with pytest.raises(DataError, match="no device would have a test row of its own with test_part local_labels"):
            deal_tests("local_labels", data, split, 0)
        with pytest.raises(DataError, match="no device has the three rows that test_part local_split needs"):
            deal_tests("local_split", data, iid(np.array([0, 1] * 20), 20, 0), 0)

    @pytest.mark.parametrize("known", [{}, {"train_clients": torch.arange(100) // 50}])
    def test_a_data_set_without_clients(self, known: dict[str, Any]) -> None:
        data = replace(data_of(TRAIN, TEST), **known)
        with pytest.raises(DataError, match="needs a data set with train_clients and test_clients"):
            deal_tests("local_client", data, iid(TRAIN, 2, 0), 0)


class TestLaws:
    @given(
        kind=st.sampled_from(["local_split", *sorted(LOCAL_TESTS)]),
        alpha=st.sampled_from([0.1, 1.0]),
        devices=st.integers(1, 5),
        seed=st.integers(0, 2**32 - 1),
    )
    @settings(max_examples=60)
    def test_rows_are_disjoint_sorted_and_repeatable(self, kind: str, alpha: float, devices: int, seed: int) -> None:
        data = data_of(TRAIN, TEST)
        split = dirichlet_by_class(TRAIN, devices, alpha, seed, min_size=3)
        owners = np.zeros(100, np.int64)
        for number, rows in enumerate(split.indices):
            owners[rows] = number
        data = replace(data, train_clients=torch.tensor(owners), test_clients=torch.arange(50) % devices)
        dealt, again = (deal_tests(kind, data, split, seed) for _ in range(2))
        tested = np.concatenate(parts(dealt))
        assert len(np.unique(tested)) == len(tested) > 0
        assert torch.equal(dealt.data.test_images, again.data.test_images)
        assert dealt.own_tests == again.own_tests
        trained = np.concatenate(dealt.split.indices)
        labels = TRAIN if kind == "local_split" else TEST
        numbers = np.abs(tested) - (tested < 0)
        assert dealt.data.test_labels.tolist() == labels[numbers].tolist()
        if kind == "local_split":
            assert sorted([*trained, *tested]) == list(range(100))
            for own, rows, before in zip(parts(dealt), dealt.split.indices, split.indices, strict=True):
                assert sorted([*own, *rows]) == before.tolist()
        else:
            assert (tested < 0).all()
            assert all(np.array_equal(a, b) for a, b in zip(dealt.split.indices, split.indices, strict=True))

    @given(seed=st.integers(0, 2**32 - 1), devices=st.integers(1, 5), alpha=st.sampled_from([0.1, 1.0, 100.0]))
    @settings(max_examples=40)
    def test_local_like_shares_differ_by_less_than_a_row(self, seed: int, devices: int, alpha: float) -> None:
        split = dirichlet_by_class(TRAIN, devices, alpha, seed, min_size=1)
        dealt = deal_tests("local_like", data_of(TRAIN, TEST), split, seed)
        counts = np.array(class_counts(dealt, TEST))
        assert counts.sum(axis=0).tolist() == [20, 15, 10, 5]
        wanted = split.class_counts(TRAIN, 4) / TRAIN.shape[0] * 100 / [[40, 30, 20, 10]] * [[20, 15, 10, 5]]
        assert (np.abs(counts - wanted) < 1 + 1e-9).all()
