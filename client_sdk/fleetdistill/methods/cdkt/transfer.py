"""How CDKT-FL compares what two models say about the proxy set: outcomes, their correction by labels, and distances.

Both halves use it, each with its own metric. Shapes: `p` proxy samples, `b` rows of a mini-batch, `c` classes, `f`
numbers of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.training.losses import distillation_loss, euclidean_distance, js_divergence


def with_labels(outcomes_pc: Tensor, labels_p: Tensor) -> Tensor:
    """z̄ = ½ (z + y): averages outcomes with the one-hot labels, which corrects models that are wrong (section 3.3).

    Where the outcomes are probabilities the true class always wins. Returns `[p, c]` in the outcomes' type.
    """
    truth_pc = functional.one_hot(labels_p, outcomes_pc.shape[1]).to(outcomes_pc)
    return (outcomes_pc + truth_pc) / 2


@dataclass(frozen=True)
class Knowledge:
    """What one side learns towards, by proxy row: outcomes z̄ `[p, c]`, embeddings h̄ `[p, f]`; None for a term off."""

    outcomes_pc: Tensor | None
    embeddings_pf: Tensor | None

    def to(self, device: torch.device) -> Knowledge:
        """The same, in float32 on a device."""
        moved = (None if one is None else one.float().to(device) for one in (self.outcomes_pc, self.embeddings_pf))
        return Knowledge(*moved)


@dataclass(frozen=True)
class Distance:
    """The paper's D of one side, and the space that outcomes are compared in.

    Attributes:
        metric: `kl`, `js` or `norm2`.
        temperature: The paper's τ; only KL has one.
        outcome_space: `probs` compares and averages softmax(logits / τ), `logits` the logits themselves.
        norm2_reduction: `mean_l2` is the mean of the rows' norms, `frobenius` one norm over the mini-batch.
    """

    metric: str
    temperature: float = 3.0
    outcome_space: str = "probs"
    norm2_reduction: str = "mean_l2"

    def outcomes(self, logits: Tensor) -> Tensor:
        """z: what is averaged over devices and with labels, `[..., c]`, in the type of the logits."""
        return self._soft(logits) if self.outcome_space == "probs" else logits

    def between_outcomes(self, teacher_bc: Tensor, logits_bc: Tensor) -> Tensor:
        """D(z̄, z): teacher outcomes against a student's logits, a scalar."""
        if self.metric == "norm2":
            return self._norm2(teacher_bc, self.outcomes(logits_bc))
        probs_bc = teacher_bc if self.outcome_space == "probs" else self._soft(teacher_bc)
        return self._divergence(probs_bc, logits_bc)

    def between_embeddings(self, teacher_bf: Tensor, embeddings_bf: Tensor) -> Tensor:
        """D(h̄, h), a scalar; KL and JS read embeddings as scores over their F numbers."""
        if self.metric == "norm2":
            return self._norm2(teacher_bf, embeddings_bf)
        return self._divergence(self._soft(teacher_bf), embeddings_bf)

    def regulariser(
        self, knowledge: Knowledge, rows_b: Tensor, logits_bc: Tensor, embeddings_bf: Tensor | None
    ) -> Tensor:
        """ℛ of eqs. (6) and (8) over a proxy mini-batch: the terms that there is knowledge for, with equal weight.

        Args:
            knowledge: What to learn towards, a constant.
            rows_b: Which proxy samples the student was shown.
            logits_bc, embeddings_bf: What it says about them.
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
    """Mini-batches of proxy rows without end: every row once, then shuffled anew; a rest below `smallest` is left out.

    Where there are fewer than `smallest` samples or rows in a batch, batches are as large as they can be.
    """
    smallest = min(smallest, samples, batch_size)
    while True:
        for rows in torch.split(torch.randperm(samples, generator=generator), batch_size):
            if len(rows) >= smallest:
                yield rows
