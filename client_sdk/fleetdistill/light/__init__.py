"""The compute backend for devices without PyTorch; uses NumPy and onnxruntime (extra `light`)."""

from fleetdistill.light.light import light_worker

__all__ = ["light_worker"]
