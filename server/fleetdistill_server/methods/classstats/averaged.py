"""Server half of class statistics with an averaged extractor.

The server averages the extractor, merges the devices' class summaries and sends the merge back. It also trains its own
predictor on drawn rows only: this is the operator's model, and it shows which classes the Gaussians do not describe.

This method is our own; `docs/reference/methods/classstats-averaged.md` describes it. Section numbers in comments are
those of that method's specification, classstats.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill.errors import ConfigurationError, QuorumNotReached
from fleetdistill.knowledge import (
    CUT,
    Array,
    ClassStatistics,
    Kind,
    ModelParameters,
    Parts,
    Plan,
    SoftPredictions,
    Weights,
)
from fleetdistill.methods.classstats.averaged_config import AveragedConfig
from fleetdistill.methods.classstats.gaussians import clip, from_wire, shrink, to_wire, without_spread
from fleetdistill.methods.classstats.kept_statistics import packed, unpacked
from fleetdistill.models import MODELS
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import extract
from fleetdistill.training.model import output_shape
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.schema import PartSchema, float_type
from fleetdistill_server.methods.averaging import TensorMean, WeightedMean
from fleetdistill_server.methods.base import Needs, ServerMethod
from fleetdistill_server.methods.classstats.merge import (
    Classes,
    LeftOutReasons,
    Rules,
    merged,
    note_left_out,
    note_no_class,
    too_large,
)
from fleetdistill_server.methods.classstats.own_predictor import OwnPredictor, least_recognised
from fleetdistill_server.methods.classstats.robust import trusted_centres
from fleetdistill_server.methods.cohort import Cohort, Notes
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.deliveries import Deliveries
from fleetdistill_server.methods.traffic import NOTHING, Exchange, Sizes

_PROBES = 64


class AveragedServer(ServerMethod):
    """Stores the extractor, each device's summaries separately, their merge, and the server's own predictor."""

    config: AveragedConfig
    summary = "devices train on rows drawn from merged Gaussians of classes"
    recommended = (
        "where devices run different models and can share a small extractor: on all classes it is far ahead of "
        "training alone and of feddkc, and about level with or ahead of fedavg's device models, at a twentieth to a "
        "fortieth of its bytes. Its limits: moments of each class leave the device; features of a shallow extractor "
        "are a weak generator of harder images; fedavg's global model is better where every device can run it. "
        "docs/reference/methods/ has the figures"
    )

    def __init__(self, config: AveragedConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        _check_trained(config, context)
        self.extractor = context.extractor().to(context.torch_device)
        self._feature_shape = output_shape(self.extractor, context.input_shape)
        self.nonnegative = _is_nonnegative(self.extractor, context)
        self.predictor = context.server_model(self._feature_shape).to(context.torch_device)
        self.own = OwnPredictor(self.predictor, config, context, self._feature_shape, nonnegative=self.nonnegative)
        self.parts: dict[str, ClassStatistics] = {}  # in the wire's float16, a quarter of the size in float64
        self.classes: Classes = {}
        self._left_out: LeftOutReasons = {}
        self._trusted: dict[int, Array] = {}  # stored: `forget` may run where the operator's data is missing
        self.version = 0  # a hash of the merge's content
        self.agreed: tuple[int, Array] | None = None  # seed of the drawn rows, and soft predictions for them
        # Tracks the merge and the soft predictions. A device is unresponsive if it sent no summary, or did not
        # acknowledge a message that contained everything.
        self.deliveries = Deliveries(nothing=[-1, -1])

    # --- declarations

    @classmethod
    def needs(cls, config: AveragedConfig) -> Needs:
        return Needs(same_extractor=True)

    @classmethod
    def exchanges(cls, config: AveragedConfig, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchanges of section 6 of classstats.md, for a device with enough samples of every class.

        Soft predictions that `learn` sends are counted in `agree` if devices predict, else in a separate exchange.
        """
        frozen, every = config.extractor_rounds, config.agreement_every
        extractor = {"extractor": ModelParameters.schema(sizes.extractor)} if frozen else NOTHING
        classes = {"statistics": _statistics(config, sizes)}
        soft = {"predictions": SoftPredictions.schema(rows=config.drawn_rows * sizes.classes, classes=sizes.classes)}
        found = [
            Exchange(step="train", down=extractor, up=extractor, end=frozen),
            Exchange(step="summarise", down=extractor, up=classes, first=frozen, end=frozen + 1),
            Exchange(step="agree", down=soft, up=soft, first=frozen + every, every=max(every, 1)),
            Exchange(step="learn", down=classes, first=frozen, end=frozen + 1),
            Exchange(step="learn", first=frozen + 1),
        ]
        if config.server_teaches:
            found.append(Exchange(step="learn", down=soft, first=frozen, every=every))
        left_out = {"train": not frozen, "agree": not config.devices_agree}
        return [one for one in found if not left_out.get(one.step)]

    def sizes(self) -> Sizes:
        extractor = Weights.of(self.initial())
        return Sizes.of_cuts({CUT: self._feature_shape}, classes=self.context.classes, extractor=extractor)

    def initial(self) -> ModelParameters:
        """Returns the extractor; each device has its own predictor."""
        return model_parameters(self.extractor, scope="extractor")

    def known_extractor(self, name: str, received: Parts) -> nn.Module:
        """Returns the extractor that the devices freeze for their statistics."""
        extractor = self.context.extractor()
        sent = received.get("extractor")
        load_parameters(extractor, sent if isinstance(sent, ModelParameters) else self.initial())
        return extractor

    # --- rounds

    async def round(self, cohort: Cohort) -> None:
        self.deliveries.begin(cohort.round)
        asked = cohort.sample(self.config.participation_ratio)
        if cohort.completed < self.config.extractor_rounds:
            await self._average_extractor(cohort, asked)  # 3.1
            return
        await self._collect_summaries(cohort, asked)  # 3.2 on the devices, 3.3, 3.4, 3.9
        taught = [device for device in asked if device in self.parts and device in cohort.remaining]
        if not taught:
            raise QuorumNotReached("learn", 0, 1)
        note_left_out(self._left_out, cohort, taught)
        plan, new = self._plan(cohort)  # 3.5: the seed of the drawn rows
        before = self.deliveries.without_acknowledgement(taught)
        if new:
            taught = await self._new_predictions(cohort, taught, plan)  # 3.8
        await self._train_devices(cohort, taught, plan)  # 3.6, 3.7
        self.deliveries.mark_unresponsive(self.deliveries.without_acknowledgement(before))

    async def _average_extractor(self, cohort: Cohort, asked: Sequence[str]) -> None:
        mean = WeightedMean(self.config.robust)
        async for answer in cohort.ask("train", {"extractor": self.initial()}, to=asked):
            mean.add(answer.device, answer.part("extractor", ModelParameters), answer.samples)
        load_parameters(self.extractor, mean.result(cohort))

    async def _collect_summaries(self, cohort: Cohort, asked: Sequence[str]) -> None:
        """Asks devices for the summaries that the server lacks, and recomputes the merge if it receives new ones.

        The run's quorum applies only until there is a first summary. Later, a new device that does not answer must not
        make the round fail for the others.
        """
        due = [device for device in asked if self._must_summarise(device)]
        if not due:
            return
        message: Parts = {"extractor": self.initial()} if self.config.extractor_rounds else {}
        quorum = 0.0 if self.parts else None
        answers = {answer.device: answer async for answer in cohort.ask("summarise", message, to=due, quorum=quorum)}
        new = [device for device in answers if device not in self.parts]
        for device in new:
            self.parts[device] = unpacked(packed(answers[device].part("statistics", ClassStatistics)))
            note_no_class(device, self.parts[device].labels, self.config.min_samples, cohort)
        if quorum is not None:
            self.deliveries.mark_unresponsive([device for device in due if device not in answers])
        if new:
            self.merge_parts(cohort)

    def _must_summarise(self, device: str) -> bool:
        """Returns whether to ask a device for its summary.

        A device that has sent one is asked again if its state may be older than its summary: then it has no frozen
        extractor and cannot train. This applies to an unresponsive device, at growing intervals because the others wait
        for it until the deadline, and to every device after each second short round in a row.
        """
        if device in self.parts and not self.deliveries.is_unresponsive(device):
            short = self.deliveries.short_rounds
            return short > 0 and short % 2 == 0
        return self.deliveries.is_askable(device) or not self.parts

    async def _new_predictions(self, cohort: Cohort, taught: list[str], plan: Plan) -> list[str]:
        """Replaces the soft predictions on drawn rows; returns the devices that remain in the round."""
        if self.config.devices_agree:
            return await self._agree(cohort, taught, plan)
        self.agreed = (_seed(plan), self.own.soft_predictions(self.classes, _seed(plan)))
        return taught

    async def _train_devices(self, cohort: Cohort, taught: Sequence[str], plan: Plan) -> None:
        """Sends each device the plan, with the merged statistics and soft predictions that it does not have."""
        message = partial(self._learn_message, plan=plan)
        latest = [self.version, self._agreed_seed]
        async for answer in self.deliveries.ask_all(cohort, "learn", message, to=taught, acknowledges=lambda _: latest):
            self.deliveries.mark_responsive(answer.device)

    def _predictions_due(self, completed: int) -> bool:
        missing = self.config.server_teaches and self.agreed is None
        return bool(self.classes) and (missing or self.config.agrees_in(completed))

    async def _agree(self, cohort: Cohort, taught: Sequence[str], plan: Plan) -> list[str]:
        """Averages the devices' soft predictions on the round's drawn rows; returns the devices that answered."""
        mean = TensorMean(self.config.robust, probabilities=True)
        answered, seed = list[str](), _seed(plan)
        rows = self.config.drawn_rows * len(self.classes)
        message = partial(self._merge_message, plan=plan)
        acknowledges = lambda before: [self.version, before[1]]  # noqa: E731
        async for answer in self.deliveries.ask_all(cohort, "agree", message, to=taught, acknowledges=acknowledges):
            answered.append(answer.device)
            sent = answer.part("predictions", SoftPredictions)
            if sent.noise_seed != seed or len(sent.values) != rows:
                text = (
                    f"{answer.device} sent predictions for {len(sent.values)} rows of seed {sent.noise_seed}; the round"
                )
                cohort.event("member-left-out", f"{text} has {rows} rows of seed {seed}", answer.device)
                continue
            mean.add(torch.tensor(np.array(sent.values)))
        agreed = mean.result()
        if agreed is not None:
            self.agreed = (seed, agreed.float().numpy())
        return answered

    def _plan(self, cohort: Cohort) -> tuple[Plan, bool]:
        """Returns the round's plan, and whether new soft predictions are due.

        Without new soft predictions, the devices draw the rows that the existing ones are for.
        """
        new = self._predictions_due(cohort.completed)
        seed = derive_seed(cohort.generator("draw").initial_seed(), self.version)
        if self.agreed is not None and not new:
            seed = self.agreed[0]
        rate = self.config.local_rate(cohort.completed + 1)
        values = {"draw_seed": seed, "nonnegative": self.nonnegative, "merge": self.version, "learning_rate": rate}
        return Plan(values=values), new

    @property
    def _agreed_seed(self) -> int:
        return self.agreed[0] if self.agreed is not None else -1

    def _merge_message(self, acknowledged: Sequence[int], plan: Plan) -> dict[str, Kind]:
        """Returns the plan, with the merged classes unless the device has acknowledged the current merge."""
        merge, _ = acknowledged
        return {"plan": plan} if merge == self.version else {"plan": plan, "classes": self._to_wire(self.classes)}

    def _learn_message(self, acknowledged: Sequence[int], plan: Plan) -> Parts:
        """Returns `_merge_message`, with the soft predictions unless the device has acknowledged the current ones."""
        _, predictions = acknowledged
        parts = self._merge_message(acknowledged, plan)
        if self.agreed is not None and predictions != self.agreed[0]:
            parts["agreed"] = SoftPredictions(noise_seed=self.agreed[0], values=self.agreed[1])
        return parts

    def _to_wire(self, classes: Classes) -> ClassStatistics:
        return to_wire(classes, variances=not self.config.means_only)

    # --- the merge

    def forget(self, device: str, notes: Notes) -> None:
        """Recomputes the merge and retrains the server's own predictor without the device's summary."""
        self.deliveries.forget(device)
        if self.parts.pop(device, None) is not None:
            self.merge_parts(notes)

    def merge_parts(self, notes: Notes) -> None:
        """Recomputes the merge from all summaries, in device-id order, rounded to the wire's element type."""
        self._trusted = trusted_centres(self.context.trusted_data(), self._features_of) or self._trusted
        rules = Rules(robust=self.config.robust, trusted=self._trusted)
        whole, self._left_out = merged(self.parts, self.config.rank, rules, notes)
        classes = self._usable_classes(whole, notes)
        payload = encode({"classes": self._to_wire(classes)}, np.dtype(self.context.knowledge_type))
        sent = decode(payload)["classes"]
        assert isinstance(sent, ClassStatistics)
        self.classes = from_wire(sent)
        self.version = int.from_bytes(payload.sha256[:8], "big") >> 1
        self.agreed = None
        notes.report("merged_classes", len(self.classes))

    def _features_of(self, inputs: Tensor) -> Array:
        """Returns features `[n, F]` as devices compute them for their summaries."""
        rows: Array = extract(self.extractor, inputs).flatten(1).double().numpy()
        return clip(rows, self.config.clip_norm) if self.config.clip_norm else rows

    def _usable_classes(self, whole: Classes, notes: Notes) -> Classes:
        """Returns the shrunk merge of the classes that pass every guard (classstats.md, sections 3.4 and 3.9).

        If a guard rejects classes, shrinkage and training start again without them. A rejected class therefore has no
        influence on the pooled variance or on the server's own predictor.
        """
        limit = float(np.finfo(float_type(self.context.knowledge_type)).max)
        least = least_recognised(max(len(whole), 1))  # of all classes: rejecting one must not raise the limit
        while True:
            classes = shrink(whole, self.config.shrinkage)  # 3.4
            if self.config.means_only:
                classes = {label: without_spread(one) for label, one in classes.items()}
            rejected = (
                too_large(whole, limit, notes)  # guard
                or too_large(classes, limit, notes)  # guard
                or self.own.untrainable(classes, notes)  # 3.9, guard
                or self.own.unrecognised(classes, least, notes)  # guard
            )
            if not rejected:
                return classes
            whole = {label: one for label, one in whole.items() if label not in rejected}

    # --- state

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"extractor": self.extractor, "class predictor": self.predictor}

    def state_dict(self) -> dict[str, Any]:
        agreed = self.agreed
        return {
            "extractor": self.extractor.state_dict(),
            "predictor": self.predictor.state_dict(),
            "parts": {device: packed(part) for device, part in self.parts.items()},
            "classes": packed(self._to_wire(self.classes)),
            "left_out": {device: list(texts) for device, texts in self._left_out.items()},
            "trusted": {str(label): torch.from_numpy(centre) for label, centre in self._trusted.items()},
            "version": self.version,
            "agreed": None if agreed is None else [agreed[0], torch.from_numpy(agreed[1])],
            **self.deliveries.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.extractor.load_state_dict(state["extractor"])
        self.predictor.load_state_dict(state["predictor"])
        self.parts = {device: unpacked(part) for device, part in state["parts"].items()}
        self.classes = from_wire(unpacked(state["classes"]))
        self._left_out = {device: list(texts) for device, texts in state.get("left_out", {}).items()}
        self._trusted = {int(label): centre.numpy() for label, centre in state.get("trusted", {}).items()}
        self.version = state["version"]
        agreed = state["agreed"]
        self.agreed = None if agreed is None else (agreed[0], agreed[1].numpy())
        self.deliveries.load_state_dict(state)

    def global_model(self) -> nn.Module | None:
        """Returns the frozen extractor and the server's own predictor, or None before the first merge."""
        return nn.Sequential(self.extractor, self.predictor) if self.classes else None

    def export(self) -> tuple[nn.Module, tuple[int, ...]] | None:
        model = self.global_model()
        return None if model is None else (model, self.context.input_shape)


def _statistics(config: AveragedConfig, sizes: Sizes) -> PartSchema:
    """Returns the schema of class summaries: means, and unless `means_only` directions and variances."""
    directions = {"directions": (config.rank, sizes.features)} if config.rank else {}
    spread = {} if config.means_only else {**directions, "variances": (sizes.features,)}
    return ClassStatistics.schema(
        classes=sizes.classes,
        of_one={"means": (sizes.features,), **spread},
        features=sizes.cuts,
        least_samples=config.min_samples,
        rows_per_direction=config.rows_per_direction,
    )


def _check_trained(config: AveragedConfig, context: MethodContext) -> None:
    name = context.models.extractor
    if not config.extractor_rounds and name in MODELS:
        raise ConfigurationError(
            f"extractor_rounds is 0, but the weights of [model] extractor = {name!r} are random; set extractor_rounds "
            "to at least 1, or name a factory of a trained extractor as package.module:factory"
        )


def _is_nonnegative(extractor: nn.Module, context: MethodContext) -> bool:
    """Returns whether the extractor's features are never negative (a ReLU); drawn rows are then clipped at 0."""
    probe = torch.randn(_PROBES, *context.input_shape, generator=torch.Generator().manual_seed(0))
    return float(extract(extractor, probe).min()) >= 0


def _seed(plan: Plan) -> int:
    seed = plan.values["draw_seed"]
    assert isinstance(seed, int)
    return seed
