"""ONNX export of the torch models that a device delivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from fleetdistill.deployment.settings import Deployment
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.onnx_file import OnnxReport, copy_onnx


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
