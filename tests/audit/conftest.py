"""What several tests of the audit use: digits, and runs of the digits' contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleetdistill_lab.audit.audit import Audit, attack
from fleetdistill_lab.audit.linkage import Scored, linkage
from fleetdistill_lab.audit.public_set import PublicSet, split_public
from fleetdistill_lab.audit.record import Attacker, Message, Rows
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.contract import build_method

MEMBERS = 30


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


def small(method: str, device: str = "", **settings) -> Audit:
    """Two devices with 120 rows together."""
    return Audit(config=run_of(method, device, **settings), data=load_dataset("digits"), devices=2, rows=120, rounds=1)


def message(sent=None, received=None, number=1) -> Message:
    return Message("device-0", number, "train", 0, received or {}, sent or {})


def attacker_of(public: PublicSet, method: str, device: str = "", **settings) -> Attacker:
    return Attacker(build_method(run_of(method, device, **settings)), public.attacker)


def linked(public: PublicSet, attacker: Attacker, messages, of=None) -> dict[tuple[str, str], float]:
    """The share of the first rows that are linked, by part and attack."""
    own, decoys = of or members_of(public, MEMBERS), public.decoys
    everything = Rows(torch.cat([own.inputs, decoys.inputs]), torch.cat([own.labels, decoys.labels]))
    scored = {
        part: [Scored(scores[row], scores[len(own) :][decoys.labels == own.labels[row]]) for row in range(len(own))]
        for part, scores in attack(messages, attacker, everything).items()
    }
    return {part: linkage(one).linked for part, one in scored.items()}
