"""Checks whether a device's profile fits a run's contract, and chooses the run of a device that names none.

Both compare data, so that the front imports no methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleetdistill.errors import RefusedError
from fleetdistill.link.abilities import differences
from fleetdistill.wire.codes import Code
from fleetdistill.wire.kind import allow_line
from fleetdistill.wire.payload import DTYPES, MAX_AXES, MAX_NAME
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import JOINABLE
from fleetdistill_server.store.store import Store

MAX_PROFILE_BYTES = 64 << 10
"""Largest profile, in bytes; the store keeps a device's profile as long as the run."""
MAX_VERSION_BYTES = 32
"""Longest `data_version`, in bytes: the size of a SHA-256 digest."""
MAX_COLUMNS = 100
_USUAL_CHARACTERS = 64
_MAX_CHARACTERS = {"model_name": 128, "features": MAX_NAME}
_NAMED = 5
_LONGEST = 900


def check_profile(
    contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile, models: Mapping[str, str] | None = None
) -> None:
    """Checks that a device's profile fits the run's contract.

    Args:
        contract: The run's contract.
        profile: What the device says of its model and data.
        models: Names of the run's models, as in [model] of run.toml, for the message.

    Raises:
        RefusedError: The profile is too large or does not fit; the message gives both values and a remedy.
    """
    if profile.ByteSize() > MAX_PROFILE_BYTES:
        text = f"the device's profile has {profile.ByteSize()} bytes, but at most {MAX_PROFILE_BYTES} are allowed"
        raise RefusedError(Code.TOO_LARGE, f"{text}; use fewer or shorter column names")
    if len(profile.data_version) > MAX_VERSION_BYTES:
        size = len(profile.data_version)
        text = f"the profile's data_version has {size} bytes, but at most {MAX_VERSION_BYTES} are allowed"
        raise RefusedError(Code.BAD_MESSAGE, f"{text}; use a digest of the data")
    _check_lengths(profile)
    needs = contract.requirements
    usual = _extractor_advice(contract, (models or {}).get("extractor", "")) if needs.same_extractor else ""
    _check_shapes(contract, profile, usual)
    if needs.same_extractor and profile.extractor_fingerprint != contract.extractor_fingerprint:
        result = f"another one in {profile.model_name!r} ({profile.extractor_fingerprint[:12]})"
        wanted = _named((models or {}).get("extractor", ""), contract.extractor_fingerprint)
        _mismatch("extractor", result, wanted, contract, usual)
    if needs.same_architecture and profile.model_fingerprint != contract.model_fingerprint:
        result = _named(profile.model_name, profile.model_fingerprint)
        wanted = _named((models or {}).get("device", ""), contract.model_fingerprint)
        advice = "pass the model that run.toml names as [model] device to Device(model=...)"
        _mismatch("model", result, wanted, contract, advice)
    if needs.proxy_set and profile.proxy_digest != contract.proxy_digest:
        result, wanted = profile.proxy_digest.hex()[:12], contract.proxy_digest.hex()[:12]
        advice = "update the device's SDK, which downloads the run's proxy set automatically"
        _mismatch("proxy set", result, wanted, contract, advice)
    _check_columns(contract, profile)


def _check_lengths(profile: contract_pb2.DeviceProfile) -> None:
    """Bounds the lengths of the profile's strings, lists and shapes, which listings and errors quote."""
    fields = {
        "model_name": [profile.model_name],
        "sdk_version": [profile.sdk_version],
        "model_fingerprint": [profile.model_fingerprint],
        "extractor_fingerprint": [profile.extractor_fingerprint],
        "allowed_columns": profile.allowed_columns,
        "features": [column.name for column in profile.features],
    }
    for field, texts in fields.items():
        most = _MAX_CHARACTERS.get(field, _USUAL_CHARACTERS)
        longest = max(map(len, texts), default=0)
        if longest > most or len(texts) > MAX_COLUMNS:
            text = f"the profile's {field} has {len(texts)} entries of up to {longest} characters"
            raise RefusedError(Code.TOO_LARGE, f"{text}, but at most {MAX_COLUMNS} of {most} are allowed")
    axes = max(len(profile.input_shape), *(len(feature.shape) for feature in profile.features), 0)
    types = max(len(profile.knowledge_types), len(profile.compressions))
    if axes > MAX_AXES or types > MAX_COLUMNS:
        text = f"the profile has a shape with {axes} axes and a list of {types} types"
        raise RefusedError(Code.TOO_LARGE, f"{text}, but at most {MAX_AXES} axes and {MAX_COLUMNS} types are allowed")


def _extractor_advice(contract: contract_pb2.Contract, name: str) -> str:
    """Returns what to do about a device model with another extractor; `name` is that of the run's, empty if unknown."""
    advice = "build the app's model on the extractor that run.toml names as [model] extractor"
    shape, classes = tuple(contract.input_shape), len(contract.classes)
    example = f"build_model('linear:{name}', input_shape={shape}, classes={classes})"
    return f"{advice}, for instance with {example}" if name else advice


def _check_shapes(contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile, extractor_advice: str) -> None:
    if profile.classes != len(contract.classes):
        _mismatch("number of classes", profile.classes, len(contract.classes), contract)
    if list(profile.input_shape) != list(contract.input_shape):
        _mismatch("input shape", list(profile.input_shape), list(contract.input_shape), contract)
    shapes = {column.name: list(column.shape) for column in profile.features}
    methods_advice = {item.column: item.text for item in contract.requirements.advice}
    for column in contract.features:
        has = shapes.get(column.name, "no such cut")
        if has != list(column.shape):
            usual = extractor_advice or f"use a device model whose features at {column.name!r} have this shape"
            advice = methods_advice.get(column.name, usual)
            _mismatch(f"feature shape at cut {column.name!r}", has, list(column.shape), contract, advice)
    if contract.knowledge_type not in profile.knowledge_types:
        names = ", ".join(DTYPES[type_name].name for type_name in profile.knowledge_types if type_name in DTYPES)
        advice = "update the device's SDK, or choose another knowledge_type for the run"
        _mismatch("element type", names, DTYPES[contract.knowledge_type].name, contract, advice)
    if profile.samples < 1:
        _mismatch("number of samples", profile.samples, "at least 1", contract, "give the device training data")
    if contract.max_samples and profile.samples > contract.max_samples:
        advice = "if the device really has that many, raise [contract] max_samples in a new run"
        _mismatch("number of samples", profile.samples, f"at most {contract.max_samples}", contract, advice)


def _check_columns(contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile) -> None:
    missing = [name for name in contract.requirements.columns if name not in profile.allowed_columns]
    if missing:
        raise RefusedError(
            Code.COLUMN_NOT_ALLOWED,
            f"{contract.method} sends {', '.join(contract.requirements.columns)}; the app does not allow "
            f"{', '.join(missing)}; {allow_line({*profile.allowed_columns, *missing})}",
            {"columns": ",".join(missing)},
        )


def _named(name: str, fingerprint: str) -> str:
    """Returns a model's name, if it is known, and the beginning of its fingerprint."""
    return f"{name!r} ({fingerprint[:12]})" if name else fingerprint[:12]


def _mismatch(
    what: str,
    device: object,
    run: object,
    contract: contract_pb2.Contract,
    advice: str = "use a device model and data that fit the run",
) -> None:
    raise RefusedError(
        Code.CONTRACT_MISMATCH,
        f"{what}: the device has {device if device != '' else 'none'}, run {contract.run!r} has {run}; {advice}",
        {"what": what, "device": str(device), "run": str(run)},
    )


def fitting_run(
    store: Store, abilities: service_pb2.Abilities, contract_of: Callable[[str], contract_pb2.Contract]
) -> str:
    """Returns the name of the only open run that fits a device.

    Args:
        store: Store that contains the runs.
        abilities: What the device can do.
        contract_of: Returns the contract of a prepared run.

    Raises:
        RefusedError: No open run fits, or several do; or none fits yet while runs are being prepared.
    """
    runs = [run for run in store.runs.all() if run.status in JOINABLE]
    prepared = [run for run in runs if run.contract]
    wrong = {run.name: _differences(contract_of(run.name), run, abilities) for run in prepared}
    fitting = [name for name, found in wrong.items() if not found]
    if len(fitting) == 1:
        return fitting[0]
    if len(fitting) > 1:
        raise RefusedError(
            Code.UNKNOWN_RUN,
            f"{len(fitting)} open runs fit the device: {_list_names(fitting)}; set Server(run=...) to one of them",
        )
    if len(prepared) < len(runs) or not runs:
        text = "the server has no open run" if not runs else "runs are being prepared"
        raise RefusedError(Code.NOT_READY, f"no run fits the device yet: {text}")
    listed = "; ".join(f"{name!r}: {', '.join(found)}" for name, found in list(wrong.items())[:_NAMED])
    more = f"; and {len(wrong) - _NAMED} more runs" if len(wrong) > _NAMED else ""
    raise RefusedError(Code.UNKNOWN_RUN, f"no open run fits the device: {listed[:_LONGEST]}{more}")


def _differences(contract: contract_pb2.Contract, run: Run, abilities: service_pb2.Abilities) -> list[str]:
    result = differences(contract, abilities)
    needs = contract.requirements
    if abilities.model and (needs.same_architecture or needs.same_extractor):
        models = run.config.get("model", {})
        wanted = [models[name] for name in ("device", "extractor") if models.get(name)]
        if wanted and abilities.model not in wanted:
            result.append(f"the device has model {abilities.model[:64]!r}, the run {' or '.join(map(repr, wanted))}")
    return result


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
