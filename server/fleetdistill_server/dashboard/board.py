"""What all pages share: the feed, and what the dashboard was started with."""

from __future__ import annotations

from dataclasses import dataclass

from fleetdistill_server.dashboard.feed import Feed


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
