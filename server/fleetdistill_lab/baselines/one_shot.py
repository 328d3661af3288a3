"""Methods in which each device sends a table of its classes once, and the server makes a linear classifier from them.

Tables describe the features of the run's extractor, whose weights travel with the first ask and nobody trains. A device
gets the classifier once for each fit; it is a variant next to the app's own network, which is unchanged.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import QuorumNotReached
from fleetdistill.knowledge import CUT, GENERAL, OWN, ModelParameters, NamedTensors, Parts, Weights
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers
from fleetdistill.methods.local import LocalTraining
from fleetdistill.training.local_training import extract
from fleetdistill.training.model import output_shape
from fleetdistill.training.parameters import model_parameters, take_weights, tensors_of
from fleetdistill_lab.baselines.shared import received_tables
from fleetdistill_server.methods.averaging import OFF, cap
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, Deliveries, Notes
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["OneShotConfig", "OneShotDevice", "OneShotServer", "Tables"]

COLUMNS = ["features", "counts"]
"""What tables reveal: those of a class with one row contain this row's features."""
Tables = dict[str, Tensor]
"""Tensors of one device by name; `counts`, `[C]` int64, are its classes' numbers of rows."""


@dataclass(frozen=True, kw_only=True)
class OneShotConfig(LocalTraining):
    """Settings of local training, which only the controls of a simulation use."""

    usual_rounds: ClassVar[int] = 1
    keeps_optimizer: ClassVar[bool] = True

    def reveals(self) -> str:
        """See `LocalTraining.reveals`."""
        return "statistics of every class's features leave; those of a class with one row are this row's features"


class LinearOnFeatures(nn.Module):
    """An extractor and a linear layer on its flattened features."""

    def __init__(self, extractor: nn.Module, weight_cf: Tensor, bias_c: Tensor) -> None:
        super().__init__()
        self.extractor = copy.deepcopy(extractor)
        self.weight, self.bias = nn.Parameter(weight_cf.clone()), nn.Parameter(bias_c.clone())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.extractor(x).flatten(1), self.weight, self.bias)


def extractor_part(extractor: nn.Module) -> ModelParameters:
    """Returns an extractor's weights as a part of a message."""
    return model_parameters(extractor, scope="extractor")


class OneShotDevice(DeviceMethod):
    """Device half: sends its table, and turns the server's classifier into a variant."""

    config: Any
    own_variant = OWN

    def __init__(self, config: Any, local: Local) -> None:
        super().__init__(config, local)
        self._extractor = copy.deepcopy(local.taps.extractor)
        self._head: Tables | None = None

    @classmethod
    def metrics_steps(cls, config: Any) -> Sequence[str]:
        return ("learn",)

    def first_ask(self) -> Ask:
        return Ask(round=1, step="summarise", seed=0, parts={"extractor": extractor_part(self._extractor)})

    @answers("summarise")
    def summarise(self, ask: Ask) -> Answer:
        """Sends the table of the device's rows."""
        take_weights(self._extractor, ask.part("extractor", ModelParameters))
        data = self.local.data
        rows_nf = extract(self._extractor, data.inputs).flatten(1)
        table = self.table(rows_nf, data.labels.cpu(), torch.Generator().manual_seed(ask.seed))
        tensors = {name: (one.float() if one.is_floating_point() else one).numpy() for name, one in table.items()}
        return Answer(parts={"table": NamedTensors(tensors=tensors, reveals=COLUMNS)}, samples=len(data))

    @abstractmethod
    def table(self, rows_nf: Tensor, labels_n: Tensor, generator: torch.Generator) -> Tables:
        """Returns the table of features `[N, F]` and labels `[N]`, with the names and shapes of the server's schema."""

    @answers("learn")
    def learn(self, ask: Ask) -> Answer:
        """Takes over the server's classifier."""
        features = prod(output_shape(self._extractor, self.local.data.first.shape[1:]))
        shapes = {"weight": (self.local.classes, features), "bias": (self.local.classes,)}
        self._head = received_tables(ask.part("head", NamedTensors), shapes)
        return Answer(parts={}, samples=len(self.local.data))

    def variants(self) -> Mapping[str, nn.Module]:
        if self._head is None:
            return {}
        model = LinearOnFeatures(self._extractor, self._head["weight"], self._head["bias"])
        return {GENERAL: model.to(self.local.torch_device).eval()}

    def state_dict(self) -> dict[str, Any]:
        return {"extractor": self._extractor.state_dict(), "head": None if self._head is None else dict(self._head)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._extractor.load_state_dict(state["extractor"])
        self._head = state["head"]


class OneShotServer(ServerMethod):
    """Server half: stores the devices' tables, and fits the classifier again if one is new or forgotten.

    Attributes:
        tables: Table and data version of each device that has sent one.
        head: `weight` `[C, F]` and `bias` `[C]`, float32; None without a classifier.
    """

    config: Any
    picks_devices = True

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self.extractor = context.extractor()
        self._feature_shape = output_shape(self.extractor, context.input_shape)
        self.tables: dict[str, tuple[Tables, str]] = {}
        self.head: Tables | None = None
        self._fits = 0
        self._deliveries = Deliveries()

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(same_extractor=True)

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the two exchanges: the extractor down and a table up, then C (F + 1) numbers down, once each."""
        classes, features = sizes.classes, sizes.features
        table = NamedTensors.schema(
            cls.shapes(config, classes, features), reveals=COLUMNS, features={CUT: tuple(sizes.at_cut[CUT])}
        )
        head = NamedTensors.schema({"weight": (classes, features), "bias": (classes,)})
        return [
            Exchange(
                step="summarise", down={"extractor": ModelParameters.schema(sizes.model)}, up={"table": table}, end=1
            ),
            Exchange(step="learn", down={"head": head}, end=1),
        ]

    @classmethod
    @abstractmethod
    def shapes(cls, config: Any, classes: int, features: int) -> Mapping[str, Sequence[int]]:
        """Returns the shapes of a table by name; that of `counts` has int64 numbers."""

    @abstractmethod
    def fit(self, tables: Sequence[Tables], factors: Sequence[float], notes: Notes) -> Tables | None:
        """Returns `weight` and `bias` of the classifier, or None if there is none.

        Args:
            tables: The devices' tables, at least one, in device-id order; counts are at least 0.
            factors: Factor of each device's rows, in (0, 1].
            notes: Receives events, and gives generators.
        """

    def sizes(self) -> Sizes:
        extractor = Weights.of(extractor_part(self.extractor))
        return Sizes.of_cuts({CUT: self._feature_shape}, classes=self.context.classes, model=extractor)

    def known_extractor(self, name: str, received: Parts) -> nn.Module:
        return self.extractor

    async def round(self, cohort: Cohort) -> None:
        self._deliveries.begin(cohort.round)
        asked = cohort.sample(self.config.participation_ratio)
        versions, known = cohort.data_versions, len(self.tables)
        lacking = [device for device in asked if self._lacks_table(device, versions.get(device, ""))]
        taken = False
        start, quorum = {"extractor": extractor_part(self.extractor)}, 0.0 if known else None
        async for answer in self._deliveries.ask(cohort, "summarise", start, to=lacking, quorum=quorum):
            table = tensors_of(answer.part("table", NamedTensors).tensors)
            self.tables[answer.device], taken = (table, versions.get(answer.device, "")), True
        if not self.tables:
            raise QuorumNotReached("summarise", 0, 1)
        if taken:
            self._fit(cohort)
        if self.head is None:
            return
        here = set(cohort.remaining)
        head = {"head": NamedTensors(tensors={name: one.numpy() for name, one in self.head.items()})}
        learning = self._deliveries.ask(
            cohort,
            "learn",
            head,
            to=[device for device in asked if device in here],
            unless_held=self._fits,
            quorum=0.0 if self._deliveries.any_acknowledged else None,
        )
        async for _ in learning:
            pass

    def update_present(self, present: Collection[str]) -> None:
        self._deliveries.update_present(present)

    def is_due(self, present: Mapping[str, str]) -> bool:
        """Returns whether a present device has no classifier, or the server no table of its data."""
        return any(
            self._lacks_table(device, version) or (self.head is not None and self._deliveries.lacks(device, self._fits))
            for device, version in present.items()
            if not self._deliveries.is_unresponsive(device)
        )

    def _lacks_table(self, device: str, version: str) -> bool:
        return device not in self.tables or self.tables[device][1] != version

    def _fit(self, notes: Notes) -> None:
        """Fits the classifier to all usable tables; each device's rows count as at most three times the median."""
        counts = {device: self.tables[device][0]["counts"] for device in sorted(self.tables)}
        usable = [device for device, counts_c in counts.items() if bool((counts_c >= 0).all()) and bool(counts_c.any())]
        for device in counts.keys() - set(usable):
            notes.event(
                "upload-left-out", f"the table of {device} is left out: its counts are not numbers of rows", device
            )
        self._fits, self.head = self._fits + 1, None
        if not usable:
            return
        rows = [float(counts[device].double().sum()) for device in usable]
        capped = rows if self.config.robust == OFF else cap(rows)
        factors = [most / own for most, own in zip(capped, rows, strict=True)]
        head = self.fit([self.tables[device][0] for device in usable], factors, notes)
        if head is None:
            return
        head = {name: one.float().cpu() for name, one in head.items()}
        if all(bool(one.isfinite().all()) for one in head.values()):
            self.head = head
        else:
            notes.event("knowledge-left-out", "the classifier is withheld: a weight is not a finite float32 number")

    def forget(self, device: str, notes: Notes) -> None:
        """Fits the classifier again without the device's table."""
        self._deliveries.forget(device)
        if self.tables.pop(device, None) is not None:
            self._fit(notes)

    def global_model(self) -> nn.Module | None:
        if self.head is None:
            return None
        return LinearOnFeatures(self.extractor, self.head["weight"], self.head["bias"])

    def export(self) -> tuple[nn.Module, tuple[int, ...]] | None:
        model = self.global_model()
        return None if model is None else (model, self.context.input_shape)

    def state_dict(self) -> dict[str, Any]:
        return {
            "tables": {device: [dict(table), version] for device, (table, version) in self.tables.items()},
            "head": None if self.head is None else dict(self.head),
            "fits": self._fits,
            **self._deliveries.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tables = {device: (dict(table), version) for device, (table, version) in state["tables"].items()}
        self.head = None if state["head"] is None else dict(state["head"])
        self._fits = state["fits"]
        self._deliveries.load_state_dict(state)
