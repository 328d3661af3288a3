"""Predictions with the delivered model, from any thread, while the device trains and without the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ModelError

if TYPE_CHECKING:
    from fleetdistill.device.compute import Compute
    from fleetdistill.device.session import Session

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
        self._session, self._stored_compute, self._own_model = session, stored_compute, own_model
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
        from fleetdistill.device.compute import FreezesModel

        compute = self._session.compute
        if compute is None or not compute.has_state:
            compute = self._stored_compute()
        if compute is None:
            return self._own_model()
        if not isinstance(compute, FreezesModel):
            raise ModelError(
                f"the worker {type(compute).__name__} does not support predict; add the method frozen_model "
                "(fleetdistill.device.compute.FreezesModel)"
            )
        return compute.frozen_model()
