"""The app's models: its own one, the delivered variants by name, and predictions with the delivered one.

Predictions come from any thread, while the device trains and without the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.deployment.batch import RangeCheck, check_batch, check_logits, range_of
from fleetdistill.device.backend import Backend, Predict
from fleetdistill.device.parts import DeviceParts
from fleetdistill.errors import DamagedStateError, FleetDistillError, ModelError
from fleetdistill.names import did_you_mean

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute
    from fleetdistill.deployment.predictor import DeployedModel

logger = logging.getLogger(__name__)


class AppModels(dict[str, Any]):
    """A dict of model variants by name; a missing name raises ModelError instead of KeyError."""

    def __missing__(self, name: str) -> Any:
        if not self:
            raise ModelError(
                f"this device has no {name!r} model yet; the first delivered round adds it. "
                f"Check `{name!r} in device.models` before use"
            )
        text = f"this device has no {name!r} model, only {', '.join(sorted(self))}"
        if meant := did_you_mean(name, self):
            raise ModelError(f"{text}{meant}")
        raise ModelError(
            f"{text}; a later round may deliver it. Until then use device.models.get({name!r}, device.model)"
        )


class Predictions:
    """Predicts with a copy of the delivered model that never changes; a delivery replaces the copy as a whole.

    A prediction therefore needs no lock and uses exactly one delivered model. The first prediction makes the copy: of
    the model in memory, or else in the state directory, or else of the app's own one. If the state is damaged, or of an
    earlier network of the app, the delivered ONNX file takes its place, because it needs neither.

    Args:
        parts: What the parts of the open device share.
        backend: Keeps the compute backend.
        stored_compute: Returns a compute backend with the models of the state directory, or None if there are none.
        own_model: Returns a copy of the app's own model; takes the first training inputs, or None.
        version: Returns the number of the delivered model in use.
    """

    def __init__(
        self,
        parts: DeviceParts,
        backend: Backend,
        stored_compute: Callable[[], Compute | None],
        own_model: Callable[[np.ndarray | None], Predict],
        version: Callable[[], int],
    ) -> None:
        self._parts = parts
        self._backend = backend
        self._stored_compute = stored_compute
        self._own_model = own_model
        self._version = version
        # The copy, its version and the check of its inputs, replaced at the same moment.
        self._current: tuple[Predict, int, RangeCheck] | None = None

    @property
    def version(self) -> int:
        """Number of the delivered model with which a prediction is made now; 0 before the first delivery."""
        current = self._current
        return self._version() if current is None else current[1]

    def predict(self, inputs: Any) -> Any:
        """Returns the logits of a batch of inputs; the first call copies the model."""
        model, _, scale = self._current or self._copy()
        logits = model(inputs)
        scale.check(inputs)
        check_logits(logits)
        return logits

    def renew(self) -> None:
        """Copies the delivered model again after it was replaced, if the app predicts at all.

        If that fails, predictions go on with the previous copy, and `version` is that of the new model.
        """
        if self._current is None:
            return
        try:
            self._copy()
        except BaseException:
            self._current = (self._current[0], self._version(), self._current[2])
            raise

    def forget(self) -> None:
        """Forgets the copy, after the device was erased."""
        self._current = None

    def _copy(self) -> tuple[Predict, int, RangeCheck]:
        with self._parts.lock.held():
            model, scale = self._frozen()
            self._current = (model, self._version(), scale)
            return self._current

    def _frozen(self) -> tuple[Predict, RangeCheck]:
        """Returns the copy and the check of its inputs."""
        compute = self._backend.compute
        if compute is None or not compute.has_state:
            try:
                compute = self._stored_compute()
            except (DamagedStateError, ModelError) as error:
                return self._exported(error), RangeCheck(None)  # the file has its own check
        first = self._backend.first_inputs()
        if compute is None:
            return self._own_model(first), RangeCheck(range_of(first))
        return compute.frozen_model(), RangeCheck(compute.input_range() or range_of(first))

    def _exported(self, error: FleetDistillError) -> Predict:
        """Returns the ONNX file of the version in use; raises `error` if there is none."""
        from fleetdistill.deployment.predictor import Predictor

        version = self._version()
        try:
            model = Predictor(self._parts.storage.directory).model if version else None
        except FleetDistillError:
            model = None
        if model is None or model.version != version:
            raise error
        logger.warning("predictions go on with model.onnx, version %d, because of an error: %s", version, error)
        return partial(_predict, model)


def _predict(model: DeployedModel, inputs: Any) -> Any:
    """Returns the logits of an ONNX file, of the type of the inputs: NumPy array or torch tensor."""
    check_batch(inputs, model.input_shape)
    if isinstance(inputs, np.ndarray):
        return model.predict(inputs)
    import torch

    return torch.from_numpy(model.predict(inputs.detach().float().cpu().numpy())).to(inputs.device)
