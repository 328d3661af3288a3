"""A live front, its store and a checked-in client for the tests of the protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_front import Client, LiveFront, client_of, live_front, prepare_store
from support.sqlite import directory_of

from fleetdistill_server.service.wakeups import Ends, make_ends
from fleetdistill_server.store.store import Store

LIMIT = 8 << 20
"""Most bytes of one upload, by the contract."""
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The store under the front, with one running run."""
    opened = prepare_store(tmp_path_factory.mktemp("front") / "store", max_upload_bytes=LIMIT)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pipes() -> tuple[Ends, Ends]:
    """The front's ends of the wake-up pipes, and the engine's."""
    front, (engine,) = make_ends()
    return front, engine


@pytest.fixture(scope="module")
def directory(store: Store) -> Path:
    """Where the store lies."""
    return directory_of(store)


@pytest.fixture(scope="module")
def front(directory: Path, pipes: tuple[Ends, Ends]) -> Iterator[LiveFront]:
    """A front process, shared by the tests of a module."""
    with live_front(directory, ends=pipes[0]) as running:
        yield running


@pytest.fixture
def client(front: LiveFront) -> Iterator[Client]:
    """A device of the test's own, checked in."""
    with client_of(front, f"d{next(_numbers)}") as made:
        made.check_in()
        yield made
