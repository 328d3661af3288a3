"""Devices of secure sums that are asked in any order."""

from __future__ import annotations

from typing import Any

import pytest
from chaos.secure_orders import play
from support.secure_fleet import SecureFleet

from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, UNMASK
from fleetdistill.state.secure_sessions import Steps


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["unsigned", "roster"])
@pytest.mark.parametrize(("fleets", "asks"), [(4, 250), pytest.param(25, 200, marks=pytest.mark.long)])
def test_no_order_of_asks_gets_too_much(tmp_path, keys, fleets, asks):
    answered: dict[str, int] = {}
    for seed in range(fleets):
        settings: dict[str, Any] = {"method": "classstats_summed", "keys": keys, "min_in_sum": 3}
        fleet = SecureFleet(tmp_path / str(seed), 4, refine="gradients", refine_steps=2, **settings)
        adversary = play(fleet, seed, asks)
        assert not adversary.wrong
        answered = {step: answered.get(step, 0) + count for step, count in adversary.answered.items()} | {
            step: count for step, count in answered.items() if step not in adversary.answered
        }
    asked = {KEYS, SHARES, INPUT, UNMASK, "refine"} | ({CHECK} if keys == "roster" else set())
    assert asked <= answered.keys(), answered


@pytest.mark.slow
def test_a_device_that_believes_too_long_is_found(tmp_path, monkeypatch):
    """One that takes the server's word that a sum failed in which it has given its shares."""
    monkeypatch.setattr(Steps, "may_be_finished", lambda steps, *, is_signed: is_signed and steps.has_input)
    found = []
    for seed in range(12):
        settings: dict[str, Any] = {"method": "classstats_summed", "keys": "unsigned", "min_in_sum": 3}
        fleet = SecureFleet(tmp_path / str(seed), 4, refine="gradients", refine_steps=2, **settings)
        found += play(fleet, seed, 250).wrong
    assert any("may be in two sums" in text for text in found)
