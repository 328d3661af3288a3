"""Who is let in, and what a device gets at its check-in."""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any

import pytest
from intake.device_api_fleet import RUN, Fleet, silence
from support.wire_samples import (
    make_contract,
    make_identity,
    make_profile,
)

from fleetdistill.errors import RefusedError
from fleetdistill.names import NAME_RULE
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2, service_pb2, tensor_pb2
from fleetdistill_server.intake.admission import fitting_run
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store


def test_a_device_that_fits_gets_the_contract_and_a_secret_once(fleet: Fleet) -> None:
    first = fleet.check_in()
    assert first.contract == make_contract()
    assert (len(first.secret), first.lease_seconds, first.heartbeat_seconds) == (32, 60.0, 15.0)
    again = fleet.check_in(secret=first.secret)
    assert again.secret == b""
    assert fleet.store.devices.present(RUN) == ["d1"]
    assert fleet.wakes == 2  # the engine may wait for devices
    row = fleet.store.devices.get(RUN, "d1")
    assert row is not None
    assert first.secret not in row.secret_hash  # only its hash is kept


def test_without_a_profile_a_device_only_learns_the_contract(fleet: Fleet) -> None:
    answer = fleet.api.check_in(service_pb2.CheckInRequest(identity=make_identity("d1")))
    assert (answer.contract, answer.secret) == (make_contract(), b"")
    assert fleet.store.devices.all(RUN) == []


def test_device_declaring_more_samples_than_contract_is_refused(store: Store) -> None:
    fleet = Fleet(store, max_samples=1000)
    fleet.check_in("d1", profile=make_profile(samples=1000))
    with pytest.raises(RefusedError) as refused:
        fleet.check_in("d2", profile=make_profile(samples=1001))
    assert refused.value.code == Code.CONTRACT_MISMATCH
    assert str(refused.value) == (
        "number of samples: the device has 1001, run 'digits' has at most 1000; if the device really has that many, "
        "raise [contract] max_samples in a new run"
    )
    assert fleet.refused() == [("d2", Code.CONTRACT_MISMATCH)]


def large(fleet: Fleet) -> list[tuple[str, str]]:
    return [(event.device, event.text) for event in fleet.store.history.events(RUN, "large-device")]


def test_device_declaring_far_more_than_fleet_is_reported_once(fleet: Fleet) -> None:
    for name, samples in {"d1": 10, "d2": 30, "d3": 401}.items():
        secret = fleet.check_in(name, profile=make_profile(samples=samples)).secret
    assert large(fleet) == []  # 20 times 30 is 600
    fleet.check_in("d4", profile=make_profile(samples=10))
    assert large(fleet) == [("d3", "d3 declares 401 samples, more than 20 times the fleet's median, 20")]
    fleet.check_in("d3", secret, make_profile(samples=10**9))
    assert len(large(fleet)) == 1
    again = DeviceApi(fleet.store)  # of another start
    again.check_in(service_pb2.CheckInRequest(identity=make_identity("d5"), profile=make_profile(samples=10**6)))
    assert [device for device, _ in large(fleet)] == ["d3", "d5"]


def test_large_first_device_is_reported_when_others_join(fleet: Fleet) -> None:
    for name in ("hostile", "d1", "d2"):
        assert large(fleet) == []
        fleet.check_in(name, profile=make_profile(samples=10**9 if name == "hostile" else 10))
    assert [device for device, _ in large(fleet)] == ["hostile"]


def test_an_empty_run_name_means_the_only_run(fleet: Fleet) -> None:
    request = service_pb2.CheckInRequest(identity=make_identity("d1", run=""), profile=make_profile())
    assert fleet.api.check_in(request).contract.run == RUN
    fleet.store.runs.begin("another", {})
    expected = r"the server has several runs; set Server\(run=...\) to one of: digits, another"
    with pytest.raises(RefusedError, match=expected) as error:
        fleet.api.check_in(request)
    assert error.value.code == Code.UNKNOWN_RUN
    fleet.api.sessions.served_run = lambda: "another"  # it has no contract yet
    with pytest.raises(RefusedError, match="run 'another' is being prepared"):
        fleet.api.check_in(request)
    fleet.store.runs.set_status("another", RunStatus.FINISHED, "1 round completed")
    request.identity.device = "d2"
    assert fleet.api.check_in(request).contract.run == RUN, "the only run that has not ended"


def test_a_run_that_is_unknown_or_still_prepared_is_refused(fleet: Fleet) -> None:
    fleet.store.runs.begin("soon", {})
    others = f", only {RUN}, soon; set Server(run=...) to one of these, with its own state directory"
    for run, code, text in (
        ("other", Code.UNKNOWN_RUN, f"the server has no run 'other'{others}"),
        ("soon", Code.NOT_READY, "run 'soon' is being prepared"),
    ):
        with pytest.raises(RefusedError) as error:
            fleet.api.check_in(service_pb2.CheckInRequest(identity=make_identity(run=run)))
        assert (error.value.code, str(error.value)) == (code, text)


def test_who_names_no_run_costs_little(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to show who they are for this, and check-ins share one thread with all receipts."""
    counted: list[str] = []
    query = fleet.store.database.rows
    monkeypatch.setattr(fleet.store.database, "rows", lambda sql, *v: counted.append(sql) or query(sql, *v))  # type: ignore[func-returns-value]
    fleet.api.check_in(service_pb2.CheckInRequest(identity=make_identity("d1", run="")))
    assert counted
    assert not [sql for sql in counted if "uploads" in sql or "devices" in sql]


def test_a_profile_has_a_bound(fleet: Fleet) -> None:
    """It is kept for as long as the run."""
    with pytest.raises(RefusedError, match="but at most 65536 are allowed") as error:
        fleet.check_in(profile=make_profile(model_name="x" * 70_000))
    assert error.value.code == Code.TOO_LARGE
    assert fleet.store.devices.all(RUN) == []
    with pytest.raises(RefusedError, match="model_name has 1 entries of up to 129 characters, but at most 100 of 128"):
        fleet.check_in(profile=make_profile(model_name="x" * 129))
    assert fleet.store.devices.all(RUN) == []
    fleet.check_in(profile=make_profile(model_name="x" * 128))


def test_a_name_of_the_data_has_a_bound(fleet: Fleet) -> None:
    with pytest.raises(RefusedError) as error:
        fleet.check_in(profile=make_profile(data_version=b"v" * 33))
    assert (error.value.code, str(error.value)) == (
        Code.BAD_MESSAGE,
        "the profile's data_version has 33 bytes, but at most 32 are allowed; use a digest of the data",
    )
    assert fleet.store.devices.all(RUN) == []
    fleet.check_in(profile=make_profile(data_version=b"v" * 32))
    (row,) = fleet.store.devices.all(RUN)
    assert contract_pb2.DeviceProfile.FromString(row.profile).data_version == b"v" * 32


def test_nobody_checks_in_to_a_run_that_was_deleted(fleet: Fleet) -> None:
    fleet.join("d1")
    fleet.store.runs.delete(RUN)
    with pytest.raises(RefusedError, match="the server has no run 'digits'") as error:
        fleet.check_in("d2")
    assert error.value.code == Code.UNKNOWN_RUN
    assert fleet.store.devices.all(RUN) == []
    silence(fleet, "d1")
    fleet.api.sessions.end_leases()
    assert fleet.store.history.events(RUN) == []


def test_a_server_without_runs_is_not_ready() -> None:
    api = DeviceApi(Store.in_memory())
    with pytest.raises(RefusedError) as error:
        api.check_in(service_pb2.CheckInRequest(identity=make_identity(run="")))
    assert (error.value.code, str(error.value)) == (Code.NOT_READY, "the server has no run yet")


FEATURES = contract_pb2.NamedShape

FIT = "use a device model and data that fit the run"

ON_EXTRACTOR = "build the app's model on the extractor that run.toml names as [model] extractor"

MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "classes": ({"classes": 10}, f"number of classes: the device has 10, run 'digits' has 3; {FIT}"),
    "input shape": (
        {"input_shape": [3, 32, 32]},
        f"input shape: the device has [3, 32, 32], run 'digits' has [1, 8, 8]; {FIT}",
    ),
    "feature shape": (
        {"features": [FEATURES(name="cut", shape=[4, 4])]},
        f"feature shape at cut 'cut': the device has [4, 4], run 'digits' has [2, 2]; {ON_EXTRACTOR}",
    ),
    "no such cut": (
        {"features": [FEATURES(name="deep", shape=[2, 2])]},
        f"feature shape at cut 'cut': the device has no such cut, run 'digits' has [2, 2]; {ON_EXTRACTOR}",
    ),
    "element type": (
        {"knowledge_types": [tensor_pb2.ELEMENT_TYPE_FLOAT16, 99]},
        "element type: the device has float16, run 'digits' has float32; "
        "update the device's SDK, or choose another knowledge_type for the run",
    ),
    "extractor": (
        {"extractor_fingerprint": "a" * 64},
        "extractor: the device has another one in 'small' (aaaaaaaaaaaa), run 'digits' has eeeeeeeeeeee; "
        f"{ON_EXTRACTOR}",
    ),
    "no samples": (
        {"samples": 0},
        "number of samples: the device has 0, run 'digits' has at least 1; give the device training data",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_device_that_does_not_fit_is_refused_with_both_sides(fleet: Fleet, name: str) -> None:
    changes, sentence = MISMATCHES[name]
    with pytest.raises(RefusedError) as error:
        fleet.check_in(profile=make_profile(**changes))
    assert error.value.code == Code.CONTRACT_MISMATCH
    assert str(error.value) == sentence
    assert fleet.store.devices.all(RUN) == []
    assert fleet.refused() == [("d1", "contract-mismatch")]


@pytest.mark.parametrize(
    ("needs", "contract", "profile", "sentence"),
    [
        (
            {"same_architecture": True},
            {"model_fingerprint": "b" * 64},
            {"model_fingerprint": "c" * 64},
            "model: the device has 'small' (cccccccccccc), run 'digits' has bbbbbbbbbbbb; pass the model that "
            "run.toml names as [model] device to Device(model=...)",
        ),
        (
            {"proxy_set": True},
            {"proxy_digest": b"\xbb" * 32},
            {},
            "proxy set: the device has none, run 'digits' has bbbbbbbbbbbb; update the device's SDK, which downloads "
            "the run's proxy set automatically",
        ),
    ],
)
def test_what_a_method_requires_is_compared(
    store: Store, needs: dict[str, Any], contract: dict[str, Any], profile: dict[str, Any], sentence: str
) -> None:
    strict = Fleet(store, requirements=contract_pb2.Requirements(**needs), **contract)
    with pytest.raises(RefusedError) as error:
        strict.check_in(profile=make_profile(**profile))
    assert str(error.value) == sentence


def test_the_models_of_device_and_run_are_named(store: Store) -> None:
    needs = contract_pb2.Requirements(same_architecture=True)
    fleet = Fleet(store, requirements=needs, model_fingerprint="b" * 64)
    models = {"model": {"device": "digits_mlp_small", "extractor": "digits_extractor"}}
    store.database.write("UPDATE runs SET config = ?", json.dumps(models))
    with pytest.raises(RefusedError, match=r"has 'small' \(cccc.*, run 'digits' has 'digits_mlp_small' \(bbbb"):
        fleet.check_in(profile=make_profile(model_fingerprint="c" * 64))


def test_a_model_on_the_runs_extractor_is_named(store: Store) -> None:
    needs = contract_pb2.Requirements(same_extractor=True)
    fleet = Fleet(store, requirements=needs)
    store.database.write("UPDATE runs SET config = ?", json.dumps({"model": {"extractor": "identity"}}))
    with pytest.raises(RefusedError) as error:
        fleet.check_in(profile=make_profile(features=[FEATURES(name="cut", shape=[4, 4])]))
    example = "build_model('linear:identity', input_shape=(1, 8, 8), classes=3)"
    assert str(error.value).endswith(f"{ON_EXTRACTOR}, for instance with {example}")


@pytest.mark.parametrize("needs", ["same_extractor", "same_architecture"])
def test_a_device_of_another_model_does_not_fit(store: Store, needs: str) -> None:
    required: dict[str, Any] = {needs: True}
    contract = make_contract(requirements=contract_pb2.Requirements(**required))
    Fleet(store, requirements=contract.requirements)
    store.database.write("UPDATE runs SET config = ?", json.dumps({"model": {"extractor": "identity"}}))
    able = service_pb2.Abilities(classes=len(contract.classes), input_shape=contract.input_shape, model="identity")
    assert fitting_run(store, able, lambda run: contract) == RUN
    able.model = "another"
    with pytest.raises(RefusedError, match="the device has model 'another', the run 'identity'"):
        fitting_run(store, able, lambda run: contract)


def test_what_no_method_requires_may_differ(store: Store) -> None:
    lenient = Fleet(store, requirements=contract_pb2.Requirements())
    lenient.check_in(profile=make_profile(extractor_fingerprint="a" * 64, allowed_columns=[]))


def test_a_device_that_keeps_a_needed_column_back_is_refused(fleet: Fleet) -> None:
    with pytest.raises(RefusedError) as error:
        fleet.check_in(profile=make_profile(allowed_columns=["logits", "metrics"]))
    assert error.value.code == Code.COLUMN_NOT_ALLOWED
    assert str(error.value) == (
        "feddkc sends features, logits, labels; the app does not allow features, labels; "
        'to allow it, set Device(allow=["metrics", "features", "logits", "labels"])'
    )
    assert error.value.details == {"columns": "features,labels"}


@pytest.mark.parametrize("size", [1, 31, 33, 60_000])
def test_a_secret_of_another_size_is_refused(fleet: Fleet, size: int) -> None:
    with pytest.raises(RefusedError) as error:
        fleet.check_in("d1", b"x" * size)
    text = f"the secret of device 'd1' has {size} bytes, must be 32 random ones"
    assert (error.value.code, str(error.value)) == (Code.BAD_IDENTITY, text)
    assert fleet.store.devices.get(RUN, "d1") is None


@pytest.mark.parametrize("secret", [b"", b"x" * 32])
def test_a_second_device_of_the_same_id_is_refused(fleet: Fleet, secret: bytes) -> None:
    fleet.join("d1")
    with pytest.raises(RefusedError) as error:
        fleet.check_in("d1", secret, make_profile(model_name="stolen"))
    assert (error.value.code, str(error.value)) == (
        Code.BAD_IDENTITY,
        "device id 'd1' belongs to another device; choose another id or restore this device's secret",
    )
    row = fleet.store.devices.get(RUN, "d1")
    assert row is not None
    assert contract_pb2.DeviceProfile.FromString(row.profile).model_name == "small"


def test_one_of_two_devices_taking_same_id_at_once_is_refused(fleet: Fleet) -> None:
    secrets = []

    def quicker() -> None:
        fleet.before_commit = lambda: None
        secrets.append(fleet.check_in("d1").secret)

    fleet.before_commit = quicker
    with pytest.raises(RefusedError, match="device id 'd1' belongs to another device"):
        fleet.check_in("d1")
    fleet.api.sessions.authenticate(make_identity("d1", secrets[0]))


def test_a_secret_that_the_server_lost_is_taken_up_again(fleet: Fleet) -> None:
    """A device that knows its secret can join a fresh store."""
    assert fleet.check_in("d1", b"s" * 32).secret == b""
    fleet.api.sessions.authenticate(make_identity("d1", b"s" * 32))


@pytest.mark.parametrize("device", ["", "a b", "a/b", "é", "x" * 65, "d1\n", "../up"])
def test_malformed_ids_are_refused(fleet: Fleet, device: str) -> None:
    with pytest.raises(RefusedError) as error:
        fleet.check_in(device)
    assert (error.value.code, str(error.value)) == (
        Code.BAD_IDENTITY,
        f"device id {device!r} must be {NAME_RULE}",
    )
    assert fleet.store.devices.all(RUN) == []


@pytest.mark.parametrize(
    "call", ["next_ask", "heartbeat", "leave", "decline", "uploads.status", "uploads.begin", "downloads.open"]
)
@pytest.mark.parametrize("who", [make_identity("d1", b"x" * 32), make_identity("d1"), make_identity("d2", b"x" * 32)])
def test_every_call_needs_the_secret(fleet: Fleet, call: str, who: service_pb2.Identity) -> None:
    fleet.join("d1")
    fleet.ask("d1")
    requests: dict[str, Any] = {
        "next_ask": who,
        "heartbeat": service_pb2.HeartbeatRequest(identity=who),
        "leave": service_pb2.LeaveRequest(identity=who),
        "decline": service_pb2.DeclineRequest(identity=who, round=1, step_number=1),
        "uploads.status": service_pb2.UploadStatusRequest(identity=who),
        "uploads.begin": service_pb2.UploadHeader(identity=who),
        "downloads.open": service_pb2.DownloadRequest(identity=who),
    }
    with pytest.raises(RefusedError) as error:
        attrgetter(call)(fleet.api)(requests[call])
    assert error.value.code == Code.BAD_IDENTITY
    assert str(error.value).startswith(f"the server has no check-in of device {who.device!r} with this secret")
    assert fleet.ask_state() == ("open", "")
