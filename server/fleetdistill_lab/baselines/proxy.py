"""Methods that exchange logits of a proxy set which server and devices have.

In a round a device learns from what the server made of the last round's logits, trains on its own rows, and sends its
model's logits of the whole proxy set.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetdistill.errors import WireError
from fleetdistill.knowledge import Parts, ProxyKnowledge
from fleetdistill.methods.base import Ask, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import TensorData, extract, train_steps
from fleetdistill.training.losses import distillation_loss
from fleetdistill.training.rollback import reason_not_sent
from fleetdistill_lab.baselines.shared import OwnModelDevice
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["ProxyConfig", "ProxyDevice", "ProxyServer", "soft_loss"]


@dataclass(frozen=True, kw_only=True)
class ProxyConfig(FedAvgConfig):
    """Settings of methods that exchange logits of a proxy set, in addition to those of FedAvg.

    Attributes:
        proxy_epochs: A device's passes over the proxy set in a round, at least 1.
    """

    weighting: str = "uniform"
    proxy_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("proxy_epochs", self.proxy_epochs, 1)


class ProxyDevice(OwnModelDevice):
    """Device half: learns from the server's logits, trains on its own rows, and sends its logits of the proxy set."""

    config: ProxyConfig

    def first_ask(self) -> Ask:
        return Ask(round=1, step="train", seed=0, parts={"knowledge": ProxyKnowledge(valid=False)})

    def begin(self, ask: Ask) -> None:
        """Trains on the proxy set, towards the server's logits if there are some."""
        self.proxy()  # without one, before anything is trained
        received = ask.part("knowledge", ProxyKnowledge)
        if received.valid:
            logits_pc = self._received(received).to(self.local.torch_device)
            loss = lambda own_bc, rows_b: self.proxy_loss(own_bc, rows_b, logits_pc)  # noqa: E731
            self.fit_proxy(ask, self.config.proxy_epochs, loss)

    def end(self, ask: Ask) -> Parts:
        """Returns logits `[P, classes]` of the proxy set, in eval mode."""
        logits = extract(self.local.model, self.proxy().inputs).numpy()
        return {"knowledge": ProxyKnowledge(valid=True, proxy_digest=self.local.proxy_digest, logits=logits)}

    @abstractmethod
    def proxy_loss(self, own_bc: Tensor, rows_b: Tensor, logits_pc: Tensor) -> Tensor:
        """Returns the loss of own logits on rows of the proxy set, given the server's logits of all of them."""

    def fit_proxy(self, ask: Ask, epochs: int, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Trains the model on the proxy set; `loss` maps logits `[b, classes]` and rows `[b]` to a scalar."""
        proxy, model = self.proxy().to(self.local.torch_device), self.local.model
        now = replace(self.config, learning_rate=self.config.local_rate(ask.round))
        train_steps(
            model,
            len(proxy),
            epochs=epochs,
            batch_size=self.config.batch_size,
            optimizer=make_local_optimizer(now, model.parameters()),
            losses=lambda epoch, rows_b: [loss(model(proxy.inputs[rows_b]), rows_b)],
            generator=torch.Generator().manual_seed(derive_seed(ask.seed, "proxy")),
            device=self.local.torch_device,
        )

    def proxy(self) -> TensorData:
        """Returns the proxy set. Raises WireError if the server sent none."""
        if self.local.proxy is None:
            raise WireError("the method needs a proxy set, but the server sent none; update the server if it is older")
        return self.local.proxy

    def proxy_labels(self, rows_b: Tensor) -> Tensor:
        """Returns labels `[b]` of rows of the proxy set, on the model's device."""
        return self.proxy().labels.to(self.local.torch_device)[rows_b]

    def _received(self, received: ProxyKnowledge) -> Tensor:
        shape = (len(self.proxy()), self.local.classes)
        if received.logits is None or received.logits.shape != shape or not np.isfinite(received.logits).all():
            raise WireError(f"the server's logits of the proxy set must be finite numbers {list(shape)}")
        return torch.from_numpy(received.logits.astype(np.float32))


class ProxyServer(ServerMethod):
    """Server half: makes new logits of the proxy set from the devices'.

    Attributes:
        logits_pc: What devices get in the next round, `[P, classes]` float32; None before the first.
    """

    config: ProxyConfig

    def __init__(self, config: ProxyConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.logits_pc: Tensor | None = None

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(proxy_set=True)

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange: P C numbers in each direction."""
        schema = ProxyKnowledge.schema(
            samples=sizes.proxy_samples, classes=sizes.classes, embedding=(sizes.embedding,), columns=("logits",)
        )
        return [Exchange(step="train", down={"knowledge": schema}, up={"knowledge": schema})]

    def sizes(self) -> Sizes:
        return Sizes(classes=self.context.classes, proxy_samples=0 if self.context.proxy is None else len(self.proxy()))

    def proxy(self) -> TensorData:
        """Returns the proxy set."""
        assert self.context.proxy is not None  # make_contract rejects a run without a proxy set
        return self.context.proxy

    async def round(self, cohort: Cohort) -> None:
        received: dict[str, Tensor] = {}
        weights: list[float] = []
        asked = cohort.sample(self.config.participation_ratio)
        async for answer in cohort.ask("train", {"knowledge": self._knowledge(cohort)}, to=asked):
            logits = answer.part("knowledge", ProxyKnowledge).logits
            assert logits is not None  # the front requires the column
            received[answer.device] = torch.from_numpy(logits.astype(np.float32))
            weights.append(answer.weight if self.config.weighting == "samples" else answer.decay)
        self.logits_pc = self.combine(cohort, received, weights).float()

    @abstractmethod
    def combine(self, cohort: Cohort, received: Mapping[str, Tensor], weights: Sequence[float]) -> Tensor:
        """Returns what devices get in the next round, `[P, classes]`.

        Args:
            cohort: The round's devices.
            received: Logits `[P, classes]` float32 of each device that answered, at least one.
            weights: A weight for each of them.
        """

    def fit_proxy(
        self, cohort: Cohort, model: torch.nn.Module, epochs: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Trains a model on the proxy set; `loss` maps logits `[b, classes]` and rows `[b]` to a scalar."""
        inputs = self.proxy().inputs.to(self.context.torch_device)
        rate = self.config.local_rate(cohort.completed + 1)
        self.context.trainer.train_steps(
            model,
            len(inputs),
            epochs=epochs,
            batch_size=self.config.batch_size,
            optimizer=make_local_optimizer(replace(self.config, learning_rate=rate), model.parameters()),
            losses=lambda epoch, rows_b: [loss(model(inputs[rows_b]), rows_b)],
            generator=cohort.generator("proxy"),
        )

    def _knowledge(self, cohort: Cohort) -> ProxyKnowledge:
        if self.logits_pc is None:
            return ProxyKnowledge(valid=False, proxy_digest=self.context.proxy_digest)
        reason = reason_not_sent(self.logits_pc, self.context.knowledge_type)
        if reason:
            cohort.event("knowledge-left-out", f"the logits of the proxy set are withheld: {reason}")
            return ProxyKnowledge(valid=False, proxy_digest=self.context.proxy_digest)
        logits = self.logits_pc.numpy()
        return ProxyKnowledge(valid=True, proxy_digest=self.context.proxy_digest, logits=logits)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.logits_pc is None else {"logits": self.logits_pc}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.logits_pc = state.get("logits")


def soft_loss(own_bc: Tensor, teacher_logits_bc: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns tau^2 KL(softmax(teacher / tau) || softmax(own / tau)), averaged over rows."""
    return distillation_loss(own_bc, (teacher_logits_bc / temperature).softmax(dim=1), temperature)
