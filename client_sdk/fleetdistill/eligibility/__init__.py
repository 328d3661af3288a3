"""When a device may work, and how much: eligibility, budgets, and the server's pace. Does not import torch."""

from fleetdistill.eligibility.budgets import Budgets
from fleetdistill.eligibility.policy import Eligibility

__all__ = ["Budgets", "Eligibility"]
