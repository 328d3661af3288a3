"""Server half of CDKT-FL: averages the devices' knowledge about the proxy set and trains the global model towards it.

Le et al., CDKT-FL: Cross-Device Knowledge Transfer using Proxy Dataset in Federated Learning, 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import EMBEDDING, Parts, ProxyKnowledge
from fleetdistill.methods.cdkt.config import CDKTConfig
from fleetdistill.methods.cdkt.transfer import Knowledge, with_labels
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import embedding_tap, logits_and_embedding
from fleetdistill.training.rollback import Rate, check_can_be_sent, reason_not_sent, train_or_roll_back
from fleetdistill_server.methods.averaging import TensorMean
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes, PayloadFor
from fleetdistill_server.methods.traffic import Exchange, Message, Sizes
from fleetdistill_server.training.evaluation import TEACHER_ACCURACY


class CollectedKnowledge:
    """Averages the devices' outcomes and embeddings on the proxy set, one answer at a time.

    Args:
        config: Provides distances, weights and `robust`.
        labels_p: Labels of the proxy set, `[P]`.

    Attributes:
        accuracies: Accuracy of each device on the proxy set, in [0, 1]; None for a device that sent no outcomes.
    """

    def __init__(self, config: CDKTConfig, labels_p: Tensor) -> None:
        self.accuracies: dict[str, float | None] = {}
        self._labels_p = labels_p
        self._by_samples = config.aggregation == "samples"
        self._outcomes_of = config.distance(config.server_metric).outcomes
        self._outcomes = TensorMean(config.robust, probabilities=config.outcome_space == "probs")
        self._embeddings = TensorMean(config.robust)

    def add(self, answer: DeviceAnswer) -> None:
        """Adds the outcomes L_n and embeddings H_n of message 2 that the device sent."""
        logits_pc, embeddings_pf = _received(answer)
        weight = answer.weight if self._by_samples else answer.decay
        if logits_pc is not None:
            self._outcomes.add(self._outcomes_of(logits_pc), weight)
        if embeddings_pf is not None:
            self._embeddings.add(embeddings_pf, weight)
        self.accuracies[answer.device] = None if logits_pc is None else _accuracy(logits_pc, self._labels_p)

    def means(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns mean outcomes `[P, C]` and mean embeddings `[P, F]`, float64; None if no device sent them."""
        return self._outcomes.result(), self._embeddings.result()


class CDKTServer(ServerMethod):
    """Stores the global model w_s and the devices that its knowledge is withheld from."""

    config: CDKTConfig
    summary = "both sides learn from outputs on a small labelled set"
    figures = {"teacher_accuracy": TEACHER_ACCURACY}  # noqa: RUF012  (a ClassVar of the base)
    advice = {  # noqa: RUF012  (a ClassVar of the base)
        EMBEDDING: "give the device a model whose last layer has this input size, such as cdkt_digits and "
        "cdkt_digits_small, or set knowledge = 'full' for the run, which accepts models of any size"
    }

    def __init__(self, config: CDKTConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.model = context.global_model().to(context.torch_device)
        self.held_back: set[str] = set()

    @classmethod
    def needs(cls, config: CDKTConfig) -> Needs:
        return Needs(proxy_set=True, server_reads_inputs=True)

    @classmethod
    def exchanges(cls, config: CDKTConfig, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange of cdkt.md in docs/reference/methods."""
        embedding = sizes.cuts.get(EMBEDDING, (sizes.embedding,))

        def knowledge(outcomes: bool, embeddings: bool) -> Message:
            columns = ("features",) * embeddings + ("logits",) * outcomes
            knowledge_schema = ProxyKnowledge.schema(
                samples=sizes.proxy_samples, classes=sizes.classes, embedding=embedding, columns=columns
            )
            return {"knowledge": knowledge_schema}

        return [Exchange(step="train", down=knowledge(*config.down), up=knowledge(*config.up))]

    def sizes(self) -> Sizes:
        """Returns the run's sizes, with F if embeddings are sent: all models must then have the same F."""
        proxy = len(self.context.proxy) if self.context.proxy is not None else 0
        known = Sizes(classes=self.context.classes, proxy_samples=proxy)
        if not (self.config.up[1] or self.config.down[1]):
            return known
        if embedding_tap(self.model) is None:
            raise ConfigurationError(
                "[model] server has no embedding(x), the input of its last layer; name a model that has one"
            )
        probe = torch.zeros(1, *self.context.input_shape)
        shape = tuple(self.context.trainer.extract(self._embeddings, probe, model=self.model).shape[1:])
        return replace(known, embedding=prod(shape), cuts={EMBEDDING: shape})

    async def round(self, cohort: Cohort) -> None:
        collected = CollectedKnowledge(self.config, self._proxy.labels)
        asked = cohort.sample(self.config.participation_ratio)
        async for answer in cohort.ask("train", self.message(cohort), to=asked):  # messages 1 and 2
            collected.add(answer)
        self._distil(self._collective(collected), cohort)  # eq. (7)
        self.hold_back_if_poor(collected.accuracies, cohort)  # guard

    def _distil(self, collective: Knowledge, cohort: Cohort) -> None:
        """Trains the global model by eq. (7); rolls it back if a weight is not finite."""
        transfer = partial(self.transfer, collective, cohort.generator("transfer"))
        failure = train_or_roll_back(transfer, self.model, rate=self._rate)
        if failure:
            cohort.event(
                "distillation-undone", f"the global model is rolled back to its state before the round: {failure}"
            )

    def message(self, cohort: Cohort) -> PayloadFor:
        """Returns message 1: the outputs of w_s on the proxy set, omitted in round 1 or if the guard fired."""
        nothing: Parts = {"knowledge": ProxyKnowledge(valid=False, proxy_digest=self.context.proxy_digest)}
        if not self.config.exchange or not cohort.completed:
            return nothing
        outputs = self.knowledge()
        reason = self._reason_not_sent(outputs)  # guard
        if reason:  # outputs of an untrained model may overflow the wire's type
            cohort.event("knowledge-left-out", f"the global model's outputs are withheld: {reason}")
            return nothing
        knowledge: Parts = {"knowledge": outputs}
        return lambda device: nothing if device in self.held_back else knowledge

    def _reason_not_sent(self, outputs: ProxyKnowledge) -> str | None:
        values = [torch.from_numpy(item) for item in (outputs.logits, outputs.embeddings) if item is not None]
        reasons = [reason_not_sent(value, self.context.knowledge_type) for value in values]
        return next(filter(None, reasons), None)

    def knowledge(self) -> ProxyKnowledge:
        """Returns K_s: outcomes L_s and embeddings H_s on the proxy set, in eval mode."""
        outcomes, embeddings = self.config.down
        inputs, apply = self._proxy.inputs, self.context.trainer.extract
        return ProxyKnowledge(
            valid=True,
            proxy_digest=self.context.proxy_digest,
            logits=apply(self.model, inputs).numpy() if outcomes else None,
            embeddings=apply(self._embeddings, inputs, model=self.model).numpy() if embeddings else None,
        )

    def _collective(self, collected: CollectedKnowledge) -> Knowledge:
        """Returns z̄ and h̄ of eq. (7), from the means over the devices that answered."""
        outcomes_pc, embeddings_pf = collected.means()
        if outcomes_pc is not None and self.config.label_average:
            outcomes_pc = with_labels(outcomes_pc, self._proxy.labels)
        return Knowledge(outcomes_pc, embeddings_pf).to(self.context.torch_device)

    def transfer(self, knowledge: Knowledge, generator: torch.Generator) -> None:
        """Minimises eq. (7), CE + beta * R_s over the proxy set.

        Raises:
            KnowledgeError: The trained model's outputs are not finite, or too large for the wire.
        """
        where, proxy, distance = self.context.torch_device, self._proxy, self.config.distance(self.config.server_metric)
        training = replace(self.config, learning_rate=self.config.server_learning_rate)
        inputs, labels = proxy.inputs.to(where), proxy.labels.to(where)

        def losses(epoch: int, rows_b: Tensor) -> Iterator[Tensor]:
            logits_bc, embeddings_bf = self._forward(inputs[rows_b], knowledge.embeddings_pf is not None)
            loss = functional.cross_entropy(logits_bc, labels[rows_b])
            if self.config.beta:
                loss = loss + self.config.beta * distance.regulariser(knowledge, rows_b, logits_bc, embeddings_bf)
            yield loss

        self.context.trainer.train_steps(
            self.model,
            len(proxy),
            epochs=self.config.server_epochs(len(proxy)),
            batch_size=self.config.batch_size,
            optimizer=make_local_optimizer(training, self.model.parameters()),
            losses=losses,
            generator=generator,
            separable=distance.is_mean,
        )
        outputs = self.knowledge()
        for values in (outputs.logits, outputs.embeddings):
            if values is not None:
                check_can_be_sent(torch.from_numpy(values), self.context.knowledge_type, self._rate)

    @property
    def _rate(self) -> Rate:
        return "server_learning_rate", self.config.server_learning_rate

    def _forward(self, x: Tensor, with_embedding: bool) -> tuple[Tensor, Tensor | None]:
        return logits_and_embedding(self.model, x) if with_embedding else (self.model(x), None)

    def _embeddings(self, x: Tensor) -> Tensor:
        return logits_and_embedding(self.model, x)[1]

    def hold_back_if_poor(self, own: Mapping[str, float | None], cohort: Cohort) -> None:
        """Guard: withholds knowledge that is no better than chance, except from devices with no higher accuracy.

        Args:
            own: Accuracy of each device on the proxy set; None for a device that sent no outcomes.
            cohort: Receives the server's accuracy, and an event for each device that knowledge is withheld from.
        """
        teacher = _accuracy(self.context.trainer.extract(self.model, self._proxy.inputs), self._proxy.labels)
        cohort.report("teacher_accuracy", dict.fromkeys(own, teacher))
        self.held_back -= own.keys()
        if not (self.config.teacher_guard and self.config.exchange) or teacher > 1 / self.context.classes:
            return
        for device, accuracy in own.items():
            if accuracy is None or teacher < accuracy:
                self.held_back.add(device)
                device_accuracy = "" if accuracy is None else f", {device} has {accuracy:.3f}"
                text = f"the global model has accuracy {teacher:.3f} on the proxy set{device_accuracy}"
                text = f"{text}; the device gets no knowledge from it"
                cohort.guard("teacher", text, device)

    @property
    def _proxy(self) -> TensorData:
        assert self.context.proxy is not None  # make_contract rejects a run without a proxy set
        return self.context.proxy

    def forget(self, device: str, notes: Notes) -> None:
        """Removes the device from `held_back`; the global model is unchanged."""
        self.held_back.discard(device)

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"model": self.model}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "held_back": sorted(self.held_back)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.held_back = set(state["held_back"])

    def global_model(self) -> torch.nn.Module:
        return self.model

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]]:
        return self.model, self.context.input_shape


def _received(answer: DeviceAnswer) -> tuple[Tensor | None, Tensor | None]:
    """Returns L_n and H_n of message 2 in float64; ingest has checked digest, shapes and values."""
    sent = answer.part("knowledge", ProxyKnowledge)
    columns = (sent.logits, sent.embeddings)
    logits, embeddings = (None if column is None else torch.from_numpy(column.astype(np.float64)) for column in columns)
    return logits, embeddings


def _accuracy(logits_pc: Tensor, labels_p: Tensor) -> float:
    return float((logits_pc.argmax(1) == labels_p).double().mean())
