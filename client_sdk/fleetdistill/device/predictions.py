"""Predictions with the delivered model, from any thread, while the device trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ModelError

if TYPE_CHECKING:
    from fleetdistill.device.compute import Compute
    from fleetdistill.device.session import Session


class Predictions:
    """Predicts with a copy of the delivered model that never changes; a delivery replaces the copy as a whole.

    A prediction therefore needs no lock and uses exactly one delivered model. The first prediction makes the copy.

    Args:
        session: State of the open device.
        ready_compute: Returns the compute backend with the device's state.
    """

    def __init__(self, session: Session, ready_compute: Callable[[], Compute]) -> None:
        self._session, self._ready_compute = session, ready_compute
        self._model: Callable[[Any], Any] | None = None

    def predict(self, inputs: Any) -> Any:
        """Returns the logits of a batch of inputs; the first call copies the model."""
        return (self._model or self._copy())(inputs)

    def renew(self) -> None:
        """Copies the delivered model again after it was replaced, if the app predicts at all."""
        if self._model is not None:
            self._copy()

    def _copy(self) -> Callable[[Any], Any]:
        from fleetdistill.device.compute import FreezesModel

        with self._session.guard.held():
            compute = self._ready_compute()
            if not isinstance(compute, FreezesModel):
                raise ModelError(
                    f"the worker {type(compute).__name__} does not support predict; add the method frozen_model "
                    "(fleetdistill.device.compute.FreezesModel)"
                )
            self._model = compute.frozen_model()
            return self._model
