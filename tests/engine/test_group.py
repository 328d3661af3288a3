"""An engine of two processes: whole runs, with the result of one process within rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fleets import RUNS, Prepared, prepare, run_in_memory
from support.ranks import join_all, run_fleets, start_ranks
from torch import Tensor
from torch.testing import assert_close

from fleetdistill.state.state_file import unpack_state
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.engine_config import EngineSection
from fleetdistill_server.store.store import Store

NAMES = ["feddkc", "fedd2s with heads", "cdkt", "dafkd distilling"]
"""Runs whose server half trains, each in another way."""


SHARDED = ["feddkc", "fedd2s with heads"]
"""Runs that are repeated with sharded weights; FedD2S trains some of a network's layers."""


def prepared(name: str, work: Path, sharding: str = "none") -> Prepared:
    config, specs, work = prepare(replace(RUNS[name], knowledge_type="float32"), work)
    engine = EngineSection.model_validate({"processes": 2, "sharding": sharding})
    return config.model_copy(update={"engine": engine}), specs, work


def states(store: Store) -> Mapping[str, Any]:
    row = store.runs.get(RUN)
    assert row is not None
    assert row.status == "finished"
    result: Mapping[str, Any] = unpack_state(store.blobs.get_state(row.checkpoint))
    return result


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Prepared]:
    work = tmp_path_factory.mktemp("together")
    result = {(name, "none"): prepared(name, work / name) for name in NAMES}
    result |= {(name, "full"): prepared(name, work / f"{name} sharded", "full") for name in SHARDED}
    join_all(start_ranks(2, run_fleets, list(result.values())))
    return result


def assert_near(expected: Any, found: Any) -> None:
    if isinstance(expected, Tensor) and expected.is_floating_point():
        assert_close(found, expected, atol=5e-3, rtol=5e-3)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_near(value, found[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert_near(one, other)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sharding"), [*((name, "none") for name in NAMES), *((name, "full") for name in SHARDED)]
)
def test_a_run_of_two_processes_ends_as_that_of_one(
    name: str, sharding: str, fleets: Mapping[tuple[str, str], Prepared], tmp_path: Path
) -> None:
    alone = run_in_memory(prepared(name, tmp_path / "alone"))
    together = Store.open(Path(fleets[name, sharding][0].server.store))
    assert_near(states(alone), states(together))
    for store in (alone, together):
        store.close()
