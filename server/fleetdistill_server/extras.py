"""What a server may have or not: optional packages, and parts that the annexes add to it."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from fleetdistill.errors import ConfigurationError

__all__ = ["require"]

PACKAGES = frozenset(
    (
        "cryptography",
        "grpc_reflection",
        "matplotlib",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "prometheus_client",
        "pydantic",
        "rich",
        "safetensors",
        "sklearn",
        "sqlite_utils",
        "tomli_w",
        "torch",
        "torchvision",
        "typer",
    )
)
"""Modules of the extras `server` and `sim` that commands import."""
_EXTRAS_OF_COMMANDS = {"simulate": "sim", "audit": "sim", "dashboard": "dashboard"}
"""Extras of the commands that need more than `server`."""


def load_part(name: str) -> Any:
    """Imports a part of the server that an annex provides, by the name of its entry point in `fleetdistill.parts`.

    The server imports no annex by itself, and one that does not use a part does not load it.
    """
    return entry_points(group="fleetdistill.parts")[name].load()


def require(what: str, module: str, extra: str) -> None:
    """Checks that a module can be found; does not import it.

    Args:
        what: Setting or option that needs the module.
        module: Name of the module.
        extra: Extra of fleetdistill that installs it.

    Raises:
        ConfigurationError: The module is not installed.
    """
    if find_spec(module) is None:
        raise missing(what, module, f"'fleetdistill[{extra}]'")


def missing_of_command(command: str, package: str) -> ConfigurationError:
    """Returns the error about a package that a command of `fleetdistill` needs."""
    extra = _EXTRAS_OF_COMMANDS.get(command, "server")
    return missing(f"`fleetdistill {command}`", package, f"'fleetdistill[{extra}]'")


def missing(what: str, package: str, wanted: str) -> ConfigurationError:
    """Returns the error about a package that is not installed; `wanted` is what to install with pip."""
    return ConfigurationError(f"{what} needs {package}, which is not installed: pip install {wanted}")
