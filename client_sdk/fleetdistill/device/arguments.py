"""Checks of the arguments of `Device`, run before any file or connection is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetdistill.data.samples import check_data
from fleetdistill.eligibility import Budgets
from fleetdistill.errors import ConfigurationError
from fleetdistill.models import USUAL_PREDICTOR, check_predictor
from fleetdistill.names import unknown_name
from fleetdistill.state.own_files import check_can_be_state
from fleetdistill.state.privacy_ledger import PrivacyBudget

COLUMNS = ("features", "logits", "labels", "counts", "parameters", "gradients", "metrics")
"""All columns that an app can allow to leave the device."""
DEFAULT_COLUMNS = ("features", "logits", "counts", "parameters", "gradients", "metrics")
"""Columns allowed by default: all except the labels of the training samples."""
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
    check_predictor(torch_options["predictor"])


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


def check_all_data(**given: object) -> None:
    """Checks the data arguments of `Device` as far as that is quick. Raises DataError with the argument's name."""
    for name, data in given.items():
        if data is not None:
            check_data(data, name)


def _same(value: object, default: object) -> bool:
    return value is default or (isinstance(value, str) and value == default)


def check_export(when: str) -> None:
    """Raises ConfigurationError unless `when` is a valid value of `Device(export_onnx=...)`."""
    if when not in _EXPORTS:
        raise ConfigurationError(unknown_name("export_onnx", when, _EXPORTS))


def check_limits(max_threads: int, max_seconds_per_ask: float) -> None:
    """Raises ConfigurationError if `max_threads` is below 1 or `max_seconds_per_ask` is not above 0."""
    if max_threads < 1:
        raise ConfigurationError(f"max_threads is {max_threads}, must be at least 1")
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
    """Raises ConfigurationError for names that are not in `COLUMNS`."""
    unknown = sorted(set(allow) - set(COLUMNS))
    if unknown:
        raise ConfigurationError(f"allow has unknown columns {', '.join(unknown)}; must be in {', '.join(COLUMNS)}")


def check_transport_security(server: str, insecure: bool, tls: bool) -> None:
    """Raises ConfigurationError for a plain-text connection to another machine, unless the app allows it."""
    from fleetdistill.link.grpc_link import is_loopback

    if not (tls or insecure or is_loopback(server)):
        raise ConfigurationError(
            f"{server} is not on this machine, and plain text can be read on the network. Pass the operator's token "
            "from `fleetdistill enrol` as Device(enrolment=...), use a tunnel to 127.0.0.1, or accept plain text with "
            "Device(insecure=True)"
        )
