"""Exports a run's server model to ONNX from the last checkpoint."""

from __future__ import annotations

from pathlib import Path

from fleetdistill.errors import ConfigurationError, ExportError
from fleetdistill.knowledge import SampleKnowledge
from fleetdistill.state.state_file import unpack_state
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.onnx_file import OnnxReport
from fleetdistill.wire.codec import decode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.store.store import Store

__all__ = ["export_server_model"]

_PARITY_SAMPLES = 64


def export_server_model(store: Store, run: str, path: Path) -> OnnxReport:
    """Exports the server model to ONNX and compares its outputs with PyTorch's on up to 64 samples.

    A model that reads inputs is compared on the proxy set, or on uniform noise in [0, 1) if the run has no proxy set. A
    model that reads features is compared on features that a device uploaded.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        path: Path of the ONNX file to write.

    Raises:
        ConfigurationError: The store has no run of this name, or its method has no model on the server.
        ExportError: The run has not completed a round, the store has no uploaded features to compare on, or the
            outputs differ.
    """
    import torch

    from fleetdistill_server.config.run_config import run_config
    from fleetdistill_server.engine.contract import build_method

    exporting = store.runs.existing(run)
    if not exporting.completed_rounds:
        raise ExportError(f"run {run!r} has not completed a round yet; export it after its first round")
    config = run_config({**exporting.config, "server": {"torch_device": "cpu"}, "proxy": {}})
    method = build_method(config)
    method.load_state_dict(unpack_state(store.blobs.get_state(exporting.checkpoint)))
    exported = method.export()
    if exported is None:
        raise ConfigurationError(f"{config.run.method} has no model on the server to export")
    reads_inputs = tuple(exported[1]) == method.context.input_shape
    rows = _inputs(store, exporting.contract) if reads_inputs else _uploaded_features(store, run)
    samples = torch.from_numpy(rows).float()
    metadata = {"run": run, "round": str(store.runs.checkpoints(run)[-1].round), "method": config.run.method}
    return export_onnx(exported[0], path, samples, metadata)


def _inputs(store: Store, contract_bytes: bytes):  # type: ignore[no-untyped-def]  # a numpy array
    """Returns up to 64 rows of the proxy set, or 64 rows of uniform noise in [0, 1) if the run has no proxy set."""
    import numpy as np

    from fleetdistill.training.proxy_set import proxy_of

    contract = contract_pb2.Contract.FromString(contract_bytes)
    if contract.proxy_digest:
        return proxy_of(decode(store.blobs.open(contract.proxy_digest))).inputs[:_PARITY_SAMPLES].copy()
    return np.random.default_rng(0).random((_PARITY_SAMPLES, *contract.input_shape), np.float32)


def _uploaded_features(store: Store, run: str):  # type: ignore[no-untyped-def]  # a numpy array of any float type
    kept = (upload for upload in reversed(store.asks.uploads(run)) if store.blobs.has(upload.sha256))
    for upload in kept:
        for part in decode(store.blobs.open(upload.sha256)).values():
            if isinstance(part, SampleKnowledge) and part.features:
                return next(iter(part.features.values()))[:_PARITY_SAMPLES].copy()
    raise ExportError(
        f"run {run!r} has no uploaded features to compare the export on: its method uploads none, or they were "
        "pruned; if they were, export from a backup that still has them"
    )
