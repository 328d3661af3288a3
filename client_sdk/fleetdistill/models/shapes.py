"""Checks of the shapes that model factories are given; they often come from a configuration file."""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill.errors import ConfigurationError


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of one sample.

    Raises:
        ConfigurationError: Not one or more positive whole numbers.
    """
    if not shape or not all(_at_least(1, size) for size in shape):
        raise ConfigurationError(f"shape {shape!r} must be positive whole numbers, for instance (3, 32, 32)")
    return tuple(shape)


def checked_image(shape: Sequence[int], smallest: int = 1) -> tuple[int, int, int]:
    """Channels, height and width of one image or feature map.

    Args:
        shape: What was configured.
        smallest: Least height and width that the model can work on.

    Raises:
        ConfigurationError: Not three positive whole numbers, or too small.
    """
    sizes = checked_shape(shape)
    if len(sizes) != 3:
        raise ConfigurationError(f"shape {shape!r} must be channels, height, width, for instance (3, 32, 32)")
    channels, height, width = sizes
    if min(height, width) < smallest:
        raise ConfigurationError(f"shape {shape!r}: height and width must be at least {smallest} for this model")
    return channels, height, width


def checked_classes(classes: int) -> int:
    """Number of classes.

    Raises:
        ConfigurationError: Not a whole number of at least 2.
    """
    if not _at_least(2, classes):
        raise ConfigurationError(f"classes is {classes!r}, must be a whole number of at least 2")
    return classes


def _at_least(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
