"""What only a store in PostgreSQL must do: outlive a restart of the server, and let one process write at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.later_version import LATER, later_version
from support.postgres import Postgres
from support.processes import PATIENCE_SECONDS, wait_until

from fleetdistill.errors import ConfigurationError, StoreError, StoreUnavailableError
from fleetdistill_server.config.server_config import load_server_config
from fleetdistill_server.front.guard import open_revocations
from fleetdistill_server.store.backup import backup
from fleetdistill_server.store.location import Location, read_location, set_location
from fleetdistill_server.store.store import Store, open_for_reading, open_for_trial

psycopg = pytest.importorskip("psycopg")
postgres_database = pytest.importorskip("fleetdistill_server.store.postgres_database")
number_parameters = postgres_database.number_parameters
pytestmark = pytest.mark.postgres
RUN = "digits"


@pytest.fixture(scope="module")
def own_server() -> Iterator[Postgres]:
    """A server that may be restarted."""
    if reason := Postgres.missing():
        pytest.skip(reason)
    with Postgres.start() as server:
        yield server


def placed(directory: Path, url: str) -> Path:
    set_location(directory, Location(database=url))
    return directory


@pytest.fixture
def directory(database_url: str, tmp_path: Path) -> Path:
    return placed(tmp_path / "store", database_url)


def texts(store: Store) -> list[str]:
    return [event.text for event in store.history.events(RUN)]


def test_placeholders_are_numbered_in_order_or_keep_own_numbers() -> None:
    assert number_parameters("a = ? AND b = ?") == "a = $1 AND b = $2"
    assert number_parameters("a = ?2 AND b = ?1 AND c = ?2") == "a = $2 AND b = $1 AND c = $2"


@pytest.mark.long
def test_a_store_outlives_a_crash_of_the_server(own_server: Postgres, tmp_path: Path) -> None:
    with own_server.schema() as url:
        store = Store.open(placed(tmp_path / "store", url))
        store.runs.begin(RUN, {})
        own_server.restart("immediate")
        assert store.runs.names() == [RUN]
        own_server.restart("fast")
        store.history.add_event(RUN, "note", "after the restart")
        assert texts(store) == ["after the restart"]
        store.close()


def test_transaction_losing_the_server_leaves_nothing_behind(own_server: Postgres, tmp_path: Path) -> None:
    with own_server.schema() as url:
        store = Store.open(placed(tmp_path / "store", url))
        store.runs.begin(RUN, {})

        def write() -> None:
            with store.transaction():
                store.history.add_event(RUN, "note", "before")
                own_server.restart()
                with pytest.raises(StoreUnavailableError, match="the database is not available"):
                    store.history.add_event(RUN, "note", "not in another transaction")

        with pytest.raises(StoreError):
            write()
        assert texts(store) == []
        store.history.add_event(RUN, "note", "later")
        assert texts(store) == ["later"]
        store.close()


def test_calls_fail_soon_without_server_and_log_tells_its_return(
    own_server: Postgres, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server.schema() as url:
        store = Store.open(placed(tmp_path / "store", url))
        store.runs.begin(RUN, {})
        store.database.patience_seconds = 0.0
        own_server.stop()
        try:
            for _ in range(3):
                with pytest.raises(StoreUnavailableError, match="the database is not available"):
                    store.runs.names()
        finally:
            own_server.start_again()
        wait_until(lambda: _names(store) == [RUN], "the store to be connected again")
        store.close()
    lines = [record.getMessage() for record in caplog.records if record.name == "fleetdistill.server.store"]
    assert [line.partition(";")[0].partition(" after")[0] for line in lines] == [
        "the database is not available",
        "the database is available again",
    ]


def _names(store: Store) -> list[str]:
    with contextlib.suppress(StoreUnavailableError):
        return store.runs.names()
    return []


def test_a_server_that_may_lose_commits_is_refused(own_server: Postgres, tmp_path: Path) -> None:
    with own_server.schema() as url:
        try:
            own_server.run("ALTER SYSTEM SET fsync = off")
            own_server.restart("fast")
            with pytest.raises(StoreError, match="fsync = off"):
                Store.open(placed(tmp_path / "store", url))
        finally:
            own_server.run("ALTER SYSTEM RESET fsync")
            own_server.restart("fast")


def test_commits_are_durable_even_where_the_role_turned_that_off(directory: Path, postgres: Postgres) -> None:
    postgres.run("ALTER ROLE postgres SET synchronous_commit = off")
    try:
        store = Store.open(directory)
        assert store.database.value("SHOW synchronous_commit") == "on"
        store.close()
    finally:
        postgres.run("ALTER ROLE postgres RESET synchronous_commit")


def test_failed_statement_in_transaction_is_never_a_commit(directory: Path) -> None:
    store = Store.open(directory)
    store.runs.begin(RUN, {})

    def write() -> None:
        with store.transaction():
            store.history.add_event(RUN, "note", "lost")
            with pytest.raises(StoreError):
                store.database.write("UPDATE nothing SET no = 1")

    with pytest.raises(StoreError, match="a statement in it failed"):
        write()
    assert texts(store) == []
    store.close()


def test_one_process_writes_at_a_time(directory: Path) -> None:
    first, second = Store.open(directory), Store.open(directory)
    first.runs.begin(RUN, {})
    began, done = threading.Event(), threading.Event()

    def write() -> None:
        began.set()
        with second.transaction():
            assert texts(second) == ["first"]
            second.history.add_event(RUN, "note", "second")
        done.set()

    thread = threading.Thread(target=write)
    with first.transaction():
        thread.start()
        assert began.wait(PATIENCE_SECONDS)
        assert not done.wait(0.05)
        first.history.add_event(RUN, "note", "first")
    thread.join(PATIENCE_SECONDS)
    assert texts(first) == ["first", "second"]
    for store in (first, second):
        store.close()


def test_deletion_lock_is_free_before_server_notices_the_close(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unnoticed: list[Any] = []
    database = postgres_database.PostgresDatabase(database_url)
    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "close", lambda connection: unnoticed.append(connection))
        for _ in range(2):
            with database.exclusive() as free:
                assert free
    assert len(unnoticed) == 2
    for connection in [*unnoticed, database]:
        connection.close()


def test_texts_with_a_nul_are_stored(directory: Path) -> None:
    store = Store.open(directory)
    store.runs.begin(RUN, {})
    store.history.add_event(RUN, "note", "a\0b")
    assert texts(store) == ["a\N{REPLACEMENT CHARACTER}b"]
    store.close()


def test_a_later_migration_runs_once_and_is_refused_before(directory: Path) -> None:
    Store.open(directory).close()
    with later_version():
        for _ in range(2):
            store = Store.open(directory)
            store.database.rows("SELECT later FROM runs")
            assert store.database.rows("SELECT * FROM later_sums") == []
            store.close()
    with pytest.raises(StoreError, match=rf"later version of fleetdistill \(its schema includes {LATER}\)"):
        Store.open(directory)


def test_a_database_that_does_not_exist_is_an_error_at_once(postgres: Postgres, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        Store.open(placed(tmp_path / "store", postgres.url.replace("/postgres?", "/nowhere?")))


def test_a_directory_keeps_its_kind_of_store(directory: Path, tmp_path: Path) -> None:
    Store.open(tmp_path / "files").close()
    with pytest.raises(ConfigurationError, match="was created with ''; set the old value, or another"):
        set_location(tmp_path / "files", Location(database="postgresql://somewhere/else"))
    with pytest.raises(ConfigurationError, match="database is '', but the store"):
        set_location(directory, Location())
    set_location(directory, Location(database="postgresql://another-name/same"))  # the server may have moved


def test_two_stores_of_one_database_do_not_meet(postgres: Postgres, tmp_path: Path) -> None:
    with postgres.schema() as one, postgres.schema() as other:
        stores = [Store.open(placed(tmp_path / str(number), url)) for number, url in enumerate((one, other))]
        stores[0].runs.begin(RUN, {})
        with stores[0].transaction(), stores[1].transaction():  # neither waits for the other
            assert stores[1].runs.names() == []
        for store in stores:
            store.close()


def test_a_backup_names_the_tools_to_use(directory: Path, tmp_path: Path) -> None:
    Store.open(directory).close()
    with pytest.raises(ConfigurationError, match="back it up with pg_dump"):
        backup(directory, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://me:secret@host/db", "[server]: database must not contain a password; set PGPASSWORD or use"),
        ("postgresql://host/db?password=secret", "[server]: database must not contain a password; set PGPASSWORD"),
        ("postgresql://host/db?sslpassword=secret", "[server]: database must not contain a password; set PGPASSWORD"),
        ("mysql://me:secret@host/db", "[server]: database must be a URL such as postgresql://"),
    ],
)
def test_wrong_database_setting_is_refused_without_its_password(url: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[server]\ndatabase = "{url}"\n')
    with pytest.raises(ConfigurationError) as error:
        load_server_config(path)
    assert expected in str(error.value)
    assert "secret" not in str(error.value)


def test_processes_wake_and_see_each_other(directory: Path) -> None:
    store, woken = Store.open(directory), threading.Event()
    assert not store.database.is_listening("engine")
    engine = store.database.notices("engine", "front", woken.set)
    front = store.database.notices("front", "engine", lambda: None)
    assert engine is not None
    assert front is not None
    try:
        assert woken.wait(PATIENCE_SECONDS), "at the start it may have missed something"
        assert store.database.is_listening("engine")
        woken.clear()
        front.send()
        assert woken.wait(PATIENCE_SECONDS)
    finally:
        engine.close()
        front.close()
    wait_until(lambda: not store.database.is_listening("engine"), "the engine to be gone")
    store.close()


def test_a_revocation_reaches_every_front(directory: Path) -> None:
    operator, front = Store.open(directory), Store.open(directory)
    with open_revocations(front) as revocations:
        assert not revocations.is_revoked("device:d1", "serial:aa")
        operator.credentials.revoke("device:d1", "stolen")
        wait_until(lambda: revocations.is_revoked("device:d1", "serial:aa"), "the front to know")
        assert not revocations.is_revoked("device:d2", "serial:aa")
    for store in (operator, front):
        store.close()


def test_a_trial_leaves_no_tables_in_an_empty_database(directory: Path) -> None:
    location = read_location(directory)
    with open_for_trial(directory, location) as store:
        assert store.runs.names() == []
    database, _ = open_for_reading(directory, location)
    with contextlib.closing(database):
        assert database.applied_migrations() == []
