"""Settings of classstats, and those that classstats_private has too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge.statistics import MIN_ROWS_PER_DIRECTION
from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.classstats.class_space import usual_dimensions
from fleetdistill.methods.local import LocalTraining

SCATTERING = "scattering"
_MAX_RANK = 512
_ANONYMOUS_ROWS = 10
"""Fewest samples per direction with which the server cannot recognise single samples."""
_MAX_IMAGES = 100_000
_MAX_REFINE_STEPS = 20
_DIMENSIONS = (8, 2048)
SMALLEST_SIDE = 8
_CHOICES = {
    "features": (SCATTERING, "model"),
    "predictor": ("closed_form", "trained"),
    "own_network": ("kept", "taught"),
}


@dataclass(frozen=True, kw_only=True)
class SpaceConfig(LocalTraining):
    """Settings of classstats and classstats_private; local training's apply to a predictor and a taught network.

    Attributes:
        features: Features that the statistics describe: `scattering`, fixed wavelets for images; or `model`, the
            features of [model] extractor with its weights.
        count_cap: Upper bound of a device's rows in the merge, as a multiple of the median device's, at least 1; 0
            means 3, or no bound if `robust` is `off`.
        predictor: `closed_form`, the nearest class mean; or `trained`, a predictor that the device trains.
        predictor_steps: Minimum number of training steps of the predictor, at least 1.
        own_statistics_guard: Whether a device uses a personal variant of only its own statistics if that is better.
        own_network: Treatment of the app's own network: `kept` unchanged, or `taught` by the general variant.
        own_network_epochs: Passes over the device's rows in teaching the network, at least 1.
        own_network_rate: Learning rate of teaching the network, above 0; it falls to a tenth.
        drawn_images: Number of images of the fleet's classes that a device makes from its own images to teach the
            network, 0 to 100,000.
        dimensions: Numbers of a row; each method has its own range.
    """

    usual_rounds: ClassVar[int] = 1

    keeps_optimizer: ClassVar[bool] = True  # used by the local-training control

    learning_rate: float = 0.02
    features: str = SCATTERING
    count_cap: float = 0.0
    predictor: str = "closed_form"
    predictor_steps: int = 400
    own_statistics_guard: bool = True
    own_network: str = "kept"
    own_network_epochs: int = 60
    own_network_rate: float = 0.05
    drawn_images: int = 600
    dimensions: int = 0

    def __post_init__(self) -> None:
        LocalTraining.__post_init__(self)
        for name, known in _CHOICES.items():
            check_choice(name, getattr(self, name), known)
        for name in ("predictor_steps", "own_network_epochs"):
            check_range(name, getattr(self, name), 1)
        check_range("drawn_images", self.drawn_images, 0, _MAX_IMAGES + 1)
        check_range("own_network_rate", self.own_network_rate, 0, open_low=True)
        if self.count_cap:
            check_range("count_cap", self.count_cap, 1)
        if self.own_network == "taught" and self.features != SCATTERING:
            raise ConfigurationError(
                f"own_network = 'taught' needs images from the scattering, but features is {self.features!r}; set "
                "own_network = 'kept' or features = 'scattering'"
            )

    def dimensions_for(self, input_shape: tuple[int, ...], features: int) -> int:
        """Returns the numbers of a row in a run.

        Args:
            input_shape: Shape of one input.
            features: Numbers that the extractor makes of one input.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ClassStatsConfig(SpaceConfig):
    """Settings of class statistics in one exchange, in addition to those that classstats_private has too.

    Attributes:
        dimensions: D, numbers of the projected features, in [8, 2048]; 0 means 256 for images below 12 pixels a side
            and 384 otherwise. Features with at most D numbers are not projected.
        rank: R, maximum number of directions of the covariance that a device sends, in [0, 512]; 0 sends only
            the diagonal.
        rows_per_direction: Minimum degrees of freedom per direction, at least 2. A larger value reveals less about
            single rows.
        min_samples: n_min, minimum number of samples of a class that a device sends, at least 2.
        shrinkage: s, weight of the diagonal in the merged covariance, in [0, 1); or `rule`, D / (4 df) in [0.05, 0.5].
        refine: `off`; `gradients`: after a merge the devices sum gradients in further exchanges, towards a softmax
            head; if the first step hardly lowers the loss, they get the closed form; or `auto`: `gradients` if the
            method sums them securely, else `off`, because one device's sums reveal more of its rows.
        refine_steps: R, number of these exchanges, in [2, 20].
    """

    rank: int = 128
    rows_per_direction: int = 15
    min_samples: int = 5
    shrinkage: float | str = "rule"
    refine: str = "off"
    refine_steps: int = 5

    def __post_init__(self) -> None:
        SpaceConfig.__post_init__(self)
        low, high = _DIMENSIONS
        if self.dimensions and not low <= self.dimensions <= high:
            raise ConfigurationError(f"dimensions must be 0 or in [{low}, {high}], got {self.dimensions!r}")
        if not 0 <= self.rank <= _MAX_RANK:
            raise ConfigurationError(f"rank must be in [0, {_MAX_RANK}], got {self.rank!r}")
        check_range("rows_per_direction", self.rows_per_direction, MIN_ROWS_PER_DIRECTION)
        check_range("min_samples", self.min_samples, 2)
        self._check_shrinkage()
        self._check_refine()

    def _check_refine(self) -> None:
        check_choice("refine", self.refine, ("off", "gradients", "auto"))
        check_range("refine_steps", self.refine_steps, 2, _MAX_REFINE_STEPS + 1)
        if not self.refines:
            return
        if (self.predictor, self.own_network) != ("closed_form", "kept"):
            raise ConfigurationError(
                f"refine = {self.refine!r} needs predictor = 'closed_form' and own_network = 'kept', got "
                f"{self.predictor!r} and {self.own_network!r}: both draw rows around class means, which a head has not"
            )
        if self.participation_ratio != 1:
            raise ConfigurationError(
                f"participation_ratio must be 1 with refine = {self.refine!r}, got {self.participation_ratio!r}: the "
                "gradients are summed over all devices of the merge"
            )

    @property
    def refines(self) -> bool:
        """Whether devices sum gradients."""
        return self.refine == "gradients" or (self.refine == "auto" and self.sums_securely)

    def _check_shrinkage(self) -> None:
        if isinstance(self.shrinkage, str):
            check_choice("shrinkage", self.shrinkage, ("rule",))
        else:
            check_range("shrinkage", self.shrinkage, 0, 1)

    def reveals(self) -> str:
        """See `LocalTraining.reveals`."""
        texts = []
        if self.rank and self.rows_per_direction < _ANONYMOUS_ROWS:
            texts.append(
                f"class statistics with a direction for every {self.rows_per_direction} samples leave, fewer than "
                f"{_ANONYMOUS_ROWS}; the server can recognise single samples in them"
            )
        if self.refines and self.sums_securely:
            texts.append(
                "sums of gradients leave under masks at heads that the server chooses; one that does not follow the "
                "protocol can choose them so that single rows of the fleet show"
            )
        elif self.refines:
            texts.append(
                f"{self.refine_steps} sums of gradients leave besides class statistics; the server recognises more "
                "single samples with them"
            )
        return "; and ".join(texts)

    def dimensions_for(self, input_shape: tuple[int, ...], features: int) -> int:
        """Returns D for a run: `dimensions` or the default for its inputs, at most the numbers of the features."""
        return min(self.dimensions or usual_dimensions(input_shape), features)
