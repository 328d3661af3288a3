"""The torch models that a device delivers: a copy that only predicts, and ONNX files."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleetdistill.compute.base import FAULTS
from fleetdistill.deployment.batch import check_batch
from fleetdistill.deployment.settings import Deployment
from fleetdistill.errors import ModelError
from fleetdistill.training.model import place_of_inputs
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.onnx_file import OnnxReport, copy_onnx


class FrozenModel:
    """Copies a torch model; call it with a batch of inputs. Thread-safe if the module's `forward` is.

    Args:
        model: Maps inputs `[batch, *input_shape]` to logits `[batch, classes]`.
        input_shape: Shape of one input, with None where any size is accepted, as with `Deployment(dynamic_size=True)`;
            None before the device knows its run.
    """

    def __init__(self, model: nn.Module, input_shape: Sequence[int | None] | None) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._device, self._dtype = place_of_inputs(self._model)
        self._input_shape = None if input_shape is None else tuple(input_shape)

    def __call__(self, inputs: Any) -> Any:
        """Returns logits `[batch, classes]` float32, of the type of the inputs: NumPy array or torch tensor."""
        check_batch(inputs, self._input_shape)
        given = torch.as_tensor(inputs)
        with torch.no_grad():
            try:
                logits = self._model(given.to(self._device, self._dtype))
            except FAULTS as error:
                shape = list(given.shape)
                reason = str(error).strip().split("\n")[0]
                raise ModelError(f"the model cannot process a batch of shape {shape}: {reason}") from error
        made = logits.to(given.device, torch.float32)
        return made if isinstance(inputs, torch.Tensor) else made.numpy()


def export_variants(
    models: Mapping[str, nn.Module],
    in_use: str,
    path: Path,
    samples: Tensor,
    metadata: Mapping[str, str],
    deployment: Deployment,
) -> OnnxReport:
    """Writes the variant in use at `path`, and if there are several, each as `VARIANT.onnx` in its directory.

    Args:
        models: Variants by name.
        in_use: Name of the variant in use.
        path: File to write; its directory must exist.
        samples: Inputs `[n, *input_shape]`, n >= 1, on which each file is compared with its variant.
        metadata: Metadata of the file, as in `export_onnx`.
        deployment: Settings of the app for opset and input sizes.

    Returns:
        Report on the file at `path`, with the largest difference over all variants.

    Raises:
        ExportError: A file does not give the same outputs as its model.
    """
    opset, dynamic_size = deployment.opset, deployment.dynamic_size
    if len(models) == 1:
        return export_onnx(models[in_use].eval(), path, samples, metadata, opset=opset, dynamic_size=dynamic_size)
    reports = {
        name: export_onnx(
            model,
            path.with_name(f"{name}.onnx"),
            samples,
            {**metadata, "answer": name},
            opset=opset,
            dynamic_size=dynamic_size,
        )
        for name, model in models.items()
    }
    copy_onnx(reports[in_use].path, path)
    return replace(reports[in_use], path=path, max_difference=max(one.max_difference for one in reports.values()))
