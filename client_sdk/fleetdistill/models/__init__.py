"""The zoo of device models, built from a name or from `package.module:factory`.

Listing the zoo does not import torch; building a model imports the model's file. The server's predictors have a
separate table and use `build` too. `PREDICTORS` lists the devices' predictors for class statistics, which
`fleetdistill.methods.classstats.space_model` builds.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill.names import unknown_name

if TYPE_CHECKING:
    from torch import nn

    from fleetdistill.models.dafkd import NoiseGenerator

__all__ = [
    "GENERATORS",
    "LIBRARIES",
    "MODELS",
    "PREDICTORS",
    "RECOMMENDED",
    "USUAL_PREDICTOR",
    "build_generator",
    "build_model",
    "is_of_library",
    "path_of",
    "resolve",
]

MODELS: Mapping[str, str] = MappingProxyType(
    {
        name: f"fleetdistill.models.{file}:{name}"
        for file, names in {
            "cdkt": (
                "cdkt_fmnist",
                "cdkt_fmnist_small",
                "cdkt_cifar",
                "cdkt_cifar_small",
                "cdkt_digits",
                "cdkt_digits_small",
            ),
            "digits": (
                "digits_extractor",
                "digits_linear",
                "digits_mlp_small",
                "digits_mlp_large",
                "digits_cnn_small",
                "digits_cnn_large",
            ),
            "dafkd": ("dafkd_cnn", "dafkd_resnet11", "dafkd_resnet20"),
            "fedd2s": ("fedd2s_m1", "fedd2s_m2", "fedd2s_digits"),
            "feddkd": ("feddkd_femnist", "feddkd_vgg9", "feddkd_five_digits"),
            "scattering": ("identity", "scattering"),
            "resnet": ("resnet_extractor", "resnet2", "resnet4", "resnet6", "resnet10", "resnet12"),
        }.items()
        for name in names
    }
)
"""Factory of each device model and extractor, as `module:function` by name."""

GENERATORS: Mapping[str, str] = MappingProxyType(
    {
        name: f"fleetdistill.models.dafkd:{name}"
        for name in (
            "dafkd_generator",
            "dafkd_generator_tanh",
            "digits_generator",
            "embedding_generator",
            "feature_generator",
        )
    }
)
"""Factory of each generator, as `module:function` by name."""


LIBRARIES: Mapping[str, str] = MappingProxyType(
    {name: f"fleetdistill.models.pretrained:{name}_network" for name in ("torchvision", "timm")}
)
"""Factory of the pretrained extractors of each library, `library:network`, as `module:function`."""
RECOMMENDED = "DEFAULT"
"""Option `weights` of a pretrained extractor: the weights that its library recommends, which it downloads."""
_LINEAR = {"linear": "fleetdistill.models.pretrained:linear_model"}


def is_of_library(extractor: str) -> bool:
    """Returns whether a name in [model] is an extractor of a library, such as `torchvision:resnet18`."""
    return extractor.partition(":")[0] in LIBRARIES


def build_model(name_or_path: str, **options: Any) -> nn.Module:
    """Builds a device model or an extractor.

    A path imports and runs code: take it only from local configuration, never from a received message. Weights
    are drawn from torch's global random generator.

    Args:
        name_or_path: A key of `MODELS`, or your own `package.module:factory`. `torchvision:NETWORK` and `timm:NETWORK`
            are extractors of these libraries, see `fleetdistill.models.pretrained`; `linear:EXTRACTOR` is a device
            model of an extractor and one linear layer.
        **options: Arguments of the factory; the zoo's have `input_shape` (channels, height, width) and `classes`, an
            extractor `input_shape` only, and one of a library `weights`, too.

    Raises:
        ConfigurationError: The name is unknown, the path is not a factory of modules, or the factory does not take the
            options.
    """
    kind, _, name = name_or_path.partition(":")
    factory = {**LIBRARIES, **_LINEAR}.get(kind)
    if factory is None:
        return build(MODELS, "device model", name_or_path, options)
    return build({name_or_path: factory}, "device model", name_or_path, {"name": name, **options})


PREDICTORS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "space_linear": (),
        "space_mlp_16": (16,),
        "space_mlp_64": (64,),
        "space_mlp_128": (128,),
        "space_mlp_128_64": (128, 64),
    }
)
"""Predictors for class statistics by name, with the widths of their hidden layers."""
USUAL_PREDICTOR = "space_mlp_64"
"""Default predictor of a device, a key of `PREDICTORS`."""


def check_predictor(wanted: object) -> None:
    """Raises ConfigurationError unless `wanted` is a key of `PREDICTORS` or a function."""
    if not callable(wanted) and wanted not in tuple(PREDICTORS):
        raise ConfigurationError(f"{unknown_name('predictor', wanted, PREDICTORS)}, or a function of (inputs, classes)")


def build_generator(name: str, **options: Any) -> NoiseGenerator:
    """Builds a generator. The name comes from the contract, so paths to other code are not accepted.

    Args:
        name: A key of `GENERATORS`.
        **options: `shape` of one sample, `noise_dim`, and `classes` (0 for a generator without labels).

    Raises:
        ConfigurationError: The name is unknown, or the options do not fit the generator.
    """
    if name not in GENERATORS:
        raise ConfigurationError(unknown_name("generator", name, sorted(GENERATORS)))
    return build(GENERATORS, "generator", name, options)  # type: ignore[return-value]  # the table's are of this class


def build(table: Mapping[str, str], kind: str, name_or_path: str, options: Mapping[str, Any]) -> nn.Module:
    """Builds a module from a name in `table` or from a path; `kind` names it in error messages.

    Raises:
        ConfigurationError: See `build_model`.
    """
    factory = resolve(table, kind, name_or_path)
    _check_options(factory, f"{kind} {name_or_path!r}", options)
    try:
        model = factory(**options)
    except FleetDistillError:
        raise
    except Exception as error:  # the app's function may raise anything
        raise ConfigurationError(f"{kind} {name_or_path!r} raised {type(error).__name__}: {error}") from error
    from torch import nn  # imported here because listing models must work without torch

    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{kind} {name_or_path!r} built a {type(model).__name__}, expected a torch.nn.Module")
    return model


def resolve(table: Mapping[str, str], kind: str, name_or_path: str) -> Callable[..., Any]:
    """Returns the factory for a name in `table` or for `package.module:factory`.

    Raises:
        ConfigurationError: The name is not in the table, or the module or its function does not exist.
    """
    module_name, colon, factory_name = table.get(name_or_path, name_or_path).partition(":")
    if not (colon and module_name and factory_name):
        raise ConfigurationError(f"{unknown_name(kind, name_or_path, sorted(table))}, or package.module:factory")
    try:
        factory = getattr(import_module(module_name), factory_name, None)
    except Exception as error:  # the app's module may raise anything
        remedy = ""
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            remedy = "; it needs PyTorch: pip install 'fleetdistill[train]'"
        raise ConfigurationError(f"{kind} {name_or_path!r}: cannot import {module_name!r}: {error}{remedy}") from error
    if not callable(factory):
        raise ConfigurationError(f"{kind} {name_or_path!r}: {module_name!r} has no function {factory_name!r}")
    return factory  # type: ignore[no-any-return]


def path_of(factory: str | Callable[..., Any]) -> str:
    """Returns the name or path with which another process can find a factory.

    Args:
        factory: A name or `package.module:factory`, returned unchanged; or a function at the top level of a module or
            of the running script.

    Raises:
        ConfigurationError: The function is a lambda or is defined inside another function.
    """
    if isinstance(factory, str):
        return factory
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    if not module or not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not factory:
        raise ConfigurationError(
            f"{factory!r} is not a function at the top level of a module, so other processes cannot import it; define "
            "it there, or pass its path as package.module:factory"
        )
    return f"{module_name(module)}:{name}"


def module_name(module: str) -> str:
    """Returns the name with which another process can import a module; the running script has the name of its file.

    Raises:
        ConfigurationError: The module is an interactive session.
    """
    main = sys.modules[module] if module == "__main__" else None
    if main is None:
        return module
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name)
    if getattr(main, "__file__", None) is None:
        raise ConfigurationError(
            "a function defined in an interactive session cannot be imported by other processes; define it in a module"
        )
    name = Path(str(main.__file__)).stem
    sys.modules.setdefault(name, main)  # an import in this process must not run the script again
    return name


def _check_options(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for options that the factory does not take; its own TypeErrors are then bugs."""
    try:
        signature = inspect.signature(factory)
    except ValueError as error:  # some builtins have no signature
        raise ConfigurationError(f"{name} is not a factory of models: {error}; pass a Python function") from error
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigurationError(
            f"{name} is called with {', '.join(options)}, but accepts {signature}: {error}"
        ) from error
