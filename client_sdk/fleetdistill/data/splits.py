"""`Splits`: training data together with data on which models are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    """

    data: Any
    test_data: Any = None
    validation_data: Any = None


def splits_of(data: Any) -> Splits:
    """Returns data as `Splits`; other data than `Splits` are training data alone."""
    return data if isinstance(data, Splits) else Splits(data)
