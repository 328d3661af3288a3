"""Class statistics and soft predictions that no honest device sends, over real gRPC: what the device hears of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from support.live_front import (
    RUN,
    Client,
    LiveFront,
    client_of,
    live_front,
    open_round,
    prepare_store,
    refused,
    upload_name,
    write_asks,
)
from support.refusal_table import documented, documented_refusals
from support.sqlite import directory_of
from support.wire_samples import make_profile

from fleetdistill.knowledge import ClassStatistics, Kind, SoftPredictions
from fleetdistill.wire.codec import encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.store.store import Store

RANK, SIZE, LEAST, SAMPLES, ROWS_PER_DIRECTION = 3, 4, 5, 15, 3
TITLE = "Class statistics and soft predictions"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    shapes = {"means": [SIZE], "directions": [RANK, SIZE], "variances": [SIZE]}
    tensors = [contract_pb2.NamedShape(name=name, shape=shape) for name, shape in shapes.items()]
    declared = contract_pb2.PartShapes(
        part="statistics", tensors=tensors, least_samples=LEAST, rows_per_direction=ROWS_PER_DIRECTION
    )
    opened = prepare_store(tmp_path_factory.mktemp("front") / "store", uploads=[declared])
    yield opened
    opened.close()


@pytest.fixture
def client(front: LiveFront) -> Iterator[Client]:
    with client_of(front, f"d{next(_numbers)}") as made:
        made.check_in(make_profile(samples=SAMPLES))
        yield made


@pytest.fixture(scope="module")
def front(store: Store) -> Iterator[LiveFront]:
    with live_front(directory_of(store)) as running:
        yield running


def statistics(**changes: Any) -> ClassStatistics:
    """Of two classes with 9 and 6 samples; 6 allow two of the three directions."""
    directions = np.ones((2, RANK, SIZE), np.float32)
    directions[1, 2] = 0
    columns: dict[str, Any] = {
        "labels": [2, 0],
        "counts": np.array([9, 6], np.int32),
        "means": np.full((2, SIZE), -1, np.float32),
        "directions": directions,
        "variances": np.zeros((2, SIZE), np.float32),
    }
    return ClassStatistics(**{**columns, **changes})


def changed(name: str, at: tuple[int, ...], value: float) -> ClassStatistics:
    array = np.array(getattr(statistics(), name))
    array[at] = value
    return statistics(**{name: array})


def predictions(*rows: list[float]) -> SoftPredictions:
    return SoftPredictions(noise_seed=1, values=np.array(rows, np.float32))


def send(store: Store, client: Client, name: str, kind: str, part: Kind) -> None:
    number = open_round(store, client.device)
    write_asks(store, number, client.device, expects={name: kind})
    client.upload(upload_name(number), encode({name: part}))


HOSTILE: dict[str, tuple[ClassStatistics, str, str]] = {
    "negative variance": (
        changed("variances", (1, 3), -1e-3),
        "bad-value",
        "variance -0.001 below 0 at row 1 of statistics/variances",
    ),
    "few samples": (
        statistics(counts=np.array([9, 4], np.int32)),
        "bad-value",
        "count 4 below 5 at row 1 of statistics/counts",
    ),
    "more samples than declared": (
        statistics(counts=np.array([10, 6], np.int32)),
        "bad-value",
        "statistics/counts sum to 16, but the device declared 15 samples",
    ),
    "unknown class": (statistics(labels=[3, 0]), "bad-value", "part 'statistics' has class 3 outside [0, 3)"),
    "doubled class": (statistics(labels=[2, 2]), "bad-value", "part 'statistics' has a duplicate class"),
    "rank over the limit": (
        statistics(directions=np.zeros((2, RANK + 1, SIZE), np.float32)),
        "bad-tensor",
        "statistics/directions has shape [2, 4, 4], expected [2, 3, 4]",
    ),
    "more directions than samples allow": (
        changed("directions", (1, 2, 3), 1e-6),
        "bad-value",
        "row 1 of statistics/directions has more than 2 directions, the maximum for 6 samples",
    ),
    "not finite": (
        changed("means", (1, 0), np.nan),
        "bad-value",
        "non-finite means at row 1 of statistics/means",
    ),
    "missing tensor": (
        statistics(variances=None),
        "bad-tensor",
        "part 'statistics' lacks variances, which feddkc needs",
    ),
    "another number of classes": (
        statistics(labels=[2, 1, 0]),
        "bad-tensor",
        "statistics/counts has shape [2], expected [3]",
    ),
}


def test_honest_statistics_and_predictions_get_a_receipt(store: Store, client: Client) -> None:
    send(store, client, "statistics", "class_statistics", statistics())
    send(store, client, "statistics", "class_statistics", ClassStatistics(labels=[]))
    send(store, client, "predictions", "soft_predictions", predictions([0.5, 0.5, 0], [0, 0, 1]))
    assert [row["device"] for row in store.asks.uploads(RUN)] == [client.device] * 3


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_statistics_are_refused_with_the_documented_code(case: str, store: Store, client: Client) -> None:
    part, code, sentence = HOSTILE[case]
    with refused() as found:
        send(store, client, "statistics", "class_statistics", part)
    (refusal,) = found
    assert refusal.status is grpc.StatusCode.INVALID_ARGUMENT
    assert (refusal.reason, refusal.details["device"]) == (code, client.device)
    assert refusal.text == f"device {client.device}: {sentence}"
    assert (documented(sentence), code) in documented_refusals(TITLE)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([[1, 0, 0], [0, -0.5, 0]], "soft predictions -0.5 below 0 at row 1 of predictions/values"),
        ([[1, 0.5, 0]], "soft predictions sum to 1.5 at row 0 of predictions/values, expected at most 1.002"),
        (
            [[1, 0, 0], [0.25, 0.25, 0]],
            "soft predictions sum to 0.5 at row 1 of predictions/values, expected at least 0.998",
        ),
        ([[np.inf, 0, 0]], "non-finite soft predictions at row 0 of predictions/values"),
    ],
)
def test_hostile_predictions_are_refused_too(
    rows: list[list[float]], sentence: str, store: Store, client: Client
) -> None:
    with refused() as found:
        send(store, client, "predictions", "soft_predictions", predictions(*rows))
    (refusal,) = found
    assert (refusal.reason, refusal.text) == ("bad-value", f"device {client.device}: {sentence}")
    assert (documented(sentence), "bad-value") in documented_refusals(TITLE)
