"""The app's models: its own one, the delivered variants by name, and predictions with the delivered one.

Predictions come from any thread, while the device trains and without the server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.deployment.settings import Deployment
from fleetdistill.device.backend import Backend
from fleetdistill.device.parts import DeviceParts
from fleetdistill.errors import ConfigurationError, ModelError
from fleetdistill.wire.v1 import contract_pb2

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute, MakeCompute


class OwnModel:
    """The model that the app passes to `Device`. Makes it at most once for a prediction and the device's training.

    Args:
        given: The module, or the function that builds it.
    """

    def __init__(self, given: Any) -> None:
        self._given, self._made = given, None

    def make(self) -> Any:
        """Returns the module for training: the one of `look` if there is one, else a new one from the function."""
        module = self.look()
        self._made = None
        return module

    def look(self) -> Any:
        """Returns the module that the next `make` returns."""
        if self._made is None:
            self._made = self._given if self._is_module() else self._given()
        return self._made

    def another(self) -> Any:
        """Returns a module of the same architecture that nobody else has."""
        return copy.deepcopy(self._given) if self._is_module() else self._given()

    def _is_module(self) -> bool:
        from torch import nn

        return isinstance(self._given, nn.Module)


class ComputeFactory:
    """Makes what computes for a device, from the app's model or by its `worker`, which has its own data.

    Args:
        model: `Device(model=...)`.
        worker: `Device(worker=...)`.
        torch_options: Arguments of `TorchCompute`.
        deployment: Settings of the app.
    """

    def __init__(
        self, model: Any, worker: MakeCompute | None, torch_options: Mapping[str, Any], deployment: Deployment
    ) -> None:
        self._own = OwnModel(model)
        self._worker = worker
        self._options = torch_options
        self._deployment = deployment

    def make(self, contract: contract_pb2.Contract, data: Any) -> Compute:
        """Makes the compute backend that takes part in a run."""
        if self._worker is not None:
            return self._configured(_checked(self._worker(contract)))
        return self._configured(_torch_compute(contract, data, model=self._own.make, **self._options))

    def make_predicting(self, contract: contract_pb2.Contract) -> Compute:
        """Makes a compute backend from which predictions copy a stored model; only a worker reads data for it."""
        if self._worker is not None:
            return self.make(contract, None)
        options = {**self._options, "test_data": None, "validation_data": None, "ids": None}
        no_data = np.zeros((0, *contract.input_shape), np.float32), np.zeros(0, np.int64)
        return self._configured(_torch_compute(contract, no_data, model=self._own.another, **options))

    def _configured(self, compute: Compute) -> Compute:
        compute.use_deployment(self._deployment)
        return compute

    def own_model(self) -> Callable[[Any], Any]:
        """Returns a copy of the app's own model. Raises ModelError if the device has a worker."""
        if self._worker is not None:
            raise ModelError(
                "this device has no model yet: its worker gets one from the run. Run the device until its event "
                "'delivered', or check `device.version`. A run that has finished delivers none any more"
            )
        from fleetdistill.compute.torch_compute import own_frozen_model

        return own_frozen_model(self._own.look, self._options["torch_device"])


def _torch_compute(contract: contract_pb2.Contract, data: Any, **options: Any) -> Compute:
    from fleetdistill.compute.torch_compute import TorchCompute

    return TorchCompute(contract, data=data, **options)


def _checked(made: object) -> Compute:
    """Returns what the app's worker has made. Raises ConfigurationError if it is not a `Compute`."""
    from fleetdistill.compute.base import Compute

    if not isinstance(made, Compute):
        raise ConfigurationError(
            f"the function worker returned {type(made).__name__}, expected an object of a class derived from "
            "fleetdistill.compute.Compute"
        )
    return made


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


Predict = Callable[[Any], Any]
"""Maps a batch of inputs to logits; never changes."""


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
