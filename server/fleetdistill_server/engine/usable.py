"""Checks whether a run can continue from a method's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def reason_not_usable(state: Mapping[str, Any]) -> str | None:
    """Describes the first tensor in a state that has a non-finite value or a negative batch-norm variance.

    Returns None if the state has no such tensor.
    """
    for name, tensor in _tensors(state, ""):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
        if name.endswith("running_var") and bool((tensor < 0).any()):
            return f"{name} has a negative value, {float(tensor.min()):g}"
    return None


def _tensors(state: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield path, state
    items = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in items:
        yield from _tensors(value, f"{path}.{key}" if path else str(key))
