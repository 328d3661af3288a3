"""Device half of FedAvg, the baseline of every comparison.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017, algorithm 1.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.knowledge import ModelParameters, Parts
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, answers
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.training.model import check_local_model, frozen
from fleetdistill.training.parameters import model_parameters, take_weights

__all__ = ["FedAvgDevice"]


class FedAvgDevice(DeviceMethod):
    """Device half of FedAvg: trains the global model on its own data and sends it back.

    A method that differs in its local loss, in what a device remembers, or in the tensors that it keeps to itself
    overrides `loss`, `begin` and `end`, or `scope` and `own_tensors`.
    """

    config: FedAvgConfig
    shares_fleet_model = True

    scope: ClassVar[str] = "model"
    """What devices share: the whole `model`, or its `extractor`, the layers below the cut."""

    @classmethod
    def metrics_steps(cls, config: FedAvgConfig) -> Sequence[str]:
        return ("train",)

    def own_tensors(self) -> frozenset[str]:
        """Returns the names of the tensors that stay on the device; by default none.

        They are state-dict names of `shared_part`. The server half must return the same names.
        """
        return frozenset()

    def shared_part(self, model: nn.Module) -> nn.Module:
        """Returns the part of a model of this device that devices share; see `scope`."""
        return check_local_model(model).extractor if self.scope == "extractor" else model

    def load(self, model: nn.Module, ask: Ask) -> None:
        """Loads an ask's tensors into the local model or a copy of it. Raises WireError if they do not fit it."""
        sent = ask.part("parameters", ModelParameters)
        take_weights(self.shared_part(model), sent, without=self.own_tensors())

    def first_ask(self) -> Ask:
        return Ask(round=1, step="train", seed=0, parts={"parameters": self._shared()})

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Trains locally from the global model (Algorithm 1, `ClientUpdate(k, w)`)."""
        self.load(self.local.model, ask)  # w
        self.begin(ask)
        self.fit(ask)  # w <- w - eta * gradient, for each epoch and mini-batch
        return Answer(parts={"parameters": self._shared(), **self.end(ask)}, samples=len(self.local.data))  # return w

    def begin(self, ask: Ask) -> None:
        """Prepares a round's training, after the global model has been loaded; by default does nothing."""

    def fit(self, ask: Ask) -> None:
        """Trains the local model; by default all of it at once."""
        self.train_part(ask)

    def train_part(self, ask: Ask, *, without: Collection[nn.Module] = (), epochs: int | None = None) -> None:
        """Trains the local model on `loss` with the settings of local training and a new optimiser.

        Args:
            ask: The ask, whose round and seed it uses.
            without: Modules of the local model whose own tensors, batch-norm statistics included, do not change.
            epochs: Passes over the rows; by default the configuration's `local_epochs`.
        """
        data, rate = self.local.data.to(self.local.torch_device), self.config.local_rate(ask.round)
        fixed = {id(w) for part in without for w in part.parameters(recurse=False)}
        trained = [w for w in self.local.model.parameters() if id(w) not in fixed]
        optimizer = make_local_optimizer(replace(self.config, learning_rate=rate), trained)

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            with frozen(without):
                return [self.loss(data.draw(rows_b), data.labels[rows_b])]

        alike = type(self).loss is FedAvgDevice.loss and not without  # another loss may depend on the device
        self.train_local(losses, optimizer, ask.seed, epochs=epochs, loss=self.loss if alike else None)

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        """Returns the local model's loss on a mini-batch, a scalar: the mean cross-entropy.

        Args:
            inputs_b: Inputs `[batch, ...]` on the model's device.
            labels_b: Classes `[batch]`, int64, on the model's device.
        """
        return functional.cross_entropy(self.local.model(inputs_b), labels_b)

    def end(self, ask: Ask) -> Parts:
        """Ends a round's training; returns further parts of the answer, by default none.

        What it changes in `state_dict` is kept once the server has the answer, like the model itself.
        """
        return {}

    @answers("deliver")
    def deliver(self, ask: Ask) -> Answer:
        """Loads the final global model into the device's model."""
        self.load(self.local.model, ask)
        return Answer(parts={}, samples=len(self.local.data))

    def fleet_model(self, ask: Ask) -> nn.Module | None:
        """Returns the global model, which every ask contains; with the device's own tensors, if it has some."""
        complete = copy.deepcopy(self.local.model)
        self.load(complete, ask)
        return complete

    def _shared(self) -> ModelParameters:
        return model_parameters(self.shared_part(self.local.model), self.scope, without=self.own_tensors())
