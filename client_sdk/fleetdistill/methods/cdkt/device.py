"""Device half of CDKT-FL.

Le et al., CDKT-FL: Cross-Device Knowledge Transfer using Proxy Dataset in Federated Learning, 2022 and 2024. Server and
devices have the same small labelled proxy set. A device trains on its own labels and towards the server model's outputs
for the proxy set, then sends its own model's outputs for it: outcomes, embeddings or both. It sends nothing about its
own samples, and the models may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import WireError
from fleetdistill.knowledge import Array, ProxyKnowledge
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, answers
from fleetdistill.methods.cdkt.config import CDKTConfig
from fleetdistill.methods.cdkt.transfer import Distance, Knowledge, proxy_batches, with_labels
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import TensorData, extract
from fleetdistill.training.model import logits_and_embedding

Term = Callable[["Tensor", "Tensor | None", "Tensor"], "Tensor"]
"""(logits [b, c], embeddings [b, f] or None, proxy rows [b]) -> the proxy mini-batch's term of the loss, a scalar."""


class CDKTDevice(DeviceMethod):
    """Device half of CDKT-FL: trains on labels and the server's knowledge, and sends its knowledge of the proxy set."""

    config: CDKTConfig

    @classmethod
    def metrics_steps(cls, config: CDKTConfig) -> Sequence[str]:
        return ("train",)

    def first_ask(self) -> Ask:
        nothing = ProxyKnowledge(valid=False, proxy_digest=self.local.proxy_digest)
        return Ask(round=1, step="train", seed=0, parts={"knowledge": nothing})

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Runs the device's part of a round (Algorithm 1)."""
        received = ask.part("knowledge", ProxyKnowledge)  # message 1: z_s and h_s
        term = self.regulariser(received) if self.config.exchange else self._control()  # alpha * R_n
        self.train_towards(term, ask.seed)  # eqs. (4) and (8)
        sent = self._knowledge()  # message 2: z_n and h_n
        return Answer(parts={"knowledge": sent}, samples=len(self.local.data))

    def train_towards(self, term: Term | None, seed: int) -> None:
        """Trains the local model (eqs. 4 and 8), each private mini-batch together with the next proxy mini-batch.

        Args:
            term: The proxy mini-batch's term of the loss; None to use only cross-entropy on own samples.
            seed: Seed of the mini-batches.
        """
        optimizer = make_local_optimizer(self.config, self.local.model.parameters())
        self.train_local(self._losses(term, derive_seed(seed, "proxy")), optimizer, seed)

    def _losses(self, term: Term | None, seed: int) -> Callable[[int, Tensor], Iterator[Tensor]]:
        where, proxy = self.local.torch_device, self._proxy
        data = self.local.data.to(where)
        shared = proxy.to(where).inputs
        batches = proxy_batches(
            len(proxy),
            self.config.batch_size,
            torch.Generator().manual_seed(seed),
            smallest=1 if self.config.joint_pass else 2,  # batch-norm cannot compute a variance of one row
        )

        def losses(epoch: int, rows_b: Tensor) -> Iterator[Tensor]:
            if term is None:
                yield functional.cross_entropy(self.local.model(data.draw(rows_b)), data.labels[rows_b])
                return
            proxy_b = next(batches).to(where)
            own, logits, embeddings = self._forward(data.draw(rows_b), shared[proxy_b])
            yield functional.cross_entropy(own, data.labels[rows_b]) + term(logits, embeddings, proxy_b)

        return losses

    def _forward(self, own_x: Tensor, proxy_x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the logits of both mini-batches, and the proxy mini-batch's embeddings or None if they are unused."""
        model, first = self.local.model, len(own_x)
        own = None if self.config.joint_pass else model(own_x)
        x = proxy_x if own is not None else torch.cat([own_x, proxy_x])
        logits, embeddings = logits_and_embedding(model, x) if self.config.down[1] else (model(x), None)
        if own is not None:
            return own, logits, embeddings
        return logits[:first], logits[first:], None if embeddings is None else embeddings[first:]

    def regulariser(self, received: ProxyKnowledge) -> Term | None:
        """Returns alpha * R_n of eq. (8), or None if alpha is 0 or the server sent no knowledge.

        Raises:
            WireError: The knowledge belongs to another proxy set than the device's.
        """
        if not received.valid or not self.config.alpha:
            return None
        self._check_proxy_set(received)  # guard
        distance, alpha = self.config.distance(self.config.device_metric), self.config.alpha
        knowledge = self._knowledge_of(received, distance)  # z^_s and h_s
        return lambda logits_bc, embeddings_bf, proxy_b: (
            alpha * distance.regulariser(knowledge, proxy_b, logits_bc, embeddings_bf)
        )

    def _control(self) -> Term:
        """Returns the control's term: cross-entropy on the labels of the proxy set, times `control_weight`."""
        labels, weight = self._proxy.labels.to(self.local.torch_device), self.config.control_weight
        return lambda logits_bc, embeddings_bf, proxy_b: weight * functional.cross_entropy(logits_bc, labels[proxy_b])

    def _check_proxy_set(self, received: ProxyKnowledge) -> None:
        columns = {"logits": received.logits, "embeddings": received.embeddings}
        for name, values in columns.items():
            rows = len(self._proxy) if values is None else len(values)
            if received.proxy_digest != self.local.proxy_digest or rows != len(self._proxy):
                raise WireError(
                    f"the server's {name} belong to another proxy set than the device's; the server is faulty or "
                    "has another version"
                )

    def _knowledge_of(self, received: ProxyKnowledge, distance: Distance) -> Knowledge:
        """Returns the server's outcomes, averaged with the labels, and its embeddings, both in float32."""
        logits_pc, embeddings_pf = self._tensor(received.logits), self._tensor(received.embeddings)
        outcomes_pc = None if logits_pc is None else distance.outcomes(logits_pc)
        if outcomes_pc is not None and self.config.label_average:
            outcomes_pc = with_labels(outcomes_pc, self._proxy.labels.to(self.local.torch_device))
        return Knowledge(outcomes_pc, embeddings_pf)

    def _tensor(self, values: Array | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values.astype("float32")).to(self.local.torch_device)

    def _knowledge(self) -> ProxyKnowledge:
        """Returns message 2: the columns z_n and h_n of the whole proxy set, in its order, in eval mode."""
        (outcomes, embeddings), model, classes = self.config.up, self.local.model, self.local.classes

        def forward(x: Tensor) -> Tensor:
            return torch.cat(logits_and_embedding(model, x), dim=1) if embeddings else cast(Tensor, model(x))

        columns: dict[str, Array] = {}
        if outcomes or embeddings:
            made = extract(forward, self._proxy.inputs, model=model).numpy()
            columns |= {"logits": made[:, :classes]} if outcomes else {}
            columns |= {"embeddings": made[:, classes:]} if embeddings else {}
        return ProxyKnowledge(valid=bool(columns), proxy_digest=self.local.proxy_digest, **columns)

    @property
    def _proxy(self) -> TensorData:
        if self.local.proxy is None:
            raise WireError(
                "CDKT-FL needs a proxy set, but the server sent none to this device; update the server if it is older"
            )
        return self.local.proxy
