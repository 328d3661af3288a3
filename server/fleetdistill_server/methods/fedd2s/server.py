"""Server half of FedD2S: trains a copy of the global network on each device's features; the mean teaches the devices.

Atapour et al., FedD2S: Personalized Data-Free Federated Knowledge Distillation, 2024, Algorithm 1. The global network
consists of layers 2 to L of the devices' model and reads the first layer's output. Its layers l+1 to L are the head
that maps the features of a device's distillation layer l to soft labels.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import ConfigurationError, KnowledgeError
from fleetdistill.knowledge import (
    PROBABILITIES,
    Array,
    Kind,
    ModelParameters,
    Parts,
    Plan,
    RefinedKnowledge,
    SampleKnowledge,
)
from fleetdistill.methods.fedd2s.config import FedD2SConfig
from fleetdistill.methods.fedd2s.device import Term, phase_epochs, schedule
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.training.losses import distillation_loss, feature_distance, soft_targets
from fleetdistill.training.model import SplitModel, evaluating
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill.training.rollback import Rate, check_can_be_sent, train_or_roll_back
from fleetdistill.wire.schema import Shapes
from fleetdistill_server.figures import Figure
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.fedd2s.schedule import distillation_layer, shallowest_layer
from fleetdistill_server.methods.traffic import NOTHING, Exchange, Message, Sizes
from fleetdistill_server.training.evaluation import TEACHER_ACCURACY

_GRADIENT_ROWS = 1024
_FIRST, _AT_LAYER = "first", "at_layer"  # names of columns whose shapes are unknown
_NOTHING_TO_LEARN: Mapping[str, Kind] = MappingProxyType({"teacher": RefinedKnowledge(valid=False)})


@dataclass(frozen=True)
class Triplets:
    """One device's upload on the server's torch device: l, ids `[K]`, H_1 and H_l `[K, ...]`, labels `[K]`."""

    device: str
    layer: int
    sample_ids: Array
    first: Tensor
    at_layer: Tensor
    labels: Tensor


class FedD2SServer(ServerMethod):
    """Stores the global network without its first layer, and each device's number of rounds."""

    config: FedD2SConfig
    summary = "soft labels of ever shallower layers; deep stay personal"
    figures = {  # noqa: RUF012  (a ClassVar of the base)
        "teacher_accuracy": TEACHER_ACCURACY,
        "cut_layer": Figure("Cut layers", of="devices"),
    }

    def __init__(self, config: FedD2SConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        model = _layered(context.device_model())
        self.names = model.stage_names
        self.l_min = shallowest_layer(model, l_min=config.l_min, dropping_set=config.dropping_set)
        self.network = model.stages[1:].to(context.torch_device)
        self.participations: dict[str, int] = {}
        self._shapes = model.stage_shapes(context.input_shape)

    @classmethod
    def needs(cls, config: FedD2SConfig) -> Needs:
        return Needs(same_architecture=True)

    @classmethod
    def exchanges(cls, config: FedD2SConfig, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchanges of fedd2s.md in docs/reference/methods, with sample ids in both directions."""
        columns, channels = sizes.cuts or _counted_columns(sizes), _counted_channels(sizes)
        own = SampleKnowledge.schema(
            rows=sizes.samples, features=columns, columns=("features", "labels"), channels=channels
        )
        return [
            Exchange(step="extract", up={"knowledge": own}),
            Exchange(step="learn", down=_reply_schema(config, sizes)),
        ]

    def sizes(self) -> Sizes:
        """Returns the run's sizes: the first layer and all possible distillation layers; each ask names its columns."""
        names = (self.names[0], *self.names[self.l_min - 1 :])
        return Sizes.of_cuts({name: self._shapes[name] for name in names}, classes=self.context.classes)

    keeps_initial = True

    def initial(self) -> ModelParameters | None:
        """Returns the common initial model, whose layers 2 to L the global network starts from; None if not shared."""
        if not self.config.shared_initial:
            return None
        return self.given_initial or model_parameters(self.context.device_model())

    def known_extractor(self, name: str, received: Parts) -> nn.Module:
        """Returns the layers up to a column's of the initial model, the last one that the server knows."""
        model, initial = _layered(self.context.device_model()), self.initial()
        if initial is not None:
            load_parameters(model, initial)
        return model.stages[: model.depth_of(name)]

    async def round(self, cohort: Cohort) -> None:
        layers = {device: self._layer(device) for device in cohort.sample(self.config.participation_ratio)}  # eq. (6)
        cohort.report("cut_layer", {device: self.names[layer - 1] for device, layer in layers.items()})
        answers: dict[str, DeviceAnswer] = {}  # the arrays are mapped from files and read again for the replies
        copies = Copies(WeightedMean(self.config.robust), by_samples=self.config.average == "samples")
        async for answer in self._ask_triplets(layers, cohort):
            answers[answer.device] = answer
            copies.add(answer.prepared)
        if copies.accuracies:
            load_parameters(self.network, copies.mean.result(cohort))  # eq. (11)

        def message(device: str) -> Parts:
            return self.reply(self._triplets(answers[device], layers[device]), copies.accuracies.get(device), cohort)

        async for answer in cohort.ask("learn", message, to=list(answers), quorum=0.0):  # eqs. (12), (13)
            self.participations[answer.device] = self.participations.get(answer.device, 0) + 1

    def _ask_triplets(self, layers: Mapping[str, int], cohort: Cohort) -> AsyncIterator[DeviceAnswer]:
        """Sends message 1, l, to each device and yields messages 2: H_1, H_l and labels."""
        return cohort.ask(
            "extract",
            lambda device: {"plan": self.plan(device, layers[device])},
            to=list(layers),
            columns=lambda device: self._columns(layers[device]),
            prepare=lambda answer: self._copy(self._triplets(answer, layers[answer.device]), cohort),
        )

    def _copy(self, sent: Triplets, cohort: Cohort) -> Copy | None:
        """Trains the copy of one device, as soon as its answer arrives; None, with an event, if training fails."""
        seed = cohort.generator(f"copy {sent.device}").initial_seed()
        with torch.random.fork_rng(devices=()):  # dropout must not depend on the order in which answers arrive
            torch.manual_seed(seed)
            p_bc = self.soft_labels(self.head(sent.layer), sent.at_layer)  # eq. (8)
            trained = self.clients_to_server(sent, p_bc, cohort)  # eqs. (9), (10)
        if trained is None:
            return None
        return Copy(sent.device, len(sent.labels), _accuracy(p_bc, sent.labels), model_parameters(trained))

    def _layer(self, device: str) -> int:
        """Returns l by eq. (6). Z counts the device's completed rounds and this one; a failed round does not count."""
        participation = self.participations.get(device, 0) + 1
        return distillation_layer(participation, len(self.names), self.config.drop_every, self.l_min)

    def plan(self, device: str, layer: int) -> Plan:
        """Returns the plan of messages 1 and 4: l and Z."""
        return Plan(values={"layer": layer, "participation": self.participations.get(device, 0) + 1})

    def _columns(self, layer: int) -> list[str]:
        """Returns the columns that a device sends: H_1 and H_l, or H_1 alone if l is 1."""
        return list(dict.fromkeys((self.names[0], self.names[layer - 1])))

    def _triplets(self, answer: DeviceAnswer, layer: int) -> Triplets:
        sent = answer.part("knowledge", SampleKnowledge)
        assert sent.labels is not None  # the contract's columns were checked at ingest
        names = (self.names[0], self.names[layer - 1])
        first, at_layer = (self._tensor(sent.features[name]).float() for name in names)
        return Triplets(
            answer.device, layer, sent.sample_ids, first, at_layer, self._tensor(sent.labels.astype(np.int64))
        )

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.context.torch_device)

    def head(self, layer: int) -> nn.Sequential:
        """Returns theta^g_{+l}: layers l+1 to L, empty for l = L. The paper's l to L would run layer l twice."""
        return self.network[layer - 1 :]

    def soft_labels(self, part: nn.Module, features: Tensor) -> Tensor:
        """Returns S_tau of the output of a part of the global network for features, `[K, C]`, in eval mode."""
        return soft_targets(self.context.trainer.extract(part, features, model=part), self.config.temperature)

    def clients_to_server(self, sent: Triplets, p_bc: Tensor, cohort: Cohort) -> nn.Module | None:
        """Trains a copy of the global network on one device's triplets; None, with an event, if training fails."""
        trained = copy.deepcopy(self.network)
        training = partial(
            self.context.trainer.train_steps,
            trained,
            len(sent.labels),
            epochs=phase_epochs(self.config),
            batch_size=self.config.batch_size,
            optimizer=make_local_optimizer(self.config, trained.parameters()),
            losses=schedule(self.config, self.distillation(trained, sent, p_bc), _labels_term(trained, sent)),
            generator=cohort.generator(f"clients to server {sent.device}"),
        )
        failure = train_or_roll_back(training, trained, rate=self._rate)
        if failure:
            text = f"the copy trained on rows of {sent.device} is left out of the mean: {failure}"
            cohort.event("copy-left-out", text, sent.device)
        return None if failure else trained

    def distillation(self, trained: nn.Sequential, sent: Triplets, p_bc: Tensor) -> Term | None:
        """Returns J of eq. (9): p is the constant teacher, q is the copy's output for H_1.

        Returns None for l = 1, where p and q are equal at first and only labels count. A loss
        of 0 would still change the copy, because Adam's first step has the size of the rate for any gradient.
        """
        if sent.layer == 1:
            return None
        p_bc = p_bc.to(self.context.torch_device)
        if self.config.distance == "head":
            return lambda rows: distillation_loss(trained(sent.first[rows]), p_bc[rows], self.config.temperature)
        below = trained[: sent.layer - 1]  # layers 2 to l
        return lambda rows: feature_distance(below(sent.first[rows]), sent.at_layer[rows])

    def reply(self, sent: Triplets, own_accuracy: float | None, cohort: Cohort) -> Parts:
        """Returns message 4: t and the head, or the ablations' features.

        The message contains no knowledge if a guard fires or the device's copy was left out of the mean.

        Args:
            sent: The device's triplets.
            own_accuracy: Accuracy of p on the device's rows; None if its copy was left out of the mean.
            cohort: Receives the guards' events.
        """
        t_bc = self.soft_labels(self.network, sent.first)  # eq. (12)
        teaches = own_accuracy is not None and self._teaches(sent, t_bc, own_accuracy, cohort)  # guard
        knowledge = self._encodable_knowledge(sent, t_bc, cohort) if teaches else None  # guard
        return {"plan": self.plan(sent.device, sent.layer), **(knowledge or _NOTHING_TO_LEARN)}

    def _encodable_knowledge(self, sent: Triplets, t_bc: Tensor, cohort: Cohort) -> Mapping[str, Kind] | None:
        """Returns `knowledge`; None, with an event, if a value cannot be sent, so that the run continues."""
        try:
            return self.knowledge(sent, t_bc)
        except KnowledgeError as error:
            text = f"{sent.device} gets no knowledge from the global network: {error}"
            cohort.event("knowledge-left-out", text, sent.device)
            return None

    def knowledge(self, sent: Triplets, t_bc: Tensor) -> Mapping[str, Kind]:
        """Returns the knowledge of message 4.

        Raises:
            KnowledgeError: A value is not finite or too large for the run's knowledge type.
        """
        if self.config.distance == "mse":
            return self._features_reply(sent)
        if self.config.s2c_mode == "feature_grad" and sent.layer < len(self.names):
            return {"features": self._column(sent, self._feature_gradient(sent, t_bc))}
        self._check(t_bc)
        teacher = RefinedKnowledge(valid=True, sample_ids=sent.sample_ids, values=t_bc.numpy(), scale=PROBABILITIES)
        if sent.layer == len(self.names):
            return {"teacher": teacher}
        return {"teacher": teacher, "head": model_parameters(self.head(sent.layer), scope="head")}

    def _features_reply(self, sent: Triplets) -> Mapping[str, Kind]:
        """Returns the target of the `mse` ablation: the global network's features at layer l."""
        below = self.network[: sent.layer - 1]
        if not len(below):
            return _NOTHING_TO_LEARN
        return {"features": self._column(sent, self.context.trainer.extract(below, sent.first, model=below))}

    def _column(self, sent: Triplets, values: Tensor) -> SampleKnowledge:
        self._check(values)
        return SampleKnowledge(sample_ids=sent.sample_ids, features={self.names[sent.layer - 1]: values.numpy()})

    def _check(self, values: Tensor) -> None:
        check_can_be_sent(values, self.context.knowledge_type, self._rate)

    @property
    def _rate(self) -> Rate:
        return "learning_rate", self.config.learning_rate

    def _feature_gradient(self, sent: Triplets, t_bc: Tensor) -> Tensor:
        """Returns dJ/dH_l at the uploaded H_l, `[K, ...]`: each row separately, including the factor tau^2."""
        head, parts = self.head(sent.layer), []
        t_bc = t_bc.to(self.context.torch_device)
        with evaluating(head):
            for rows in torch.arange(len(sent.labels)).split(_GRADIENT_ROWS):
                features = sent.at_layer[rows].requires_grad_()
                loss = distillation_loss(head(features), t_bc[rows], self.config.temperature) * len(rows)
                parts.append(torch.autograd.grad(loss, features)[0].cpu())
        return torch.cat(parts)

    def _teaches(self, sent: Triplets, t_bc: Tensor, own: float, cohort: Cohort) -> bool:
        """Guard: returns whether the global network is better than chance or than the device's own layers."""
        teacher = _accuracy(t_bc, sent.labels)
        cohort.report("teacher_accuracy", {sent.device: teacher})
        useless = teacher <= 1 / self.context.classes and teacher < own
        if useless and self.config.teacher_guard:
            text = (
                f"the global network has accuracy {teacher:.3f} on the rows of {sent.device}, its own layers {own:.3f}"
            )
            cohort.guard("teacher", f"{text}; the device gets no knowledge from it", sent.device)
            return False
        return True

    def forget(self, device: str, notes: Notes) -> None:
        """Deletes the device's number of rounds; the global network is unchanged."""
        self.participations.pop(device, None)

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"network": self.network}

    def state_dict(self) -> dict[str, Any]:
        return {"network": self.network.state_dict(), "participations": dict(self.participations)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.participations = dict(state["participations"])

    def export(self) -> tuple[nn.Module, tuple[int, ...]]:
        """Returns the global network and the shape of its input, the first layer's output."""
        return self.network, self._shapes[self.names[0]]


def _at_layer(sizes: Sizes) -> int:
    """Returns the elements of one sample's features at the distillation layer; the logits at the last layer."""
    return sizes.classes if sizes.layer_features is None else sizes.layer_features


def _counted_columns(sizes: Sizes) -> Shapes:
    """Returns flat columns for the first layer and the distillation layer, whose shapes are unknown."""
    return {_FIRST: (sizes.features,), _AT_LAYER: (_at_layer(sizes),)}


def _counted_channels(sizes: Sizes) -> Mapping[str, int]:
    known = {_FIRST: sizes.channels, _AT_LAYER: sizes.layer_channels}
    return {name: count for name, count in known.items() if count is not None}


def _reply_schema(config: FedD2SConfig, sizes: Sizes) -> Message:
    """Returns the schema of message 4: soft labels and head, or per sample a feature gradient or target."""
    k, below_last = sizes.samples, sizes.layer_features is not None
    layer = _FIRST if sizes.layer_features == 0 else _AT_LAYER
    column = {layer: _counted_columns(sizes)[layer]}
    features = SampleKnowledge.schema(rows=k, features=column, channels=_counted_channels(sizes))
    if config.distance == "mse":
        return {"features": replace(features, features={})} if layer == _AT_LAYER else NOTHING
    if config.s2c_mode == "feature_grad" and below_last:
        return {"features": replace(features, features={})}
    teacher: Message = {"teacher": RefinedKnowledge.schema(rows=k, classes=sizes.classes)}
    return {**teacher, "head": ModelParameters.schema(sizes.head)} if below_last else teacher


def _layered(model: nn.Module) -> SplitModel:
    if not isinstance(model, SplitModel):
        raise ConfigurationError(
            f"FedD2S cuts the model after every layer, but [model] device is a {type(model).__name__}; "
            "name a SplitModel of stages, such as fedd2s_m1"
        )
    return model


def _labels_term(trained: nn.Module, sent: Triplets) -> Term:
    """Returns Q of eq. (10), the cross-entropy with the labels."""
    return lambda rows: functional.cross_entropy(trained(sent.first[rows]), sent.labels[rows])


def _accuracy(scores_bc: Tensor, labels_b: Tensor) -> float:
    return float((scores_bc.argmax(1) == labels_b.cpu()).double().mean())


# --- The copies of FedD2S's global network, each trained on one device's triplets, and their mean.


@dataclass(frozen=True)
class Copy:
    """A copy of the global network, trained on one device's triplets.

    Attributes:
        device: Id of the device.
        rows: Number of the triplets.
        accuracy: Accuracy of p (the head applied to H_l), in [0, 1].
        parameters: The copy's weights.
    """

    device: str
    rows: int
    accuracy: float
    parameters: ModelParameters


@dataclass
class Copies:
    """The mean of the global network's copies, each trained on one device's triplets.

    Attributes:
        mean: Mean of the copies' weights.
        by_samples: Whether a copy's weight is its device's row count; otherwise all weights are 1.
        accuracies: Accuracy of p (the head applied to H_l), in [0, 1], of each device whose copy is in the mean.
    """

    mean: WeightedMean
    by_samples: bool
    accuracies: dict[str, float] = field(default_factory=dict)

    def add(self, copy: Copy | None) -> None:
        """Adds one copy; ignores None, which stands for a copy whose training failed."""
        if copy is not None:
            self.mean.add(copy.device, copy.parameters, copy.rows if self.by_samples else 1)
            self.accuracies[copy.device] = copy.accuracy
