"""A device without PyTorch, with NumPy and onnxruntime only (extra `light`)."""

from fleetdistill.light.light import light_worker

__all__ = ["light_worker"]
