"""The hardware that server halves compute on, and how: device, precision, memory layout, compilation, memory limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from fleetdistill_server.config.engine_config import EngineSection

_CPU_RESIDENT_BYTES = 256 << 20
_GPU_RESIDENT_SHARE = 0.5
_TRAINING_COPIES = 5  # weights, gradients, their sums over processes, and two states of Adam
_GPU_TRAINING_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The torch device of the server half and the settings of its computations.

    The defaults give float32 results that are bit-equal for equal thread counts on a CPU.

    Attributes:
        device: Torch device.
        dtype: Type of matrix products and convolutions in training and inference: float32, or bfloat16 for automatic
            mixed precision. Weights, losses and optimiser states stay float32.
        channels_last: Whether convolutions store channels last during training.
        compile: Whether forward passes are compiled: `on`, `off`, or `auto` for long trainings only.
        compile_backend: Backend of `torch.compile`.
        micro_batch: Largest number of rows in one forward pass; 0 for the whole mini-batch.
        resident_bytes: Largest size of training data that are kept on the device; larger data are streamed. 0 for half
            of the GPU's free memory, or 256 MiB on a CPU.
        sharding: Whether several processes shard weights, gradients and optimiser states: `full`, `none`, or `auto` if
            they would take more than half of a GPU's memory.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    compile: Literal["auto", "on", "off"] = "off"
    compile_backend: str | Callable[..., Any] = "inductor"
    micro_batch: int = 0
    resident_bytes: int = 0
    sharding: Literal["auto", "none", "full"] = "auto"

    @classmethod
    def of(cls, device: torch.device, settings: EngineSection) -> Hardware:
        """Returns the hardware that `[engine]` describes; `auto` becomes bfloat16 on GPUs that support it."""
        return cls(
            device=device,
            dtype=_dtype(device, settings.precision),
            channels_last=device.type == "cuda",
            compile="off" if settings.compile == "auto" and device.type != "cuda" else settings.compile,
            micro_batch=settings.micro_batch,
            resident_bytes=settings.resident_bytes,
            sharding=settings.sharding,
        )

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the context of forward passes."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def keeps(self, data_bytes: int) -> bool:
        """Returns whether training data of this size are kept on the device."""
        limit = self.resident_bytes
        if not limit and self.device.type == "cuda":
            limit = int(_GPU_RESIDENT_SHARE * torch.cuda.mem_get_info(self.device)[0])
        return data_bytes <= (limit or _CPU_RESIDENT_BYTES)

    def shards(self, model: nn.Module) -> bool:
        """Returns whether several processes shard the training of a model."""
        if self.sharding != "auto" or self.device.type != "cuda":
            return self.sharding == "full"
        needed = _TRAINING_COPIES * sum(parameter.nbytes for parameter in model.parameters())
        return needed > _GPU_TRAINING_SHARE * torch.cuda.get_device_properties(self.device).total_memory

    @contextmanager
    def layout(self, model: nn.Module) -> Iterator[None]:
        """Stores the weights of convolutions channels last in the block; checkpoints have the usual layout."""
        if not self.channels_last:
            yield
            return
        model.to(memory_format=torch.channels_last)
        try:
            yield
        finally:
            model.to(memory_format=torch.contiguous_format)


def _dtype(device: torch.device, precision: str) -> torch.dtype:
    if precision == "auto":
        fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32
