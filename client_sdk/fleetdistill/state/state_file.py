"""Nested state with tensors, such as an optimiser's, as one safetensors document: no pickle, no code."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save

from fleetdistill.errors import StateError

_Place = tuple[object, ...]
"""Where a tensor's numbers are, and how they are read: two tensors with the same are one."""


def pack_state(state: Any) -> bytes:
    """Packs dicts, lists, numbers, strings, None and tensors; dict keys may be strings or ints.

    A tensor that is in several places, such as a layer that two models share, is packed once.

    Raises:
        StateError: A value of another type is inside.
    """
    tensors: dict[_Place, tuple[str, torch.Tensor]] = {}
    outline = _outline(state, tensors)
    return bytes(save(dict(tensors.values()), metadata={"outline": json.dumps(outline)}))


def unpack_state(data: bytes) -> Any:
    """Restores what `pack_state` packed, tensors on the CPU.

    Raises:
        StateError: The data are damaged.
    """
    try:
        header_bytes = int.from_bytes(data[:8], "little")
        outline = json.loads(json.loads(data[8 : 8 + header_bytes])["__metadata__"]["outline"])
        return _restore(outline, load(data))
    except Exception as error:  # safetensors has an error of its own kind for every fault
        raise StateError(f"the saved state is damaged ({error}); remove it to start afresh") from error


def _outline(value: Any, tensors: dict[_Place, tuple[str, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        place = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        if place not in tensors:
            tensors[place] = (str(len(tensors)), value.detach().cpu().contiguous().clone())
        return {"tensor": tensors[place][0]}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int):
                raise StateError(f"a state may not have a {type(key).__name__} as a key")
        return {"items": [[key, _outline(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_outline(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StateError(f"a state may not hold a {type(value).__name__}")


def _restore(outline: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(outline, list):
        return [_restore(item, tensors) for item in outline]
    if isinstance(outline, dict) and "tensor" in outline:
        return tensors[outline["tensor"]]
    if isinstance(outline, dict):
        return {key: _restore(item, tensors) for key, item in outline["items"]}
    return outline
