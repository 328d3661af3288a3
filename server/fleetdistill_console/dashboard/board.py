"""What all pages share: the feed, and what the dashboard was started with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fleetdistill_console.dashboard.feed import Feed
from fleetdistill_console.dashboard.readers import ABOUT, HEALTH, settings
from fleetdistill_server.views.runs import TableRow

_SILENT_SECONDS = 12.0
"""Age of the newest figures from which a server does not answer, although a call to it has not failed yet."""


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
        if not snapshot.version or snapshot.error:
            return snapshot.error or None
        silent = time.time() - snapshot.read_at
        text = "; ".join(snapshot.value or ())
        return text or (f"the server has not answered for {silent:.0f} s" if silent > _SILENT_SECONDS else "")

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
