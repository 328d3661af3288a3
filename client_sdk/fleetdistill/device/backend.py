"""The compute backend of an open device: made when it is first needed, with the app's data, payloads and state."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.data.samples import first_inputs
from fleetdistill.data.splits import Splits
from fleetdistill.deployment.settings import Deployment
from fleetdistill.deployment.versions import missing_states
from fleetdistill.device.parts import DeviceParts
from fleetdistill.errors import ConfigurationError, DamagedStateError, DataError, ModelError, StateError
from fleetdistill.lazy import get_loaded
from fleetdistill.link.downloads import Downloads
from fleetdistill.models.torch_model import TorchModel
from fleetdistill.state import failpoints
from fleetdistill.state.outbox import Pending
from fleetdistill.state.sample_ids import SampleIds
from fleetdistill.state.state_check import STATES, damaged_states, is_light
from fleetdistill.state.weights import keep_weights, load_state, with_weights, without_weights
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.v1 import contract_pb2

if TYPE_CHECKING:
    from torch import nn

    from fleetdistill.compute.base import Compute, MakeCompute

Predict = Callable[[Any], Any]
"""Maps a batch of inputs to logits; never changes."""


class ComputeFactory:
    """Makes what computes for a device, from the app's model or by its `worker`, which has its own data.

    A model that the app passes as a function is built at most once for a prediction and the device's training.

    Args:
        model: The app's model; None with a worker.
        data: Data on which models are scored, beside the training data; None with a worker.
        worker: `Device(worker=...)`.
        ids: Ids of the training samples.
        deployment: Settings of the app.
    """

    def __init__(
        self,
        model: TorchModel | None,
        data: Splits | None,
        worker: MakeCompute | None,
        ids: SampleIds,
        deployment: Deployment,
    ) -> None:
        self._model = model
        self._data = data
        self._worker = worker
        self._ids = ids
        self._deployment = deployment
        self._built: nn.Module | None = None  # for a prediction, until the device trains it

    def make(self, contract: contract_pb2.Contract, data: Any) -> Compute:
        """Makes the compute backend that takes part in a run."""
        if self._model is None or self._data is None:
            return self._made_by_worker(contract)
        model = replace(self._model, module=self._for_training)
        return self._torch_compute(contract, model, replace(self._data, data=data), self._ids)

    def fingerprint(self) -> str:
        """Returns the fingerprint of the app's model.

        It is empty with a worker, and while the app has not loaded torch, which an idle device does not need.
        """
        if self._model is None or get_loaded("torch") is None:
            return ""
        from fleetdistill.compute.torch_compute import module_on
        from fleetdistill.training.model import fingerprint

        return fingerprint(module_on(self._for_prediction, self._model.torch_device))

    def make_predicting(self, contract: contract_pb2.Contract) -> Compute:
        """Makes a compute backend from which predictions copy a stored model; only a worker reads data for it."""
        if self._model is None:
            return self._made_by_worker(contract)
        no_data = np.zeros((0, *contract.input_shape), np.float32), np.zeros(0, np.int64)
        return self._torch_compute(contract, replace(self._model, module=self._another), Splits(no_data), None)

    def own_model(self, first: np.ndarray | None) -> Predict:
        """Returns a copy of the app's own model; `first` are the first training inputs, if known, for its errors.

        Raises:
            ModelError: The device has a worker, or the module is not a local model, which no run would accept either.
        """
        if self._model is None:
            raise ModelError(
                "this device has no model yet: its worker gets one from the run. Run the device until its event "
                "'delivered', or check `device.version`. A run that has finished delivers none any more"
            )
        from fleetdistill.compute.torch_compute import FrozenModel, module_on
        from fleetdistill.training.model import check_local_model

        module = module_on(self._for_prediction, self._model.torch_device)
        check_local_model(module)
        return FrozenModel(module, None, first)

    def _for_training(self) -> nn.Module:
        module = self._for_prediction()
        self._built = None
        return module

    def _for_prediction(self) -> nn.Module:
        if self._built is None:
            self._built = self._module()
        return self._built

    def _another(self) -> nn.Module:
        """Returns a module of the same architecture that nobody else has."""
        module = self._module()
        return copy.deepcopy(module) if self._model is not None and module is self._model.module else module

    def _module(self) -> nn.Module:
        """Returns the module that the app has passed, or a new one from its function."""
        from torch import nn

        assert self._model is not None  # checked by the callers
        given = self._model.module
        return given if isinstance(given, nn.Module) else given()

    def _torch_compute(
        self, contract: contract_pb2.Contract, model: TorchModel, data: Splits, ids: SampleIds | None
    ) -> Compute:
        from fleetdistill.compute.torch_compute import TorchCompute

        compute = TorchCompute(contract, model=model, data=data, ids=ids)
        compute.use_deployment(self._deployment)
        return compute

    def _made_by_worker(self, contract: contract_pb2.Contract) -> Compute:
        """Returns what the app's worker makes. Raises ConfigurationError if it is not a `Compute`."""
        from fleetdistill.compute.base import Compute

        assert self._worker is not None  # the device has a model or a worker
        compute = self._worker(contract)
        if not isinstance(compute, Compute):
            raise ConfigurationError(
                f"the function worker returned {type(compute).__name__}, expected an object of a class derived from "
                "fleetdistill.compute.Compute"
            )
        compute.use_deployment(self._deployment)
        return compute


class Backend:
    """Makes, prepares and keeps a device's compute backend. Callers hold the device's lock.

    Args:
        parts: What the parts of the open device share.
        factory: Makes the compute backend.
        data: The app's training data, as in `Device(data=...)`.
        downloads: Stores the run's payloads.

    Attributes:
        compute: Compute backend; None before its first use.
        data: The app's training data.
    """

    def __init__(self, parts: DeviceParts, factory: ComputeFactory, data: Any, downloads: Downloads) -> None:
        self._parts = parts
        self._events = parts.events
        self._factory = factory
        self._downloads = downloads
        self._answer: Pending | None = None  # whose state `compute` holds before it is committed
        self.compute: Compute | None = None
        self.data = data

    def make(self, contract: contract_pb2.Contract) -> Compute:
        """Returns the compute backend; makes one without state if there is none."""
        if self.compute is None:
            import fleetdistill.knowledge  # noqa: F401  (registers the kinds of parts, which an idle device does not need)

            self.compute = self._factory.make(contract, self.data)
        return self.compute

    def replace_data(self, data: Any) -> None:
        """Uses other training data from the next `reread` on; a backend that reads its data only once is made again."""
        self.data = data
        if self.compute is not None and self.compute.sample_count is None:
            self.compute = self._answer = None

    def reread(self, contract: contract_pb2.Contract) -> tuple[Compute, bool]:
        """Returns the compute backend with the app's current data, and whether they have changed.

        Raises:
            DataError: The data cannot be used.
        """
        known = self.compute
        compute = self.make(contract)
        may_change = compute is known and compute.sample_count is not None
        return compute, may_change and compute.reread_data(self.data)

    def first_inputs(self) -> np.ndarray | None:
        """Returns the first inputs of the app's data, if that is quick to read; None also if they cannot be used."""
        with contextlib.suppress(DataError):
            return first_inputs(self.data)
        return None

    # --- state

    def note_answer(self, pending: Pending) -> None:
        """Records that the compute backend holds the state of an answer that is in the outbox."""
        self._answer = pending

    def holds_answer(self, pending: Pending) -> bool:
        """Returns whether the compute backend holds the state of an answer; an earlier process may have computed it."""
        return self._answer == pending

    def forget_state(self) -> None:
        """Makes the compute backend restore its state from the disk before its next use."""
        self._answer = None
        if self.compute is not None:
            self.compute.forget_state()

    def forget(self) -> None:
        """Forgets the compute backend, after the device was erased."""
        self.compute = self._answer = None

    def prepare(self, contract: contract_pb2.Contract) -> Compute:
        """Returns the compute backend with its payloads and the committed state, or with the run's initial weights.

        Raises:
            ModelError: The state is of another model; the next use finds out again.
        """
        compute = self.make(contract)
        for sha256 in _kept_payloads(compute, contract):
            if not compute.has_payload(sha256):
                compute.take_payload(sha256, decode(self._kept_payload(sha256, contract)))
        if not compute.has_state:
            try:
                self._restore(compute, contract)
            except ModelError:
                self.compute = None
                raise
        return compute

    def fingerprint(self) -> str:
        """Returns the fingerprint of the app's model before the compute backend is made; else an empty text."""
        return self._factory.fingerprint() if self.compute is None and self._parts.storage.has_directory else ""

    def check_state(self, known: str, fingerprint: str, contract: contract_pb2.Contract) -> None:
        """Restores the committed state if the app's model has changed, to find out whether the state fits it.

        Args:
            known: Fingerprint in the last accepted profile.
            fingerprint: Fingerprint of the app's model; empty if it is unknown.
            contract: Contract of the run.

        Raises:
            ModelError: The state is of another model.
        """
        if fingerprint not in ("", known) and self.saved_state() is not None:
            self.prepare(contract)

    def saved_state(self) -> bytes | None:
        """Returns the content of `state.safetensors`; None before the first state.

        Raises:
            DamagedStateError: A file with the state is missing although a model was delivered.
        """
        if missing := missing_states(self._parts.storage):
            raise self._damaged_state(missing)
        return self._parts.storage.load(STATES[0])

    def stored(self, contract: contract_pb2.Contract, saved: bytes) -> Compute:
        """Returns a new compute backend with the app's models from the state directory, without data or the server.

        Args:
            contract: Contract of the run.
            saved: Content of `state.safetensors`.

        Raises:
            DamagedStateError: A file with the state is damaged.
        """
        import fleetdistill.knowledge  # noqa: F401  (as in `make`)

        compute = self._factory.make_predicting(contract)
        for sha256 in _kept_payloads(compute, contract):
            payload = self._downloads.stored(sha256)
            if payload is not None:
                compute.take_payload(sha256, decode(payload))
        self._restore_saved(compute, saved)
        return compute

    def _restore(self, compute: Compute, contract: contract_pb2.Contract) -> None:
        storage = self._parts.storage
        saved = self.saved_state()
        if saved is not None:
            self._restore_saved(compute, saved)
            return
        wants_initial = contract.initial_weights and contract.initial_weights in compute.wanted_payloads()
        if wants_initial and not compute.has_initial():
            compute.load_initial(decode(self.download(contract.initial_weights, contract)))
        # Saved before the first answer: if the answer is dropped, the device returns to this state.
        try:
            failpoints.hit("device.first-state.before-save")
            state, delivered = compute.state(), compute.delivered_state()
            if contract.extractor_file:  # then the extractor is frozen
                keep_weights(storage, [state, delivered])
            storage.save("delivered.safetensors", without_weights(storage, delivered))
            storage.save("state.safetensors", without_weights(storage, state))
        except BaseException:
            compute.forget_state()  # else it would pass for stored when the disk has room again
            raise
        failpoints.hit("device.first-state.after-save")
        compute.has_state = True

    def _restore_saved(self, compute: Compute, saved: bytes) -> None:
        try:
            compute.restore(
                with_weights(self._parts.storage.directory, saved), load_state(self._parts.storage, STATES[1])
            )
        except StateError as error:
            damaged = damaged_states(self._parts.storage)  # nothing if the worker's format is unknown
            if not damaged and is_light(saved) != is_light(compute.state()):
                raise ModelError(
                    f"the saved state is that of a device {'without' if is_light(saved) else 'with'} PyTorch: use that "
                    "kind again, or call device.forget(), which has the server delete what this device sent, and "
                    "start again"
                ) from error
            reason = str(error).removeprefix("the saved state is damaged: ")
            raise self._damaged_state(damaged or {STATES[0]: reason}) from error

    def _damaged_state(self, damaged: Mapping[str, str]) -> DamagedStateError:
        """Returns the error that names the first of the damaged files."""
        name, reason = next(iter(damaged.items()))
        directory = self._parts.storage.directory
        text = f"{directory / name} is damaged: {reason}. Restore it from a backup"
        anew = "or erase its directory with `fleetdistill device forget`, and begin as a new device with another id"
        return DamagedStateError(directory / name, f"{text}; {anew}", reason)

    # --- payloads

    def download(self, sha256: bytes, contract: contract_pb2.Contract) -> Payload:
        """Returns a payload of the run; deletes stored payloads that the compute backend does not use."""
        assert self.compute is not None
        keep = _kept_payloads(self.compute, contract)
        return self._downloads.fetch(self._parts.link, self._parts.identity, sha256, keep)

    def _kept_payload(self, sha256: bytes, contract: contract_pb2.Contract) -> Payload:
        """Returns a payload that the compute backend uses, from the state directory or else from the server."""
        stored = self._downloads.stored(sha256)
        if stored is not None:
            return stored
        payload = self.download(sha256, contract)
        kind = "proxy" if sha256 == contract.proxy_digest else "extractor"
        what = "proxy set" if kind == "proxy" else "extractor file"
        values = {"digest": sha256.hex(), "bytes": payload.data_bytes}
        text = f"downloaded the run's {what} {sha256.hex()[:12]}, {payload.data_bytes} bytes"
        self._events.emit(kind, 0, text, values)
        return payload


def _kept_payloads(compute: Compute, contract: contract_pb2.Contract) -> list[bytes]:
    """Returns the digests of the payloads to keep: all wanted ones except the initial weights, which are used once."""
    return [sha256 for sha256 in compute.wanted_payloads() if sha256 != contract.initial_weights]
