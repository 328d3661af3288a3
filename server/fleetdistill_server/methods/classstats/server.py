"""Server half of class statistics: merges the devices' statistics exactly and sends them the resulting class space.

This method is our own; `docs/reference/methods/classstats.md` describes it. The server stores each device's statistics
as they were sent, so a merge without a device depends on the other devices only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fleetdistill.errors import ConfigurationError, DataError, ExportError, KnowledgeError, QuorumNotReached
from fleetdistill.knowledge import (
    CUT,
    Array,
    ClassSpace,
    Kind,
    Metrics,
    ModelParameters,
    NetworkFile,
    Parts,
    SharedStatistics,
)
from fleetdistill.methods.classstats.class_space import make_space, pack_space, shrinkage_rule, unpack_space
from fleetdistill.methods.classstats.config import SCATTERING
from fleetdistill.methods.classstats.exchange import LEAVE_ONE_OUT, SpacePlan, check_images
from fleetdistill.methods.classstats.shared_statistics import Moments, max_directions
from fleetdistill.methods.classstats.space_model import SpaceModel, fixed_features, projected, usual_extractor
from fleetdistill.models.pretrained import images_of
from fleetdistill.seeds import derive_seed
from fleetdistill.training.model import output_shape
from fleetdistill.training.onnx_export import onnx_bytes
from fleetdistill.training.onnx_file import INPUT_RANGE, UNIT_RANGE
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.kind import PartSchema
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.classstats.merge import (
    LeftOutReasons,
    Merged,
    MergeRules,
    merge_moments,
    note_left_out,
    note_no_class,
    note_single_classes,
    trusted_centres,
)
from fleetdistill_server.methods.cohort import Cohort, Deliveries, Notes
from fleetdistill_server.methods.traffic import Exchange, Sizes


class ClassStatsServer(ServerMethod):
    """Stores each device's statistics separately, and the class space of their merge."""

    config: Any  # of this method
    summary = "one exchange: class means and one covariance, closed form"
    recommended = (
        "for images of which each device has some classes, whatever models the apps run: on all classes it is ahead of "
        "training alone by 32 to 75 points and of the global model of fedavg with the apps' models by 0.5 to 23, in "
        "five settings, with one exchange of some kB. Its limits: class means and counts leave the device; the global "
        "model of fedavg with a small network on the same standardised features is 3.8 behind to 1.6 ahead, for "
        "hundreds of times the bytes; hard images want a pretrained extractor. docs/explanation/papers.md has figures"
    )
    picks_devices = True
    kind: ClassVar[type[Kind]] = SharedStatistics
    """Kind of the statistics that a device sends."""

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self._given = self._given_extractor()
        self.fixed = fixed_features(config, self.make_extractor(self._given, context.input_shape), context.input_shape)
        self._parts: dict[str, tuple[Any, str]] = {}  # of `kind`, as sent, and the data's version
        self._counted: dict[str, list[int]] = {}  # each device's classes in the merge
        self._left_out: LeftOutReasons = {}
        self._trusted: dict[int, Array] = {}  # stored: `forget` may run where the operator's data is missing
        self._space: ClassSpace | None = None
        self.merge_name = 0  # a hash of the space's content
        self.deliveries = Deliveries()  # tracks the space

    def make_extractor(self, given: nn.Module | None, input_shape: tuple[int, ...]) -> nn.Module:
        """Returns the method's extractor, as the devices make it; `given` is the run's own, None with scattering."""
        return usual_extractor(given, input_shape)

    def _given_extractor(self) -> nn.Module | None:
        """Returns the run's own extractor; None with scattering, after checking the inputs."""
        shape = self.context.input_shape
        if self.config.features != SCATTERING:
            try:
                return self.context.extractor()
            except ConfigurationError as error:
                if len(shape) != 1:
                    raise
                text = f'{error}; for vectors set extractor = "identity" in [model], which is '
                raise ConfigurationError(text + repr(self.context.models.extractor)) from error
        try:
            check_images(np.zeros((1, *shape), np.float32), shape)
        except DataError as error:
            raise ConfigurationError(f"[contract] input_shape: {error}") from error
        return None

    # --- declarations

    @classmethod
    def needs(cls, config: Any) -> Needs:
        """Requires a common extractor if the run names one; the scattering extractor is part of the SDK."""
        return Needs(same_extractor=config.features == "model")

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchanges of a device with enough samples of each class: docs/reference/methods/classstats.md."""
        classes, dimensions = sizes.classes, cls.dimensions(config, sizes)
        space = ClassSpace.schema(classes=classes, dimensions=dimensions, directions=min(classes - 1, dimensions))
        return [
            Exchange(step="summarise", up={"statistics": cls.statistics_schema(config, sizes)}, end=1),
            Exchange(step="learn", down={"space": space}, end=1),
        ]

    @classmethod
    def dimensions(cls, config: Any, sizes: Sizes) -> int:
        """Returns D, numbers of a row of features."""
        return min(config.dimensions or 384, sizes.features)

    @classmethod
    def statistics_schema(cls, config: Any, sizes: Sizes) -> PartSchema:
        """Returns the schema of the statistics that a device sends."""
        df, dimensions = max(sizes.samples - sizes.classes, 0), cls.dimensions(config, sizes)
        return SharedStatistics.schema(
            classes=sizes.classes,
            dimensions=dimensions,
            directions=max_directions(config.rank, df, dimensions, config.rows_per_direction),
            features=sizes.cuts,
            min_samples=config.min_samples,
            max_rows=config.rank,
            rows_per_direction=config.rows_per_direction,
        )

    def sizes(self) -> Sizes:
        """Returns the run's sizes; the features are those after the projection."""
        cuts = {} if self._given is None else {CUT: output_shape(self._given, self.context.input_shape)}
        return Sizes(classes=self.context.classes, features=self.fixed.dimensions, cuts=cuts)

    def initial(self) -> ModelParameters | None:
        """Returns the named extractor's weights, or None for scattering, which has no weights."""
        return None if self._given is None else model_parameters(self._given, scope="extractor")

    def extractor_file(self) -> NetworkFile | None:
        """Returns the extractor as ONNX for devices without PyTorch.

        Raises:
            ConfigurationError: It cannot be exported.
        """
        try:
            needs = {} if images_of(self.fixed.extractor) is None else {INPUT_RANGE: UNIT_RANGE}
            data = onnx_bytes(self.fixed.extractor, self.context.input_shape, needs)
        except ExportError as error:
            raise ConfigurationError(f"[model] extractor: it must be exported as ONNX, but {error}") from error
        return NetworkFile(onnx=np.frombuffer(data, np.uint8))

    def known_extractor(self, name: str, received: Parts) -> nn.Module:
        """Returns the fixed extractor with its projection, exactly as the devices compute them."""
        return projected(self.fixed)

    # --- rounds

    async def round(self, cohort: Cohort) -> None:
        self.deliveries.begin(cohort.round)
        asked = cohort.sample(self.config.participation_ratio)
        await self._collect_statistics(cohort, asked)  # the lines features and device, then merge, shrink and space
        if not self._parts:
            raise QuorumNotReached("summarise", 0, 1)
        note_left_out(self._left_out, cohort, asked)
        figures = await self._send_space(cohort, asked)  # the lines general and personal, on the devices
        self._note_poor_classes(figures, cohort)  # guard

    async def _collect_statistics(self, cohort: Cohort, asked: Sequence[str]) -> None:
        """Asks devices for statistics that the server lacks or that describe an earlier version of their data.

        The run's quorum applies only until there are first statistics. Later, a new device that does not answer must
        not make the round fail for the others.
        """
        versions = cohort.data_versions
        lacking = [device for device in asked if self._lacks_statistics(device, versions.get(device, ""))]
        quorum, taken = 0.0 if self._parts else None, False
        async for answer in self.deliveries.ask(cohort, "summarise", {}, to=lacking, quorum=quorum):
            taken = True
            sent = answer.part("statistics", self.kind)
            self._parts[answer.device] = (_in_memory(sent), versions.get(answer.device, ""))
            self.note_received(answer.device, sent, cohort)
        if taken:
            self.merge_parts(cohort)
            self.check_merge()

    def check_merge(self) -> None:
        """Checks a merge of new statistics. Raises RunError if the run cannot continue with it."""

    def note_received(self, device: str, sent: Any, notes: Notes) -> None:
        """Adds events about a device's statistics."""
        note_no_class(device, sent.labels, self.config.min_samples, notes)

    def _lacks_statistics(self, device: str, version: str) -> bool:
        known = self._parts.get(device)
        return known is None or known[1] != version

    async def _send_space(self, cohort: Cohort, asked: Sequence[str]) -> dict[int, list[float]]:
        """Sends the class space to the round's devices that lack it; returns their leave-one-out figures.

        The run's quorum applies only until a first device has a space. Later, a device that does not answer must not
        make the round fail for the others.

        Returns:
            For each class the correctly recognised rows and all rows, summed over devices.
        """
        figures = defaultdict[int, list[float]](lambda: [0.0, 0.0])
        if self._space is None:
            return figures
        present = set(cohort.remaining)
        here = [device for device in asked if device in present]
        quorum = 0.0 if self.deliveries.any_acknowledged else None
        learning = self.deliveries.ask(
            cohort, "learn", self._learn_message, to=here, unless_held=self.merge_name, quorum=quorum
        )
        async for answer in learning:
            _add_leave_one_out(figures, answer.parts, self._counted.get(answer.device, []))
        return figures

    def _learn_message(self, device: str) -> Parts:
        assert self._space is not None
        plan = SpacePlan(
            merge=self.merge_name,
            counted=self._is_counted(device),
            left_out=self._left_out_of(device),
            draw_seed=derive_seed(self.context.seed, "space", self.merge_name),
        )
        return {"plan": plan.to_wire(), "space": self._space}

    def _is_counted(self, device: str) -> bool:
        """Returns whether a device's statistics are in the space."""
        return bool(self._counted.get(device))

    def _left_out_of(self, device: str) -> tuple[int, ...]:
        """Returns the classes that a device has sent and that the merge leaves out."""
        part, counted = self._parts.get(device), self._counted.get(device, [])
        return () if part is None else tuple(sorted(set(self.labels_of(part[0])) - set(counted)))

    def labels_of(self, part: Any) -> Sequence[int]:
        """Returns the classes in a device's statistics."""
        labels: Sequence[int] = part.labels
        return labels

    def _note_poor_classes(self, figures: Mapping[int, Sequence[float]], notes: Notes) -> None:
        """Guard: adds an event for each class whose leave-one-out accuracy is no better than chance."""
        if self._space is None:
            return
        chance = 1 / len(self._space.labels)
        for label, (right, count) in sorted(figures.items()):
            if label in self._space.labels and count and right / count <= chance:
                text = (
                    f"class {label}: leave-one-out recognises {right / count:.3f} of its rows, chance is {chance:.3f}"
                )
                notes.event("class-not-recognised", f"{text}; try another extractor")

    def update_present(self, present: Collection[str]) -> None:
        self.deliveries.update_present(present)

    def is_due(self, present: Mapping[str, str]) -> bool:
        """Returns whether a present device has no class space, or the server has no statistics of it.

        An unresponsive device does not make a round due until it reconnects or its pause is over. A round that is due
        for another reason includes the device.
        """
        return any(self._needs_round(*item) for item in present.items() if not self.deliveries.is_unresponsive(item[0]))

    def _needs_round(self, device: str, version: str) -> bool:
        lacks_space = self._space is not None and self.deliveries.lacks(device, self.merge_name)
        return lacks_space or self._lacks_statistics(device, version)

    # --- the merge

    def forget(self, device: str, notes: Notes) -> None:
        """Recomputes the merge without the device's statistics; the new merge does not depend on them."""
        self.deliveries.forget(device)
        if self._parts.pop(device, None) is not None:
            self.merge_parts(notes)

    def merge_parts(self, notes: Notes) -> None:
        """Recomputes the merge and its class space from all statistics, in device-id order."""
        self._trusted = trusted_centres(self.context.trusted_data(), self.fixed.of) or self._trusted
        rules = MergeRules(robust=self.config.robust, count_cap=self.config.count_cap, trusted=self._trusted)
        parts = {device: part for device, (part, _) in self._parts.items()}
        moments, self._counted, self._left_out = self.merged(parts, rules, notes)
        self._space, self.merge_name = None, 0
        if moments is None:
            return
        try:
            self.use_space(self.space_of(moments, notes), notes)
        except KnowledgeError as error:  # such as a space that overflows float16; the run must continue
            notes.event("no-class-space", f"the merge gives no class space to send: {error}")

    def use_space(self, space: ClassSpace, notes: Notes) -> None:
        """Makes a space, rounded as it is sent, the one to send. Raises KnowledgeError if float16 cannot hold it."""
        payload = encode({"space": space})
        sent = decode(payload)["space"]
        assert isinstance(sent, ClassSpace)
        self._space, self.merge_name = sent, int.from_bytes(payload.sha256[:8], "big") >> 1
        notes.report("merged_classes", len(sent.labels))
        notes.report("shrinkage", float(sent.shrinkage))

    def merged(self, parts: Mapping[str, Any], rules: MergeRules, notes: Notes) -> Merged:
        """Returns the merge of the devices' statistics; see `merge_moments`."""
        result = merge_moments(parts, rules, notes)
        note_single_classes(result[1].values(), notes)
        return result

    def space_of(self, moments: Moments, notes: Notes) -> ClassSpace:
        """Returns the class space of a merge. Raises KnowledgeError if there is none."""
        if moments.df < moments.dimensions:
            text = (
                f"the covariance has {moments.df} degrees of freedom for {moments.dimensions} dimensions and is shrunk"
            )
            notes.event("few-rows", f"{text} strongly; use more rows, or lower [method] dimensions")
        return make_space(moments, self._shrinkage(moments))

    def _shrinkage(self, moments: Moments) -> float:
        wanted = self.config.shrinkage
        return shrinkage_rule(moments.dimensions, moments.df) if isinstance(wanted, str) else wanted

    # --- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "parts": {device: [_pack_part(part), version] for device, (part, version) in self._parts.items()},
            "space": None if self._space is None else pack_space(self._space),
            "merge": self.merge_name,
            "counted": {device: list(labels) for device, labels in self._counted.items()},
            "left_out": {device: list(texts) for device, texts in self._left_out.items()},
            "trusted": {str(label): torch.from_numpy(centre) for label, centre in self._trusted.items()},
            **self.deliveries.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._parts = {
            device: (_unpack_part(self.kind, part), version) for device, (part, version) in state["parts"].items()
        }
        self._space = None if state["space"] is None else unpack_space(state["space"])
        self.merge_name = state["merge"]
        self._counted = {device: list(labels) for device, labels in state["counted"].items()}
        self._left_out = {device: list(texts) for device, texts in state["left_out"].items()}
        self._trusted = {int(label): centre.numpy() for label, centre in state["trusted"].items()}
        self.deliveries.load_state_dict(state)

    def global_model(self) -> nn.Module | None:
        """Returns the general model, or None before the first class space exists."""
        if self._space is None:
            return None
        return SpaceModel(self.fixed, self.context.classes).take(self._space)

    def export(self) -> tuple[nn.Module, tuple[int, ...]] | None:
        model = self.global_model()
        return None if model is None else (model, self.context.input_shape)


def _add_leave_one_out(figures: dict[int, list[float]], parts: Parts, counted: Sequence[int]) -> None:
    """Adds one device's leave-one-out figures, for those of its classes that are in the merge."""
    metrics = parts.get("metrics")
    for metric in metrics.metrics if isinstance(metrics, Metrics) else []:
        for item in metric.by_class if metric.name == LEAVE_ONE_OUT else []:
            if item.label in counted:
                figures[item.label][0] += item.sum
                figures[item.label][1] += item.count


def _in_memory(part: Any) -> Any:
    """Copies a part into memory; the received arrays are mapped from a file that is deleted after the round."""
    return _unpack_part(type(part), _pack_part(part))


def _pack_part(part: Any) -> dict[str, Any]:
    values = {name: value for name, value in vars(part).items() if value is not None}
    return {
        name: torch.from_numpy(np.array(one)) if isinstance(one, np.ndarray) else one for name, one in values.items()
    }


def _unpack_part(kind: type[Kind], state: Mapping[str, Any]) -> Any:
    return kind(**{name: one.numpy() if isinstance(one, torch.Tensor) else one for name, one in state.items()})
