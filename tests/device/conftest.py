"""A fleet of devices of the SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device.sdk_fleet import Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.store.close()
