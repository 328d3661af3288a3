"""Two processes that train together, over gloo: the same result as one process, within rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import join_all, save_trained, start_ranks, trained
from torch.testing import assert_close

from fleetdistill.state.state_file import unpack_state

NONE = -1
CASES = [("convolutions", NONE), ("batch-norm", NONE), ("whole convolutions", NONE), ("convolutions", 1)]
"""Networks, and the process that runs out of memory in its first step."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    join_all(start_ranks(2, save_trained, out, CASES))
    return out


@pytest.mark.parametrize(("name", "failing"), CASES)
def test_two_processes_train_as_one(name: str, failing: int, results: Path) -> None:
    expected = trained(name)
    found = [unpack_state((results / f"{name} {failing} {rank}").read_bytes()) for rank in range(2)]
    for one in found:
        assert one["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for weight, value in expected["model"].items():
            assert_close(one["model"][weight], value, atol=1e-5, rtol=1e-4)
    for weight, value in found[0]["model"].items():
        assert torch.equal(value, found[1]["model"][weight]), weight
    assert torch.equal(found[0]["draw"], found[1]["draw"])  # what is drawn after the training
