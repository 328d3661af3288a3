"""FedFTG: FedAvg whose global model is then distilled from the devices' models on inputs that a generator makes.

Zhang et al., Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning, CVPR 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.knowledge import Parts
from fleetdistill.methods.base import Ask, check_choice, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.models import GENERATORS, build_generator
from fleetdistill.training.losses import soft_cross_entropy
from fleetdistill.training.rollback import train_or_roll_back
from fleetdistill_lab.baselines.fedgen import class_shares, diversity
from fleetdistill_lab.baselines.shared import counts_of, counts_schema, frozen_copy, register, sent_counts, teachers_of
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["FedFTGConfig", "FedFTGDevice", "FedFTGServer", "hard_loss", "labels_by_share", "mixed_teacher"]


@dataclass(frozen=True, kw_only=True)
class FedFTGConfig(FedAvgConfig):
    """Settings of FedFTG in addition to those of FedAvg. `learning_rate_round_decay` holds for the server's rates too.

    Attributes:
        send_counts: Whether devices send how many rows of each class they have. Otherwise all classes are drawn equally
            often, and all devices teach every class alike.
        iterations: The paper's I, at least 0: in each the generator takes a step for each device, then the model some.
            With 0 it is FedAvg.
        model_steps: Steps of the model in an iteration, at least 1.
        model_rate: Learning rate of the model's SGD, above 0.
        generator: A key of `fleetdistill.models.GENERATORS`.
        generator_rate: Learning rate of the generator's Adam, above 0.
        generated_batch: Generated inputs of an iteration, at least 2.
        noise_dim: Numbers of a noise vector, at least 1.
        label_weight: The paper's lambda_cls, weight of the devices' cross-entropy on generated inputs, at least 0.
        diversity: The paper's lambda_dis, weight of the diversity term, at least 0.
    """

    send_counts: bool = True
    iterations: int = 10
    model_steps: int = 5
    model_rate: float = 0.1
    generator: str = "embedding_generator"
    generator_rate: float = 0.01
    generated_batch: int = 64
    noise_dim: int = 100
    label_weight: float = 1.0
    diversity: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("generator", self.generator, tuple(GENERATORS))
        least = {"iterations": 0, "model_steps": 1, "generated_batch": 2, "noise_dim": 1}
        for name, low in {**least, "label_weight": 0, "diversity": 0}.items():
            check_range(name, getattr(self, name), low)
        for name in ("model_rate", "generator_rate"):
            check_range(name, getattr(self, name), 0, open_low=True)


class FedFTGDevice(FedAvgDevice):
    """Device half of FedFTG: FedAvg's, with the counts of its classes."""

    config: FedFTGConfig

    def end(self, ask: Ask) -> Parts:
        return sent_counts(self.local) if self.config.send_counts else {}


class Batch(NamedTuple):
    """Generated rows of an iteration: labels `[b]`, noise `[b, d]`, and each device's share of a label `[K, b]`."""

    labels_b: Tensor
    noise_bd: Tensor
    shares_kb: Tensor


class FedFTGServer(FedAvgServer):
    """Server half of FedFTG: averages models, then trains generator and model against each other.

    The generator never leaves the server; both optimisers are new in each round.
    """

    summary = "FedAvg; the server distils models on generated inputs"
    config: FedFTGConfig

    def __init__(self, config: FedFTGConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        options = {"shape": context.input_shape, "noise_dim": config.noise_dim, "classes": context.classes}
        self.generator = context.generator(lambda: build_generator(config.generator, **options))
        self.generator.to(context.torch_device)

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange: 4W bytes down, 4 (W + C) up."""
        (model,) = FedAvgServer.exchanges(config, sizes)
        counts = counts_schema(sizes) if config.send_counts else {}
        return [Exchange(step="train", down=model.down, up={**model.up, **counts})]

    def update(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> None:
        teachers = teachers_of(self.model, received)
        super().update(cohort, received)
        counts_kc = torch.ones(len(received), self.context.classes)
        if self.config.send_counts:
            counts_kc = torch.stack([counts_of(answer) for answer in received])
        if not self.config.iterations or not counts_kc.any():
            return
        train = partial(self._refine, teachers, counts_kc, cohort)
        failure = train_or_roll_back(train, self.model, self.generator, rate=("model_rate", self.config.model_rate))
        if failure:
            text = f"the global model is rolled back to the mean of the devices' models: {failure}"
            cohort.event("distillation-undone", text)

    def _refine(self, teachers: Sequence[nn.Module], counts_kc: Tensor, cohort: Cohort) -> None:
        config, place = self.config, self.context.torch_device
        shares_kc = class_shares(counts_kc).float().to(place)
        fall = config.learning_rate_round_decay**cohort.completed
        of_model = torch.optim.SGD(self.model.parameters(), lr=config.model_rate * fall)
        of_generator = torch.optim.Adam(self.generator.parameters(), lr=config.generator_rate * fall)
        random = cohort.generator("generated rows")
        for number in range(config.iterations):  # each training has a seed of its own, which tells resume points apart
            labels_b = labels_by_share(counts_kc.sum(dim=0), config.generated_batch, random).to(place)
            noise_bd = torch.randn(config.generated_batch, config.noise_dim, generator=random).to(place)
            batch = Batch(labels_b, noise_bd, shares_kc[:, labels_b])
            self._train_generator(batch, teachers, of_generator, cohort.generator(f"generator {number}"))
            self._train_model(batch, teachers, of_model, cohort.generator(f"model {number}"))

    def _train_generator(
        self, batch: Batch, teachers: Sequence[nn.Module], optimizer: torch.optim.Optimizer, order: torch.Generator
    ) -> None:
        """Takes a step for each device towards inputs on which the model differs from it."""
        model = frozen_copy(self.model)

        def losses(epoch: int, rows_b: Tensor) -> Iterator[Tensor]:
            labels_b, noise_bd, shares_kb = batch.labels_b[rows_b], batch.noise_bd[rows_b], batch.shares_kb[:, rows_b]
            for teacher, shares_b in zip(teachers, shares_kb, strict=True):
                inputs = self.generator(noise_bd, labels_b)
                hard = hard_loss(model(inputs), teacher(inputs), labels_b, shares_b, self.config.label_weight)
                yield hard + self.config.diversity * diversity(noise_bd, inputs) / len(teachers)

        rows = len(batch.labels_b)
        self.context.trainer.train_steps(
            self.generator,
            rows,
            epochs=1,
            batch_size=rows,
            optimizer=optimizer,
            losses=losses,
            generator=order,
            separable=False,
        )

    def _train_model(
        self, batch: Batch, teachers: Sequence[nn.Module], optimizer: torch.optim.Optimizer, order: torch.Generator
    ) -> None:
        """Distils the devices' models, each weighted by its share of a row's label."""
        apply, place, rows = self.context.trainer.extract, self.context.torch_device, len(batch.labels_b)
        generate = lambda rows_b: self.generator(batch.noise_bd[rows_b], batch.labels_b[rows_b])  # noqa: E731
        inputs = apply(generate, torch.arange(rows), model=self.generator).to(place)
        logits_kbc = torch.stack([apply(teacher, inputs) for teacher in teachers]).to(place)
        teacher_bc = mixed_teacher(logits_kbc, batch.shares_kb)

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:  # the authors' mean is over elements, not over rows
            return [soft_cross_entropy(self.model(inputs[rows_b]), teacher_bc[rows_b], 1.0) / self.context.classes]

        self.context.trainer.train_steps(
            self.model,
            rows,
            epochs=self.config.model_steps,
            batch_size=rows,
            optimizer=optimizer,
            losses=losses,
            generator=order,
        )

    def networks(self) -> Mapping[str, nn.Module]:
        return {**super().networks(), "image_generator": self.generator}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generator": self.generator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.generator.load_state_dict(state["generator"])


def labels_by_share(counts_c: Tensor, rows: int, random: torch.Generator) -> Tensor:
    """Returns labels `[rows]` in random order, whose shares are those of counts `[C]` rounded at cumulative cuts."""
    ends_c = (counts_c.double().cumsum(dim=0) * rows / counts_c.double().sum() + 1e-9).long()
    labels_r = torch.arange(len(counts_c)).repeat_interleave(ends_c.diff(prepend=ends_c.new_zeros(1)))
    return labels_r[torch.randperm(rows, generator=random)]


def hard_loss(model_bc: Tensor, teacher_bc: Tensor, labels_b: Tensor, shares_b: Tensor, label_weight: float) -> Tensor:
    """Returns the mean over rows of share * (label_weight * CE(teacher, label) - mean_c |model - teacher|).

    Args:
        model_bc: The global model's logits of generated inputs, `[batch, classes]`.
        teacher_bc: A device's; a constant in the second term.
        labels_b: The labels that the inputs were generated for, `[batch]`.
        shares_b: The device's shares of the labels' rows, `[batch]`.
        label_weight: The paper's lambda_cls.
    """
    of_labels_b = functional.cross_entropy(teacher_bc, labels_b, reduction="none")
    apart_b = (model_bc - teacher_bc.detach()).abs().mean(dim=1)
    return (shares_b * (label_weight * of_labels_b - apart_b)).mean()


def mixed_teacher(logits_kbc: Tensor, shares_kb: Tensor) -> Tensor:
    """Returns the devices' probabilities `[batch, classes]`, weighted by their shares of each row's label."""
    return (shares_kb[:, :, None] * logits_kbc.softmax(dim=2)).sum(dim=0)


register("fedftg", FedFTGConfig, FedFTGDevice, FedFTGServer)
