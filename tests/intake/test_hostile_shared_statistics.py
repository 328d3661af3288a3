"""Shared statistics that no honest device sends: the answer of the checks, the device API and real gRPC to each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from intake.refusal_table import documented, documented_refusals
from support.live_front import (
    RUN,
    client_of,
    live_front,
    open_round,
    prepare_store,
    refusal_of,
    upload_name,
    write_asks,
)
from support.wire_samples import CLASSES, in_pieces, make_contract, make_identity, make_profile

from fleetdistill.errors import RefusedError, StoreError
from fleetdistill.knowledge import ClassSpace, Kind, NetworkFile, SharedStatistics
from fleetdistill.methods.classstats.shared_statistics import moments_of, to_wire
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.payload import CHUNK_BYTES, chunks
from fleetdistill.wire.v1 import contract_pb2, service_pb2, tensor_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.memory_blobs import MemoryBlobs
from fleetdistill_server.store.store import Store

SIZE, MAX_ROWS, LEAST, SAMPLES, ROWS_PER_DIRECTION = 4, 3, 5, 15, 4
EXPECTS = {"statistics": "shared_statistics"}
TITLE = "Shared statistics"
_numbers = itertools.count(1)

Send = Callable[[Payload], tuple[str, str]]
"""Sends a payload; returns the code and the sentence of its refusal, two empty strings where it was taken."""


def uploads() -> list[contract_pb2.PartShapes]:
    tensors = [contract_pb2.NamedShape(name=name, shape=[SIZE]) for name in ("means", "variances")]
    return [
        contract_pb2.PartShapes(
            part="statistics",
            tensors=tensors,
            min_samples=LEAST,
            max_rows=MAX_ROWS,
            rows_per_direction=ROWS_PER_DIRECTION,
        ),
    ]


# --- three ways to the same checks


def to_checks(payload: Payload) -> tuple[str, str]:
    blobs = MemoryBlobs()
    try:
        ingest = Ingest("d", payload.header(), make_contract(uploads=uploads()), EXPECTS, SAMPLES)
        ingest.start(blobs.stage("key", payload.parts))
        for chunk in in_pieces(payload, CHUNK_BYTES):
            ingest.feed(chunk)
        ingest.finish()
    except RefusedError as refusal:
        return refusal.code, str(refusal)
    return "", ""


@pytest.fixture(scope="module")
def to_api() -> Iterator[Send]:
    store = Store.in_memory()
    store.runs.begin(RUN, {})
    store.runs.publish_contract(RUN, make_contract(uploads=uploads()).SerializeToString())
    link = MemoryLink(DeviceApi(store))

    def send(payload: Payload) -> tuple[str, str]:
        identity = make_identity(f"d{next(_numbers)}")
        identity.secret = link.check_in(identity, make_profile(samples=SAMPLES)).secret
        number = open_round(store, identity.device)
        write_asks(store, number, identity.device, expects=EXPECTS)
        header = service_pb2.UploadHeader(
            identity=identity, name=upload_name(number), payload=payload.header(), samples=4
        )
        try:
            link.upload(header, chunks(payload.source, payload.slots))
        except RefusedError as refusal:
            assert_nothing_is_kept(store, identity.device, payload)
            return refusal.code, str(refusal)
        return "", ""

    yield send
    store.close()


@pytest.fixture(scope="module")
def to_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    directory: Path = tmp_path_factory.mktemp("front") / "store"
    store = prepare_store(directory, uploads=uploads())
    with live_front(directory) as front:

        def send(payload: Payload) -> tuple[str, str]:
            with client_of(front, f"d{next(_numbers)}") as client:
                client.check_in(make_profile(samples=SAMPLES))
                number = open_round(store, client.device)
                write_asks(store, number, client.device, expects=EXPECTS)
                try:
                    client.upload(upload_name(number), payload)
                except grpc.RpcError as error:
                    refusal = refusal_of(error)
                    assert refusal.status is grpc.StatusCode.INVALID_ARGUMENT
                    assert refusal.details["device"] == client.device
                    assert_nothing_is_kept(store, client.device, payload)
                    return refusal.reason, refusal.text
                return "", ""

        yield send
    store.close()


def assert_nothing_is_kept(store: Store, device: str, payload: Payload) -> None:
    assert device not in [row.device for row in store.asks.uploads(RUN)]
    assert not list(store.blobs.staging())
    with pytest.raises(StoreError):
        store.blobs.open(payload.sha256)


@pytest.fixture(params=["checks", "api", "front"])
def send(request: pytest.FixtureRequest) -> Send:
    """One way after the other."""
    result: Send = to_checks if request.param == "checks" else request.getfixturevalue(f"to_{request.param}")
    return result


# --- what is sent


def honest(*counts: int, rank: int = MAX_ROWS) -> SharedStatistics:
    """What a device with so many rows of class 0, 1, ... sends."""
    labels = np.repeat(np.arange(len(counts)), counts)
    rows = np.random.default_rng(1).normal(size=(len(labels), SIZE))
    return to_wire(moments_of(rows, labels, LEAST), rank, ROWS_PER_DIRECTION)


SENT = honest(9, 6)
assert SENT.directions is not None
FIVE = honest(LEAST)
"""Of five rows of one class: 4 degrees of freedom, one direction."""


def changed(name: str, at: tuple[int, ...], value: float) -> SharedStatistics:
    array = np.array(getattr(SENT, name))
    array[at] = value
    return replace(SENT, **{name: array})  # type: ignore[arg-type]


def scalar(df: int) -> Any:
    return np.array(df, np.int32)


def counts(*numbers: int) -> dict[str, Any]:
    """Counts and the degrees of freedom that they give."""
    return {"counts": np.array(numbers, np.int32), "df": scalar(min(sum(numbers) - len(numbers), 2**31 - 1))}


def half(*shape: int) -> Any:
    return np.ones(shape, np.float16)


def whole(*shape: int) -> Any:
    return np.ones(shape, np.int8)


HOSTILE: dict[str, tuple[SharedStatistics, str, str]] = {
    "negative variance": (
        changed("variances", (3,), -0.5),
        "bad-value",
        "variance -0.5 below 0 at row 3 of statistics/variances",
    ),
    "more directions than the degrees of freedom allow": (
        replace(FIVE, directions=whole(3, SIZE), steps=half(3)),
        "bad-value",
        "statistics/directions has 3 rows, must be at most 1 for 4 degrees of freedom",
    ),
    "more directions than the contract allows": (
        replace(SENT, directions=whole(MAX_ROWS + 1, SIZE), steps=half(MAX_ROWS + 1)),
        "bad-tensor",
        "statistics/directions has 4 rows, expected at most 3",
    ),
    "directions of no row": (
        replace(SENT, directions=whole(0, SIZE), steps=half(0)),
        "bad-tensor",
        "statistics/directions has 0 rows, expected at least 1 if the tensor is present",
    ),
    "directions that are a single number": (
        replace(SENT, directions=whole(), steps=half()),
        "bad-tensor",
        "statistics/directions has 0 rows, expected at least 1 if the tensor is present",
    ),
    "more samples than declared": (
        replace(SENT, **counts(10, 6)),
        "bad-value",
        "statistics/counts sum to 16, but the device declared 15 samples",
    ),
    "more samples than 32 bits hold": (
        replace(SENT, **counts(2**31 - 1, 2**31 - 1)),
        "bad-value",
        "statistics/counts sum to 4294967294, but the device declared 15 samples",
    ),
    "few samples": (replace(SENT, **counts(9, 4)), "bad-value", "count 4 below 5 at row 1 of statistics/counts"),
    "means not finite": (
        changed("means", (1, 0), np.nan),
        "bad-value",
        "non-finite means at row 1 of statistics/means",
    ),
    "a variance not finite": (
        changed("variances", (2,), np.inf),
        "bad-value",
        "non-finite variance at row 2 of statistics/variances",
    ),
    "a step that is no number": (
        changed("steps", (2,), np.nan),
        "bad-value",
        "non-finite step at row 2 of statistics/steps",
    ),
    "an infinite step": (changed("steps", (0,), np.inf), "bad-value", "non-finite step at row 0 of statistics/steps"),
    "a step of 0": (changed("steps", (1,), 0), "bad-value", "step 0 not above 0 at row 1 of statistics/steps"),
    "a step below 0": (changed("steps", (1,), -1), "bad-value", "step -1 not above 0 at row 1 of statistics/steps"),
    "-128 steps": (
        changed("directions", (1, 3), -128),
        "bad-value",
        "direction -128 below -127 at row 1 of statistics/directions",
    ),
    "directions without steps": (
        replace(SENT, steps=None),
        "bad-tensor",
        "part 'statistics' lacks steps, which feddkc needs",
    ),
    "steps without directions": (
        replace(SENT, directions=None),
        "bad-tensor",
        "part 'statistics' lacks directions, which feddkc needs",
    ),
    "more steps than directions": (
        replace(SENT, directions=whole(2, SIZE)),
        "bad-tensor",
        "statistics/steps has shape [3], expected [2]",
    ),
    "other degrees of freedom": (
        replace(SENT, df=scalar(14)),
        "bad-value",
        "statistics/df is 14, must be 13 for 15 samples of 2 classes",
    ),
    "degrees of freedom below 0": (
        replace(SENT, df=scalar(-1)),
        "bad-value",
        "degrees of freedom -1 below 0 at row 0 of statistics/df",
    ),
    "degrees of freedom of each class": (
        replace(SENT, df=np.array([8, 5], np.int32)),
        "bad-tensor",
        "statistics/df has shape [2], expected []",
    ),
    "doubled class": (replace(SENT, labels=[1, 1]), "bad-value", "part 'statistics' has a duplicate class"),
    "unknown class": (
        replace(SENT, labels=[0, CLASSES]),
        "bad-value",
        "part 'statistics' has class 3 outside [0, 3)",
    ),
    "another number of classes": (
        replace(SENT, labels=[0, 1, 2]),
        "bad-tensor",
        "statistics/counts has shape [2], expected [3]",
    ),
    "longer means": (
        replace(SENT, means=half(2, SIZE + 1)),
        "bad-tensor",
        "statistics/means has shape [2, 5], expected [2, 4]",
    ),
    "longer variances": (
        replace(SENT, variances=half(SIZE + 1)),
        "bad-tensor",
        "statistics/variances has shape [5], expected [4]",
    ),
    "longer directions": (
        replace(SENT, directions=whole(3, SIZE + 1)),
        "bad-tensor",
        "statistics/directions has shape [3, 5], expected [3, 4]",
    ),
    "directions in another type": (
        replace(SENT, directions=half(3, SIZE)),
        "bad-tensor",
        "statistics/directions is float16, expected int8",
    ),
    "counts in another type": (
        replace(SENT, counts=np.array([9, 6], np.int64)),
        "bad-tensor",
        "statistics/counts is int64, expected int32",
    ),
    "tensors about no class": (
        replace(SENT, labels=[]),
        "bad-tensor",
        "tensor 'statistics/counts' is not part of the contract",
    ),
    **{
        f"no {name}": (
            replace(SENT, **{name: None}),  # type: ignore[arg-type]
            "bad-tensor",
            f"part 'statistics' lacks {name}, which feddkc needs",
        )
        for name in ("counts", "means", "variances", "df")
    },
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_statistics_are_refused_with_the_documented_code(case: str, send: Send) -> None:
    part, code, sentence = HOSTILE[case]
    result, text = send(encode({"statistics": part}))
    device, _, said = text.removeprefix("device ").partition(": ")
    assert (result, said) == (code, sentence)
    assert device.startswith("d")
    assert (alike(sentence), code) in {(alike(one), known) for one, known in documented_refusals(TITLE)}


def test_every_refusal_on_the_page_is_played() -> None:
    assert documented_refusals(TITLE) <= {(documented(sentence), code) for _, code, sentence in HOSTILE.values()}


def alike(sentence: str) -> str:
    """A sentence without the tensor that it is about, its type and its shape: the page has one of each kind."""
    sentence = re.sub(r"statistics/\w+|(?<=lacks )\w+|(?<=non-finite )\w+", "TENSOR", documented(sentence))
    return re.sub(r"\[[0, ]*\]|(?<=is )\w+(?=, expected)|(?<=expected )\w+$", "SHAPE", sentence)


@pytest.mark.parametrize(
    "part",
    [
        SENT,
        FIVE,
        honest(9, 6, rank=0),
        honest(4, 4),
        replace(SENT, labels=[2, 0]),
        replace(SENT, directions=np.full((3, SIZE), -127, np.int8), steps=np.full(3, 2**-24, np.float16)),
    ],
    ids=["two classes", "one class", "no directions", "no class", "out of order", "extremes"],
)
def test_honest_statistics_are_taken(part: SharedStatistics, send: Send) -> None:
    assert send(encode({"statistics": part})) == ("", "")


@pytest.mark.parametrize(
    "part",
    [
        NetworkFile(onnx=np.zeros(8, np.uint8)),
        ClassSpace(
            labels=[0, 1],
            counts=np.array([9, 6], np.int32),
            directions=half(SIZE, 1),
            origin=half(1),
            centres=half(2, 1),
            df=np.array(13, np.int64),
            shrinkage=np.array(0.1),
            outside=np.array(0.0),
        ),
    ],
    ids=lambda part: type(part).__name__,
)
def test_another_kind_in_their_place_is_refused(part: Kind, send: Send) -> None:
    payload = encode({"statistics": part})
    kind = payload.parts.parts[0].WhichOneof("kind")
    code, text = send(payload)
    said = f"the answer has parts statistics ({kind}), expected statistics (shared_statistics)"
    assert (code, text.partition(": ")[2]) == ("bad-message", said)


def test_too_many_directions_are_refused_before_any_data() -> None:
    """Their number stands in the header; the largest that a contract allows would be a megabyte."""
    part = replace(SENT, directions=whole(MAX_ROWS + 1, SIZE), steps=half(MAX_ROWS + 1))
    with pytest.raises(RefusedError, match="has 4 rows, expected at most 3"):
        Ingest("d", encode({"statistics": part}).header(), make_contract(uploads=uploads()), EXPECTS, SAMPLES)


@pytest.mark.parametrize("name", ["FLOAT32", "FLOAT16", "UINT8"])
def test_they_are_taken_whatever_the_runs_knowledge_type_is(name: str) -> None:
    contract = make_contract(uploads=uploads(), knowledge_type=tensor_pb2.ElementType.Value(f"ELEMENT_TYPE_{name}"))
    payload = encode({"statistics": SENT}, np.float32)
    ingest = Ingest("d", payload.header(), contract, EXPECTS, SAMPLES)
    assert {slot.path: slot.dtype.name for slot in ingest.slots}["statistics/means"] == "float16"
