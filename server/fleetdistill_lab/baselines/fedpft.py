"""FedPFT: devices send Gaussian mixtures of each class's features, the server trains a head on rows drawn from them.

Beitollahi et al., Parametric Feature Transfer: One-shot Federated Learning with Foundation Models, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.training.rollback import train_or_roll_back
from fleetdistill.wire.schema import TypedShape
from fleetdistill_lab.baselines.one_shot import OneShotConfig, OneShotDevice, OneShotServer, Tables
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.cohort import Notes

__all__ = ["FedPFTConfig", "FedPFTDevice", "FedPFTServer", "fit_mixture"]

COVARIANCES = ("spherical", "diagonal", "full")
_MIN_VARIANCE = 1e-6
_MAX_STEPS, _TOLERANCE = 100, 1e-6
"""Steps of expectation and maximisation, and the gain of the mean log-likelihood at which they end, in nats."""


@dataclass(frozen=True, kw_only=True)
class FedPFTConfig(OneShotConfig):
    """Settings of FedPFT in addition to those of local training.

    Attributes:
        components: The paper's K, Gaussians of a class on a device, at least 1; a class with fewer rows has fewer.
        covariance: `spherical`, one variance; `diagonal`, one for each feature; or `full`.
        drawn_rows: Most rows that the server draws, at least 1. Devices' counts are scaled down to it.
        head_epochs: Passes over the drawn rows in training the head, at least 1.
        head_rate: Adam's learning rate of the head, above 0.
    """

    components: int = 1
    covariance: str = "spherical"
    drawn_rows: int = 50_000
    head_epochs: int = 50
    head_rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("covariance", self.covariance, COVARIANCES)
        for name in ("components", "drawn_rows", "head_epochs"):
            check_range(name, getattr(self, name), 1)
        check_range("head_rate", self.head_rate, 0, open_low=True)


class FedPFTDevice(OneShotDevice):
    """Device half of FedPFT: fits a Gaussian mixture to the features of each class."""

    config: FedPFTConfig

    def table(self, rows_nf: Tensor, labels_n: Tensor, generator: torch.Generator) -> Tables:
        classes = self.local.classes
        shapes = FedPFTServer.shapes(self.config, classes, rows_nf.shape[1])
        result = {name: torch.zeros(*shape, dtype=torch.float64) for name, shape in shapes.items() if name != "counts"}
        counts_c = torch.bincount(labels_n, minlength=classes)
        for label in counts_c.nonzero().flatten().tolist():
            own = rows_nf[labels_n == label].double()
            for name, one in fit_mixture(own, self.config.components, self.config.covariance, generator).items():
                result[name][label, : len(one)] = one
        return {**result, "counts": counts_c}


class FedPFTServer(OneShotServer):
    """Server half of FedPFT: draws as many rows of each mixture as it describes, and trains a linear head on them."""

    summary = "one exchange: a head for rows drawn from mixtures"
    config: FedPFTConfig

    @classmethod
    def shapes(cls, config: Any, classes: int, features: int) -> Mapping[str, Sequence[int]]:
        mixtures = (classes, config.components)
        of_one = {"spherical": (), "diagonal": (features,), "full": (features, features)}[config.covariance]
        return {
            "shares": mixtures,
            "means": (*mixtures, features),
            "variances": (*mixtures, *of_one),
            "counts": TypedShape.of((classes,), np.int64),
        }

    def fit(self, tables: Sequence[Tables], factors: Sequence[float], notes: Notes) -> Tables | None:
        rows_nf, labels_n = self._draw(tables, factors, notes.generator("draw"))
        if not len(rows_nf):
            return None
        where = self.context.torch_device
        rows_nf, labels_n = rows_nf.to(where), labels_n.to(where)
        head = nn.Linear(rows_nf.shape[1], self.context.classes).to(where)
        head.load_state_dict({name: torch.zeros_like(one) for name, one in head.state_dict().items()})

        def train() -> None:
            self.context.trainer.train_steps(
                head,
                len(rows_nf),
                epochs=self.config.head_epochs,
                batch_size=self.config.batch_size,
                optimizer=torch.optim.Adam(head.parameters(), lr=self.config.head_rate),
                losses=lambda epoch, rows_b: [functional.cross_entropy(head(rows_nf[rows_b]), labels_n[rows_b])],
                generator=notes.generator("head"),
            )

        failure = train_or_roll_back(train, head, rate=("head_rate", self.config.head_rate))
        if failure:
            notes.event("distillation-undone", f"there is no classifier of the mixtures: {failure}")
            return None
        return {name: one.detach().clone() for name, one in head.state_dict().items()}

    def _draw(
        self, tables: Sequence[Tables], factors: Sequence[float], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Returns drawn features `[N, F]` float32 and their classes `[N]`."""
        wanted = torch.stack([factor * one["counts"].double() for one, factor in zip(tables, factors, strict=True)])
        wanted = (wanted * min(1.0, self.config.drawn_rows / float(wanted.sum()))).round().long()
        rows, labels = [torch.zeros(0, tables[0]["means"].shape[-1])], [torch.zeros(0, dtype=torch.int64)]
        for table, counts_c in zip(tables, wanted, strict=True):
            for label in counts_c.nonzero().flatten().tolist():
                shares_k = table["shares"][label].double().clamp_min(0)
                if not shares_k.any():
                    continue
                number = int(counts_c[label])
                chosen_n = torch.multinomial(shares_k, number, replacement=True, generator=generator)
                noise_nf = torch.randn(number, table["means"].shape[-1], generator=generator, dtype=torch.float64)
                rows.append(
                    (
                        table["means"][label].double()[chosen_n]
                        + self._scaled(noise_nf, chosen_n, table["variances"][label].double())
                    ).float()
                )
                labels.append(torch.full((number,), label))
        return torch.cat(rows), torch.cat(labels)

    def _scaled(self, noise_nf: Tensor, chosen_n: Tensor, variances: Tensor) -> Tensor:
        """Returns standard normal rows with the covariances of their components; variances below 0 count as 0."""
        if self.config.covariance == "full":
            values_kf, vectors_kff = torch.linalg.eigh((variances + variances.mT) / 2)
            roots_kff = vectors_kff * values_kf.clamp_min(0).sqrt()[:, None, :]
            scaled_nf = torch.zeros_like(noise_nf)
            for number, root_ff in enumerate(roots_kff):
                scaled_nf[chosen_n == number] = noise_nf[chosen_n == number] @ root_ff.T
            return scaled_nf
        deviations_n = variances.clamp_min(0).sqrt()[chosen_n]
        return noise_nf * (deviations_n if self.config.covariance == "diagonal" else deviations_n[:, None])


def fit_mixture(rows_nf: Tensor, components: int, covariance: str, generator: torch.Generator) -> Tables:
    """Fits a Gaussian mixture by expectation and maximisation, from means at random rows.

    Args:
        rows_nf: `[N, F]` float64, at least one row.
        components: Most components; there are at most N.
        covariance: One of `COVARIANCES`.
        generator: Draws the rows.

    Returns:
        `shares` `[K]`, `means` `[K, F]`, and `variances` `[K]`, `[K, F]` or `[K, F, F]`.
    """
    count = min(components, len(rows_nf))
    means_kf = rows_nf[torch.randperm(len(rows_nf), generator=generator)[:count]]
    weights_nk = torch.cdist(rows_nf, means_kf).argmin(1)[:, None].eq(torch.arange(count)).double()
    before = -math.inf
    for _ in range(1 if count == 1 else _MAX_STEPS):
        mixture = _maximised(rows_nf, weights_nk, covariance)
        log_nk = _log_densities(rows_nf, mixture, covariance)
        weights_nk, likelihood = log_nk.softmax(1), float(log_nk.logsumexp(1).mean())
        if likelihood - before < _TOLERANCE:
            break
        before = likelihood
    return mixture


def _maximised(rows_nf: Tensor, weights_nk: Tensor, covariance: str) -> Tables:
    """Returns the mixture with the highest likelihood for rows that belong to components with these weights."""
    total_k = weights_nk.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    means_kf = weights_nk.T @ rows_nf / total_k[:, None]
    centred_knf = rows_nf[None] - means_kf[:, None]
    if covariance == "full":
        variances = torch.einsum("nk,knf,kng->kfg", weights_nk, centred_knf, centred_knf) / total_k[:, None, None]
        variances = variances + _MIN_VARIANCE * torch.eye(rows_nf.shape[1], dtype=torch.float64)
    else:
        variances = torch.einsum("nk,knf->kf", weights_nk, centred_knf.square()) / total_k[:, None] + _MIN_VARIANCE
        variances = variances.mean(1) if covariance == "spherical" else variances
    return {"shares": total_k / total_k.sum(), "means": means_kf, "variances": variances}


def _log_densities(rows_nf: Tensor, mixture: Tables, covariance: str) -> Tensor:
    """Returns log share + log density of each row and component, `[N, K]`."""
    centred_knf = rows_nf[None] - mixture["means"][:, None]
    features = rows_nf.shape[1]
    if covariance == "full":
        factors_kff = torch.linalg.cholesky(mixture["variances"])
        scaled_knf = torch.linalg.solve_triangular(factors_kff, centred_knf.mT, upper=False).mT
        log_volume_k = 2 * factors_kff.diagonal(dim1=1, dim2=2).log().sum(1)
    else:
        variances_kf = mixture["variances"].reshape(len(centred_knf), -1).expand(-1, features)
        scaled_knf = centred_knf / variances_kf.sqrt()[:, None]
        log_volume_k = variances_kf.log().sum(1)
    log_nk: Tensor = -(scaled_knf.square().sum(2) + log_volume_k[:, None] + features * math.log(2 * math.pi)).T / 2
    return log_nk + mixture["shares"].log()


register("fedpft", FedPFTConfig, FedPFTDevice, FedPFTServer)
