"""FedDistill+ and FD: devices exchange the mean logits of each class, with and without their models.

FD: Jeong et al., Communication-Efficient On-Device Machine Learning, NeurIPS workshop 2018. FedDistill+, FD with
FedAvg: Zhu, Hong and Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.knowledge import NamedTensors, Parts
from fleetdistill.methods.base import Ask, DeviceMethod, Local, check_choice, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.losses import distillation_loss
from fleetdistill_lab.baselines.shared import (
    OwnModelDevice,
    counts_of,
    counts_schema,
    received_tables,
    register,
    sent_counts,
)
from fleetdistill_server.methods.averaging import TensorMean
from fleetdistill_server.methods.base import MethodContext, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["FDConfig", "FDDevice", "FDServer", "FedDistillConfig", "FedDistillDevice", "FedDistillServer"]

WINDOWS = ("all", "round")
_TINY = 1e-9
Table = tuple[Tensor, Tensor]
"""A device's mean logits by class `[C, C]`, and the weight of each row in the mean over devices `[C]`, float64."""


@dataclass(frozen=True, kw_only=True)
class FedDistillConfig(FedAvgConfig):
    """Settings of FedDistill+ in addition to those of FedAvg.

    Attributes:
        gamma: Weight of the distillation term, at least 0. With 0 it is FedAvg.
        window: Mini-batches whose logits are averaged: those of `all` rounds, as in the authors' code, or of the
            `round`.
        smoothing: Whether each class counts one mini-batch row of zeros more, and rows of devices without the class
            count in the mean, as in the authors' code. Otherwise the mean is over the devices that have the class, and
            a class that none has teaches nothing.
    """

    gamma: float = 1.0
    window: str = "all"
    smoothing: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("gamma", self.gamma, 0)
        check_choice("window", self.window, WINDOWS)


class ClassMeans(DeviceMethod):
    """Device half that averages its logits by class, and learns from the fleet's mean of the last round."""

    config: FedDistillConfig

    def __init__(self, config: FedDistillConfig, local: Local) -> None:
        super().__init__(config, local)
        self._sums_cc = torch.zeros(local.classes, local.classes, dtype=torch.float64)  # S_k
        self._seen_c = torch.zeros(local.classes, dtype=torch.float64)  # N_k, without smoothing

    def begin(self, ask: Ask) -> None:
        """Takes the fleet's class logits, if there are some yet. Raises WireError unless they are finite `[C, C]`."""
        classes, device = self.local.classes, self.local.torch_device
        self._teacher_cc: Tensor | None = None
        if "classes" in ask.parts:
            received = received_tables(ask.part("classes", NamedTensors), {"logits": (classes, classes)})
            teacher_cc = received["logits"].to(device)
            self._known_c = (teacher_cc != 0).any(dim=1) | self.config.smoothing
            self._teacher_cc = teacher_cc.softmax(dim=1)
        keep = self.config.window == "all"
        self._round_cc, self._round_c = self._sums_cc * keep, self._seen_c * keep

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        """Returns the cross-entropy + gamma KL(teacher of the label || own), and counts the logits."""
        logits_bc = self.local.model(inputs_b)
        self.count(logits_bc.detach(), labels_b)
        own = functional.cross_entropy(logits_bc, labels_b)
        if self._teacher_cc is None:
            return own
        known_b = self._known_c[labels_b]
        return own + self.config.gamma * distillation_loss(logits_bc, self._teacher_cc[labels_b], 1.0, valid_b=known_b)

    def count(self, logits_bc: Tensor, labels_b: Tensor) -> None:
        """Adds a mini-batch's logits to the sums of their classes."""
        one_hot_bc = functional.one_hot(labels_b.cpu(), self.local.classes).double()
        self._round_cc = self._round_cc + one_hot_bc.T @ logits_bc.cpu().double()
        self._round_c = self._round_c + one_hot_bc.sum(dim=0)

    def end(self, ask: Ask) -> Parts:
        """Returns the class logits S / N, and how many rows of each class the device has."""
        if self.config.window == "all":
            self._sums_cc, self._seen_c = self._round_cc, self._round_c
        rows_c = self._round_c + 1 if self.config.smoothing else self._round_c.clamp_min(1)
        logits_cc = (self._round_cc / rows_c[:, None]).float()
        return {"classes": _table_part(logits_cc, reveals=["logits"]), **sent_counts(self.local)}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums_cc, "seen": self._seen_c} if self.config.window == "all" else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._sums_cc, self._seen_c = state["sums"], state["seen"]


class FedDistillDevice(ClassMeans, FedAvgDevice):
    """Device half of FedDistill+: FedAvg's, with a teacher for each class."""

    config: FedDistillConfig


class FedDistillServer(FedAvgServer):
    """Server half of FedDistill+: averages models, and with equal weights the class logits.

    Attributes:
        logits_cc: The class logits that devices get in the next round, float32; None before the first.
    """

    summary = "FedAvg; devices share mean logits of each class"
    config: FedDistillConfig

    def __init__(self, config: FedDistillConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.logits_cc: Tensor | None = None

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange: 4 (W + C^2) bytes in each direction, and 4C of counts up."""
        (model,), (table,) = FedAvgServer.exchanges(config, sizes), FDServer.exchanges(config, sizes)
        return [Exchange(step="train", down={**model.down, **table.down}, up={**model.up, **table.up})]

    def message(self) -> Parts:
        return {**super().message(), **({} if self.logits_cc is None else {"classes": _table_part(self.logits_cc)})}

    def update(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> None:
        super().update(cohort, received)
        tables = [table_of(answer, self.config.smoothing) for answer in received]
        self.logits_cc = mean_table(tables, self.config.robust)[0].float()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "logits": self.logits_cc}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.logits_cc = state["logits"]


@dataclass(frozen=True, kw_only=True)
class FDConfig(FedDistillConfig):
    """Settings of FD, which are FedDistill+'s with other defaults; `weighting` has no effect."""

    window: str = "round"
    smoothing: bool = False


class FDDevice(ClassMeans, OwnModelDevice):
    """Device half of FD: its model, of any architecture, stays on the device."""

    config: FDConfig


class FDServer(ServerMethod):
    """Server half of FD: sends each device the mean of the others' class logits; it has no model."""

    summary = "devices of any model share mean logits of each class"
    config: FDConfig

    def __init__(self, config: FDConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self._tables: dict[str, Table] = {}

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange: 4 C^2 bytes in each direction, and 4C of counts up."""
        shape = {"logits": (sizes.classes, sizes.classes)}
        up = {"classes": NamedTensors.schema(shape, reveals=["logits"]), **counts_schema(sizes)}
        return [Exchange(step="train", down={"classes": NamedTensors.schema(shape)}, up=up)]

    async def round(self, cohort: Cohort) -> None:
        mean = mean_table(list(self._tables.values()), self.config.robust) if self._tables else None

        def message(device: str) -> Parts:
            if mean is None:
                return {}
            return {"classes": _table_part(mean_of_others(mean, self._tables.get(device)).float())}

        asked = cohort.sample(self.config.participation_ratio)
        received = [answer async for answer in cohort.ask("train", message, to=asked)]
        self._tables = {answer.device: table_of(answer, self.config.smoothing) for answer in received}

    def forget(self, device: str, notes: Notes) -> None:
        self._tables.pop(device, None)

    def state_dict(self) -> dict[str, Any]:
        return {"tables": {device: list(table) for device, table in self._tables.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tables = {device: (logits_cc, weights_c) for device, (logits_cc, weights_c) in state["tables"].items()}


def _table_part(logits_cc: Tensor, reveals: Sequence[str] = ()) -> NamedTensors:
    return NamedTensors(tensors={"logits": logits_cc.numpy()}, reveals=list(reveals))


def table_of(answer: DeviceAnswer, smoothing: bool) -> Table:
    """Returns a device's class logits, and the weight of each row: without smoothing 0 for classes it lacks."""
    logits_cc = torch.tensor(answer.part("classes", NamedTensors).tensors["logits"], dtype=torch.float64)
    return logits_cc, ((counts_of(answer) > 0) | smoothing) * answer.decay


def mean_table(tables: Sequence[Table], robust: str) -> Table:
    """Returns the devices' mean of each class's logits, and the sum of its weights; a row that none has is 0."""
    logits_cc = torch.zeros_like(tables[0][0])
    for label in range(len(logits_cc)):
        mean = TensorMean(robust)
        for one_cc, weights_c in tables:
            if weights_c[label] > 0:
                mean.add(one_cc[label], float(weights_c[label]))
        row_c = mean.result()
        if row_c is not None:
            logits_cc[label] = row_c
    return logits_cc, torch.stack([weights_c for _, weights_c in tables]).sum(dim=0)


def mean_of_others(mean: Table, own: Table | None) -> Tensor:
    """Returns the mean without a device's own rows, `[C, C]`; a row that no other device has is 0."""
    if own is None:
        return mean[0]
    left_c1 = (mean[1] - own[1])[:, None]
    others_cc = (mean[1][:, None] * mean[0] - own[1][:, None] * own[0]) / left_c1
    return torch.where(left_c1 > _TINY, others_cc, 0.0)


register("feddistill", FedDistillConfig, FedDistillDevice, FedDistillServer)
register("fd", FDConfig, FDDevice, FDServer)
