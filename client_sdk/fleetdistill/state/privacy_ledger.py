"""The device's own record of its private releases, and the budget that the app sets for them.

A release is recorded durably before its noise is drawn. A device that dies in between has spent privacy without sending
anything; it can never send a release that the ledger does not count.

    privacy.json    one entry a release: run, round, mu, data fingerprint, and epsilon of all releases so far
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from fleetdistill.errors import ConfigurationError, PrivacyBudgetError, StateError
from fleetdistill.privacy.accountant import compose, epsilon_for, epsilon_for_zcdp
from fleetdistill.state import failpoints
from fleetdistill.state.files import Files
from fleetdistill.state.format import damaged_error, json_object, sealed_json
from fleetdistill.state.secure_sessions import SecureSessions

PRIVACY_LEDGER = "privacy.json"
RELEASED = "released.npz"
"""The last release; it is written after its entry in the ledger."""
_TOLERANCE = 1e-9
"""Relative. Epsilon is rounded up twice on its way through mu, so a budget of exactly one release allows it."""


@dataclass(frozen=True)
class PrivacyBudget:
    """Most privacy that a device may spend, over all runs of its state directory.

    Attributes:
        epsilon: Above 0, at most 100.
        delta: In (0, 1), well below 1 / number of rows.

    Raises:
        ConfigurationError: A value is out of range.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 100 or not 0 < self.delta < 1:
            raise ConfigurationError(
                f"privacy is ({self.epsilon!r}, {self.delta!r}); expected (epsilon, delta) with epsilon in "
                "(0, 100] and delta in (0, 1)"
            )


@dataclass(frozen=True, kw_only=True)
class Release:
    """One entry of the ledger.

    Attributes:
        run: Run that the release was for.
        round: Round that the release was for.
        mu: Gaussian-DP parameter of its noise.
        exact: Whether its noise is discrete Gaussian, to which only zero-concentrated privacy (zCDP) applies.
        rows: Fingerprint of the rows, 64 hexadecimal digits.
        epsilon: Of this and all earlier releases together, at the delta of the budget that applied.
        time: Unix time in seconds.
        sum: Id of the secure sum that it was for, hexadecimal; empty for noise on this device alone.
    """

    run: str
    round: int
    mu: float
    exact: bool
    rows: str
    epsilon: float
    time: float
    sum: str = ""


class PrivacyLedger:
    """Reads and extends the ledger of one state directory.

    Args:
        files: The state directory.

    Raises:
        StateError: The ledger is damaged, or missing beside a release. It is never replaced: without it, the device
            cannot know what it has spent.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self.releases: list[Release] = self._load()

    def spent(self, delta: float) -> float:
        """Returns the epsilon of all releases together; infinity above 100."""
        return _epsilon([(release.mu, release.exact) for release in self.releases], delta)

    def check(self, mu: float, exact: bool, most: PrivacyBudget) -> float:
        """Returns the epsilon of all releases and a new one, with arguments and error as `record`; records nothing."""
        noise = [*((release.mu, release.exact) for release in self.releases), (mu, exact)]
        epsilon = _epsilon(noise, most.delta)
        if epsilon > most.epsilon * (1 + _TOLERANCE):
            raise PrivacyBudgetError(spent=self.spent(most.delta), wanted=epsilon)
        return epsilon

    def record(
        self,
        *,
        run: str,
        round: int,
        mu: float,
        exact: bool,
        rows: str,
        most: PrivacyBudget,
        time: float,
        sum: str = "",
    ) -> Release:
        """Adds a release, durably, and returns it. Call it before drawing the noise.

        Rows that were replaced or removed do not reset the ledger: some may be in both releases.

        Args:
            run: Run that asks for the release.
            round: Round of the ask.
            mu: Above 0.
            exact: Whether the noise is discrete Gaussian.
            rows: From `fingerprint`.
            most: Most that all releases together may spend.
            time: Unix time in seconds.
            sum: Id of the secure sum, hexadecimal; empty without one.

        Raises:
            PrivacyBudgetError: The release would exceed `most`. Nothing is recorded.
        """
        epsilon = self.check(mu, exact, most)
        release = Release(run=run, round=round, mu=mu, exact=exact, rows=rows, epsilon=epsilon, time=time, sum=sum)
        self._save([*self.releases, release])
        self.releases.append(release)
        failpoints.hit("device.privacy.after-record")
        return release

    def _save(self, releases: list[Release]) -> None:
        entries = [asdict(release) for release in releases]
        self._files.save(PRIVACY_LEDGER, sealed_json({"format": 1, "releases": entries}, indent=1), mode=0o600)

    def _load(self) -> list[Release]:
        data, path = self._files.load(PRIVACY_LEDGER), self._files.directory / PRIVACY_LEDGER
        if data is None:
            released = (
                RELEASED if self._files.load(RELEASED) is not None else SecureSessions(self._files).names_release()
            )
            if released is None:
                return []
            raise StateError(
                f"{path} is missing, but {released} beside it is of a private release that it must count; restore "
                f"{PRIVACY_LEDGER} from a backup, or begin with new data in a new state directory"
            )
        try:
            entries = json_object(path, data)["releases"]
            releases = [Release(**entry) for entry in entries]
            if not all(math.isfinite(release.mu) and release.mu > 0 for release in releases):
                raise ValueError("a release has a mu that is not a positive number")
        except StateError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_error(path, error) from error
        return releases


def fingerprint(rows: Iterable[bytes]) -> str:
    """Returns 64 hexadecimal digits that name a set of rows in whatever order: SHA-256 over their sorted SHA-256."""
    digests = sorted(hashlib.sha256(row).digest() for row in rows)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _epsilon(noise: Sequence[tuple[float, bool]], delta: float) -> float:
    """Returns the epsilon of releases together, by their zCDP if any has discrete noise."""
    mu = compose(mu for mu, _ in noise)
    return epsilon_for_zcdp(mu * mu / 2, delta) if any(exact for _, exact in noise) else epsilon_for(mu, delta)
