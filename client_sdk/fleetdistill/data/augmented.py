"""`Augmented`: training data with random changes that differ in every epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetdistill.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class Augmented:
    """Training data whose inputs are changed by a random function each time they are trained on.

        Device(data=Augmented((images, labels), transforms.RandomCrop(32, padding=4)), ...)

    Evaluation, the knowledge that leaves the device, and sample ids use the unchanged inputs.

    Attributes:
        data: Training data in any form of `Device(data=...)`.
        transform: Function of one input, a float32 tensor `[*input_shape]`, that returns a tensor of the same shape. A
            repeated ask gives the same result if the function draws from torch's random numbers.

    Raises:
        ConfigurationError: `transform` is not callable.
    """

    data: Any
    transform: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.transform):
            kind = type(self.transform).__name__
            raise ConfigurationError(f"Augmented(transform=...) is a {kind}, expected a function of one input tensor")
