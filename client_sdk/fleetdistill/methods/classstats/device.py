"""Device half of class statistics in one exchange. No paper describes this method.

Each device sends, once, the means of its classes and one covariance for all of them, in the features of a fixed
extractor. The server merges these statistics exactly and returns, once, the space of the fleet's classes. A device then
has two variants without training: a general one, and a personal one for its own class shares.

In classstats_private a device sends sums with noise instead, `fleetdistill.methods.classstats_private.sums`;
everything after that is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from fleetdistill.data.samples import named
from fleetdistill.knowledge import GENERAL, OWN, PERSONAL
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers
from fleetdistill.methods.classstats.class_space import coordinates, pack_space, unpack_space
from fleetdistill.methods.classstats.config import SCATTERING, ClassStatsConfig, SpaceConfig
from fleetdistill.methods.classstats.exchange import REFINE, DeviceStatistics, SentStatistics, check_images
from fleetdistill.methods.classstats.space_model import (
    ChosenPredictor,
    ClosedForm,
    FixedFeatures,
    SpaceModel,
    fixed_features,
    make_predictor,
    usual_extractor,
)
from fleetdistill.methods.classstats.space_training import teach_network, train_predictor
from fleetdistill.training.tensor_data import parts_of


class ClassStatsDevice(DeviceMethod):
    """Device half of classstats. The app's own network is a third variant, besides the two variants in the space."""

    config: SpaceConfig
    own_variant = OWN
    statistics: ClassVar[type[DeviceStatistics]] = SentStatistics
    """What the device sends."""

    def __init__(self, config: SpaceConfig, local: Local) -> None:
        super().__init__(config, local)
        if config.features == SCATTERING:
            with named("data"):
                for part in (local.data.first, *parts_of(local.data.inputs)):
                    check_images(part.cpu().numpy(), tuple(part.shape[1:]))
        labels = local.data.labels.cpu().numpy()
        self.own = self.statistics(config, lambda: self._fixed.of(local.data.inputs), labels, local.classes)
        self._predictor: torch.nn.Module | None = None
        self._taught = False

    @classmethod
    def metrics_steps(cls, config: SpaceConfig) -> Sequence[str]:
        return ("learn",)

    # --- steps

    def first_ask(self) -> Ask:
        return self.own.first_ask()

    @answers("summarise")
    def summarise(self, ask: Ask) -> Answer:
        """Sends the statistics of the device's rows; see `DeviceStatistics.summarise`."""
        return self.own.summarise()

    @answers("learn")
    def learn(self, ask: Ask) -> Answer:
        """Makes the variants from the fleet's space, then trains predictor and app's network if configured."""
        answer = self.own.learn(ask)
        self.figures = self.own.current_variants.figures
        if self.config.predictor == "trained":
            self._train_predictor(ask.seed)
        if self.config.own_network == "taught":
            self._teach_own_network(ask.seed)
        return answer

    @cached_property
    def _fixed(self) -> FixedFeatures:
        shape = tuple(self.local.data.inputs.shape[1:])
        given = copy.deepcopy(self.local.taps.extractor) if self.config.features == "model" else None
        return fixed_features(self.config, self.make_extractor(given, shape), shape, self.local.torch_device)

    def make_extractor(self, given: torch.nn.Module | None, input_shape: tuple[int, ...]) -> torch.nn.Module:
        """Returns the method's extractor; `given` is the run's own, None with scattering."""
        return usual_extractor(given, input_shape)

    # --- training

    def _train_predictor(self, seed: int) -> None:
        space, plan = self.own.space_and_plan
        rows, labels, classes = coordinates(space, self.own.rows), self.own.labels, self.local.classes
        self._predictor = make_predictor(self.local.predictor, classes - 1, classes)
        self.trained = train_predictor(self._predictor, space, rows, labels, self.config, classes, plan.draw_seed, seed)

    def _teach_own_network(self, seed: int) -> None:
        space, plan = self.own.space_and_plan
        general = SpaceModel(self._fixed, self.local.classes).take(space).eval()
        self.trained = teach_network(self.local, general, space, self.config, plan.draw_seed, seed)
        self._taught = True

    # --- variants

    def variants(self) -> Mapping[str, torch.nn.Module]:
        """Returns the general and personal variants if there is a space, and the app's network if it was taught."""
        own = {OWN: self.local.model} if self._taught else {}
        made = self.own.variants
        if made is None:
            return own
        personal = made.personal
        is_trained = self._predictor is not None and not made.own_kept  # a predictor is trained in the fleet's space
        general = SpaceModel(self._fixed, self.local.classes, self._predictor).take(made.general)
        personally = SpaceModel(self._fixed, self.local.classes, self._personal_predictor(made.own_kept))
        temperature = 1.0 if is_trained else personal.temperature
        return {GENERAL: general, PERSONAL: personally.take(personal.space, temperature, personal.prior), **own}

    def _personal_predictor(self, own_kept: bool) -> torch.nn.Module | None:
        """Returns the predictor of the personal variant; None for the closed form."""
        if self._predictor is None or not self.config.own_statistics_guard:
            return copy.deepcopy(self._predictor)
        classes = self.local.classes
        return ChosenPredictor(copy.deepcopy(self._predictor), ClosedForm(classes - 1, classes), uses_closed=own_kept)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the fleet's space and its plan, from which the variants are recomputed, and the trained networks."""
        return {
            "space": None if self.own.space is None else pack_space(self.own.space),
            "plan": None if self.own.plan is None else dict(self.own.plan.to_wire().values),
            "predictor": None if self._predictor is None else self._predictor.state_dict(),
            "taught": self._taught,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        self.own.restore(None if state["space"] is None else unpack_space(state["space"]), state["plan"])
        self.own.remake_variants()
        self._taught, self._predictor = state["taught"], None
        if state["predictor"] is not None:
            self._predictor = make_predictor(self.local.predictor, self.local.classes - 1, self.local.classes)
            self._predictor.load_state_dict(state["predictor"])


class RefiningDevice(ClassStatsDevice):
    """Device half of classstats: it also sums gradients if the run has a refined head."""

    config: ClassStatsConfig
    own: SentStatistics

    @answers(REFINE)
    def refine(self, ask: Ask) -> Answer:
        """Sends sums of the gradient at the server's head; see `SentStatistics.refine`."""
        return self.own.refine(ask)
