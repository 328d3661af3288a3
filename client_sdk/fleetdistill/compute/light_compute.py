"""The compute backend without PyTorch: uses NumPy, and onnxruntime for the extractor from the server.

    device = Device(server=..., worker=light_worker((images, labels)), state_dir=...)

Such a device takes part in classstats runs with a fixed extractor, together with devices with PyTorch, and gets the
same two model variants in closed form. Does not import torch or safetensors, and onnx only for an export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fleetdistill.compute.base import Computed, MakeCompute, faults_decline
from fleetdistill.compute.delivery import DeliveringCompute
from fleetdistill.compute.light_models import (
    FrozenLightModel,
    LightModel,
    SpaceClassifier,
    pack_variants,
    unpack_variants,
)
from fleetdistill.compute.onnx_extractor import OnnxExtractor, extractor_of
from fleetdistill.data import Augmented
from fleetdistill.data.samples import Samples, check_splits
from fleetdistill.data.splits import Splits, splits_of
from fleetdistill.errors import ConfigurationError, DataError, ModelError, StateError, WireError
from fleetdistill.knowledge import CUT, GENERAL, PERSONAL, Array, Kind
from fleetdistill.methods import config_of_contract
from fleetdistill.methods.base import Ask
from fleetdistill.methods.classstats.config import SCATTERING, SpaceConfig
from fleetdistill.methods.classstats.exchange import REFINE, DeviceStatistics, SentStatistics, check_images
from fleetdistill.methods.classstats_private.exchange import PrivateStatistics
from fleetdistill.methods.classstats_secure.exchange import SecureStatistics, SummedStatistics
from fleetdistill.training.figures import Counts, allowed, counts_of
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from fleetdistill.training.onnx_file import OnnxReport

METHODS: Mapping[str, type[DeviceStatistics]] = MappingProxyType(
    {
        "classstats": SentStatistics,
        "classstats_private": PrivateStatistics,
        "classstats_secure": SecureStatistics,
        "classstats_summed": SummedStatistics,
    }
)
"""Statistics that the device sends, by the methods that it can take part in."""
_MODEL_NAME = "light"
_ROWS_AT_ONCE = 1024
_NO_TRAINING = "a device without PyTorch does not train, so Augmented has no effect; pass the data inside it"
_WITH_TORCH = "use PyTorch on this device: install fleetdistill[train] and pass Device(model=..., data=...)"


def light_worker(data: Any) -> MakeCompute:
    """Returns a `Device(worker=...)` argument for a device without PyTorch.

    Args:
        data: Private training data in any form of `Device(data=...)` except `Augmented`; read again at every ask.
            Inputs are float `[N, *input_shape]`, finite, and in [0, 1] with `features = "scattering"`; labels are
            integers `[N]` in `[0, classes)`.
            Or `fleetdistill.data.Splits` of them.

    Returns:
        A function of the contract that makes the compute backend. It raises ConfigurationError if the run requires
        PyTorch, and DataError if the data do not fit the run.

    Raises:
        DataError: The data cannot be used.
    """
    splits = splits_of(data)
    check_splits(splits)
    if isinstance(splits.data, Augmented):
        raise DataError(_NO_TRAINING)
    return LightWorker(splits)


@dataclass(frozen=True, eq=False)
class LightWorker:
    """What `light_worker` returns; its device needs the package `onnx` to export."""

    data: Splits

    exports_with: ClassVar[str] = "onnx"
    """Package that an export needs."""

    def __call__(self, contract: contract_pb2.Contract) -> LightCompute:
        return LightCompute(contract, self.data)


class LightCompute(DeliveringCompute[LightModel]):
    """`Compute` with NumPy; made by `light_worker`."""

    def __init__(self, contract: contract_pb2.Contract, data: Splits) -> None:
        self._config = _config_of(contract)
        super().__init__(contract, _MODEL_NAME, data)
        self._features: dict[str, Array] = {}
        self._extractor: OnnxExtractor | None = None
        self._statistics = self._new_statistics()

    def _check_samples(self, samples: Samples) -> None:
        if samples.transform is not None:
            raise DataError(_NO_TRAINING)
        super()._check_samples(samples)
        if self._config.features == SCATTERING:
            for part in _parts(samples):
                check_images(part, part.shape[1:])

    def _describe_model(self, profile: contract_pb2.DeviceProfile) -> None:
        """Copies extractor and features from the contract.

        The device can download the contract's extractor file only after the check-in, and verifies them then.
        """
        profile.extractor_fingerprint = self.contract.extractor_fingerprint
        profile.features.extend(self.contract.features)

    def _use_samples(self) -> None:
        self._features.pop("train", None)
        before, self._statistics = self._statistics, self._new_statistics()
        self._statistics.restore(before.space, None if before.plan is None else dict(before.plan.to_wire().values))

    def _new_statistics(self) -> DeviceStatistics:
        features = partial(self._features_of, "train")
        return METHODS[self.contract.method](self._config, features, self._samples.labels, self._classes)

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
        declared = {feature.name: prod(feature.shape) for feature in self.contract.features}
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
        """Returns the projected features of a data split, `[n, D]` float32, computed once."""
        if split not in self._features:
            extractor = self._ready_extractor
            dimensions = self._config.dimensions_for(tuple(self.contract.input_shape), extractor.features)
            samples = self._samples if split == "train" else self._scored[split]
            parts = [extractor.projected(part, dimensions) for part in _parts(samples)]
            self._features[split] = np.concatenate(parts) if parts else np.zeros((0, dimensions), np.float32)
        return self._features[split]

    # --- state

    def state(self) -> bytes:
        """Returns the packed space and plan of the fleet; they and the device's data determine the variants."""
        spaces = {} if self._statistics.space is None else {"space": self._statistics.space}
        plan = None if self._statistics.plan is None else dict(self._statistics.plan.to_wire().values)
        return pack_variants({"plan": plan}, spaces, {})

    def _restore(self, saved: bytes, delivered: bytes | None) -> None:
        try:
            outline, spaces, _ = unpack_variants(saved)
            self._statistics.restore(spaces.get("space"), outline["plan"])
            if delivered is not None:
                classifiers, self._in_use = _classifiers(delivered)
                self._update_delivered({name: self._model(one) for name, one in classifiers.items()})
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            raise StateError(f"the saved state is damaged: {error}") from error

    # --- answers

    def first_ask(self) -> Ask:
        """Returns an ask like the first one of the run, made without the server."""
        return self._statistics.first_ask()

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        """Returns the device's statistics, or loads the fleet's space and scores the variants made from it."""
        with faults_decline(f"step {ask.step!r}"):
            return self._answer(ask, parts, allow)

    def _answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        if ask.step in self._statistics.sending_steps:
            return Computed(self._statistics.send(ask.step), self.state())
        asked = Ask(round=ask.round, step=ask.step, seed=ask.seed, parts=parts)
        if ask.step == REFINE and isinstance(self._statistics, SentStatistics):
            return Computed(self._statistics.refine(asked), self.state())
        if ask.step != "learn":
            raise WireError(
                f"a device without PyTorch does not support step {ask.step!r}; update the SDK if the server is newer"
            )
        answer = self._statistics.learn(asked)
        if self._config.predictor == "trained":
            answer = replace(answer, notes={**answer.notes, "closed_form_instead": 1})
        variants = self._variants()
        scores = self._score(variants)
        replacement = self._judge(variants, scores)
        figures = allowed(self._statistics.current_variants.figures, allow)
        return self._complete(answer, allow, scores, figures, replacement)

    def _variants(self) -> dict[str, LightModel]:
        """Returns the variants made in the last step."""
        made = self._statistics.current_variants
        personal = made.personal
        classifiers = {
            GENERAL: SpaceClassifier(space=made.general),
            PERSONAL: SpaceClassifier(space=personal.space, temperature=personal.temperature, prior=personal.prior),
        }
        return {name: self._model(classifier) for name, classifier in classifiers.items()}

    def _counts(self, model: LightModel, split: str) -> Counts:
        logits = model.logits_of_features(self._features_of(split))
        return counts_of(logits, self._scored[split].labels, self._classes)

    def _model(self, classifier: SpaceClassifier) -> LightModel:
        return LightModel(self._ready_extractor, self.contract.input_shape, self._classes, classifier)

    # --- delivery

    def _update_delivered(self, models: Mapping[str, LightModel]) -> None:
        for name, model in models.items():
            if name in self._delivered:
                self._delivered[name].classifier = model.classifier
            else:
                self._delivered[name] = model

    def delivered_model(self) -> LightModel:
        """Returns the variant in use. Raises ModelError before the first delivery."""
        if not self._delivered:
            raise ModelError(
                "this device has no model yet; without PyTorch the first delivery provides it. "
                f"Run the device until its event 'delivered', or check `{GENERAL!r} in device.models`. A run that has "
                "finished delivers none any more: its operator can continue it with more rounds"
            )
        return super().delivered_model()

    def frozen_model(self) -> FrozenLightModel:
        """Returns a copy of the variant in use, for `Device.predict`. Raises ModelError before the first delivery."""
        return FrozenLightModel(self._model(self.delivered_model().classifier), self.contract.input_shape)

    def _pack(self, models: Mapping[str, LightModel], in_use: str) -> bytes:
        classifiers = {name: model.classifier for name, model in models.items()}
        outline = {"in_use": in_use, "temperatures": {name: one.temperature for name, one in classifiers.items()}}
        priors = {name: one.prior for name, one in classifiers.items() if one.prior is not None}
        return pack_variants(outline, {name: one.space for name, one in classifiers.items()}, priors)

    def unpack_model(self, delivered: bytes) -> LightModel:
        classifiers, in_use = _classifiers(delivered)
        return self._model(classifiers[in_use])

    def _export(self, model: LightModel, path: Path, metadata: Mapping[str, str]) -> OnnxReport:
        from fleetdistill.compute.light_models import export_model

        return export_model(model, path, self._first_inputs, metadata)


def _classifiers(delivered: bytes) -> tuple[dict[str, SpaceClassifier], str]:
    """Returns the packed variants, and the name of the one in use."""
    outline, spaces, priors = unpack_variants(delivered)
    kept = {
        name: SpaceClassifier(space=spaces[name], temperature=temperature, prior=priors.get(name))
        for name, temperature in outline["temperatures"].items()
    }
    return kept, outline["in_use"]


def _config_of(contract: contract_pb2.Contract) -> SpaceConfig:
    """Returns the run's configuration. Raises ConfigurationError if the run requires PyTorch on the device.

    With `predictor = "trained"` the device sends the same statistics and uses closed-form classifiers. With
    `own_network = "taught"` the device has no network to train.
    """
    if contract.method not in METHODS:
        raise ConfigurationError(
            f"run {contract.run!r} has method {contract.method!r}; without PyTorch, only "
            f"{', '.join(METHODS)} are supported. To take part, {_WITH_TORCH}"
        )
    if not contract.extractor_file:
        raise ConfigurationError(
            f"run {contract.run!r} provides no extractor file, because its server is too old. Its operator must update "
            f"it, or {_WITH_TORCH}"
        )
    config = config_of_contract(contract)
    assert isinstance(config, SpaceConfig)
    return config


def _parts(samples: Samples) -> Iterator[Array]:
    """Yields all inputs in order, `[b, *input_shape]` float32."""
    for start in range(0, len(samples), _ROWS_AT_ONCE):
        yield samples.rows.read(range(start, min(start + _ROWS_AT_ONCE, len(samples))))[0]
