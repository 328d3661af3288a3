"""Nested state with tensors, such as an optimiser's, as one safetensors document, without pickle."""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
from safetensors.numpy import save as save_arrays
from safetensors.torch import load, save

from fleetdistill.errors import StateError
from fleetdistill.state.state_check import NO_CRC, matches_crc, with_crc

__all__ = ["unpack_state"]

_IN_NUMPY = {
    *(torch.float64, torch.float32, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
"""Types of tensors that NumPy has too."""
_LARGE_BYTES = 4096
_TensorKey = tuple[object, ...]
"""Memory address, device, type, shape and strides of a tensor; tensors with equal keys are identical."""


def pack_state(state: Any) -> bytes:
    """Packs dicts, lists, numbers, strings, None and tensors; dict keys must be strings or ints.

    A tensor that occurs several times, such as in a layer shared by two models, is packed once. So is a large one that
    is equal to another, such as in two copies of a pretrained extractor; `unpack_state` returns copies of it.

    Raises:
        StateError: The state contains a value of another type.
    """
    tensors = _Tensors()
    outline = _outline(state, tensors)
    sealed = {"crc32c": NO_CRC, **(outline if isinstance(outline, dict) else {"value": outline})}
    # One metadata key: safetensors writes several in any order, but equal states must have equal bytes.
    return with_crc(_document(tensors.by_name, {"outline": json.dumps(sealed)}))


class _Tensors:
    """The tensors of a document.

    Attributes:
        by_name: Contiguous tensors on the CPU, each once.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._references: dict[_TensorKey, dict[str, Any]] = {}
        self._names: dict[tuple[torch.dtype, torch.Size, int], str] = {}  # of large tensors by type, shape and CRC-32

    def refer(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Returns the outline's reference to a tensor; `copy` says that another tensor has its name."""
        tensor_key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor_key not in self._references:
            self._references[tensor_key] = self._add(tensor.detach().cpu().contiguous())
        return self._references[tensor_key]

    def _add(self, tensor: torch.Tensor) -> dict[str, Any]:
        new = str(len(self.by_name))
        if tensor.nbytes >= _LARGE_BYTES:
            data = tensor.flatten().view(torch.uint8)
            content = tensor.dtype, tensor.shape, zlib.crc32(data.numpy().data)
            name = self._names.setdefault(content, new)
            if name != new and torch.equal(data, self.by_name[name].flatten().view(torch.uint8)):
                return {"tensor": name, "copy": True}
        self.by_name[new] = tensor
        return {"tensor": new}


def _document(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """Returns contiguous tensors as a safetensors document; both ways give the same bytes."""
    if all(tensor.dtype in _IN_NUMPY for tensor in tensors.values()):
        return bytes(
            save_arrays({name: one.numpy(force=True) for name, one in tensors.items()}, metadata)
        )  # a quarter of the time
    return bytes(save({name: one.clone() for name, one in tensors.items()}, metadata))  # rejects views of one tensor


def unpack_state(data: bytes) -> Any:
    """Returns the state that `pack_state` packed, with tensors on the CPU.

    Raises:
        StateError: The data are damaged.
    """
    try:
        header_bytes = int.from_bytes(data[:8], "little")
        outline = json.loads(json.loads(data[8 : 8 + header_bytes])["__metadata__"]["outline"])
        if not matches_crc(data, outline):
            raise StateError("it does not match its checksum")
        return _restore(outline, load(data))
    except Exception as error:  # safetensors raises its own exception type
        raise StateError(f"the saved state is damaged: {error}") from error


def _outline(value: Any, tensors: _Tensors) -> Any:
    if isinstance(value, torch.Tensor):
        return tensors.refer(value)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int):
                raise StateError(f"a key of a state is a {type(key).__name__}, must be str or int")
        return {"items": [[key, _outline(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_outline(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StateError(f"a state contains a {type(value).__name__}; expected tensors, dicts, lists, numbers, str or None")


def _restore(outline: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(outline, list):
        return [_restore(item, tensors) for item in outline]
    if isinstance(outline, dict) and "tensor" in outline:
        tensor = tensors[outline["tensor"]]
        return tensor.clone() if outline.get("copy") else tensor
    if isinstance(outline, dict) and "value" in outline:
        return _restore(outline["value"], tensors)
    if isinstance(outline, dict):
        return {key: _restore(item, tensors) for key, item in outline["items"]}
    return outline
