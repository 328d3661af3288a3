"""What several tests of the audit use: digits, and runs of the digits' contract."""

from __future__ import annotations

from typing import Any

import pytest

from fleetdistill_lab.audit.public_set import PublicSet, split_public
from fleetdistill_lab.audit.record import Rows
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_server.config.run_config import RunConfig, run_config


@pytest.fixture(scope="session")
def public() -> PublicSet:
    return split_public(load_dataset("digits"), 200, seed=0)


def run_of(method: str, device: str = "", **settings: Any) -> RunConfig:
    return run_config(
        {
            "run": {"name": "audited", "method": method},
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
            "model": {"device": device},
            "method": settings,
            "server": {"torch_device": "cpu"},
        }
    )


def members_of(public: PublicSet, count: int) -> Rows:
    return Rows(public.fleet.train_images[:count], public.fleet.train_labels[:count])
