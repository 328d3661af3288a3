"""Checks of the arguments of `Device`, run before any file or connection is opened."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetdistill.checked import (
    check_address,
    check_flag,
    check_function,
    check_integer,
    check_name,
    check_number,
    check_type,
    shown,
)
from fleetdistill.deployment.settings import Deployment, is_installed
from fleetdistill.device.budgets import Budgets
from fleetdistill.device.eligibility import Eligibility
from fleetdistill.errors import ConfigurationError
from fleetdistill.link.abilities import Abilities
from fleetdistill.models import USUAL_PREDICTOR, check_predictor
from fleetdistill.names import unknown_name
from fleetdistill.state.own_files import check_can_be_state
from fleetdistill.state.privacy_ledger import PrivacyBudget
from fleetdistill.wire.kind import COLUMNS

_TORCH_DEVICES = ("cpu", "cuda", "mps", "xpu", "xla", "hpu", "mtia", "vulkan", "privateuseone", "meta")
_EXPORTS = ("round", "finish", "never")
_PYTORCH_DEFAULTS: Mapping[str, object] = {
    "test_data": None,
    "validation_data": None,
    "model_name": "",
    "torch_device": "cpu",
    "predictor": USUAL_PREDICTOR,
}
"""Defaults of the arguments that have no effect together with `worker`."""


def check_backend(model: object, data: object, worker: object, **torch_options: object) -> None:
    """Checks that the app gives either `model` and `data`, or only `worker`.

    Args:
        model, data, worker: Arguments of `Device`.
        **torch_options: All arguments of `Device` that only a PyTorch backend uses.

    Raises:
        ConfigurationError: An argument is missing or has no effect, or the predictor is unknown.
    """
    if (model is None or data is None) if worker is None else (model is not None or data is not None):
        raise ConfigurationError("Device requires either model= and data=, or worker= without both")
    ignored = [f"{name}=" for name, default in _PYTORCH_DEFAULTS.items() if not _same(torch_options[name], default)]
    if worker is not None and ignored:
        raise ConfigurationError(
            f"Device(worker=...) does not use {', '.join(ignored)}; remove the argument. "
            "Pass data to the function that makes the worker, as in light_worker(data, test_data=...)"
        )
    check_torch_device(torch_options["torch_device"])
    check_predictor(torch_options["predictor"])
    if worker is None:
        if not is_installed("torch"):
            raise ConfigurationError(
                "Device(model=...) needs PyTorch: pip install 'fleetdistill[train]', or pass "
                "worker=light_worker(data) for a device without it"
            )
        check_model(model)
    else:
        check_function("worker", worker, "that takes the run's contract, such as light_worker(...)")


def checked_state_dir(given: object) -> Path:
    """Returns `Device(state_dir=...)`; creates nothing.

    Raises:
        ConfigurationError: The argument is not a path, or is empty.
        StateError: The directory contains other files, and no device.
    """
    if not isinstance(given, str | Path) or not str(given).strip():
        raise ConfigurationError(f"state_dir is {given!r}, expected the path of a directory for this device alone")
    check_can_be_state(Path(given))
    return Path(given)


def _same(value: object, default: object) -> bool:
    return value is default or (isinstance(value, str) and value == default)


def check_export(when: object, worker: object) -> None:
    """Checks `Device(export_onnx=...)`, and that a worker without PyTorch has the package that an export needs.

    Raises:
        ConfigurationError: The value is unknown, or the package is not installed.
    """
    if when not in _EXPORTS:
        raise ConfigurationError(unknown_name("export_onnx", when, _EXPORTS))
    package = getattr(worker, "exports_with", "")
    if when != "never" and package and not is_installed(package):
        raise ConfigurationError(
            f"export_onnx=\"{when}\" requires the package {package}: pip install 'fleetdistill[onnx]', or pass "
            'Device(export_onnx="never"); predict and model work without a file'
        )


def check_limits(max_threads: int, max_seconds_per_ask: float, max_spool_bytes: int) -> None:
    """Raises ConfigurationError if a limit has the wrong type or is not above 0."""
    check_integer("max_threads", max_threads)
    check_integer("max_spool_bytes", max_spool_bytes)
    check_number("max_seconds_per_ask", max_seconds_per_ask)
    if not max_seconds_per_ask > 0:
        raise ConfigurationError(f"max_seconds_per_ask is {max_seconds_per_ask}, must be above 0")


def most_threads(max_threads: int, budgets: Budgets | None) -> int:
    """Returns the maximum number of threads that a run may require."""
    return max_threads if budgets is None or budgets.threads is None else min(max_threads, budgets.threads)


def checked_budget(given: object) -> PrivacyBudget | None:
    """Returns `Device(privacy_budget=...)`. Raises ConfigurationError unless it is None or `(epsilon, delta)`."""
    if given is None:
        return None
    pair = tuple(given) if isinstance(given, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(one, int | float) for one in pair):
        raise ConfigurationError(f"privacy_budget is {given!r}, expected a pair (epsilon, delta), such as (1, 1e-5)")
    return PrivacyBudget(*pair)


def check_columns(allow: Sequence[str]) -> None:
    """Raises ConfigurationError unless `allow` is a list of names in `COLUMNS`."""
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise ConfigurationError(f'allow is {shown(allow)}, expected a list of columns, such as ["class_statistics"]')
    unknown = sorted({str(one) for one in allow if one not in COLUMNS})
    if unknown:
        raise ConfigurationError(f"allow has unknown columns {', '.join(unknown)}; must be in {', '.join(COLUMNS)}")


def check_policies(eligibility: object, budgets: object, deployment: object, clock: object) -> None:
    """Raises ConfigurationError unless the app's policies have their classes, and the clock its methods."""
    classes = {"eligibility": (eligibility, Eligibility), "budgets": (budgets, Budgets)}
    for name, (value, expected) in {**classes, "deployment": (deployment, Deployment)}.items():
        if value is not None:
            check_type(name, value, expected, f"an object of class {expected.__name__}, such as {expected.__name__}()")
    if clock is not None and not all(callable(getattr(clock, one, None)) for one in ("now", "time", "wait")):
        raise ConfigurationError(f"clock is {shown(clock)}, expected an object with the methods now, time and wait")


def check_names(run: object, device_id: object, model_name: object) -> None:
    """Raises ConfigurationError for names that are invalid or not text."""
    check_type("model_name", model_name, str, "text")
    if run != "" and not isinstance(run, Abilities):
        check_name("run", run)
    if device_id is not None:
        check_name("device_id", device_id)


def check_connection(server: object, enrolment: object, insecure: object, directory: Path) -> None:
    """Checks the server and the token of a device, before anything is stored.

    Raises:
        ConfigurationError: An argument is invalid, the token cannot be read, or plain text is not allowed.
    """
    from fleetdistill.link.credentials import has_certificate, is_enrolled

    check_flag("insecure", insecure)
    if enrolment is not None:
        check_type("enrolment", enrolment, (str, Path), "a token, or the path of a file with a token")
    if isinstance(server, str):
        check_transport_security(server, bool(insecure), enrolment is not None or is_enrolled(directory))
    elif not callable(getattr(server, "check_in", None)):
        raise ConfigurationError(f"server is {shown(server)}, expected host:port, or a fleetdistill.link.base.Link")
    if isinstance(enrolment, str | Path) and not has_certificate(directory):
        from fleetdistill.link.enrolment import read_token, token_for

        if isinstance(server, str):
            token_for(enrolment, server)
        else:
            read_token(enrolment)


def check_torch_device(given: object) -> None:
    """Checks the name of a torch device without loading torch; a build without that device fails when it is used.

    Raises:
        ConfigurationError: torch has no device of this name.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        known = isinstance(given, str) and bool(re.fullmatch(rf"({'|'.join(_TORCH_DEVICES)})(:\d+)?", given))
    else:
        known = _is_device(torch, given)
    if not known:
        raise ConfigurationError(f'torch_device is {shown(given)}, expected a torch device, such as "cpu" or "cuda:0"')


def _is_device(torch: Any, given: object) -> bool:
    try:
        torch.device(given)
    except (RuntimeError, TypeError):
        return False
    return not isinstance(given, int)


def check_model(model: object) -> None:
    """Checks a model instance; a function is called later, when the model is needed.

    Raises:
        ConfigurationError: The argument is neither a module nor a function.
        ModelError: The module is not a local model.
    """
    check_function("model", model, "that returns a torch.nn.Module, or the module itself")
    torch = sys.modules.get("torch")  # an app that passes a module has loaded it
    if torch is not None and isinstance(model, torch.nn.Module):
        from fleetdistill.training.model import check_local_model

        check_local_model(model)


def check_transport_security(server: str, insecure: bool, tls: bool) -> None:
    """Raises ConfigurationError for an invalid address, and for plain text to another machine that is not allowed."""
    from fleetdistill.link.grpc_link import is_loopback

    check_address("server", server)
    if not (tls or insecure or is_loopback(server)):
        raise ConfigurationError(
            f"{server} is not on this machine, and plain text can be read on the network. Pass the operator's token "
            "from `fleetdistill enrol` as Device(enrolment=...), use a tunnel to 127.0.0.1, or accept plain text with "
            "Device(insecure=True)"
        )
