"""What all pages share: the feed, and what the dashboard was started with.

The feed reads a source of runs once for all browsers: one thread, and only what a page currently shows.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from fleetdistill.errors import FleetDistillError, in_words
from fleetdistill.printable import printable
from fleetdistill_console.dashboard.readers import ABOUT, HEALTH, Subject, settings
from fleetdistill_server.operations.source import UNREADABLE, Source
from fleetdistill_server.views.runs import TableRow

T = TypeVar("T")
EVERY_SECONDS = 1.0
"""Seconds between two reads of the same subject."""
_SHARE = 0.25
"""Largest share of the thread's time for one subject: one that takes long to read is read less often."""
_MAX_PAUSE_SECONDS = 5.0
"""Longest pause because of that: a read may have taken long because the server stood still, and what it says is old."""
_FORGET_SECONDS = 15.0
"""Seconds after which a subject that no page asks for is no longer read."""
_SILENT_SECONDS = 12.0
"""Age of the newest figures from which a server does not answer, although a call to it has not failed yet."""


@dataclass(frozen=True)
class Snapshot(Generic[T]):
    """The newest state of a subject.

    Attributes:
        value: What was read last; None before the first successful read.
        version: Increases whenever `value` or `error` changes; 0 before the first read.
        error: Why the newest read failed; empty if it did not.
        read_at: Unix time in seconds of the newest successful read; 0 before.
        since: Unix time in seconds since which the subject is read.
    """

    value: T | None = None
    version: int = 0
    error: str = ""
    read_at: float = 0.0
    since: float = 0.0


@dataclass
class _Watched:
    read: Callable[[Source], Any]
    every_seconds: float
    snapshot: Snapshot[Any]
    asked_at: float = 0.0
    due_at: float = 0.0


class Feed:
    """The subjects that pages currently show, with their newest snapshots.

    Args:
        source: Where runs are read from; used by one thread.
        every_seconds: Seconds between two reads of the same subject.

    Attributes:
        source: As given.
    """

    def __init__(self, source: Source, every_seconds: float = EVERY_SECONDS) -> None:
        self.source = source
        self._every = every_seconds
        self._watched: dict[Hashable, _Watched] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="dashboard feed", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and waits for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def look(self, subject: Subject[T]) -> Snapshot[T]:
        """Returns the newest snapshot of a subject, and has it read for as long as this is called regularly."""
        with self._changed:
            watched = self._watched.get(subject.name)
            if watched is None:
                every_seconds = subject.every_seconds or self._every
                watched = _Watched(subject.reader(), every_seconds, Snapshot(since=time.time()))
                self._watched[subject.name] = watched
                self._changed.notify()
            watched.asked_at = time.monotonic()
            return cast(Snapshot[T], watched.snapshot)

    def refresh(self) -> None:
        """Has everything read at once, such as after an action."""
        with self._changed:
            for item in self._watched.values():
                item.due_at = 0.0
            self._changed.notify()

    def _work(self) -> None:
        while (watched := self._next()) is not None:
            began = time.monotonic()
            snapshot = _read(watched, self.source)
            took = time.monotonic() - began
            with self._changed:
                watched.snapshot = snapshot
                if watched.due_at == math.inf:  # else `refresh` wants it at once
                    pause = min(took / _SHARE - took, _MAX_PAUSE_SECONDS)
                    watched.due_at = began + max(watched.every_seconds, took + pause)

    def _next(self) -> _Watched | None:
        """Waits for the subject that is due next; returns None once the feed is stopped."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                self._watched = {
                    name: one for name, one in self._watched.items() if now - one.asked_at < _FORGET_SECONDS
                }
                first = min(self._watched.values(), key=lambda one: one.due_at, default=None)
                if first is not None and first.due_at <= now:
                    first.due_at = math.inf  # until it has been read
                    return first
                self._changed.wait(None if first is None else first.due_at - now)
        return None


def _read(watched: _Watched, source: Source) -> Snapshot[Any]:
    known = watched.snapshot
    try:
        value, error, at = watched.read(source), "", time.time()
    except FleetDistillError as failed:
        value, error, at = known.value, str(failed), known.read_at
    except UNREADABLE as failed:
        if not source.is_remote:
            raise
        text = f"the reply of {source.name} cannot be shown: {printable(in_words(failed))}"
        value, error, at = known.value, f"{text}; use the version of the server", known.read_at
    if known.version and value == known.value and error == known.error:
        return replace(known, read_at=at)
    return Snapshot(value, known.version + 1, error, at, known.since)


@dataclass(frozen=True)
class Board:
    """What all pages share.

    Attributes:
        feed: Reads the source.
        title: Title of every page.
        place: The store's directory or the server's address, as shown to people.
        server: host:port of the server that is read, empty for a store.
    """

    feed: Feed
    title: str
    place: str
    server: str = ""

    def problem(self) -> str | None:
        """Returns what is wrong with the server, empty if nothing is; None if nothing has been read yet."""
        snapshot = self.feed.look(HEALTH)
        silent = time.time() - (snapshot.read_at or snapshot.since)
        text = snapshot.error or "; ".join(snapshot.value or ())
        if text or silent > _SILENT_SECONDS:
            return text or f"the server has not answered for {silent:.0f} s"
        return "" if snapshot.version else None

    def method_figures(self, run: str) -> Mapping[str, TableRow]:
        """Returns the figures that a run's method declares, by name; empty until they have been read."""
        view = self.feed.look(settings(run)).value
        return {} if view is None else view.facts["figures"]

    def problem_for_monitors(self) -> str | None:
        """Returns what `problem` does, and also that no server works on the store, which a page may well show."""
        problem = self.problem()
        about = self.feed.look(ABOUT)
        if problem or about.value is None:
            return problem or about.error or None
        stopped = about.value.facts["served_run"] is None
        return "no server works on this store" if problem == "" and stopped else problem
