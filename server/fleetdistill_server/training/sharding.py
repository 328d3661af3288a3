"""Weights and optimiser states of a training that are fully sharded over several processes (FSDP).

During the training each process holds a part of the weights, gradients and optimiser states; a layer's weights are
gathered while it computes. Each layer of the model delegates its forward pass to a copy that `fully_shard` has sharded,
so a loss may call the model or any of its layers. Before and after the training every process has the whole weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fleetdistill.errors import KnowledgeError
from fleetdistill_server.training.weights import Weights

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class ShardedWeights(Weights):
    """Weights and optimiser states that are sharded within a `with` block, which all processes enter together.

    Args:
        model: The model that is trained.
        optimizer: Its optimiser.
        mesh: The processes.
    """

    sharded = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
        super().__init__(model, optimizer)
        self._mesh = mesh
        self._forwards: list[tuple[nn.Module, Any]] = []  # layers, and what their `forward` attribute was
        self._parts: dict[nn.Parameter, nn.Parameter] = {}

    def __enter__(self) -> Self:
        for layer in layers(self._model):
            sharded = self._sharded_copy(layer)
            self._delegate(layer, sharded)
            self._parts |= zip(layer.parameters(), sharded.parameters(), strict=True)
        self._move_optimizer(self._parts)
        self._replace_states(_part_like)
        for whole in self._parts:
            whole.data = whole.data.new_empty(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer, forward in self._forwards:
            del layer.__dict__["forward"]
            if forward is not None:
                layer.__dict__["forward"] = forward
        if kind is not None and not issubclass(kind, KnowledgeError):
            return  # this process ends, and the others do not gather their weights
        for whole, part in self._parts.items():
            whole.data = _gather(part)
        self._replace_states(lambda value, part: _gather(value).cpu())
        self._move_optimizer({part: whole for whole, part in self._parts.items()})

    # --- layers

    def _sharded_copy(self, layer: nn.Module) -> nn.Module:
        sharded = copy.deepcopy(layer)
        for own, other in zip(layer.modules(), sharded.modules(), strict=True):
            for name, buffer in own.named_buffers(recurse=False):
                setattr(other, name, buffer)
        scalars = {parameter for parameter in sharded.parameters() if not parameter.ndim}  # cannot be divided
        divided = fully_shard(sharded, mesh=self._mesh, reshard_after_forward=True, ignored_params=scalars)
        divided.set_gradient_divide_factor(1.0)  # gradients are summed, as without shards
        divided.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
        return sharded

    def _delegate(self, layer: nn.Module, sharded: nn.Module) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            for own, other in zip(layer.modules(), sharded.modules(), strict=True):
                other.training = own.training
            return sharded(*args, **kwargs)

        self._forwards.append((layer, layer.__dict__.get("forward")))
        layer.__dict__["forward"] = forward

    # --- optimiser

    def _move_optimizer(self, parameters: dict[nn.Parameter, nn.Parameter]) -> None:
        """Makes the optimiser update other parameters, with the states of the present ones."""
        for group in self._optimizer.param_groups:
            group["params"] = [parameters[item] for item in group["params"]]
        states = self._optimizer.state
        for one, other in parameters.items():
            if one in states:
                states[other] = states.pop(one)

    def _replace_states(self, replaced: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Replaces each state of the shape of its sharded parameter, given the state and the parameter."""
        for part, values in self._optimizer.state.items():
            for name, value in values.items():
                if isinstance(part, DTensor) and isinstance(value, Tensor) and value.shape == part.shape:
                    values[name] = replaced(value, part)

    # --- states

    def gradients(self) -> list[Tensor]:
        return [gradient for gradient in super().gradients() if not isinstance(gradient, DTensor)]

    def agreed(self, decision: bool) -> bool:
        """Returns the decision of the first process, because `state` gathers the weights in all."""
        agreed = torch.tensor(int(decision))
        distributed.broadcast(agreed, src=0)
        return bool(agreed)

    def state(self) -> dict[str, Any]:
        gathered = {whole: _gather(part).cpu() for whole, part in self._parts.items()}
        named = self._model.named_parameters(remove_duplicate=False)
        weights = {name: gathered[parameter].detach() for name, parameter in named}
        optimizer = self._optimizer.state_dict()
        optimizer["state"] = {
            number: {name: _gather(value).cpu() if isinstance(value, DTensor) else value for name, value in one.items()}
            for number, one in optimizer["state"].items()
        }
        return {"model": {**self._model.state_dict(), **weights}, "optimizer": optimizer}


def layers(model: nn.Module) -> list[nn.Module]:
    """Returns the parts of a model that are sharded one by one; they contain each parameter once."""
    result = list(_layers(model))
    sizes = sum(len(list(layer.parameters())) for layer in result)
    return result if sizes == len(list(model.parameters())) else [model]  # layers that share a parameter


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the children of containers and of the model itself, unless it has parameters of its own."""
    if next(model.parameters(recurse=False), None) is not None:
        yield model
        return
    for child in model.children():
        if isinstance(child, _CONTAINERS):
            yield from _layers(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _part_like(whole: Tensor, part: Tensor) -> Tensor:
    """Returns this process's part of a tensor, divided like a sharded one."""
    assert isinstance(part, DTensor)
    divided = distribute_tensor(whole.to(part.device), part.device_mesh, part.placements, src_data_rank=None)
    return divided.clone()  # without the memory of the whole


def _gather(value: Tensor) -> Tensor:
    """Returns the whole of a sharded tensor."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
