"""Class statistics behind an averaged extractor, `features = "averaged"`: what both halves agree on, and what the
device does. Our own method; no paper describes it.

Devices with different predictors average a small extractor for a few rounds and freeze it. Each then sends, once, a
low-rank Gaussian of its features for every class that it has enough samples of, and gets, once, those of the fleet.
From then on it trains on its own rows and on rows drawn from the Gaussians, so that it learns classes that it has never
seen; a second predictor trains on its own rows alone.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fleetdistill.errors import CannotAnswer, ConfigurationError, WireError
from fleetdistill.knowledge import PERSONAL, Array, ClassStatistics, ModelParameters, Plan, SoftPredictions
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers, check_choice, check_range
from fleetdistill.methods.classstats.gaussians import (
    ClassSummary,
    clip,
    draw_classes,
    from_wire,
    mean_alone,
    summarise,
    to_wire,
)
from fleetdistill.methods.local import LocalTraining, make_local_optimizer
from fleetdistill.seeds import derive_seed
from fleetdistill.wire.directions import LEAST_ROWS_PER_DIRECTION, ROWS_PER_DIRECTION

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fleetdistill.training.local_training import TrainingReport

_MOST_RANK = 64
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
        if not 0 <= self.rank <= _MOST_RANK:
            raise ConfigurationError(f"rank must be in [0, {_MOST_RANK}], got {self.rank!r}")
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
        from fleetdistill.methods.classstats.device import ClassStatsConfig

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


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What the server's plan says of a round.

    Attributes:
        draw_seed: Of the round's drawn rows.
        nonnegative: Whether features cannot be below 0.
        merge: The server's name of the classes that they are drawn from.
        learning_rate: Of both predictors.
    """

    draw_seed: int
    nonnegative: bool
    merge: int
    learning_rate: float

    @classmethod
    def of(cls, ask: Ask) -> Lesson:
        """Raises WireError for a plan that lacks something, or says it in another type."""
        values = ask.part("plan", Plan).values
        expected = {"draw_seed": int, "nonnegative": bool, "merge": int, "learning_rate": float}
        found: dict[str, Any] = {name: values.get(name) for name in expected}
        for name, kind in expected.items():
            if type(found[name]) is not kind:
                text = f"the plan's {name} is {found[name]!r}, expected {kind.__name__}"
                raise WireError(f"step {ask.step!r}: {text}; the server is of another version, or broken")
        check_range("learning_rate", found["learning_rate"], 0, open_low=True)
        return cls(**found)


class DrawnRows:
    """Rows drawn for a round, handed out in shuffled passes.

    Args:
        features: `[R, ...]`.
        labels: `[R]`.
        soft: `[R, C]`, soft predictions for them, the fleet's mean or the server's; None where there are none.
        seed: Of the order.
    """

    def __init__(self, features: Tensor, labels: Tensor, soft: Tensor | None, seed: int) -> None:
        import torch

        self.features, self.labels, self.soft = features, labels, soft
        self._order = self._rows(torch.Generator().manual_seed(seed))

    def _rows(self, generator: torch.Generator) -> Iterator[int]:
        import torch

        while True:
            yield from torch.randperm(len(self.labels), generator=generator).tolist()

    def take(self, count: int) -> list[int]:
        """Positions of the next rows."""
        return [next(self._order) for _ in range(count)]


class AveragedDevice(DeviceMethod):
    """Device half: the general predictor is that of the app's model, the personal one is kept beside it."""

    config: AveragedConfig
    metrics_steps = ("train", "learn")

    def __init__(self, config: AveragedConfig, local: Local) -> None:
        super().__init__(config, local)
        self._personal: torch.nn.Module | None = None
        self._frozen: str | None = None  # digest of the extractor that it began with
        self._classes: dict[int, ClassSummary] | None = None
        self._merge: int | None = None  # the server's name of these classes
        self._agreed: tuple[int, Array] | None = None
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    # --- steps

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Before R0: local training of the whole model from the fleet's extractor; only the extractor goes back."""
        import torch
        from torch.nn import functional

        from fleetdistill.training.local_training import train_epochs
        from fleetdistill.training.parameters import model_parameters

        self._load_extractor(ask)
        self.trained = train_epochs(
            self.local.model,
            self.local.data,
            epochs=self.config.local_epochs,
            batch_size=self.config.batch_size,
            optimizer=self._optimizer("whole"),
            loss=lambda logits_bc, labels_b, rows_b: functional.cross_entropy(logits_bc, labels_b),
            generator=torch.Generator().manual_seed(ask.seed),
            device=self.local.torch_device,
        )
        sent = model_parameters(self.local.taps.extractor, scope="extractor")
        return Answer(parts={"extractor": sent}, samples=len(self.local.data))

    @answers("summarise")
    def summarise(self, ask: Ask) -> Answer:
        """At R0: freezes the extractor, sets the personal predictor apart, and sends the summaries of own classes."""
        self._freeze(ask)
        features = self._features().flatten(1).cpu().double().numpy()
        rows = clip(features, self.config.clip_norm) if self.config.clip_norm else features
        sent = to_wire(self._moments(rows), variances=not self.config.means_only)
        clipped = int((rows != features).any(axis=1).sum())
        too_small = 0 if sent.labels else len(self.local.data.labels.unique())
        notes = {"rows_clipped": clipped, "classes_too_small": too_small}
        return Answer(parts={"statistics": sent}, samples=len(self.local.data), notes=notes)

    def _moments(self, rows_nf: Array) -> dict[int, ClassSummary]:
        """What leaves of own rows, by class; the one place where noise would be added, of which there is none."""
        labels = self.local.data.labels.cpu().numpy()
        held = np.bincount(labels, minlength=self.local.classes)
        classes = {
            label: summarise(rows_nf[labels == label], self.config.rank, self.config.rows_per_direction)
            for label in np.flatnonzero(held >= self.config.min_samples).tolist()
        }
        return {label: mean_alone(one) for label, one in classes.items()} if self.config.means_only else classes

    @answers("agree")
    def agree(self, ask: Ask) -> Answer:
        """Soft predictions of the general predictor on the round's drawn rows."""
        from fleetdistill.training.local_training import extract
        from fleetdistill.training.losses import soft_targets

        lesson = self._take_classes(ask)
        drawn, _ = self._draw(lesson)
        logits = extract(self.local.taps.predict, drawn, model=self.local.model)
        values = soft_targets(logits, self.config.temperature).numpy()
        sent = SoftPredictions(noise_seed=lesson.draw_seed, values=values)
        return Answer(parts={"predictions": sent}, samples=len(self.local.data))

    @answers("learn")
    def learn(self, ask: Ask) -> Answer:
        """From R0 on: the general predictor on own and drawn rows together, the personal one on own rows."""
        lesson = self._take_classes(ask)
        if "agreed" in ask.parts:
            agreed = ask.part("agreed", SoftPredictions)
            self._agreed = (agreed.noise_seed, np.array(agreed.values))
        features = self._features()
        self._set_rate(lesson.learning_rate)
        self.trained = self._learn_general(features, self._drawn(lesson, ask.seed), ask.seed)
        undone = self._learn_personal(features, lesson.learning_rate, derive_seed(ask.seed, "personal"))
        return Answer(parts={}, samples=len(self.local.data), notes={"personal_undone": int(undone)})

    def _load_extractor(self, ask: Ask) -> None:
        from fleetdistill.training.parameters import take_weights

        take_weights(self.local.taps.extractor, ask.part("extractor", ModelParameters))

    def _freeze(self, ask: Ask) -> None:
        """Takes the extractor for good. Where a round is played again, the personal predictor is there already."""
        if self.config.extractor_rounds:
            self._load_extractor(ask)
        digest = _digest(self.local.taps.extractor)
        if digest != self._frozen:
            self._optimizers.clear()  # of the whole model, which is not trained any more
            self._personal, self._frozen = self._copy_of_model(), digest

    def _copy_of_model(self) -> torch.nn.Module:
        """For the personal predictor: with the very tensors of an extractor that is frozen, so that there is one."""
        from fleetdistill.training.parameters import state_tensors

        shared = [] if self._personal_has_own_extractor else state_tensors(self.local.taps.extractor)
        return copy.deepcopy(self.local.model, {id(one): one for one in shared})

    def _take_classes(self, ask: Ask) -> Lesson:
        """The plan, and the fleet's classes where they come along; else those that it names must be here already."""
        sent = self._sent_classes(ask) if "classes" in ask.parts else self._classes
        if sent is None or self._personal is None:
            raise WireError(
                f"step {ask.step!r} came before the fleet's class statistics, is the state directory older? The server "
                "asks for the summary again"
            )
        lesson = Lesson.of(ask)
        if "classes" in ask.parts:
            self._classes, self._merge = sent, lesson.merge
        if lesson.merge != self._merge:
            raise CannotAnswer(
                f"step {ask.step!r} is about class statistics {lesson.merge}, this device has {self._merge}: an answer "
                "of its came to nothing, or server or device is older; the server sends them with the next ask"
            )
        return lesson

    def _sent_classes(self, ask: Ask) -> dict[int, ClassSummary]:
        """Raises WireError for classes that are not the contract's, or of other features than this device's."""
        sent = ask.part("classes", ClassStatistics)
        _check_statistics(sent, prod(self._features_shape), self.local.classes)
        return from_wire(sent)

    def _features(self) -> Tensor:
        """Features of all own rows behind the frozen extractor, where training is."""
        from fleetdistill.training.local_training import extract

        found = extract(self.local.taps.features, self.local.data.inputs, model=self.local.model)
        return found.to(self.local.torch_device)

    # --- drawn rows

    def _draw(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        import torch

        if not self._classes:
            raise CannotAnswer("the fleet's class statistics have no class that rows could be drawn from")
        features, labels = draw_classes(
            self._classes, self.config.drawn_rows, lesson.draw_seed, nonnegative=lesson.nonnegative
        )
        shape, where = self._features_shape, self.local.torch_device
        return torch.from_numpy(features).reshape(-1, *shape).to(where), torch.from_numpy(labels).to(where)

    @cached_property
    def _features_shape(self) -> tuple[int, ...]:
        from fleetdistill.training.local_training import extract

        first = extract(self.local.taps.features, self.local.data.inputs[:1], model=self.local.model)
        return tuple(first.shape[1:])

    def _drawn(self, lesson: Lesson, seed: int) -> DrawnRows | None:
        """The round's rows, with the soft predictions for them where it has these; None where the fleet has no class.

        Raises:
            WireError: The soft predictions are of another shape.
        """
        import torch

        if not self._classes:
            return None
        features, labels = self._draw(lesson)
        soft = None
        if self._agreed is not None and self._agreed[0] == lesson.draw_seed:
            soft = torch.from_numpy(self._agreed[1].astype(np.float32)).to(features.device)
            if soft.shape != (len(labels), self.local.classes):
                expected = [len(labels), self.local.classes]
                raise WireError(f"soft predictions on drawn rows are {list(soft.shape)}, expected {expected}")
        return DrawnRows(features, labels, soft, derive_seed(seed, "drawn"))

    # --- training

    def _learn_general(self, features: Tensor, drawn: DrawnRows | None, seed: int) -> TrainingReport:
        """Own and drawn rows in one forward pass, so that batch-norm of the predictor sees both."""
        import torch
        from torch.nn import functional

        labels = self.local.data.labels.to(features.device)

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            own, targets_b = features[rows_b], labels[rows_b]
            if drawn is None:
                return [functional.cross_entropy(self.local.taps.predict(own), targets_b)]
            taken = drawn.take(len(rows_b))
            logits_bc = self.local.taps.predict(torch.cat([own, drawn.features[taken]]))
            loss = functional.cross_entropy(logits_bc[: len(own)], targets_b)
            return [loss + self._loss_of_drawn(logits_bc[len(own) :], drawn, taken)]

        return self._train(self.local.model, "general", losses, seed)

    def _loss_of_drawn(self, logits_bc: Tensor, drawn: DrawnRows, taken: list[int]) -> Tensor:
        from torch.nn import functional

        from fleetdistill.training.losses import distillation_loss

        loss = self.config.drawn_weight * functional.cross_entropy(logits_bc, drawn.labels[taken])
        if drawn.soft is not None:
            agreement = distillation_loss(logits_bc, drawn.soft[taken], self.config.temperature)
            loss = loss + self.config.agreement_weight * agreement
        return loss

    def _learn_personal(self, features: Tensor, rate: float, seed: int) -> bool:
        """Whether it came to nothing finite and is as before: the fleet learns from the general predictor alone."""
        from torch.nn import functional

        from fleetdistill.training.rollback import reason_undone

        personal, labels = self._personal, self.local.data.labels.to(features.device)
        assert personal is not None

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            if self._personal_has_own_extractor:
                own = personal.features(self.local.data.inputs[rows_b.cpu()].to(features.device))  # type: ignore[operator]
            else:
                own = features[rows_b]
            return [functional.cross_entropy(personal.predict(own), labels[rows_b])]  # type: ignore[operator]

        train = partial(self._train, personal, "personal", losses, seed)
        changed = (personal, self._optimizer("personal"))
        return reason_undone(train, *changed, rate=("learning_rate", rate)) is not None

    @property
    def _personal_has_own_extractor(self) -> bool:
        return self.config.personal_extractor == "own"

    def _set_rate(self, rate: float) -> None:
        for name in ("general", "personal"):
            for group in self._optimizer(name).param_groups:
                group["lr"] = rate

    def _train(self, model: torch.nn.Module, name: str, losses: Any, seed: int) -> TrainingReport:
        import torch

        from fleetdistill.training.local_training import train_steps

        return train_steps(
            model,
            len(self.local.data),
            epochs=self.config.local_epochs,
            batch_size=self.config.batch_size,
            optimizer=self._optimizer(name),
            losses=losses,
            generator=torch.Generator().manual_seed(seed),
            device=self.local.torch_device,
        )

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        """That of the whole model, of the general or of the personal predictor; each lives on from round to round."""
        if name not in self._optimizers:
            self._optimizers[name] = make_local_optimizer(self.config, self._trained_by(name))
        return self._optimizers[name]

    def _trained_by(self, name: str) -> list[torch.nn.Parameter]:
        model = self._personal if name == "personal" else self.local.model
        assert model is not None
        whole = name == "whole" or (name == "personal" and self._personal_has_own_extractor)
        frozen = set() if whole else {id(one) for one in model.extractor.parameters()}  # type: ignore[union-attr]
        return [one for one in model.parameters() if id(one) not in frozen]

    # --- two answers

    def answers(self) -> Mapping[str, torch.nn.Module]:
        """3.7: from R0 on also the personal answer, the product of both predictors' probabilities."""
        from fleetdistill.models.combined import CombinedModel

        if self._personal is None:
            return super().answers()
        shared = not self._personal_has_own_extractor
        combined = CombinedModel(self.local.model, self._personal, one_extractor=shared)
        return {**super().answers(), PERSONAL: combined}

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """The personal predictor, the fleet's classes, the soft predictions that hold, and the optimisers."""
        import torch

        return {
            "personal": self._personal_state(),
            "frozen": self._frozen,
            "classes": None if self._classes is None else packed(to_wire(self._classes)),
            "merge": self._merge,
            "agreed": None if self._agreed is None else [self._agreed[0], torch.from_numpy(self._agreed[1])],
            "optimizers": {name: one.state_dict() for name, one in self._optimizers.items()},
        }

    def _personal_state(self) -> dict[str, Tensor] | None:
        if self._personal is None:
            return None
        own = self._personal_has_own_extractor
        return self._personal.state_dict() if own else _above_extractor(self._personal)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self._personal, self._frozen = None, state["frozen"]
        if state["personal"] is not None:
            self._personal = self._copy_of_model()
            self._personal.load_state_dict(state["personal"], strict=False)  # a frozen extractor is the model's
        self._classes = None if state["classes"] is None else from_wire(unpacked(state["classes"]))
        self._merge = state["merge"]
        agreed = state["agreed"]
        self._agreed = None if agreed is None else (int(agreed[0]), agreed[1].numpy())
        self._optimizers = {}
        for name, saved in state["optimizers"].items():
            self._optimizer(name).load_state_dict(saved)


def _check_statistics(sent: ClassStatistics, size: int, classes: int) -> None:
    """Raises WireError for statistics that are not of F = `size` features and of the run's classes, or not finite."""
    known = len(sent.labels)
    if len(set(sent.labels)) != known or any(not 0 <= label < classes for label in sent.labels):
        raise WireError(f"the fleet's classes are {sent.labels[:20]}, expected different ones in [0, {classes})")
    if not known:
        return
    rank = 0 if sent.directions is None or sent.directions.ndim != 3 else sent.directions.shape[1]
    wanted = {"counts": (known,), "means": (known, size), "directions": (known, rank, size), "variances": (known, size)}
    for name, shape in wanted.items():
        array = getattr(sent, name)
        if array is None and name in ("directions", "variances"):
            continue
        found = None if array is None else array.shape
        if found != shape or rank > _MOST_RANK or not np.isfinite(array).all():
            text = f"expected finite numbers of {list(shape)}, at most {_MOST_RANK} directions"
            raise WireError(f"the {name} of the fleet's classes have shape {found and list(found)}, {text}")


def packed(sent: ClassStatistics) -> list[Any]:
    """Class statistics as `fleetdistill.state.state_file` keeps them: tensors in their types on the wire."""
    import torch

    def tensor(array: Array | None) -> Tensor | None:
        if array is None:
            return None
        # What has travelled is no finer than float32. Copied: what came may lie in a file that is deleted.
        return torch.from_numpy(np.array(array, dtype=np.float32 if array.dtype == np.float64 else None))

    return [list(sent.labels), *map(tensor, (sent.counts, sent.means, sent.directions, sent.variances))]


def unpacked(state: list[Any]) -> ClassStatistics:
    """What `packed` gave."""
    labels, *tensors = state
    counts, means, directions, variances = (None if one is None else one.numpy() for one in tensors)
    return ClassStatistics(labels=labels, counts=counts, means=means, directions=directions, variances=variances)


def _digest(module: torch.nn.Module) -> str:
    tensors = {name: one.detach().cpu().numpy() for name, one in module.state_dict().items()}
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].tobytes())
    return found.hexdigest()


def _above_extractor(model: torch.nn.Module) -> dict[str, Tensor]:
    """A model's state but for its extractor, which is frozen and kept once, with the general model."""
    from fleetdistill.training.parameters import state_tensors

    below = {id(one) for one in state_tensors(model.extractor)}  # type: ignore[arg-type]
    return {name: one.detach() for name, one in model.state_dict(keep_vars=True).items() if id(one) not in below}
