"""Completes exported ONNX files: quantises them if the app wants, and adds version and digest."""

from __future__ import annotations

import shutil
from pathlib import Path

from fleetdistill.compute.base import Compute
from fleetdistill.deployment.quantization import QuantizationCheck, quantize
from fleetdistill.deployment.settings import Deployment
from fleetdistill.deployment.stamp import stamped
from fleetdistill.deployment.versions import Version
from fleetdistill.device.events import Events
from fleetdistill.errors import ExportError
from fleetdistill.training.onnx_file import doing

_MODEL = "model.onnx"


class Finishing:
    """Completes the files of one export.

    Args:
        events: Emits events to the app.
        deployment: Settings of the app.
        compute: Compute backend that has written the files.
        version: Version of the exported model.

    Attributes:
        difference: Largest absolute difference between logits of an int8 file and of its float file; 0 without int8.
    """

    def __init__(self, events: Events, deployment: Deployment, compute: Compute, version: Version) -> None:
        self._events = events
        self._deployment = deployment
        self._compute = compute
        self._version = version
        self.difference = 0.0

    def finish(self, folder: Path) -> tuple[str, ...]:
        """Completes all files in a folder; returns their names, `model.onnx` last.

        With several variants `model.onnx` is a copy of one of them, and is not quantised twice.
        """
        in_use = (folder / _MODEL).read_bytes()
        variants = sorted(path for path in folder.glob("*.onnx") if path.name != _MODEL)
        same = [path for path in variants if path.read_bytes() == in_use]
        for path in variants or [folder / _MODEL]:
            self._complete(path)
        if same:
            shutil.copyfile(same[0], folder / _MODEL)
        elif variants:
            self._complete(folder / _MODEL)
        return (*(path.name for path in variants), _MODEL)

    def _complete(self, path: Path) -> None:
        metadata = {"version": str(self._version.number)}
        if self._deployment.quantize is not None and self._quantize(path, self._deployment.quantize):
            metadata["quantized"] = self._deployment.quantize
        with doing(f"writing {path.name}"):
            path.write_bytes(stamped(path.read_bytes(), metadata))

    def _quantize(self, path: Path, how: str) -> bool:
        """Replaces a float file by its int8 file if that is good enough; returns whether it did."""
        quantized = path.with_suffix(".int8")
        try:
            check = quantize(path, quantized, how, self._compute.check_data())
        except ExportError as error:
            self._report(path, str(error), {})
            return False
        limit = self._deployment.max_quantization_drop
        if not check.drop <= limit:
            values = {check.measured: check.full, "quantized": check.quantized, "max_quantization_drop": limit}
            self._report(path, _reason(check, limit), values)
            return False
        quantized.replace(path)
        self.difference = max(self.difference, check.difference)
        return True

    def _report(self, path: Path, reason: str, values: dict[str, float]) -> None:
        text = f"{path.name} is exported as a float file: {reason}"
        self._events.emit("not-quantized", self._version.round, text, {"version": self._version.number, **values})


def _reason(check: QuantizationCheck, limit: float) -> str:
    return (
        f"{check.measured} of the int8 file is {check.quantized:.3f}, of the float file {check.full:.3f}; "
        f"max_quantization_drop is {limit:g}"
    )
