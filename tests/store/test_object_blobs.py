"""Payloads in an object store, seen from two hosts: each has its own directory, and all share database and bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.object_store import ObjectStore
from support.wire_samples import data_of, make_payload

from fleetdistill.errors import ConfigurationError, DamagedError, StoreError
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.config.server_config import load_server_config
from fleetdistill_server.service.registration import register
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.retention import sweep
from fleetdistill_server.store.store import Store

pytestmark = [pytest.mark.postgres, pytest.mark.s3]
LONG_AGO = 7200


@pytest.fixture
def hosts(database_url: str, blobs_url: str, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    directories = [tmp_path / "host-1", tmp_path / "host-2"]
    for directory in directories:
        set_location(directory, Location(database_url, blobs_url))
    stores = [Store.open(directory) for directory in directories]
    yield stores[0], stores[1]
    for store in stores:
        store.close()


def copies(store: Path) -> list[Path]:
    return list((store / "blobs").glob("??/*.safetensors"))


def test_what_one_host_stores_another_reads(hosts: tuple[Store, Store], tmp_path: Path) -> None:
    payload = make_payload()
    hosts[0].blobs.put(payload)
    state = hosts[0].blobs.put_state(b"state")
    assert data_of(hosts[1].blobs.open(payload.sha256, verify=True)) == data_of(payload)
    assert hosts[1].blobs.get_state(state) == b"state"
    assert copies(tmp_path / "host-1") == []  # only what is read is copied


def test_missing_bucket_is_found_before_run_is_registered(
    object_store: ObjectStore, blobs_url: str, tmp_path: Path
) -> None:
    set_location(tmp_path, Location(blobs="s3://no-bucket/store"))
    config = RunConfig.model_validate({"run": {"name": "r"}, "contract": {"classes": 2, "input_shape": [1, 8, 8]}})
    with closing(Store.open(tmp_path)) as store:
        with pytest.raises(ConfigurationError, match=r"\[server\] blobs: there is no bucket 'no-bucket'"):
            register(store, config)
        assert store.runs.all() == []
        object_store.make_bucket("no-bucket")
        register(store, config)


def test_upload_refused_by_object_store_is_committed_again(
    object_store: ObjectStore, blobs_url: str, tmp_path: Path
) -> None:
    set_location(tmp_path, Location(blobs="s3://late-bucket/store"))
    store, payload = Store.open(tmp_path), make_payload()
    staging = store.blobs.stage("ask-1-attempt-1", payload.parts)
    staging.append(data_of(payload))
    with pytest.raises(StoreError, match=r"uploading .*bucket does not exist"):
        staging.commit(payload.sha256)
    object_store.make_bucket("late-bucket")
    again = store.blobs.stage("ask-1-attempt-1", payload.parts)
    assert again.length == payload.data_bytes
    again.commit(payload.sha256)
    assert data_of(store.blobs.open(payload.sha256)) == data_of(payload)
    store.close()


def assert_goes_after(seconds: float, copy: Path, host: Store) -> None:
    for unused, is_kept in ((seconds - 30, True), (seconds + 30, False)):
        os.utime(copy, (time.time() - unused,) * 2)
        sweep(host)
        assert copy.exists() == is_kept


def test_copies_of_what_was_deleted_elsewhere_go(hosts: tuple[Store, Store], tmp_path: Path) -> None:
    payload = make_payload()
    hosts[0].blobs.put(payload)
    hosts[1].blobs.open(payload.sha256)
    (copy,) = copies(tmp_path / "host-2")
    hosts[0].blobs.drop(payload.sha256)
    assert_goes_after(60, copy, hosts[1])  # before, it may be in use
    with pytest.raises(DamagedError, match="is not in the store"):
        hosts[1].blobs.open(payload.sha256)


def test_copies_that_nobody_uses_go_and_are_fetched_again(hosts: tuple[Store, Store], tmp_path: Path) -> None:
    state = hosts[0].blobs.put_state(b"state")
    hosts[0].runs.begin("run", {})
    hosts[0].runs.set_checkpoint("run", state)
    assert hosts[1].blobs.get_state(state) == b"state"
    (copy,) = copies(tmp_path / "host-2")
    assert_goes_after(3600, copy, hosts[1])
    assert hosts[1].blobs.get_state(state) == b"state"


def test_one_host_deletes_at_a_time(hosts: tuple[Store, Store]) -> None:
    with hosts[0].blobs.exclusive() as first, hosts[1].blobs.exclusive() as second:
        assert (first, second) == (True, False)
    with hosts[1].blobs.exclusive() as free:
        assert free


def test_only_an_old_payload_is_uploaded_again(
    hosts: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def uploads() -> int:
        return sum('"PUT ' in record.getMessage() for record in caplog.records)  # the object store's log

    payload = make_payload()
    caplog.set_level("INFO", "werkzeug")
    hosts[0].blobs.put(payload)
    hosts[0].blobs.put(payload)
    assert uploads() == 1
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + LONG_AGO)
    hosts[0].blobs.put(payload)
    assert uploads() == 2


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", r"\[server\]: blobs must be s3://bucket/prefix, or empty"),
        ("s3:///prefix", r"\[server\]: blobs must be s3://bucket/prefix, or empty"),
        ("/shared/folder", r"\[server\]: blobs must be s3://bucket/prefix, or empty"),
        ("s3://key:secret@bucket/prefix", r"\[server\]: blobs must not contain keys; set AWS_ACCESS_KEY_ID"),
        ("s3://bucket/prefix?secret=x", r"\[server\]: blobs must not contain keys; set AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_wrong_blobs_setting_is_refused_without_its_keys(url: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[server]\nblobs = "{url}"\n')
    with pytest.raises(ConfigurationError, match=expected) as error:
        load_server_config(path)
    assert "secret" not in str(error.value)


def test_only_the_owner_can_read_where_a_store_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    set_location(tmp_path, Location("postgresql://me@host/db", "s3://bucket/prefix"))
    assert (tmp_path / "location.toml").stat().st_mode & 0o777 == 0o600
