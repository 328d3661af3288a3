"""`Deployment`, the settings for the model that leaves training."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from fleetdistill.checked import check_flag, check_integer, check_number
from fleetdistill.errors import ConfigurationError
from fleetdistill.names import unknown_name

__all__ = ["Deployment"]

_OPSETS = range(13, 21)
"""Opsets that torch's exporter writes and quantisation supports."""
_EXPORTS = ("round", "finish", "never")
_QUANTIZATIONS = ("dynamic", "static")


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported; does not import it."""
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a device keeps, checks and exports the delivered model; pass it as `Device(deployment=...)`.

    Attributes:
        export: When to write `model.onnx` to `state_dir`: after each delivered round (`"round"`), at the end of the run
            (`"finish"`), or `"never"`. With `light_worker` and without the package `onnx` only `"never"`.
        keep_versions: Number of delivered versions to keep, with the one in use, at least 1. `Device.roll_back` returns
            to the previous one.
        max_accuracy_drop: A round's model replaces the app's model if its accuracy on the validation data is lower by
            at most this, in [0, 1]. If the model in use is worse than a kept version by more than this, the device
            rolls back to that version. No effect without validation data.
        quantize: Exports an int8 file instead of a float file: `"dynamic"` quantises the weights, `"static"` also the
            activations, calibrated on the device's own samples. None for float.
        max_quantization_drop: Largest accepted loss of the int8 file, in [0, 1]: of accuracy on the validation data, or
            without such data, of agreement with the float file on the device's own samples. Otherwise the device
            exports the float file, with the event `not-quantized`.
        opset: Opset of the ONNX file, 13 to 20; None for the default, 18. PyTorch devices only.
        max_bytes: Maximum size of an exported file in bytes. A larger file does not replace the previous one (event
            `too-large`). None for no limit.
        dynamic_size: Whether the exported model accepts inputs of any size in all dimensions but the first, such as a
            fully convolutional model with adaptive pooling. PyTorch devices only.

    Raises:
        ConfigurationError: A value is out of range, or `quantize` is set without the packages onnx and onnxruntime.
    """

    export: Literal["round", "finish", "never"] = "round"
    keep_versions: int = 2
    max_accuracy_drop: float = 0.0
    quantize: Literal["dynamic", "static"] | None = None
    max_quantization_drop: float = 0.01
    opset: int | None = None
    max_bytes: int | None = None
    dynamic_size: bool = False

    def __post_init__(self) -> None:
        if self.export not in _EXPORTS:
            raise ConfigurationError(unknown_name("export", self.export, _EXPORTS))
        check_integer("keep_versions", self.keep_versions)
        check_flag("dynamic_size", self.dynamic_size)
        for name in ("max_accuracy_drop", "max_quantization_drop"):
            value = getattr(self, name)
            check_number(name, value)
            if not 0 <= value <= 1:
                raise ConfigurationError(f"{name} is {value}, must be in [0, 1]")
        if self.opset is not None:
            check_integer("opset", self.opset)
            if self.opset not in _OPSETS:
                raise ConfigurationError(f"opset is {self.opset}, must be {_OPSETS[0]} to {_OPSETS[-1]}")
        if self.max_bytes is not None:
            check_integer("max_bytes", self.max_bytes)
        self._check_quantize()

    def _check_quantize(self) -> None:
        if self.quantize is None:
            return
        if self.quantize not in _QUANTIZATIONS:
            raise ConfigurationError(unknown_name("quantize", self.quantize, _QUANTIZATIONS))
        missing = [name for name in ("onnx", "onnxruntime") if not is_installed(name)]
        if missing:
            raise ConfigurationError(f"quantize requires {' and '.join(missing)}: pip install 'fleetdistill[onnx]'")

    def check_used(self, *, has_worker: bool) -> None:
        """Raises ConfigurationError for settings that have no effect on this device.

        Args:
            has_worker: Whether the device has a `worker`, so that the run's extractor defines the graph.
        """
        chosen = {name: getattr(self, name) for name in ("quantize", "opset", "max_bytes", "dynamic_size")}
        names = [name for name, value in chosen.items() if value]
        if names and self.export == "never":
            raise ConfigurationError(f'{", ".join(names)} has no effect with export="never"; remove one of them')
        fixed = [name for name in names if name in ("opset", "dynamic_size")]
        if fixed and has_worker:
            raise ConfigurationError(f"{', '.join(fixed)} has no effect with worker=...; the worker defines the graph")
