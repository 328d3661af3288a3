"""CDKT-FL, server half: averages what the devices say about the proxy set and trains the global model towards it.

Le et al., CDKT-FL: Cross-Device Knowledge Transfer using Proxy Dataset in Federated Learning, 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from fleetdistill.training.local_training import TensorData, extract, train_steps
from fleetdistill.training.model import embedding_tap, logits_and_embedding
from fleetdistill.training.rollback import Rate, check_can_be_sent, reason_not_sent, reason_undone
from fleetdistill_server.methods.averaging import TensorMean
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.traffic import Content, Exchange, Sizes


class CDKTServer(ServerMethod):
    """Keeps the global model w_s, and which devices its knowledge is held back from."""

    config: CDKTConfig
    summary = "both sides learn from what models say about a small labelled set"
    proxy_set = True
    server_reads_inputs = True
    steps = {"train": {"knowledge": "proxy_knowledge"}}  # noqa: RUF012  (a ClassVar of the base)
    advice = {  # noqa: RUF012  (as above)
        EMBEDDING: "give the device a model whose last layer reads so many numbers, such as cdkt_digits and "
        "cdkt_digits_small, or use knowledge = 'full' for the run, which takes models of any size"
    }

    def __init__(self, config: CDKTConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.model = context.global_model().to(context.torch_device)
        self._held_back: set[str] = set()

    @classmethod
    def columns(cls, config: CDKTConfig) -> Sequence[str]:
        outcomes, embeddings = config.up
        return ["features"] * embeddings + ["logits"] * outcomes

    @classmethod
    def exchanges(cls, config: CDKTConfig, sizes: Sizes) -> Sequence[Exchange]:
        """cdkt.md, section 8."""

        def content(outcomes: bool, embeddings: bool) -> Content:
            return Content(knowledge=sizes.proxy_samples * (sizes.classes * outcomes + sizes.embedding * embeddings))

        return [Exchange(step="train", down=content(*config.down), up=content(*config.up))]

    def features(self) -> dict[str, tuple[int, ...]]:
        """F, where embeddings travel: all models must have the one size."""
        if not (self.config.up[1] or self.config.down[1]):
            return {}
        if embedding_tap(self.model) is None:
            raise ConfigurationError("[model] server has no embedding(x), the input of its last layer; name another")
        probe = torch.zeros(1, *self.context.input_shape)
        return {EMBEDDING: tuple(extract(self._embeddings, probe, model=self.model).shape[1:])}

    async def round(self, cohort: Cohort) -> None:
        server = self.config.distance(self.config.server_metric)
        robust, soft = self.config.robust, self.config.outcome_space == "probs"
        outcomes, embeddings = TensorMean(robust, probabilities=soft), TensorMean(robust)
        own: dict[str, float | None] = {}
        asked = cohort.sample(self.config.participation_ratio)
        async for answer in cohort.ask("train", self._knowledge_for(cohort), to=asked):
            logits_pc, embeddings_pf = _said(answer)
            weight = answer.samples if self.config.aggregation == "samples" else 1.0
            if logits_pc is not None:
                outcomes.add(server.outcomes(logits_pc), weight)
            if embeddings_pf is not None:
                embeddings.add(embeddings_pf, weight)
            own[answer.device] = None if logits_pc is None else self._accuracy(logits_pc)
        collective = self._collective(outcomes.result(), embeddings.result())
        transfer = partial(self._transfer, collective, cohort.generator("transfer"))
        failure = reason_undone(transfer, self.model, rate=self._rate)
        if failure:
            cohort.event("distillation-undone", f"the global model stays as it was before the round: {failure}")
        self._guard(own, cohort)

    def _knowledge_for(self, cohort: Cohort) -> Any:
        """Message 1: what w_s says about the proxy set; nothing in round 1 or where the guard fired."""
        nothing: Parts = {"knowledge": ProxyKnowledge(valid=False, proxy_digest=self.context.proxy_digest)}
        if not self.config.exchange or not cohort.completed:
            return nothing
        said = self._knowledge()
        reason = self._reason_not_sent(said)
        if reason:  # a first model that was never trained may say what does not fit
            cohort.event("knowledge-left-out", f"what the global model says is held back: {reason}")
            return nothing
        knowledge: Parts = {"knowledge": said}
        return lambda device: nothing if device in self._held_back else knowledge

    def _reason_not_sent(self, said: ProxyKnowledge) -> str | None:
        values = [torch.from_numpy(one) for one in (said.logits, said.embeddings) if one is not None]
        reasons = [reason_not_sent(one, self.context.knowledge_type) for one in values]
        return next(filter(None, reasons), None)

    def _knowledge(self) -> ProxyKnowledge:
        """K_s: L_s and H_s in eval mode."""
        outcomes, embeddings = self.config.down
        return ProxyKnowledge(
            valid=True,
            proxy_digest=self.context.proxy_digest,
            logits=extract(self.model, self._proxy.inputs).numpy() if outcomes else None,
            embeddings=extract(self._embeddings, self._proxy.inputs, model=self.model).numpy() if embeddings else None,
        )

    def _collective(self, outcomes_pc: Tensor | None, embeddings_pf: Tensor | None) -> Knowledge:
        """z̄ and h̄ of section 3.3, from the means over the devices that answered."""
        if outcomes_pc is not None and self.config.label_average:
            outcomes_pc = with_labels(outcomes_pc, self._proxy.labels)
        return Knowledge(outcomes_pc, embeddings_pf).to(self.context.torch_device)

    def _transfer(self, knowledge: Knowledge, generator: torch.Generator) -> None:
        """Eq. (7): CE + beta * R_s over the proxy set."""
        where, proxy, distance = self.context.torch_device, self._proxy, self.config.distance(self.config.server_metric)
        training = replace(self.config, learning_rate=self.config.server_learning_rate)
        inputs, labels = proxy.inputs.to(where), proxy.labels.to(where)

        def losses(epoch: int, rows_b: Tensor) -> Iterator[Tensor]:
            logits_bc, embeddings_bf = self._say(inputs[rows_b], knowledge.embeddings_pf is not None)
            loss = functional.cross_entropy(logits_bc, labels[rows_b])
            if self.config.beta:
                loss = loss + self.config.beta * distance.regulariser(knowledge, rows_b, logits_bc, embeddings_bf)
            yield loss

        train_steps(
            self.model,
            len(proxy),
            epochs=self.config.server_epochs(len(proxy)),
            batch_size=self.config.batch_size,
            optimizer=make_local_optimizer(training, self.model.parameters()),
            losses=losses,
            generator=generator,
            device=where,
        )
        said = self._knowledge()
        for values in (said.logits, said.embeddings):
            if values is not None:
                check_can_be_sent(torch.from_numpy(values), self.context.knowledge_type, self._rate)

    @property
    def _rate(self) -> Rate:
        return "server_learning_rate", self.config.server_learning_rate

    def _say(self, x: Tensor, with_embedding: bool) -> tuple[Tensor, Tensor | None]:
        return logits_and_embedding(self.model, x) if with_embedding else (self.model(x), None)

    def _embeddings(self, x: Tensor) -> Tensor:
        return logits_and_embedding(self.model, x)[1]

    def _guard(self, own: Mapping[str, float | None], cohort: Cohort) -> None:
        """Holds knowledge back that is no better than chance, and worse than the device's own where that is known."""
        teacher = self._accuracy(extract(self.model, self._proxy.inputs))
        cohort.report("teacher_accuracy", dict.fromkeys(own, teacher))
        self._held_back -= own.keys()
        if not (self.config.teacher_guard and self.config.exchange) or teacher > 1 / self.context.classes:
            return
        for device, accuracy in own.items():
            if accuracy is None or teacher < accuracy:
                self._held_back.add(device)
                itself = "" if accuracy is None else f", on which {device} itself scores {accuracy:.3f}"
                text = f"the server scores {teacher:.3f} on the proxy set{itself}; its knowledge is held back"
                cohort.guard("teacher", text, device)

    def _accuracy(self, logits_pc: Tensor) -> float:
        return float((logits_pc.argmax(1) == self._proxy.labels).double().mean())

    @property
    def _proxy(self) -> TensorData:
        assert self.context.proxy is not None  # make_contract refuses a run without it
        return self.context.proxy

    def forget(self, device: str, notes: Notes) -> None:
        """That knowledge was held back from it; what the model has learned from it stays."""
        self._held_back.discard(device)

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"model": self.model}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "held_back": sorted(self._held_back)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._held_back = set(state["held_back"])

    def global_model(self) -> torch.nn.Module:
        return self.model

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]]:
        return self.model, self.context.input_shape


def _said(answer: DeviceAnswer) -> tuple[Tensor | None, Tensor | None]:
    """L_n and H_n of message 2 in float64; ingest has held digest, shapes and values against the contract."""
    sent = answer.part("knowledge", ProxyKnowledge)
    columns = (sent.logits, sent.embeddings)
    logits, embeddings = (None if one is None else torch.from_numpy(one.astype(np.float64)) for one in columns)
    return logits, embeddings
