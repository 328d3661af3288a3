"""The compute backend with PyTorch: model, data, the method's device half, delivery and export."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fleetdistill.compute.base import Compute, Computed, faults_decline
from fleetdistill.compute.torch_models import FrozenModel, export_variants
from fleetdistill.control_flow import CONTROL_FLOW
from fleetdistill.data.samples import Samples, named, read_samples
from fleetdistill.deployment.batch import free_size
from fleetdistill.deployment.quantization import CheckData, check_data_of
from fleetdistill.deployment.settings import Deployment
from fleetdistill.errors import (
    CannotAnswer,
    ConfigurationError,
    DataError,
    FleetDistillError,
    KnowledgeError,
    ModelError,
    WireError,
)
from fleetdistill.knowledge import CUT, DELIVER, EMBEDDING, RECEIVED, RESULT, Kind, Metric, Metrics, ModelParameters
from fleetdistill.methods import config_of_contract, device_class
from fleetdistill.methods.base import Ask, DeviceMethod, Local
from fleetdistill.methods.classstats.space_model import MakePredictor, SpaceModel
from fleetdistill.models import USUAL_PREDICTOR
from fleetdistill.replacement import REPLACED, REPLACED_BY_RESULT, SPLIT, Replacement, judge, picked
from fleetdistill.state.sample_ids import SampleIds
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.figures import Counts, allowed, metrics_of, place_of
from fleetdistill.training.local_training import TrainingReport, evaluate
from fleetdistill.training.model import (
    SplitModel,
    check_local_model,
    embedding_tap,
    evaluating,
    fingerprint,
    parameter_count,
    place_of_inputs,
)
from fleetdistill.training.onnx_file import OnnxReport
from fleetdistill.training.own_thread import in_own_thread
from fleetdistill.training.parameters import state_tensors, take_weights
from fleetdistill.training.proxy_set import proxy_data, proxy_of
from fleetdistill.training.randomness import own_randomness
from fleetdistill.training.tensor_data import LazyData, TensorData, tensor_data_of
from fleetdistill.version import VERSION
from fleetdistill.wire.codec import KNOWLEDGE_TYPES
from fleetdistill.wire.v1 import contract_pb2, service_pb2


class TorchCompute(Compute):
    """`Compute` with PyTorch, used by every device without a `worker`. The arguments are those of `Device`.

    Attributes:
        contract: Contract of the run.
        has_state: Whether model and method hold the device's committed state.

    Raises:
        ModelError: The model is invalid or does not fit the run.
        DataError: The data are invalid or do not fit the model or the run.
        ConfigurationError: The run's method cannot be prepared on this device.
    """

    def __init__(
        self,
        contract: contract_pb2.Contract,
        *,
        model: nn.Module | Callable[[], nn.Module],
        model_name: str,
        data: Any,
        test_data: Any,
        validation_data: Any,
        torch_device: str,
        predictor: str | MakePredictor = USUAL_PREDICTOR,
        ids: SampleIds | None = None,
    ) -> None:
        super().__init__(contract)
        self._classes = len(contract.classes)
        self._ids = ids
        self._input_shape = tuple(contract.input_shape)
        self._given = data
        self._samples = _samples_of(data, contract, "data")
        self._data = self._tensors_of(self._samples)
        scored = {
            split: None if given is None else _samples_of(given, contract, f"{split}_data")
            for split, given in (("test", test_data), (SPLIT, validation_data))
        }
        self._validation = scored[SPLIT]
        self._scored = {
            split: None if read is None else tensor_data_of(read, self._input_shape) for split, read in scored.items()
        }
        judging = self._scored[SPLIT]
        if judging is not None and not len(judging):
            raise DataError("validation_data has no samples; pass at least one, or None to accept every round's model")
        self.module = _module_of(model, torch_device)
        probe = self._data.inputs[:2] if len(self._data) else self._data.first
        self._taps = check_local_model(self.module, probe.to(torch_device), self._classes)
        self._model_name = model_name or type(self.module).__name__
        self._config = config_of_contract(contract)
        local = Local(
            model=self.module,
            taps=self._taps,
            data=self._data,
            classes=self._classes,
            torch_device=torch.device(torch_device),
            predictor=predictor,
        )
        self.method = _method_of(contract, self._config, local)
        self._own = self.method.own_variant
        self._delivered: dict[str, nn.Module] = {self._own: copy.deepcopy(self.module)}
        self._in_use = self._own
        self._best = self._own  # best variant of the last ask
        self._received: nn.Module | None = None  # the fleet's model of this round, before the decision
        self._decided: Mapping[str, nn.Module] = {}  # the variants of the last decision
        self._delivered_accuracy: float | None = None
        self._deployment = Deployment()

    def use_deployment(self, deployment: Deployment) -> None:
        """Applies the app's settings for replacement and export."""
        self._deployment = deployment

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        """Returns the device's profile for the check-in."""
        return contract_pb2.DeviceProfile(
            model_name=self._model_name[:128],
            parameters=parameter_count(self.module),
            model_fingerprint=fingerprint(self.module),
            extractor_fingerprint=fingerprint(self._taps.extractor),
            samples=len(self._data),
            classes=self._classes,
            input_shape=list(self._data.inputs.shape[1:]),
            features=[contract_pb2.NamedShape(name=name, shape=shape) for name, shape in self._shapes().items()],
            knowledge_types=KNOWLEDGE_TYPES,
            allowed_columns=sorted(allow),
            sdk_version=VERSION,
            proxy_digest=self.contract.proxy_digest,
        )

    def data_digest(self) -> bytes:
        """Returns the SHA-256 of the training data."""
        return self._samples.digest

    @property
    def sample_count(self) -> int:
        """Number of training samples; 0 if the app has none yet."""
        return len(self._samples)

    def reread_data(self, data: Any) -> bool:
        """Reads the training data again; returns whether a sample was added, removed or changed.

        The method is made again for new samples and takes over its state; the model stays the same object.
        """
        given = self._given if data is None else data  # None if an app's worker is derived from this class
        read = _samples_of(given, self.contract, "data", self._samples)
        self._given = given
        if read is self._samples:
            return False
        self._samples, self._data = read, self._tensors_of(read)
        state = self.method.state_dict()
        local = replace(self.method.local, data=self._data)
        self.method = _method_of(self.contract, self._config, local)
        self.method.load_state_dict(state)
        return True

    def _tensors_of(self, samples: Samples) -> TensorData | LazyData:
        ids = self._ids
        make_ids = None if ids is None else cache(lambda: ids.of(samples.digests))
        return tensor_data_of(samples, self._input_shape, make_ids)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of one sample's features: at the cut, at every possible cut, and of the embedding."""
        probe = self._data.first.to(place_of_inputs(self.module)[0])
        with evaluating(self.module), torch.no_grad():
            at_cut = tuple(self._taps.features(probe).shape[1:])
            tap = embedding_tap(self.module)
            last = {EMBEDDING: tuple(tap(probe).shape[1:])} if tap is not None else {}
        stages = self.module.stage_shapes(probe.shape[1:]) if isinstance(self.module, SplitModel) else {}
        return {**stages, **last, CUT: at_cut}

    # --- state

    def load_initial(self, parts: Mapping[str, Kind]) -> None:
        """Loads the initial weights of the run into the model that trains; the app's model keeps its own.

        The initial weights may be random, and the app may have trained its model.
        """
        initial = parts.get("initial")
        if not isinstance(initial, ModelParameters):
            raise WireError("the run's initial weights are not model parameters; update the SDK or the server")
        target = self._taps.extractor if initial.scope == "extractor" else self.module
        take_weights(target, initial)
        self.has_state = True

    def wanted_payloads(self) -> Sequence[bytes]:
        """Returns the digests of the run's initial weights and proxy set; omits those that the run does not have."""
        return [one for one in (self.contract.initial_weights, self.contract.proxy_digest) if one]

    def has_payload(self, sha256: bytes) -> bool:
        """Returns whether the run's proxy set is loaded; no other payload remains in use."""
        return self.method.local.proxy is not None

    def take_payload(self, sha256: bytes, parts: Mapping[str, Kind]) -> None:
        """Loads the run's proxy set, already verified against its digest."""
        proxy = proxy_data(proxy_of(parts), self.contract.input_shape, self._classes)
        local, digest = self.method.local, self.contract.proxy_digest
        self.method.local = replace(local, proxy=proxy, proxy_digest=digest)

    def state(self) -> bytes:
        """Returns the state of model and method as one safetensors document."""
        received = {} if self._received is None else {"received": self._received.state_dict()}
        return pack_state({"model": self.module.state_dict(), "method": self.method.state_dict(), **received})

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        """Restores the committed state and the delivered model, whose accuracy is measured again when needed."""
        state = unpack_state(saved)
        try:
            self.module.load_state_dict(state["model"])
            self.method.load_state_dict(state["method"])
            self._received = None
            if "received" in state:
                self._received = copy.deepcopy(self.module)
                self._received.load_state_dict(state["received"])
            self._restore_delivered(state["model"], {} if delivered is None else unpack_state(delivered))
        except (RuntimeError, ValueError, KeyError) as error:
            raise ModelError(f"the saved state does not fit the app's model: {error}; use a fresh state_dir") from error
        self._delivered_accuracy = None
        self.has_state = True

    def _restore_delivered(self, first: Any, saved: Mapping[str, Any]) -> None:
        """Restores the delivered variants; before the first delivery the app has the model of the state."""
        kept = {self._own: saved.get("model", first), **saved.get("further", {})}
        models = {self._own: self.module, **self.method.variants()}
        self._delivered = self._copies({name: models[name] for name in kept})
        for name, state in kept.items():
            self._delivered[name].load_state_dict(state)
        self._in_use = saved.get("in_use", self._own)

    def _copies(self, models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Returns the app's models: delivered ones are reused, others are copied, with shared tensors still shared."""
        memo: dict[int, Any] = {}
        for name in models.keys() & self._delivered.keys():
            model, delivered = models[name], self._delivered[name]
            memo[id(model)] = delivered
            memo |= {id(old): new for old, new in zip(state_tensors(model), state_tensors(delivered), strict=True)}
        return copy.deepcopy(dict(models), memo)

    def forget_state(self) -> None:
        """Discards training since the last receipt; the device restores the committed state before the next use."""
        self.has_state = False

    # --- answers

    def first_ask(self) -> Ask:
        """Returns an ask like the first one of the run, made without the server."""
        return self.method.first_ask()

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        """Runs the handler with the ask's seed and the run's thread count; scores the models if the round ends.

        The work is done in a separate thread with separate random numbers, so that torch's settings in the app's
        threads, and the app's random numbers, are not affected.
        """
        with faults_decline(f"step {ask.step!r}"):
            return in_own_thread(lambda: self._answer(ask, parts, allow), self.contract.threads)

    def _answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        self.method.trained, self.method.figures = None, ()
        asked = Ask(round=ask.round, step=ask.step, seed=ask.seed, parts=parts)
        with own_randomness(ask.seed):
            received, fleet_model = self._score_received(asked)
            if fleet_model is not None and self._scored[SPLIT] is not None:
                self._received = fleet_model
        with own_randomness(ask.seed):  # independent of what scoring has drawn
            answer = self.method.handle(asked)
            measured, allowed_metrics = ask.step in self.method.metrics_steps(self.method.config), "metrics" in allow
            models = self.method.variants()
            scores = received | (self._score(models) if measured else {})
            replacement = self._judge(models, scores) if measured or ask.step == DELIVER else None
        figures: list[Metric] = [
            metric for place, counts in scores.items() for metric in metrics_of(place, counts, allow)
        ]
        figures += allowed(self.method.figures, allow)
        if (trained := self.method.trained) is not None and trained.samples_seen:
            figures.append(_training_loss(trained))
        if replacement is not None and replacement.accuracy is not None:
            figures.append(replacement.metric(REPLACED if measured else REPLACED_BY_RESULT))
            figures += picked(models, replacement)
        if figures and allowed_metrics:
            answer = replace(answer, parts={**answer.parts, "metrics": Metrics(metrics=figures)})
        replaced = replacement is not None and replacement.replaced
        delivered = self._delivery(self._decided, self._best) if replaced else None
        return Computed(answer, self.state(), replacement, delivered, scores)

    def _score_received(self, ask: Ask) -> tuple[dict[str, Counts], nn.Module | None]:
        """Returns the scores of the fleet model in the ask, and the model; empty and None if it cannot be scored."""
        wanted = any(data is not None for data in self._scored.values())
        model = self.method.fleet_model(ask) if wanted else None
        if model is None:
            return {}, None
        try:
            return self._score({RESULT if ask.step == DELIVER else RECEIVED: model}), model
        except KnowledgeError:  # the model has diverged; the device can answer anyway
            return {}, None

    def _score(self, models: Mapping[str, nn.Module]) -> dict[str, Counts]:
        return {place: counts for name, model in models.items() for place, counts in self._score_model(name, model)}

    def _score_model(self, name: str, model: nn.Module) -> list[tuple[str, Counts]]:
        """Returns the scores of a model on the app's test and validation data, by place."""
        splits = {split: data for split, data in self._scored.items() if data is not None}
        return [(place_of(split, name), _counts(model, data, self._classes)) for split, data in splits.items()]

    # --- delivery

    def _judge(self, models: Mapping[str, nn.Module], scores: Mapping[str, Counts]) -> Replacement:
        """Returns the decision about the best variant: it replaces the app's model unless its accuracy is lower.

        With a single variant, the model that the device received in this round takes part.
        """
        received, self._received = self._received if len(models) == 1 else None, None
        data, self._best, self._decided = self._scored[SPLIT], next(iter(models)), models
        if data is None:
            return Replacement(replaced=True, variant=self._best if len(models) > 1 else "")
        accuracies = {
            name: (scores.get(place_of(SPLIT, name)) or _counts(model, data, self._classes)).accuracy
            for name, model in models.items()
        }
        if self._delivered_accuracy is None:  # the app's own model, or one delivered before a restart
            self._delivered_accuracy = _counts(self.delivered_model(), data, self._classes).accuracy
        of_received = None
        if received is not None:
            scored = scores.get(place_of(SPLIT, RECEIVED)) or scores.get(place_of(SPLIT, RESULT))
            of_received = (scored or _counts(received, data, self._classes)).accuracy  # received in an earlier step
        drop = self._deployment.max_accuracy_drop
        self._best, replacement = judge(accuracies, self._delivered_accuracy, drop, of_received)
        if received is not None and replacement.received:
            self._decided = {self._best: received}
        return replacement

    def deliver(self, replacement: Replacement) -> None:
        """Replaces or keeps the app's model."""
        if replacement.replaced:
            self._take_delivery(self._best)
            self._delivered_accuracy = replacement.accuracy
        self._decided = {}

    def _take_delivery(self, in_use: str) -> None:
        """Copies the decided variants to the app's models, in place where the app may already have a reference."""
        models = self._decided
        if not models.keys() <= self._delivered.keys():
            self._delivered |= self._copies(models)
        for name, model in models.items():
            self._delivered[name].load_state_dict(model.state_dict())
        self._in_use = in_use

    def delivered_model(self) -> nn.Module:
        """Returns the app's model, in eval mode."""
        return self._delivered[self._in_use].eval()

    def frozen_model(self) -> FrozenModel:
        """Returns a copy of the app's model, for `Device.predict`."""
        shape = self.contract.input_shape
        return FrozenModel(self.delivered_model(), free_size(shape) if self._deployment.dynamic_size else shape)

    def accuracy_of(self, delivered: bytes) -> float | None:
        """Returns the accuracy of an earlier delivered model on the validation data; None without such data."""
        data = self._scored[SPLIT]
        saved = unpack_state(delivered)
        if data is None:
            return None
        in_use = saved["in_use"]
        model = copy.deepcopy(self._delivered[in_use])
        model.load_state_dict(saved["model"] if in_use == self._own else saved["further"][in_use])
        return _counts(model, data, self._classes).accuracy

    def check_data(self) -> CheckData:
        """Returns the samples that check and calibrate a quantised file."""
        return check_data_of(self._samples, self._validation)

    def delivered_models(self) -> Mapping[str, nn.Module]:
        """Returns all variants of the app's model by name, in eval mode."""
        return {name: model.eval() for name, model in self._delivered.items()}

    def delivered_state(self) -> bytes:
        """Returns the packed models of the app, for `restore`."""
        return self._delivery({}, self._in_use)

    def _delivery(self, models: Mapping[str, nn.Module], in_use: str) -> bytes:
        """Returns the packed models of the app, with `models` replacing those of equal names."""
        states = {name: model.state_dict() for name, model in {**self._delivered, **models}.items()}
        own = states.pop(self._own)
        return pack_state({"model": own, "further": states, "in_use": in_use})

    def export(self, path: Path, number: int) -> OnnxReport:
        """Writes the delivered models as ONNX and compares each with PyTorch on the device's own samples.

        If there are several variants, each is `VARIANT.onnx`, and `path` is a copy of the one in use.

        Returns:
            Report on the file at `path`, with the largest difference over all variants.

        Raises:
            ExportError: A file does not give the same outputs as its model.
        """
        metadata = {
            "run": self.contract.run,
            "round": str(number),
            "method": self.contract.method,
            "class_names": ",".join(self.contract.classes),
        }
        samples = torch.from_numpy(self._samples.first) if len(self._samples) else self._data.first
        return export_variants(self._delivered, self._in_use, path, samples, metadata, self._deployment)


def own_frozen_model(model: Callable[[], nn.Module], torch_device: str) -> FrozenModel:
    """Returns a copy of the app's own model, for `Device.predict` before the device knows its run.

    Raises:
        ModelError, ConfigurationError: As `TorchCompute`.
    """
    return FrozenModel(_module_of(model, torch_device), None)


def _module_of(model: nn.Module | Callable[[], nn.Module], torch_device: str) -> nn.Module:
    """Returns the app's module on its torch device.

    Raises:
        ModelError: The app's function does not return a module.
        ConfigurationError: This machine does not have the torch device.
    """
    module = model if isinstance(model, nn.Module) else _made_by(model)
    if not isinstance(module, nn.Module):
        raise ModelError(f"the function model returned {type(module).__name__}, expected a torch.nn.Module")
    try:
        return module.to(torch_device)
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError in builds without CUDA
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"torch_device {torch_device!r} cannot be used: {reason}") from error


def _made_by(function: Callable[[], nn.Module]) -> nn.Module:
    try:
        return function()
    except FleetDistillError:
        raise
    except (Exception, *CONTROL_FLOW) as error:
        raise ModelError(
            f"model: the function raised {type(error).__name__}: {error}; it must return a torch.nn.Module"
        ) from error


def _method_of(contract: contract_pb2.Contract, config: Any, local: Local) -> DeviceMethod:
    """Makes the device half. Raises ConfigurationError if that fails, for example for lack of memory."""
    try:
        with faults_decline(f"preparing method {contract.method!r}"), own_randomness(0):
            return device_class(contract.method)(config, local)
    except CannotAnswer as error:
        raise ConfigurationError(f"this device cannot take part in run {contract.run!r}: {error}") from error


def _counts(model: nn.Module, data: TensorData | LazyData, classes: int) -> Counts:
    """Returns the scores of a model; uses cached features if its extractor is fixed."""
    if isinstance(model, SpaceModel):
        rows = torch.from_numpy(np.array(model.fixed.of(data.inputs)))
        return evaluate(model.above, TensorData(rows, data.labels), classes)
    return evaluate(model, data, classes)


def _samples_of(data: Any, contract: contract_pb2.Contract, name: str, known: Samples | None = None) -> Samples:
    """Reads and checks data for a run; returns `known` if they have not changed."""
    with named(name):
        read = read_samples(data, known)
        read.check_run(contract.run, tuple(contract.input_shape), len(contract.classes))
    return read


def _training_loss(trained: TrainingReport) -> Metric:
    """Returns the mean training loss over the samples seen; with distillation, the sum of all loss terms."""
    seen = trained.samples_seen
    return Metric(name="loss", split="train", sum=trained.mean_loss * seen, count=seen)
