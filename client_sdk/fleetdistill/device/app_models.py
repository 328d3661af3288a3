"""The app's models: its own one, the delivered variants by name, and predictions with the delivered one.

Predictions come from any thread, while the device trains and without the server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ModelError

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute
    from fleetdistill.device.session import Session


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
        session: State of the open device.
        stored_compute: Returns a compute backend with the models of the state directory, or None if there are none.
        own_model: Returns a copy of the app's own model.
    """

    def __init__(
        self, session: Session, stored_compute: Callable[[], Compute | None], own_model: Callable[[], Predict]
    ) -> None:
        self._session = session
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
        with self._session.guard.held():
            self._model = self._frozen()
            return self._model

    def _frozen(self) -> Predict:
        compute = self._session.compute
        if compute is None or not compute.has_state:
            compute = self._stored_compute()
        if compute is None:
            return self._own_model()
        return compute.frozen_model()
