"""Settings of class statistics with an averaged extractor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.local import LocalTraining, directions_reveal
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
    """Settings of the averaged form of class statistics, in addition to those of local training.

    Attributes:
        features: `averaged`: statistics of the features of an extractor that devices average, or of a given one with
            `extractor_rounds` 0.
        covariance: `class`: each class has its own covariance.
        rate_drop_after: Number of completed rounds after which the learning rate is a tenth, but not before the
            extractor is frozen; 0 for never.
        extractor_rounds: R0, rounds that train and average the extractor before it is frozen, at least 0. 0 needs an
            extractor with trained weights.
        rank: r, directions of a class's covariance, in [0, 64]; 0 is a diagonal Gaussian.
        rows_per_direction: Minimum number of a class's samples per direction, at least 2. A larger value reveals less
            about single rows.
        shrinkage: s, weight of the covariance that all classes share, in [0, 1).
        min_samples: n_min, minimum number of samples of a class that a device sends, at least 2.
        clip_norm: Maximum L2 norm of a row's features before they are summarised, at least 0; longer rows are scaled
            down, and 0 turns clipping off. It bounds the effect of one row; without noise it is not differential
            privacy.
        drawn_rows: M, rows of each class drawn in a round, 1 to 10,000.
        drawn_weight: λ, weight of the loss on drawn rows, at least 0.
        agreement_every: Rounds between exchanges of soft predictions on drawn rows, at least 0; 0 for none.
        agreement_from: Source of the soft predictions: `devices`, the mean of the devices' own; or `server`, those of
            the server's predictor, which need no upload and start in the round of the merge.
        agreement_weight: w, weight of the loss on soft predictions, at least 0.
        temperature: τ of the loss on soft predictions, above 0.
        personal_extractor: Extractor of the personal predictor: `frozen`, the fleet's; or `own`, a copy that trains
            with this predictor and is never sent.
        server_epochs: The server's passes over drawn rows in training its predictor, at least 1; each draws new rows.
        means_only: Whether only means are sent and drawn, as prototypes; the control for the value of the covariance.
        recognition_guard: Whether a class is omitted if the server's predictor does not recognise its drawn rows.
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
                "agreement_from is 'server', but agreement_every is 0, so no device would learn from the server's "
                "predictions; set agreement_every to at least 1"
            )

    @classmethod
    def other_forms(cls) -> Mapping[str, type[LocalTraining]]:
        """Returns the configurations of the method's other forms: only `ClassStatsConfig`, with one exchange."""
        from fleetdistill.methods.classstats.config import ClassStatsConfig

        return {'features = "scattering" or "model"': ClassStatsConfig}

    @property
    def moments(self) -> int:
        """Number of vectors of F numbers that are sent for a class: mean, variances and directions."""
        return 1 if self.means_only else 2 + self.rank

    def reveals(self) -> str:
        """See `LocalTraining.reveals`."""
        return directions_reveal(self.rank, self.rows_per_direction)

    def for_classes(self, classes: int) -> AveragedConfig:
        """Returns this configuration: no setting depends on the number of classes."""
        return self

    def local_rate(self, number: int) -> float:
        """Returns the devices' learning rate in a round, counted from 1; it does not drop before R0."""
        dropped = bool(self.rate_drop_after) and number > max(self.rate_drop_after, self.extractor_rounds)
        return self.learning_rate * (_DROPPED_TO if dropped else 1.0)

    def check_rounds(self, rounds: int) -> None:
        """Raises ConfigurationError if no round remains after the extractor's rounds."""
        if 0 < rounds <= self.extractor_rounds:
            raise ConfigurationError(
                f"[run] rounds is {rounds}, but [method] extractor_rounds is {self.extractor_rounds}, so no round "
                f"remains after them; set rounds to at least {self.extractor_rounds + 1}, or lower extractor_rounds"
            )

    @property
    def devices_agree(self) -> bool:
        """Whether devices send soft predictions."""
        return bool(self.agreement_every) and self.agreement_from == "devices"

    @property
    def server_teaches(self) -> bool:
        """Whether the server's predictor makes the soft predictions."""
        return bool(self.agreement_every) and self.agreement_from == "server"

    def agrees_in(self, completed: int) -> bool:
        """Returns whether the round after `completed` completed ones exchanges new soft predictions."""
        since = completed - self.extractor_rounds
        first = 0 if self.server_teaches else 1  # devices predict drawn rows only after they were trained on them
        return bool(self.agreement_every) and since >= first and since % self.agreement_every == 0
