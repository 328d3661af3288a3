"""Server half of FedDKC: refines each device's logits, distils them into the predictor, and returns its logits.

Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, 2022, Algorithm 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.knowledge import CUT, ModelParameters, Parts, RefinedKnowledge, SampleKnowledge
from fleetdistill.methods.feddkc.config import FedDKCConfig
from fleetdistill.training.local_training import make_optimizer
from fleetdistill.training.losses import distillation_loss
from fleetdistill.training.model import output_shape
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill.training.rollback import Rate, check_can_be_sent, reason_not_sent, train_or_roll_back
from fleetdistill_server.figures import Figure
from fleetdistill_server.methods.averaging import OFF, cap
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.feddkc.kernels import kkr_kernel
from fleetdistill_server.methods.feddkc.kkr import kkr
from fleetdistill_server.methods.feddkc.refined import Refined, no_refinement
from fleetdistill_server.methods.feddkc.skr import skr
from fleetdistill_server.methods.traffic import Exchange, Sizes
from fleetdistill_server.phases import phase
from fleetdistill_server.training.evaluation import TEACHER_ACCURACY
from fleetdistill_server.training.rows import Pool, mapped_tensor

__all__ = ["FedDKCServer", "Upload"]

_BLOCK_ROWS = 1024  # rows whose lengths are computed at once, in float64
_LARGEST = 10.0  # times the devices' median; features of one extractor and logits never differ this much


@dataclass(frozen=True)
class Upload:
    """One device's knowledge.

    Attributes:
        device: Id of the device.
        sample_ids: `[N]` int64, on the CPU.
        features: `[N, ...]`, any float type, on the CPU; usually mapped from a file.
        logits: `[N, C]`, any float type, on the server's torch device.
        labels: `[N]` int64, on the server's torch device; the classes that the device predicts, if its labels stay on
            it.
        refined: The refined logits, if they are already computed.
        decay: Factor of the number of rows that the predictor is trained on, in (0, 1].
    """

    device: str
    sample_ids: Tensor
    features: Tensor
    logits: Tensor
    labels: Tensor
    refined: Refined | None = None
    decay: float = 1.0

    def part(self, rows: int, generator: torch.Generator) -> Upload:
        """Returns `rows` random rows of the upload, or the upload itself if it has no more."""
        if rows >= len(self.labels):
            return self
        taken = torch.randperm(len(self.labels), generator=generator)[:rows].sort().values
        at = taken.to(self.labels.device)
        return Upload(self.device, self.sample_ids[taken], self.features[taken], self.logits[at], self.labels[at])


class FedDKCServer(ServerMethod):
    """Stores the server's predictor W^S, its optimiser, and its logits z^S for each device's samples."""

    config: FedDKCConfig
    summary = "distils features and refined logits, and teaches back"
    figures = {  # noqa: RUF012  (a ClassVar of the base)
        "teacher_accuracy": TEACHER_ACCURACY,
        "refined_rows": Figure("Refined rows", of="counts"),
    }

    def __init__(self, config: FedDKCConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self._feature_shape = output_shape(context.extractor(), context.input_shape)
        self.predictor = context.server_model(self._feature_shape).to(context.torch_device)
        self.optimizer = make_optimizer(
            self.predictor.parameters(),
            learning_rate=config.server_learning_rate,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            weight_decay=config.weight_decay,
        )
        self.knowledge: dict[str, tuple[Tensor, Tensor, bool]] = {}

    @classmethod
    def needs(cls, config: FedDKCConfig) -> Needs:
        return Needs(same_extractor=True)

    @classmethod
    def exchanges(cls, config: FedDKCConfig, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange of feddkc.md in docs/reference/methods, with sample ids in both directions."""
        n, c, channels = sizes.samples, sizes.classes, sizes.cut_channels
        columns = ("features", "logits", *(["labels"] if config.labels else []))
        own = SampleKnowledge.schema(rows=n, features=sizes.at_cut, classes=c, columns=columns, channels=channels)
        refined = RefinedKnowledge.schema(rows=n, classes=c)
        return [Exchange(step="train", down={"knowledge": refined}, up={"knowledge": own})]

    def sizes(self) -> Sizes:
        return Sizes.of_cuts({CUT: self._feature_shape}, classes=self.context.classes)

    keeps_initial = True

    def initial(self) -> ModelParameters | None:
        """Returns the extractor that all devices start from; without it the predictor learns almost nothing."""
        if not self.config.shared_initial:
            return None
        return self.given_initial or model_parameters(self.context.extractor(), scope="extractor")

    def known_extractor(self, name: str, received: Parts) -> torch.nn.Module:
        """Returns the initial extractor, the last one that the server knows."""
        extractor, initial = self.context.extractor(), self.initial()
        if initial is not None:
            load_parameters(extractor, initial)
        return extractor

    async def round(self, cohort: Cohort) -> None:
        asked = cohort.sample(self.config.participation_ratio)
        answers = cohort.ask("train", self.message, to=asked, prepare=self._upload)
        uploads: list[Upload] = [answer.prepared async for answer in answers]
        uploads = self._without_outsized_uploads(uploads, cohort)  # guard
        counted = self._with_capped_rows(uploads, cohort)  # guard
        refined = [upload.refined or self.refine(upload.logits) for upload in counted]
        known = self._distil(counted, refined, cohort)  # eq. (2)
        for upload in uploads:
            self.predict(upload, cohort, known.get(id(upload)))  # z^S = W^S(H)
        cohort.report("refined_rows", dict(sum((Counter(item.counts()) for item in refined), Counter())))

    def _distil(self, uploads: list[Upload], refined: list[Refined], cohort: Cohort) -> Mapping[int, Tensor]:
        """Trains the predictor by eq. (2); rolls it back if a weight is not finite.

        Returns:
            z^S by `id` of the upload; empty after a rollback.
        """
        predicted: dict[int, Tensor] = {}
        train = partial(self._train, uploads, refined, cohort.generator("distil"), predicted)
        failure = train_or_roll_back(train, self.predictor, self.optimizer, rate=self._rate)
        if not failure:
            return predicted
        cohort.event("distillation-undone", f"the predictor is rolled back to its state before the round: {failure}")
        return {}

    def message(self, device: str) -> Parts:
        """Returns message 1: z^S for the device's own rows; no logits in round 1 or if a guard fired."""
        sample_ids, logits, valid = self.knowledge.get(device, (None, None, False))
        if sample_ids is None or logits is None or not valid:
            return {"knowledge": RefinedKnowledge(valid=False)}
        return {"knowledge": RefinedKnowledge(valid=True, sample_ids=sample_ids.numpy(), values=logits.numpy())}

    def _upload(self, answer: DeviceAnswer) -> Upload:
        """Returns message 2 with refined logits, φ of eqs. (9) to (20); features stay in their file."""
        sent = answer.part("knowledge", SampleKnowledge)
        assert sent.logits is not None  # the contract's columns were checked at ingest
        labels = sent.logits.argmax(axis=1) if sent.labels is None else sent.labels
        ids, logits, labels = (
            torch.from_numpy(np.array(item)) for item in (sent.sample_ids, sent.logits, labels.astype(np.int64))
        )
        where, features = self.context.torch_device, mapped_tensor(sent.features[CUT])
        logits = logits.to(where)
        return Upload(answer.device, ids, features, logits, labels.to(where), self.refine(logits), answer.decay)

    def _without_outsized_uploads(self, uploads: list[Upload], notes: Notes) -> list[Upload]:
        """Guard: leaves out uploads whose features or logits exceed ten times the devices' median."""
        if self.config.robust == OFF:
            return uploads
        sizes: dict[str, Callable[[Upload], float]] = {
            "the mean length of its feature rows": lambda one: _mean_length(one.features),
            "its mean absolute logit": lambda one: float(one.logits.double().abs().mean()),
        }
        too_large: dict[str, str] = {}
        for what, size in sizes.items():
            result = {upload.device: size(upload) for upload in uploads}
            most = _LARGEST * median(result.values())
            too_large |= {
                item: f"{what} is {result[item]:.3g}, the limit {most:.3g}" for item in result if result[item] > most
            }
        for device, why in too_large.items():
            text = f"the upload of {device} is left out: {why} ({_LARGEST:g} times the devices' median)"
            notes.event("upload-left-out", text, device)
            self.knowledge.pop(device, None)  # the predictor's logits for such rows are meaningless too
        return [upload for upload in uploads if upload.device not in too_large]

    def _with_capped_rows(self, uploads: list[Upload], notes: Notes) -> list[Upload]:
        """Guard: caps each device's rows, which are this method's weights, with a new random sample in each round.

        Stale answers of buffered rounds also have fewer rows, at least one.
        """
        sizes = [float(len(upload.labels)) for upload in uploads]
        most = sizes if self.config.robust == OFF else cap(sizes)
        return [
            upload.part(max(1, int(rows * upload.decay)), notes.generator(f"rows {upload.device}"))
            for upload, rows in zip(uploads, most, strict=True)
        ]

    @phase("refinement")
    def refine(self, logits: Tensor) -> Refined:
        """Refines logits `[N, C]` with the configured refinement: KKR, KKR with a kernel, SKR or none."""
        config = self.config
        assert config.target_peak is not None
        assert config.target_entropy is not None
        match config.refinement:
            case "kkr":
                return kkr(logits, config.target_peak, temperature=config.refine_temperature)
            case "kkr_kernel":
                return kkr_kernel(
                    logits,
                    config.target_peak,
                    kernel=config.kernel,
                    epsilon=config.epsilon,
                    temperature=config.refine_temperature,
                )
            case "skr":
                return skr(logits, config.target_entropy, epsilon=config.epsilon)
            case _:
                return no_refinement(logits, temperature=config.temperature)

    def _train(
        self,
        uploads: list[Upload],
        refined: list[Refined],
        generator: torch.Generator,
        predicted: dict[int, Tensor],
    ) -> None:
        """Minimises eq. (2) over all uploads: one shuffled pool, or device after device as in the paper.

        Adds z^S of each upload to `predicted`.
        """
        pool = Pool([upload.features for upload in uploads], self.context.trainer.hardware)
        labels = torch.cat([upload.labels for upload in uploads])
        targets = torch.cat([item.probabilities for item in refined]).float()
        factors = self.class_weights(uploads)
        weights = (
            None if factors is None else torch.cat([factors[one.device].expand(len(one.labels), -1) for one in uploads])
        )
        self.context.trainer.train_steps(
            self.predictor,
            self.pools([len(upload.labels) for upload in uploads]),
            epochs=self.config.server_epochs,
            batch_size=self.config.batch_size,
            optimizer=self.optimizer,
            losses=lambda epoch, rows, features: [
                self.loss(features, labels[rows], targets[rows], None if weights is None else weights[rows])
            ],
            generator=generator,
            pool=pool,
        )
        for upload in uploads:
            predicted[id(upload)] = self._predict(upload.features)
            check_can_be_sent(predicted[id(upload)], self.context.knowledge_type, self._rate)

    @property
    def _rate(self) -> Rate:
        return "server_learning_rate", self.config.server_learning_rate

    def pools(self, sizes: list[int]) -> list[int]:
        """Returns the sizes of the pools that are shuffled separately: one for all devices, or one for each."""
        return [sum(sizes)] if self.config.server_order == "mixed" else sizes

    def class_weights(self, uploads: Sequence[Upload]) -> Mapping[str, Tensor] | None:
        """Returns factors `[C]` of the classes' terms of the distillation loss by device; None, the default, for 1.

        Called once in a round, with the rows that the predictor is trained on.
        """
        return None

    def loss(
        self, features_b: Tensor, labels_b: Tensor, targets_bc: Tensor, weights_bc: Tensor | None = None
    ) -> Tensor:
        """Returns the loss of eq. (2), CE + beta * distillation, for one mini-batch; without the devices' labels no CE.

        Args:
            features_b: `[b, ...]`, any float type.
            labels_b: `[b]` int64.
            targets_bc: Refined probabilities, `[b, C]`.
            weights_bc: Factors of the classes' terms of the distillation loss, `[b, C]`; None for 1.
        """
        logits_bc = self.predictor(features_b.float())
        config = self.config
        loss: Tensor = logits_bc.new_zeros(())
        if config.labels:
            loss = config.label_weights[1] * functional.cross_entropy(logits_bc, labels_b)
        if config.server_beta > 0:
            loss = loss + config.server_beta * distillation_loss(
                logits_bc, targets_bc, config.temperature, class_weights=weights_bc
            )
        return loss

    def _predict(self, features: Tensor) -> Tensor:
        """Returns z^S `[N, C]`, computed in eval mode, on the CPU."""
        return self.context.trainer.extract(lambda rows: self.predictor(rows.float()), features, model=self.predictor)

    def predict(self, upload: Upload, notes: Notes, known: Tensor | None = None) -> None:
        """Stores z^S = W^S(H) for the device's next message. If a guard fires, z^S is marked as not to be sent.

        Args:
            upload: The device's knowledge.
            notes: Receives events and figures.
            known: z^S, if it is already computed.
        """
        logits = self._predict(upload.features) if known is None else known
        fits = self._is_representable(logits, upload, notes)  # guard
        valid = fits and self._teaches(logits, upload, notes)  # guard
        self.knowledge[upload.device] = (upload.sample_ids, logits if fits else torch.zeros_like(logits), valid)

    def _is_representable(self, logits: Tensor, upload: Upload, notes: Notes) -> bool:
        """Guard: returns whether the logits are finite and representable in the run's knowledge type."""
        reason = reason_not_sent(logits, self.context.knowledge_type)
        if reason:
            text = f"{upload.device} gets no knowledge from the predictor: {reason}"
            notes.event("knowledge-left-out", text, upload.device)
        return not reason

    def _teaches(self, logits: Tensor, upload: Upload, notes: Notes) -> bool:
        """Guard: returns whether the predictor is better than chance or than the device on the device's rows.

        Without labels the predictor's accuracy is its agreement with the device.
        """
        labels = upload.labels.cpu()
        teacher, own = _accuracy(logits, labels), _accuracy(upload.logits.cpu(), labels)
        useless = teacher <= 1 / self.context.classes and teacher < own
        teaches = not (useless and self.config.teacher_guard)
        if not teaches:
            text = f"the predictor has accuracy {teacher:.3f} on the rows of {upload.device}, the device {own:.3f}"
            if not self.config.labels:
                text = f"the predictor agrees with {upload.device} on a share of {teacher:.3f} of its rows"
            notes.guard("teacher", f"{text}; the device gets no knowledge from it", upload.device)
        notes.report("teacher_accuracy", {upload.device: teacher})
        return teaches

    def forget(self, device: str, notes: Notes) -> None:
        """Deletes the logits for the device's next message; the predictor is unchanged."""
        self.knowledge.pop(device, None)

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"predictor": self.predictor}

    def state_dict(self) -> dict[str, Any]:
        return {
            "predictor": self.predictor.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "knowledge": {device: list(entry) for device, entry in self.knowledge.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.predictor.load_state_dict(state["predictor"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.knowledge = {device: tuple(entry) for device, entry in state["knowledge"].items()}

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]]:
        return self.predictor, self._feature_shape


def _mean_length(features: Tensor) -> float:
    """Returns the mean Euclidean length of the rows."""
    lengths = [part.double().flatten(1).norm(dim=1) for part in features.split(_BLOCK_ROWS)]
    return float(torch.cat(lengths).mean())


def _accuracy(logits_bc: Tensor, labels_b: Tensor) -> float:
    return float((logits_bc.argmax(1) == labels_b).double().mean())
