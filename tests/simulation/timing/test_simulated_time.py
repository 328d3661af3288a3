"""Runs in simulated time, with traces small enough to be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleets import MECHANISMS, REPRODUCIBLE, RUNS, SMALL, assert_no_upload_lost, outcome, prepare, record
from support.long import long_except

from fleetdistill.errors import RunError
from fleetdistill.methods import METHODS, config_class
from fleetdistill.methods.classstats_secure.exchange import INPUT, KEYS, SHARES, UNMASK
from fleetdistill_lab.simulation.links.links import run_over_memory
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
from fleetdistill_lab.simulation.timing.clock import START
from fleetdistill_server.figures import sums_of
from fleetdistill_server.store.store import Store

ALWAYS = ((0.0, 1e6, 1.0),)
FLEET = replace(SMALL, method="fedavg", devices=3, train_limit=90, models=("digits_linear",), deadline_seconds=100.0)


def behaviour(*traces: tuple[tuple[float, float, float], ...], **settings: Any) -> FleetBehaviour:
    """Ten seconds per ask, whatever the number of samples."""
    return FleetBehaviour(traces=traces, **{"seconds_per_sample": 0.0, "seconds_per_ask": 10.0, **settings})


def run(wanted: Simulation, work: Path) -> Store:
    return run_over_memory(*prepare(wanted, work), lambda store: None, behaviour=wanted.behaviour)


def rounds(store: Store) -> list[tuple[str, float, float]]:
    return [(row.status, row.started_at - START, (row.ended_at or 0.0) - START) for row in store.runs.rounds(RUN)]


def asks(store: Store, number: int, step: int = 1) -> dict[str, str]:
    """For each device, whether it answered an ask, or why not."""
    return {row.device[-1]: row.reason or row.status for row in store.asks.of_step(RUN, number, step)}


def test_a_round_lasts_as_long_as_its_slowest_device(tmp_path: Path) -> None:
    """Speeds 1, 2 and 0.5: 10, 5 and 20 s; the delivery at the end takes as long. Round 2 follows at once."""
    fast, slow = ((0.0, 1e6, 2.0),), ((0.0, 1e6, 0.5),)
    store = run(replace(FLEET, behaviour=behaviour(ALWAYS, fast, slow)), tmp_path / "work")
    assert rounds(store) == [("closed", 0.0, 20.0), ("closed", 20.0, 60.0)]
    received = {(row.round, row.device[-1]): row.received_at - START for row in store.asks.uploads(RUN)}
    assert [received[1, device] for device in "012"] == [10.0, 5.0, 20.0]
    store.close()


def test_work_takes_time_for_each_sample(tmp_path: Path) -> None:
    one = behaviour(ALWAYS, seconds_per_sample=0.5, seconds_per_ask=2.0)
    prepared = prepare(replace(FLEET, devices=1, rounds=1, behaviour=one), tmp_path / "work")
    store = run_over_memory(*prepared, lambda store: None, behaviour=one)
    train = 2.0 + 0.5 * prepared[1][0].rows
    assert rounds(store) == [("closed", 0.0, train + 2.0)], "training, and a delivery without training"
    store.close()


def test_late_device_misses_round_and_is_still_busy_in_next(tmp_path: Path) -> None:
    """Deadline 100 s, device 2 takes 150 s: late in round 1 at 100 s; round 2's ask waits until 150 s."""
    slow = ((0.0, 1e6, 1 / 15),)
    store = run(replace(FLEET, behaviour=behaviour(ALWAYS, ALWAYS, slow)), tmp_path / "work")
    assert asks(store, 1) == {"0": "answered", "1": "answered", "2": "deadline passed"}
    assert asks(store, 2) == {"0": "answered", "1": "answered", "2": "deadline passed"}
    status, started, ended = rounds(store)[0]
    assert (status, started, round(ended, 3)) == ("closed", 0.0, 100.0)
    late = [(row.round, row.device) for row in store.history.events(RUN, "late")]
    assert late[:2] == [(1, "device-2"), (2, "device-2")]
    work = (tmp_path / "work" / "store-work.csv").read_text().splitlines()
    begun = [row.split(",") for row in work if row.startswith("device-2")]
    assert [(item[1], float(item[3]), float(item[4])) for item in begun[:2]] == [("1", 0.0, 150.0), ("2", 150.0, 300.0)]
    store.close()


def test_the_fastest_of_more_devices_than_needed_end_the_round(tmp_path: Path) -> None:
    """Two of three are needed, all three are asked: 5 s and 10 s; device 2, with 20 s, is not waited for."""
    fast, slow = ((0.0, 1e6, 2.0),), ((0.0, 1e6, 0.5),)
    more = replace(FLEET, rounds=1, devices_per_round=2, over_selection=1.5, behaviour=behaviour(ALWAYS, fast, slow))
    store = run(more, tmp_path / "work")
    assert asks(store, 1) == {"0": "answered", "1": "answered", "2": "enough devices answered"}
    assert store.history.events(RUN, "late") == []
    assert sorted(row.received_at - START for row in store.asks.uploads(RUN) if row.step_number == 1) == [
        5.0,
        10.0,
    ]
    store.close()


def test_device_leaving_during_work_is_dropped_when_lease_ends(tmp_path: Path) -> None:
    """Device 2 goes after 4 s, in the middle of its work; its lease of 60 s ends at 64 s, long before the deadline."""
    wanted = replace(FLEET, rounds=1, behaviour=behaviour(ALWAYS, ALWAYS, ((0.0, 4.0, 1.0),)))
    store = run(wanted, tmp_path / "work")
    assert asks(store, 1) == {"0": "answered", "1": "answered", "2": "lease ended"}
    (event,) = store.history.events(RUN, "lease-ended")
    assert event.at - START == pytest.approx(64.0, abs=1e-3)
    assert rounds(store)[0][2] == pytest.approx(74.0, abs=1e-3), "and 10 s of delivery"
    store.close()


def test_device_returning_before_lease_ends_does_its_work_again(tmp_path: Path) -> None:
    """Device 2 is away from 4 s to 30 s, begins again and answers at 40 s."""
    wanted = replace(FLEET, rounds=1, behaviour=behaviour(ALWAYS, ALWAYS, ((0.0, 4.0, 1.0), (30.0, 1e6, 1.0))))
    store = run(wanted, tmp_path / "work")
    assert asks(store, 1) == dict.fromkeys("012", "answered")
    assert rounds(store) == [("closed", 0.0, 50.0)]
    store.close()


def test_an_idle_device_leaves_and_is_not_asked(tmp_path: Path) -> None:
    """Device 2 answers round 1 at 10 s, and leaves at 15 s; the round ends at 20 s, and round 2 asks the others."""
    wanted = replace(FLEET, behaviour=behaviour(ALWAYS, ((0.0, 1e6, 0.5),), ((0.0, 15.0, 1.0),)))
    store = run(wanted, tmp_path / "work")
    assert [row.cohort for row in store.runs.rounds(RUN)] == [
        ["device-0", "device-1", "device-2"],
        ["device-0", "device-1"],
    ]
    store.close()


def test_a_late_joiner_takes_part_from_the_next_round(tmp_path: Path) -> None:
    """Device 2 joins at 15 s, in round 2 (10 s to 20 s), so round 3 is its first."""
    wanted = replace(FLEET, rounds=3, behaviour=behaviour(ALWAYS, ALWAYS, ((15.0, 1e6, 1.0),)))
    store = run(wanted, tmp_path / "work")
    assert [len(row.cohort) for row in store.runs.rounds(RUN)] == [2, 2, 3]
    assert [start for _, start, _ in rounds(store)] == [0.0, 10.0, 20.0]
    store.close()


def test_rounds_that_fall_short_are_followed_by_pauses(tmp_path: Path) -> None:
    """All three are lost at 4 s and return at 70 s, after their leases; round 2 starts at 70 s."""
    trace = ((0.0, 4.0, 1.0), (70.0, 1e6, 1.0))
    store = run(replace(FLEET, rounds=1, behaviour=behaviour(trace)), tmp_path / "work")
    result = rounds(store)
    assert [status for status, _, _ in result] == ["short", "closed"]
    assert result[0][2] == pytest.approx(64.0, abs=1e-3)
    assert result[1][1:] == (70.0, 90.0)
    store.close()


def test_a_fleet_that_never_has_enough_devices_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no device will become available; lower min_devices"):
        run(replace(FLEET, min_devices=3, behaviour=behaviour(((0.0, 5.0, 1.0),), ALWAYS)), tmp_path / "gone")
    never = behaviour(((0.0, 40_000.0, 1.0),), ((50_000.0, 80_000.0, 1.0),), repeat_seconds=86_400.0)
    with pytest.raises(RunError, match="no round began for 30 simulated days"):
        run(replace(FLEET, min_devices=3, behaviour=never), tmp_path / "never")


# --- secure sums


SUMMING = [method for method in METHODS if config_class(method).sums_securely]


@pytest.mark.parametrize("method", long_except(SUMMING, "classstats_secure"))
@pytest.mark.parametrize(
    ("answered", "step"),
    [
        (0, KEYS),
        *(pytest.param(number, step, marks=pytest.mark.long) for number, step in enumerate([SHARES, INPUT, UNMASK], 1)),
    ],
)
def test_a_device_vanishes_by_its_trace(tmp_path: Path, method: str, answered: int, step: str) -> None:
    """Each ask takes 10 s: a device that is there for 10 k + 5 s answers k of them."""
    settings: dict[str, Any] = {"epsilon": 20.0} if method == "classstats_secure" else {}
    gone = ((0.0, 10.0 * answered + 5.0, 1.0),)
    wanted = replace(
        FLEET,
        method=method,
        settings={**settings, "min_in_sum": 4, "dimensions": 32},
        devices=5,
        rounds=1,
        train_limit=400,
        alpha=100.0,
        behaviour=behaviour(ALWAYS, ALWAYS, ALWAYS, ALWAYS, gone),
    )
    store = run(wanted, tmp_path / "work")
    (row,) = store.runs.rounds(RUN)
    (made,) = sums_of(row.figures).values()
    assert (made.failure, made.dropped) == ("", {step: ["device-4"]})
    assert made.inputs == (5 if step == UNMASK else 4)
    store.close()


# --- the same seed


CHURN = FleetBehaviour(compute="lognormal:0.8", seconds_per_ask=30.0, churn=100.0, away_seconds=120.0, join_late=0.4)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", long_except(REPRODUCIBLE, "classstats in one exchange", "fedavg", "feddkd", long=MECHANISMS)
)
def test_every_method_completes_its_rounds_in_a_fleet_with_churn(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train_limit": 150, "quorum": 0.5, "deadline_seconds": 90.0, "behaviour": CHURN}
    wanted = replace(RUNS[name], devices=5, min_devices=3, **settings)
    store = run(wanted, tmp_path / "work")
    assert store.runs.existing(RUN).status == "finished"
    assert_no_upload_lost(store)
    store.close()


def test_same_seed_gives_same_run_whatever_the_machine_does(tmp_path: Path) -> None:
    wanted = replace(FLEET, devices=5, rounds=3, min_devices=2, train_limit=150, deadline_seconds=60.0, behaviour=CHURN)
    stores = [run(wanted, tmp_path / name) for name in ("one", "same")]
    assert record(stores[0]) == record(stores[1])
    assert rounds(stores[0]) == rounds(stores[1])
    other = run(replace(wanted, seed=1), tmp_path / "other")
    assert rounds(other) != rounds(stores[0])
    for store in (*stores, other):
        store.close()


class Killed(BaseException):
    """Ends a simulation as a killed process would."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("events", "durable"),
    [
        (3, True),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(6, True), (9, True), (11, True), (3, False)]),
        (9, False),
    ],
)
def test_a_resumed_run_continues_at_its_simulated_time(events: int, durable: bool, tmp_path: Path) -> None:
    """Device 1 is still at work on an ask of the round before, and device 2 is away."""
    slow, lost = ((0.0, 1e6, 1 / 15),), ((0.0, 14.0, 1.0), (95.0, 1e6, 1.0))
    wanted = replace(FLEET, devices=4, rounds=3, train_limit=120, behaviour=behaviour(ALWAYS, slow, lost, ALWAYS))
    undisturbed = run(wanted, tmp_path / "undisturbed")
    prepared, left = prepare(wanted, tmp_path / "work"), events

    def kill(store: Store) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Killed

    with pytest.raises(Killed):
        run_over_memory(*prepared, kill, behaviour=wanted.behaviour, durable=durable)
    resumed = run_over_memory(*prepared, lambda store: None, behaviour=wanted.behaviour, durable=durable)
    assert outcome(resumed) == outcome(undisturbed)
    assert rounds(resumed) == rounds(undisturbed)
    assert [asks(resumed, number) for number in (1, 2, 3)] == [asks(undisturbed, number) for number in (1, 2, 3)]
    for store in (undisturbed, resumed):
        store.close()
