"""Device half of class statistics with an averaged extractor, `features = "averaged"`. No paper describes this method.

Devices with different predictors average a small extractor for a few rounds and freeze it. Each then sends, once, a
low-rank Gaussian of its features for every class with enough samples, and receives, once, the fleet's Gaussians. From
then on it trains on its own rows and on rows drawn from the Gaussians, and so learns classes of which it has no
samples. A second predictor trains only on the device's own rows. The comments name the lines of the section "The
mathematics" in `docs/reference/methods/classstats-averaged.md`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import CannotAnswer, WireError
from fleetdistill.knowledge import PERSONAL, Array, ClassStatistics, ModelParameters, SoftPredictions
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers
from fleetdistill.methods.classstats.averaged_config import AveragedConfig
from fleetdistill.methods.classstats.drawn_rows import DrawnRows, RoundPlan
from fleetdistill.methods.classstats.gaussians import (
    ClassSummary,
    clip,
    draw_classes,
    from_wire,
    summarise,
    to_wire,
    without_spread,
)
from fleetdistill.methods.classstats.kept_statistics import check_statistics, packed, unpacked
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.models.combined import CombinedModel
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import TrainingReport, extract, train_epochs, train_steps
from fleetdistill.training.losses import distillation_loss, soft_targets
from fleetdistill.training.parameters import model_parameters, state_tensors, take_weights
from fleetdistill.training.rollback import train_or_roll_back


class AveragedDevice(DeviceMethod):
    """Device half of the averaged form; the app's model has the general predictor, a second model the personal one."""

    config: AveragedConfig

    def __init__(self, config: AveragedConfig, local: Local) -> None:
        super().__init__(config, local)
        self.personal: torch.nn.Module | None = None
        self._frozen: str | None = None  # digest of the frozen extractor
        self.classes: dict[int, ClassSummary] | None = None
        self._merge: int | None = None  # the server's number of this merge
        self.agreed: tuple[int, Array] | None = None
        self.optimizers: dict[str, torch.optim.Optimizer] = {}

    # --- steps

    @classmethod
    def metrics_steps(cls, config: AveragedConfig) -> Sequence[str]:
        return ("train", "learn")

    def first_ask(self) -> Ask:
        if not self.config.extractor_rounds:
            return Ask(round=1, step="summarise", seed=0)
        extractor = model_parameters(self.local.taps.extractor, scope="extractor")
        return Ask(round=1, step="train", seed=0, parts={"extractor": extractor})

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Trains the whole model from the fleet's extractor, and sends only the extractor (before round R0)."""
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
        """Freezes the extractor, creates the personal predictor, and sends the class summaries (round R0)."""
        self._freeze(ask)
        features = self.features_of_data().flatten(1).cpu().double().numpy()
        rows = clip(features, self.config.clip_norm) if self.config.clip_norm else features
        sent = to_wire(self._moments(rows), variances=not self.config.means_only)  # line summary
        clipped = int((rows != features).any(axis=1).sum())
        too_small = 0 if sent.labels else len(self.local.data.labels.unique())
        notes = {"rows_clipped": clipped, "classes_too_small": too_small}
        return Answer(parts={"statistics": sent}, samples=len(self.local.data), notes=notes)

    def _moments(self, rows_nf: Array) -> dict[int, ClassSummary]:
        """Returns the summaries to send, by class. A privacy mechanism would add its noise here."""
        labels = self.local.data.labels.cpu().numpy()
        held = np.bincount(labels, minlength=self.local.classes)
        classes = {
            label: summarise(rows_nf[labels == label], self.config.rank, self.config.rows_per_direction)
            for label in np.flatnonzero(held >= self.config.min_samples).tolist()
        }
        return {label: without_spread(one) for label, one in classes.items()} if self.config.means_only else classes

    @answers("agree")
    def agree(self, ask: Ask) -> Answer:
        """Sends the general predictor's soft predictions on the round's drawn rows."""
        plan = self._take_classes(ask)  # line merge, made by the server
        drawn, _ = self.draw(plan)  # line draw
        logits = extract(self.local.taps.predict, drawn, model=self.local.model)
        values = soft_targets(logits, self.config.temperature).numpy()
        sent = SoftPredictions(noise_seed=plan.draw_seed, values=values)
        return Answer(parts={"predictions": sent}, samples=len(self.local.data))

    @answers("learn")
    def learn(self, ask: Ask) -> Answer:
        """Trains the general predictor on own and drawn rows, and the personal one on own rows (from round R0)."""
        plan = self._take_classes(ask)  # line merge, made by the server
        self._take_agreed(ask)
        features = self.features_of_data()
        self._set_rate(plan.learning_rate)
        drawn = self.drawn(plan, ask.seed)  # line draw
        self.trained = self._learn_general(features, drawn, ask.seed)  # line general
        undone = self.learn_personal(features, plan.learning_rate, derive_seed(ask.seed, "personal"))  # with a guard
        return Answer(parts={}, samples=len(self.local.data), notes={"personal_undone": int(undone)})

    def _take_agreed(self, ask: Ask) -> None:
        """Stores a copy of the ask's soft predictions on drawn rows, if any; their file is deleted later."""
        if "agreed" in ask.parts:
            agreed = ask.part("agreed", SoftPredictions)
            self.agreed = (agreed.noise_seed, np.array(agreed.values))

    def _load_extractor(self, ask: Ask) -> None:
        take_weights(self.local.taps.extractor, ask.part("extractor", ModelParameters))

    def _freeze(self, ask: Ask) -> None:
        """Freezes the extractor. If a round is repeated with the same extractor, the personal predictor is kept."""
        if self.config.extractor_rounds:
            self._load_extractor(ask)
        digest = _digest(self.local.taps.extractor)
        if digest != self._frozen:
            self.optimizers.clear()  # the optimiser of the whole model is no longer used
            self.personal, self._frozen = self._copy_of_model(), digest

    def _copy_of_model(self) -> torch.nn.Module:
        """Returns the model with the personal predictor; it shares the tensors of a frozen extractor."""
        shared = [] if self._personal_has_own_extractor else state_tensors(self.local.taps.extractor)
        return copy.deepcopy(self.local.model, {id(one): one for one in shared})

    def _take_classes(self, ask: Ask) -> RoundPlan:
        """Returns the round's plan, and stores the fleet's classes if the ask contains them.

        Raises:
            WireError: The device has no statistics of the fleet, or those in the ask do not fit the device's features.
            CannotAnswer: The plan refers to another merge than the device's.
        """
        sent = self._sent_classes(ask) if "classes" in ask.parts else self.classes
        self._check_summarised(ask, sent)  # guard
        plan = RoundPlan.of(ask)
        if "classes" in ask.parts:
            self.classes, self._merge = sent, plan.merge
        self._check_merge(ask, plan)  # guard
        return plan

    def _check_summarised(self, ask: Ask, classes: Mapping[int, ClassSummary] | None) -> None:
        if classes is None or self.personal is None:
            raise WireError(
                f"step {ask.step!r} needs the fleet's class statistics, which are missing from this device's "
                "state directory; the server will request the device's summary again"
            )

    def _check_merge(self, ask: Ask, plan: RoundPlan) -> None:
        if plan.merge != self._merge:
            raise CannotAnswer(
                f"step {ask.step!r} refers to class statistics {plan.merge}, but this device has {self._merge}; the "
                "server will send the current ones with the next ask"
            )

    def _sent_classes(self, ask: Ask) -> dict[int, ClassSummary]:
        """Returns the ask's classes. Raises WireError if classes or features are not the contract's."""
        sent = ask.part("classes", ClassStatistics)
        check_statistics(sent, prod(self._features_shape), self.local.classes)
        return from_wire(sent)

    def features_of_data(self) -> Tensor:
        """Returns the frozen extractor's features of all the device's rows, `[N, ...]`, on the compute device."""
        found = extract(self.local.taps.features, self.local.data.inputs, model=self.local.model)
        return found.to(self.local.torch_device)

    # --- drawn rows

    def draw(self, plan: RoundPlan) -> tuple[Tensor, Tensor]:
        """Returns the round's drawn rows `[R, ...]` and their labels `[R]`.

        Raises:
            CannotAnswer: The fleet's statistics have no class.
        """
        if not self.classes:
            raise CannotAnswer("the fleet's class statistics have no class, so there are no rows to draw")
        features, labels = draw_classes(
            self.classes, self.config.drawn_rows, plan.draw_seed, nonnegative=plan.nonnegative
        )
        shape, where = self._features_shape, self.local.torch_device
        return torch.from_numpy(features).reshape(-1, *shape).to(where), torch.from_numpy(labels).to(where)

    @cached_property
    def _features_shape(self) -> tuple[int, ...]:
        first = extract(self.local.taps.features, self.local.data.first, model=self.local.model)
        return tuple(first.shape[1:])

    def drawn(self, plan: RoundPlan, seed: int) -> DrawnRows | None:
        """Returns the round's drawn rows, with soft predictions if it has them; None if the fleet has no class.

        Raises:
            WireError: The soft predictions do not have one row of C numbers for each drawn row.
        """
        if not self.classes:
            return None
        features, labels = self.draw(plan)
        soft = None
        if self.agreed is not None and self.agreed[0] == plan.draw_seed:
            soft = torch.from_numpy(self.agreed[1].astype(np.float32)).to(features.device)
            if soft.shape != (len(labels), self.local.classes):
                expected = [len(labels), self.local.classes]
                raise WireError(f"soft predictions on drawn rows are {list(soft.shape)}, expected {expected}")
        return DrawnRows(features, labels, soft, derive_seed(seed, "drawn"))

    # --- training

    def _learn_general(self, features: Tensor, drawn: DrawnRows | None, seed: int) -> TrainingReport:
        """Trains on own and drawn rows in one forward pass so that the predictor's batch-norm sees both."""
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
        loss = self.config.drawn_weight * functional.cross_entropy(logits_bc, drawn.labels[taken])
        if drawn.soft is not None:
            agreement = distillation_loss(logits_bc, drawn.soft[taken], self.config.temperature)
            loss = loss + self.config.agreement_weight * agreement
        return loss

    def learn_personal(self, features: Tensor, rate: float, seed: int) -> bool:
        """Trains the personal predictor; returns whether training was rolled back because of non-finite values."""
        personal, labels = self.personal, self.local.data.labels.to(features.device)
        assert personal is not None

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            if self._personal_has_own_extractor:
                own = personal.features(self.local.data.draw(rows_b.cpu()).to(features.device))  # type: ignore[operator]
            else:
                own = features[rows_b]
            return [functional.cross_entropy(personal.predict(own), labels[rows_b])]  # type: ignore[operator]

        train = partial(self._train, personal, "personal", losses, seed)
        changed = (personal, self._optimizer("personal"))
        return train_or_roll_back(train, *changed, rate=("learning_rate", rate)) is not None

    @property
    def _personal_has_own_extractor(self) -> bool:
        return self.config.personal_extractor == "own"

    def _set_rate(self, rate: float) -> None:
        for name in ("general", "personal"):
            for group in self._optimizer(name).param_groups:
                group["lr"] = rate

    def _train(self, model: torch.nn.Module, name: str, losses: Any, seed: int) -> TrainingReport:
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
        """Returns the optimiser of `whole`, `general` or `personal`; it is kept between rounds."""
        if name not in self.optimizers:
            self.optimizers[name] = make_local_optimizer(self.config, self._trained_by(name))
        return self.optimizers[name]

    def _trained_by(self, name: str) -> list[torch.nn.Parameter]:
        model = self.personal if name == "personal" else self.local.model
        assert model is not None
        whole = name == "whole" or (name == "personal" and self._personal_has_own_extractor)
        frozen = set() if whole else {id(one) for one in model.extractor.parameters()}  # type: ignore[union-attr]
        return [one for one in model.parameters() if id(one) not in frozen]

    # --- variants

    def variants(self) -> Mapping[str, torch.nn.Module]:
        """Returns the general variant and, from R0 on, the personal one: the product of both probabilities."""
        if self.personal is None:
            return super().variants()
        shared = not self._personal_has_own_extractor
        combined = CombinedModel(self.local.model, self.personal, one_extractor=shared)
        return {**super().variants(), PERSONAL: combined}

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the personal predictor, the fleet's classes, the current soft predictions, and the optimisers."""
        return {
            "personal": self._personal_state(),
            "frozen": self._frozen,
            "classes": None if self.classes is None else packed(to_wire(self.classes)),
            "merge": self._merge,
            "agreed": None if self.agreed is None else [self.agreed[0], torch.from_numpy(self.agreed[1])],
            "optimizers": {name: one.state_dict() for name, one in self.optimizers.items()},
        }

    def _personal_state(self) -> dict[str, Tensor] | None:
        if self.personal is None:
            return None
        own = self._personal_has_own_extractor
        return self.personal.state_dict() if own else _above_extractor(self.personal)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        self.personal, self._frozen = None, state["frozen"]
        if state["personal"] is not None:
            self.personal = self._copy_of_model()
            self.personal.load_state_dict(state["personal"], strict=False)  # a frozen extractor is the model's
        self.classes = None if state["classes"] is None else from_wire(unpacked(state["classes"]))
        self._merge = state["merge"]
        agreed = state["agreed"]
        self.agreed = None if agreed is None else (int(agreed[0]), agreed[1].numpy())
        self.optimizers = {}
        for name, saved in state["optimizers"].items():
            self._optimizer(name).load_state_dict(saved)


def _digest(module: torch.nn.Module) -> str:
    tensors = {name: one.detach().cpu().numpy() for name, one in module.state_dict().items()}
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].tobytes())
    return found.hexdigest()


def _above_extractor(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns a model's state without its extractor, which is stored only with the general model."""
    below = {id(one) for one in state_tensors(model.extractor)}  # type: ignore[arg-type]
    return {name: one.detach() for name, one in model.state_dict(keep_vars=True).items() if id(one) not in below}
