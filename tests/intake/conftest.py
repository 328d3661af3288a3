"""A fleet of devices before a device API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from intake.device_api_fleet import Fleet

from fleetdistill_server.store.store import Store


@pytest.fixture
def store() -> Iterator[Store]:
    opened = Store.in_memory()
    yield opened
    opened.close()


@pytest.fixture
def fleet(store: Store) -> Fleet:
    return Fleet(store)


@pytest.fixture(params=["files", "memory"])
def any_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """For what the two kinds of staging areas might do differently."""
    opened = Store.open(tmp_path) if request.param == "files" else Store.in_memory()
    yield Fleet(opened)
    opened.close()
