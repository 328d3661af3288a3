"""Runs at a glance and pages of events, from a store whose clock is set by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import overview


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store.in_memory()
    made.runs.begin("r", {"run": {"name": "r", "method": "feddkc", "rounds": 10}})
    yield made
    made.close()


def play_rounds(store: Store) -> None:
    """Eight completed rounds that take 1 to 8 seconds, and after the fifth a short one of 100."""
    now = [1000.0]
    store.database.now = lambda: now[0]
    for seconds in (1, 2, 3, 4, 5, 100, 6, 7, 8):
        number = store.runs.start_round("r", ["a"])
        now[0] += seconds
        if seconds == 100:
            store.runs.close_short_round("r", number, "nobody answered")
        else:
            store.runs.close_round("r", number, b"", [], {})


def test_the_time_left_is_that_of_the_newest_completed_rounds(store: Store) -> None:
    """The last five completed rounds took 4 to 8 seconds, 6 on average; 2 of 10 rounds are left."""
    play_rounds(store)
    (glance,) = overview.overview(store).lists["runs"]
    assert (glance["completed_rounds"], glance["round_seconds"], glance["seconds_left"]) == (8, 6.0, 12.0)


def test_a_run_without_an_end_or_a_round_has_no_time_left(store: Store) -> None:
    store.runs.begin("endless", {"run": {"name": "endless", "method": "feddkc", "rounds": 0}})
    assert [row["seconds_left"] for row in overview.overview(store).lists["runs"]] == [None, None]


def test_the_accuracy_is_that_of_the_last_round_that_has_one(store: Store) -> None:
    for correct in (2, 4, None):
        number = store.runs.start_round("r", ["a"])
        if correct is not None:
            metric = Metric(name="accuracy", split="test", sum=correct, count=10)
            store.history.add_figures("r", number, "a", Metrics(metrics=[metric]))
        store.runs.close_round("r", number, b"", [], {})
    (glance,) = overview.overview(store).lists["runs"]
    assert glance["test_accuracy"] == 0.4


def test_a_page_of_events_says_whether_there_are_older_ones(store: Store) -> None:
    for number in range(3):
        store.history.add_event("r", "late", f"event {number}")
    pages = []
    before: int | None = None
    for most in (2, 1, 1):
        view = overview.events(store, "r", before=before, kind="", device="", text="", most=most)
        pages.append(([row["text"] for row in view.lists["events"]], view.facts["more"]))
        before = view.lists["events"][-1]["id"] if view.lists["events"] else before
    assert pages == [(["event 2", "event 1"], True), (["event 0"], False), ([], False)]
