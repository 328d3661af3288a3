"""What every store of payloads and checkpoints must do, on files, in memory and in an object store alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.stores import IN_OBJECTS, place_store
from support.wire_samples import data_of, make_metrics, make_payload

from fleetdistill.errors import StoreError
from fleetdistill.knowledge import SampleKnowledge
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.store.store import Store


@pytest.fixture(params=["files", "memory", IN_OBJECTS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = Store.in_memory() if request.param == "memory" else Store.open(place_store(request, tmp_path / "store"))
    yield opened
    opened.close()


def test_a_blob_comes_back_equal(store: Store) -> None:
    payload = encode({"knowledge": make_payload_kind()})
    store.blobs.put(payload)
    store.blobs.put(payload)  # safe to repeat
    result = store.blobs.open(payload.sha256)
    assert (result.parts, result.sha256, data_of(result)) == (payload.parts, payload.sha256, data_of(payload))
    (knowledge,) = decode(result).values()
    assert isinstance(knowledge, SampleKnowledge)
    np.testing.assert_array_equal(knowledge.sample_ids, [0, 10, 20, 30])


def make_payload_kind() -> SampleKnowledge:
    (kind,) = decode(make_payload()).values()
    assert isinstance(kind, SampleKnowledge)
    return kind


def test_an_unknown_blob_is_a_store_error(store: Store) -> None:
    with pytest.raises(StoreError, match=f"payload {'61' * 32} is not in the store"):
        store.blobs.open(b"a" * 32)
    with pytest.raises(StoreError, match="61" * 32):
        store.blobs.get_state(b"a" * 32)


def test_a_payload_without_tensors_is_a_blob_too(store: Store) -> None:
    payload = encode({"metrics": make_metrics()})
    store.blobs.put(payload)
    assert decode(store.blobs.open(payload.sha256)) == {"metrics": make_metrics()}


def test_checkpoints_come_back_and_are_named_by_their_content(store: Store) -> None:
    first, second = store.blobs.put_state(b"state"), store.blobs.put_state(b"other")
    assert first == store.blobs.put_state(b"state") != second
    assert (store.blobs.get_state(first), store.blobs.get_state(second)) == (b"state", b"other")


def test_staging_continues_and_starts_afresh_for_other_parts(store: Store) -> None:
    payload, data = make_payload(), data_of(make_payload())
    assert store.blobs.staged("key") == 0
    staging = store.blobs.stage("key", payload.parts)
    staging.append(data[:10])
    staging.append(data[10:25])
    assert staging.read(5, 10) == data[5:15]
    staging.close()
    assert store.blobs.staged("key") == 25
    assert store.blobs.staged("another-key") == 0
    again = store.blobs.stage("key", payload.parts)
    assert (again.length, again.read(0, 25)) == (25, data[:25])
    again.append(data[25:])
    again.close()
    fresh = store.blobs.stage("key", make_payload(5).parts)
    assert fresh.length == 0
    fresh.discard()
    assert store.blobs.staged("key") == 0


def test_what_is_committed_is_not_staged_any_more(store: Store) -> None:
    payload = make_payload()
    staging = store.blobs.stage("key", payload.parts)
    staging.append(data_of(payload))
    staging.commit(payload.sha256)
    assert store.blobs.staged("key") == 0
    assert data_of(store.blobs.open(payload.sha256)) == data_of(payload)


def test_discarded_staging_is_gone(store: Store) -> None:
    staging = store.blobs.stage("key", make_payload().parts)
    staging.append(b"12345678")
    staging.discard()
    assert store.blobs.staged("key") == 0
    assert store.blobs.stage("key", make_payload().parts).length == 0


def test_what_is_held_is_listed_and_dropped(store: Store) -> None:
    payload, state = make_payload(), store.blobs.put_state(b"state")
    store.blobs.put(payload)
    assert {item.sha256 for item in store.blobs.held()} == {payload.sha256, state}
    assert store.blobs.has(payload.sha256)
    store.blobs.drop(payload.sha256)
    store.blobs.drop(payload.sha256)  # safe to repeat
    assert [item.sha256 for item in store.blobs.held()] == [state]
    assert not store.blobs.has(payload.sha256)


def test_what_is_quarantined_is_not_read_again(store: Store) -> None:
    payload = make_payload()
    store.blobs.put(payload)
    store.blobs.quarantine(payload.sha256)
    store.blobs.quarantine(b"x" * 32)  # is not there
    with pytest.raises(StoreError, match="is not in the store"):
        store.blobs.open(payload.sha256)
    store.blobs.put(payload)
    store.blobs.drop_quarantined([payload.sha256])
    assert data_of(store.blobs.open(payload.sha256, verify=True)) == data_of(payload)
