"""One receipt for each answer, and what is refused on the way to it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from intake.device_api_fleet import RUN, WHOLE, Fleet, feed, refused_bytes
from support.wire_samples import (
    data_of,
    i32,
    i64,
    in_pieces,
    make_identity,
    make_knowledge,
    make_metrics,
    make_payload,
    make_profile,
)

from fleetdistill.errors import RefusedError, StoreError
from fleetdistill.knowledge import SampleKnowledge
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2
from fleetdistill_server.intake.uploads import UploadSession
from fleetdistill_server.store.retention import sweep


def feed_all(session: UploadSession, chunks: Iterable[knowledge_pb2.Chunk]) -> service_pb2.Receipt:
    feed(session, chunks)
    return session.finish()


def test_an_answer_gets_a_receipt_once_it_is_stored(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = encode({"knowledge": make_knowledge(), "metrics": make_metrics(3, 4)})
    wakes = any_fleet.wakes
    receipt = any_fleet.send(identity, payload, samples=3)
    assert (receipt.sha256, receipt.data_bytes, receipt.name.attempt) == (payload.sha256, payload.data_bytes, 1)
    assert abs(receipt.received_at_ms / 1000 - time.time()) < 60
    (row,) = any_fleet.store.asks.uploads(RUN)
    assert (row.receipt, row.samples, row.status) == (receipt.id, 3, "acknowledged")
    assert data_of(any_fleet.store.blobs.open(payload.sha256)) == data_of(payload)
    assert any_fleet.ask_state() == ("answered", "")
    (figure,) = any_fleet.store.history.figures(RUN, "accuracy", "test")
    assert (figure.device, figure.sum, figure.count) == ("d1", 3.0, 4)
    assert any_fleet.wakes > wakes


def test_bytes_of_answer_are_counted_without_metrics_data(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    payload = make_payload()
    fleet.send(identity, payload)
    (row,) = fleet.store.history.traffic(RUN)
    assert (row.round, row.device, row.direction, row.payloads) == (1, "d1", "up", 1)
    assert (row.tensor_bytes, row.envelope_bytes) == (payload.data_bytes, payload.header().ByteSize())


@pytest.mark.parametrize("name", [{"number": 2}, {"step_number": 2}, {"number": 2**64 - 1}, {"number": 0}])
def test_an_answer_that_nobody_asked_for_is_refused(fleet: Fleet, name: dict[str, int]) -> None:
    identity = fleet.join()
    fleet.ask()
    step, number = name.get("step_number", 1), name.get("number", 1)
    sentence = f"device d1 has no ask for step {step} of round {number}"
    for call in (lambda: fleet.begin(identity, make_payload(), **name), lambda: fleet.status(identity, **name)):
        with pytest.raises(RefusedError) as error:
            call()
        assert (error.value.code, str(error.value)) == (Code.NOT_ASKED, sentence)
    assert fleet.refused() == [("d1", "not-asked")] * 2
    assert fleet.ask_state() == ("open", "")


def test_an_answer_to_another_device_s_ask_is_refused(fleet: Fleet) -> None:
    fleet.join("d1")
    identity = fleet.join("d2")
    fleet.ask("d1")
    with pytest.raises(RefusedError) as error:
        fleet.begin(identity, make_payload())
    assert error.value.code == Code.NOT_ASKED


def test_an_answer_to_a_closed_round_is_refused(fleet: Fleet) -> None:
    identity = fleet.join()
    number = fleet.store.runs.start_round(RUN, ["d1"])
    fleet.ask()
    fleet.store.runs.close_round(RUN, number, b"c", [], {})
    assert not fleet.status(identity).ask_open
    with pytest.raises(RefusedError) as error:
        fleet.begin(identity, make_payload())
    assert (error.value.code, str(error.value)) == (
        Code.CLOSED,
        "device d1: step 'train' of round 1 no longer accepts answers (round closed)",
    )
    assert fleet.refused() == [("d1", "closed")]


def test_answer_begun_in_time_and_finished_too_late_is_refused(any_fleet: Fleet) -> None:
    fleet = any_fleet
    identity = fleet.join()
    fleet.ask()
    session = fleet.begin(identity, make_payload())
    feed(session, in_pieces(make_payload(), WHOLE))
    fleet.store.asks.close(1, "deadline passed")
    with pytest.raises(RefusedError) as error:
        session.finish()
    assert (error.value.code, str(error.value)) == (
        Code.LATE,
        "device d1: step 'train' of round 1 no longer accepts answers (deadline passed)",
    )
    assert fleet.store.asks.uploads(RUN) == []
    (row,) = fleet.store.history.traffic(RUN)
    assert (row.payloads, row.tensor_bytes, row.envelope_bytes) == (0, 0, 0)
    assert refused_bytes(fleet) == make_payload().header().ByteSize() + make_payload().data_bytes
    assert not fleet.store.blobs.has(make_payload().sha256), "nothing needs it"
    assert list(fleet.store.blobs.staging()) == []


def test_the_bytes_of_an_answer_that_is_overtaken_are_counted(fleet: Fleet) -> None:
    """The answer is stored whole; the ask closes right before its receipt is committed."""
    identity = fleet.join()
    fleet.ask()
    session = fleet.begin(identity, make_payload())
    feed(session, in_pieces(make_payload(), WHOLE))

    def close() -> None:
        fleet.before_commit = lambda: None
        fleet.store.asks.close(1, "deadline passed")

    fleet.before_commit = close
    with pytest.raises(RefusedError):
        session.finish()
    assert refused_bytes(fleet) == make_payload().header().ByteSize() + make_payload().data_bytes


def test_same_upload_again_gets_same_receipt_and_counts_once(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    receipt = any_fleet.send(identity, payload)
    again = any_fleet.begin(identity, payload)
    feed(again, in_pieces(payload, WHOLE))  # a device that did not ask for the status sends it all
    assert again.finish() == receipt
    assert any_fleet.status(identity).receipt == receipt
    assert len(any_fleet.store.asks.uploads(RUN)) == 1
    assert any_fleet.store.history.traffic(RUN)[0].payloads == 1


def test_a_later_attempt_gets_the_receipt_of_the_first(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    receipt = fleet.send(identity, make_payload(), attempt=1)
    other = make_payload(labels=i32([2, 2, 2, 2]))
    assert fleet.send(identity, other, attempt=2) == receipt
    status = fleet.status(identity, attempt=2)
    assert status.receipt == receipt
    assert (status.receipt.name.attempt, status.ask_open) == (1, False)
    assert [row.sha256 for row in fleet.store.asks.uploads(RUN)] == [make_payload().sha256]


def test_two_attempts_that_end_at_the_same_moment_count_once(any_fleet: Fleet) -> None:
    """Both are stored whole, then one is committed while the other waits for its turn."""
    identity = any_fleet.join()
    any_fleet.ask()
    payload = encode({"knowledge": make_knowledge(), "metrics": make_metrics()})
    session = any_fleet.begin(identity, payload)
    feed(session, in_pieces(payload, WHOLE))
    receipts = []

    def overtake() -> None:
        any_fleet.before_commit = lambda: None
        receipts.append(any_fleet.send(identity, payload))

    any_fleet.before_commit = overtake
    receipts.append(session.finish())
    assert receipts[0] == receipts[1]
    assert len(any_fleet.store.asks.uploads(RUN)) == 1
    assert [row.payloads for row in any_fleet.store.history.traffic(RUN)] == [1]


@pytest.mark.parametrize("bad", ["value", "checksum", "header"])
def test_the_bytes_of_a_refused_upload_are_counted_as_such(any_fleet: Fleet, bad: str) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload(labels=i32([9, 0, 0, 0])) if bad == "value" else make_payload()
    chunks = in_pieces(payload, 16)
    wrong = chunks[label_slot(payload).start // 16 if bad == "value" else 3]
    if bad == "checksum":
        wrong.crc32c ^= 1
    if bad == "header":
        with pytest.raises(RefusedError):
            any_fleet.begin(identity, payload, samples=0)
        assert refused_bytes(any_fleet) == payload.header().ByteSize()
        return
    sent = chunks[: chunks.index(wrong) + 1]
    session = any_fleet.begin(identity, payload)
    with pytest.raises(RefusedError):
        feed(session, sent)
    assert refused_bytes(any_fleet) == payload.header().ByteSize() + sum(len(item.data) for item in sent)
    session.abandon()
    assert refused_bytes(any_fleet) == payload.header().ByteSize() + sum(len(item.data) for item in sent)


def label_slot(payload: Payload) -> Any:
    return next(slot for slot in payload.slots if slot.path.endswith("labels"))


def test_broken_upload_counts_once_when_answered_or_discarded(any_fleet: Fleet) -> None:
    first, second = any_fleet.join("d1"), any_fleet.join("d2")
    any_fleet.ask("d1", "d2")
    payload = make_payload()
    for identity in (first, second):
        broken = any_fleet.begin(identity, payload)
        feed(broken, in_pieces(payload, 16)[:5])
        broken.abandon()
    session = any_fleet.begin(first, payload, first_byte=80)
    feed(session, in_pieces(payload, 16)[5:])
    session.finish()
    assert refused_bytes(any_fleet, "d1") == refused_bytes(any_fleet, "d2") == 0
    any_fleet.store.asks.close(2, "deadline passed")
    sweep(any_fleet.store)
    assert (refused_bytes(any_fleet, "d1"), refused_bytes(any_fleet, "d2")) == (0, 80)


def test_an_answer_that_is_sent_again_is_counted_too(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    any_fleet.send(identity, payload)
    before = any_fleet.store.history.traffic(RUN)[0].tensor_bytes
    again = any_fleet.begin(identity, payload)
    feed(again, in_pieces(payload, WHOLE))
    again.finish()
    again.abandon()
    assert refused_bytes(any_fleet) == payload.header().ByteSize() + payload.data_bytes
    assert any_fleet.store.history.traffic(RUN)[0].tensor_bytes == before


BAD_UPLOADS: dict[str, tuple[Payload, Code, str]] = {
    "NaN": (
        make_payload(logits=np.full((4, 3), np.nan, np.float32)),
        Code.BAD_VALUE,
        "device d1: non-finite logits at row 0 of knowledge/logits",
    ),
    "wrong shape": (
        make_payload(logits=np.zeros((4, 9), np.float32)),
        Code.BAD_TENSOR,
        "device d1: knowledge/logits has shape [4, 9], expected [N, 3]",
    ),
    "doubled ids": (
        make_payload(sample_ids=np.zeros(4, np.int64)),
        Code.BAD_VALUE,
        "device d1: duplicate sample id 0 at row 1 of knowledge/sample_ids",
    ),
    "wrong kind": (
        encode({"knowledge": SampleKnowledge(sample_ids=np.arange(4)), "more": make_metrics()}),
        Code.BAD_MESSAGE,
        "device d1: the answer has parts knowledge (sample_knowledge), more (metrics), "
        "expected knowledge (sample_knowledge)",
    ),
}


@pytest.mark.parametrize("name", BAD_UPLOADS)
def test_a_bad_upload_puts_the_device_out_for_the_round(any_fleet: Fleet, name: str) -> None:
    payload, code, sentence = BAD_UPLOADS[name]
    identity = any_fleet.join()
    any_fleet.ask()
    wakes = any_fleet.wakes
    with pytest.raises(RefusedError) as error:
        any_fleet.send(identity, payload)
    assert (error.value.code, str(error.value)) == (code, sentence)
    (event,) = any_fleet.store.history.events(RUN, "refused")
    assert (event.text, event.code, event.device, event.round) == (sentence, code, "d1", 1)
    assert any_fleet.ask_state() == ("out", f"refused: {sentence}")
    assert any_fleet.wakes > wakes  # nobody waits for it
    assert any_fleet.store.asks.uploads(RUN) == []
    assert any_fleet.store.devices.present(RUN) == ["d1"]  # the next round asks it again
    status = any_fleet.status(identity)
    assert (status.ask_open, status.next_byte) == (False, 0)


@pytest.mark.parametrize("samples", [0, 2**63, 2**64 - 1])
def test_an_answer_of_no_or_absurdly_many_samples_is_refused(fleet: Fleet, samples: int) -> None:
    identity = fleet.join()
    fleet.ask()
    with pytest.raises(RefusedError) as error:
        fleet.send(identity, make_payload(), samples=samples)
    assert (error.value.code, str(error.value)) == (
        Code.BAD_VALUE,
        f"device d1: the answer has a weight of {samples} samples, expected 1 to 2**63 - 1",
    )


def test_answer_weight_is_at_most_last_declared_samples(fleet: Fleet) -> None:
    identity = make_identity("d1", fleet.check_in(profile=make_profile(samples=20)).secret)
    fleet.ask()
    with pytest.raises(RefusedError) as error:
        fleet.send(identity, make_payload(), samples=21)
    sentence = "device d1: the answer has a weight of 21 samples, but the device declared 20 samples"
    assert (error.value.code, str(error.value)) == (Code.BAD_VALUE, sentence)
    assert error.value.details["check_in"] == "again"  # this server may be older than the device's data
    assert fleet.ask_state() == ("out", f"refused: {sentence}")
    fleet.check_in(secret=identity.secret, profile=make_profile(samples=21))  # its data have grown
    fleet.ask(step_number=2)
    fleet.send(identity, make_payload(), samples=21, step_number=2)
    assert [row.samples for row in fleet.store.asks.uploads(RUN)] == [21]


@pytest.mark.parametrize("how", ["chunk", "digest", "short"])
def test_what_went_wrong_on_the_way_may_be_sent_again(any_fleet: Fleet, how: str) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    chunks = in_pieces(payload, 16)
    header_of = make_payload(labels=i32([2, 2, 2, 2])) if how == "digest" else payload
    session = any_fleet.begin(identity, header_of)
    if how == "chunk":
        chunks[3].crc32c ^= 1
    with pytest.raises(RefusedError) as error:
        feed_all(session, chunks[:-1] if how == "short" else chunks)
    code = Code.INCOMPLETE if how == "short" else Code.CHECKSUM
    assert error.value.code == code
    assert any_fleet.refused() == ([] if how == "short" else [("d1", code)]), "a lost connection refuses nothing"
    assert any_fleet.ask_state() == ("open", "")
    first = any_fleet.status(identity).next_byte
    assert first == (payload.data_bytes - 16 if how == "short" else 0)  # nothing doubtful is kept
    again = any_fleet.begin(identity, payload, first_byte=first)
    feed(again, [c for c in in_pieces(payload, 16) if c.offset >= first])
    assert again.finish().sha256 == payload.sha256


def test_store_failing_during_chunks_leaves_ask_open(any_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    session = any_fleet.begin(identity, payload)

    def full(data: bytes) -> None:
        raise StoreError("writing an upload: the disk is full")

    monkeypatch.setattr(session._staging, "append", full)
    with pytest.raises(StoreError, match="the disk is full"):
        session.feed(in_pieces(payload, 16)[0])
    assert any_fleet.ask_state() == ("open", "")
    monkeypatch.undo()
    assert any_fleet.send(identity, payload).sha256 == payload.sha256


def test_a_round_closes_with_every_receipt_used_or_reported(fleet: Fleet) -> None:
    """From check-in to the end of the round, with one good, one bad and one silent device."""
    good, bad, silent = (fleet.join(device) for device in ("good", "bad", "silent"))
    number = fleet.store.runs.start_round(RUN, ["bad", "good", "silent"])
    fleet.ask("good", "bad", "silent")
    receipt = fleet.send(good, make_payload())
    with pytest.raises(RefusedError):
        fleet.send(bad, make_payload(sample_ids=i64([0, 1, 2, -1])))
    (accepted,) = (row for row in fleet.store.asks.of_step(RUN, number, 1) if row.status == "answered")
    fleet.store.runs.close_round(RUN, number, b"c", [accepted.id], {})
    assert [(row.receipt, row.status) for row in fleet.store.asks.uploads(RUN)] == [(receipt.id, "used")]
    assert fleet.refused() == [("bad", "bad-value")]
    with pytest.raises(RefusedError, match="no longer accepts answers"):
        fleet.send(silent, make_payload())
