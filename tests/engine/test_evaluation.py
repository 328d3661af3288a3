"""`[evaluation] every`: the rounds after which the engine scores the global model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.fleets import SMALL, Prepared, prepare, run_in_memory

from fleetdistill_lab.simulation.links.links import run_over_memory
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.section import as_toml, read_toml
from fleetdistill_server.store.store import Store

FLEET = replace(SMALL, method="fedavg", models=("digits_linear",), rounds=5)
FIGURES = {"global_accuracy", "global_confusion"}


def scored_every(every: int, prepared: Prepared) -> Prepared:
    config, specs, work = prepared
    evaluation = config.evaluation.model_copy(update={"every": every})
    return config.model_copy(update={"evaluation": evaluation}), specs, work


def scored(store: Store) -> list[int]:
    """Numbers of the rounds with a score; each has all figures of it, or none."""
    rows = store.runs.rounds(RUN)
    assert all(len(FIGURES & row.figures.keys()) in (0, 2) for row in rows)
    return [row.number for row in rows if row.figures.keys() >= FIGURES]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (1, [1, 2, 3, 4, 5]),
        (2, [2, 4, 5]),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((3, [3, 5]), (4, [4, 5]), (5, [5]), (6, [5]))),
        (1000, [5]),
    ],
)
def test_every_so_many_rounds_and_the_last_are_scored(every: int, expected: list[int], tmp_path: Path) -> None:
    with closing(run_in_memory(scored_every(every, prepare(FLEET, tmp_path / "work")))) as store:
        assert scored(store) == expected
        assert [row.status for row in store.runs.rounds(RUN)] == ["closed"] * 5


def test_scores_of_fewer_rounds_are_those_of_every_round(tmp_path: Path) -> None:
    found = []
    for every in (1, 2):
        with closing(run_in_memory(scored_every(every, prepare(FLEET, tmp_path / str(every))))) as store:
            found.append({row.number: row.figures.get("global_confusion") for row in store.runs.rounds(RUN)})
            checkpoint = store.runs.existing(RUN).checkpoint
            found[-1][0] = checkpoint.hex()
    assert found[1] == {number: counts if number in (0, 2, 4, 5) else None for number, counts in found[0].items()}


def test_a_round_that_falls_short_does_not_count(tmp_path: Path) -> None:
    """The second round falls short while a device is away, so that the third is the second to complete."""
    always, gap = ((0.0, 1e6, 1.0),), ((0.0, 15.0, 1.0), (60.0, 1e6, 1.0))
    behaviour = FleetBehaviour(traces=(always, gap), seconds_per_sample=0.0, seconds_per_ask=10.0)
    wanted = replace(FLEET, rounds=3, behaviour=behaviour, deadline_seconds=30.0, quorum=1.0)
    prepared = scored_every(2, prepare(wanted, tmp_path / "work"))
    with closing(run_over_memory(*prepared, lambda store: None, behaviour=behaviour)) as store:
        statuses = [row.status for row in store.runs.rounds(RUN)]
        closed = [row.number for row in store.runs.rounds(RUN) if row.status == "closed"]
        assert "short" in statuses
        assert len(closed) == 3
        assert scored(store) == closed[1:]


def test_the_setting_is_kept_in_a_file(tmp_path: Path) -> None:
    given = {"run": {"name": "a"}, "contract": {"classes": 2, "input_shape": [1, 8, 8]}, "evaluation": {"every": 7}}
    file = tmp_path / "run.toml"
    file.write_text(as_toml(run_config(given)))
    assert run_config(read_toml(file)).evaluation.every == 7
    assert run_config({**given, "evaluation": {}}).evaluation.every == 1
