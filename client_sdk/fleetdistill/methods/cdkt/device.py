"""CDKT-FL: what both halves agree on, and what the device does.

Le et al., CDKT-FL: Cross-Device Knowledge Transfer using Proxy Dataset in Federated Learning, 2022 and 2024. Server and
devices hold a small labelled proxy set. A device sends what its model says about it, outcomes or embeddings or both,
and trains towards its own labels and towards what the server's model says about it. Nothing about its own samples
leaves the device, and the models may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import WireError
from fleetdistill.knowledge import Array, ProxyKnowledge
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, answers
from fleetdistill.methods.cdkt.config import CDKTConfig
from fleetdistill.methods.cdkt.transfer import Knowledge, proxy_batches, with_labels
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import TensorData, extract, train_steps
from fleetdistill.training.model import logits_and_embedding

Term = Callable[["Tensor", "Tensor | None", "Tensor"], "Tensor"]
"""(logits [b, c], embeddings [b, f] or None, proxy rows [b]) -> what a proxy mini-batch adds to the loss, a scalar."""


class CDKTDevice(DeviceMethod):
    """Device half: trains towards its labels and the server's knowledge, answers with its own about the proxy set."""

    config: CDKTConfig

    @classmethod
    def metrics_steps(cls, config: CDKTConfig) -> Sequence[str]:
        return ("train",)

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Eq. (8) over the local epochs, then one pass over the proxy set in eval mode."""
        self._train(self._term(ask.part("knowledge", ProxyKnowledge)), ask.seed)
        return Answer(parts={"knowledge": self._knowledge()}, samples=len(self.local.data))

    def _train(self, term: Term | None, seed: int) -> None:
        """Eq. (4): each private mini-batch with the next proxy mini-batch, both in one pass of the model."""
        self.trained = train_steps(
            self.local.model,
            len(self.local.data),
            epochs=self.config.local_epochs,
            batch_size=self.config.batch_size,
            optimizer=make_local_optimizer(self.config, self.local.model.parameters()),
            losses=self._losses(term, derive_seed(seed, "proxy")),
            generator=torch.Generator().manual_seed(seed),
            device=self.local.torch_device,
        )

    def _losses(self, term: Term | None, seed: int) -> Callable[[int, Tensor], Iterator[Tensor]]:
        where, proxy = self.local.torch_device, self._proxy
        inputs, labels = self.local.data.inputs.to(where), self.local.data.labels.to(where)
        shared = proxy.inputs.to(where)
        batches = proxy_batches(
            len(proxy),
            self.config.batch_size,
            torch.Generator().manual_seed(seed),
            smallest=1 if self.config.joint_pass else 2,  # batch-norm has no variance of one row
        )

        def losses(epoch: int, rows_b: Tensor) -> Iterator[Tensor]:
            if term is None:
                yield functional.cross_entropy(self.local.model(inputs[rows_b]), labels[rows_b])
                return
            proxy_b = next(batches).to(where)
            own, logits, embeddings = self._say(inputs[rows_b], shared[proxy_b])
            yield functional.cross_entropy(own, labels[rows_b]) + term(logits, embeddings, proxy_b)

        return losses

    def _say(self, own_x: Tensor, proxy_x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits for both mini-batches, and embeddings for the proxy's where a term needs them."""
        model, first = self.local.model, len(own_x)
        own = None if self.config.joint_pass else model(own_x)
        x = proxy_x if own is not None else torch.cat([own_x, proxy_x])
        logits, embeddings = logits_and_embedding(model, x) if self.config.down[1] else (model(x), None)
        if own is not None:
            return own, logits, embeddings
        return logits[:first], logits[first:], None if embeddings is None else embeddings[first:]

    def _term(self, sent: ProxyKnowledge) -> Term | None:
        """alpha * R_n of eq. (8); the control's cross-entropy on the proxy labels; None: local training alone."""
        labels = self._proxy.labels.to(self.local.torch_device)
        if not self.config.exchange:
            weight = self.config.control_weight
            return lambda logits_bc, embeddings_bf, proxy_b: (
                weight * functional.cross_entropy(logits_bc, labels[proxy_b])
            )
        if not sent.valid or not self.config.alpha:
            return None
        distance = self.config.distance(self.config.device_metric)
        logits_pc, embeddings_pf = self._rows(sent, "logits"), self._rows(sent, "embeddings")
        outcomes_pc = None if logits_pc is None else distance.outcomes(logits_pc)
        if outcomes_pc is not None and self.config.label_average:
            outcomes_pc = with_labels(outcomes_pc, labels)
        knowledge, alpha = Knowledge(outcomes_pc, embeddings_pf), self.config.alpha
        return lambda logits_bc, embeddings_bf, proxy_b: (
            alpha * distance.regulariser(knowledge, proxy_b, logits_bc, embeddings_bf)
        )

    def _rows(self, sent: ProxyKnowledge, column: str) -> Tensor | None:
        """A column of the server's knowledge, float32 `[P, ...]`. Raises WireError if it is about other rows."""
        values: Array | None = getattr(sent, column)
        if sent.proxy_digest != self.local.proxy_digest or (values is not None and len(values) != len(self._proxy)):
            raise WireError(f"the server's {column} are about another proxy set than the device's")
        return None if values is None else torch.from_numpy(values.astype("float32")).to(self.local.torch_device)

    def _knowledge(self) -> ProxyKnowledge:
        """Message 2: L_n and H_n on the whole proxy set, in its order."""
        (outcomes, embeddings), model, inputs = self.config.up, self.local.model, self._proxy.inputs
        say: dict[str, Callable[[Tensor], Tensor]] = {
            "logits": model,
            "embeddings": lambda x: logits_and_embedding(model, x)[1],
        }
        wanted = {"logits": outcomes, "embeddings": embeddings}
        columns = {name: extract(say[name], inputs, model=model).numpy() for name, want in wanted.items() if want}
        return ProxyKnowledge(valid=bool(columns), proxy_digest=self.local.proxy_digest, **columns)

    @property
    def _proxy(self) -> TensorData:
        if self.local.proxy is None:
            raise WireError("the run gave this device no proxy set, which CDKT-FL needs; is the server older?")
        return self.local.proxy
