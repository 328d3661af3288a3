"""The compute backend with PyTorch: model, data, the method's device half, delivery and export.

It computes in a thread of its own (`in_own_thread`), whose settings of torch are separate from the app's.
"""

from __future__ import annotations

import copy
import logging
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill.compute.base import FAULTS, Computed, faults_decline
from fleetdistill.compute.delivery import DeliveringCompute
from fleetdistill.control_flow import CONTROL_FLOW
from fleetdistill.data.samples import Samples
from fleetdistill.data.splits import Splits
from fleetdistill.deployment.batch import check_batch, free_size
from fleetdistill.errors import (
    CannotAnswer,
    ConfigurationError,
    FleetDistillError,
    KnowledgeError,
    ModelError,
    WireError,
    WorkInterrupted,
)
from fleetdistill.interruption import check_with
from fleetdistill.knowledge import CUT, DELIVER, EMBEDDING, RECEIVED, RESULT, Kind, Metric, ModelParameters
from fleetdistill.methods import config_of_contract, device_class
from fleetdistill.methods.base import Ask, DeviceMethod, Local
from fleetdistill.methods.classstats.space_model import SpaceModel
from fleetdistill.models.pretrained import images_of
from fleetdistill.models.torch_model import TorchModel
from fleetdistill.progress import redirect
from fleetdistill.replacement import REPLACED, REPLACED_BY_RESULT, SPLIT, Replacement
from fleetdistill.state.sample_ids import SampleIds
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.figures import Counts, allowed, place_of
from fleetdistill.training.local_training import UNMEASURED_ROWS, TrainingReport, evaluate, rows_at_once
from fleetdistill.training.model import (
    SplitModel,
    check_local_model,
    display_name,
    embedding_tap,
    evaluating,
    fingerprint,
    parameter_count,
    place_of_inputs,
)
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.onnx_file import OnnxReport
from fleetdistill.training.onnx_graphs import Graphs
from fleetdistill.training.parameters import model_parameters, state_tensors, take_weights
from fleetdistill.training.proxy_set import proxy_data, proxy_of
from fleetdistill.training.randomness import is_alone, own_randomness
from fleetdistill.training.tensor_data import LazyData, TensorData, tensor_data_of
from fleetdistill.wire.codec import encode
from fleetdistill.wire.v1 import contract_pb2, service_pb2

__all__ = ["TorchCompute"]

T = TypeVar("T")

logger = logging.getLogger(__name__)
_ROWS_CHECKED = 256
_setting_threads = threading.Lock()


def in_own_thread(function: Callable[[], T], threads: int) -> T:
    """Returns the result of a function that runs in a new thread with a number of compute threads of its own.

    In a block of `without_app`, the function runs in the calling thread with that thread's settings.

    The thread also has torch's default modes: gradients enabled, no inference mode, autocast or default device. Other
    threads keep their settings.

    Args:
        function: Function of the SDK or the app. It runs in a copy of the current context; the calling thread receives
            its reports of progress.
        threads: Number of threads that an operation of torch may use, at least 1.

    Raises:
        BaseException: The exception of `function`. If the calling thread is interrupted, the function ends at its next
            `check_may_continue`, and the interruption is raised.
    """
    if is_alone():
        with torch.enable_grad():
            return function()
    result: Future[T] = Future()
    abandoned = threading.Event()
    reports: SimpleQueue[tuple[str, float] | None] = SimpleQueue()  # None at the end
    receiver = redirect(lambda phase, fraction: reports.put((phase, fraction)))

    def check() -> None:
        if abandoned.is_set():
            raise WorkInterrupted("the calling thread was interrupted", "interrupted")

    def work() -> None:
        try:
            set_threads(threads)
            with check_with(check):
                result.set_result(function())
        except BaseException as error:
            result.set_exception(error)
        finally:
            reports.put(None)

    thread = threading.Thread(target=copy_context().run, args=(work,), name="fleetdistill compute", daemon=True)
    thread.start()
    try:
        while (report := reports.get()) is not None:
            receiver(*report)
        return result.result()
    except BaseException:
        abandoned.set()
        thread.join()
        raise
    finally:
        redirect(receiver)


def set_threads(threads: int) -> None:
    """Sets the number of compute threads of the calling thread, which must be new.

    torch has a setting for each thread, and a common one for threads that have not used torch yet. `set_num_threads`
    changes both; another thread changes the common one back.
    """
    with _setting_threads:
        common = torch.get_num_threads()  # of a new thread; it also prevents that torch applies the common one later
        if threads != common:
            torch.set_num_threads(threads)
            restoring = threading.Thread(target=torch.set_num_threads, args=(common,))
            restoring.start()
            restoring.join()


class FrozenModel:
    """Copies a torch model; call it with a batch of inputs. Thread-safe if the module's `forward` is.

    Args:
        model: Maps inputs `[batch, *input_shape]` to logits `[batch, classes]`.
        input_shape: Shape of one input, with None where any size is accepted, as with `Deployment(dynamic_size=True)`;
            None before the device knows its run.
        first: First training inputs, whose shape is expected before that of the run is known; None if they are unknown.
    """

    def __init__(
        self, model: nn.Module, input_shape: Sequence[int | None] | None, first: np.ndarray | None = None
    ) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._device, self._dtype = place_of_inputs(self._model)
        self._input_shape = None if input_shape is None else tuple(input_shape)
        self._trained_on = None if first is None or not len(first) else list(first.shape[1:])

    def __call__(self, inputs: Any) -> Any:
        """Returns logits `[batch, classes]` float32, of the type of the inputs: NumPy array or torch tensor."""
        check_batch(inputs, self._trained_on if self._input_shape is None else self._input_shape)
        batch = inputs if isinstance(inputs, torch.Tensor) else torch.from_numpy(_plain(inputs))
        with torch.no_grad():
            try:
                logits = self._in_parts(batch.to(self._device, self._dtype))
            except FAULTS as error:
                shape = list(batch.shape)
                reason = str(error).strip().split("\n")[0]
                text = f"the model cannot process a batch of shape {shape}: {reason}{self._advice()}"
                raise ModelError(text) from error
        if not isinstance(logits, torch.Tensor):
            raise ModelError(f"the model returns a {type(logits).__name__}, expected a tensor [batch, classes]")
        made = logits.to(batch.device, torch.float32)
        return made if isinstance(inputs, torch.Tensor) else made.numpy()

    def _advice(self) -> str:
        """Returns what to do about inputs that the app's own model does not take, before the run's shape is known."""
        if self._input_shape is not None:
            return ""
        if self._trained_on is None:
            return "; pass [samples, *input_shape], as the model's first layer takes it"
        return "; the training data have this shape, too: reshape both as the model takes them, or change the model"

    def _in_parts(self, inputs: Tensor) -> Tensor:
        if len(inputs) <= UNMEASURED_ROWS:
            return cast(Tensor, self._model(inputs))
        parts = inputs.split(rows_at_once(self._model, self._model, inputs[:2]))
        return torch.cat([self._model(part) for part in parts])


def _plain(inputs: np.ndarray) -> np.ndarray:
    """Returns an array that torch can use without a copy or a warning: positive strides, native order, writeable."""
    dtype = np.float32 if inputs.dtype.itemsize > 8 else inputs.dtype.newbyteorder("=")
    return np.require(inputs, dtype, ["C", "W"])


class TorchCompute(DeliveringCompute[nn.Module]):
    """`Compute` with PyTorch, used by every device without a `worker`.

    Args:
        contract: Contract of the run.
        model: The app's model.
        data: Training data, and data on which the variants are scored.
        ids: Ids of the training samples; None for their positions.

    Attributes:
        module: The model that trains.
        method: The device half of the run's method.
        graphs: Graphs that devices of one process share for their exports; None to trace each model.

    Raises:
        ModelError: The model is invalid or does not fit the run.
        DataError: The data are invalid or do not fit the model or the run.
        ConfigurationError: The run's method cannot be prepared on this device.
    """

    def __init__(
        self,
        contract: contract_pb2.Contract,
        model: TorchModel,
        data: Splits,
        ids: SampleIds | None = None,
    ) -> None:
        super().__init__(contract, model.name, data)
        self._ids = ids
        self._data = self._tensors_of(self._samples)
        self._scored_tensors = {
            split: tensor_data_of(samples, self._input_shape) for split, samples in self._scored.items()
        }
        self.module = module_on(model.module, model.torch_device)
        probe = self._data.inputs[:2] if len(self._data) else self._data.first
        self._taps = check_local_model(self.module, probe.to(model.torch_device), self._classes)
        _warn_of_range(self._taps.extractor, self._data)
        self._model_name = model.name or display_name(self.module)
        self._config = config_of_contract(contract)
        local = Local(
            model=self.module,
            taps=self._taps,
            data=self._data,
            classes=self._classes,
            torch_device=torch.device(model.torch_device),
            predictor=model.predictor,
        )
        self.method = _method_of(contract, self._config, local)
        self._own = self._in_use = self.method.own_variant
        self._delivered = {self._own: copy.deepcopy(self.module)}
        self.graphs: Graphs | None = None
        self._received: nn.Module | None = None  # the fleet's model of this round, before the decision

    def _describe_model(self, profile: contract_pb2.DeviceProfile) -> None:
        profile.parameters = parameter_count(self.module)
        profile.model_fingerprint = fingerprint(self.module)
        profile.extractor_fingerprint = fingerprint(self._taps.extractor)
        profile.features.extend(
            contract_pb2.NamedShape(name=name, shape=shape) for name, shape in self._shapes().items()
        )
        profile.proxy_digest = self.contract.proxy_digest

    def _use_samples(self) -> None:
        """Makes the method again, which takes over its state; the model stays the same object."""
        self._data = self._tensors_of(self._samples)
        state = self.method.state_dict()
        local = replace(self.method.local, data=self._data)
        self.method = _method_of(self.contract, self._config, local)
        self.method.load_state_dict(state)

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

    def has_initial(self) -> bool:
        """Returns whether the app's model has the run's initial weights, such as a pretrained extractor from a file."""
        only_extractor = self.contract.requirements.same_extractor
        target, scope = (self._taps.extractor, "extractor") if only_extractor else (self.module, "model")
        return encode({"initial": model_parameters(target, scope)}).sha256 == self.contract.initial_weights

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
        return [item for item in (self.contract.initial_weights, self.contract.proxy_digest) if item]

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

    def _restore(self, saved: bytes, delivered: bytes | None) -> None:
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
            reason = textwrap.shorten(str(error), 300)  # torch lists each tensor on a line of its own
            raise ModelError(
                "the saved state is of another model: pass the model that it is of. If an update of the app changed "
                "the network, call device.forget(), which has the server delete what this device sent, and start "
                "again. A fresh state_dir alone is a second device, and what this one sent stays in the run. Until "
                f"then `predict` and `Predictor` use the delivered model.onnx in this state_dir, if any ({reason})"
            ) from error

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
            if fleet_model is not None and SPLIT in self._scored:
                self._received = fleet_model
        with own_randomness(ask.seed):  # independent of what scoring has drawn
            answer = self.method.handle(asked)
            measured = ask.step in self.method.metrics_steps(self.method.config)
            models = self.method.variants()
            scores = received | (self._score(models) if measured else {})
            replacement = self._decide(models, scores) if measured or ask.step == DELIVER else None
        figures = allowed(self.method.figures, allow)
        if (trained := self.method.trained) is not None and trained.samples_seen:
            figures.append(_training_loss(trained))
        return self._complete(answer, allow, scores, figures, replacement, REPLACED if measured else REPLACED_BY_RESULT)

    def _score_received(self, ask: Ask) -> tuple[dict[str, Counts], nn.Module | None]:
        """Returns the scores of the fleet model in the ask, and the model; empty and None if it cannot be scored."""
        model = self.method.fleet_model(ask) if self._scored else None
        if model is None:
            return {}, None
        try:
            return self._score({RESULT if ask.step == DELIVER else RECEIVED: model}), model
        except KnowledgeError:  # the model has diverged; the device can answer anyway
            return {}, None

    def _counts(self, model: nn.Module, split: str) -> Counts:
        return self._counts_on(model, self._scored_tensors[split])

    def _counts_on(self, model: nn.Module, data: TensorData | LazyData) -> Counts:
        """Returns the scores of a model; uses cached features if its extractor is fixed."""
        if isinstance(model, SpaceModel):
            rows = torch.from_numpy(np.array(model.fixed.of(data.inputs)))
            return evaluate(model.above, TensorData(rows, data.labels), self._classes)
        return evaluate(model, data, self._classes)

    # --- delivery

    def _decide(self, models: Mapping[str, nn.Module], scores: Mapping[str, Counts]) -> Replacement:
        """Decides about the best variant; a single one is compared with the model that the device received, too."""
        model, self._received = self._received if len(models) == 1 else None, None
        if model is None or SPLIT not in self._scored:
            return self._judge(models, scores)
        counts = scores.get(place_of(SPLIT, RECEIVED)) or scores.get(place_of(SPLIT, RESULT))
        counts = counts or self._counts(model, SPLIT)  # received in an earlier step
        return self._judge(models, scores, (model, counts.accuracy))

    def _update_delivered(self, models: Mapping[str, nn.Module]) -> None:
        if not models.keys() <= self._delivered.keys():
            self._delivered |= self._copies(models)
        for name, model in models.items():
            self._delivered[name].load_state_dict(model.state_dict())

    def delivered_model(self) -> nn.Module:
        """Returns the app's model, in eval mode."""
        return self._delivered[self._in_use].eval()

    def frozen_model(self) -> FrozenModel:
        """Returns a copy of the app's model, for `Device.predict`."""
        shape = self.contract.input_shape
        return FrozenModel(self.delivered_model(), free_size(shape) if self._deployment.dynamic_size else shape)

    def unpack_model(self, delivered: bytes) -> nn.Module:
        saved = unpack_state(delivered)
        in_use = saved["in_use"]
        model = copy.deepcopy(self._delivered[in_use])
        model.load_state_dict(saved["model"] if in_use == self._own else saved["further"][in_use])
        return model

    def delivered_models(self) -> Mapping[str, nn.Module]:
        """Returns all variants of the app's model by name, in eval mode."""
        return {name: model.eval() for name, model in self._delivered.items()}

    def _pack(self, models: Mapping[str, nn.Module], in_use: str) -> bytes:
        states = {name: model.state_dict() for name, model in models.items()}
        own = states.pop(self._own)
        return pack_state({"model": own, "further": states, "in_use": in_use})

    def _export(self, model: nn.Module, path: Path, metadata: Mapping[str, str]) -> OnnxReport:
        settings = self._deployment
        model, samples = model.eval(), torch.from_numpy(self._first_inputs)
        with torch.no_grad():
            rows = rows_at_once(model, model, samples[:2].to(place_of_inputs(model)[0]))
        # With its weights as they are, a variant's file can refer to those of the state.
        plain = None if len(self._delivered) == 1 or settings.quantize is not None else Graphs()
        return export_onnx(
            model,
            path,
            samples[: max(rows, 2)],
            metadata,
            opset=settings.opset,
            dynamic_size=settings.dynamic_size,
            graphs=self.graphs or plain,
        )


def _warn_of_range(extractor: nn.Module, data: TensorData | LazyData) -> None:
    """Logs a warning if a pretrained extractor gets images outside [0, 1], which give other features."""
    if images_of(extractor) is None or not len(data):
        return
    inputs = data.inputs[:_ROWS_CHECKED]
    low, high = float(inputs.min()), float(inputs.max())
    if low < 0 or high > 1:
        logger.warning(
            "the training images have values in [%g, %g], but the run's pretrained extractor needs [0, 1] and "
            "normalises itself; scale them",
            low,
            high,
        )


def module_on(model: nn.Module | Callable[[], nn.Module], torch_device: str) -> nn.Module:
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
        advice = ""
        if isinstance(error, TypeError):
            advice = "; it is called without arguments, so pass model=lambda: MyModel(...) to give it some"
        raise ModelError(f"model: the function raised {type(error).__name__}: {error}{advice}") from error


def _method_of(contract: contract_pb2.Contract, config: Any, local: Local) -> DeviceMethod:
    """Makes the device half. Raises ConfigurationError if that fails, for example for lack of memory."""
    try:
        with faults_decline(f"preparing method {contract.method!r}"), own_randomness(0):
            return device_class(contract.method)(config, local)
    except CannotAnswer as error:
        raise ConfigurationError(f"this device cannot take part in run {contract.run!r}: {error}") from error


def _training_loss(trained: TrainingReport) -> Metric:
    """Returns the mean training loss over the samples seen; with distillation, the sum of all loss terms."""
    seen = trained.samples_seen
    return Metric(name="loss", split="train", sum=trained.mean_loss * seen, count=seen)
