"""The zoo of device models: a name or `package.module:factory` becomes a module.

Listing the zoo imports nothing; a model's file, and with it torch, is imported when one of its models is built.
The server's predictors have a table of their own and share `build`. Devices' predictors in the space of class
statistics are in `PREDICTORS`; `fleetdistill.methods.classstats.space_model` builds them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.names import unknown_name

if TYPE_CHECKING:
    from torch import nn

    from fleetdistill.models.dafkd import NoiseGenerator

__all__ = ["GENERATORS", "MODELS", "PREDICTORS", "USUAL_PREDICTOR", "build_generator", "build_model"]

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
"""Every device model and extractor: its name, and where its factory is."""

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
"""Every generator of samples from noise: its name, and where its factory is."""


def build_model(name_or_path: str, **options: Any) -> nn.Module:
    """Builds a device model or an extractor.

    A path imports and runs code: take it from your own configuration, never from the other end of a link. Weights are
    drawn from torch's global random generator.

    Args:
        name_or_path: A name of `MODELS`, or `package.module:factory` of your own.
        **options: Passed to the factory. Those of the zoo take `input_shape` (channels, height, width) and `classes`.

    Raises:
        ConfigurationError: Unknown name, a path that leads to no factory of modules, or options it does not take.
    """
    return build(MODELS, "device model", name_or_path, options)


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
"""Of `PREDICTORS`, that of a device whose app names none."""


def check_predictor(wanted: object) -> None:
    """Raises ConfigurationError unless `wanted` is a name of `PREDICTORS` or a function. Builds nothing."""
    if not callable(wanted) and wanted not in tuple(PREDICTORS):
        raise ConfigurationError(f"{unknown_name('predictor', wanted, PREDICTORS)}, or a function of (inputs, classes)")


def build_generator(name: str, **options: Any) -> NoiseGenerator:
    """Builds a generator. Its name comes with the run's contract, so a path to other code is not taken.

    Args:
        name: A name of `GENERATORS`.
        **options: Those of the table take `shape` of one sample, `noise_dim`, and `classes` (0 for no labels).

    Raises:
        ConfigurationError: Unknown name, or options that make no generator.
    """
    if name not in GENERATORS:
        raise ConfigurationError(unknown_name("generator", name, sorted(GENERATORS)))
    return build(GENERATORS, "generator", name, options)  # type: ignore[return-value]  # the table's are of this class


def build(table: Mapping[str, str], kind: str, name_or_path: str, options: Mapping[str, Any]) -> nn.Module:
    """Builds what a name of `table`, or a path beside it, stands for; `kind` is what messages call it.

    Raises:
        ConfigurationError: As `build_model`.
    """
    factory = resolve(table, kind, name_or_path)
    _check_options(factory, f"{kind} {name_or_path!r}", options)
    model = factory(**options)
    from torch import nn  # only now: naming and listing models must work without torch

    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{kind} {name_or_path!r} built a {type(model).__name__}, expected a torch.nn.Module")
    return model


def resolve(table: Mapping[str, str], kind: str, name_or_path: str) -> Callable[..., Any]:
    """Finds the factory of a name of `table`, or of a `package.module:factory`.

    Raises:
        ConfigurationError: The name is not in the table, or the path leads nowhere.
    """
    module_name, colon, factory_name = table.get(name_or_path, name_or_path).partition(":")
    if not (colon and module_name and factory_name):
        raise ConfigurationError(f"{unknown_name(kind, name_or_path, sorted(table))}, or package.module:factory")
    try:
        factory = getattr(import_module(module_name), factory_name, None)
    except Exception as error:  # a module of the app's own may fail in any way while it is imported
        raise ConfigurationError(f"{kind} {name_or_path!r}: cannot import {module_name!r}: {error}") from error
    if not callable(factory):
        raise ConfigurationError(f"{kind} {name_or_path!r}: {module_name!r} has no function {factory_name!r}")
    return factory  # type: ignore[no-any-return]


def path_of(factory: str | Callable[..., Any]) -> str:
    """The name or path of a factory, under which another process finds it.

    Args:
        factory: A name or `package.module:factory`, which is returned as it is; or a function at the top level of a
            module or of the script that runs.

    Raises:
        ConfigurationError: The function has no such place, as a lambda or one within another function.
    """
    if isinstance(factory, str):
        return factory
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    if not module or not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not factory:
        raise ConfigurationError(
            f"{factory!r} is no function at the top level of a module, which other processes could import; define it "
            "there, or give its path as package.module:factory"
        )
    return f"{module_name(module)}:{name}"


def module_name(module: str) -> str:
    """The name under which another process can import a module of this one; the script that runs has its file's.

    Raises:
        ConfigurationError: It is an interactive session.
    """
    main = sys.modules[module] if module == "__main__" else None
    if main is None:
        return module
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name)
    if getattr(main, "__file__", None) is None:
        raise ConfigurationError(
            "other processes cannot import what an interactive session defines; put it in a module"
        )
    name = Path(str(main.__file__)).stem
    sys.modules.setdefault(name, main)  # so that an import in this process does not run the script a second time
    return name


def _check_options(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """Tells wrong options from an error inside the factory, which both come as `TypeError`."""
    try:
        signature = inspect.signature(factory)
    except ValueError as error:  # some builtins have none
        raise ConfigurationError(f"{name} is no factory of models: {error}; give a Python function") from error
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigurationError(f"{name} does not take these options: {error}; it takes {signature}") from error
