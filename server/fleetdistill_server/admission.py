"""Does a device fit a run's contract? Compared as data, so that the front needs to know no method."""

from __future__ import annotations

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.v1 import contract_pb2


def check_profile(contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile) -> None:
    """Compares what a device says of itself with the contract.

    Raises:
        RefusedError: They disagree; the message says both sides and what to do.
    """
    _check_shapes(contract, profile)
    needs = contract.requirements
    if needs.same_extractor and profile.extractor_fingerprint != contract.extractor_fingerprint:
        _mismatch("extractor", profile.extractor_fingerprint[:12], contract.extractor_fingerprint[:12], contract)
    if needs.same_architecture and profile.model_fingerprint != contract.model_fingerprint:
        _mismatch("model", profile.model_fingerprint[:12], contract.model_fingerprint[:12], contract)
    if needs.proxy_set and profile.proxy_digest != contract.proxy_digest:
        _mismatch("proxy set", profile.proxy_digest.hex()[:12], contract.proxy_digest.hex()[:12], contract)
    _check_columns(contract, profile)


def _check_shapes(contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile) -> None:
    if profile.classes != len(contract.classes):
        _mismatch("number of classes", profile.classes, len(contract.classes), contract)
    if list(profile.input_shape) != list(contract.input_shape):
        _mismatch("input shape", list(profile.input_shape), list(contract.input_shape), contract)
    given = {column.name: list(column.shape) for column in profile.features}
    for column in contract.features:
        has = given.get(column.name, "no such cut")
        if has != list(column.shape):
            _mismatch(f"feature shape at cut {column.name!r}", has, list(column.shape), contract)
    if contract.knowledge_type not in profile.knowledge_types:
        names = ", ".join(DTYPES[one].name for one in profile.knowledge_types if one in DTYPES)
        _mismatch("element type", names, DTYPES[contract.knowledge_type].name, contract)
    if profile.samples < 1:
        _mismatch("number of samples", profile.samples, "at least 1", contract)


def _check_columns(contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile) -> None:
    kept_back = [name for name in contract.requirements.columns if name not in profile.allowed_columns]
    if kept_back:
        raise RefusedError(
            Code.COLUMN_NOT_ALLOWED,
            f"{contract.method} sends {', '.join(contract.requirements.columns)}; the app keeps back "
            f"{', '.join(kept_back)}; allow them with Device(allow=...) or take part in a run of another method",
            {"columns": ",".join(kept_back)},
        )


def _mismatch(what: str, device: object, run: object, contract: contract_pb2.Contract) -> None:
    raise RefusedError(
        Code.CONTRACT_MISMATCH,
        f"{what}: the device has {device}, run {contract.run!r} has {run}; "
        "give the device a model and data that fit the run",
        {"what": what, "device": str(device), "run": str(run)},
    )
