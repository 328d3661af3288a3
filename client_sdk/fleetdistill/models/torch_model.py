"""`TorchModel`: the app's PyTorch model with its options. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from fleetdistill.checked import check_function, check_type, shown
from fleetdistill.errors import ConfigurationError
from fleetdistill.lazy import get_loaded
from fleetdistill.models import USUAL_PREDICTOR, check_predictor

if TYPE_CHECKING:
    from torch import nn

_TORCH_DEVICES = ("cpu", "cuda", "mps", "xpu", "xla", "hpu", "mtia", "vulkan", "privateuseone", "meta")


@dataclass(frozen=True, eq=False)
class TorchModel:
    """The app's model, with what a device needs to know about it.

        Device(model=TorchModel(make_model, torch_device="cuda"), ...)

    Attributes:
        module: Local model, or a function that builds it when it is first needed, as `Device(model=...)`.
        name: Name of the model in the server's lists. Default: the module's class name, or the layers with weights of
            one that `split_sequential` or `wrap` made, such as `2 Conv2d, Linear`.
        torch_device: Torch device to train on, such as `"cpu"` or `"cuda"`.
        predictor: Predictor that the device trains in a classstats run with `predictor = "trained"`: a name in
            `fleetdistill.models.PREDICTORS`, or a function `(inputs, classes) -> nn.Module`.

    Raises:
        ConfigurationError: A value is invalid.
        ModelError: `module` is a module, but not a local model. A function is called later.
    """

    module: nn.Module | Callable[[], nn.Module]
    _: KW_ONLY
    name: str = ""
    torch_device: str = "cpu"
    predictor: str | Callable[[int, int], nn.Module] = USUAL_PREDICTOR

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "text")
        check_predictor(self.predictor)
        _check_torch_device(self.torch_device)
        _check_module(self.module)


def _check_torch_device(name: object) -> None:
    """Checks the name of a torch device without loading torch; a build without that device fails when it is used.

    Raises:
        ConfigurationError: torch has no device of this name.
    """
    torch = get_loaded("torch")
    if torch is None:
        known = isinstance(name, str) and bool(re.fullmatch(rf"({'|'.join(_TORCH_DEVICES)})(:\d+)?", name))
    else:
        known = _is_device(torch, name)
    if not known:
        raise ConfigurationError(f'torch_device is {shown(name)}, expected a torch device, such as "cpu" or "cuda:0"')


def _is_device(torch: Any, name: object) -> bool:
    try:
        torch.device(name)
    except (RuntimeError, TypeError):
        return False
    return not isinstance(name, int)


def _check_module(module: object) -> None:
    """Checks a module; a function is called later, when the model is needed.

    Raises:
        ConfigurationError: The argument is neither a module nor a function.
        ModelError: The module is not a local model.
    """
    by_name = (
        f"; for a built-in model, lambda: fleetdistill.models.build_model({module!r})"
        if isinstance(module, str)
        else ""
    )
    check_function("model", module, f"that returns a torch.nn.Module, or the module itself{by_name}")
    torch = get_loaded("torch")  # an app that passes a module has loaded it
    if torch is not None and isinstance(module, torch.nn.Module):
        from fleetdistill.training.model import check_local_model

        check_local_model(module)
