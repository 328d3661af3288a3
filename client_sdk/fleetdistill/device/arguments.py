"""Checks of the arguments of `Device`, run before any file or connection is opened."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from pathlib import Path

from fleetdistill.checked import (
    check_address,
    check_function,
    check_type,
    shown,
)
from fleetdistill.data.samples import check_splits
from fleetdistill.data.splits import Splits
from fleetdistill.deployment.settings import Deployment, is_installed
from fleetdistill.device.budgets import Budgets
from fleetdistill.device.eligibility import Eligibility
from fleetdistill.device.options import Runtime, Server
from fleetdistill.device.secure import SecureTerms
from fleetdistill.errors import ConfigurationError
from fleetdistill.models.torch_model import TorchModel
from fleetdistill.names import did_you_mean
from fleetdistill.state.own_files import check_can_be_state
from fleetdistill.wire.kind import COLUMNS

_GROUPS = {
    "eligibility": Eligibility,
    "budgets": Budgets,
    "secure": SecureTerms,
    "deployment": Deployment,
    "runtime": Runtime,
}
_EITHER = "Device requires either model= and data=, or worker= without both"


def check_on_event(on_event: object, *, may_await: bool = False) -> None:
    """Raises ConfigurationError unless `on_event` can be called with an event, and is no coroutine function."""
    check_function("on_event", on_event, "that takes an event")
    assert callable(on_event)
    if inspect.iscoroutinefunction(on_event) and not may_await:
        raise ConfigurationError(
            "on_event is a coroutine function, which Device does not await; use AsyncDevice, or pass another function"
        )
    try:
        inspect.signature(on_event).bind(None)
    except TypeError as error:
        raise ConfigurationError(
            f"on_event is {shown(on_event)}, which does not take an event alone: {error}"
        ) from error
    except ValueError:  # a function in C without a signature
        return


def check_backend(model: TorchModel | None, data: Splits | None, worker: object) -> None:
    """Checks that the app gives either `model` and `data`, or only `worker`.

    Args:
        model, data, worker: Arguments of `Device`.

    Raises:
        ConfigurationError: An argument is missing or has no effect, or PyTorch is not installed.
        DataError: The data cannot be used.
    """
    if worker is not None:
        if model is not None or data is not None:
            raise ConfigurationError(f"{_EITHER}; pass only one of them")
        check_function("worker", worker, "that takes the run's contract, such as light_worker(...)")
        return
    missing = [name for name, value in (("model", model), ("data", data and data.data)) if value is None]
    if missing or data is None:
        raise ConfigurationError(f"{_EITHER}; missing: {', '.join(missing)}")
    if not is_installed("torch"):
        raise ConfigurationError(
            "Device(model=...) needs PyTorch: pip install 'fleetdistill[train]', or pass "
            "worker=light_worker(data) for a device without it"
        )
    check_splits(data)


def check_state_dir(given: object) -> Path:
    """Returns `Device(state_dir=...)`; creates nothing.

    Raises:
        ConfigurationError: The argument is not a path, or is empty.
        StateError: The directory contains other files, and no device.
    """
    if not isinstance(given, str | Path) or not str(given).strip():
        raise ConfigurationError(f"state_dir is {given!r}, expected the path of a directory for this device alone")
    check_can_be_state(Path(given))
    return Path(given)


def check_export(deployment: Deployment, worker: object) -> None:
    """Raises ConfigurationError if a worker without PyTorch lacks the package that an export needs."""
    package = getattr(worker, "exports_with", "")
    if deployment.export != "never" and package and not is_installed(package):
        raise ConfigurationError(
            f'Deployment(export="{deployment.export}") requires the package {package}: '
            "pip install 'fleetdistill[onnx]', or pass Device(deployment=Deployment(export=\"never\")); predict and "
            "model work without a file"
        )


def check_columns(allow: Sequence[str]) -> None:
    """Raises ConfigurationError unless `allow` is a list of names in `COLUMNS`."""
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise ConfigurationError(f'allow is {shown(allow)}, expected a list of columns, such as ["class_statistics"]')
    unknown = sorted({str(item) for item in allow if item not in COLUMNS})
    if unknown:
        meant = did_you_mean(unknown[0], COLUMNS)
        expected = f"{f'{meant} Must' if meant else '; must'} be in {', '.join(COLUMNS)}"
        raise ConfigurationError(f"allow has unknown columns {', '.join(unknown)}{expected}")


def check_groups(**groups: object) -> None:
    """Raises ConfigurationError unless each group of options is None or has its class."""
    for name, value in groups.items():
        if value is not None:
            expected = _GROUPS[name]
            check_type(name, value, expected, f"an object of class {expected.__name__}, such as {expected.__name__}()")


def check_connection(server: Server, directory: Path) -> None:
    """Checks how a device reaches its server, before anything is stored.

    Raises:
        ConfigurationError: The token cannot be read, or plain text is not allowed.
    """
    from fleetdistill.link.credentials import has_certificate, is_enrolled

    address, token = server.address, server.enrolment
    if isinstance(address, str):
        check_transport_security(address, server.insecure, token is not None or is_enrolled(directory))
    if token is not None and not has_certificate(directory):
        from fleetdistill.link.enrolment import read_token, token_for

        if isinstance(address, str):
            token_for(token, address)
        else:
            read_token(token)


def check_transport_security(server: str, insecure: bool, tls: bool) -> None:
    """Raises ConfigurationError for an invalid address, and for plain text to another machine that is not allowed."""
    from fleetdistill.link.grpc_link import is_loopback

    check_address("server", server)
    if not (tls or insecure or is_loopback(server)):
        raise ConfigurationError(
            f"{server} is not on this machine, and plain text can be read on the network. Pass the operator's token "
            "from `fleetdistill enrol` as Server(enrolment=...), use a tunnel to 127.0.0.1, or accept plain text with "
            "Server(insecure=True)"
        )
