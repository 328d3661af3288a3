"""Fixtures' parameters for every kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetdistill_server.store.location import Location, set_location

IN_POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)
IN_OBJECTS = pytest.param("objects", marks=[pytest.mark.postgres, pytest.mark.s3])
ON_DISK = ("files", IN_POSTGRES)
"""Kinds of stores that several processes can share, as parameters of a fixture."""


def place_store(request: pytest.FixtureRequest, directory: Path) -> Path:
    """Says in a directory where its store is, for a fixture with one of the kinds as its parameter."""
    if request.param == "postgres":
        set_location(directory, Location(database=request.getfixturevalue("database_url")))
    if request.param == "objects":
        url = request.getfixturevalue("database_url")
        set_location(directory, Location(database=url, blobs=request.getfixturevalue("blobs_url")))
    return directory
