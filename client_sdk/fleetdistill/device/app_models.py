"""The models that an app has of its device, by the name of the answer that they give."""

from __future__ import annotations

from typing import Any

from fleetdistill.errors import ModelError


class AppModels(dict[str, Any]):
    """A mapping whose error names what to do while a variant is missing; `in` and `get` raise none."""

    def __missing__(self, name: str) -> Any:
        if not self:
            raise ModelError(
                f"this device has no {name!r} answer, and no other yet: the first ones come with the first round that "
                f"delivers them; `{name!r} in models` tells whether they are here"
            )
        raise ModelError(
            f"this device has no {name!r} answer, it has {', '.join(sorted(self))}; a further answer comes with the "
            f"first round that delivers it: until then take models.get({name!r}, device.model)"
        )
