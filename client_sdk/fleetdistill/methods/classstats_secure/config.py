"""Settings of class statistics by secure sums."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.classstats_private.config import ClassStatsPrivateConfig
from fleetdistill.privacy.guarantee import Guarantee

if TYPE_CHECKING:
    from fleetdistill.secure.session import Parameters

MIN_IN_SUM = 3
"""Fewest devices in a sum: with two, each knows the other's part."""
MAX_IN_SUM = 1000
"""Most devices in a sum: each exchanges shares with each other one."""
UNSIGNED, ROSTER = "unsigned", "roster"
KEYS = {UNSIGNED: 0, ROSTER: 2}
"""Who vouches for the devices' keys, as in the sum's parameters."""
MAX_ROWS = (1 << 20, 1 << 24)
RULE = "rule"
GRID_BITS, COUNT_BITS = 16, 10
"""A row's numbers are multiples of 2^-16, its count of 2^-10: the noise of one device has at least four steps."""


@dataclass(frozen=True, kw_only=True)
class ClassStatsSecureConfig(ClassStatsPrivateConfig):
    """Settings of class statistics by secure sums, in addition to those of classstats_private.

    Attributes:
        keys: Who vouches for the devices' keys: `unsigned`, nobody but the server; or `roster`, an Ed25519 key that the
            apps are built with.
        min_in_sum: q, fewest devices in a sum, in [3, 1000], or 0 for the rule: more than two thirds of those asked.
        max_in_sum: Most devices in a sum, in [3, 1000]; further ones are in the next sum.
        colluders: Devices of a sum that may send no noise, or work with the server, without a loss of privacy, at least
            0; or `rule`: none with unsigned keys, a tenth of those asked with a roster.
        max_rows: Most rows in a sum, 2^20 or 2^24; more of them make the sum wrong, not less private.
    """

    sums_securely: ClassVar[bool] = True

    robust: str = "off"
    keys: str = UNSIGNED
    min_in_sum: int = 0
    max_in_sum: int = MAX_IN_SUM
    colluders: int | str = RULE
    max_rows: int = MAX_ROWS[0]

    def __post_init__(self) -> None:
        ClassStatsPrivateConfig.__post_init__(self)
        check_choice("keys", self.keys, list(KEYS))
        if self.min_in_sum:
            check_range("min_in_sum", self.min_in_sum, MIN_IN_SUM, MAX_IN_SUM + 1)
        check_range("max_in_sum", self.max_in_sum, max(MIN_IN_SUM, self.min_in_sum), MAX_IN_SUM + 1)
        if isinstance(self.colluders, str):
            check_choice("colluders", self.colluders, (RULE,))
        else:
            check_range("colluders", self.colluders, 0, (self.min_in_sum or MAX_IN_SUM))
        if self.max_rows not in MAX_ROWS:
            raise ConfigurationError(
                f"max_rows must be 2^20 = {MAX_ROWS[0]} or 2^24 = {MAX_ROWS[1]}, got {self.max_rows!r}"
            )
        if self.participation_ratio != 1:
            raise ConfigurationError(
                f"participation_ratio must be 1, got {self.participation_ratio!r}: a sum asks all new devices"
            )
        if not self.exact:
            raise ConfigurationError("exact must be true: devices add shares of discrete noise to integers")
        if self.robust != "off" or self.count_cap:
            raise ConfigurationError(
                "robust must be 'off' and count_cap 0: in a secure sum the server can test no single device"
            )

    def fewest(self, asked: int) -> int:
        """Returns q, the fewest devices in a sum of which `asked` devices are asked."""
        return self.min_in_sum or max(MIN_IN_SUM, 2 * asked // 3 + 1)

    def honest(self, asked: int) -> int:
        """Returns m, the number of devices whose noise together gives the guarantee."""
        return max(1, self.fewest(asked) - self.colluders_of(asked))

    def colluders_of(self, asked: int) -> int:
        """Returns c, the number of devices of a sum that may add no noise, if `asked` devices are asked."""
        if isinstance(self.colluders, int):
            return self.colluders
        return asked // 10 if self.keys == ROSTER else 0

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one sum."""
        server = "the server" if self.signs_keys else "a server that follows the protocol"
        return Guarantee(
            epsilon=self.epsilon,
            delta=self.delta,
            exact=self.exact,
            against=f"{server}, by secure sums that no cryptographer has reviewed yet",
        )

    def device_mu(self, devices: int) -> float:
        """Returns mu sqrt(m): the sum of n devices has mu sqrt(m / n), which n devices with mu sqrt(m) would have."""
        return self.guarantee.mu * math.sqrt(self.honest(devices))

    @property
    def signs_keys(self) -> bool:
        """Whether the devices sign their keys and lists."""
        return self.keys != UNSIGNED

    def parameters(self, classes: int, dimensions: int, *, least: int, honest: int) -> Parameters:
        """Returns the parameters of a sum.

        Args:
            classes: C.
            dimensions: F, numbers of a row.
            least: q, fewest devices in the sum.
            honest: m, devices whose noise together gives the guarantee.

        Raises:
            ConfigurationError: A number of the sum would not fit into eight bytes.
        """
        from fleetdistill.methods.classstats_secure.encoding import width_for
        from fleetdistill.secure.session import PRIVATE, Parameters

        result = Parameters(
            mode=PRIVATE,
            width=8,
            keys=KEYS[self.keys],
            classes=classes,
            dimensions=dimensions,
            grid_bits=GRID_BITS,
            clip_bits=0,
            count_bits=COUNT_BITS,
            row_bits=self.max_rows.bit_length() - 1,
            least=least,
            honest=honest,
            most=self.max_in_sum,
            degree=0,
            epsilon=self.epsilon,
            delta=self.delta,
        )
        return replace(result, width=width_for(replace(result, least=MIN_IN_SUM, honest=1)))
