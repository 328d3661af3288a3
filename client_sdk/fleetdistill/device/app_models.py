"""The app's models: its own one, the delivered variants by name, and predictions with the delivered one.

Predictions come from any thread, while the device trains and without the server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.data.splits import Splits
from fleetdistill.deployment.settings import Deployment
from fleetdistill.device.backend import Backend
from fleetdistill.device.parts import DeviceParts
from fleetdistill.errors import ConfigurationError, ModelError
from fleetdistill.models.torch_model import TorchModel
from fleetdistill.state.sample_ids import SampleIds
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

    def make_predicting(self, contract: contract_pb2.Contract) -> Compute:
        """Makes a compute backend from which predictions copy a stored model; only a worker reads data for it."""
        if self._model is None:
            return self._made_by_worker(contract)
        no_data = np.zeros((0, *contract.input_shape), np.float32), np.zeros(0, np.int64)
        return self._torch_compute(contract, replace(self._model, module=self._another), Splits(no_data), None)

    def own_model(self) -> Predict:
        """Returns a copy of the app's own model. Raises ModelError if the device has a worker."""
        if self._model is None:
            raise ModelError(
                "this device has no model yet: its worker gets one from the run. Run the device until its event "
                "'delivered', or check `device.version`. A run that has finished delivers none any more"
            )
        from fleetdistill.compute.torch_compute import FrozenModel, module_on

        return FrozenModel(module_on(self._for_prediction, self._model.torch_device), None)

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


class AppModels(dict[str, Any]):
    """A dict of model variants by name; a missing name raises ModelError instead of KeyError."""

    def __missing__(self, name: str) -> Any:
        if not self:
            raise ModelError(
                f"this device has no {name!r} model yet; the first delivered round adds it. "
                f"Check `{name!r} in device.models` before use"
            )
        raise ModelError(
            f"this device has no {name!r} model, only {', '.join(sorted(self))}; a later round may deliver it. "
            f"Until then use device.models.get({name!r}, device.model)"
        )


class Predictions:
    """Predicts with a copy of the delivered model that never changes; a delivery replaces the copy as a whole.

    A prediction therefore needs no lock and uses exactly one delivered model. The first prediction makes the copy: of
    the model in memory, or else in the state directory, or else of the app's own one.

    Args:
        parts: What the parts of the open device share.
        backend: Keeps the compute backend.
        stored_compute: Returns a compute backend with the models of the state directory, or None if there are none.
        own_model: Returns a copy of the app's own model.
    """

    def __init__(
        self,
        parts: DeviceParts,
        backend: Backend,
        stored_compute: Callable[[], Compute | None],
        own_model: Callable[[], Predict],
    ) -> None:
        self._parts = parts
        self._backend = backend
        self._stored_compute = stored_compute
        self._own_model = own_model
        self._model: Predict | None = None

    def predict(self, inputs: Any) -> Any:
        """Returns the logits of a batch of inputs; the first call copies the model."""
        return (self._model or self._copy())(inputs)

    def renew(self) -> None:
        """Copies the delivered model again after it was replaced, if the app predicts at all."""
        if self._model is not None:
            self._copy()

    def _copy(self) -> Predict:
        with self._parts.lock.held():
            self._model = self._frozen()
            return self._model

    def _frozen(self) -> Predict:
        compute = self._backend.compute
        if compute is None or not compute.has_state:
            compute = self._stored_compute()
        if compute is None:
            return self._own_model()
        return compute.frozen_model()
