"""What an app may wrap its data in: `Splits` adds data on which models are scored, `Augmented` random changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetdistill.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class Splits:
    """Training data, and data on which each round's models are scored.

        Device(data=Splits((images, labels), validation_data=(more_images, more_labels)), ...)

    All three are data in any form of `Device(data=...)`. They stay on the device.

    Attributes:
        data: Training data.
        test_data: Data on which each round's model is scored. The scores are sent to the server.
        validation_data: Data that decide what the app's model becomes: the most accurate of the model that the device
            received, the one that it trained, and the present one. The scores and the decision are sent to the server.
            They should have all classes that the app needs: on the device's own classes alone, a model that knows only
            these wins.
    """

    data: Any
    test_data: Any = None
    validation_data: Any = None


def splits_of(data: Any) -> Splits:
    """Returns data as `Splits`; other data than `Splits` are training data alone."""
    return data if isinstance(data, Splits) else Splits(data)


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
