"""FedGEN: FedAvg with a generator of features, which the server trains on the devices' last layers.

Zhu, Hong and Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import WireError
from fleetdistill.knowledge import Generator, Parts, Plan, Weights
from fleetdistill.methods.base import Ask, Local, check_range, check_share
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.models.discriminators import logits_of_features, shared_features
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import extract
from fleetdistill.training.losses import distillation_loss, soft_targets
from fleetdistill.training.model import frozen_batch_norm
from fleetdistill.training.parameters import model_parameters, take_weights
from fleetdistill.training.rollback import train_or_roll_back
from fleetdistill_lab.baselines.shared import counts_of, counts_schema, register, sent_counts, teachers_of
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["FedGENConfig", "FedGENDevice", "FedGENServer", "class_shares", "diversity"]

_SMALLEST = 1e-4
"""What the weights of the generated terms do not fall below."""
_MAX_SIZE = 4096
"""Largest number of a setting that determines the size of tensors on a device."""


@dataclass(frozen=True, kw_only=True)
class FedGENConfig(FedAvgConfig):
    """Settings of FedGEN in addition to those of FedAvg. The authors have others for each data set.

    Local training is plain SGD by default, without momentum.

    Attributes:
        alpha: Weight, in the first round, of the cross-entropy of generated features, at least 0.
        beta: Weight, in the first round, of the KL from the prediction for generated features of a row's label, at
            least 0.
        generated_decay: Factor of both, and of the generator's learning rate, from round to round, in (0, 1].
        generated_steps: Number of mini-batches of a device's round that have these terms, at least 0.
        generated_batch: Generated features in a mini-batch, on devices and server, 2 to 4,096.
        generator_steps: Steps of the generator in a round, at least 1.
        generator_rate: Learning rate of the generator's Adam, above 0; the optimiser is kept.
        generator_weight_decay: Its weight decay, at least 0.
        diversity: Weight of the generator's diversity term, at least 0.
        noise_dim: Numbers of a noise vector, 1 to 4,096.
        hidden: Width of the generator's hidden layer, 1 to 4,096.
    """

    momentum: float = 0.0
    nesterov: bool = False
    alpha: float = 10.0
    beta: float = 10.0
    generated_decay: float = 0.98
    generated_steps: int = 20
    generated_batch: int = 32
    generator_steps: int = 50
    generator_rate: float = 3e-4
    generator_weight_decay: float = 1e-2
    diversity: float = 1.0
    noise_dim: int = 32
    hidden: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("generated_decay", self.generated_decay)
        for name in ("alpha", "beta", "generated_steps", "generator_weight_decay", "diversity"):
            check_range(name, getattr(self, name), 0)
        check_range("generator_steps", self.generator_steps, 1)
        check_range("generator_rate", self.generator_rate, 0, open_low=True)
        for name, least in (("generated_batch", 2), ("noise_dim", 1), ("hidden", 1)):
            check_range(name, getattr(self, name), least, _MAX_SIZE + 1)

    def falling(self, weight: float, number: int) -> float:
        """Returns the weight of a generated term in a round, counted from 1."""
        return max(weight * self.generated_decay ** (number - 1), min(weight, _SMALLEST))


def make_generator(config: FedGENConfig, model: nn.Module, one_input: Tensor, classes: int) -> nn.Sequential:
    """Returns a new generator of a model's inputs of the last layer, from a one-hot label and noise."""
    shape = tuple(extract(lambda x: shared_features(model, x), one_input, model=model).shape[1:])
    return nn.Sequential(
        nn.Linear(classes + config.noise_dim, config.hidden),
        nn.BatchNorm1d(config.hidden),
        nn.ReLU(),
        nn.Linear(config.hidden, prod(shape)),
        nn.Unflatten(1, shape),
    )


def generate(generator: nn.Module, labels_b: Tensor, noise_bd: Tensor, classes: int) -> Tensor:
    """Returns features `[b, ...]` of labels `[b]` and noise `[b, d]`, uniform in [0, 1)."""
    one_hot_bc = functional.one_hot(labels_b, classes).to(noise_bd.dtype)
    return generator(torch.cat([one_hot_bc, noise_bd], dim=1))  # type: ignore[no-any-return]  # a module's call


class FedGENDevice(FedAvgDevice):
    """Device half of FedGEN: trains its last layer on generated features, and its model towards their predictions."""

    config: FedGENConfig

    def __init__(self, config: FedGENConfig, local: Local) -> None:
        super().__init__(config, local)
        generator = make_generator(config, local.model, local.data.first, local.classes)
        self.generator = generator.to(local.torch_device).eval().requires_grad_(False)

    def begin(self, ask: Ask) -> None:
        """Takes the generator and the labels that devices have, once the server has trained it."""
        self._steps_left = 0
        if "generator" not in ask.parts:
            return
        take_weights(self.generator, ask.part("generator", Generator).parameters)
        labels = ask.part("plan", Plan).values.get("labels")
        if not isinstance(labels, list) or not labels or not all(0 <= one < self.local.classes for one in labels):
            raise WireError(f"the plan's labels are {labels!r}, expected a list of classes below {self.local.classes}")
        self._labels = torch.tensor(labels)
        self._alpha, self._beta = (self.config.falling(one, ask.round) for one in (self.config.alpha, self.config.beta))
        self._random = torch.Generator().manual_seed(derive_seed(ask.seed, "generator"))
        self._steps_left = self.config.generated_steps

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        logits_bc = self.local.model(inputs_b)
        own = functional.cross_entropy(logits_bc, labels_b)
        if self._steps_left == 0:
            return own
        self._steps_left -= 1
        drawn = torch.randint(len(self._labels), (self.config.generated_batch,), generator=self._random)
        drawn_g = self._labels[drawn].to(labels_b.device)
        of_labels = functional.cross_entropy(self._predict(drawn_g), drawn_g)
        teacher_bc = soft_targets(self._predict(labels_b), 1.0)
        share = self.config.generated_batch / self.config.batch_size
        towards = distillation_loss(logits_bc, teacher_bc, 1.0)
        return own + share * self._alpha * of_labels + self._beta * towards

    def _predict(self, labels_b: Tensor) -> Tensor:
        """Returns the model's logits `[b, classes]` of generated features, which leave its statistics alone."""
        noise_bd = torch.rand(len(labels_b), self.config.noise_dim, generator=self._random).to(labels_b.device)
        with frozen_batch_norm(self.local.model):
            features = generate(self.generator, labels_b, noise_bd, self.local.classes)
            return logits_of_features(self.local.model, features)

    def end(self, ask: Ask) -> Parts:
        return sent_counts(self.local)


class FedGENServer(FedAvgServer):
    """Server half of FedGEN: trains the generator on the received models' last layers, and averages the models."""

    summary = "FedAvg; a generator of features from devices' last layers"
    config: FedGENConfig

    def __init__(self, config: FedGENConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        zeros = torch.zeros(1, *context.input_shape)
        self.generator = context.generator(lambda: make_generator(config, self.model, zeros, context.classes))
        self.generator.to(context.torch_device)
        self._optimizer = torch.optim.Adam(
            self.generator.parameters(), lr=config.generator_rate, weight_decay=config.generator_weight_decay
        )
        self._counts: dict[str, list[int]] = {}

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange: 4 (W + G) bytes down for a generator of G parameters, 4 (W + C) up."""
        (model,) = FedAvgServer.exchanges(config, sizes)
        down = {**model.down, "generator": Generator.schema(sizes.generator)}
        return [Exchange(step="train", down=down, up={**model.up, **counts_schema(sizes)})]

    def sizes(self) -> Sizes:
        return replace(super().sizes(), generator=Weights.of(model_parameters(self.generator)))

    def message(self) -> Parts:
        held = {label for counts in self._counts.values() for label, count in enumerate(counts) if count}
        if not held:
            return super().message()
        generator = Generator(parameters=model_parameters(self.generator), noise_size=self.config.noise_dim)
        return {**super().message(), "generator": generator, "plan": Plan(values={"labels": sorted(held)})}

    def update(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> None:
        counts_kc = torch.stack([counts_of(answer) for answer in received])
        self._counts |= {one.device: own_c.int().tolist() for one, own_c in zip(received, counts_kc, strict=True)}
        if counts_kc.any():
            self._optimizer.param_groups[0]["lr"] = self.config.generator_rate * (
                self.config.generated_decay**cohort.completed
            )
            train = partial(self._train, teachers_of(self.model, received), counts_kc, cohort)
            rate = ("generator_rate", self.config.generator_rate)
            failure = train_or_roll_back(train, self.generator, self._optimizer, rate=rate)
            if failure:
                cohort.event("generator-undone", f"the generator is that of the last round: {failure}")
        super().update(cohort, received)

    def _train(self, teachers: Sequence[nn.Module], counts_kc: Tensor, cohort: Cohort) -> None:
        """Minimises sum_k mean_b a[k, y] CE(head_k(z), y) + the diversity term, for labels of the round's devices."""
        place, config = self.context.torch_device, self.config
        random, rows = cohort.generator("generator"), config.generator_steps * config.generated_batch
        held = counts_kc.sum(dim=0).nonzero().squeeze(1)
        labels_r = held[torch.randint(len(held), (rows,), generator=random)].to(place)
        noise_rd = torch.rand(rows, config.noise_dim, generator=random).to(place)
        shares_kc = class_shares(counts_kc + 1).float().to(place)

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            labels_b, noise_bd = labels_r[rows_b], noise_rd[rows_b]
            features = generate(self.generator, labels_b, noise_bd, self.context.classes)
            of_labels_kb = torch.stack(
                [
                    functional.cross_entropy(logits_of_features(one, features), labels_b, reduction="none")
                    for one in teachers
                ]
            )
            weighted = (shares_kc[:, labels_b] * of_labels_kb).mean(dim=1).sum()
            return [weighted + config.diversity * diversity(noise_bd, features)]

        self.context.trainer.train_steps(
            self.generator,
            rows,
            epochs=1,
            batch_size=config.generated_batch,
            optimizer=self._optimizer,
            losses=losses,
            generator=cohort.generator("order"),
            separable=False,
        )

    def forget(self, device: str, notes: Notes) -> None:
        self._counts.pop(device, None)

    def networks(self) -> Mapping[str, nn.Module]:
        return {**super().networks(), "latent_generator": self.generator}

    def state_dict(self) -> dict[str, Any]:
        own = {"generator": self.generator.state_dict(), "optimizer": self._optimizer.state_dict()}
        return {**super().state_dict(), **own, "counts": self._counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.generator.load_state_dict(state["generator"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._counts = {device: list(counts) for device, counts in state["counts"].items()}


def class_shares(counts_kc: Tensor) -> Tensor:
    """Returns each device's share of the rows of a class, `[devices, classes]`; 0 in a class without rows."""
    return counts_kc / counts_kc.sum(dim=0).clamp_min(1e-6)


def diversity(noise_bd: Tensor, generated: Tensor) -> Tensor:
    """Returns exp(-mean over pairs of the noise's mean squared times the samples' mean absolute distance), in (0, 1].

    Args:
        noise_bd: Noise `[batch, d]`.
        generated: What a generator made of it, `[batch, ...]`. If all samples are the same, the result is 1.
    """
    flat_bf = generated.flatten(1)
    of_noise_bb = (noise_bd[:, None] - noise_bd[None]).square().mean(dim=2)
    of_samples_bb = (flat_bf[:, None] - flat_bf[None]).abs().mean(dim=2)
    return (-(of_noise_bb * of_samples_bb).mean()).exp()


register("fedgen", FedGENConfig, FedGENDevice, FedGENServer)
