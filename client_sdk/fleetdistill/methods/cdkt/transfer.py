"""Distances between two models' outputs for the proxy set, and the correction of outcomes by labels, in CDKT-FL.

Server and devices use these functions, each with its own metric. Shape suffixes: `p` proxy samples, `b` rows of a
mini-batch, `c` classes, `f` dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.training.losses import distillation_loss, euclidean_distance, js_divergence


def with_labels(outcomes_pc: Tensor, labels_p: Tensor) -> Tensor:
    """Returns z̄ = ½ (z + y), the mean of outcomes and one-hot labels, which corrects wrong models.

    If the outcomes are probabilities, the true class always has the largest one. The paper has this step between
    eqs. (6) and (7).

    Args:
        outcomes_pc: Outcomes z, `[p, c]`, any float dtype.
        labels_p: Labels y, `[p]` int64.

    Returns:
        `[p, c]` in the dtype of `outcomes_pc`.
    """
    truth_pc = functional.one_hot(labels_p, outcomes_pc.shape[1]).to(outcomes_pc)
    return (outcomes_pc + truth_pc) / 2


@dataclass(frozen=True)
class Knowledge:
    """Targets of a regulariser by proxy row: outcomes z̄ `[p, c]` and embeddings h̄ `[p, f]`; None omits a term."""

    outcomes_pc: Tensor | None
    embeddings_pf: Tensor | None

    def to(self, device: torch.device) -> Knowledge:
        """Returns a copy in float32 on a device."""
        moved = (None if item is None else item.float().to(device) for item in (self.outcomes_pc, self.embeddings_pf))
        return Knowledge(*moved)


@dataclass(frozen=True)
class Distance:
    """The paper's distance D of one side.

    Attributes:
        metric: `kl`, `js` or `norm2`.
        temperature: The paper's τ, above 0; used only by `kl`.
        outcome_space: `probs` compares and averages softmax(logits / τ), `logits` the logits themselves.
        norm2_reduction: `mean_l2` takes the mean of the rows' norms, `frobenius` one norm over the mini-batch.
    """

    metric: str
    temperature: float = 3.0
    outcome_space: str = "probs"
    norm2_reduction: str = "mean_l2"

    @property
    def is_mean(self) -> bool:
        """Whether the distance of a mini-batch is the mean of its rows' distances."""
        return self.metric != "norm2" or self.norm2_reduction == "mean_l2"

    def outcomes(self, logits: Tensor) -> Tensor:
        """Returns the outcomes z of logits, `[..., c]` in the logits' dtype."""
        return self._soft(logits) if self.outcome_space == "probs" else logits

    def between_outcomes(self, teacher_bc: Tensor, logits_bc: Tensor) -> Tensor:
        """Returns D(z̄, z), a scalar, for teacher outcomes `[b, c]` and a student's logits `[b, c]`."""
        if self.metric == "norm2":
            return self._norm2(teacher_bc, self.outcomes(logits_bc))
        probs_bc = teacher_bc if self.outcome_space == "probs" else self._soft(teacher_bc)
        return self._divergence(probs_bc, logits_bc)

    def between_embeddings(self, teacher_bf: Tensor, embeddings_bf: Tensor) -> Tensor:
        """Returns D(h̄, h), a scalar; `kl` and `js` treat the F numbers of an embedding as logits."""
        if self.metric == "norm2":
            return self._norm2(teacher_bf, embeddings_bf)
        return self._divergence(self._soft(teacher_bf), embeddings_bf)

    def regulariser(
        self, knowledge: Knowledge, rows_b: Tensor, logits_bc: Tensor, embeddings_bf: Tensor | None
    ) -> Tensor:
        """Returns ℛ of eqs. (6) and (8) for a proxy mini-batch: the sum of the terms that have targets.

        Args:
            knowledge: Targets, constants.
            rows_b: Positions of the mini-batch's rows in the proxy set, `[b]`.
            logits_bc: The student's logits.
            embeddings_bf: The student's embeddings; None omits their term.
        """
        total = logits_bc.new_zeros(())
        if knowledge.outcomes_pc is not None:
            total = total + self.between_outcomes(knowledge.outcomes_pc[rows_b], logits_bc)
        if knowledge.embeddings_pf is not None and embeddings_bf is not None:
            total = total + self.between_embeddings(knowledge.embeddings_pf[rows_b], embeddings_bf)
        return total

    def _soft(self, scores: Tensor) -> Tensor:
        return (scores / self.temperature if self.metric == "kl" else scores).softmax(dim=-1)

    def _divergence(self, probs_b: Tensor, scores_b: Tensor) -> Tensor:
        if self.metric == "kl":
            return distillation_loss(scores_b, probs_b, self.temperature)
        return js_divergence(scores_b, probs_b)

    def _norm2(self, teacher_b: Tensor, student_b: Tensor) -> Tensor:
        return euclidean_distance(student_b, teacher_b, over_batch=self.norm2_reduction == "frobenius")


def proxy_batches(samples: int, batch_size: int, generator: torch.Generator, *, smallest: int = 1) -> Iterator[Tensor]:
    """Yields mini-batches of proxy rows endlessly; each pass has a new order.

    Args:
        samples: Number of proxy samples, at least 1.
        batch_size: Rows of a mini-batch, at least 1.
        generator: Source of the order.
        smallest: Minimum rows of a mini-batch; a smaller last one of a pass is omitted. At most `samples` and
            `batch_size` apply.
    """
    smallest = min(smallest, samples, batch_size)
    while True:
        for rows in torch.split(torch.randperm(samples, generator=generator), batch_size):
            if len(rows) >= smallest:
                yield rows
