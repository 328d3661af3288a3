"""Two processes that train together, over gloo: the same result as one process, within rounding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import OnePoint, join_all, save_error, save_resumed, save_trained, start_ranks, trained
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError
from fleetdistill.state.state_file import unpack_state
from fleetdistill_server.config.run_config import run_config

NONE = -1
SHARDED: Mapping[str, Any] = {"sharding": "full"}
CASES: list[tuple[str, int, Mapping[str, Any]]] = [
    ("convolutions", NONE, {}),
    ("batch-norm", NONE, {}),
    ("whole convolutions", NONE, {}),
    ("convolutions", 1, {}),
    ("convolutions", NONE, SHARDED),
    ("batch-norm", NONE, SHARDED),
    ("whole convolutions", NONE, SHARDED),
    ("convolutions", NONE, {**SHARDED, "micro_batch": 1}),
    ("convolutions", NONE, {**SHARDED, "channels_last": True, "compile": "on"}),
    ("own weights", NONE, SHARDED),
    ("shared weights", NONE, SHARDED),
]
"""Networks, the process that runs out of memory in its first step, and further settings."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    join_all(start_ranks(2, save_trained, out, CASES))
    return out


def assert_trained_as(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for part in ("model", "momentum"):
        assert found[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            assert_close(found[part][name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(CASES)))
def test_two_processes_train_as_one(number: int, results: Path) -> None:
    name, _, settings = CASES[number]
    expected, sharded = trained(name), settings.get("sharding") == "full"
    result = [unpack_state((results / f"{number} {rank}").read_bytes()) for rank in range(2)]
    for item in result:
        assert_trained_as(expected, item)
    for weight, value in result[0]["model"].items():
        assert torch.equal(value, result[1]["model"][weight]), weight
    assert torch.equal(result[0]["draw"], result[1]["draw"])  # what is drawn after the training
    if name in {"convolutions", "batch-norm"}:
        held = [item["held"] for item in result]
        assert sum(held) == expected["held"] * (1 if sharded else 2)
        assert max(held) - min(held) < expected["held"] / 4


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, SHARDED])
def test_a_resume_point_of_two_processes_has_the_whole_state(settings: Mapping[str, Any], tmp_path: Path) -> None:
    """Two processes continue from it, and so does one."""
    join_all(start_ranks(2, save_resumed, tmp_path, "batch-norm", settings))
    expected = trained("batch-norm")
    point = unpack_state((tmp_path / "point").read_bytes())
    result = [unpack_state((tmp_path / f"{rank}").read_bytes()) for rank in range(2)]
    result.append(trained("batch-norm", storage=OnePoint((point["key"], point["state"]))))
    for item in result:
        assert item["steps"] == expected["steps"] - 7
        assert_trained_as(expected, item)


def test_a_process_that_ends_ends_the_others_with_a_clear_error(tmp_path: Path) -> None:
    join_all(start_ranks(2, save_error, tmp_path))
    assert (tmp_path / "error").read_text().startswith("another process of the engine ended during a round; ")


def test_sharding_needs_several_processes() -> None:
    run = {"run": {"name": "r"}, "contract": {"classes": 3, "input_shape": [2, 4, 4]}, "engine": SHARDED}
    with pytest.raises(
        ConfigurationError, match="sharding = 'full' needs several processes; set processes to at least 2"
    ):
        run_config(run)
