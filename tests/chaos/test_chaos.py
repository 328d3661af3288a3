"""A small part of `make chaos`, and that its seeds bring what docs/explanation/durability.md says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from chaos import counting
from chaos.run import is_good, last_line, run_beyond_one_machine, run_scenario, run_seeds, summary
from chaos.scenario import ENGINE, FRONT, Action, Blow, scenario
from support.object_store import ObjectStore
from support.postgres import Postgres

SEEDS = range(1, 201)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    rows = list(run_seeds([6], tmp_path, jobs=1, mutation=""))
    assert all(is_good(row) for row in rows), rows
    assert all(row["kills"] > 0 for row in rows)
    assert sum(row["acknowledged"] for row in rows) > 10
    assert last_line(rows).endswith(f"0 lost, 0 doubled, {rows[0]['kills']} kills")
    assert "| runs of counting | 1 |" in summary(rows)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.s3
def test_three_killed_fronts_and_crashing_postgres_lose_nothing(
    postgres: Postgres, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)  # put back afterwards; the run sets its own
    row = run_beyond_one_machine(1, tmp_path / "run")
    assert is_good(row), row
    assert row["kills"] >= 3
    assert row["figures"]["restarts of PostgreSQL"] == 2
    assert row["acknowledged"] > 10


@pytest.mark.long
@pytest.mark.slow
def test_full_disks_cuts_stops_clocks_and_kills_lose_nothing(tmp_path: Path) -> None:
    """One of each between the kills of seed 7; the disk is filled where root runs the test."""
    troubles = (
        Blow(5, 0.0, Action.CUT, FRONT, 1.5),
        Blow(10, 0.0, Action.SET_CLOCK, FRONT, -7200.0),
        Blow(15, 0.0, Action.FILL, FRONT, 1.5),
        Blow(20, 0.0, Action.SET_CLOCK, ENGINE, 7200.0),
        Blow(25, 0.0, Action.SUSPEND, "device-01", 60.0),
        Blow(30, 0.0, Action.STOP, ENGINE, 3.0),
        Blow(35, 0.0, Action.SUSPEND, ENGINE, 30.0),
        Blow(40, 0.0, Action.CUT, "device-02", 1.5),
    )
    wanted = scenario(7)
    wanted = replace(wanted, blows=tuple(sorted([*wanted.blows, *troubles], key=lambda blow: blow.after)))
    row = run_scenario(wanted, tmp_path / "run")
    assert is_good(row), row
    assert row["kills"] > 0
    happened = {kind: row["figures"].get(f"times of {kind}", 0) for kind in ("cut", "set-clock", "suspend", "fill")}
    assert happened == {"cut": 2, "set-clock": 2, "suspend": 2, "fill": 1 if os.geteuid() == 0 else 0}


def test_a_seed_decides_everything() -> None:
    assert scenario(3) == scenario(3) != scenario(4)


def test_a_longer_run_has_more_of_everything() -> None:
    short, long = scenario(3), scenario(3, length=20)
    assert long.rounds == 20 * short.rounds
    assert len(long.blows) - 1 == 20 * (len(short.blows) - 1)
    assert long.max_seconds == 20 * short.max_seconds
    assert all(len(points) == 40 for points in long.failpoints.values())


def test_every_seed_kills_early_enough_to_meet_its_target() -> None:
    for seed in SEEDS:
        wanted = scenario(seed)
        first = next(blow for blow in wanted.blows if blow.action is Action.KILL)
        assert first.after <= len(wanted.devices) * wanted.rounds * wanted.steps / 4


def test_the_seeds_bring_both_methods_and_every_trouble() -> None:
    wanted = [scenario(seed) for seed in SEEDS]
    assert sum(item.method == "feddkc" for item in wanted) >= 20
    assert sum(item.method == counting.NAME for item in wanted) > 150
    assert {blow.action for item in wanted for blow in item.blows} == set(Action) - {Action.RESTART}
    assert any(blow.action is Action.STOP and blow.seconds > 30 for item in wanted for blow in item.blows)
    killed = {blow.target for item in wanted for blow in item.blows if blow.action is Action.KILL}
    assert {FRONT, ENGINE, "device-00", "device-07"} <= killed
    assert any(item.quorum < 0.5 for item in wanted)
    assert any(item.deadline_seconds == 1 for item in wanted)
