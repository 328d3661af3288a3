"""What a hostile or broken server sends ends in an error with a sentence or within a bound that the app has set."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hostile_server import (
    CLASSES,
    RUN,
    VALUES,
    LyingLink,
    ask,
    device_at,
    knowledge,
    terms,
)

from fleetdistill import Step
from fleetdistill.errors import CannotAnswer, ConfigurationError, LinkError, WireError
from fleetdistill.interruption import check_may_continue, time_limit
from fleetdistill.link.terms import MAX_ATTEMPTS, pause_seconds, plain
from fleetdistill.testing import ManualClock
from fleetdistill.wire.codes import MAX_AFTER_SECONDS
from fleetdistill.wire.digests import digest
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2, tensor_pb2

# --- the terms


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"threads": 0}, WireError, "has threads 0, expected at least 1"),
        ({"threads": 100_000}, ConfigurationError, r"100000 threads, but this device allows 64.*Budgets\(threads"),
        ({"threads": 1 << 31}, ConfigurationError, "2147483648 threads, but this device allows 64"),
        ({"heartbeat_seconds": 0.0}, WireError, "heartbeat_seconds 0, expected a finite number above 0"),
        ({"heartbeat_seconds": -1.0}, WireError, "heartbeat_seconds -1"),
        ({"heartbeat_seconds": math.nan}, WireError, "heartbeat_seconds nan"),
        ({"heartbeat_seconds": math.inf}, WireError, "heartbeat_seconds inf"),
        ({"proxy_digest": b"x" * 300}, WireError, "proxy_digest of 300 bytes, expected 32 or 0"),
        ({"initial_weights": b"x"}, WireError, "initial_weights of 1 bytes"),
        ({"extractor_file": b"x" * 31}, WireError, "extractor_file of 31 bytes"),
        ({"run": "../../etc"}, WireError, "expected 1 to 64 letters"),
        ({"knowledge_type": 4}, WireError, "unknown knowledge type 4, expected float32, float16 or uint8"),
    ],
)
def test_terms_that_cannot_be_meant_are_an_error_with_a_sentence(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    device, _ = device_at(LyingLink(ask(), terms=terms(**changes)), tmp_path)
    with device, pytest.raises(error, match=sentence):
        device.run()


def test_a_contract_of_another_run_is_refused(tmp_path: Path) -> None:
    device, _ = device_at(LyingLink(ask(), terms=terms(run="other")), tmp_path, run=RUN)
    with device, pytest.raises(WireError, match="expected 'lying', the run that the device takes part in"):
        device.run()


def test_invalid_method_name_is_refused_in_printable_words(tmp_path: Path) -> None:
    given = terms()
    given.contract.method = "\x1b[31m" * 100
    device, _ = device_at(LyingLink(ask(), terms=given), tmp_path)
    with device, pytest.raises(WireError, match="a method or class with a long name"):
        device.run()


def test_a_run_of_a_million_classes_is_refused(tmp_path: Path) -> None:
    given = terms()
    given.contract.classes.extend(["x"] * 1_000_000)
    device, _ = device_at(LyingLink(ask(), terms=given), tmp_path)
    with device, pytest.raises(WireError, match="1000003 classes, expected 2 to 10000"):
        device.run()


def test_a_class_with_control_characters_is_refused(tmp_path: Path) -> None:
    given = terms()
    given.contract.classes[1] = "\x1b[2Jcat"
    device, _ = device_at(LyingLink(ask(), terms=given), tmp_path)
    with device, pytest.raises(WireError, match="control characters in its name, expected printable names"):
        device.run()


def test_an_app_sets_how_many_threads_a_run_may_have(tmp_path: Path) -> None:
    device, _ = device_at(LyingLink(terms=terms(threads=3)), tmp_path / "a", threads=2)
    with device, pytest.raises(ConfigurationError, match="3 threads, but this device allows 2"):
        device.run()
    device, events = device_at(LyingLink(ask(), terms=terms(threads=3)), tmp_path / "b", threads=3)
    with device:
        device.run()
    assert events.texts("answered")


@pytest.mark.parametrize("changes", [{"threads": 0}, {"seconds_per_ask": 0.0}, {"seconds_per_ask": math.nan}])
def test_bounds_that_allow_nothing_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        device_at(LyingLink(), tmp_path, **changes)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"learning_rate": 1e308}, "learning_rate must be > 0 and < 3.4e+38, got 1e+308"),
        ({"learning_rate": math.nan}, "learning_rate must be > 0"),
        ({"local_epochs": 2.0}, "local_epochs is 2.0, expected a whole number"),
        ({"batch_size": 32.0}, "batch_size is 32.0, expected a whole number"),
        ({"batch_size": -1}, "batch_size must be >= 1, got -1"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast', expected a number"),
        ({"nesterov": 1}, "nesterov is 1, expected true or false"),
        ({"optimizer": True}, "optimizer is True, expected a string"),
        ({"target_peak": 7.0}, "7"),
    ],
)
def test_device_checks_types_and_ranges_of_settings_too(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    device, _ = device_at(LyingLink(ask(), terms=terms(settings=settings)), tmp_path)
    with device, pytest.raises(ConfigurationError) as error:
        device.run()
    assert sentence in str(error.value)


# --- the work


def test_endless_training_stops_at_app_limit_and_ask_is_declined(tmp_path: Path) -> None:
    link = LyingLink(ask(), terms=terms(settings={"local_epochs": 10**12}))
    device, events = device_at(link, tmp_path, seconds_per_ask=0.2)
    with device:
        device.run()
    (declined,) = link.declined
    assert "longer than this device's limit of 0.2 seconds" in declined.reason
    assert events.texts("dropped") == [declined.reason]
    assert not link.uploads


def test_outside_of_a_limit_time_is_not_checked() -> None:
    check_may_continue()
    with time_limit(1e9):
        check_may_continue()
    with time_limit(1e-9):
        time.sleep(0.001)
        with pytest.raises(CannotAnswer, match="longer than this device's limit of 1e-09 seconds"):
            check_may_continue()
    check_may_continue()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"first_attempt": (1 << 32) - 1}, "attempt 4294967295, expected at most 2147483648"),
        ({"payload": b"x" * 300}, "digest of 300 bytes, expected 32"),
        ({"step": ""}, "step has 0 characters"),
        ({"step": "x" * 100_000}, "step has 100000 characters"),
        ({"step": "dream\x1b[2J"}, "no handler for step"),
    ],
)
def test_impossible_ask_is_declined_and_device_goes_on(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    link = LyingLink(ask(**changes), ask(round=2))
    device, events = device_at(link, tmp_path)
    with device:
        device.run()
    (declined,) = link.declined
    assert sentence in declined.reason
    assert len(link.uploads) == 1
    assert len(events.texts("dropped")) == 1


def test_highest_attempt_of_answer_leaves_room_for_next(tmp_path: Path) -> None:
    link = LyingLink(ask(first_attempt=MAX_ATTEMPTS), ask(first_attempt=MAX_ATTEMPTS, seed=6))
    device, _ = device_at(link, tmp_path)
    with device:
        device.run()
    assert [header.name.attempt for header in link.uploads] == [MAX_ATTEMPTS, MAX_ATTEMPTS + 1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"values": np.zeros((6, 7), np.float32)}, "values [6, 7], expected integers [N] and [N, 3]"),
        ({"values": np.zeros((2, CLASSES), np.float32)}, "int64 ids [6] and values [2, 3]"),
        ({"values": np.zeros((0, 1 << 40), np.float32)}, "values [0, 1099511627776]"),
        ({"sample_ids": np.zeros((2, 3), np.int64)}, "int64 ids [2, 3]"),
        ({"sample_ids": np.zeros(6, np.float32)}, "float32 ids [6]"),
        ({"values": np.full((6, CLASSES), np.nan, np.float32)}, "the loss is nan"),
    ],
)
def test_knowledge_that_fits_nothing_is_declined(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    sent = knowledge(**{**VALUES, **changes})
    link = LyingLink(ask(payload=sent.sha256), ask(round=2))
    link.holds(sent)
    device, _ = device_at(link, tmp_path)
    with device:
        device.run()
    (declined,) = link.declined
    assert sentence in declined.reason
    assert len(link.uploads) == 1


def hollow(shape: list[int], says: int) -> tuple[knowledge_pb2.PayloadHeader, bytes]:
    """A header of knowledge with one tensor of a shape, and no data."""
    header = knowledge_pb2.PayloadHeader(data_bytes=says)
    part = header.parts.parts.add(name="knowledge").refined_knowledge
    part.valid = True
    for tensor in (part.sample_ids, part.values):
        tensor.element_type, tensor.encoding = tensor_pb2.ELEMENT_TYPE_INT64, tensor_pb2.ENCODING_RAW
        tensor.shape.extend(shape)
    header.sha256 = digest(header.parts, iter([]))
    return header, header.sha256


@pytest.mark.parametrize("says", [0, 1 << 60, 2 << 53])
def test_a_tensor_of_2_to_the_50_rows_without_data_is_declined(tmp_path: Path, says: int) -> None:
    header, sha256 = hollow([1 << 50], says)
    link = LyingLink(ask(payload=sha256))
    link.payloads[sha256] = (header, [])
    device, _ = device_at(link, tmp_path)
    with device:
        device.run()
    (declined,) = link.declined
    expected = "declares tensors of 18014398509481984 bytes" if not says else "the limit is 17179869184"
    assert expected in declined.reason


def test_a_download_of_empty_chunks_comes_to_an_end(tmp_path: Path) -> None:
    header, sha256 = hollow([2], 32)
    link = LyingLink(ask(payload=sha256))
    link.payloads[sha256] = (header, [knowledge_pb2.Chunk()])
    device, _ = device_at(link, tmp_path)
    with device:
        device.run()
    assert "an empty chunk" in link.declined[0].reason


def test_an_ask_that_was_declined_is_declined_again_without_work(tmp_path: Path) -> None:
    """Also where the server gives more time or says that it has come further; and the app is told once."""
    same = [ask(step="dream", deadline_seconds=1.0, completed_rounds=number) for number in range(3)]
    link = LyingLink(*same, ask(step="dream", round=2))
    clock = ManualClock()
    device, events = device_at(link, tmp_path, clock=clock)
    with device:
        while device.step() is not Step.FINISHED:
            pass
    assert clock.waits == [0.5, 1.0], "seconds before the next request, after each repetition"
    assert [item.round for item in link.declined] == [1, 1, 1, 2]
    assert [event.round for event in events if event.kind == "ask"] == [1, 2]
    assert [event.round for event in events if event.kind == "dropped"] == [1, 2]


# --- pauses and heartbeats


def test_a_heartbeat_comes_at_most_five_times_a_second(tmp_path: Path) -> None:
    link = LyingLink(ask(), terms=terms(settings={"local_epochs": 10**8}, heartbeat_seconds=1e-300), remote=True)
    device, _ = device_at(link, tmp_path, seconds_per_ask=1.0)
    with device:
        began = time.monotonic()
        device.run()
    assert link.beats <= 5 * (time.monotonic() - began) + 1


@pytest.mark.parametrize("values", [(math.nan, math.nan), (0.0, math.inf), (-1.0, 1.0), (5.0, 1.0)])
def test_invalid_come_back_range_is_reported_and_device_retries(tmp_path: Path, values: tuple[float, float]) -> None:
    nothing = service_pb2.NextAskResponse(
        come_back=service_pb2.ComeBack(after_seconds=values[0], before_seconds=values[1])
    )
    device, events = device_at(LyingLink(nothing, ask()), tmp_path)
    with device:
        device.run()
    assert "expected finite numbers in ascending order" in events.texts("lost-contact")[0]
    assert events.texts("answered")


def test_pause_is_at_most_an_hour_and_never_zero_over_network() -> None:
    far = service_pb2.ComeBack(after_seconds=1e300, before_seconds=1.5e300)
    assert pause_seconds(far, remote=True) == MAX_AFTER_SECONDS <= threading.TIMEOUT_MAX
    assert pause_seconds(service_pb2.ComeBack(), remote=True) > 0
    assert pause_seconds(service_pb2.ComeBack(), remote=False) == 0
    with pytest.raises(LinkError):
        pause_seconds(service_pb2.ComeBack(after_seconds=math.nan), remote=True)


# --- receipts and texts


def test_a_receipt_without_an_id_is_none(tmp_path: Path) -> None:
    link = LyingLink(ask())
    link.change_receipt = lambda receipt: receipt.ClearField("id")
    device, events = device_at(link, tmp_path)
    with device:
        with pytest.raises(LinkError, match="a receipt without an id"):
            device.step()
        link.change_receipt = lambda receipt: None
        device.run()
    assert len(events.texts("answered")) == 1


def test_what_a_server_says_reaches_the_app_as_one_short_line(tmp_path: Path) -> None:
    said = service_pb2.NextAskResponse(finished="over\n\x1b[2J" + "x" * 3_000_000)
    device, events = device_at(LyingLink(said), tmp_path)
    with device:
        device.run()
    (text,) = events.texts("finished")
    assert text.startswith("over\\n\\x1b[2Jxxx")
    assert len(text) < 1300
    assert plain("fine") == "fine"
