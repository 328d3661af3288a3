"""A device without PyTorch: numpy and onnxruntime alone (extra `light`)."""

from fleetdistill.light.light import light_worker

__all__ = ["light_worker"]
