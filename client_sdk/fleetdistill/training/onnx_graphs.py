"""Traces models to ONNX, and fills the weights of a model into the graph of another one of its architecture.

We trace with `torch.onnx.export(dynamo=False)`. Measured with torch 2.15 on one core, digits and ResNet12 alike:

| exporter | first export | second export | memory on top of torch's 530 MB |
|---|---|---|---|
| `dynamo=False` (TorchScript) | 0.08 to 0.19 s | 0.01 to 0.03 s | 35 to 40 MB |
| `dynamo=True` (torch.export) | 2.9 to 3.2 s | 0.6 to 1.2 s | 235 MB |

A device exports next to the app, so time and memory are decisive. The tracer also does not need onnxscript. The other
exporter rejects data-dependent control flow, where the tracer follows the branch of its example; the comparison on real
samples detects such a model, and the tracer's warnings about it are not suppressed.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fleetdistill.errors import ExportError
from fleetdistill.training.onnx_file import doing

__all__ = ["Graphs"]

OPSET = 18
"""Opset of a file unless another one is given; fixed, so that files of a newer torch load in an older onnxruntime."""
BATCH: Mapping[int, str] = MappingProxyType({0: "batch"})
"""Names of an input's free dimensions by position: only the batch size."""


def trace(
    twin: nn.Module,
    batch: Tensor,
    path: Path,
    output: str = "logits",
    *,
    opset: int = OPSET,
    free: Mapping[int, str] = BATCH,
    **options: Any,
) -> None:
    """Writes the traced graph of one batch, with a free batch size.

    Args:
        twin: The model, in eval mode, float32 and on the CPU.
        batch: Inputs `[batch, *input_shape]`.
        path: The file.
        output: Name of the output.
        opset: Opset of the file.
        free: Names of all free dimensions of the input, by position.
        options: Further arguments of `torch.onnx.export`.

    Raises:
        ExportError: The model cannot be traced.
    """
    with _named_causes(), doing("tracing the model"), _silent_exporter(), warnings.catch_warnings():
        # Suppress torch's warnings about its own exporter only; warnings about the model's code must reach the app.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=rf"torch\.|{re.escape(__name__)}$")
        warnings.filterwarnings("ignore", message="Constant folding - Only steps=1")  # from padding; the rest is folded
        with _without_fast_path(twin):
            torch.onnx.export(
                twin,
                (batch,),
                str(path),
                dynamo=False,
                verbose=False,
                opset_version=opset,
                input_names=["input"],
                output_names=[output],
                dynamic_axes={"input": dict(free), output: {0: "batch"}},
                **options,
            )


@contextmanager
def _without_fast_path(twin: nn.Module) -> Iterator[None]:
    """Makes attention run its own layers, as with gradients, instead of one fused operator that ONNX does not have."""
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    with torch.enable_grad():
        yield


@contextmanager
def _named_causes() -> Iterator[None]:
    """Says what to change in a model with an operator that cannot be exported."""
    try:
        yield
    except ExportError as error:
        if re.search(r"aten::_upsample_\w+_aa", str(error)):
            raise ExportError(f"{error}; resize with antialias=False") from error
        if "ONNX export of operator" in str(error) or "is not supported" in str(error):
            raise ExportError(f"{error}; replace this layer") from error
        raise


@contextmanager
def _silent_exporter() -> Iterator[None]:
    """Keeps the exporter from printing the graph, hundreds of lines, when it fails; no setting of torch does."""
    log = getattr(torch._C, "_jit_onnx_log", None)
    if log is None:
        yield
        return
    torch._C._jit_onnx_log = lambda *parts: None
    try:
        yield
    finally:
        torch._C._jit_onnx_log = log


class Graphs:
    """Graphs of the models that were traced, by architecture.

    A graph is traced without the exporter's rewriting of weights (folding of constants, fusion of batch norm, one name
    for equal tensors), so that the only weights in it are the model's tensors under their names. A model with other
    tensors in its graph, which is compared byte for byte, is traced each time. onnxruntime rewrites when it loads.
    """

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def write(self, twin: nn.Module, batch: Tensor, path: Path, opset: int, free: Mapping[int, str]) -> bool:
        """Writes a model's file; traces the first model of an architecture. Arguments are those of `trace`.

        Returns:
            False if nothing was written, because the weights of this architecture cannot be filled in.
        """
        for module in twin.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer)  # outside the state, it would become a constant of the graph
        key = repr((_architecture(twin), tuple(batch.shape[1:]), opset, sorted(free.items())))
        if key not in self._known:
            self._known[key] = _trace_to_fill(twin, batch, path, opset, free)
        graph = self._known[key]
        if graph is not None:
            state = _tensors(twin)
            for tensor in graph.graph.initializer:
                tensor.raw_data = _bytes(state[tensor.name])
            path.write_bytes(graph.SerializeToString())
        return graph is not None


def _trace_to_fill(twin: nn.Module, batch: Tensor, path: Path, opset: int, free: Mapping[int, str]) -> Any:
    """Returns the graph of an architecture; None if a weight in it is not a tensor of the model."""
    try:
        trace(
            twin,
            batch,
            path,
            opset=opset,
            free=free,
            training=torch.onnx.TrainingMode.PRESERVE,  # of a model in eval mode, which only prevents the fusion
            do_constant_folding=False,
            keep_initializers_as_inputs=True,  # prevents one name for tensors of equal bytes
        )
    except ExportError:
        return None
    with doing("reading the traced model"):
        import onnx

        graph = onnx.load(path)
    state = {name: _bytes(tensor) for name, tensor in _tensors(twin).items()}
    weights = {tensor.name: tensor.raw_data for tensor in graph.graph.initializer}
    if any(state.get(name) != data for name, data in weights.items()):
        return None
    inputs = [item for item in graph.graph.input if item.name not in weights]
    del graph.graph.input[:]
    graph.graph.input.extend(inputs)
    return graph


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name, shared ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy(force=True).tobytes()


def _architecture(model: nn.Module) -> Any:
    """Describes modules, their attributes, and names, shapes and types of their tensors; not the weights.

    Attributes of other types than numbers, texts, tensors and containers count by their type only; a file that such an
    attribute makes wrong fails its comparison.
    """
    usual = vars(nn.Module()).keys()  # hooks, and the dictionaries of tensors and modules
    tensors = _tensors(model)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return (
        [
            (
                name,
                type(module),
                str(module),
                _described({key: vars(module)[key] for key in vars(module).keys() - usual}),
            )
            for name, module in model.named_modules(remove_duplicate=False)
        ],
        [(name, first[id(tensor)], tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()],
    )


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, hashlib.sha256(_bytes(value)).hexdigest()
    if isinstance(value, dict):
        return sorted((str(key), repr(_described(item))) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), [_described(item) for item in value]
    return value if isinstance(value, int | float | complex | str | bytes | torch.dtype | None) else type(value)
