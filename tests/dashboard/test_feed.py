"""The feed reads a source once for all pages, keeps figures while it fails, and reads growing rows in parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import wait_until

from fleetdistill.errors import LinkError
from fleetdistill_console.dashboard import board
from fleetdistill_console.dashboard.board import Board, Feed
from fleetdistill_console.dashboard.readers import Subject, rounds
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.store import Store

RUN = "r"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store")
    opened.runs.begin(RUN, {"run": {"name": RUN, "method": "fedavg", "rounds": 9}})
    yield opened
    opened.close()


@pytest.fixture
def source(store: Store, tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def feed(source: LocalStore) -> Iterator[Feed]:
    feed = Feed(source, every_seconds=0.01)
    feed.start()
    yield feed
    feed.stop()


def test_many_pages_share_one_reader(feed: Feed) -> None:
    made: list[str] = []

    def reader() -> Any:
        made.append("reader")
        return lambda source: "value"

    subject: Subject[str] = Subject("shared", reader)
    wait_until(lambda: all(feed.look(subject).value == "value" for _ in range(100)), "the value")
    assert made == ["reader"]


def test_a_read_that_waited_for_a_server_is_soon_repeated(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of 12 s is followed by the next one after 5 s, and not after 36 s."""
    waited = 0.0
    monkeypatch.setattr(board, "time", SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + waited))
    reads: list[float] = []

    def read(source: object) -> int:
        nonlocal waited
        waited += 0.0 if reads else 12.0
        reads.append(waited)
        return len(reads)

    subject: Subject[int] = Subject("health", lambda: read)
    wait_until(lambda: feed.look(subject).value == 1, "the first read")
    waited += 6.0
    feed.look(Subject("another", lambda: lambda source: 0))  # wakes the feed
    wait_until(lambda: (feed.look(subject).value or 0) > 1, "the second read", 20.0)


def test_last_figures_and_reason_stay_while_source_fails(feed: Feed) -> None:
    fails = threading.Event()

    def read(source: object) -> str:
        if fails.is_set():
            raise LinkError("the server cannot be reached")
        return "figures"

    subject: Subject[str] = Subject("flaky", lambda: read)
    wait_until(lambda: feed.look(subject).value, "the first figures")
    fails.set()
    wait_until(lambda: feed.look(subject).error, "the error")
    failed = feed.look(subject)
    assert (failed.value, failed.error) == ("figures", "the server cannot be reached")
    assert failed.read_at > 0
    fails.clear()
    wait_until(lambda: not feed.look(subject).error, "the figures to be current again")


class Remote(LocalStore):
    """Read as a server from elsewhere."""

    is_remote = True


def test_reply_that_cannot_be_shown_is_error_and_reading_goes_on(store: Store, tmp_path: Path) -> None:
    feed = Feed(Remote(tmp_path / "store"), every_seconds=0.01)
    feed.start()
    empty: dict[str, str] = {}
    replies = iter([empty, {"problems": "none"}])
    subject: Subject[str] = Subject("health", lambda: lambda source: next(replies, {"problems": "none"})["problems"])
    try:
        wait_until(lambda: feed.look(subject).value == "none", "the second reply")
        subject = Subject("other", lambda: lambda source: empty["problems"])
        error = wait_until(lambda: feed.look(subject).error, "the error")
    finally:
        feed.stop()
    assert error.startswith(f"the reply of {tmp_path / 'store'} cannot be shown: 'problems'")


def test_server_that_never_answered_is_silent_after_a_while(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    later, answers = 0.0, threading.Event()
    monkeypatch.setattr(board, "time", SimpleNamespace(time=lambda: time.time() + later, monotonic=time.monotonic))
    monkeypatch.setattr(board, "HEALTH", Subject("health", lambda: lambda source: answers.wait() and []))
    shown = Board(feed, "title", "place")
    assert shown.problem() is None
    later = 13.0
    assert shown.problem() == "the server has not answered for 13 s"
    answers.set()
    wait_until(lambda: shown.problem() == "", "the answer")


def test_figures_that_cannot_be_read_again_keep_their_age(feed: Feed) -> None:
    fails, failures = threading.Event(), list[object]()

    def read(source: object) -> str:
        if fails.is_set():
            failures.append(source)
            raise LinkError("the server cannot be reached")
        return "figures"

    subject: Subject[str] = Subject("away", lambda: read)
    wait_until(lambda: feed.look(subject).value, "the first figures")
    fails.set()
    wait_until(lambda: feed.look(subject).error, "the error")
    age, known = feed.look(subject).read_at, len(failures)
    wait_until(lambda: feed.look(subject) and len(failures) > known + 2, "more failures")
    assert feed.look(subject).read_at == age


def test_equal_figures_keep_their_version(feed: Feed) -> None:
    reads: list[object] = []

    def read(source: object) -> str:
        reads.append(source)
        return "same"

    subject: Subject[str] = Subject("same", lambda: read)
    wait_until(lambda: feed.look(subject).version and len(reads) > 5, "several reads")
    assert feed.look(subject).version == 1


def close_rounds(store: Store, count: int) -> None:
    for _ in range(count):
        number = store.runs.start_round(RUN, ["d0"])
        store.runs.close_round(RUN, number, b"state" * 6, [], {})


def test_rounds_are_read_in_parts_and_anew_after_a_rollback(store: Store, source: LocalStore) -> None:
    read = rounds(RUN).reader()
    close_rounds(store, 6)
    assert [row["round"] for row in read(source)] == [1, 2, 3, 4, 5, 6]
    close_rounds(store, 2)
    assert list(read(source)) == source.rounds(RUN).lists["rounds"]
    store.runs.delete(RUN)
    store.runs.begin(RUN, {"run": {"name": RUN, "method": "fedavg", "rounds": 9}})
    close_rounds(store, 3)
    assert list(read(source)) == source.rounds(RUN).lists["rounds"]
    assert len(read(source)) == 3


def test_monitors_are_told_when_no_server_works_on_a_store(feed: Feed, tmp_path: Path) -> None:
    board = Board(feed, "title", "place")
    told = wait_until(lambda: board.problem_for_monitors(), "what monitors are told")
    assert (told, board.problem()) == ("no server works on this store", "")
    with serve_lock.take(tmp_path / "store", RUN):
        feed.refresh()
        wait_until(lambda: board.problem_for_monitors() == "", "the server to be seen")
