"""Checks of the shapes and numbers that model factories receive, often from a configuration file."""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill.errors import ConfigurationError


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a sample's shape as a tuple.

    Raises:
        ConfigurationError: `shape` is not one or more positive integers.
    """
    if not shape or not all(_at_least(1, size) for size in shape):
        raise ConfigurationError(f"shape {shape!r} must be positive whole numbers, for instance (3, 32, 32)")
    return tuple(shape)


def check_image(shape: Sequence[int], smallest: int = 1) -> tuple[int, int, int]:
    """Returns channels, height and width of an image or feature map.

    Args:
        shape: The configured shape.
        smallest: Minimum height and width that the model accepts.

    Raises:
        ConfigurationError: `shape` is not three positive integers, or the image is too small.
    """
    sizes = check_shape(shape)
    if len(sizes) != 3:
        raise ConfigurationError(f"shape {shape!r} must be channels, height, width, for instance (3, 32, 32)")
    channels, height, width = sizes
    if min(height, width) < smallest:
        raise ConfigurationError(f"shape {shape!r}: height and width must be at least {smallest} for this model")
    return channels, height, width


def check_classes(classes: int) -> int:
    """Returns the number of classes.

    Raises:
        ConfigurationError: `classes` is not an integer of at least 2.
    """
    if not _at_least(2, classes):
        raise ConfigurationError(f"classes is {classes!r}, must be a whole number of at least 2")
    return classes


def _at_least(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
