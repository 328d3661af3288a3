"""A model whose probabilities are the product of two models' probabilities."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from fleetdistill.training.model import FeatureModel


class CombinedModel(nn.Module):
    """A model whose logits are log p_first + log p_second; their softmax is the normalised product."""

    def __init__(self, first: nn.Module, second: nn.Module, *, one_extractor: bool) -> None:
        """Combines two local models without copying them.

        Args:
            first: The first local model.
            second: The second local model.
            one_extractor: Whether both have the same extractor; only the first one's is then run.
        """
        super().__init__()
        self.first = first
        self.second = second
        self.one_extractor = one_extractor

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits `[batch, classes]` of inputs `[batch, *input_shape]`."""
        first, second = cast(FeatureModel, self.first), cast(FeatureModel, self.second)
        features = first.features(x)
        further = features if self.one_extractor else second.features(x)
        return first.predict(features).log_softmax(dim=-1) + second.predict(further).log_softmax(dim=-1)
