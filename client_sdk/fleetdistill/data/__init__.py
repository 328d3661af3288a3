"""The app's data in every form that a device accepts, read when they are needed. Does not import torch."""

from fleetdistill.data.augmented import Augmented
from fleetdistill.data.splits import Splits

__all__ = ["Augmented", "Splits"]
