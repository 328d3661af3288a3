"""What a device does in a run with private statistics: it adds the noise itself, and sends nothing else about its rows.

The server's contract names the guarantee; everything here is enforced by the device.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.device.events import Events
from fleetdistill.device.secure import SecureSums
from fleetdistill.errors import ConfigurationError, FleetDistillError, PrivacyBudgetError, SumRefusedError
from fleetdistill.state.files import Files
from fleetdistill.state.privacy_ledger import PrivacyBudget, PrivacyLedger, fingerprint
from fleetdistill.state.secure_sessions import SecureSessions
from fleetdistill.wire.v1 import contract_pb2

if TYPE_CHECKING:
    from fleetdistill.knowledge import ClassSums, PrivateRows, SharedStatistics
    from fleetdistill.methods.base import Answer, Ask
    from fleetdistill.methods.classstats_secure.config import ClassStatsSummedConfig
    from fleetdistill.privacy.accountant import Guarantee

__all__ = ["guarantee_of", "hides_rows", "private_columns"]

SAMPLES = 1
"""Number of samples that a private device declares: the real number would be a release too."""
DECLINED = "this device cannot answer"
"""Reason of every decline but those of the budget and of secure sums: another text could depend on the rows."""
_COLUMNS = ("class_statistics", "counts", "gradients")


def guarantee_of(contract: contract_pb2.Contract) -> Guarantee | None:
    """Returns the guarantee of a run; None if the run is not private. Raises ConfigurationError as for any contract."""
    from fleetdistill.methods import config_of_contract  # loads methods, which an idle device does not need

    result: Guarantee | None = config_of_contract(contract).guarantee
    return result


def hides_rows(contract: contract_pb2.Contract) -> bool:
    """Returns whether a run's answers have noise or are summed securely, so that nothing else of the rows may leave."""
    from fleetdistill.methods import config_of_contract

    result: bool = config_of_contract(contract).hides_rows
    return result


def check_is_private(contract: contract_pb2.Contract) -> None:
    """Raises ConfigurationError for a run without privacy: every answer would exceed any budget."""
    if guarantee_of(contract) is None:
        raise ConfigurationError(
            f"run {contract.run!r} is not private, but Budgets(privacy=...) is set; ask the operator for a run "
            "of method classstats_private, or leave the budget out"
        )


def has_released(files: Files, run: str) -> bool:
    """Returns whether a run has what it asks of a device's rows once: its noisy sums, or its part of a secure sum."""
    in_sum = SecureSessions(files).is_in_sum(run)
    return in_sum or any(release.run == run and not release.sum for release in PrivacyLedger(files).releases)


def remove_rows(profile: contract_pb2.DeviceProfile) -> None:
    """Removes from a profile what depends on the rows: their number and the version of the data."""
    profile.samples = SAMPLES
    profile.data_version = b""


def reason_to_send(reason: FleetDistillError) -> str:
    """Returns the text of a decline that the server may read, which does not depend on the rows."""
    return str(reason) if isinstance(reason, (PrivacyBudgetError, SumRefusedError)) else DECLINED


def private_columns(allow: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns that may leave a device that hides its rows: at most those that are summed."""
    return tuple(column for column in allow if column in _COLUMNS)


class PrivateAnswers:
    """Makes a device's private answers, and keeps account of what they spend.

    Args:
        files: The state directory, with the ledger and the last release.
        budget: The app's budget; None for the run's epsilon and delta.
        events: Emits an event for each release.
        secure: Answers the steps of secure sums.
    """

    def __init__(self, files: Files, budget: PrivacyBudget | None, events: Events, secure: SecureSums) -> None:
        self._files = files
        self._secure = secure
        self._budget = budget
        self._events = events

    def private_answer(self, answer: Answer, contract: contract_pb2.Contract, ask: Ask) -> Answer:
        """Returns the answer with noisy or masked sums in place of rows, and without the number of samples.

        Raises:
            ConfigurationError: The answer contains anything but rows.
            PrivacyBudgetError: The release would exceed the budget.
            SumRefusedError, WireError: As `SecureSums.answer`.
        """
        from fleetdistill.knowledge import PrivateRows
        from fleetdistill.methods import config_of_contract

        config = config_of_contract(contract)
        if config.sums_securely:
            return self._secure.answer(answer, ask, contract, config)
        parts = {}
        for name, part in answer.parts.items():
            if not isinstance(part, PrivateRows):
                kind = type(part).__name__
                raise ConfigurationError(f"part {name!r} is a {kind}, which a private run must not send; not sent")
            parts[name] = self._release(part, contract.run, config.guarantee, ask.round)
        return replace(answer, parts=parts, samples=SAMPLES)

    def sample_answer(self, answer: Answer, contract: contract_pb2.Contract) -> Answer:
        """Returns the answer with new noise, or what a sum without noise learns of it at most; it must not leave.

        It spends nothing, and is no release.
        """
        from fleetdistill.methods import config_of_contract

        config = config_of_contract(contract)
        if config.guarantee is not None:
            return with_noise(answer, self._used(config.guarantee))
        return replace(answer, parts={name: _limited(part, config) for name, part in answer.parts.items()}, samples=1)

    def _used(self, wanted: Guarantee) -> Guarantee:
        """Returns the guarantee of the device's noise: the smaller of the run's and the app's."""
        most = self._most(wanted)
        return wanted.at_most(most.epsilon, most.delta)

    def _most(self, wanted: Guarantee) -> PrivacyBudget:
        return self._budget or PrivacyBudget(wanted.epsilon, wanted.delta)

    def _release(self, rows: PrivateRows, run: str, wanted: Guarantee, round: int) -> ClassSums:
        """Returns the stored release of these rows, or makes one: ledger, then noise, then the stored release."""
        from fleetdistill.methods.classstats_private.sums import on_grid, unit_rows
        from fleetdistill.state.releases import Releases

        most, used = self._most(wanted), self._used(wanted)
        units_nf = on_grid(unit_rows(rows.rows))
        content = fingerprint(
            u.tobytes() + int(c).to_bytes(8, "little") for u, c in zip(units_nf, rows.labels, strict=True)
        )
        name = f"{run} {content} {used}"
        releases = Releases(self._files)
        ledger = PrivacyLedger(self._files)  # read first, so that an app learns that its ledger is gone
        if (known := releases.load(name)) is not None:
            return known
        recorded = ledger.record(
            run=run, round=round, mu=used.mu, exact=used.exact, rows=content, most=most, time=time.time()
        )
        made = noisy_sums(rows, units_nf, used)
        releases.save(name, made)
        self._events.emit_released(round, used, recorded.epsilon, most)
        return made


def _limited(rows: Any, config: ClassStatsSummedConfig) -> SharedStatistics:
    from fleetdistill.methods.classstats.shared_statistics import moments_of, to_wire

    moments = moments_of(rows.rows, rows.labels, config.min_samples)
    return to_wire(moments, config.rank, config.rows_per_direction)


def with_noise(answer: Answer, guarantee: Guarantee) -> Answer:
    """Returns an answer with noisy sums in place of rows, without a ledger; it must not leave the device."""
    from fleetdistill.knowledge import PrivateRows
    from fleetdistill.methods.classstats_private.sums import on_grid, unit_rows

    parts = {
        name: noisy_sums(part, on_grid(unit_rows(part.rows)), guarantee) if isinstance(part, PrivateRows) else part
        for name, part in answer.parts.items()
    }
    return replace(answer, parts=parts, samples=SAMPLES)


def noisy_sums(rows: PrivateRows, units_nf: np.ndarray, used: Guarantee) -> ClassSums:
    """Draws the noise from the operating system: the server knows the ask's seed and could subtract its noise."""
    from fleetdistill.methods.classstats_private.sums import class_sums, release_exact, release_rounded, to_wire

    if used.exact:
        noisy = release_exact(units_nf, rows.labels, rows.classes, used.mu)
    else:
        generator = np.random.Generator(np.random.PCG64DXSM(secrets.randbits(256)))
        noisy = release_rounded(class_sums(units_nf, rows.labels, rows.classes), used.mu, generator)
    return to_wire(noisy, used.mu, discrete=used.exact)
