"""Figures of runs: bounded in number, exact, and absent while the store is away."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from fleetdistill import knowledge
from fleetdistill_console.metrics.runs import MAX_RUNS, STATES, RunsCollector
from fleetdistill_server.figures import SumFigures
from fleetdistill_server.intake.operator_log import local_call
from fleetdistill_server.service import run_changes, serve_lock
from fleetdistill_server.store.operator_calls import BEGUN, Outcome
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.results import backed_up


def values(collector: RunsCollector, name: str) -> dict[str, float]:
    """Values of a metric by its run."""
    result: list[Metric] = [item for item in collector.collect() if item.samples[0].name == name]
    return {sample.labels.get("run", ""): sample.value for item in result for sample in item.samples}


def test_only_the_newest_runs_have_figures_of_their_own(tmp_path: Path) -> None:
    store, clock = Store.open(tmp_path), [0.0]
    store.database.now = lambda: clock[0]
    for number in range(MAX_RUNS + 5):
        clock[0] = float(number)
        store.runs.begin(f"run-{number}", {})
        if number != 0:
            store.runs.set_status(f"run-{number}", RunStatus.FINISHED, "")
    collector = RunsCollector(tmp_path)
    present = values(collector, "fleetdistill_devices_present")
    assert set(present) == {"run-0", *(f"run-{number}" for number in range(6, MAX_RUNS + 5))}, "the oldest still runs"
    collector.close()
    store.close()


def test_the_newest_complete_backup_has_its_time(tmp_path: Path) -> None:
    store, clock = Store.open(tmp_path), [0.0]
    store.database.now = lambda: clock[0]
    collector = RunsCollector(tmp_path, clock=lambda: clock[0])
    assert values(collector, "fleetdistill_last_backup_timestamp_seconds") == {}
    for at, call, result in (
        (100.0, "BackUp", Outcome(text="{}").words),
        (200.0, "BackUp", "failed: the disk is full"),
        (300.0, "BackUp", BEGUN),
        (400.0, "DeleteRun", Outcome().words),
        (500.0, "BackUp", Outcome(text=backed_up(3, 9000, 2)).words),
    ):
        clock[0] = at
        store.operator_calls.add(local_call(call, {}), result)
    assert values(collector, "fleetdistill_last_backup_timestamp_seconds") == {"": 100.0}
    collector.close()
    store.close()


def test_the_last_round_has_each_accuracy_under_its_name(tmp_path: Path) -> None:
    """The devices' mean is that of the last round, 0.5 of 0.9 and 0.1; the server's model has 0.8."""
    store = Store.open(tmp_path)
    store.runs.begin("digits", {"run": {"method": "feddkc", "rounds": 3}})
    for right, globally in ((10, 0.3), (9, 0.8)):
        number = store.runs.start_round("digits", ["a", "b"])
        for device, sum_ in (("a", right), ("b", 10 - right)):
            metric = knowledge.Metric(name="accuracy", split="test", sum=sum_, count=10)
            store.history.add_figures("digits", number, device, knowledge.Metrics(metrics=[metric]))
        store.runs.close_round("digits", number, b"", [], {"global_accuracy": globally})
    collector = RunsCollector(tmp_path)
    assert values(collector, "fleetdistill_last_round_accuracy_ratio") == {"digits": 0.5}
    assert values(collector, "fleetdistill_last_round_global_accuracy_ratio") == {"digits": 0.8}
    collector.close()
    store.close()


def test_a_run_that_tries_in_vain_says_since_when(tmp_path: Path) -> None:
    store, clock = Store.open(tmp_path), [100.0]
    store.database.now = lambda: clock[0]
    collector = RunsCollector(tmp_path, clock=lambda: clock[0])
    store.runs.begin("digits", {"run": {"method": "fedavg", "rounds": 3, "deadline_seconds": 60.0}})
    name = "fleetdistill_run_unfinished_since_timestamp_seconds"
    assert values(collector, name) == {}
    for at in (200.0, 300.0):
        clock[0] = at
        store.runs.close_short_round("digits", store.runs.start_round("digits", ["d0"]), "nobody answered")
    clock[0] = 400.0
    assert values(collector, name) == {"digits": 200.0}
    clock[0] = 500.0
    assert values(collector, "fleetdistill_run_short_rounds") == {"digits": 2.0}
    store.runs.start_round("digits", ["d0"])
    clock[0] = 600.0
    assert values(collector, "fleetdistill_run_short_rounds") == {"digits": 2.0}, "an open round is not short yet"
    collector.close()
    store.close()


def test_the_settings_and_the_last_round_of_a_run_are_figures(tmp_path: Path) -> None:
    """A completed round from 200 s to 210 s, and a short one after it."""
    store, clock = Store.open(tmp_path), [100.0]
    store.database.now = lambda: clock[0]
    store.runs.begin("digits", {"run": {"method": "fedavg", "rounds": 3, "deadline_seconds": 60.0}})
    for at, short in ((200.0, False), (300.0, True)):
        clock[0] = at
        number = store.runs.start_round("digits", ["d0"])
        clock[0] = at + 10
        if short:
            store.runs.close_short_round("digits", number, "nobody answered")
        else:
            store.runs.close_round("digits", number, b"", [], {})
    collector = RunsCollector(tmp_path)
    shown = {
        "run_wanted_rounds": 3.0,
        "run_deadline_seconds": 60.0,
        "run_completed_rounds": 1.0,
        "run_last_completed_timestamp_seconds": 210.0,
        "last_round_duration_seconds": 10.0,
    }
    assert {name: values(collector, f"fleetdistill_{name}")["digits"] for name in shown} == shown
    collector.close()
    store.close()


def test_figures_are_read_anew_after_two_seconds(tmp_path: Path) -> None:
    store, clock = Store.open(tmp_path), [0.0]
    collector = RunsCollector(tmp_path, clock=lambda: clock[0])
    store.runs.begin("first", {})
    seen = []
    for at in (10.0, 11.9, 12.0):
        clock[0] = at
        seen.append(set(values(collector, "fleetdistill_devices_present")))
        store.runs.begin(f"after {at:g} s", {})
    assert seen == [{"first"}, {"first"}, {"first", "after 10 s", "after 11.9 s"}]
    collector.close()
    store.close()


def test_accuracy_and_loss_are_those_of_their_split(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.runs.begin("digits", {})
    figures = [("accuracy", "test", 9), ("accuracy", "train", 10), ("loss", "test", 21), ("loss", "train", 3)]
    metrics = [knowledge.Metric(name=name, split=split, sum=sum, count=10) for name, split, sum in figures]
    number = store.runs.start_round("digits", ["d0"])
    store.history.add_figures("digits", number, "d0", knowledge.Metrics(metrics=metrics))
    store.runs.close_round("digits", number, b"", [], {})
    collector = RunsCollector(tmp_path)
    result = {item.name.removeprefix("fleetdistill_last_round_"): item.samples for item in collector.collect()}
    shown = {name: {item.labels["split"]: item.value for item in result[name]} for name in ("accuracy_ratio", "loss")}
    assert shown == {"accuracy_ratio": {"test": 0.9, "train": 1.0}, "loss": {"test": 2.1, "train": 0.3}}
    collector.close()
    store.close()


def sum_figures(**changes: Any) -> dict[str, Any]:
    """A sum of four of five devices in 2.5 s."""
    made = SumFigures(
        asked=5,
        keys=5,
        boxes=5,
        inputs=4,
        signatures=None,
        shares=4,
        min_devices=4,
        threshold=4,
        noise_shares=4,
        dropped={"secure_input": ["d4"]},
        seconds=2.5,
        failure="",
    )
    return asdict(replace(made, **changes))


def test_secure_sums_are_counted_and_the_last_one_described(tmp_path: Path) -> None:
    """Two sums of a round that is closed, a failed one of a short round, and one of a round that is open."""
    store = Store.open(tmp_path)
    for name in ("sums", "other"):
        store.runs.begin(name, {})
    collector = RunsCollector(tmp_path, clock=iter(range(0, 100, 10)).__next__)
    assert values(collector, "fleetdistill_secure_sums_total") == {}
    number = store.runs.start_round("sums", ["d0"])
    for group in (1, 2):
        store.history.add_event("sums", "secure-sum", f"group {group}", number=number)
    store.runs.close_round("sums", number, b"", [], {"secure_sums": {"1": sum_figures(), "2": sum_figures(asked=6)}})
    number = store.runs.start_round("sums", ["d0"])
    store.history.add_event("sums", "secure-sum-failed", "too few", number=number)
    failed = sum_figures(inputs=3, shares=None, seconds=1.5, failure="too few")
    store.runs.close_short_round("sums", number, "too few", {"secure_sums": {"1": failed}})
    number = store.runs.start_round("sums", ["d0"])
    store.history.add_event("sums", "secure-sum", "group 1", number=number)
    read = {item.samples[0].name.removeprefix("fleetdistill_"): item.samples for item in collector.collect()}
    assert {sample.labels["outcome"]: sample.value for sample in read["secure_sums_total"]} == {"made": 3, "failed": 1}
    assert {sample.labels["state"]: sample.value for sample in read["last_secure_sum_devices"]} == {
        "asked": 5,
        "keys": 5,
        "boxes": 5,
        "inputs": 3,
        "min_devices": 4,
        "threshold": 4,
    }
    (seconds,) = read["last_secure_sum_duration_seconds"]
    assert (seconds.labels, seconds.value) == ({"run": "sums"}, 1.5)
    collector.close()
    store.close()


def test_a_run_that_waits_says_for_what(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for name, waits_for in (("works", None), ("lonely", 2), ("idle", 0), ("next", None), ("over", None)):
        store.runs.begin(name, {})
        store.run_control.set_setup(name, {})
        store.run_control.activate(name)
        if waits_for is not None:
            store.run_control.begin_wait(name, waits_for)
    store.runs.set_status("over", RunStatus.FINISHED, "")
    with serve_lock.take(tmp_path, "", 3):
        collector = RunsCollector(tmp_path)
        result = {item.name: item.samples for item in collector.collect()}
        collector.close()
    statuses = {
        "works": "preparing",
        "lonely": "waiting for devices",
        "idle": "idle",
        "next": "queued",
        "over": "finished",
    }
    assert {item.labels["run"]: item.labels["status"] for item in result["fleetdistill_run_info"]} == statuses
    counts = {item.labels["status"]: item.value for item in result["fleetdistill_runs"]}
    assert counts == dict.fromkeys(STATES, 0) | dict.fromkeys(statuses.values(), 1)
    store.close()


def test_a_run_whose_engine_failed_is_not_as_one_stopped(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for name in ("asked", "broke"):
        store.runs.begin(name, {"run": {"name": name, "method": "fedavg"}})
        store.run_control.activate(name)
    token = store.run_control.assign("broke")
    assert token is not None
    store.run_control.stop_failed("broke", token, "division by zero")
    run_changes.change(store, "asked", RunStatus.STOPPED)
    collector = RunsCollector(tmp_path)
    shown = {metric.name: metric for metric in collector.collect()}
    info = {sample.labels["run"]: sample.labels["status"] for sample in shown["fleetdistill_run_info"].samples}
    counts = {sample.labels["status"]: sample.value for sample in shown["fleetdistill_runs"].samples if sample.value}
    assert (info, counts) == ({"asked": "stopped", "broke": "failed"}, {"stopped": 1, "failed": 1})
    collector.close()
    store.close()


def test_a_store_that_cannot_be_read_says_so_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no directory")
    result = list(RunsCollector(tmp_path / "store").collect())
    assert [(item.name, [sample.value for sample in item.samples]) for item in result] == [
        ("fleetdistill_store_up", [0])
    ]
