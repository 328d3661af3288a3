"""What an app gives a `Device`, checked before anything is opened or kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetdistill.errors import ConfigurationError
from fleetdistill.models import USUAL_PREDICTOR, check_predictor
from fleetdistill.names import unknown_name

COLUMNS = ("features", "logits", "labels", "counts", "parameters", "gradients", "metrics")
"""Everything that an app can allow to leave the device."""
DEFAULT_COLUMNS = ("features", "logits", "counts", "parameters", "gradients", "metrics")
"""Allowed by default: all but the labels of its samples."""
_EXPORTS = ("round", "finish", "never")
_UNUSED_BY_A_WORKER: Mapping[str, object] = {
    "test_data": None,
    "validation_data": None,
    "model_name": "",
    "torch_device": "cpu",
    "predictor": USUAL_PREDICTOR,
}
"""Arguments that go with `model` and `data`, and what they are where the app does not give them."""


def check_computes(model: object, data: object, worker: object, **beside: object) -> None:
    """Who computes: model and data, with what goes with them, or a worker alone.

    Args:
        model, data, worker: As `Device` has them.
        **beside: The arguments that a worker does not use, all of them.

    Raises:
        ConfigurationError: Something is missing or would be ignored, or the predictor is unknown.
    """
    if (model is None or data is None) if worker is None else (model is not None or data is not None):
        raise ConfigurationError("a Device needs model= and data=, or worker= alone for an app that computes by itself")
    ignored = [f"{name}=" for name, usual in _UNUSED_BY_A_WORKER.items() if not _same(beside[name], usual)]
    if worker is not None and ignored:
        raise ConfigurationError(
            f"Device(worker=...) would ignore {', '.join(ignored)}: leave that out; data go to the function that makes "
            "the worker, as in light_worker(data, test_data=...)"
        )
    check_predictor(beside["predictor"])


def _same(given: object, usual: object) -> bool:
    return given is usual or (isinstance(given, str) and given == usual)


def check_export(when: str) -> None:
    """Raises ConfigurationError unless `when` is a value of `Device(export_onnx=...)`."""
    if when not in _EXPORTS:
        raise ConfigurationError(unknown_name("export_onnx", when, _EXPORTS))


def check_bounds(max_threads: int, max_seconds_per_ask: float) -> None:
    """Raises ConfigurationError for bounds under which a device could do nothing."""
    if max_threads < 1:
        raise ConfigurationError(f"max_threads is {max_threads}, must be at least 1")
    if not max_seconds_per_ask > 0:
        raise ConfigurationError(f"max_seconds_per_ask is {max_seconds_per_ask}, must be above 0")


def check_columns(allow: Sequence[str]) -> None:
    """Raises ConfigurationError for columns that there are none of."""
    unknown = sorted(set(allow) - set(COLUMNS))
    if unknown:
        raise ConfigurationError(f"allow has unknown columns {', '.join(unknown)}; known are {', '.join(COLUMNS)}")


def check_transport_security(server: str, insecure: bool, tls: bool) -> None:
    """Raises ConfigurationError for plain text to another machine that the app has not allowed."""
    from fleetdistill.link.grpc_link import is_loopback

    if not (tls or insecure or is_loopback(server)):
        raise ConfigurationError(
            f"{server} is not on this machine, and plain text could be read on the way: give the token that the "
            "operator got from `fleetdistill enrol` as Device(enrolment=...), go through a tunnel to 127.0.0.1, or "
            "accept plain text with Device(insecure=True)"
        )
