"""What each method declares, refused at check-in where a device does not fit it, with a sentence the app can act on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.driving import DriveDevices
from support.fleets import RUNS, Prepared, prepare
from support.long import long_except
from support.open_device import open_device
from torch import nn

from fleetdistill import COLUMNS, Device
from fleetdistill.errors import RefusedError
from fleetdistill.methods import METHODS
from fleetdistill.training.model import split_sequential
from fleetdistill.wire.codec import decode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.v1 import contract_pb2, tensor_pb2
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.device import DeviceSpec, build_device_model, make_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.admission import check_profile
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

Profile = contract_pb2.DeviceProfile
Contract = contract_pb2.Contract
Violation = tuple[Callable[[Profile], None], Code, str]
"""What a device is changed to, the code of its refusal, and the whole sentence."""
ABSENT = "a" * 64

USUAL = RUNS.keys() & METHODS.keys()
every_run = pytest.mark.parametrize("name", long_except(RUNS, *USUAL))


def line(columns: Sequence[str]) -> str:
    """The list of columns as a refusal prints it."""
    return "[" + ", ".join(f'"{item}"' for item in COLUMNS if item in columns) + "]"


def open_run(prepared: Prepared) -> tuple[Store, Contract]:
    """A store whose run waits for devices, as the engine leaves it before its first round."""
    config, store = prepared[0], Store.in_memory()
    method = build_method(config)
    contract, initial, extractor = make_contract(config, method)
    for payload in (initial, extractor, method.context.proxy_payload):
        if payload is not None:
            store.blobs.put(payload)
    store.runs.begin(RUN, config.fixed_part())
    store.runs.publish_contract(RUN, contract.SerializeToString())
    return store, contract


def fitting_profile(store: Store, spec: DeviceSpec) -> Profile:
    """What a device that fits says of itself; it has checked in."""
    with make_device(spec, MemoryLink(DeviceApi(store))) as device:
        device.step(0.0)
    row = store.devices.get(RUN, spec.name)
    assert row is not None
    return Profile.FromString(row.profile)


def changed(**values: Any) -> Callable[[Profile], None]:
    def change(profile: Profile) -> None:
        for name, value in values.items():
            profile.ClearField(name)  # type: ignore[arg-type]
            profile.MergeFrom(Profile(**{name: value}))

    return change


def mismatch(what: str, device: object, run: object, advice: str) -> str:
    return f"{what}: the device has {device}, run {RUN!r} has {run}; {advice}"


def required(contract: Contract, profile: Profile) -> Iterator[tuple[str, Violation]]:
    """For each field of `Requirements` that is set, devices that do not fit it."""
    needs, model = contract.requirements, profile.model_name
    if needs.same_extractor:
        advice = "build the app's model on the extractor that run.toml names as [model] extractor"
        has = f"another one in {model!r} ({'a' * 12})"
        sentence = mismatch("extractor", has, contract.extractor_fingerprint[:12], advice)
        yield "same_extractor", (changed(extractor_fingerprint=ABSENT), Code.CONTRACT_MISMATCH, sentence)
    if needs.same_architecture:
        advice = "pass the model that run.toml names as [model] device to Device(model=...)"
        sentence = mismatch("model", f"{model!r} ({'a' * 12})", contract.model_fingerprint[:12], advice)
        yield "same_architecture", (changed(model_fingerprint=ABSENT), Code.CONTRACT_MISMATCH, sentence)
    if needs.proxy_set:
        advice = "update the device's SDK, which downloads the run's proxy set automatically"
        for has, digest in (("none", b""), ("aa" * 6, b"\xaa" * 32)):
            sentence = mismatch("proxy set", has, contract.proxy_digest.hex()[:12], advice)
            yield "proxy_set", (changed(proxy_digest=digest), Code.CONTRACT_MISMATCH, sentence)
    for item in needs.advice:
        (shape,) = [list(column.shape) for column in contract.features if column.name == item.column]
        rest = [feature for feature in profile.features if feature.name != item.column]
        sentence = mismatch(f"feature shape at cut {item.column!r}", "no such cut", shape, item.text)
        yield "advice", (changed(features=rest), Code.CONTRACT_MISMATCH, sentence)
    for column in needs.columns:
        left = [one for one in profile.allowed_columns if one != column]
        sentence = (
            f"{contract.method} sends {', '.join(needs.columns)}; the app does not allow {column}; "
            f"to allow it, set Device(allow={line(profile.allowed_columns)})"
        )
        yield "columns", (changed(allowed_columns=left), Code.COLUMN_NOT_ALLOWED, sentence)


def agreed(contract: Contract, profile: Profile) -> Iterator[Violation]:
    """For each term of any contract, and each feature column, devices that do not fit it."""
    fit = "use a device model and data that fit the run"
    shape, code = list(contract.input_shape), Code.CONTRACT_MISMATCH
    yield changed(classes=3), code, mismatch("number of classes", 3, len(contract.classes), fit)
    yield changed(input_shape=[3, 2]), code, mismatch("input shape", [3, 2], shape, fit)
    yield changed(samples=0), code, mismatch("number of samples", 0, "at least 1", "give the device training data")
    other, *_ = {tensor_pb2.ELEMENT_TYPE_FLOAT16, tensor_pb2.ELEMENT_TYPE_FLOAT32} - {contract.knowledge_type}
    advice = "update the device's SDK, or choose another knowledge_type for the run"
    sentence = mismatch("element type", DTYPES[other].name, DTYPES[contract.knowledge_type].name, advice)
    yield changed(knowledge_types=[other]), code, sentence
    for column in contract.features:
        rest = [feature for feature in profile.features if feature.name != column.name]
        wrong = contract_pb2.NamedShape(name=column.name, shape=[7, 7, 7, 7])
        usual = f"use a device model whose features at {column.name!r} have this shape"
        if contract.requirements.same_extractor:
            usual = "build the app's model on the extractor that run.toml names as [model] extractor"
        advice = next((item.text for item in contract.requirements.advice if item.column == column.name), usual)
        for has, features in (("no such cut", rest), ("[7, 7, 7, 7]", [*rest, wrong])):
            sentence = mismatch(f"feature shape at cut {column.name!r}", has, list(column.shape), advice)
            yield changed(features=features), code, sentence


@every_run
def test_device_violating_one_thing_is_refused_with_sentence(name: str, tmp_path: Path) -> None:
    prepared = prepare(RUNS[name], tmp_path / "work")
    store, contract = open_run(prepared)
    profile = fitting_profile(store, prepared[1][0])
    check_profile(contract, profile)
    requirements = list(required(contract, profile))
    declared = {field.name for field, _ in contract.requirements.ListFields()}
    assert {field for field, _ in requirements} == declared, "a requirement that no device violates here"
    for change, code, sentence in (*(one for _, one in requirements), *agreed(contract, profile)):
        unfit = Profile.FromString(profile.SerializeToString())
        change(unfit)
        with pytest.raises(RefusedError) as error:
            check_profile(contract, unfit)
        assert (error.value.code, str(error.value)) == (code, sentence)
    store.close()


@every_run
def test_what_a_method_does_not_declare_may_differ(name: str, tmp_path: Path) -> None:
    prepared = prepare(RUNS[name], tmp_path / "work")
    store, contract = open_run(prepared)
    needs, profile = contract.requirements, fitting_profile(store, prepared[1][0])
    free = {"extractor_fingerprint": not needs.same_extractor, "model_fingerprint": not needs.same_architecture}
    changed(**{field: ABSENT for field, is_free in free.items() if is_free})(profile)
    changed(allowed_columns=list(needs.columns), features=list(contract.features))(profile)
    check_profile(contract, profile)
    store.close()


def an_app(spec: DeviceSpec, api: DeviceApi, **changes: Any) -> Device:
    data = load_arrays(spec.data_file)
    settings: dict[str, Any] = {"model": lambda: build_device_model(spec, data[0].shape[1:])}
    settings |= {"server": MemoryLink(api), "data": data, "state_dir": spec.state_dir, "device_id": spec.name}
    return open_device(**{**settings, "export": "never", **changes})


@pytest.mark.parametrize("name", long_except(RUNS, "classstats", "fedavg", "feddkc"))
def test_exactly_the_declared_columns_leave_a_device(name: str, tmp_path: Path) -> None:
    """An app that allows these and no others takes part to the end, and each of them is sent in one of the rounds."""
    config, specs, _ = prepare(RUNS[name], tmp_path / "work")
    allowed = list(build_method(config).requirements().columns)
    store = Store.in_memory()
    api = DeviceApi(store)
    sent: dict[bytes, set[str]] = {}

    def look() -> None:
        """Reads each answer after the step that sent it: those of a secure sum are gone with its round."""
        for row in store.asks.uploads(RUN):
            if row.sha256 not in sent:
                parts = decode(store.blobs.open(row.sha256)).values()
                sent[row.sha256] = {column for part in parts for column in part.columns()}

    with ExitStack() as stack:
        devices = [stack.enter_context(an_app(spec, api, allow=allowed)) for spec in specs]
        asyncio.run(Engine(store, config, DriveDevices(devices, look)).run())
    assert set().union(*sent.values()) == set(allowed)
    store.close()


def another_model() -> nn.Module:
    return split_sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 10)), 2)


@every_run
def test_app_with_own_model_is_told_what_run_needs(name: str, tmp_path: Path) -> None:
    prepared = prepare(RUNS[name], tmp_path / "work")
    store, contract = open_run(prepared)
    needs = contract.requirements
    with an_app(prepared[1][0], DeviceApi(store), model=another_model, name="mine", allow=needs.columns) as device:
        if needs.same_architecture or needs.same_extractor or contract.features:
            with pytest.raises(
                RefusedError, match=r"the device has .*, run 'simulation' has .*; (use|give|replace|pass|build) "
            ):
                device.step(0.0)
            assert store.devices.all(RUN) == []
            assert len(store.history.events(RUN, "refused")) == 1
        else:
            device.step(0.0)
            assert [row.id for row in store.devices.all(RUN)] == [prepared[1][0].name]
    store.close()


@every_run
def test_app_without_allow_sends_class_statistics_and_metrics(name: str, tmp_path: Path) -> None:
    """By default: any other column is refused with the line that allows it too."""
    prepared = prepare(RUNS[name], tmp_path / "work")
    store, contract = open_run(prepared)
    usual = ("class_statistics", "counts", "metrics")
    further = [column for column in contract.requirements.columns if column not in usual]
    with an_app(prepared[1][0], DeviceApi(store)) as device:
        assert device.allow == usual
        if further:
            advice = f"to allow it, set Device(allow={line((*usual, *further))})"
            sentence = re.escape(f"the app does not allow {', '.join(further)}; {advice}")
            with pytest.raises(RefusedError, match=sentence):
                device.step(0.0)
            assert store.devices.all(RUN) == []
        else:
            device.step(0.0)
            (row,) = store.devices.all(RUN)
            assert sorted(contract_pb2.DeviceProfile.FromString(row.profile).allowed_columns) == sorted(usual)
    store.close()


@pytest.mark.parametrize("name", long_except(sorted(RUNS.keys() - {"no_transfer"}), *USUAL))
def test_app_allowing_nothing_is_told_what_method_sends(name: str, tmp_path: Path) -> None:
    """All methods but the one that sends nothing."""
    prepared = prepare(RUNS[name], tmp_path / "work")
    store, contract = open_run(prepared)
    sent = ", ".join(contract.requirements.columns)
    sentence = rf"^{contract.method} sends {sent}; the app does not allow {sent}; to allow it, set "
    sentence += re.escape(f"Device(allow={line(contract.requirements.columns)})")
    with an_app(prepared[1][0], DeviceApi(store), allow=()) as device, pytest.raises(RefusedError, match=sentence):
        device.step(0.0)
    store.close()
