"""Device half of FedAvg, the baseline of every comparison.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.knowledge import ModelParameters, Parts
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, answers, with_parameters
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.training.parameters import model_parameters, take_weights

__all__ = ["FedAvgDevice"]


class FedAvgDevice(DeviceMethod):
    """Device half of FedAvg: trains the global model on its own data and sends it back.

    A method that differs in its local loss, in what a device remembers, or in the tensors that it keeps to itself
    overrides `loss`, `begin` and `end`, or `own_tensors`.
    """

    config: FedAvgConfig
    shares_fleet_model = True

    @classmethod
    def metrics_steps(cls, config: FedAvgConfig) -> Sequence[str]:
        return ("train",)

    def own_tensors(self) -> frozenset[str]:
        """Returns the state-dict names of the tensors that stay on the device; by default none.

        The server half must return the same names.
        """
        return frozenset()

    def first_ask(self) -> Ask:
        return Ask(round=1, step="train", seed=0, parts={"parameters": self._shared()})

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Trains locally from the global model (Algorithm 1, `ClientUpdate(k, w)`)."""
        take_weights(self.local.model, ask.part("parameters", ModelParameters), without=self.own_tensors())  # w
        self.begin(ask)
        self.fit(ask)  # w <- w - eta * gradient, for each epoch and mini-batch
        return Answer(parts={"parameters": self._shared(), **self.end(ask)}, samples=len(self.local.data))  # return w

    def begin(self, ask: Ask) -> None:
        """Prepares a round's training, after the global model has been loaded; by default does nothing."""

    def fit(self, ask: Ask) -> None:
        """Trains the local model on `loss` with the settings of local training."""
        model, data = self.local.model, self.local.data.to(self.local.torch_device)
        rate = self.config.local_rate(ask.round)
        optimizer = make_local_optimizer(replace(self.config, learning_rate=rate), model.parameters())
        self.train_local(lambda epoch, rows_b: [self.loss(data.draw(rows_b), data.labels[rows_b])], optimizer, ask.seed)

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
        take_weights(self.local.model, ask.part("parameters", ModelParameters), without=self.own_tensors())
        return Answer(parts={}, samples=len(self.local.data))

    def fleet_model(self, ask: Ask) -> torch.nn.Module:
        """Returns the global model, which every ask contains; with the device's own tensors, if it has some."""
        return with_parameters(self.local.model, ask, without=self.own_tensors())

    def _shared(self) -> ModelParameters:
        return model_parameters(self.local.model, without=self.own_tensors())
