"""Class statistics, server half: merges the devices' statistics exactly, and sends them the space of their classes.

Our own method; `docs/reference/methods/classstats.md` describes it.
What is kept of each device is what it sent, so a merge without it is
made of the others' alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from fleetdistill.errors import ConfigurationError, DataError, ExportError, KnowledgeError, QuorumNotReached
from fleetdistill.knowledge import (
    CUT,
    Array,
    ClassSpace,
    Metrics,
    ModelParameters,
    NetworkFile,
    Parts,
    SharedStatistics,
)
from fleetdistill.methods.classstats.class_space import make_space, shrinkage_rule
from fleetdistill.methods.classstats.class_variants import LEAVE_ONE_OUT
from fleetdistill.methods.classstats.config import SCATTERING, ClassStatsConfig
from fleetdistill.methods.classstats.exchange import SpacePlan, check_images
from fleetdistill.methods.classstats.kept_features import FixedFeatures
from fleetdistill.methods.classstats.kept_space import packed, unpacked
from fleetdistill.methods.classstats.shared_statistics import Moments, most_directions
from fleetdistill.methods.classstats.space_model import SpaceModel
from fleetdistill.models import build_model
from fleetdistill.seeds import derive_seed
from fleetdistill.training.model import output_shape
from fleetdistill.training.onnx_export import onnx_bytes
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.methods.base import Needs, ServerMethod
from fleetdistill_server.methods.classstats.merge import (
    LeftOutReasons,
    Rules,
    merged_moments,
    note_left_out,
    note_no_class,
)
from fleetdistill_server.methods.classstats.robust import trusted_centres
from fleetdistill_server.methods.cohort import Cohort, Notes
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.deliveries import Deliveries
from fleetdistill_server.methods.traffic import Exchange, Sizes


class ClassStatsServer(ServerMethod):
    """Keeps every device's statistics apart, and the space of their merge."""

    config: ClassStatsConfig
    summary = "one exchange: merged class means and one covariance, closed form"
    recommended = (
        "for images of which each device has some classes, whatever models the apps run: on all classes it is ahead of "
        "training alone, of feddkc and of fedavg with the apps' models in every setting that we measured, with one "
        "upload and one download of some kB. Its limits: class means and counts leave the device; the global model of "
        "fedavg with a small network on the same standardised features is level, at hundreds of times the bytes; hard "
        "images (CIFAR-10) want a pretrained extractor. docs/reference/methods/ has the figures"
    )
    picks_devices = True

    def __init__(self, config: ClassStatsConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.extractor = self._extractor().cpu().eval()  # nothing here is worth a GPU
        self._feature_shape = output_shape(self.extractor, context.input_shape)
        features = prod(self._feature_shape)
        self.fixed = FixedFeatures(self.extractor, features, config.dimensions_for(context.input_shape, features))
        self._parts: dict[str, tuple[SharedStatistics, str]] = {}  # as they came, and of which data
        self._counted: dict[str, list[int]] = {}  # of each device the classes that are in the merge
        self._left_out: LeftOutReasons = {}
        self._trusted: dict[int, Array] = {}  # kept: a device may be forgotten where the operator's data is not
        self._space: ClassSpace | None = None
        self.merge_name = 0  # names the space by what is in it
        self.deliveries = Deliveries()  # of the space

    @classmethod
    def form(cls, config: Any) -> type[ServerMethod]:
        """As the configuration's."""
        if isinstance(config, ClassStatsConfig):
            return cls
        from fleetdistill_server.methods.classstats.averaged import AveragedServer

        return AveragedServer

    def _extractor(self) -> nn.Module:
        shape = self.context.input_shape
        if self.config.features != SCATTERING:
            return self.context.extractor()
        try:
            check_images(np.zeros((1, *shape), np.float32), shape)
        except DataError as error:
            raise ConfigurationError(f"[contract] input_shape: {error}") from error
        return build_model(SCATTERING, input_shape=shape)

    # --- what it declares

    @classmethod
    def needs(cls, config: ClassStatsConfig) -> Needs:
        """One extractor where a run names it; the other one is the SDK's own."""
        return Needs(same_extractor=config.features == "model")

    @classmethod
    def exchanges(cls, config: ClassStatsConfig, sizes: Sizes) -> Sequence[Exchange]:
        """oneshot.md, section 6, for a device that has enough samples of every class."""
        dimensions = min(config.dimensions or 384, sizes.features)
        df, classes = max(sizes.samples - sizes.classes, 0), sizes.classes
        statistics = SharedStatistics.schema(
            classes=classes,
            dimensions=dimensions,
            directions=most_directions(config.rank, df, dimensions, config.rows_per_direction),
            features=sizes.cuts,
            least_samples=config.min_samples,
            most_rows=config.rank,
            rows_per_direction=config.rows_per_direction,
        )
        space = ClassSpace.schema(classes=classes, dimensions=dimensions, directions=min(classes - 1, dimensions))
        return [
            Exchange(step="summarise", up={"statistics": statistics}, first=0, end=1),
            Exchange(step="learn", down={"space": space}, first=0, end=1),
        ]

    def sizes(self) -> Sizes:
        """What travels are the numbers behind the projection."""
        cuts = {CUT: self._feature_shape} if self.needs(self.config).same_extractor else {}
        return Sizes(classes=self.context.classes, features=self.fixed.dimensions, cuts=cuts)

    def initial(self) -> ModelParameters | None:
        """Of a given extractor its weights; the other one is the same everywhere."""
        return model_parameters(self.extractor, scope="extractor") if self.needs(self.config).same_extractor else None

    def extractor_file(self) -> NetworkFile | None:
        """The extractor for devices without PyTorch; None where it cannot be exported."""
        try:
            data = onnx_bytes(self.extractor, self.context.input_shape)
        except ExportError:
            return None
        return NetworkFile(onnx=np.frombuffer(data, np.uint8))

    # --- rounds

    async def round(self, cohort: Cohort) -> None:
        self.deliveries.begin(cohort.round)
        asked = cohort.sample(self.config.participation_ratio)
        await self._collect_statistics(cohort, asked)
        if not self._parts:
            raise QuorumNotReached("summarise", 0, 1)
        note_left_out(self._left_out, cohort, asked)
        await self._send_space(cohort, asked)

    async def _collect_statistics(self, cohort: Cohort, asked: Sequence[str]) -> None:
        """Asks devices whose statistics are not here, or are of other data than they have now.

        Once there is a merge they have no quorum: a newcomer that does not answer must not cost the others the round.
        """
        versions = cohort.data_versions
        lacking = [device for device in asked if self._lacks_statistics(device, versions.get(device, ""))]
        quorum, taken = 0.0 if self._parts else None, False
        async for answer in self.deliveries.ask(cohort, "summarise", {}, to=lacking, quorum=quorum):
            taken = True
            sent = answer.part("statistics", SharedStatistics)
            self._parts[answer.device] = (_in_memory(sent), versions.get(answer.device, ""))
            note_no_class(answer.device, sent.labels, self.config.min_samples, cohort)
        if taken:
            self.merge_parts(cohort)

    def _lacks_statistics(self, device: str, version: str) -> bool:
        known = self._parts.get(device)
        return known is None or known[1] != version

    async def _send_space(self, cohort: Cohort, asked: Sequence[str]) -> None:
        """Every device that is here and does not have the space gets it; the round ends when they have it.

        Once a device has one they have no quorum: one that does not answer must not cost the others the round.
        """
        if self._space is None:
            return
        present = set(cohort.remaining)
        here = [device for device in asked if device in present]
        quorum = 0.0 if self.deliveries.any_acknowledged else None
        figures = defaultdict[int, list[float]](lambda: [0.0, 0.0])
        learning = self.deliveries.ask(
            cohort, "learn", self._learn_message, to=here, unless_held=self.merge_name, quorum=quorum
        )
        async for answer in learning:
            _add_leave_one_out(figures, answer.parts, self._counted.get(answer.device, []))
        self._note_poor_classes(cohort, figures)

    def _learn_message(self, device: str) -> Parts:
        assert self._space is not None
        plan = SpacePlan(
            merge=self.merge_name,
            counted=bool(self._counted.get(device)),
            left_out=self._left_out_of(device),
            draw_seed=derive_seed(self.context.seed, "space", self.merge_name),
        )
        return {"plan": plan.to_wire(), "space": self._space}

    def _left_out_of(self, device: str) -> tuple[int, ...]:
        """The classes that a device has sent and that are not in the merge."""
        part, counted = self._parts.get(device), self._counted.get(device, [])
        return () if part is None else tuple(sorted(set(part[0].labels) - set(counted)))

    def _note_poor_classes(self, notes: Notes, figures: Mapping[int, Sequence[float]]) -> None:
        """A class that its own rows, left out, are not found in more often than by chance is worth a word."""
        assert self._space is not None
        chance = 1 / len(self._space.labels)
        for label, (right, count) in sorted(figures.items()):
            if label in self._space.labels and count and right / count <= chance:
                text = f"class {label}: {right / count:.3f} of its rows are recognised when left out, chance is"
                notes.event("class-not-recognised", f"{text} {chance:.3f}; features of another kind may tell it apart")

    def is_due(self, present: Mapping[str, str]) -> bool:
        """Whether a device that is here lacks the space, or the server its statistics.

        One that has not answered counts again when it comes back, and in a round that others make due.
        """
        self.deliveries.update_present(present)
        return any(self._needs_round(*one) for one in present.items() if not self.deliveries.is_unresponsive(one[0]))

    def _needs_round(self, device: str, version: str) -> bool:
        lacks_space = self._space is not None and self.deliveries.lacks(device, self.merge_name)
        return lacks_space or self._lacks_statistics(device, version)

    # --- the merge

    def forget(self, device: str, notes: Notes) -> None:
        """Makes the merge again without the device's part; nothing of it is left in the others'."""
        self.deliveries.forget(device)
        if self._parts.pop(device, None) is not None:
            self.merge_parts(notes)

    def merge_parts(self, notes: Notes) -> None:
        """All parts anew, in the order of the devices' ids; the space is rounded as it travels, and named by that."""
        self._trusted = trusted_centres(self.context.trusted_data(), self.fixed.of) or self._trusted
        rules = Rules(robust=self.config.robust, count_cap=self.config.count_cap, trusted=self._trusted)
        parts = {device: part for device, (part, _) in self._parts.items()}
        moments, self._counted, self._left_out = merged_moments(parts, rules, notes)
        self._space, self.merge_name = None, 0
        if moments is None:
            return
        try:
            payload = encode({"space": self._space_of(moments, notes)})
        except KnowledgeError as error:  # also of a space that does not fit float16: it must not end the run
            notes.event("no-class-space", f"there is no class space to send: {error}")
            return
        sent = decode(payload)["space"]
        assert isinstance(sent, ClassSpace)
        self._space, self.merge_name = sent, int.from_bytes(payload.sha256[:8], "big") >> 1
        notes.report("merged_classes", len(sent.labels))
        notes.report("shrinkage", float(sent.shrinkage))

    def _space_of(self, moments: Moments, notes: Notes) -> ClassSpace:
        if moments.df < moments.dimensions:
            text = f"{moments.df} degrees of freedom behind {moments.dimensions} dimensions"
            notes.event("few-rows", f"{text}: the covariance is shrunk far; more rows or fewer dimensions would help")
        return make_space(moments, self._shrinkage(moments))

    def _shrinkage(self, moments: Moments) -> float:
        wanted = self.config.shrinkage
        return shrinkage_rule(moments.dimensions, moments.df) if isinstance(wanted, str) else wanted

    # --- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "parts": {device: [_packed_part(part), version] for device, (part, version) in self._parts.items()},
            "space": None if self._space is None else packed(self._space),
            "merge": self.merge_name,
            "counted": {device: list(labels) for device, labels in self._counted.items()},
            "left_out": {device: list(texts) for device, texts in self._left_out.items()},
            "trusted": {str(label): torch.from_numpy(centre) for label, centre in self._trusted.items()},
            **self.deliveries.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._parts = {device: (_unpacked_part(part), version) for device, (part, version) in state["parts"].items()}
        self._space = None if state["space"] is None else unpacked(state["space"])
        self.merge_name = state["merge"]
        everything = {device: list(part.labels) for device, (part, _) in self._parts.items()}
        self._counted = {device: list(labels) for device, labels in state.get("counted", everything).items()}
        self._left_out = {device: list(texts) for device, texts in state.get("left_out", {}).items()}
        self._trusted = {int(label): centre.numpy() for label, centre in state.get("trusted", {}).items()}
        self.deliveries.load_state_dict(state)

    def global_model(self) -> nn.Module | None:
        """The general answer (3.7), once there is a space."""
        if self._space is None:
            return None
        return SpaceModel(self.fixed, self.context.classes).take(self._space)

    def export(self) -> tuple[nn.Module, tuple[int, ...]] | None:
        model = self.global_model()
        return None if model is None else (model, self.context.input_shape)


def _add_leave_one_out(figures: dict[int, list[float]], parts: Parts, counted: Sequence[int]) -> None:
    """Of the classes whose rows of this device are in the merge: of a few that are not sent nothing follows."""
    metrics = parts.get("metrics")
    for metric in metrics.metrics if isinstance(metrics, Metrics) else []:
        for one in metric.by_class if metric.name == LEAVE_ONE_OUT else []:
            if one.label in counted:
                figures[one.label][0] += one.sum
                figures[one.label][1] += one.count


def _in_memory(part: SharedStatistics) -> SharedStatistics:
    """A part of its own memory: what came lies in a file that is deleted after the round."""
    return _unpacked_part(_packed_part(part))


def _packed_part(part: SharedStatistics) -> dict[str, Any]:
    arrays = {name: value for name, value in vars(part).items() if name != "labels" and value is not None}
    return {"labels": list(part.labels), **{name: torch.from_numpy(np.array(one)) for name, one in arrays.items()}}


def _unpacked_part(state: Mapping[str, Any]) -> SharedStatistics:
    return SharedStatistics(**{name: one if name == "labels" else one.numpy() for name, one in state.items()})
