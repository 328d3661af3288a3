"""Random numbers of torch that neither use nor change torch's global generators, which belong to the app.

    with own_randomness(seed):
        model(x)  # dropout draws the same numbers as after torch.manual_seed(seed)

Applies to the calling thread. Operations in the block that draw from a global generator, such as dropout and the
initialisation of layers, draw from a separate generator instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["own_randomness", "without_app"]
_aten = torch.ops.aten
_LIKE: Mapping[Any, Callable[..., torch.Tensor]] = {
    _aten.rand_like.default: lambda result, generator: result.uniform_(0, 1, generator=generator),
    _aten.randn_like.default: lambda result, generator: result.normal_(0, 1, generator=generator),
    _aten.randint_like.default: lambda result, high, generator: result.random_(0, high, generator=generator),
    _aten.randint_like.low_dtype: lambda result, low, high, generator: result.random_(low, high, generator=generator),
}
"""Operations without a variant for a generator, by what they do with a tensor of the wanted shape and type."""


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Makes operations of the calling thread draw from generators of their own, seeded with `seed`."""
    if is_alone():
        with _global_generators(seed):
            yield
        return
    mode = _OwnGenerators(seed)
    token = _current.set(mode)
    try:
        with mode:
            yield
    finally:
        _current.reset(token)


@contextmanager
def draws_nothing() -> Iterator[None]:
    """Saves the search for random operations in the block, which must have none; about 15 us for each operation.

    Operations that draw anyway, such as dropout that is computed again by `torch.utils.checkpoint`, use the global
    generators.
    """
    mode = _current.get()
    if mode is None:
        yield
        return
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mode.__enter__()  # type: ignore[no-untyped-call]


@contextmanager
def _global_generators(seed: int) -> Iterator[None]:
    """Seeds torch's global generators, and restores their state afterwards."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    states = [generator.get_state() for generator in generators]
    for one in generators:
        one.manual_seed(seed)
    try:
        yield
    finally:
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)


class _OwnGenerators(TorchDispatchMode):
    """Passes its own generators to every operation that draws random numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        if func in _LIKE:
            result = torch.empty_like(args[0], **kwargs)
            return _LIKE[func](result, *args[1:], generator=self._generator(device))
        variant = _with_generator(func)
        if variant is not None:
            return variant(*args, **{**kwargs, "generator": self._generator(device)})
        return self._lent(device, lambda: func(*args, **kwargs))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def _lent(self, device: torch.device, draw: Callable[[], Any]) -> Any:
        """Draws from the global generator in the state of our own, and restores its state; for CUDA's dropout."""
        shared = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        own = self._generator(device)
        before = shared.get_state()
        shared.set_state(own.get_state())
        try:
            return draw()
        finally:
            own.set_state(shared.get_state())
            shared.set_state(before)


_current: ContextVar[_OwnGenerators | None] = ContextVar("fleetdistill_own_generators", default=None)
_variants: dict[Any, Any] = {}


def _with_generator(func: Any) -> Any:
    """Returns the variant of an operation that accepts a generator, or None if there is none."""
    if func not in _variants:
        wanted = [argument.name for argument in func._schema.arguments]
        packet = func.overloadpacket
        result = [func, *(getattr(packet, name) for name in packet.overloads())]
        _variants[func] = next((item for item in result if _accepts(item, wanted)), None)
    return _variants[func]


def _accepts(func: Any, wanted: list[str]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return "generator" in names and [name for name in names if name != "generator"] == [
        name for name in wanted if name != "generator"
    ]


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Returns the device of an operation's first tensor, or of the tensor that it creates."""
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    device = torch.device(kwargs.get("device") or "cpu") if tensor is None else tensor.device
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


# --- Whether a computation shares its process with an app, whose settings of torch must then be protected.

_alone: ContextVar[bool] = ContextVar("fleetdistill_alone", default=False)


@contextmanager
def without_app() -> Iterator[None]:
    """Declares that the block runs in a process without an app, such as a simulation with a single thread.

    `in_own_thread` then uses the calling thread, and `own_randomness` the global generators, whose state it restores.
    Both give the same results as otherwise. The caller sets torch's number of threads.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_alone() -> bool:
    """Returns whether the calling code runs in a block of `without_app`."""
    return _alone.get()
