"""Every figure of a run on every surface, from one small store worked out by hand.

Two runs. In run `r` round 1 is closed and round 2 open: `a` has answered, `b` has an open ask. Run `other` has two open
asks. Uploads are compressed: 100 bytes of tensors and 10 of envelope become 40 and 10 on the link.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.run_figures import round_figures, run_figures
from fleetdistill_server.store.runs import Progress
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted
from fleetdistill_server.views import overview
from fleetdistill_server.views import runs as views

COMPRESSED = Counted(Counter(logits=100), Counter(logits=40))
"""Of one upload: tensor bytes, and their bytes on the link; its envelope has 10."""
DOWN = Counted(Counter(parameters=1000), Counter(parameters=700))


def opened_round(store: Store, run: str, devices: str) -> int:
    number = store.runs.start_round(run, list(devices))
    row: dict[str, Any] = {"run": run, "round": number, "step_number": 1, "step": "train", "expects": {}, "seed": 1}
    row |= {"payload": b"p" * 32, "payload_bytes": 1, "deadline_at": time.time() + 600}
    store.asks.add([Ask(**row, device=device) for device in devices])
    return number


def progress(store: Store, run: str) -> Progress:
    result = store.runs.progress(run, 0)
    assert result is not None
    return result


def answer(store: Store, number: int, device: str, right: int, rows: int) -> None:
    """One answer to a download, with the accuracy of the device's own rows."""
    ask = next(ask for ask in store.asks.of_step("r", number, 1) if ask.device == device)
    metric = Metric(name="accuracy", split="test", sum=right, count=rows)
    with store.transaction():
        store.asks.accept_upload(ask.id, 1, device.encode() * 32, rows, 1)
        store.history.add_traffic("r", number, device, "down", DOWN, 20)
        store.history.add_traffic("r", number, device, "up", COMPRESSED, 10)
        store.history.add_figures("r", number, device, Metrics(metrics=[metric]))


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store.in_memory()
    for run, devices in (("r", "ab"), ("other", "xy")):
        made.runs.begin(run, {"run": {"name": run, "method": "feddkc", "rounds": 9}})
        for device in devices:
            made.devices.register(run, device, b"", contract_pb2.DeviceProfile().SerializeToString())
    number = opened_round(made, "r", "ab")
    answer(made, number, "a", right=9, rows=10)
    answer(made, number, "b", right=10, rows=100)
    used = [ask.id for ask in made.asks.of_step("r", number, 1)]
    made.runs.close_round("r", number, b"", used, {"global_accuracy": 0.8})
    answer(made, opened_round(made, "r", "ab"), "a", right=7, rows=10)
    opened_round(made, "other", "xy")
    yield made
    made.close()


def test_a_round_shows_the_bytes_on_the_link(store: Store) -> None:
    """Up: 40 + 10 for each of two answers; down: 700 + 20. The open round has one of each."""
    for rows in (views.run(store, "r").lists["rounds"], overview.rounds(store, "r", 0).lists["rounds"]):
        assert [(row["bytes_up"], row["bytes_down"]) for row in rows] == [(100, 1440), (50, 720)]
    followed = progress(store, "r").rounds
    assert [(item.bytes_up, item.bytes_down) for item in followed] == [(100, 1440), (50, 720)]
    (glance,) = (row for row in overview.overview(store).lists["runs"] if row["run"] == "r")
    assert (glance["bytes_up"], glance["bytes_down"]) == (150, 2160)


def test_devices_have_raw_and_sent_bytes_also_of_open_round(store: Store) -> None:
    """`a` has answered twice, the second time in the round that is open; `b` once."""
    once = {"up": 110, "down": 1020, "envelope_bytes": 30, "up_sent": 50, "down_sent": 720}
    twice = {name: 2 * count for name, count in once.items()}
    assert views.run(store, "r").lists["bytes"] == [{"device": "a", **twice}, {"device": "b", **once}]


def test_kinds_have_bytes_before_compression_and_on_the_link(store: Store) -> None:
    kinds = {row["kind"]: row for row in views.run(store, "r").lists["bytes_by_kind"]}
    assert kinds["logits"] == {"kind": "logits", "up": 300, "down": 0, "up_sent": 120, "down_sent": 0}
    assert kinds["parameters"] == {"kind": "parameters", "up": 0, "down": 3000, "up_sent": 0, "down_sent": 2100}
    assert kinds["envelope"] == {"kind": "envelope", "up": 30, "down": 60, "up_sent": 30, "down_sent": 60}
    by_round = overview.traffic(store, "r", 0).lists["bytes"]
    assert [row for row in by_round if row["kind"] == "logits" and row["round"] == 1] == [
        {"round": 1, "kind": "logits", "up": 200, "down": 0, "up_sent": 80, "down_sent": 0}
    ]


def test_an_accuracy_is_the_mean_over_devices_of_whatever_size(store: Store) -> None:
    """Of 0.9 on 10 rows and 0.1 on 100 rows: 0.5 over devices; over rows it would be 0.173."""
    assert views.run(store, "r").lists["rounds"][0]["test_accuracy"] == 0.5
    assert progress(store, "r").rounds[0].test_accuracy == pytest.approx(0.5)
    (result,) = (figure for figure in run_figures(store.database, 10) if figure.name == "r")
    assert result.last is not None
    assert result.last == round_figures(store.database, "r", 1, 1)[0]
    assert result.last.test_accuracy == pytest.approx(0.5)
    assert result.last.global_accuracy == 0.8


def test_present_devices_and_short_rounds_are_those_of_now(store: Store) -> None:
    """Round 2 and 3 fall short, 4 closes, 5 and 6 fall short; of three devices one has left."""
    store.devices.register("r", "c", b"", contract_pb2.DeviceProfile().SerializeToString())
    store.devices.mark_absent("r", "c", "it left")
    store.runs.close_short_round("r", 2, "too few")
    for number in (3, 4, 5, 6):
        opened_round(store, "r", "ab")
        if number == 4:
            store.runs.close_round("r", number, b"", [], {})
        else:
            store.runs.close_short_round("r", number, "too few")
    (result,) = (figure for figure in run_figures(store.database, 10) if figure.name == "r")
    assert (result.present, result.short_rounds) == (2, 2)


def test_each_run_counts_its_own_asks(store: Store) -> None:
    result = {figure.name: figure.asks for figure in run_figures(store.database, 10)}
    assert result == {
        "r": {"open": 1, "answered": 1, "out": 0},
        "other": {"open": 2, "answered": 0, "out": 0},
    }
    steps = {run: progress(store, run).steps for run in ("r", "other")}
    assert [(row["asked"], row["answered"]) for run in ("r", "other") for row in steps[run]] == [(2, 1), (2, 0)]


def test_answers_that_a_round_did_not_use_are_counted_apart() -> None:
    """Three devices answer; the method uses two of the answers."""
    made = Store.in_memory()
    made.runs.begin("r", {"run": {"name": "r", "method": "feddkc", "rounds": 9}})
    for device in "abc":
        made.devices.register("r", device, b"", contract_pb2.DeviceProfile().SerializeToString())
    number = opened_round(made, "r", "abc")
    for device in "abc":
        answer(made, number, device, right=1, rows=10)
    used = [ask.id for ask in made.asks.of_step("r", number, 1)][:2]
    made.runs.close_round("r", number, b"", used, {})
    (row,), (figures,) = views.run(made, "r").lists["rounds"], progress(made, "r").rounds
    assert (row["used"], row["reported"]) == figures.answers[:2] == (2, 1)
    made.close()
