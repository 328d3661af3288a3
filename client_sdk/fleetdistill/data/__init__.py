"""The app's data in every form that a device accepts, read when they are needed. Does not import torch."""

from fleetdistill.data.splits import Augmented, Splits

__all__ = ["Augmented", "Splits"]
