"""What holds for every test."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.forked_popen import REAL_POPEN, popen
from support.object_store import ObjectStore
from support.postgres import Postgres
from support.processes import REGISTRY

from fleetdistill_server.store.location import Location
from fleetdistill_server.store.sqlite_database import SqliteDatabase

if TYPE_CHECKING:
    from support.undisturbed import Undisturbed

# Nothing in the suite may depend on how busy the machine is: an example that takes long is no failure.
settings.register_profile("any-load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")


IN_MEMORY, ENOUGH_BYTES = Path("/dev/shm"), 2 << 30
"""Thousands of fsyncs cost minutes on a disk; what is durable is tested by `recorded_disk`, on no disk at all."""


def pytest_configure() -> None:
    """Before any test: SIGINT is caught, and temporary folders lie in memory where there is enough.

    A shell starts background jobs with SIGINT ignored, and what the tests start would inherit that.
    """
    gc.disable()  # until all tests are collected: that makes millions of objects that stay
    if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > ENOUGH_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def forked_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes of the product are forked from one that has imported torch, but for tests of a cold start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(REGISTRY, str(tmp_path_factory.mktemp("forked") / "processes"))
        patch.setattr(subprocess, "Popen", popen)
        yield


@pytest.fixture(scope="session", autouse=True)
def copied_tables() -> Iterator[None]:
    """A store in memory begins as a copy of an empty one: to make its tables takes longer than what most tests do.

    Tests of migrations and of stores on a disk have the real thing.
    """
    make, empty = SqliteDatabase.in_memory, b""

    def in_memory() -> SqliteDatabase:
        nonlocal empty
        database = make()
        if not empty:
            database.migrate()
            empty = database.tables.conn.serialize()
        else:
            database.tables.conn.deserialize(empty)
        return database

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteDatabase, "in_memory", in_memory)
        yield


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """`serve` in this process leaves its handlers, which would answer a later test's Ctrl-C."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def cold_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cold_start") is not None:
        monkeypatch.setattr(subprocess, "Popen", REAL_POPEN)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command run within a test sets up the log of the process, on a stream that is closed after the test."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - set(handlers):
        if type(handler) is logging.StreamHandler:  # not pytest's own
            root.removeHandler(handler)
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def cheap_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but not drawn, which takes longer than most fleets; tests marked `pictures` draw them."""
    drawing = "fleetdistill_lab.simulation.report.plots" in sys.modules
    if drawing and importlib.util.find_spec("matplotlib") and request.node.get_closest_marker("pictures") is None:
        figure = importlib.import_module("matplotlib.figure")
        monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **given: Path(file).write_bytes(b""))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Runs that nothing disturbs; each is played once, also where several processes run the tests."""
    from support.undisturbed import Undisturbed  # and so torch, which many a test does without

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    folder.mkdir(exist_ok=True)
    return Undisturbed(folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for all tests of the session."""
    reason = Postgres.missing()
    if reason:
        pytest.skip(reason)
    with Postgres.start() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A PostgreSQL server that the test may stop."""
    if reason := Postgres.missing():
        pytest.skip(reason)
    with Postgres.start() as server:
        yield server


@pytest.fixture
def database_url(postgres: Postgres) -> Iterator[str]:
    """The URL of an empty database for one test: a schema of the session's server."""
    with postgres.schema() as url:
        yield url


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """An object store for all tests of the session."""
    reason = ObjectStore.missing()
    if reason:
        pytest.skip(reason)
    with ObjectStore.start() as server:
        yield server


@pytest.fixture
def blobs_url(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix for one test; the environment says where it is."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    return object_store.prefix()


@pytest.fixture(params=["here", pytest.param("apart", marks=[pytest.mark.postgres, pytest.mark.s3, pytest.mark.long])])
def location(request: pytest.FixtureRequest) -> Location:
    """Where a test's rows and payloads are: in its directory, or in PostgreSQL and an object store."""
    if request.param == "here":
        return Location()
    return Location(request.getfixturevalue("database_url"), request.getfixturevalue("blobs_url"))
