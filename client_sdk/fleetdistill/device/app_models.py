"""A device's delivered model variants, by name."""

from __future__ import annotations

from typing import Any

from fleetdistill.errors import ModelError


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
