"""Range checks of FedDKC's refinement settings, for the configuration and for the server's refinements.

Plain Python without torch: devices without torch read the configuration too.
"""

from __future__ import annotations

import math

from fleetdistill.errors import ConfigurationError
from fleetdistill.names import unknown_name

KERNELS = ("exp", "linear", "softplus", "sigmoid", "quadratic")
"""KKR's kernels, in this order: e^x, x + 1, ln(1 + e^x), 1 / (1 + e^-x), 1 + x²."""


def check_target_peak(target: float, classes: int) -> None:
    """Checks that the target peak T is in (1/C, 1); below 1/C KKR would reverse the order of the classes.

    Args:
        target: The paper's T, a probability.
        classes: The paper's C, at least 2.

    Raises:
        ConfigurationError: T is out of range.
    """
    if not 1 / classes < target < 1:
        raise ConfigurationError(f"target peak T={target} must be in (1/C, 1) = ({1 / classes:.6g}, 1)")


def check_target_entropy(target: float, classes: int) -> None:
    """Checks that the target entropy E is in (0, log2 C); a softmax of finite logits has no other entropy.

    Args:
        target: The paper's E, in bits.
        classes: The paper's C, at least 2.

    Raises:
        ConfigurationError: E is out of range.
    """
    if not 0 < target < math.log2(classes):
        raise ConfigurationError(f"target entropy E={target} must be in (0, log2 C) = (0, {math.log2(classes):.6g})")


def check_epsilon(epsilon: float, *, target_entropy: float | None = None, classes: int | None = None) -> None:
    """Checks that the congruence tolerance is above 0 and, for SKR, below twice the target's distance to its bounds.

    Args:
        epsilon: The paper's ε; searches stop at half of it.
        target_entropy: SKR's E in bits; if given, ε < 2·min(E, log2 C - E) is checked too.
        classes: The paper's C; required with `target_entropy`.

    Raises:
        ConfigurationError: ε is out of range.
    """
    if not 0 < epsilon < math.inf:
        raise ConfigurationError(f"epsilon must be > 0, got {epsilon}")
    if target_entropy is None or classes is None:
        return
    room = 2 * min(target_entropy, math.log2(classes) - target_entropy)
    if epsilon >= room:
        raise ConfigurationError(f"epsilon={epsilon} must be < 2*min(E, log2 C - E) = {room:.6g}; use a smaller one")


def check_kernel_name(kernel: str) -> None:
    """Checks that a kernel of KKR has this name.

    Raises:
        ConfigurationError: The name is not one of `KERNELS`.
    """
    if kernel not in KERNELS:
        raise ConfigurationError(unknown_name("kernel", kernel, KERNELS))
