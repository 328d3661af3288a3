"""Class statistics with an averaged extractor: the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.local import LocalTraining
from fleetdistill.wire.directions import LEAST_ROWS_PER_DIRECTION, ROWS_PER_DIRECTION

MOST_RANK = 64
_MOST_ROWS = 10_000
_DROPPED_TO = 0.1
_CHOICES = {
    "features": ("averaged",),
    "covariance": ("class",),
    "agreement_from": ("devices", "server"),
    "personal_extractor": ("frozen", "own"),
}


@dataclass(frozen=True, kw_only=True)
class AveragedConfig(LocalTraining):
    """Settings of this form of class statistics beside those of local training.

    Attributes:
        features: `averaged`: behind an extractor that devices average, or one that is given with `extractor_rounds` 0.
        covariance: `class`: each class has one of its own.
        rate_drop_after: Completed rounds after which the learning rate is a tenth, at the earliest when the extractor
            is frozen; 0 for never.
        extractor_rounds: R0, rounds that train and average the extractor, at least 0; it is frozen afterwards. 0 only
            for an extractor that comes with trained weights.
        rank: r, directions of a class's covariance that are kept, in [0, 64]; 0 is a diagonal Gaussian.
        rows_per_direction: Samples of a class that a device must have for each direction, at least 2. The more, the
            less does the span of the directions say about single rows.
        shrinkage: s, share of the covariance that all classes have in common, in [0, 1).
        min_samples: n_min, samples that a device must have of a class to send it, at least 2.
        clip_norm: L2 norm to which the features of a row are scaled down before they are summarised, at least 0; 0 is
            no clipping. It bounds what one row can do to the sums; without noise it is no differential privacy.
        drawn_rows: M, rows of each class that are drawn for a round, 1 to 10,000.
        drawn_weight: λ, weight of their loss beside that of own rows, at least 0.
        agreement_every: Rounds from one exchange of soft predictions on drawn rows to the next; 0 for none.
        agreement_from: Whose soft predictions devices learn from: `devices`, the mean of their own; or `server`, those
            of the server's own predictor, in the round of the merge already and without anything going up.
        agreement_weight: w, weight of the loss towards them, at least 0.
        temperature: τ of that loss, above 0.
        personal_extractor: The personal predictor's: `frozen`, the fleet's; or `own`, a copy of it that trains on with
            this predictor. It never leaves the device.
        server_epochs: Passes of the server's own predictor over drawn rows, at least 1, each over new ones.
        means_only: Send and draw means alone, without spread, as prototypes: the control of what the spread is worth.
        recognition_guard: Leave out a class whose drawn rows the server's own predictor does not recognise.
    """

    keeps_optimizer: ClassVar[bool] = True

    features: str = "averaged"
    covariance: str = "class"
    rate_drop_after: int = 0
    extractor_rounds: int = 5
    rank: int = 8
    rows_per_direction: int = ROWS_PER_DIRECTION
    shrinkage: float = 0.1
    min_samples: int = 5
    clip_norm: float = 0.0
    drawn_rows: int = 50
    drawn_weight: float = 1.0
    agreement_every: int = 0
    agreement_from: str = "devices"
    agreement_weight: float = 1.0
    temperature: float = 2.0
    personal_extractor: str = "frozen"
    server_epochs: int = 20
    means_only: bool = False
    recognition_guard: bool = True

    def __post_init__(self) -> None:
        LocalTraining.__post_init__(self)
        if not 0 <= self.rank <= MOST_RANK:
            raise ConfigurationError(f"rank must be in [0, {MOST_RANK}], got {self.rank!r}")
        check_range("rows_per_direction", self.rows_per_direction, LEAST_ROWS_PER_DIRECTION)
        check_range("shrinkage", self.shrinkage, 0, 1)
        check_range("min_samples", self.min_samples, 2)
        not_negative = ("rate_drop_after", "extractor_rounds", "clip_norm", "drawn_weight")
        for name in (*not_negative, "agreement_every", "agreement_weight"):
            check_range(name, getattr(self, name), 0)
        check_range("drawn_rows", self.drawn_rows, 1, _MOST_ROWS + 1)
        check_range("server_epochs", self.server_epochs, 1)
        check_range("temperature", self.temperature, 0, open_low=True)
        self._check_choices()

    def _check_choices(self) -> None:
        for name, known in _CHOICES.items():
            check_choice(name, getattr(self, name), known)
        if self.agreement_from == "server" and not self.agreement_every:
            raise ConfigurationError(
                "agreement_from is 'server' and agreement_every 0, so nobody would learn from its predictions; set "
                "agreement_every to the rounds from one time to the next, or beyond the run's rounds for once"
            )

    @classmethod
    def other_forms(cls) -> Mapping[str, type[LocalTraining]]:
        """The one of one exchange."""
        from fleetdistill.methods.classstats.config import ClassStatsConfig

        return {'features = "scattering" or "model"': ClassStatsConfig}

    @property
    def moments(self) -> int:
        """Vectors of F numbers that are sent of a class: its mean, and of its spread what there is to be."""
        return 1 if self.means_only else 2 + self.rank

    def for_classes(self, classes: int) -> AveragedConfig:
        """The same settings; none depends on the number of classes."""
        return self

    def local_rate(self, number: int) -> float:
        """Learning rate of devices in a round, numbered from 1; it stays while all train one extractor."""
        dropped = bool(self.rate_drop_after) and number > max(self.rate_drop_after, self.extractor_rounds)
        return self.learning_rate * (_DROPPED_TO if dropped else 1.0)

    def check_rounds(self, rounds: int) -> None:
        """There must be one after the extractor's."""
        if 0 < rounds <= self.extractor_rounds:
            raise ConfigurationError(
                f"[run] rounds is {rounds}, and all of them would go into the extractor: [method] extractor_rounds is "
                f"{self.extractor_rounds}; run at least {self.extractor_rounds + 1} rounds, or lower extractor_rounds"
            )

    @property
    def devices_agree(self) -> bool:
        """Whether devices send soft predictions."""
        return bool(self.agreement_every) and self.agreement_from == "devices"

    @property
    def server_teaches(self) -> bool:
        """Whether the server's own predictor gives them."""
        return bool(self.agreement_every) and self.agreement_from == "server"

    def agrees_in(self, completed: int) -> bool:
        """Whether the round after so many completed ones has new soft predictions."""
        since = completed - self.extractor_rounds
        first = 0 if self.server_teaches else 1  # devices have something to say when they have learned once
        return bool(self.agreement_every) and since >= first and since % self.agreement_every == 0
