"""The models that an app has of its device, by the name of the answer that they give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetdistill.errors import ModelError

if TYPE_CHECKING:
    from torch import nn


class AppModels(dict[str, "nn.Module"]):
    """A mapping that says what to do where an answer is not there yet; `in` and `get` tell without an error."""

    def __missing__(self, name: str) -> nn.Module:
        raise ModelError(
            f"this device has no {name!r} answer, it has {', '.join(sorted(self))}; a further answer comes with the "
            f"first round that delivers it: until then take models.get({name!r}, device.model)"
        )
