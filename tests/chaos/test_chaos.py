"""A small part of `make chaos`, and that its seeds bring what docs/explanation/durability.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import counting
from chaos.run import is_good, last_line, run_beyond_one_machine, run_seeds, summary
from chaos.scenario import ENGINE, FRONT, Action, scenario
from support.object_store import ObjectStore
from support.postgres import Postgres

SEEDS = range(1, 201)


@pytest.mark.slow
def test_a_run_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    rows = list(run_seeds([6], tmp_path, jobs=1, mutation=""))
    assert all(is_good(row) for row in rows), rows
    assert all(row["kills"] > 0 for row in rows)
    assert sum(row["acknowledged"] for row in rows) > 10
    assert last_line(rows).endswith(f"0 lost, 0 doubled, {rows[0]['kills']} kills")
    assert "| runs of counting | 1 |" in summary(rows)


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.s3
def test_three_fronts_lose_nothing_when_each_is_killed_and_postgres_crashes(
    postgres: Postgres, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)  # put back afterwards; the run sets its own
    row = run_beyond_one_machine(1, tmp_path / "run")
    assert is_good(row), row
    assert row["kills"] >= 3
    assert row["figures"]["restarts of PostgreSQL"] == 2
    assert row["acknowledged"] > 10


def test_a_seed_decides_everything() -> None:
    assert scenario(3) == scenario(3) != scenario(4)


def test_every_seed_kills_early_enough_to_meet_its_target() -> None:
    for seed in SEEDS:
        wanted = scenario(seed)
        first = next(blow for blow in wanted.blows if blow.action is Action.KILL)
        assert first.after <= len(wanted.devices) * wanted.rounds * wanted.steps / 4


def test_the_seeds_bring_both_methods_and_every_trouble() -> None:
    wanted = [scenario(seed) for seed in SEEDS]
    assert sum(one.method == "feddkc" for one in wanted) >= 20
    assert sum(one.method == counting.NAME for one in wanted) > 150
    assert {blow.action for one in wanted for blow in one.blows} == {Action.KILL, Action.STOP, Action.DAMAGE}
    killed = {blow.target for one in wanted for blow in one.blows if blow.action is Action.KILL}
    assert {FRONT, ENGINE, "device-00", "device-07"} <= killed
    assert any(one.quorum < 0.5 for one in wanted)
    assert any(one.deadline_seconds == 1 for one in wanted)
