"""Worker processes compute what the simulation's process would, to the bit, also if some of them die."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulation.backends.dying_models import DYING, PARENT, deaths
from support.fleets import (
    HOSTILE,
    MECHANISMS,
    REPRODUCIBLE,
    RUNS,
    SMALL,
    Prepared,
    device_files,
    prepare,
    record,
    run_in_memory,
)
from support.long import long_except
from support.processes import children, wait_until
from support.undisturbed import Undisturbed

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill_lab import Simulation
from fleetdistill_lab.simulation.backends.choice import auto_line, backend_of, check_backend, min_ask_seconds
from fleetdistill_lab.simulation.backends.worker_processes import WorkerProcesses
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.links.links import run_over_memory
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
from fleetdistill_server.store.store import Store

FLEET = replace(DYING, models=())
WORKER = "fleetdistill_lab.simulation.backends.worker"


def run_with_workers(prepared: Prepared, workers: int, watch: Callable[[Store], None] = lambda store: None, **kw: Any):
    return run_over_memory(*prepared, watch, make_backend=partial(WorkerProcesses, workers), **kw)


def assert_same(one: Prepared, other: Prepared, first: Store, second: Store) -> None:
    with closing(first), closing(second):
        assert record(first) == record(second)
    assert device_files(one) == device_files(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(REPRODUCIBLE, "fedavg", long=MECHANISMS))
def test_every_method_gives_the_same_to_the_bit(tmp_path: Path, undisturbed: Undisturbed, name: str) -> None:
    alone, helped = undisturbed(name), prepare(RUNS[name], tmp_path / "helped")
    with closing(run_with_workers(helped, 2)) as store:
        assert record(store) == alone.record
    assert device_files(helped) == alone.files


@pytest.mark.parametrize(("workers", "max_open"), [(1, 1), (3, 256)])
def test_results_are_the_same_for_any_number_of_workers(tmp_path: Path, workers: int, max_open: int) -> None:
    alone, helped = (prepare(FLEET, tmp_path / kind) for kind in ("alone", "helped"))
    assert_same(alone, helped, run_in_memory(alone), run_with_workers(helped, workers, max_open=max_open))
    assert not children(os.getpid(), WORKER)


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "helps"), [(1e-9, True), (1e9, False)], ids=["slow asks", "fast asks"])
def test_workers_take_over_after_the_first_round(tmp_path: Path, seconds: float, helps: bool) -> None:
    """As with `workers = "auto"`, which measures the first round; the results are the same to the bit."""
    wanted = replace(FLEET, rounds=3)
    alone, helped = (prepare(wanted, tmp_path / kind) for kind in ("alone", "helped"))
    seen: dict[int, int] = {}

    def watch(store: Store) -> None:
        completed = store.runs.completed_rounds(RUN)
        seen[completed] = max(seen.get(completed, 0), len(children(os.getpid(), WORKER)))

    measured: list[float] = []
    options: dict[str, Any] = {"min_ask_seconds": seconds, "on_measured": measured.append}
    assert_same(alone, helped, run_in_memory(alone), run_with_workers(helped, 2, watch, **options))
    assert len(measured) == 1
    assert seen[0] == 0
    assert seen[1] == seen[2] == (2 if helps else 0)


@pytest.mark.parametrize(("workers", "processors", "made"), [("auto", 4, 3), ("auto", 1, 0), ("2", 1, 2), (0, 4, 0)])
def test_auto_has_a_worker_per_processor(
    workers: Any, processors: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetdistill_lab.simulation.backends.choice.usable_processors", lambda: processors)
    wanted = Simulation(devices=3, workers=workers)
    check_backend(wanted)
    backend = backend_of(wanted)
    assert (backend.args[0] if isinstance(backend, partial) else 0) == made
    assert (min_ask_seconds(wanted) > 0) == (workers == "auto")


@pytest.mark.parametrize(
    ("processors", "seconds", "line"),
    [
        (4, 0.0314, "workers auto: 3 processes, because an ask took 31.4 ms on average, at least 20 ms"),
        (4, 0.0012, "workers auto: none, because an ask took 1.2 ms on average, below 20 ms"),
        (1, 0.0314, "workers auto: none, because there is one processor, or one device; an ask took 31.4 ms on"),
    ],
)
def test_auto_says_what_it_chose_and_why(
    processors: int, seconds: float, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetdistill_lab.simulation.backends.choice.usable_processors", lambda: processors)
    wanted = Simulation(devices=3, workers="auto")
    assert auto_line(wanted, seconds).startswith(line)
    assert (backend_of(wanted) is not None and seconds >= min_ask_seconds(wanted)) == ("3 processes" in line)


@pytest.mark.parametrize(
    ("link", "workers", "lines"),
    [
        ("memory", "auto", 1),
        pytest.param("memory", 0, 0, marks=pytest.mark.long),
        pytest.param("memory", 1, 0, marks=pytest.mark.long),
        pytest.param("grpc", "auto", 1, marks=pytest.mark.long),
    ],
)
def test_the_choice_is_told_once(link: Any, workers: Any, lines: int, tmp_path: Path) -> None:
    told: list[str] = []
    simulate(replace(SMALL, rounds=3, link=link, workers=workers, out=tmp_path), tell=told.append)
    assert [line.partition(":")[0] for line in told] == ["workers auto"] * lines


@pytest.mark.parametrize(
    "settings", [{"workers": "all"}, {"workers": -1}, {"workers": 9}, {"workers": "auto", "backend": "ray"}]
)
def test_impossible_workers_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="workers"):
        check_backend(Simulation(devices=3, **settings))


def test_hostile_devices_are_computed_by_workers_too(tmp_path: Path) -> None:
    alone, helped = (prepare(replace(HOSTILE, rounds=1), tmp_path / kind) for kind in ("alone", "helped"))
    assert_same(alone, helped, run_in_memory(alone), run_with_workers(helped, 2))


def test_devices_in_simulated_time_are_computed_by_workers_too(tmp_path: Path) -> None:
    """One device goes away in the middle of the first round's training, and comes back."""
    gaps = ((0.0, 15.0, 1.0), (40.0, 1e6, 1.0))
    behaviour = FleetBehaviour(traces=(((0.0, 1e6, 1.0),), gaps), seconds_per_sample=0.0, seconds_per_ask=10.0)
    wanted = replace(FLEET, behaviour=behaviour, deadline_seconds=100.0)
    alone, helped = (prepare(wanted, tmp_path / kind) for kind in ("alone", "helped"))
    expected = run_over_memory(*alone, lambda store: None, behaviour=behaviour)
    assert_same(alone, helped, expected, run_with_workers(helped, 2, behaviour=behaviour))


def test_only_workers_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    due = deaths(tmp_path, monkeypatch, 1)
    monkeypatch.setenv(PARENT, "0")  # a training in this process would kill it
    with closing(run_with_workers(prepare(DYING, tmp_path / "work"), 1)):
        assert not list(due.iterdir())


@pytest.mark.long
def test_a_worker_that_dies_within_a_task_costs_one_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone, helped = (prepare(DYING, tmp_path / kind) for kind in ("alone", "helped"))
    due = deaths(tmp_path, monkeypatch, 1)
    expected = run_in_memory(alone)
    assert_same(alone, helped, expected, run_with_workers(helped, 2))
    assert not list(due.iterdir())
    assert [
        record.getMessage().partition("died with")[2] for record in caplog.records if "died with" in record.getMessage()
    ]


@pytest.mark.long
def test_a_worker_that_is_killed_in_each_round_is_replaced(tmp_path: Path) -> None:
    """Once a round, since a task is repeated once, and the tasks of a round are over before the next one begins."""
    fleet = replace(FLEET, rounds=3)
    alone, helped = (prepare(fleet, tmp_path / kind) for kind in ("alone", "helped"))
    killed: dict[int, int] = {}

    def kill(store: Store) -> None:
        number, result = store.runs.open_number(RUN), children(os.getpid(), WORKER)
        if number is not None and number not in killed and result:
            os.kill(result[0], 9)
            killed[number] = result[0]
            wait_until(lambda: result[0] not in children(os.getpid(), WORKER), "the worker to die")

    assert_same(alone, helped, run_in_memory(alone), run_with_workers(helped, 1, kill))
    assert len(set(killed.values())) == 3


@pytest.mark.long
def test_a_task_that_kills_two_workers_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(DYING, tmp_path / "work")
    deaths(tmp_path, monkeypatch, 2)
    with pytest.raises(RunError, match=r"two workers died while computing for device-0: .* died with signal 9"):
        run_with_workers(prepared, 1)
    assert not children(os.getpid(), WORKER)
    with closing(run_with_workers(prepared, 1)) as resumed:  # the due deaths are used up
        assert record(resumed)
