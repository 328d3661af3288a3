"""CDKT-FL: what both halves agree on, and what the device does.

Le et al., CDKT-FL: Cross-Device Knowledge Transfer using Proxy Dataset in Federated Learning, 2022 and 2024. Server and
devices hold a small labelled proxy set. A device sends what its model says about it, outcomes or embeddings or both,
and trains towards its own labels and towards what the server's model says about it. Nothing about its own samples
leaves the device, and the models may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import WireError
from fleetdistill.knowledge import Array, ProxyKnowledge
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, answers, check_choice, check_range
from fleetdistill.methods.local import LocalTraining, make_local_optimizer
from fleetdistill.seeds import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

    from fleetdistill.methods.cdkt.transfer import Distance
    from fleetdistill.training.local_training import TensorData

METRICS = ("kl", "js", "norm2")
CHOICES = {
    "knowledge": ("full", "rep", "repfull"),
    "server_metric": METRICS,
    "device_metric": METRICS,
    "outcome_space": ("probs", "logits"),
    "norm2_reduction": ("mean_l2", "frobenius"),
    "device_knowledge": ("auto", "outcome", "embedding", "both"),
    "aggregation": ("uniform", "samples"),
}

Term = Callable[["Tensor", "Tensor | None", "Tensor"], "Tensor"]
"""(logits [b, c], embeddings [b, f] or None, proxy rows [b]) -> what a proxy mini-batch adds to the loss, a scalar."""


@dataclass(frozen=True, kw_only=True)
class CDKTConfig(LocalTraining):
    """Settings of CDKT-FL beside those of local training. Names and ranges are those of the paper where it has them.

    Attributes:
        knowledge: What devices send and the server learns from: `full` outcomes, `rep` embeddings, `repfull` both.
            Embeddings need models with one embedding size F; outcomes fit any models.
        server_metric, device_metric: The paper's d of each side: `kl`, `js` or `norm2`. Its KL-N is kl and norm2.
        alpha: Weight of the device's regulariser, at least 0. With KL, alpha * temperature**2 multiplies the rate; the
            two norms have no such factor and need an alpha some ten times as large.
        beta: Weight of the server's regulariser, at least 0; 0 trains the server on the proxy labels alone.
        temperature: The paper's tau of KL, above 0.
        outcome_space: What is averaged and compared as outcome: `probs` or `logits`.
        norm2_reduction: `mean_l2` is the mean of the rows' norms, `frobenius` one norm over a mini-batch.
        label_average: Average collective outcomes, and the server's on the device, with the proxy labels.
        device_knowledge: What a device learns from: `auto` is the paper's (outcomes, and embeddings beside them unless
            `knowledge` is full), or `outcome`, `embedding`, `both`.
        aggregation: Average over devices alike (`uniform`) or by their samples (`samples`).
        global_epochs: The server's passes over the proxy set in a round, the paper's R, at least 1.
        min_server_steps: More passes where these would be fewer steps than this, at least 1.
        server_learning_rate: The paper's kappa. Momentum, weight decay and batch size are the devices'.
        exchange: False is the method's control: nothing is exchanged, and devices train on their own samples and on
            the labels of the proxy set, the server on these labels alone.
        control_weight: Weight of the proxy labels in that control, at least 0.
        teacher_guard: Do not send a device knowledge that is worse than chance and than its own.
        joint_pass: A device's own and its proxy mini-batch go through the model together, so that batch-norm trains on
            what it is later asked about; otherwise one after the other.
        paper: The paper's values of all settings that are not given, and where it has none the authors': outcomes and
            embeddings, KL-N with its weights and rates, outcomes as logits, norms over the mini-batch, two passes,
            `global_epochs` as they are, no guard.
    """

    batch_size: int = 20
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    knowledge: str = "full"
    server_metric: str = "kl"
    device_metric: str = "kl"
    alpha: float = 0.3
    beta: float = 0.1
    temperature: float = 3.0
    outcome_space: str = "probs"
    norm2_reduction: str = "mean_l2"
    label_average: bool = True
    device_knowledge: str = "auto"
    aggregation: str = "uniform"
    global_epochs: int = 2
    min_server_steps: int = 40
    server_learning_rate: float = 0.1
    exchange: bool = True
    control_weight: float = 1.0
    teacher_guard: bool = True
    joint_pass: bool = True
    paper: bool = False

    def __post_init__(self) -> None:
        LocalTraining.__post_init__(self)
        for name, known in CHOICES.items():
            check_choice(name, getattr(self, name), known)
        for name in ("alpha", "beta", "control_weight"):
            check_range(name, getattr(self, name), 0)
        for name in ("temperature", "server_learning_rate"):
            check_range(name, getattr(self, name), 0, open_low=True)
        for name in ("global_epochs", "min_server_steps"):
            check_range(name, getattr(self, name), 1)

    def for_classes(self, classes: int) -> CDKTConfig:
        """The same settings; none depends on the number of classes."""
        return self

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The paper's; weights and rates are those of the authors' notes for Fashion-MNIST with all devices."""
        return {
            "learning_rate": 0.03,
            "knowledge": "repfull",
            "device_metric": "norm2",
            "alpha": 0.02,
            "outcome_space": "logits",
            "norm2_reduction": "frobenius",
            "min_server_steps": 1,
            "server_learning_rate": 0.07,
            "teacher_guard": False,
            "joint_pass": False,
        }

    def server_epochs(self, proxy_samples: int) -> int:
        """Passes over P proxy samples: `global_epochs`, or as many as make `min_server_steps` steps of ceil(P / B)."""
        steps_of_a_pass = math.ceil(proxy_samples / self.batch_size)
        return max(self.global_epochs, math.ceil(self.min_server_steps / steps_of_a_pass))

    @property
    def up(self) -> tuple[bool, bool]:
        """Whether outcomes and whether embeddings travel to the server, and are its terms."""
        return self.exchange and self.knowledge != "rep", self.exchange and self.knowledge != "full"

    @property
    def down(self) -> tuple[bool, bool]:
        """Whether outcomes and whether embeddings travel to the devices, and are their terms."""
        both = self.knowledge != "full" if self.device_knowledge == "auto" else self.device_knowledge == "both"
        outcomes, embeddings = self.device_knowledge != "embedding", both or self.device_knowledge == "embedding"
        return self.exchange and outcomes, self.exchange and embeddings

    def distance(self, metric: str) -> Distance:
        """The paper's D with this metric: `server_metric` or `device_metric`."""
        from fleetdistill.methods.cdkt.transfer import Distance

        return Distance(metric, self.temperature, self.outcome_space, self.norm2_reduction)


class CDKTDevice(DeviceMethod):
    """Device half: trains towards its labels and the server's knowledge, answers with its own about the proxy set."""

    config: CDKTConfig
    metrics_steps = ("train",)

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Eq. (8) over the local epochs, then one pass over the proxy set in eval mode."""
        self._train(self._term(ask.part("knowledge", ProxyKnowledge)), ask.seed)
        return Answer(parts={"knowledge": self._knowledge()}, samples=len(self.local.data))

    def _train(self, term: Term | None, seed: int) -> None:
        """Eq. (4): each private mini-batch with the next proxy mini-batch, both in one pass of the model."""
        import torch

        from fleetdistill.training.local_training import train_steps

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
        import torch
        from torch.nn import functional

        from fleetdistill.methods.cdkt.transfer import proxy_batches

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
        import torch

        from fleetdistill.training.model import logits_and_embedding

        model, first = self.local.model, len(own_x)
        own = None if self.config.joint_pass else model(own_x)
        x = proxy_x if own is not None else torch.cat([own_x, proxy_x])
        logits, embeddings = logits_and_embedding(model, x) if self.config.down[1] else (model(x), None)
        if own is not None:
            return own, logits, embeddings
        return logits[:first], logits[first:], None if embeddings is None else embeddings[first:]

    def _term(self, sent: ProxyKnowledge) -> Term | None:
        """alpha * R_n of eq. (8); the control's cross-entropy on the proxy labels; None: local training alone."""
        from torch.nn import functional

        from fleetdistill.methods.cdkt.transfer import Knowledge, with_labels

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
        import torch

        values: Array | None = getattr(sent, column)
        if sent.proxy_digest != self.local.proxy_digest or (values is not None and len(values) != len(self._proxy)):
            raise WireError(f"the server's {column} are about another proxy set than the device's")
        return None if values is None else torch.from_numpy(values.astype("float32")).to(self.local.torch_device)

    def _knowledge(self) -> ProxyKnowledge:
        """Message 2: L_n and H_n on the whole proxy set, in its order."""
        from fleetdistill.training.local_training import extract
        from fleetdistill.training.model import logits_and_embedding

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
