"""A live front, its store and a checked-in client for the tests of the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_front import Client, LiveFront, client_of, live_front, prepare_store

from fleetdistill_server.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The store under the front, with one running run."""
    opened = prepare_store(tmp_path / "store", max_upload_bytes=8 << 20)
    yield opened
    opened.close()


@pytest.fixture
def front(tmp_path: Path, store: Store) -> Iterator[LiveFront]:
    """A front process."""
    with live_front(tmp_path / "store") as running:
        yield running


@pytest.fixture
def client(front: LiveFront) -> Iterator[Client]:
    """A device that has checked in."""
    with client_of(front) as made:
        made.check_in()
        yield made
