"""Everything that requires PyTorch: models, losses, training loops and ONNX export."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetdistill.training.model import SplitModel, check_local_model, fingerprint, split_sequential
    from fleetdistill.training.wrapping import node_names, wrap

__all__ = ["SplitModel", "check_local_model", "fingerprint", "node_names", "split_sequential", "wrap"]


def __getattr__(name: str) -> Any:
    """Imports a public name, and with it PyTorch, on first use; devices without PyTorch do not use these."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "wrapping" if name in ("node_names", "wrap") else "model"
    return getattr(import_module(f"fleetdistill.training.{module}"), name)
