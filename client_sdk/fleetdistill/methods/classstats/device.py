"""Class statistics: what both halves agree on, and what the device does. Our own method; no paper describes it.

Behind an extractor that nobody trains, each device sends once the means of its classes and one covariance that they
share. The server merges these exactly, and sends once the space in which they tell the classes apart. A device then has
two answers without training: a general one, and one for its own mix of classes.

With `features = "averaged"` the method has another form, `fleetdistill.methods.classstats.averaged`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fleetdistill.errors import CannotAnswer, ConfigurationError, DataError, WireError
from fleetdistill.knowledge import GENERAL, OWN, PERSONAL, Array, ClassSpace, Plan, PlanValue
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers, check_choice, check_range
from fleetdistill.methods.classstats.class_answers import ClassAnswers, class_answers
from fleetdistill.methods.classstats.class_space import coordinates
from fleetdistill.methods.classstats.projection import usual_dimensions
from fleetdistill.methods.classstats.shared_statistics import Moments, moments_of, to_wire
from fleetdistill.methods.local import LocalTraining
from fleetdistill.wire.directions import LEAST_ROWS_PER_DIRECTION

if TYPE_CHECKING:
    import torch

    from fleetdistill.methods.classstats.kept_features import FixedFeatures

SCATTERING = "scattering"
_MOST_RANK = 512
_MOST_IMAGES = 100_000
_DIMENSIONS = (8, 2048)
_SMALLEST_SIDE = 8
_CHOICES = {
    "features": (SCATTERING, "model"),
    "covariance": ("shared",),
    "predictor": ("closed_form", "trained"),
    "own_network": ("kept", "taught"),
}
_OF_THE_OTHER_FORM = {"features": ("averaged",), "covariance": ("class",)}


@dataclass(frozen=True, kw_only=True)
class ClassStatsConfig(LocalTraining):
    """Settings of class statistics; those of local training are of a trained predictor and of a taught network.

    Attributes:
        features: What statistics are of: `scattering`, fixed wavelets for images; or `model`, the extractor that
            [model] extractor names, with its weights. (`averaged` is another form, with settings of its own.)
        covariance: `shared`: one for all classes.
        dimensions: D, numbers that features are projected to, in [8, 2048]; 0 for 256 with images below 12 pixels a
            side and 384 otherwise. Features of fewer numbers stay as they are.
        rank: R, most directions of the covariance that a device sends, in [0, 512]; 0 is the diagonal alone.
        rows_per_direction: Degrees of freedom that a device must have for each direction, at least 2. The more, the
            less does the span of the directions say about single rows.
        min_samples: n_min, samples that a device must have of a class to send it, at least 2.
        shrinkage: s, share of its diagonal in the merged covariance, in [0, 1); or `rule`, D / (4 df) in [0.05, 0.5].
        count_cap: Most rows of a device, as a multiple of the median device's, that its statistics count for, at least
            1; 0 for 3, and for no bound where `robust` is off.
        predictor: `closed_form`, the nearest class mean; or `trained`, a predictor of the device's own.
        predictor_steps: Least steps that it is trained for, at least 1.
        own_statistics_guard: A device whose own statistics alone give a better personal answer takes that one.
        own_network: What becomes of the network that the app gave: `kept` as it is, or `taught` by the general answer.
        own_network_epochs: Passes over own rows that it is taught for, at least 1.
        own_network_rate: Learning rate of these, above 0; it falls to a tenth.
        drawn_images: Images of the fleet's classes that the device makes for it from its own ones, 0 to
            100,000.
    """

    usual_rounds: ClassVar[int] = 1

    keeps_optimizer: ClassVar[bool] = True  # of training alone, the control

    learning_rate: float = 0.02
    features: str = SCATTERING
    covariance: str = "shared"
    dimensions: int = 0
    rank: int = 128
    rows_per_direction: int = 15
    min_samples: int = 5
    shrinkage: float | str = "rule"
    count_cap: float = 0.0
    predictor: str = "closed_form"
    predictor_steps: int = 400
    own_statistics_guard: bool = True
    own_network: str = "kept"
    own_network_epochs: int = 60
    own_network_rate: float = 0.05
    drawn_images: int = 600

    def __post_init__(self) -> None:
        LocalTraining.__post_init__(self)
        for name, known in _CHOICES.items():
            if (value := getattr(self, name)) not in known:
                expected = ", ".join((*known, *_OF_THE_OTHER_FORM.get(name, ())))
                raise ConfigurationError(f"unknown {name} {value!r}, expected one of {expected}")
        low, high = _DIMENSIONS
        if self.dimensions and not low <= self.dimensions <= high:
            raise ConfigurationError(f"dimensions must be 0 or in [{low}, {high}], got {self.dimensions!r}")
        if not 0 <= self.rank <= _MOST_RANK:
            raise ConfigurationError(f"rank must be in [0, {_MOST_RANK}], got {self.rank!r}")
        check_range("rows_per_direction", self.rows_per_direction, LEAST_ROWS_PER_DIRECTION)
        check_range("min_samples", self.min_samples, 2)
        for name in ("predictor_steps", "own_network_epochs"):
            check_range(name, getattr(self, name), 1)
        check_range("drawn_images", self.drawn_images, 0, _MOST_IMAGES + 1)
        check_range("own_network_rate", self.own_network_rate, 0, open_low=True)
        if self.count_cap:
            check_range("count_cap", self.count_cap, 1)
        if self.own_network == "taught" and self.features != SCATTERING:
            raise ConfigurationError(
                f"own_network = 'taught' draws images through the scattering, and features is {self.features!r}; take "
                "own_network = 'kept', or features = 'scattering'"
            )
        self._check_shrinkage()

    def _check_shrinkage(self) -> None:
        if isinstance(self.shrinkage, str):
            check_choice("shrinkage", self.shrinkage, ("rule",))
        else:
            check_range("shrinkage", self.shrinkage, 0, 1)

    @classmethod
    def form(cls, settings: Mapping[str, Any]) -> type[LocalTraining]:
        """`features = "averaged"` and `covariance = "class"` choose the other form; one implies the other."""
        chosen = settings.get("features"), settings.get("covariance")
        if "averaged" not in chosen and "class" not in chosen:
            return cls
        if chosen[0] not in (None, "averaged") or chosen[1] not in (None, "class"):
            raise ConfigurationError(
                f"features = {chosen[0]!r} does not go with covariance = {chosen[1]!r}; take features = 'averaged' "
                "with covariance = 'class', or leave both out"
            )
        from fleetdistill.methods.classstats.averaged import AveragedConfig

        return AveragedConfig

    @classmethod
    def other_forms(cls) -> Mapping[str, type[LocalTraining]]:
        """The averaged one."""
        from fleetdistill.methods.classstats.averaged import AveragedConfig

        return {'features = "averaged"': AveragedConfig}

    def for_classes(self, classes: int) -> ClassStatsConfig:
        """The same settings; none depends on the number of classes."""
        return self

    def dimensions_for(self, input_shape: tuple[int, ...], features: int) -> int:
        """D of a run: what is set, or what suits its inputs; never more than the features have."""
        return min(self.dimensions or usual_dimensions(input_shape), features)


@dataclass(frozen=True, kw_only=True)
class SpacePlan:
    """What the server's plan says of a space.

    Attributes:
        merge: The server's name of it.
        counted: Whether this device's statistics are in it.
        draw_seed: Of rows that are drawn in it.
        left_out: Classes that this device has sent and that are not in it all the same.
    """

    merge: int
    counted: bool
    draw_seed: int
    left_out: tuple[int, ...] = ()

    def to_wire(self) -> Plan:
        """As it travels."""
        values: dict[str, PlanValue] = {"merge": self.merge, "counted": self.counted, "draw_seed": self.draw_seed}
        return Plan(values=values | ({"left_out": list(self.left_out)} if self.left_out else {}))

    @classmethod
    def of(cls, ask: Ask) -> SpacePlan:
        """Raises WireError for a plan that lacks something, or gives it in another type."""
        values = ask.part("plan", Plan).values
        expected = {"merge": int, "counted": bool, "draw_seed": int}
        for name, kind in expected.items():
            if type(values.get(name)) is not kind:
                text = f"the plan's {name} is {values.get(name)!r}, expected {kind.__name__}"
                raise WireError(f"step {ask.step!r}: {text}; update the older of device and server")
        left_out = values.get("left_out", [])  # not there where nothing is, and from earlier servers
        if not isinstance(left_out, list):
            raise WireError(f"step {ask.step!r}: the plan's left_out is {left_out!r}, expected a list of classes")
        known: dict[str, Any] = {name: values[name] for name in expected}
        return cls(**known, left_out=tuple(left_out))

    def counts(self, labels: Iterable[int]) -> list[int]:
        """Of the classes that this device has sent those that are in the space."""
        return [label for label in labels if label not in self.left_out] if self.counted else []


def check_space(space: ClassSpace, dimensions: int, classes: int) -> None:
    """Raises WireError for a space that is not of this run, or not finite: a server may be broken or hostile."""
    shapes = [np.shape(one) for one in (space.directions, space.origin, space.centres, space.counts)]
    known, directions = len(space.labels), shapes[1][0] if len(shapes[1]) == 1 else -1
    wanted = [(dimensions, directions), (directions,), (known, directions), (known,)]
    if shapes != wanted or not 1 <= directions < classes:
        raise WireError(f"the class space has shapes {shapes}, expected {wanted} and 1 to {classes - 1} directions")
    if not known >= 2 or len(set(space.labels)) != known or not all(0 <= one < classes for one in space.labels):
        raise WireError(f"the class space has classes {space.labels[:20]}, expected two or more of {classes}")
    numbers = (space.directions, space.origin, space.centres, space.shrinkage, space.outside)
    if not all(np.isfinite(one).all() for one in numbers) or space.shrinkage.shape or space.df.shape:
        raise WireError("the class space has numbers that are not finite, or no single shrinkage")
    if not (0 <= float(space.shrinkage) < 1 and float(space.outside) >= 0 and int(space.df) >= 1):
        text = f"shrinkage {float(space.shrinkage):g}, outside {float(space.outside):g}, df {int(space.df)}"
        raise WireError(f"the class space has {text}; expected [0, 1), >= 0 and >= 1")
    if (space.counts < 1).any():
        raise WireError("the class space has a class without samples")


def check_images(inputs: Array, input_shape: tuple[int, ...]) -> None:
    """Raises DataError for inputs that scattering is not made for, with the way out."""
    way_out = "take features = 'model' with an extractor of your own, or 'identity' for vectors"
    if len(input_shape) != 3 or min(input_shape[1:]) < _SMALLEST_SIDE:
        text = f"scattering needs images of at least {_SMALLEST_SIDE} pixels a side, got inputs {list(input_shape)}"
        raise DataError(f"{text}; {way_out}")
    low, high = float(inputs.min()), float(inputs.max())
    if low < 0 or high > 1:
        raise DataError(f"scattering needs images in [0, 1], got {low:g} to {high:g}; scale them, or {way_out}")


class DeviceStatistics:
    """What a device makes of its rows and of the fleet's space: the steps but for training, with PyTorch or without.

    Attributes:
        space: The fleet's, once there is one.
        plan: What the server said of it.
        answers: Made of it and of own rows.
        labels: Classes of own rows, `[n]`.
    """

    def __init__(self, config: ClassStatsConfig, rows: Callable[[], Array], labels: Array, classes: int) -> None:
        """Computes nothing yet.

        Args:
            config: Of the contract.
            rows: Gives the projected features of all own rows, `[n, D]`.
            labels: Their classes, `[n]`.
            classes: C.
        """
        self._config, self._make_rows, self._classes = config, rows, classes
        self.labels = labels
        self.space: ClassSpace | None = None
        self.plan: SpacePlan | None = None
        self.answers: ClassAnswers | None = None

    @cached_property
    def rows(self) -> Array:
        """Projected features of all own rows."""
        return self._make_rows()

    @cached_property
    def moments(self) -> Moments:
        """Of own rows, of all classes that may be sent; the one place where noise would be added."""
        return moments_of(self.rows, self.labels, self._config.min_samples)

    def summarise(self) -> Answer:
        """Means of own classes and their one covariance (3.3, 3.4): all that ever leaves of the rows."""
        sent = to_wire(self.moments, self._config.rank, self._config.rows_per_direction)
        too_small = 0 if sent.labels else len(np.unique(self.labels))
        return Answer(parts={"statistics": sent}, samples=len(self.labels), notes={"classes_too_small": too_small})

    def learn(self, ask: Ask) -> Answer:
        """Takes the fleet's space, and makes both answers of it (3.6 to 3.11)."""
        plan = SpacePlan.of(ask)
        self._take_space(ask, plan)
        found = self._make_answers(plan)
        return Answer(parts={}, samples=len(self.labels), notes={"own_statistics_kept": int(found.own_kept)})

    def _take_space(self, ask: Ask, plan: SpacePlan) -> None:
        if "space" in ask.parts:
            space = ask.part("space", ClassSpace)
            check_space(space, self.rows.shape[1], self._classes)
            self.space = copied(space)
        elif self.plan is None or self.plan.merge != plan.merge:
            held = "none" if self.plan is None else self.plan.merge
            raise CannotAnswer(
                f"step {ask.step!r} is about class space {plan.merge}, this device has {held}; the server sends it "
                "with the next ask"
            )
        self.plan = plan

    def _make_answers(self, plan: SpacePlan) -> ClassAnswers:
        assert self.space is not None
        own = self.moments
        self.answers = class_answers(
            self.space,
            self.rows,
            self.labels,
            plan.counts(own.labels),
            self._classes,
            own if self._config.own_statistics_guard else None,
            self._config.rows_per_direction,
        )
        return self.answers

    def restore(self, space: ClassSpace | None, plan: Mapping[str, Any] | None) -> None:
        """Takes up a space and its plan that were kept; the answers are made of them when they are asked for."""
        self.space = space
        self.plan = None if plan is None else SpacePlan(**{**plan, "left_out": tuple(plan.get("left_out", ()))})
        self.answers = None

    @property
    def space_and_plan(self) -> tuple[ClassSpace, SpacePlan]:
        """Of the last step that has taken them."""
        assert self.space is not None
        assert self.plan is not None
        return self.space, self.plan

    @property
    def made(self) -> ClassAnswers:
        """The answers of the last step that has made them."""
        assert self.answers is not None
        return self.answers

    def answers_again(self) -> ClassAnswers | None:
        """The answers; after `restore` they are made anew. None before there is a space."""
        if self.answers is None and self.plan is not None:
            return self._make_answers(self.plan)
        return self.answers


class ClassStatsDevice(DeviceMethod):
    """Device half. The network that the app gave is an answer of its own beside the two of the space."""

    config: ClassStatsConfig
    metrics_steps = ("learn",)
    own_answer = OWN

    def __init__(self, config: ClassStatsConfig, local: Local) -> None:
        super().__init__(config, local)
        if config.features == SCATTERING:
            check_images(local.data.inputs.numpy(), tuple(local.data.inputs.shape[1:]))
        labels = local.data.labels.cpu().numpy()
        self._own = DeviceStatistics(config, lambda: self._fixed.of(local.data.inputs), labels, local.classes)
        self._predictor: torch.nn.Module | None = None
        self._taught = False

    @classmethod
    def form(cls, config: Any) -> type[DeviceMethod]:
        """As the configuration's."""
        if isinstance(config, ClassStatsConfig):
            return cls
        from fleetdistill.methods.classstats.averaged import AveragedDevice

        return AveragedDevice

    # --- steps

    @answers("summarise")
    def summarise(self, ask: Ask) -> Answer:
        """As `DeviceStatistics`."""
        return self._own.summarise()

    @answers("learn")
    def learn(self, ask: Ask) -> Answer:
        """As `DeviceStatistics`; then trains what is wanted (3.10)."""
        answer = self._own.learn(ask)
        self.figures = self._own.made.figures
        if self.config.predictor == "trained":
            self._train_predictor(ask.seed)
        if self.config.own_network == "taught":
            self._teach_own_network(ask.seed)
        return answer

    @cached_property
    def _fixed(self) -> FixedFeatures:
        from fleetdistill.methods.classstats.kept_features import FixedFeatures
        from fleetdistill.models import build_model
        from fleetdistill.training.model import output_shape

        shape = tuple(self.local.data.inputs.shape[1:])
        given = self.config.features == "model"
        extractor = copy.deepcopy(self.local.taps.extractor) if given else build_model(SCATTERING, input_shape=shape)
        extractor = extractor.cpu().eval()
        features = prod(output_shape(extractor, shape))
        dimensions = self.config.dimensions_for(shape, features)
        return FixedFeatures(extractor, features, dimensions, self.local.torch_device)

    # --- training, where it is wanted

    def _train_predictor(self, seed: int) -> None:
        from fleetdistill.methods.classstats.space_model import make_predictor
        from fleetdistill.methods.classstats.space_training import train_predictor

        space, plan = self._own.space_and_plan
        rows, labels, classes = coordinates(space, self._own.rows), self._own.labels, self.local.classes
        self._predictor = make_predictor(self.local.predictor, classes - 1, classes)
        self.trained = train_predictor(self._predictor, space, rows, labels, self.config, classes, plan.draw_seed, seed)

    def _teach_own_network(self, seed: int) -> None:
        from fleetdistill.methods.classstats.space_model import SpaceModel
        from fleetdistill.methods.classstats.space_training import teach_network

        space, plan = self._own.space_and_plan
        general = SpaceModel(self._fixed, self.local.classes).take(space).eval()
        self.trained = teach_network(self.local, general, space, self.config, plan.draw_seed, seed)
        self._taught = True

    # --- answers

    def answers(self) -> Mapping[str, torch.nn.Module]:
        """Once there is a space: the general answer, the personal one, and the app's network where it is taught."""
        from fleetdistill.methods.classstats.space_model import SpaceModel

        own = {OWN: self.local.model} if self._taught else {}
        made = self._own.answers
        if made is None:
            return own
        trained, personal = self._predictor, made.personal
        for_own = None if made.own_kept else trained  # a trained predictor knows the fleet's space alone
        temperature = 1.0 if for_own is not None else personal.temperature
        general = SpaceModel(self._fixed, self.local.classes, trained).take(made.general)
        personally = SpaceModel(self._fixed, self.local.classes, copy.deepcopy(for_own))
        return {GENERAL: general, PERSONAL: personally.take(personal.space, temperature, personal.prior), **own}

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """The fleet's space and its plan; answers are made of them and of own rows again."""
        return {
            "space": None if self._own.space is None else packed(self._own.space),
            "plan": None if self._own.plan is None else dict(self._own.plan.to_wire().values),
            "predictor": None if self._predictor is None else self._predictor.state_dict(),
            "taught": self._taught,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        from fleetdistill.methods.classstats.space_model import make_predictor

        self._own.restore(None if state["space"] is None else unpacked(state["space"]), state["plan"])
        self._own.answers_again()
        self._taught, self._predictor = state["taught"], None
        if state["predictor"] is not None:
            self._predictor = make_predictor(self.local.predictor, self.local.classes - 1, self.local.classes)
            self._predictor.load_state_dict(state["predictor"])


def copied(space: ClassSpace) -> ClassSpace:
    """A space of its own memory: what came may lie in a file that is deleted."""
    arrays = {name: np.array(value) for name, value in vars(space).items() if name != "labels"}
    return ClassSpace(labels=list(space.labels), **arrays)


def packed(space: ClassSpace) -> dict[str, Any]:
    """A space as `fleetdistill.state.state_file` keeps it."""
    import torch

    arrays = {name: torch.from_numpy(np.array(value)) for name, value in vars(space).items() if name != "labels"}
    return {"labels": list(space.labels), **arrays}


def unpacked(state: Mapping[str, Any]) -> ClassSpace:
    """What `packed` gave."""
    return ClassSpace(**{name: value if name == "labels" else value.numpy() for name, value in state.items()})
