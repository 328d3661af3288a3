"""Devices of secure sums that are asked in any order."""

from __future__ import annotations

from typing import Any

import pytest
from chaos.secure_orders import play
from support.long import long_except
from support.secure_fleet import SecureFleet

from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, UNMASK
from fleetdistill.state.privacy_ledger import PrivacyBudget, PrivacyLedger, Release
from fleetdistill.state.secure_sessions import Steps


@pytest.mark.slow
@pytest.mark.parametrize("keys", long_except(["unsigned", "roster"], "unsigned"))
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
@pytest.mark.long
@pytest.mark.parametrize("keys", long_except(["unsigned", "roster"], "unsigned"))
@pytest.mark.parametrize("epsilon", [5.0, pytest.param(20.0, marks=pytest.mark.long)])
@pytest.mark.parametrize(("fleets", "asks"), [(5, 250), pytest.param(25, 250, marks=pytest.mark.long)])
def test_no_order_of_asks_gets_past_the_ledger(tmp_path, keys, epsilon, fleets, asks):
    """With noise and a budget of one sum, or of some: each sum that a device has sent to is in its ledger, once."""
    answered, releases = set[str](), set[int]()
    for seed in range(fleets):
        budget = PrivacyBudget(epsilon, 1e-5)
        fleet = SecureFleet(tmp_path / str(seed), 4, keys=keys, min_in_sum=3, budget=budget)
        adversary = play(fleet, seed, asks)
        assert not adversary.wrong
        answered |= adversary.answered.keys()
        ledgers = [PrivacyLedger(fleet.files(name)) for name in fleet.names]
        assert all(ledger.spent(1e-5) <= epsilon * (1 + 1e-6) for ledger in ledgers)
        releases |= {len(ledger.releases) for ledger in ledgers}
    assert {KEYS, SHARES, INPUT, UNMASK} | ({CHECK} if keys == "roster" else set()) <= answered
    assert max(releases) == 1 if epsilon == 5.0 else max(releases) > 1


def test_a_device_that_charges_another_sum_is_found(tmp_path, monkeypatch):
    record = PrivacyLedger.record

    def misname(ledger: PrivacyLedger, **entry: Any) -> Release:
        return record(ledger, **{**entry, "sum": "00" * 32})

    monkeypatch.setattr(PrivacyLedger, "record", misname)
    adversary = play(SecureFleet(tmp_path, 4, min_in_sum=3), 0, 60)
    assert adversary.answered[INPUT]
    assert "and has 1 releases in its ledger" in adversary.wrong[0]


@pytest.mark.slow
@pytest.mark.long
def test_a_device_that_believes_too_long_is_found(tmp_path, monkeypatch):
    """One that takes the server's word that a sum failed in which it has given its shares."""
    monkeypatch.setattr(Steps, "may_be_finished", lambda steps, *, is_signed: is_signed and steps.has_input)
    found = []
    for seed in range(12):
        settings: dict[str, Any] = {"method": "classstats_summed", "keys": "unsigned", "min_in_sum": 3}
        fleet = SecureFleet(tmp_path / str(seed), 4, refine="gradients", refine_steps=2, **settings)
        found += play(fleet, seed, 250).wrong
    assert any("may be in two sums" in text for text in found)
