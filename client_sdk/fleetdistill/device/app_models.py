"""The app's models: its own one, and the delivered variants by name."""

from __future__ import annotations

import copy
from typing import Any

from fleetdistill.errors import ModelError


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
