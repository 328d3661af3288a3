"""Devices for people: their part in a run, one device in detail, and the classes of their data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from fleetdistill.knowledge import ClassCount, Metric, Metrics
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import fleet

RUN = "r"


def open_round(store: Store) -> tuple[int, int]:
    """Asks device a in the next round; returns the numbers of the round and of the ask."""
    number = store.runs.start_round(RUN, ["a"])
    row: dict[str, Any] = {"run": RUN, "round": number, "step_number": 1, "device": "a", "step": "train", "seed": 1}
    store.asks.add([Ask(**row, expects={}, deadline_at=time.time() + 600)])
    (ask,) = store.asks.of_step(RUN, number, 1)
    return number, int(ask.id)


def report(store: Store, number: int, split: str, by_class: dict[int, tuple[float, int]]) -> None:
    """Stores an accuracy of device a, from right answers and samples by class."""
    counts = [ClassCount(label=label, sum=right, count=rows) for label, (right, rows) in by_class.items()]
    right, rows = sum(count.sum for count in counts), sum(count.count for count in counts)
    metric = Metric(name="accuracy", split=split, sum=right, count=rows, by_class=counts)
    store.history.add_figures(RUN, number, "a", Metrics(metrics=[metric]))


@pytest.fixture
def store() -> Iterator[Store]:
    """Device a has answered round 1, missed round 2, and is asked in round 3, which is open."""
    made = Store.in_memory()
    made.runs.begin(RUN, {"run": {"name": RUN, "method": "feddkc", "rounds": 9}})
    made.devices.register(RUN, "a", b"", contract_pb2.DeviceProfile().SerializeToString())
    first, ask = open_round(made)
    made.asks.accept_upload(ask, 1, bytes(32), 0, 1)
    report(made, first, "train", {0: (3, 5), 1: (1, 2)})
    report(made, first, "test", {0: (1, 1)})
    made.runs.close_round(RUN, first, b"", [ask], {})
    second, missed = open_round(made)
    report(made, second, "test", {0: (0, 1)})  # of an answer that was lost, say
    made.asks.close(missed, "refused: bad-value")
    made.runs.close_short_round(RUN, second, "nobody answered")
    open_round(made)
    yield made
    made.close()


def test_an_open_ask_is_neither_answered_nor_out(store: Store) -> None:
    (row,) = fleet.participants(store, RUN).lists["devices"]
    names = ("rounds", "asks", "answers", "out", "last_answer")
    assert {name: row[name] for name in names} == {"rounds": 3, "asks": 3, "answers": 1, "out": 1, "last_answer": 1}


def test_a_device_has_figures_of_rounds_that_it_answered(store: Store) -> None:
    figures = fleet.device(store, RUN, "a").lists["figures"]
    assert [(row["round"], row["split"], row["mean"]) for row in figures] == [(1, "test", 1.0), (1, "train", 0.5714)]


def test_classes_are_of_the_training_data_where_it_is_known(store: Store) -> None:
    assert fleet.classes(store, RUN).lists["devices"] == [{"device": "a", "split": "train", "counts": {"0": 5, "1": 2}}]
    third = store.runs.open_number(RUN)
    assert third is not None
    (ask,) = store.asks.of_step(RUN, third, 1)
    store.asks.accept_upload(ask.id, 1, bytes(32), 0, 1)
    report(store, third, "test", {1: (1, 4)})
    assert fleet.classes(store, RUN).lists["devices"] == [{"device": "a", "split": "test", "counts": {"1": 4}}]


def test_only_an_accuracy_tells_the_samples_of_a_class(store: Store) -> None:
    loss = Metric(name="loss", split="train", sum=1, count=9, by_class=[ClassCount(label=7, sum=1, count=9)])
    store.history.add_figures(RUN, 1, "a", Metrics(metrics=[loss]))
    assert fleet.classes(store, RUN).lists["devices"] == [{"device": "a", "split": "train", "counts": {"0": 5, "1": 2}}]


def test_events_of_a_device_are_counted_and_listed_in_order(store: Store) -> None:
    for count, kind in enumerate(("late", "declined", "refused"), start=1):
        for number in range(count):
            store.history.add_event(RUN, kind, f"{kind} {number}", device="a")
    store.history.add_event(RUN, "late", "of another device", device="b")
    view = fleet.device(store, RUN, "a")
    assert {name: view.facts[name] for name in ("late", "declined", "refusals")} == {
        "late": 1,
        "declined": 2,
        "refusals": 3,
    }
    texts = ["late 0", "declined 0", "declined 1", "refused 0", "refused 1", "refused 2"]
    assert [row["text"] for row in view.lists["events"]] == texts
