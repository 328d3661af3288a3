"""Attack on class tables among the tensors of a method: means or sums of features, with or without covariances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fleetdistill.knowledge import Array, NamedTensors
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.classstats.shared_statistics import Moments
from fleetdistill.methods.classstats_private.sums import RowSums
from fleetdistill.methods.classstats_secure.encoding import moments_of_sums
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model, embedding_tap
from fleetdistill_lab.audit.knowledge import PublicMoments, features_of, statistics_scores
from fleetdistill_lab.audit.record import Attacker, Message, Part, Rows, Scores

__all__ = ["by_tables", "read_table", "table_scores"]

Extractor = Callable[[Tensor], Tensor]

_NOT_SENT = np.zeros((0, 0))


def by_tables(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores by the last class table of each part; see `table_scores`.

    If the server knows no weights of the devices, it trains a model of its own on public rows, as one of them.
    """
    last = {name: number for number, message in enumerate(messages) for name in message.sent}
    scores: dict[Part, Scores] = {}
    for name, number in last.items():
        part = messages[number].sent[name]
        table = read_table(part.tensors, attacker.method.context.classes) if isinstance(part, NamedTensors) else []
        extractor = _extractor(name, messages[: number + 1], attacker) if table else None
        if extractor is not None:
            found = _scores(table, extractor, attacker, rows)
            scores |= {(name, attack): one for attack, one in found.items()}
    return scores


def _scores(table: Sequence[Moments], extractor: Extractor, attacker: Attacker, rows: Rows) -> dict[str, Scores]:
    def moments() -> PublicMoments:
        return PublicMoments(features_of(extractor, attacker.public.inputs), attacker.public.labels.numpy())

    own = attacker.once("features", extractor, rows, lambda: features_of(extractor, rows.inputs))
    if own.shape[1] != table[0].dimensions:
        return {}
    return table_scores(table, own, rows.labels.numpy(), attacker.once("moments", extractor, rows, moments))


def table_scores(table: Sequence[Moments], own_nf: Array, labels_n: Array, public: PublicMoments) -> dict[str, Scores]:
    """Returns the scores of `statistics_scores` by attack; of several Gaussians of a class, each row's largest."""
    result: dict[str, Scores] = {}
    for moments in table:
        of_classes = np.isin(labels_n, moments.labels)
        for attack, scores in statistics_scores(moments, _span(moments), own_nf, labels_n, public).items():
            largest = result.setdefault(attack, np.full(len(labels_n), -np.inf))
            largest[of_classes] = np.maximum(largest, scores)[of_classes]
    return result


def _span(moments: Moments) -> Array:
    """Returns an orthonormal basis of what rows differ in from their means, `[q, F]`; empty if this may be anything."""
    if not moments.covariance.size or not 0 < moments.df < moments.dimensions:
        return _NOT_SENT
    return np.asarray(np.linalg.eigh(moments.covariance)[1][:, -moments.df :].T)


def read_table(tensors: Mapping[str, Array], classes: int) -> list[Moments]:
    """Returns the moments in a table of C classes and F features; none if these are not the names and shapes of one.

    `counts` `[C]` come with `sums` `[C, F]` and the `products` `[F, F]` of all rows, as in FedCGS; with `prototypes`
    `[C, F]`, as in FedProto; or with `means` `[C, K, F]`, `shares` `[C, K]` and `variances`, as in FedPFT, where each
    Gaussian of a mixture has its own moments. One variance of all features is no covariance.
    """
    sent = {name: one.astype(np.float64) for name, one in tensors.items()}
    counts, sums, products = (sent.get(name, _NOT_SENT) for name in ("counts", "sums", "products"))
    means = sent.get("means", sent.get("prototypes", _NOT_SENT))
    shares = sent.get("shares", np.ones((classes, 1)))
    if counts.shape != (classes,) or not counts.any():
        return []
    if sums.ndim == 2 and len(sums) == classes and products.shape == 2 * sums.shape[1:]:
        return [moments_of_sums(RowSums(counts=counts, sums=sums, second_moment=products))]
    if len(means) != classes or shares.shape != (classes, shares.size // classes) or means.size % shares.size:
        return []
    means, variances = means.reshape(*shares.shape, -1), sent.get("variances", _NOT_SENT)
    if variances.shape not in [shares.shape + number * means.shape[2:] for number in range(3)]:
        variances = np.zeros(shares.shape)
    return [
        Moments(
            labels=(label,),
            counts=counts[[label]] * shares[label, k],
            means=means[label, [k]],
            covariance=_covariance(variances[label, k]),
            df=round(counts[label] * shares[label, k]) - 1 if variances.ndim == 4 else 0,
        )
        for label, k in np.argwhere(counts[:, None] * shares > 0).tolist()
    ]


def _covariance(variances: Array) -> Array:
    """Returns a covariance `[F, F]` of as many numbers, or of F variances; of one, none."""
    return _NOT_SENT if variances.ndim == 0 else np.diag(variances) if variances.ndim == 1 else variances


def _extractor(name: str, messages: Sequence[Message], attacker: Attacker) -> Extractor | None:
    """Returns the extractor of a part's features: the one that the server knows, or else of a model of its own."""
    known = attacker.method.known_extractor(name, messages[-1].received)
    if known is not None or attacker.device is None or not attacker.method.context.models.device:
        return known
    asks = [message for message in messages if name in message.sent]
    received = asks[-1].received.get(name)  # in a round all devices get the same
    return attacker.once("own model", received, attacker.public, lambda: _own_embedding(asks, attacker))


def _own_embedding(asks: Sequence[Message], attacker: Attacker) -> Extractor | None:
    """Returns the embedding of a model that is trained on public rows as a device's that gets these asks."""
    model, public = attacker.method.context.device_model(), attacker.public
    assert attacker.device is not None
    half = attacker.device(
        attacker.method.config,
        Local(
            model=model,
            taps=check_local_model(model),
            data=TensorData(public.inputs, public.labels),
            classes=attacker.method.context.classes,
            torch_device=torch.device("cpu"),
        ),
    )
    for one in asks:
        half.handle(Ask(round=one.round, step=one.step, seed=one.seed, parts=one.received))
    return embedding_tap(model.eval())
