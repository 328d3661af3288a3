"""Settings of class statistics by secure sums, with and without noise."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.classstats.config import ClassStatsConfig, SpaceConfig
from fleetdistill.methods.classstats_private.config import ClassStatsPrivateConfig
from fleetdistill.privacy.accountant import Guarantee

if TYPE_CHECKING:
    from fleetdistill.secure.session import Parameters

__all__ = ["CERTIFICATES", "COMPLETE", "RING", "ROSTER", "ClassStatsSecureConfig", "SumSettings"]

MIN_IN_SUM = 3
"""Fewest devices in a sum: with two, each knows the other's part."""
COMPLETE, RING = "complete", "ring"
MAX_IN_SUM = {COMPLETE: 1000, RING: 10_000}
"""Most devices in a sum."""
_CORRUPT = _LOST = 0.1
"""Parts of a ring's devices that may work with the server, or drop out."""
UNSIGNED, CERTIFICATES, ROSTER = "unsigned", "certificates", "roster"
KEYS = {UNSIGNED: 0, CERTIFICATES: 1, ROSTER: 2}
"""Who vouches for the devices' keys, as in the sum's parameters."""
_AGAINST = {
    UNSIGNED: "a server that follows the protocol",
    CERTIFICATES: "a server that follows the protocol, and anyone else without its CA's key",
    ROSTER: "a server without the secret roster key",
}
MAX_ROWS = (1 << 20, 1 << 24)
RULE = "rule"
MIN_TESTED = 3
"""Fewest sums that can be tested: of two that differ, neither can be identified as wrong."""
_MAX_GROUPS = 100
GRID_BITS, COUNT_BITS = 16, 10
"""With noise, a row's numbers are multiples of 2^-16, its count of 2^-10: a device's noise has at least 4 steps."""
PLAIN_GRID_BITS, CLIP_BITS = 8, 5
"""Without noise, a row's numbers are multiples of 2^-8 and at most 2^5."""


@dataclass(frozen=True, kw_only=True)
class SumSettings(SpaceConfig):
    """Settings of secure sums, with and without noise, in addition to those of class statistics.

    Attributes:
        keys: Who vouches for the devices' keys: `unsigned`, nobody but the server; `certificates`, the CA of the run's
            TLS certificates; or `roster`, an Ed25519 key that the apps are built with.
        roster_key: Public Ed25519 key of the roster, 64 hexadecimal digits. With it the server leaves out devices whose
            keys it has not endorsed, and a device with another one does not join; without it, such a device makes the
            others refuse. The devices trust only the key that their app was built with.
        graph: Which devices hold shares of a device's secrets: `complete`, all others, for at most 1,000 devices; or
            `ring`, about a hundred neighbours, for at most 10,000. A ring hides a device's part only from a server that
            follows the protocol, and needs `unsigned` keys.
        min_in_sum: q, fewest devices in a sum, in [3, max_in_sum], or 0. It is never below the rule: more than two
            thirds of those asked, as so many must give shares.
        max_in_sum: Most devices in a sum, in [3, 1000], with a ring in [12, 10000]; further ones are in the next sum.
        groups: G, number of sums that the devices of a round form, at random, in [1, 100]; fewer if there are too few
            devices. From 3 on, `robust` can test the sums. With noise, the merge has sqrt(G) times that of one sum.
        max_rows: Most rows in a sum, 2^20 or 2^24. With noise, more of them make the sum wrong, not less private;
            without, a device with more than its part of them, max_rows / max_in_sum, is in no sum.
    """

    sums_securely: ClassVar[bool] = True

    keys: str = UNSIGNED
    roster_key: str = ""
    graph: str = COMPLETE
    min_in_sum: int = 0
    max_in_sum: int = MAX_IN_SUM[COMPLETE]
    groups: int = 1
    max_rows: int = MAX_ROWS[0]

    def _check_keys(self) -> None:
        """Checks who vouches for keys; before all else, because the guarantee depends on it."""
        check_choice("keys", self.keys, list(KEYS))
        if self.roster_key and not (self.keys == ROSTER and re.fullmatch("[0-9a-f]{64}", self.roster_key)):
            raise ConfigurationError(
                f"roster_key must be 64 hexadecimal digits, with keys = 'roster', got {self.roster_key!r} and keys "
                f"{self.keys!r}"
            )

    def _check_sums(self) -> None:
        check_choice("graph", self.graph, list(MAX_IN_SUM))
        most = MAX_IN_SUM[self.graph]
        if self.min_in_sum:
            check_range("min_in_sum", self.min_in_sum, MIN_IN_SUM, most + 1)
        check_range("max_in_sum", self.max_in_sum, max(MIN_IN_SUM, self.min_in_sum), most + 1)
        if self.graph == RING:
            self._check_ring()
        if self.max_rows not in MAX_ROWS:
            raise ConfigurationError(
                f"max_rows must be 2^20 = {MAX_ROWS[0]} or 2^24 = {MAX_ROWS[1]}, got {self.max_rows!r}"
            )
        if self.participation_ratio != 1:
            raise ConfigurationError(
                f"participation_ratio must be 1, got {self.participation_ratio!r}: a sum asks all new devices"
            )
        check_range("groups", self.groups, 1, _MAX_GROUPS + 1)
        if self.groups < MIN_TESTED and (self.robust != "off" or self.count_cap):
            raise ConfigurationError(
                "robust must be 'off' and count_cap 0: in a secure sum the server can test no single device; set "
                f"groups to {MIN_TESTED} or more, and it tests their sums"
            )

    def _check_ring(self) -> None:
        from fleetdistill.secure.session import ring_degree

        if self.keys != UNSIGNED:
            raise ConfigurationError(
                f"keys must be 'unsigned' with graph = 'ring', got {self.keys!r}: signatures protect against a server "
                "that does not follow the protocol, and a ring does not"
            )
        ring_degree(self.max_in_sum, _CORRUPT, _LOST)

    @property
    def min_devices(self) -> int:
        """Fewest devices with which there is a sum of each group."""
        return self.groups * max(MIN_IN_SUM, self.min_in_sum)

    def fewest(self, asked: int) -> int:
        """Returns q, the fewest devices in a sum of which `asked` devices are asked."""
        return max(MIN_IN_SUM, 2 * asked // 3 + 1, self.min_in_sum)

    def honest(self, asked: int) -> int:
        """Returns m, the number of devices whose noise together gives the guarantee; 0 without noise."""
        return 0

    @property
    def signs_keys(self) -> bool:
        """Whether the devices sign their keys and lists."""
        return self.keys != UNSIGNED

    def parameters_for(self, asked: int, classes: int, dimensions: int) -> Parameters:
        """Returns the parameters of a sum of which `asked` devices are asked; see `parameters`."""
        return self.parameters(classes, dimensions, least=self.fewest(asked), honest=self.honest(asked))

    def parameters(self, classes: int, dimensions: int, *, least: int, honest: int) -> Parameters:
        """Returns the parameters of a sum.

        Args:
            classes: C.
            dimensions: F, numbers of a row.
            least: q, fewest devices in the sum.
            honest: m, devices whose noise together gives the guarantee; 0 without noise.

        Raises:
            ConfigurationError: A number of the sum would not fit into eight bytes.
        """
        from fleetdistill.methods.classstats_secure.encoding import width_for
        from fleetdistill.secure.session import LIMITED, PRIVATE, Parameters, ring_degree

        guarantee = self.guarantee
        result = Parameters(
            mode=LIMITED if guarantee is None else PRIVATE,
            width=8,
            keys=KEYS[self.keys],
            classes=classes,
            dimensions=dimensions,
            grid_bits=PLAIN_GRID_BITS if guarantee is None else GRID_BITS,
            clip_bits=CLIP_BITS if guarantee is None else 0,
            count_bits=0 if guarantee is None else COUNT_BITS,
            row_bits=self.max_rows.bit_length() - 1,
            least=least,
            honest=honest,
            most=self.max_in_sum,
            degree=ring_degree(self.max_in_sum, _CORRUPT, _LOST) if self.graph == RING else 0,
            epsilon=0.0 if guarantee is None else guarantee.epsilon,
            delta=0.0 if guarantee is None else guarantee.delta,
        )
        return replace(result, width=width_for(replace(result, least=MIN_IN_SUM, honest=min(honest, 1))))


@dataclass(frozen=True, kw_only=True)
class ClassStatsSecureConfig(ClassStatsPrivateConfig, SumSettings):
    """Settings of class statistics by secure sums with noise, in addition to those of classstats_private.

    Attributes:
        colluders: Devices of a sum that may send no noise, or work with the server, without a loss of privacy, at least
            0; or `rule`: none with unsigned keys, else a tenth of those asked.
    """

    robust: str = "off"
    colluders: int | str = RULE

    def __post_init__(self) -> None:
        self._check_keys()
        ClassStatsPrivateConfig.__post_init__(self)
        self._check_sums()
        if isinstance(self.colluders, str):
            check_choice("colluders", self.colluders, (RULE,))
        else:
            check_range("colluders", self.colluders, 0, (self.min_in_sum or self.max_in_sum))
            self._check_colluders(self.colluders)
        if not self.exact:
            raise ConfigurationError("exact must be true: devices add shares of discrete noise to integers")

    def _check_colluders(self, colluders: int) -> None:
        """Refuses more colluders than signed keys withstand.

        Of n devices t = ⌊2n/3⌋ + 1 must give shares. If a server shows two lists of survivors, c colluders help it to
        both shares of a device unless 2t > n + c, which holds for each n if c <= n/3.
        """
        least = self.min_in_sum or MIN_IN_SUM
        if self.signs_keys and colluders > least // 3:
            raise ConfigurationError(
                f"colluders is {colluders}, but of {least} devices more than {least // 3} that work with the server "
                "can open one device's part; raise min_in_sum, or lower colluders"
            )

    def honest(self, asked: int) -> int:
        """Returns m, the number of devices whose noise together gives the guarantee."""
        return max(1, self.fewest(asked) - self.colluders_of(asked))

    def colluders_of(self, asked: int) -> int:
        """Returns c, the number of devices of a sum that may add no noise, if `asked` devices are asked."""
        if isinstance(self.colluders, int):
            return self.colluders
        return asked // 10 if self.signs_keys else 0

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one sum."""
        return Guarantee(
            epsilon=self.epsilon,
            delta=self.delta,
            exact=self.exact,
            against=f"{_AGAINST[self.keys]}, by secure sums that no cryptographer has reviewed yet",
        )

    def device_mu(self, devices: int) -> float:
        """Returns mu sqrt(m): the sum of n devices has mu sqrt(m / n), which n devices with mu sqrt(m) would have."""
        return self.guarantee.mu * math.sqrt(self.honest(devices // self.groups))


@dataclass(frozen=True, kw_only=True)
class ClassStatsSummedConfig(ClassStatsConfig, SumSettings):
    """Settings of class statistics by secure sums without noise, in addition to those of classstats."""

    robust: str = "off"
    max_rows: int = MAX_ROWS[1]

    def __post_init__(self) -> None:
        self._check_keys()
        ClassStatsConfig.__post_init__(self)
        self._check_sums()
