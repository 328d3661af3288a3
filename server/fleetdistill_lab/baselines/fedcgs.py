"""FedCGS: a Gaussian classifier in closed form from the devices' sums of features and of their products.

Guan, Zhou and Gu, Capture Global Feature Statistics for One-Shot Federated Learning, AAAI 2025. The sums are exact: the
classifier is that of all rows in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetdistill.methods.base import check_range
from fleetdistill.wire.schema import TypedShape
from fleetdistill_lab.baselines.one_shot import OneShotConfig, OneShotDevice, OneShotServer, Tables
from fleetdistill_lab.baselines.shared import class_sums, register
from fleetdistill_server.methods.cohort import Notes

__all__ = ["FedCGSConfig", "FedCGSDevice", "FedCGSServer"]

_NEVER = -1e3
"""Bias of a class that no device has."""


@dataclass(frozen=True, kw_only=True)
class FedCGSConfig(OneShotConfig):
    """Settings of FedCGS in addition to those of local training.

    Attributes:
        ridge: Share of the mean variance that is added to each variance, at least 0. With 0, as in the paper, the
            classifier is noisy unless there are many more rows than features.
    """

    ridge: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("ridge", self.ridge, 0)


class FedCGSDevice(OneShotDevice):
    """Device half of FedCGS: sends sums of features by class, and the sum of their outer products over all rows."""

    def table(self, rows_nf: Tensor, labels_n: Tensor, generator: torch.Generator) -> Tables:
        sums_cf, counts_c = class_sums(rows_nf, labels_n, self.local.classes)
        products_ff = rows_nf.double().T @ rows_nf.double()
        return {"sums": sums_cf, "products": products_ff, "counts": counts_c}


class FedCGSServer(OneShotServer):
    """Server half of FedCGS: class means, one covariance, and the linear discriminant that they give."""

    summary = "one exchange: a Gaussian classifier from sums"
    config: FedCGSConfig

    @classmethod
    def shapes(cls, config: Any, classes: int, features: int) -> Mapping[str, Sequence[int]]:
        counts = TypedShape.of((classes,), np.int64)
        return {"sums": (classes, features), "products": (features, features), "counts": counts}

    def fit(self, tables: Sequence[Tables], factors: Sequence[float], notes: Notes) -> Tables:
        """Returns w_c = S^-1 m_c and b_c = log p_c - m_c' S^-1 m_c / 2, with the covariance S of all rows."""
        total = {
            name: torch.stack([factor * one[name].double() for one, factor in zip(tables, factors, strict=True)]).sum(0)
            for name in ("sums", "products", "counts")
        }
        counts_c, rows = total["counts"], total["counts"].sum()
        means_cf = total["sums"] / counts_c.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
        mean_f = total["sums"].sum(0) / rows
        covariance_ff = (total["products"] - rows * torch.outer(mean_f, mean_f)) / (rows - 1).clamp_min(1)
        covariance_ff = (covariance_ff + covariance_ff.T) / 2
        ridge = self.config.ridge * covariance_ff.diagonal().mean()
        inverse_ff = torch.linalg.pinv(covariance_ff + ridge * torch.eye(len(mean_f)).double(), hermitian=True)
        weight_cf = means_cf @ inverse_ff
        bias_c = (counts_c / rows).log() - (weight_cf * means_cf).sum(1) / 2
        is_known_c = counts_c > 0
        return {
            "weight": torch.where(is_known_c[:, None], weight_cf, 0.0),
            "bias": torch.where(is_known_c, bias_c, _NEVER),
        }


register("fedcgs", FedCGSConfig, FedCGSDevice, FedCGSServer)
