"""The ledger of private releases: what it counts, refuses and survives."""

from __future__ import annotations

import json
import math

import pytest

from fleetdistill.errors import ConfigurationError, PrivacyBudgetError, StateError
from fleetdistill.privacy.accountant import (
    compose,
    discrete_mu_for,
    epsilon_for,
    epsilon_for_zcdp,
    mu_for,
    zcdp_delta,
)
from fleetdistill.state import failpoints
from fleetdistill.state.files import Files
from fleetdistill.state.privacy_ledger import PrivacyBudget, PrivacyLedger, fingerprint
from fleetdistill.state.secure_sessions import SecureSession, SecureSessions

DELTA = 1e-5
ONE = mu_for(1, DELTA)


LOTS = PrivacyBudget(100, DELTA)


def record(ledger, mu=ONE, **changes):
    given = {"run": "r", "round": 1, "mu": mu, "exact": False, "rows": "00", "most": LOTS, "time": 0.0} | changes
    ledger.record(**given)


def test_releases_add_up_and_survive_a_restart(tmp_path):
    """PRI-3: epsilon 1 twice is 1.4651699604, and ten times 3.6185915743, at delta 1e-5."""
    for _ in range(10):
        record(PrivacyLedger(Files(tmp_path)))
    ledger = PrivacyLedger(Files(tmp_path))
    assert ledger.releases[1].epsilon == pytest.approx(1.4651699604, abs=5e-10)
    assert ledger.spent(DELTA) == pytest.approx(3.6185915743, abs=5e-10)


def test_a_budget_of_one_release_allows_one(tmp_path):
    ledger, one = PrivacyLedger(Files(tmp_path)), PrivacyBudget(1, DELTA)
    record(ledger, most=one)
    with pytest.raises(PrivacyBudgetError, match=r"^privacy budget used up$") as refused:
        record(ledger, most=one)
    assert refused.value.spent == pytest.approx(1, rel=1e-6)
    assert refused.value.wanted == pytest.approx(1.4651699604, abs=5e-10)
    assert len(PrivacyLedger(Files(tmp_path)).releases) == 1


def test_other_rows_do_not_reset_the_budget(tmp_path):
    ledger, one = PrivacyLedger(Files(tmp_path)), PrivacyBudget(1, DELTA)
    record(ledger, rows=fingerprint([b"a"]), most=one)
    with pytest.raises(PrivacyBudgetError):
        record(ledger, rows=fingerprint([b"b"]), most=one)


def test_releases_of_different_runs_add_up(tmp_path):
    """The budget is of the rows, whichever run asks: epsilon 1 in each of two runs is 1.4651699604 (PRI-3)."""
    ledger = PrivacyLedger(Files(tmp_path))
    for run in ("a", "b"):
        record(ledger, run=run)
    assert ledger.spent(DELTA) == pytest.approx(1.4651699604, abs=5e-10)
    assert [release.epsilon for release in ledger.releases] == pytest.approx([1, 1.4651699604])
    with pytest.raises(PrivacyBudgetError):
        record(ledger, run="c", most=PrivacyBudget(1.4651699605, DELTA))
    assert [release.run for release in PrivacyLedger(Files(tmp_path)).releases] == ["a", "b"]


@pytest.mark.parametrize("exact_first", [True, False])
def test_exact_and_rounded_releases_add_up_as_zcdp(tmp_path, exact_first):
    """A mu-GDP release is mu^2 / 2-zCDP, and only zCDP covers both kinds of noise."""
    exact = discrete_mu_for(1, DELTA)
    noise = [(exact, True), (ONE, False)]
    for mu, is_exact in noise if exact_first else noise[::-1]:
        record(PrivacyLedger(Files(tmp_path)), mu, exact=is_exact)
    ledger = PrivacyLedger(Files(tmp_path))
    assert ledger.spent(DELTA) == ledger.releases[-1].epsilon == epsilon_for_zcdp((exact**2 + ONE**2) / 2, DELTA)
    assert zcdp_delta((exact**2 + ONE**2) / 2, ledger.spent(DELTA)) == pytest.approx(DELTA, rel=1e-6)
    assert ledger.spent(DELTA) > epsilon_for(compose([exact, ONE]), DELTA), "never less than continuous noise"
    refused = PrivacyBudget(ledger.spent(DELTA), DELTA)
    with pytest.raises(PrivacyBudgetError):
        record(ledger, 0.01, most=refused)


def test_a_smaller_delta_needs_a_larger_epsilon(tmp_path):
    ledger = PrivacyLedger(Files(tmp_path))
    with pytest.raises(PrivacyBudgetError):
        record(ledger, most=PrivacyBudget(1, 1e-9))


def test_discrete_noise_is_added_up_as_zcdp(tmp_path):
    """One release of exact noise is as private as claimed; ten are as Canonne et al., corollary 13, say of 10 rho."""
    ledger, exact = PrivacyLedger(Files(tmp_path)), discrete_mu_for(1, DELTA)
    record(ledger, exact, exact=True, most=PrivacyBudget(1, DELTA))
    assert ledger.spent(DELTA) == pytest.approx(1, rel=1e-9)
    for _ in range(9):
        record(ledger, exact, exact=True)
    assert zcdp_delta(10 * exact**2 / 2, ledger.spent(DELTA)) == pytest.approx(DELTA, rel=1e-6)
    assert ledger.spent(DELTA) > epsilon_for(compose([exact] * 10), DELTA), "never less than continuous noise"


@pytest.mark.parametrize("point", ["disk.before-fsync", "disk.before-rename", "disk.before-directory-fsync"])
def test_a_release_that_could_not_be_recorded_is_refused(tmp_path, point):
    record(PrivacyLedger(Files(tmp_path)))
    with failpoints.switched_on(f"{point}=error:EIO"), pytest.raises(StateError):
        record(PrivacyLedger(Files(tmp_path)))
    assert len(PrivacyLedger(Files(tmp_path)).releases) in (1, 2)  # at worst counted, never forgotten


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b"{}", b'{"releases": [{}]}', b'{"releases": [{"mu": 1}]}', b'{"releases": 3}']
)
def test_a_damaged_ledger_is_never_replaced(tmp_path, damage):
    (tmp_path / "privacy.json").write_bytes(damage)
    with pytest.raises(StateError, match=r"privacy\.json is damaged"):
        PrivacyLedger(Files(tmp_path))
    assert (tmp_path / "privacy.json").read_bytes() == damage


def test_missing_ledger_beside_a_release_does_not_begin_again(tmp_path):
    record(PrivacyLedger(Files(tmp_path)))
    (tmp_path / "released.npz").write_bytes(b"of that release")
    (tmp_path / "privacy.json").unlink()
    with pytest.raises(StateError, match=r"privacy\.json is missing, but released\.npz beside it .* restore"):
        PrivacyLedger(Files(tmp_path))
    assert not (tmp_path / "privacy.json").exists()


def send_numbers(folder, has_noise):
    """A device sends its masked numbers in a secure sum."""
    folder.mkdir()
    sessions = SecureSessions(Files(folder))
    session = SecureSession(
        sid=bytes(32),
        run="r",
        round=1,
        root=bytes(32),
        numbers=b"",
        parameters=bytes(44),
        rows="00",
        has_noise=has_noise,
        is_signed=False,
        began=0.0,
    )
    sessions.begin(session)
    assert PrivacyLedger(Files(folder)).releases == []  # nothing has left yet
    steps = sessions.steps(session).after("secure_input", "00", "00", members={"secure_input": b"\x0f"})
    sessions.record(steps)
    return sessions, session


def test_missing_ledger_beside_a_noisy_sum_does_not_begin_again(tmp_path):
    """The sum must be in it, also once it has ended; one without noise spends nothing."""
    sessions, session = send_numbers(tmp_path / "noise", has_noise=True)
    for file in ("secure_steps", "secure_ended"):
        with pytest.raises(StateError, match=rf"privacy\.json is missing, but {file}\.json beside it .* restore"):
            PrivacyLedger(Files(tmp_path / "noise"))
        sessions.end(session, "counted")
    send_numbers(tmp_path / "none", has_noise=False)
    assert PrivacyLedger(Files(tmp_path / "none")).releases == []


@pytest.mark.parametrize("mu", [-1, 0, math.nan, math.inf])
def test_an_impossible_mu_is_damage(tmp_path, mu):
    record(PrivacyLedger(Files(tmp_path)))
    saved = json.loads((tmp_path / "privacy.json").read_text())
    saved["releases"][0]["mu"] = mu
    (tmp_path / "privacy.json").write_text(json.dumps(saved))
    with pytest.raises(StateError, match=r"privacy\.json is damaged"):
        PrivacyLedger(Files(tmp_path))


def test_a_release_almost_without_noise_is_beyond_every_budget(tmp_path):
    with pytest.raises(PrivacyBudgetError) as refused:
        record(PrivacyLedger(Files(tmp_path)), mu=60.0)
    assert refused.value.wanted == math.inf
    assert PrivacyLedger(Files(tmp_path)).spent(DELTA) == 0


def test_the_order_of_rows_does_not_change_their_fingerprint():
    assert fingerprint([b"a", b"b"]) == fingerprint([b"b", b"a"]) != fingerprint([b"a", b"a", b"b"])


@pytest.mark.parametrize(("epsilon", "delta"), [(0, DELTA), (-1, DELTA), (101, DELTA), (1, 0), (1, 1)])
def test_an_impossible_budget_is_refused(epsilon, delta):
    with pytest.raises(ConfigurationError, match="privacy is"):
        PrivacyBudget(epsilon, delta)
