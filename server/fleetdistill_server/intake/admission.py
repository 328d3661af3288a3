"""Does a device fit a run's contract? Compared as data, so that the front needs to know no method."""

from __future__ import annotations

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import DTYPES, MAX_AXES, MAX_NAME
from fleetdistill.wire.v1 import contract_pb2

MAX_PROFILE_BYTES = 64 << 10
"""What a device says of itself is kept for as long as its run."""
MAX_VERSION_BYTES = 32
"""A name of a device's data is a digest."""
MAX_COLUMNS = 100
_USUAL_CHARACTERS = 64
_MOST_CHARACTERS = {"model_name": 128, "features": MAX_NAME}


def check_profile(contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile) -> None:
    """Compares what a device says of itself with the contract.

    Raises:
        RefusedError: They disagree; the message says both sides and what to do.
    """
    if profile.ByteSize() > MAX_PROFILE_BYTES:
        text = f"the device's profile has {profile.ByteSize()} bytes, at most {MAX_PROFILE_BYTES} are kept"
        raise RefusedError(Code.TOO_LARGE, f"{text}; name fewer or shorter columns")
    if len(profile.data_version) > MAX_VERSION_BYTES:
        text = (
            f"the profile's data_version has {len(profile.data_version)} bytes, at most {MAX_VERSION_BYTES} are taken"
        )
        raise RefusedError(Code.BAD_MESSAGE, f"{text}; name the data with a digest")
    _check_words(profile)
    _check_shapes(contract, profile)
    needs = contract.requirements
    if needs.same_extractor and profile.extractor_fingerprint != contract.extractor_fingerprint:
        found, wanted = profile.extractor_fingerprint[:12], contract.extractor_fingerprint[:12]
        advice = f"build the extractor of {profile.model_name!r} like the one that run.toml names as [model] extractor"
        _mismatch("extractor", found, wanted, contract, advice)
    if needs.same_architecture and profile.model_fingerprint != contract.model_fingerprint:
        found, wanted = profile.model_fingerprint[:12], contract.model_fingerprint[:12]
        advice = f"{profile.model_name!r} is another model than all devices run; build the one of run.toml's "
        _mismatch("model", found, wanted, contract, f"{advice}[model] device")
    if needs.proxy_set and profile.proxy_digest != contract.proxy_digest:
        found, wanted = profile.proxy_digest.hex()[:12], contract.proxy_digest.hex()[:12]
        advice = "update the device's SDK, which fetches the run's proxy set by itself"
        _mismatch("proxy set", found, wanted, contract, advice)
    _check_columns(contract, profile)


def _check_words(profile: contract_pb2.DeviceProfile) -> None:
    """What stands in lists, and is quoted where a device does not fit, is short."""
    words = {
        "model_name": [profile.model_name],
        "sdk_version": [profile.sdk_version],
        "model_fingerprint": [profile.model_fingerprint],
        "extractor_fingerprint": [profile.extractor_fingerprint],
        "allowed_columns": profile.allowed_columns,
        "features": [column.name for column in profile.features],
    }
    for field, texts in words.items():
        most = _MOST_CHARACTERS.get(field, _USUAL_CHARACTERS)
        longest = max(map(len, texts), default=0)
        if longest > most or len(texts) > MAX_COLUMNS:
            text = f"the profile's {field} has {len(texts)} entries of up to {longest} characters"
            raise RefusedError(Code.TOO_LARGE, f"{text}, at most {MAX_COLUMNS} of {most} are taken")
    axes = max(len(profile.input_shape), *(len(one.shape) for one in profile.features), 0)
    types = max(len(profile.knowledge_types), len(profile.compressions))
    if axes > MAX_AXES or types > MAX_COLUMNS:
        text = f"a shape in the profile has {axes} axes, at most {MAX_AXES} are taken; of types at most {MAX_COLUMNS}"
        raise RefusedError(Code.TOO_LARGE, text)


def _check_shapes(contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile) -> None:
    if profile.classes != len(contract.classes):
        _mismatch("number of classes", profile.classes, len(contract.classes), contract)
    if list(profile.input_shape) != list(contract.input_shape):
        _mismatch("input shape", list(profile.input_shape), list(contract.input_shape), contract)
    given = {column.name: list(column.shape) for column in profile.features}
    methods_advice = {one.column: one.text for one in contract.requirements.advice}
    for column in contract.features:
        has = given.get(column.name, "no such cut")
        if has != list(column.shape):
            usual = f"give the device a model whose features at {column.name!r} have this shape"
            advice = methods_advice.get(column.name, usual)
            _mismatch(f"feature shape at cut {column.name!r}", has, list(column.shape), contract, advice)
    if contract.knowledge_type not in profile.knowledge_types:
        names = ", ".join(DTYPES[one].name for one in profile.knowledge_types if one in DTYPES)
        advice = "update the device's SDK, or choose another knowledge_type for the run"
        _mismatch("element type", names, DTYPES[contract.knowledge_type].name, contract, advice)
    if profile.samples < 1:
        _mismatch("number of samples", profile.samples, "at least 1", contract, "give the device data to train on")
    if contract.max_samples and profile.samples > contract.max_samples:
        advice = "raise [contract] max_samples for a new run if devices really have so many"
        _mismatch("number of samples", profile.samples, f"at most {contract.max_samples}", contract, advice)


def _check_columns(contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile) -> None:
    kept_back = [name for name in contract.requirements.columns if name not in profile.allowed_columns]
    if kept_back:
        raise RefusedError(
            Code.COLUMN_NOT_ALLOWED,
            f"{contract.method} sends {', '.join(contract.requirements.columns)}; the app keeps back "
            f"{', '.join(kept_back)}; allow them with Device(allow=...) or take part in a run of another method",
            {"columns": ",".join(kept_back)},
        )


def _mismatch(
    what: str,
    device: object,
    run: object,
    contract: contract_pb2.Contract,
    advice: str = "give the device a model and data that fit the run",
) -> None:
    raise RefusedError(
        Code.CONTRACT_MISMATCH,
        f"{what}: the device has {device if device != '' else 'none'}, run {contract.run!r} has {run}; {advice}",
        {"what": what, "device": str(device), "run": str(run)},
    )
