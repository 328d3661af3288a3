"""Device half of FedAvg, the baseline of every comparison.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.knowledge import ModelParameters
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, answers, with_parameters
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.training.parameters import model_parameters, take_weights

__all__ = ["FedAvgDevice"]


class FedAvgDevice(DeviceMethod):
    """Device half of FedAvg: trains the global model on its own data and sends it back."""

    config: FedAvgConfig
    shares_fleet_model = True

    @classmethod
    def metrics_steps(cls, config: FedAvgConfig) -> Sequence[str]:
        return ("train",)

    def first_ask(self) -> Ask:
        return Ask(round=1, step="train", seed=0, parts={"parameters": model_parameters(self.local.model)})

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Trains locally from the global model (Algorithm 1, `ClientUpdate(k, w)`)."""
        model, data = self.local.model, self.local.data.to(self.local.torch_device)
        start = ask.part("parameters", ModelParameters)

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            return [self.loss(data.draw(rows_b), data.labels[rows_b], start)]

        take_weights(model, start)  # w
        optimizer = make_local_optimizer(self.config, model.parameters())
        self.train_local(losses, optimizer, ask.seed)  # w <- w - eta * gradient, for each epoch and mini-batch
        sent = model_parameters(model)  # return w
        return Answer(parts={"parameters": sent}, samples=len(data))

    def loss(self, inputs_b: Tensor, labels_b: Tensor, start: ModelParameters) -> Tensor:
        """Returns the local model's loss on a mini-batch, a scalar: the mean cross-entropy.

        A method with another local loss overrides it.

        Args:
            inputs_b: Inputs `[batch, ...]` on the model's device.
            labels_b: Classes `[batch]`, int64, on the model's device.
            start: The global model from which the round's training started.
        """
        return functional.cross_entropy(self.local.model(inputs_b), labels_b)

    @answers("deliver")
    def deliver(self, ask: Ask) -> Answer:
        """Loads the final global model into the device's model."""
        take_weights(self.local.model, ask.part("parameters", ModelParameters))
        return Answer(parts={}, samples=len(self.local.data))

    def fleet_model(self, ask: Ask) -> torch.nn.Module:
        """Returns the global model, which every ask contains."""
        return with_parameters(self.local.model, ask)
