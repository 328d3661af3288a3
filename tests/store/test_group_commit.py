"""Whole calls on the commit thread: durable before they are done, and nobody is woken for what is not there yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import PATIENCE_SECONDS
from support.stores import ON_DISK, place_store

from fleetdistill.errors import RefusedError
from fleetdistill_server.store.group_commit import CommitThread
from fleetdistill_server.store.store import Store

RUN = "run"


@pytest.fixture(params=ON_DISK)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(place_store(request, tmp_path))
    opened.runs.begin(RUN, {})
    yield opened
    opened.close()


@pytest.fixture
def commits(store: Store, tmp_path: Path) -> Iterator[CommitThread]:
    writer = Store.open(tmp_path)
    thread = CommitThread(writer)
    yield thread
    thread.close()
    writer.close()


def texts(store: Store) -> list[str]:
    return [event.text for event in store.history.events(RUN)]


def test_what_a_call_commits_is_there_when_it_is_done(store: Store, commits: CommitThread) -> None:
    def call() -> str:
        commits.commit(lambda one: one.history.add_event(RUN, "kind", "first"))
        commits.commit(lambda one: one.history.add_event(RUN, "kind", "second"))
        return "done"

    assert commits.call(call).result(PATIENCE_SECONDS)() == "done"
    assert texts(store) == ["first", "second"]


def test_a_call_that_is_refused_keeps_the_note_about_it(store: Store, commits: CommitThread) -> None:
    def call() -> None:
        commits.commit(lambda one: one.history.add_event(RUN, "kind", "note"))
        raise RefusedError("closed", "no")

    outcome = commits.call(call).result(PATIENCE_SECONDS)
    assert texts(store) == ["note"]
    with pytest.raises(RefusedError, match="no"):
        outcome()


def test_a_job_that_fails_within_a_call_takes_back_only_itself(store: Store, commits: CommitThread) -> None:
    def fail(one: Store) -> None:
        one.history.add_event(RUN, "kind", "never")
        raise ZeroDivisionError

    def call() -> None:
        commits.commit(lambda one: one.history.add_event(RUN, "kind", "before"))
        with pytest.raises(ZeroDivisionError):
            commits.commit(fail)
        commits.commit(lambda one: one.history.add_event(RUN, "kind", "after"))

    commits.call(call).result(PATIENCE_SECONDS)()
    assert texts(store) == ["before", "after"]


def test_what_follows_a_commit_finds_it(store: Store, commits: CommitThread) -> None:
    result: list[list[str]] = []
    woken = threading.Event()

    def wake() -> None:
        result.append(texts(store))
        woken.set()

    def call() -> None:
        commits.commit(lambda one: one.history.add_event(RUN, "kind", "work"))
        commits.after_commit(wake)

    commits.call(call).result(PATIENCE_SECONDS)()
    assert woken.wait(PATIENCE_SECONDS)
    assert result == [["work"]]


def test_outside_a_call_it_follows_at_once(commits: CommitThread) -> None:
    done: list[int] = []
    commits.after_commit(lambda: done.append(1))
    assert done == [1]


def test_the_thread_outlives_a_caller_that_went_away(store: Store, commits: CommitThread) -> None:
    go_on = threading.Event()
    busy = commits.call(lambda: go_on.wait(PATIENCE_SECONDS))
    given_up = commits.call(lambda: commits.commit(lambda one: one.history.add_event(RUN, "kind", "all the same")))
    assert not given_up.cancel()
    go_on.set()
    busy.result(PATIENCE_SECONDS)
    given_up.result(PATIENCE_SECONDS)
    assert texts(store) == ["all the same"]
