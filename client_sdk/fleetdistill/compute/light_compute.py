"""The compute backend without PyTorch: uses NumPy, and onnxruntime for the extractor from the server.

    device = Device(server=..., worker=light_worker((images, labels)), state_dir=..., export_onnx="never")

Such a device takes part in classstats runs with a fixed extractor, together with devices with PyTorch, and gets the
same two model variants in closed form. Does not import torch or safetensors, and onnx only for an export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fleetdistill.compute.base import Compute, Computed, MakeCompute, faults_decline
from fleetdistill.compute.light_models import (
    FrozenLightModel,
    LightModel,
    SpaceClassifier,
    pack_variants,
    unpack_variants,
)
from fleetdistill.compute.onnx_extractor import OnnxExtractor, extractor_of
from fleetdistill.data import Augmented
from fleetdistill.data.samples import Samples, check_all_data, named, read_samples
from fleetdistill.deployment.quantization import CheckData, check_data_of
from fleetdistill.deployment.settings import Deployment
from fleetdistill.errors import ConfigurationError, DataError, ModelError, StateError, WireError
from fleetdistill.knowledge import CUT, GENERAL, PERSONAL, Array, Kind, Metrics
from fleetdistill.methods import config_of_contract
from fleetdistill.methods.base import Ask
from fleetdistill.methods.classstats.config import SCATTERING
from fleetdistill.methods.classstats.exchange import DeviceStatistics, check_images, statistics_of
from fleetdistill.methods.classstats.private_config import Settings
from fleetdistill.replacement import REPLACED, SPLIT, Replacement, judge, picked
from fleetdistill.training.figures import Counts, allowed, counts_of, metrics_of, place_of
from fleetdistill.version import VERSION
from fleetdistill.wire.codec import KNOWLEDGE_TYPES
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from fleetdistill.training.onnx_file import OnnxReport

METHOD = "classstats"
_MODEL_NAME = "light"
_ROWS_AT_ONCE = 1024
_NO_TRAINING = "a device without PyTorch does not train, so Augmented has no effect; pass the data inside it"
_WITH_TORCH = "use PyTorch on this device: install fleetdistill[train] and pass Device(model=..., data=...)"


def light_worker(data: Any, *, test_data: Any = None, validation_data: Any = None) -> MakeCompute:
    """Returns a `Device(worker=...)` argument for a device without PyTorch.

    Args:
        data: Private training data in any form of `Device(data=...)` except `Augmented`; read again at every ask.
            Inputs are float `[N, *input_shape]`, finite, and in [0, 1] with `features = "scattering"`; labels are
            integers `[N]` in `[0, classes)`.
        test_data: Data on which each round's variants are scored. The scores are sent to the server.
        validation_data: Data that decide whether a new variant replaces the app's model.

    Returns:
        A function of the contract that makes the compute backend. It raises ConfigurationError if the run requires
        PyTorch, and DataError if the data do not fit the run.

    Raises:
        DataError: The data cannot be used.
    """
    check_all_data(data=data, test_data=test_data, validation_data=validation_data)
    if isinstance(data, Augmented):
        raise DataError(_NO_TRAINING)
    return LightWorker(data, test_data, validation_data)


@dataclass(frozen=True, eq=False)
class LightWorker:
    """What `light_worker` returns; its device needs the package `onnx` to export."""

    data: Any
    test_data: Any
    validation_data: Any

    exports_with: ClassVar[str] = "onnx"
    """Package that an export needs."""

    def __call__(self, contract: contract_pb2.Contract) -> LightCompute:
        return LightCompute(contract, self.data, self.test_data, self.validation_data)


@dataclass(frozen=True, eq=False)
class LabelledArrays:
    """Checked labelled samples, whose inputs are read part by part."""

    samples: Samples
    input_shape: tuple[int, ...]

    @property
    def labels(self) -> Array:
        """Labels `[N]` int64."""
        return self.samples.labels

    @property
    def first(self) -> Array:
        """The first inputs, `[min(N, 64), *input_shape]` float32; an input of zeros without samples."""
        return self.samples.first if len(self.samples) else np.zeros((1, *self.input_shape), np.float32)

    def parts(self) -> Iterator[Array]:
        """Yields all inputs in order, `[b, *input_shape]` float32."""
        for start in range(0, len(self.samples), _ROWS_AT_ONCE):
            yield self.samples.rows.read(range(start, min(start + _ROWS_AT_ONCE, len(self.samples))))[0]


class LightCompute(Compute):
    """`fleetdistill.compute.base.Compute` with NumPy; made by `light_worker`.

    Attributes:
        contract: Contract of the run.
        has_state: Whether the device's committed state is loaded.
    """

    def __init__(self, contract: contract_pb2.Contract, data: Any, test_data: Any, validation_data: Any) -> None:
        super().__init__(contract)
        self._config = _config_of(contract)
        self._classes = len(contract.classes)
        given = {"train": data, "test": test_data, SPLIT: validation_data}
        self._given = data
        self._data = {
            split: _load(one, contract, self._config.features, "data" if split == "train" else f"{split}_data")
            for split, one in given.items()
            if one is not None or split == "train"
        }
        self._features: dict[str, Array] = {}
        self._extractor: OnnxExtractor | None = None
        self._statistics = self._new_statistics()
        self._delivered: dict[str, LightModel] = {}
        self._in_use = ""
        self._best = ""  # best variant of the last ask
        self._delivered_accuracy: float | None = None
        self._max_accuracy_drop = 0.0

    def use_deployment(self, deployment: Deployment) -> None:
        """Applies the app's limit for replacement."""
        self._max_accuracy_drop = deployment.max_accuracy_drop

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        """Returns the device's profile for the check-in.

        Extractor and features are copied from the contract: the device can download the contract's extractor file only
        after the check-in, and verifies them then.
        """
        return contract_pb2.DeviceProfile(
            model_name=_MODEL_NAME,
            extractor_fingerprint=self.contract.extractor_fingerprint,
            samples=self.sample_count,
            classes=self._classes,
            input_shape=self.contract.input_shape,
            features=self.contract.features,
            knowledge_types=KNOWLEDGE_TYPES,
            allowed_columns=sorted(allow),
            sdk_version=VERSION,
        )

    def data_digest(self) -> bytes:
        """Returns the SHA-256 of the training data."""
        return self._data["train"].samples.digest

    @property
    def sample_count(self) -> int:
        """Number of training samples; 0 if the app has none yet."""
        return len(self._data["train"].labels)

    def reread_data(self, data: Any) -> bool:
        """Reads the worker's training data again; returns whether a sample was added, removed or changed.

        The argument is not used: a worker has its own data.
        """
        known = self._data["train"]
        self._data["train"] = _load(self._given, self.contract, self._config.features, "data", known)
        if self._data["train"] is known:
            return False
        self._features.pop("train", None)
        before, self._statistics = self._statistics, self._new_statistics()
        self._statistics.restore(before.space, None if before.plan is None else dict(before.plan.to_wire().values))
        return True

    def _new_statistics(self) -> DeviceStatistics:
        labels = self._data["train"].labels
        return statistics_of(self._config, lambda: self._features_of("train"), labels, self._classes)

    # --- extractor

    def wanted_payloads(self) -> Sequence[bytes]:
        """Returns the digest of the extractor file, which includes the run's initial weights."""
        return [self.contract.extractor_file]

    def has_payload(self, sha256: bytes) -> bool:
        """Returns whether the extractor is loaded."""
        return self._extractor is not None

    def take_payload(self, sha256: bytes, parts: Mapping[str, Kind]) -> None:
        """Loads the extractor file. Raises WireError if its features are not those of the contract."""
        extractor = extractor_of(parts, self.contract.input_shape, self.contract.threads)
        declared = {one.name: prod(one.shape) for one in self.contract.features}
        if declared.get(CUT, extractor.features) != extractor.features:
            raise WireError(
                f"the run's extractor file has {extractor.features} features per input, but the contract declares "
                f"{declared[CUT]}; the server's operator must fix the run"
            )
        self._extractor = extractor

    @property
    def _ready_extractor(self) -> OnnxExtractor:
        if self._extractor is None:
            raise ModelError(
                "the run's extractor file has not been downloaded yet; call Device.step or Device.run first"
            )
        return self._extractor

    def _features_of(self, split: str) -> Array:
        """Returns the projected features of a data split, computed once."""
        if split not in self._features:
            extractor = self._ready_extractor
            dimensions = self._config.dimensions_for(tuple(self.contract.input_shape), extractor.features)
            parts = [extractor.projected(part, dimensions) for part in self._data[split].parts()]
            self._features[split] = np.concatenate(parts) if parts else np.zeros((0, dimensions), np.float32)
        return self._features[split]

    # --- state

    def load_initial(self, parts: Mapping[str, Kind]) -> None:
        """Does nothing: the initial weights are in the extractor file."""

    def state(self) -> bytes:
        """Returns the packed space and plan of the fleet; they and the device's data determine the variants."""
        spaces = {} if self._statistics.space is None else {"space": self._statistics.space}
        plan = None if self._statistics.plan is None else dict(self._statistics.plan.to_wire().values)
        return pack_variants({"plan": plan}, spaces, {})

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        """Restores the committed state and the delivered variants, whose accuracy is measured again when needed."""
        try:
            outline, spaces, _ = unpack_variants(saved)
            self._statistics.restore(spaces.get("space"), outline["plan"])
            if delivered is not None:
                kept, self._in_use = _classifiers(delivered)
                self._update_models(kept)
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            raise StateError(f"the saved state is damaged: {error}") from error
        self._delivered_accuracy = None
        self.has_state = True

    def forget_state(self) -> None:
        """Discards changes since the last receipt; the device restores the committed state before the next use."""
        self.has_state = False

    # --- answers

    def first_ask(self) -> Ask:
        """Returns an ask like the first one of the run, made without the server."""
        return Ask(round=1, step="summarise", seed=0)

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        """Returns the device's statistics, or loads the fleet's space and scores the variants made from it."""
        with faults_decline(f"step {ask.step!r}"):
            return self._answer(ask, parts, allow)

    def _answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        if ask.step == "summarise":
            return Computed(self._statistics.summarise(), self.state())
        if ask.step != "learn":
            raise WireError(
                f"a device without PyTorch does not support step {ask.step!r}; update the SDK if the server is newer"
            )
        answer = self._statistics.learn(Ask(round=ask.round, step=ask.step, seed=ask.seed, parts=parts))
        if self._config.predictor == "trained":
            answer = replace(answer, notes={**answer.notes, "closed_form_instead": 1})
        variants = self._variants()
        scores = self._score(variants)
        self._best, replacement = self._judge(scores, list(variants))
        figures = [metric for place, counts in scores.items() for metric in metrics_of(place, counts, allow)]
        figures += allowed(self._statistics.current_variants.figures, allow)
        if replacement.accuracy is not None:
            figures += [replacement.metric(REPLACED), *picked(list(variants), replacement)]
        if "metrics" in allow:
            answer = replace(answer, parts={"metrics": Metrics(metrics=figures)})
        delivered = self._packed_delivery(variants, self._best) if replacement.replaced else None
        return Computed(answer, self.state(), replacement, delivered, scores)

    def _variants(self) -> dict[str, SpaceClassifier]:
        """Returns the variants made in the last step."""
        made = self._statistics.current_variants
        personal = made.personal
        return {
            GENERAL: SpaceClassifier(space=made.general),
            PERSONAL: SpaceClassifier(space=personal.space, temperature=personal.temperature, prior=personal.prior),
        }

    def _score(self, variants: Mapping[str, SpaceClassifier]) -> dict[str, Counts]:
        return {
            place_of(split, name): self._counts(self._model(classifier), split)
            for name, classifier in variants.items()
            for split in self._data
            if split != "train"
        }

    def _counts(self, model: LightModel, split: str) -> Counts:
        return counts_of(model.logits_of_features(self._features_of(split)), self._data[split].labels, self._classes)

    def _model(self, classifier: SpaceClassifier) -> LightModel:
        return LightModel(self._ready_extractor, self.contract.input_shape, self._classes, classifier)

    # --- delivery

    def _judge(self, scores: Mapping[str, Counts], names: Sequence[str]) -> tuple[str, Replacement]:
        """Returns the best variant and whether it replaces the app's model; the first delivery always does."""
        if SPLIT not in self._data:
            return names[0], Replacement(replaced=True, variant=names[0])
        if self._delivered_accuracy is None and self._delivered:
            self._delivered_accuracy = self._counts(self.delivered_model(), SPLIT).accuracy
        accuracies = {name: scores[place_of(SPLIT, name)].accuracy for name in names}
        return judge(accuracies, self._delivered_accuracy, self._max_accuracy_drop)

    def deliver(self, replacement: Replacement) -> None:
        """Replaces or keeps the app's model."""
        if replacement.replaced:
            self._update_models(self._variants())
            self._in_use, self._delivered_accuracy = self._best, replacement.accuracy

    def _update_models(self, variants: Mapping[str, SpaceClassifier]) -> None:
        """Updates the app's models in place; adds missing ones."""
        for name, classifier in variants.items():
            if name in self._delivered:
                self._delivered[name].classifier = classifier
            else:
                self._delivered[name] = self._model(classifier)

    def delivered_model(self) -> LightModel:
        """Returns the variant in use. Raises ModelError before the first delivery."""
        if not self._delivered:
            raise ModelError(
                "this device has no model yet; without PyTorch the first delivery provides it. "
                f"Run the device until its event 'delivered', or check `{GENERAL!r} in device.models`. A run that has "
                "finished delivers none any more: its operator can continue it with more rounds"
            )
        return self._delivered[self._in_use]

    def frozen_model(self) -> FrozenLightModel:
        """Returns a copy of the variant in use, for `Device.predict`. Raises ModelError before the first delivery."""
        return FrozenLightModel(self._model(self.delivered_model().classifier), self.contract.input_shape)

    def accuracy_of(self, delivered: bytes) -> float | None:
        """Returns the accuracy of earlier delivered variants on the validation data; None without such data."""
        kept, in_use = _classifiers(delivered)
        return self._counts(self._model(kept[in_use]), SPLIT).accuracy if SPLIT in self._data else None

    def check_data(self) -> CheckData:
        """Returns the samples that check and calibrate a quantised file."""
        validation = self._data.get(SPLIT)
        return check_data_of(self._data["train"].samples, None if validation is None else validation.samples)

    def delivered_models(self) -> Mapping[str, LightModel]:
        """Returns the delivered variants by name; empty before the first delivery."""
        return dict(self._delivered)

    def delivered_state(self) -> bytes:
        """Returns the packed variants of the app, for `restore`."""
        return self._packed_delivery({}, self._in_use)

    def _packed_delivery(self, variants: Mapping[str, SpaceClassifier], in_use: str) -> bytes:
        kept = {**{name: model.classifier for name, model in self._delivered.items()}, **variants}
        outline = {"in_use": in_use, "temperatures": {name: one.temperature for name, one in kept.items()}}
        priors = {name: one.prior for name, one in kept.items() if one.prior is not None}
        return pack_variants(outline, {name: one.space for name, one in kept.items()}, priors)

    def export(self, path: Path, number: int) -> OnnxReport:
        """Writes the variants as ONNX, from inputs to logits, and compares each on the device's own samples.

        The file at `path` is a copy of the variant in use.

        Raises:
            ExportError: The package `onnx` is not installed, or a file does not give the same outputs as the device.
        """
        from fleetdistill.compute.light_export import export_variants

        metadata = {
            "run": self.contract.run,
            "round": str(number),
            "method": self.contract.method,
            "class_names": ",".join(self.contract.classes),
        }
        self.delivered_model()  # raises ModelError before the first delivery
        return export_variants(self._delivered, self._in_use, path, self._data["train"].first, metadata)


def _classifiers(delivered: bytes) -> tuple[dict[str, SpaceClassifier], str]:
    """Returns the packed variants, and the name of the one in use."""
    outline, spaces, priors = unpack_variants(delivered)
    kept = {
        name: SpaceClassifier(space=spaces[name], temperature=temperature, prior=priors.get(name))
        for name, temperature in outline["temperatures"].items()
    }
    return kept, outline["in_use"]


def _config_of(contract: contract_pb2.Contract) -> Settings:
    """Returns the run's configuration. Raises ConfigurationError if the run requires PyTorch on the device.

    With `predictor = "trained"` the device sends the same statistics and uses closed-form classifiers. With
    `own_network = "taught"` the device has no network to train.
    """
    if contract.method != METHOD:
        raise ConfigurationError(
            f"run {contract.run!r} has method {contract.method!r}; without PyTorch, only {METHOD!r} is supported. To "
            f"take part, {_WITH_TORCH}"
        )
    if not contract.extractor_file:
        raise ConfigurationError(
            f"run {contract.run!r} provides no extractor file: the server could not export it, or is too old. "
            f"Install fleetdistill[onnx] on the server, or {_WITH_TORCH}"
        )
    config = config_of_contract(contract)
    assert isinstance(config, Settings)
    return config


def _load(
    data: Any, contract: contract_pb2.Contract, features: str, name: str, known: LabelledArrays | None = None
) -> LabelledArrays:
    """Reads and checks data for a run; returns `known` if they have not changed."""
    with named(name):
        samples = read_samples(data, None if known is None else known.samples)
        if known is not None and samples is known.samples:
            return known
        if samples.transform is not None:
            raise DataError(_NO_TRAINING)
        samples.check_run(contract.run, tuple(contract.input_shape), len(contract.classes))
        found = LabelledArrays(samples, tuple(contract.input_shape))
        if features == SCATTERING:
            for part in found.parts():
                check_images(part, part.shape[1:])
    if not len(found.labels) and name == f"{SPLIT}_data":
        raise DataError(f"{name} has no samples; pass at least one, or None to accept every round's model")
    return found
