"""A front that leaks on purpose, so that a test can see that the soak finds it.

python -m soak.leaks run.toml ...       with the front's own arguments
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from fleetdistill_server.front import process as front
from fleetdistill_server.intake.sessions import Sessions

LEAKED_BYTES = 200_000


def leaking(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with memory and a file that are never given back at each."""
    held: list[Any] = []

    def leaky(*given: Any) -> Any:
        held.append((b"x" * LEAKED_BYTES, os.open(os.devnull, os.O_RDONLY)))
        return call(*given)

    return leaky


if __name__ == "__main__":
    Sessions.authenticate = leaking(Sessions.authenticate)  # type: ignore[method-assign]
    sys.exit(front.main())
