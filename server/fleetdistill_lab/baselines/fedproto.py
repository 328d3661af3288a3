"""FedProto: devices with different models agree on the mean embedding of each class.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import EMBEDDING, Array, NamedTensors, Parts
from fleetdistill.methods.base import Ask, Local, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.training.local_training import extract
from fleetdistill.training.losses import feature_distance
from fleetdistill.training.model import check_embedding, embedding_tap, logits_and_embedding
from fleetdistill.wire.schema import TypedShape
from fleetdistill_lab.baselines.shared import (
    OwnModelDevice,
    class_sums,
    embeddings_of,
    received_tables,
    register,
)
from fleetdistill_server.methods.averaging import TensorMean
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["FedProtoConfig", "FedProtoDevice", "FedProtoServer"]

COLUMNS = ["features", "counts"]
"""What prototypes reveal: that of a class with one row is this row's embedding."""


@dataclass(frozen=True, kw_only=True)
class FedProtoConfig(FedAvgConfig):
    """Settings of FedProto in addition to those of FedAvg. With `weighting = "samples"` a device's weight is its count.

    Attributes:
        prototype_weight: The paper's lambda, at least 0. With 0 devices do not learn from each other.
    """

    prototype_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("prototype_weight", self.prototype_weight, 0)

    def reveals(self) -> str:
        """See `LocalTraining.reveals`."""
        return "the mean embedding of every class leaves; that of a class with one row is this row's embedding"


class FedProtoDevice(OwnModelDevice):
    """Device half of FedProto: draws embeddings to their classes' global prototypes, and sends its own prototypes.

    The embedding is the input of the last layer. A row whose class has no global prototype adds only its cross-entropy.

    Raises:
        ModelError: The app's model has no `embedding` method.
    """

    config: FedProtoConfig

    def __init__(self, config: FedProtoConfig, local: Local) -> None:
        check_embedding(local.model, "FedProto")
        super().__init__(config, local)

    def first_ask(self) -> Ask:
        classes = self.local.classes
        prototypes: Array = np.zeros((classes, *self._shape()), np.float32)
        tables = {"prototypes": prototypes, "devices": np.zeros(classes, np.int64)}
        return Ask(round=1, step="train", seed=0, parts={"prototypes": NamedTensors(tensors=tables)})

    def begin(self, ask: Ask) -> None:
        """Takes the global prototypes. Raises WireError unless they are finite `[C, F]`."""
        shapes = {"prototypes": (self.local.classes, *self._shape()), "devices": (self.local.classes,)}
        received = received_tables(ask.part("prototypes", NamedTensors), shapes)
        self._global = received["prototypes"].to(self.local.torch_device)
        self._known_c = received["devices"].to(self.local.torch_device) > 0

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        """Returns the cross-entropy + lambda * squared distance of embeddings to their classes' prototypes."""
        logits_bc, own = logits_and_embedding(self.local.model, inputs_b)
        distance = feature_distance(own, self._global[labels_b], valid_b=self._known_c[labels_b])
        return functional.cross_entropy(logits_bc, labels_b) + self.config.prototype_weight * distance

    def end(self, ask: Ask) -> Parts:
        """Returns the mean embedding of each class, in eval mode; 0 for a class that the device does not have."""
        rows = extract(
            lambda inputs: embeddings_of(self.local.model, inputs), self.local.data.inputs, model=self.local.model
        )
        sums, counts_c = class_sums(rows, self.local.data.labels.cpu(), self.local.classes)
        means = sums / counts_c.clamp_min(1).reshape(-1, *[1] * (rows.ndim - 1))
        tables = {"prototypes": means.float().numpy(), "counts": counts_c.numpy()}
        return {"prototypes": NamedTensors(tensors=tables, reveals=COLUMNS)}

    def _shape(self) -> tuple[int, ...]:
        """Returns the shape of one row's embedding."""
        first = self.local.data.first
        return tuple(extract(lambda x: embeddings_of(self.local.model, x), first, model=self.local.model).shape[1:])


class FedProtoServer(ServerMethod):
    """Server half of FedProto: averages prototypes class by class over the devices that have the class.

    `[model] device` says how large embeddings are; devices may run other models with embeddings of this size.

    Attributes:
        prototypes: `[C, F]` float32; 0 for a class that no device has had. Others stay until a device has the class.
        devices_c: Number of devices that each prototype is the mean of, `[C]` int64.
    """

    summary = "pulls embeddings to the mean embedding of their class"
    config: FedProtoConfig
    advice = {  # noqa: RUF012  (a ClassVar of the base)
        EMBEDDING: "give all devices models whose last layers have the same input size, such as cdkt_digits and "
        "cdkt_digits_small"
    }

    def __init__(self, config: FedProtoConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        model = context.device_model()
        if embedding_tap(model) is None:
            raise ConfigurationError(
                "[model] device has no embedding(x), the input of its last layer; name a model that has one"
            )
        probe = torch.zeros(1, *context.input_shape)
        self._shape = tuple(extract(lambda x: embeddings_of(model, x), probe, model=model).shape[1:])
        self.prototypes = torch.zeros(context.classes, *self._shape)
        self.devices_c = torch.zeros(context.classes, dtype=torch.int64)

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(server_has_device_model=True)

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange: C F numbers and C counts in each direction."""
        shape = tuple(sizes.cuts.get(EMBEDDING, (sizes.embedding,)))
        prototypes, numbers = (sizes.classes, *shape), TypedShape.of((sizes.classes,), np.int64)
        down = NamedTensors.schema({"prototypes": prototypes, "devices": numbers})
        up = NamedTensors.schema(
            {"prototypes": prototypes, "counts": numbers}, reveals=COLUMNS, features={EMBEDDING: shape}
        )
        return [Exchange(step="train", down={"prototypes": down}, up={"prototypes": up})]

    def sizes(self) -> Sizes:
        return Sizes(classes=self.context.classes, embedding=int(np.prod(self._shape)), cuts={EMBEDDING: self._shape})

    async def round(self, cohort: Cohort) -> None:
        means = [TensorMean(self.config.robust) for _ in range(self.context.classes)]
        devices_c = torch.zeros_like(self.devices_c)
        asked = cohort.sample(self.config.participation_ratio)
        async for answer in cohort.ask("train", self._message(), to=asked):
            sent = answer.part("prototypes", NamedTensors).tensors
            for label in np.flatnonzero(sent["counts"] > 0).tolist():
                weight = float(sent["counts"][label]) if self.config.weighting == "samples" else 1.0
                means[label].add(torch.from_numpy(np.array(sent["prototypes"][label])), weight * answer.decay)
                devices_c[label] += 1
        for label, mean in enumerate(means):
            if (prototype := mean.result()) is not None:
                self.prototypes[label], self.devices_c[label] = prototype.float(), devices_c[label]

    def _message(self) -> Parts:
        tables = {"prototypes": self.prototypes.numpy().copy(), "devices": self.devices_c.numpy().copy()}
        return {"prototypes": NamedTensors(tensors=tables)}

    def state_dict(self) -> dict[str, Any]:
        return {"prototypes": self.prototypes.clone(), "devices": self.devices_c.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prototypes, self.devices_c = state["prototypes"].clone(), state["devices"].clone()


register("fedproto", FedProtoConfig, FedProtoDevice, FedProtoServer)
