"""A model that multiplies what two predictors say."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from fleetdistill.training.model import FeatureModel


class CombinedModel(nn.Module):
    """The product of two models' probabilities.

    The logits are log p_first + log p_second, so that their softmax is the product, made to sum to 1 again.
    """

    def __init__(self, first: nn.Module, second: nn.Module, *, one_extractor: bool) -> None:
        """Joins two local models, which are used and not copied.

        Args:
            one_extractor: Their extractors give the same, so one pass through the first one's serves both.
        """
        super().__init__()
        self.first = first
        self.second = second
        self.one_extractor = one_extractor

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[batch, classes]` of inputs `[batch, *input_shape]`."""
        first, second = cast(FeatureModel, self.first), cast(FeatureModel, self.second)
        features = first.features(x)
        further = features if self.one_extractor else second.features(x)
        return first.predict(features).log_softmax(dim=-1) + second.predict(further).log_softmax(dim=-1)
