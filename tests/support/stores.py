"""Fixtures' parameters for every kind of store."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from fleetdistill_server.store.location import Location, set_location

IN_POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)
IN_OBJECTS = pytest.param("objects", marks=[pytest.mark.postgres, pytest.mark.s3])
ON_DISK = ("files", IN_POSTGRES)
"""Kinds of stores that several processes can share, as parameters of a fixture."""


EVERY_RUN_APART = "FLEETDISTILL_TESTS_EVERY_RUN_APART"
"""Variable, set by `make stores`: every run is replayed and killed over PostgreSQL and an object store, too."""


def runs_apart(runs: Iterable[str], usual: str) -> pytest.MarkDecorator:
    """Parametrises a test over PostgreSQL and an object store: one run, or all of them in `make stores`."""
    names = sorted(runs) if os.environ.get(EVERY_RUN_APART) else [usual]
    marks = [pytest.mark.postgres, pytest.mark.s3]
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name in names])


def object_store_environment() -> dict[str, str]:
    """Returns the variables that lead to the object store, for processes that are forked."""
    return {name: text for name, text in os.environ.items() if name.startswith("AWS_")}


def place_store(request: pytest.FixtureRequest, directory: Path) -> Path:
    """Says in a directory where its store is, for a fixture with one of the kinds as its parameter."""
    if request.param == "postgres":
        set_location(directory, Location(database=request.getfixturevalue("database_url")))
    if request.param == "objects":
        url = request.getfixturevalue("database_url")
        set_location(directory, Location(database=url, blobs=request.getfixturevalue("blobs_url")))
    return directory
