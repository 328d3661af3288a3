"""The device API: who is let in, what they are asked, and one receipt for each answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from support.processes import PATIENCE_SECONDS
from support.wire_samples import (
    EXPECTS,
    data_of,
    i32,
    i64,
    in_pieces,
    make_contract,
    make_identity,
    make_knowledge,
    make_metrics,
    make_payload,
    make_profile,
)

from fleetdistill.errors import RefusedError, StoreError
from fleetdistill.knowledge import NetworkFile, SampleKnowledge
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2, tensor_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.upload_session import UploadSession
from fleetdistill_server.security.revocation import revoke_device
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.retention import sweep
from fleetdistill_server.store.store import Store

RUN = "digits"
T = TypeVar("T")
WHOLE = 1 << 20


class Fleet:
    """A device API with a published run, and what devices and the engine would do."""

    def __init__(self, store: Store, **contract: Any) -> None:
        self.store = store
        self.wakes = 0
        self.before_commit: Callable[[], None] = lambda: None
        self.api = DeviceApi(store, self._commit, self._wake, lease_seconds=60.0)
        store.runs.begin(RUN, {})
        store.runs.publish_contract(RUN, make_contract(**contract).SerializeToString())

    def _commit(self, job: Callable[[Store], T]) -> T:
        self.before_commit()
        with self.store.transaction():
            return job(self.store)

    def _wake(self) -> None:
        self.wakes += 1

    def check_in(
        self, device: str = "d1", secret: bytes = b"", profile: contract_pb2.DeviceProfile | None = None
    ) -> service_pb2.CheckInResponse:
        identity = make_identity(device, secret)
        return self.api.check_in(service_pb2.CheckInRequest(identity=identity, profile=profile or make_profile()))

    def join(self, device: str = "d1") -> service_pb2.Identity:
        """Checks a device in; returns who it is from then on."""
        return make_identity(device, self.check_in(device).secret)

    def ask(self, *devices: str, step_number: int = 1, payload: Payload | None = None) -> None:
        """What the engine writes."""
        if payload is not None:
            self.store.blobs.put(payload)
        row: Row = {"run": RUN, "round": 1, "step_number": step_number, "step": "train", "expects": EXPECTS, "seed": 7}
        row |= {"payload": payload.sha256 if payload else None, "payload_bytes": payload.data_bytes if payload else 0}
        row["deadline_at"] = time.time() + 600
        self.store.asks.write([{**row, "device": device} for device in devices or ("d1",)])

    def begin(
        self,
        identity: service_pb2.Identity,
        payload: Payload,
        *,
        attempt: int = 1,
        first_byte: int = 0,
        samples: int = 4,
        step_number: int = 1,
        number: int = 1,
    ) -> UploadSession:
        return self.api.uploads.begin(  # type: ignore[return-value]
            service_pb2.UploadHeader(
                identity=identity,
                name=service_pb2.UploadName(round=number, step_number=step_number, attempt=attempt),
                payload=payload.header(),
                samples=samples,
                first_byte=first_byte,
            )
        )

    def send(self, identity: service_pb2.Identity, payload: Payload, **how: Any) -> service_pb2.Receipt:
        session = self.begin(identity, payload, **how)
        feed(session, in_pieces(payload, WHOLE))
        return session.finish()

    def status(
        self, identity: service_pb2.Identity, attempt: int = 1, number: int = 1, step_number: int = 1
    ) -> service_pb2.UploadStatusResponse:
        name = service_pb2.UploadName(round=number, step_number=step_number, attempt=attempt)
        return self.api.uploads.status(service_pb2.UploadStatusRequest(identity=identity, name=name))

    def refused(self) -> list[tuple[str, str]]:
        """Device and code of every refusal that `runs show` would list."""
        return [(event["device"], event["code"]) for event in self.store.history.events(RUN, "refused")]

    def ask_state(self, device: str = "d1") -> tuple[str, str | None]:
        row = self.store.asks.get(RUN, 1, 1, device)
        assert row is not None
        return row["status"], row["reason"]


def feed(session: UploadSession, chunks: Iterable[knowledge_pb2.TensorChunk]) -> None:
    for chunk in chunks:
        session.feed(chunk)


def feed_all(session: UploadSession, chunks: Iterable[knowledge_pb2.TensorChunk]) -> service_pb2.Receipt:
    feed(session, chunks)
    return session.finish()


def refused_bytes(fleet: Fleet, device: str = "d1") -> int:
    """What has travelled in vain to the server; no answer was made of it."""
    counted = fleet.store.history.traffic_by_kind(RUN)
    rows = [row for row in counted if (row["device"], row["kind"]) == (device, "refused")]
    assert all((row["direction"], row["round"], row["tensor_bytes"]) == ("up", 1, 0) for row in rows)
    return sum(row["sent_bytes"] for row in rows)


def takes(session: UploadSession, chunk: knowledge_pb2.TensorChunk) -> bool:
    """Whether the session is the one that counts."""
    try:
        session.feed(chunk)
    except RefusedError as refusal:
        return refusal.code != Code.OUT_OF_STEP
    return True


@pytest.fixture
def store() -> Iterator[Store]:
    opened = Store.in_memory()
    yield opened
    opened.close()


@pytest.fixture
def fleet(store: Store) -> Fleet:
    return Fleet(store)


@pytest.fixture(params=["files", "memory"])
def any_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """For what the two kinds of staging areas might do differently."""
    opened = Store.open(tmp_path) if request.param == "files" else Store.in_memory()
    yield Fleet(opened)
    opened.close()


# --- check-in


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
    assert first.secret not in row["secret_hash"]  # only its hash is kept


def test_without_a_profile_a_device_only_learns_the_contract(fleet: Fleet) -> None:
    answer = fleet.api.check_in(service_pb2.CheckInRequest(identity=make_identity("d1")))
    assert (answer.contract, answer.secret) == (make_contract(), b"")
    assert fleet.store.devices.all(RUN) == []


def test_a_device_may_not_declare_more_samples_than_the_contract_takes(store: Store) -> None:
    fleet = Fleet(store, max_samples=1000)
    fleet.check_in("d1", profile=make_profile(samples=1000))
    with pytest.raises(RefusedError) as refused:
        fleet.check_in("d2", profile=make_profile(samples=1001))
    assert refused.value.code == Code.CONTRACT_MISMATCH
    assert str(refused.value) == (
        "number of samples: the device has 1001, run 'digits' has at most 1000; raise [contract] max_samples for a new "
        "run if devices really have so many"
    )
    assert fleet.refused() == [("d2", Code.CONTRACT_MISMATCH)]


def large(fleet: Fleet) -> list[tuple[str, str]]:
    return [(event["device"], event["text"]) for event in fleet.store.history.events(RUN, "large-device")]


def test_a_device_that_declares_far_more_than_the_fleet_is_told_of_once(fleet: Fleet) -> None:
    for name, samples in {"d1": 10, "d2": 30, "d3": 401}.items():
        secret = fleet.check_in(name, profile=make_profile(samples=samples)).secret
    assert large(fleet) == []  # 20 times 30 is 600
    fleet.check_in("d4", profile=make_profile(samples=10))
    assert large(fleet) == [("d3", "d3 declares 401 samples, 20 times the fleet's median is 400")]
    fleet.check_in("d3", secret, make_profile(samples=10**9))
    assert len(large(fleet)) == 1
    again = DeviceApi(fleet.store)  # of another start
    again.check_in(service_pb2.CheckInRequest(identity=make_identity("d5"), profile=make_profile(samples=10**6)))
    assert [device for device, _ in large(fleet)] == ["d3", "d5"]


def test_a_device_that_was_large_and_came_first_is_told_of_when_others_come(fleet: Fleet) -> None:
    for name in ("hostile", "d1", "d2"):
        assert large(fleet) == []
        fleet.check_in(name, profile=make_profile(samples=10**9 if name == "hostile" else 10))
    assert [device for device, _ in large(fleet)] == ["hostile"]


def test_an_empty_run_name_means_the_only_run(fleet: Fleet) -> None:
    request = service_pb2.CheckInRequest(identity=make_identity("d1", run=""), profile=make_profile())
    assert fleet.api.check_in(request).contract.run == RUN
    fleet.store.runs.begin("another", {})
    with pytest.raises(RefusedError, match="name the run; the server has: digits, another") as error:
        fleet.api.check_in(request)
    assert error.value.code == Code.UNKNOWN_RUN


def test_a_run_that_is_unknown_or_still_prepared_is_refused(fleet: Fleet) -> None:
    fleet.store.runs.begin("soon", {})
    for run, code, text in (
        ("other", Code.UNKNOWN_RUN, "the server has no run 'other'"),
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
    with pytest.raises(RefusedError, match="at most 65536 are kept") as error:
        fleet.check_in(profile=make_profile(model_name="x" * 70_000))
    assert error.value.code == Code.TOO_LARGE
    assert fleet.store.devices.all(RUN) == []
    with pytest.raises(RefusedError, match="model_name has 1 entries of up to 129 characters, at most 100 of 128"):
        fleet.check_in(profile=make_profile(model_name="x" * 129))
    assert fleet.store.devices.all(RUN) == []
    fleet.check_in(profile=make_profile(model_name="x" * 128))


def test_a_name_of_the_data_has_a_bound(fleet: Fleet) -> None:
    with pytest.raises(RefusedError) as error:
        fleet.check_in(profile=make_profile(data_version=b"v" * 33))
    assert (error.value.code, str(error.value)) == (
        Code.BAD_MESSAGE,
        "the profile's data_version has 33 bytes, at most 32 are taken; name the data with a digest",
    )
    assert fleet.store.devices.all(RUN) == []
    fleet.check_in(profile=make_profile(data_version=b"v" * 32))
    (row,) = fleet.store.devices.all(RUN)
    assert contract_pb2.DeviceProfile.FromString(row["profile"]).data_version == b"v" * 32


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
    assert (error.value.code, str(error.value)) == (Code.NOT_READY, "name the run; the server has: none")


FEATURES = contract_pb2.NamedShape
FIT = "give the device a model and data that fit the run"
FIT_CUT = "give the device a model whose features at 'cut' have this shape"
MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "classes": ({"classes": 10}, f"number of classes: the device has 10, run 'digits' has 3; {FIT}"),
    "input shape": (
        {"input_shape": [3, 32, 32]},
        f"input shape: the device has [3, 32, 32], run 'digits' has [1, 8, 8]; {FIT}",
    ),
    "feature shape": (
        {"features": [FEATURES(name="cut", shape=[4, 4])]},
        f"feature shape at cut 'cut': the device has [4, 4], run 'digits' has [2, 2]; {FIT_CUT}",
    ),
    "no such cut": (
        {"features": [FEATURES(name="deep", shape=[2, 2])]},
        f"feature shape at cut 'cut': the device has no such cut, run 'digits' has [2, 2]; {FIT_CUT}",
    ),
    "element type": (
        {"knowledge_types": [tensor_pb2.ELEMENT_TYPE_FLOAT16, 99]},
        "element type: the device has float16, run 'digits' has float32; "
        "update the device's SDK, or choose another knowledge_type for the run",
    ),
    "extractor": (
        {"extractor_fingerprint": "a" * 64},
        "extractor: the device has aaaaaaaaaaaa, run 'digits' has eeeeeeeeeeee; "
        "build the extractor of 'small' like the one that run.toml names as [model] extractor",
    ),
    "no samples": (
        {"samples": 0},
        "number of samples: the device has 0, run 'digits' has at least 1; give the device data to train on",
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
            "model: the device has cccccccccccc, run 'digits' has bbbbbbbbbbbb; 'small' is another model than all "
            "devices run; build the one of run.toml's [model] device",
        ),
        (
            {"proxy_set": True},
            {"proxy_digest": b"\xbb" * 32},
            {},
            "proxy set: the device has none, run 'digits' has bbbbbbbbbbbb; update the device's SDK, which fetches the "
            "run's proxy set by itself",
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


def test_what_no_method_requires_may_differ(store: Store) -> None:
    lenient = Fleet(store, requirements=contract_pb2.Requirements())
    lenient.check_in(profile=make_profile(extractor_fingerprint="a" * 64, allowed_columns=[]))


def test_a_device_that_keeps_a_needed_column_back_is_refused(fleet: Fleet) -> None:
    with pytest.raises(RefusedError) as error:
        fleet.check_in(profile=make_profile(allowed_columns=["logits", "metrics"]))
    assert error.value.code == Code.COLUMN_NOT_ALLOWED
    assert str(error.value) == (
        "feddkc sends features, logits, labels; the app keeps back features, labels; "
        "allow them with Device(allow=...) or take part in a run of another method"
    )
    assert error.value.details == {"columns": "features,labels"}


@pytest.mark.parametrize("secret", [b"", b"x" * 32])
def test_a_second_device_of_the_same_id_is_refused(fleet: Fleet, secret: bytes) -> None:
    fleet.join("d1")
    with pytest.raises(RefusedError) as error:
        fleet.check_in("d1", secret, make_profile(model_name="stolen"))
    assert (error.value.code, str(error.value)) == (
        Code.BAD_IDENTITY,
        "device id 'd1' belongs to another device; choose another id or restore its secret",
    )
    row = fleet.store.devices.get(RUN, "d1")
    assert row is not None
    assert contract_pb2.DeviceProfile.FromString(row["profile"]).model_name == "small"


def test_of_two_devices_that_take_an_id_at_the_same_moment_one_is_refused(fleet: Fleet) -> None:
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
        f"device id {device!r} must be 1 to 64 letters, digits, '-', '_' or '.'",
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
    assert (error.value.code, str(error.value)) == (
        Code.BAD_IDENTITY,
        f"device {who.device!r} is not checked in with this secret",
    )
    assert fleet.ask_state() == ("open", None)


# --- asks


def test_an_ask_tells_what_to_do(fleet: Fleet) -> None:
    identity = fleet.join()
    assert fleet.api.next_ask(identity) is None
    payload = make_payload()
    fleet.ask(payload=payload)
    response = fleet.api.next_ask(identity)
    assert response is not None
    ask = response.ask
    assert (ask.round, ask.step_number, ask.step, ask.seed, ask.completed_rounds) == (1, 1, "train", 7, 0)
    assert (ask.payload, ask.payload_bytes) == (payload.sha256, payload.data_bytes)
    assert 590 < ask.deadline_seconds <= 600


def test_a_poll_that_finds_nothing_reads_the_devices_row_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every idle device does this again and again."""
    identity, read, looked_up = fleet.join(), fleet.api.store.devices.get, list[str]()

    def device(run: str, name: str) -> Row | None:
        looked_up.append(name)
        return read(run, name)

    monkeypatch.setattr(fleet.api.store.devices, "get", device)
    assert fleet.api.next_ask(identity) is None
    assert looked_up == ["d1"]


def test_a_run_that_is_over_says_why_once_nothing_is_asked(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    fleet.store.runs.end(RUN, "finished", "30 rounds completed")
    assert fleet.api.next_ask(identity) is not None
    fleet.send(identity, make_payload())
    response = fleet.api.next_ask(identity)
    assert response is not None
    assert response.finished == "finished: 30 rounds completed"


def test_devices_of_a_stopped_run_are_told_to_come_back_later_and_why(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.store.runs.end(RUN, "stopped", "the engine failed 6 times" + "!" * 5000)
    response = fleet.api.next_ask(identity)
    assert response is not None
    come_back = response.come_back
    assert 0 < come_back.after_seconds < come_back.before_seconds <= 60
    assert come_back.reason.startswith("the run is stopped until its operator starts it again: the engine failed 6")
    assert len(come_back.reason) == 1000
    fleet.store.runs.end(RUN, "running", "started again")
    assert fleet.api.next_ask(identity) is None


@pytest.mark.parametrize("lease", [4.0, 60.0])
def test_devices_of_a_stopped_run_come_back_before_their_lease_ends(fleet: Fleet, lease: float) -> None:
    """Otherwise each of them is an event with every pause, for as long as the run is stopped."""
    identity = fleet.join()
    fleet.store.runs.end(RUN, "stopped", "the engine failed 6 times")
    fleet.api.sessions.lease_seconds = lease
    response = fleet.api.next_ask(identity)
    assert response is not None
    assert response.come_back.before_seconds <= lease / 2


def test_who_is_to_be_forgotten_is_not_kept_waiting_for_a_stopped_run(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.store.runs.end(RUN, "stopped", "the engine failed 6 times")
    fleet.store.devices.ask_to_forget(RUN, identity.device)
    response = fleet.api.next_ask(identity)
    assert response is not None
    assert "has it forgotten" in response.finished


def test_a_heartbeat_tells_whether_the_work_still_counts(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    beat = service_pb2.HeartbeatRequest(identity=identity)
    assert fleet.api.heartbeat(beat).ask_open
    fleet.store.asks.close(1, "deadline passed")
    assert not fleet.api.heartbeat(beat).ask_open


# --- presence


class Clock:
    """The device API's, to be set forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr("fleetdistill_server.intake.sessions.time.monotonic", lambda: self.now)


def silence(fleet: Fleet, *devices: str) -> None:
    """Lets the leases of these devices run out."""
    for device in devices:
        fleet.api.sessions._leases[RUN, device] = time.monotonic() - 1


def test_a_lease_that_ends_closes_the_open_asks_and_shows_in_the_events(fleet: Fleet) -> None:
    fleet.join("d1")
    fleet.join("d2")
    fleet.ask("d1", "d2")
    silence(fleet, "d1")
    wakes = fleet.wakes
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d2"]
    assert (fleet.ask_state("d1"), fleet.ask_state("d2")) == (("out", "lease ended"), ("open", None))
    (event,) = fleet.store.history.events(RUN, "lease-ended")
    assert (event["device"], event["text"]) == ("d1", "d1 was silent for 60 s")
    assert fleet.wakes > wakes
    fleet.api.sessions.end_leases()
    assert len(fleet.store.history.events(RUN)) == 1


def test_the_server_s_own_pause_is_charged_to_nobody(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped for ten minutes, or waiting for its disk: it could not have heard them."""
    clock = Clock(monkeypatch)
    identity = fleet.join("d1")
    fleet.join("d2")
    fleet.ask("d1", "d2")
    fleet.api.sessions.end_leases()
    clock.now += 600
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1", "d2"]
    for _ in range(70):
        clock.now += 1
        fleet.api.heartbeat(service_pb2.HeartbeatRequest(identity=identity))
        fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1"], "d2 had a whole lease to call after the pause"
    assert fleet.ask_state("d2") == ("out", "lease ended")


def test_a_disk_that_stood_still_during_the_sweep_is_charged_to_nobody(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    fleet.join("d1")
    fleet.api.sessions.end_leases()
    clock.now += 6  # it is time to write down who called, and that takes long

    def hang() -> None:
        clock.now += 600

    fleet.before_commit = hang
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1"]


def test_many_leases_end_in_one_commit_but_not_of_who_just_called(fleet: Fleet) -> None:
    names = [f"d{number}" for number in range(5)]
    joined = {name: fleet.join(name) for name in names}
    fleet.ask(*names)
    silence(fleet, *names)
    commits: list[int] = []

    def call() -> None:
        commits.append(1)
        if len(commits) == 1:
            fleet.api.heartbeat(service_pb2.HeartbeatRequest(identity=joined["d3"]))

    fleet.before_commit = call
    fleet.api.sessions.end_leases()
    assert len(commits) == 1
    assert fleet.store.devices.present(RUN) == ["d3"]
    assert fleet.ask_state("d3") == ("open", None)
    assert [event["device"] for event in fleet.store.history.events(RUN, "lease-ended")] == ["d0", "d1", "d2", "d4"]


def test_a_lease_whose_end_could_not_be_written_ends_later(fleet: Fleet) -> None:
    fleet.join("d1")
    fleet.api.sessions.end_leases()
    silence(fleet, "d1")

    def fail() -> None:
        fleet.before_commit = lambda: None
        raise StoreError("the disk is full")

    fleet.before_commit = fail
    with pytest.raises(StoreError):
        fleet.api.sessions.end_leases()
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == []


@pytest.mark.parametrize("call", ["next_ask", "heartbeat", "status"])
def test_every_call_renews_the_lease(fleet: Fleet, call: str) -> None:
    identity = fleet.join()
    fleet.ask()
    silence(fleet, "d1")
    if call == "next_ask":
        fleet.api.next_ask(identity)
    elif call == "heartbeat":
        fleet.api.heartbeat(service_pb2.HeartbeatRequest(identity=identity))
    else:
        fleet.status(identity)
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1"]


def test_a_device_whose_lease_ended_is_out_for_the_round_but_not_for_the_run(fleet: Fleet) -> None:
    """It was suspended or cut off for a while and simply goes on calling."""
    identity = fleet.join()
    fleet.ask()
    silence(fleet, "d1")
    fleet.api.sessions.end_leases()
    wakes = fleet.wakes
    assert fleet.api.next_ask(identity) is None
    assert fleet.store.devices.present(RUN) == ["d1"]
    assert fleet.wakes > wakes  # a run may wait for devices
    silence(fleet, "d1")
    fleet.api.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == []


def test_a_device_that_leaves_is_gone_at_once(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    fleet.api.leave(service_pb2.LeaveRequest(identity=identity))
    assert fleet.store.devices.present(RUN) == []
    assert fleet.ask_state() == ("out", "device left")
    fleet.api.sessions.end_leases()
    assert fleet.store.history.events(RUN) == []  # leaving is nothing out of the ordinary


@pytest.mark.parametrize("call", ["heartbeat", "check_in"])
def test_a_call_that_was_under_way_does_not_bring_a_revoked_device_back(fleet: Fleet, call: str) -> None:
    """The guard lets it in, the revocation lands, and then the device API has its turn."""
    identity = fleet.join()
    fleet.store.devices.mark_gone(RUN, "d1", "lease ended")

    def revoke() -> None:
        revoke_device(fleet.store, "d1", "stolen")

    fleet.before_commit = revoke
    if call == "heartbeat":
        fleet.api.heartbeat(service_pb2.HeartbeatRequest(identity=identity))
    else:
        fleet.check_in(secret=identity.secret)
    assert fleet.store.devices.present(RUN) == []
    fleet.ask()
    assert fleet.ask_state() == ("out", "device revoked")


def test_a_device_that_declines_an_ask_is_out_of_it_alone_and_says_why(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    decline = service_pb2.DeclineRequest(identity=identity, round=1, step_number=1, reason="no teacher " * 1000)
    other = service_pb2.DeclineRequest(identity=identity, round=1, step_number=2, reason="of another ask")
    fleet.api.decline(other)
    assert fleet.ask_state() == ("open", None), "a device that is late must not close what it was asked since"
    fleet.api.decline(decline)
    assert fleet.ask_state() == ("out", "declined")
    (event,) = fleet.store.history.events(RUN)
    assert (event["kind"], event["device"]) == ("declined", identity.device)
    assert event["text"].startswith("step 'train': no teacher no teacher")
    assert len(event["text"]) < 600
    assert fleet.store.devices.present(RUN) == [identity.device], "present all the time: the next round takes it"
    assert fleet.api.next_ask(identity) is None
    fleet.api.decline(decline)
    assert len(fleet.store.history.events(RUN)) == 1


def test_after_a_restart_present_devices_have_a_fresh_lease(fleet: Fleet) -> None:
    fleet.join()
    restarted = DeviceApi(fleet.store, lease_seconds=0.0)
    restarted.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == ["d1"]
    restarted.sessions.adopt_present_devices()
    time.sleep(0.01)
    restarted.sessions.end_leases()
    assert fleet.store.devices.present(RUN) == []


# --- uploads


def test_an_answer_gets_a_receipt_once_it_is_stored(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = encode({"knowledge": make_knowledge(), "metrics": make_metrics(3, 4)})
    wakes = any_fleet.wakes
    receipt = any_fleet.send(identity, payload, samples=3)
    assert (receipt.sha256, receipt.data_bytes, receipt.name.attempt) == (payload.sha256, payload.data_bytes, 1)
    assert abs(receipt.received_at_ms / 1000 - time.time()) < 60
    (row,) = any_fleet.store.asks.uploads(RUN)
    assert (row["receipt"], row["samples"], row["status"]) == (receipt.id, 3, "acknowledged")
    assert data_of(any_fleet.store.blobs.open(payload.sha256)) == data_of(payload)
    assert any_fleet.ask_state() == ("answered", None)
    (figure,) = any_fleet.store.history.figures(RUN, "accuracy", "test")
    assert (figure["device"], figure["sum"], figure["count"]) == ("d1", 3.0, 4)
    assert any_fleet.wakes > wakes


def test_the_bytes_of_an_answer_are_counted_without_its_metrics_data(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    payload = make_payload()
    fleet.send(identity, payload)
    (row,) = fleet.store.history.traffic(RUN)
    assert (row["round"], row["device"], row["direction"], row["payloads"]) == (1, "d1", "up", 1)
    assert (row["tensor_bytes"], row["envelope_bytes"]) == (payload.data_bytes, payload.header().ByteSize())


@pytest.mark.parametrize("name", [{"number": 2}, {"step_number": 2}, {"number": 2**64 - 1}, {"number": 0}])
def test_an_answer_that_nobody_asked_for_is_refused(fleet: Fleet, name: dict[str, int]) -> None:
    identity = fleet.join()
    fleet.ask()
    step, number = name.get("step_number", 1), name.get("number", 1)
    sentence = f"device d1 was not asked step {step} of round {number}"
    for call in (lambda: fleet.begin(identity, make_payload(), **name), lambda: fleet.status(identity, **name)):
        with pytest.raises(RefusedError) as error:
            call()
        assert (error.value.code, str(error.value)) == (Code.NOT_ASKED, sentence)
    assert fleet.refused() == [("d1", "not-asked")] * 2
    assert fleet.ask_state() == ("open", None)


def test_an_answer_to_another_device_s_ask_is_refused(fleet: Fleet) -> None:
    fleet.join("d1")
    identity = fleet.join("d2")
    fleet.ask("d1")
    with pytest.raises(RefusedError) as error:
        fleet.begin(identity, make_payload())
    assert error.value.code == Code.NOT_ASKED


def test_an_answer_to_a_closed_round_is_refused(fleet: Fleet) -> None:
    identity = fleet.join()
    number = fleet.store.runs.start_round(RUN, ["d1"])
    fleet.ask()
    fleet.store.runs.close_round(RUN, number, b"c", [], {})
    assert not fleet.status(identity).ask_open
    with pytest.raises(RefusedError) as error:
        fleet.begin(identity, make_payload())
    assert (error.value.code, str(error.value)) == (
        Code.CLOSED,
        "device d1: step 'train' of round 1 takes no answer any more (round closed)",
    )
    assert fleet.refused() == [("d1", "closed")]


def test_an_answer_that_was_begun_in_time_and_ended_too_late_is_refused(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    session = fleet.begin(identity, make_payload())
    feed(session, in_pieces(make_payload(), WHOLE))
    fleet.store.asks.close(1, "deadline passed")
    with pytest.raises(RefusedError) as error:
        session.finish()
    assert (error.value.code, str(error.value)) == (
        Code.LATE,
        "device d1: step 'train' of round 1 takes no answer any more (deadline passed)",
    )
    assert fleet.store.asks.uploads(RUN) == []
    (row,) = fleet.store.history.traffic(RUN)
    assert (row["payloads"], row["tensor_bytes"], row["envelope_bytes"]) == (0, 0, 0)
    assert refused_bytes(fleet) == make_payload().header().ByteSize() + make_payload().data_bytes


def test_the_same_upload_again_gets_the_same_receipt_and_counts_once(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    receipt = any_fleet.send(identity, payload)
    again = any_fleet.begin(identity, payload)
    feed(again, in_pieces(payload, WHOLE))  # a device that did not ask for the status sends it all
    assert again.finish() == receipt
    assert any_fleet.status(identity).receipt == receipt
    assert len(any_fleet.store.asks.uploads(RUN)) == 1
    assert any_fleet.store.history.traffic(RUN)[0]["payloads"] == 1


def test_a_later_attempt_gets_the_receipt_of_the_first(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    receipt = fleet.send(identity, make_payload(), attempt=1)
    other = make_payload(labels=i32([2, 2, 2, 2]))
    assert fleet.send(identity, other, attempt=2) == receipt
    status = fleet.status(identity, attempt=2)
    assert status.receipt == receipt
    assert (status.receipt.name.attempt, status.ask_open) == (1, False)
    assert [row["sha256"] for row in fleet.store.asks.uploads(RUN)] == [make_payload().sha256]


def test_two_attempts_that_end_at_the_same_moment_count_once(any_fleet: Fleet) -> None:
    """Both are stored whole, then one is committed while the other waits for its turn."""
    identity = any_fleet.join()
    any_fleet.ask()
    payload = encode({"knowledge": make_knowledge(), "metrics": make_metrics()})
    session = any_fleet.begin(identity, payload)
    feed(session, in_pieces(payload, WHOLE))
    receipts = []

    def overtake() -> None:
        any_fleet.before_commit = lambda: None
        receipts.append(any_fleet.send(identity, payload))

    any_fleet.before_commit = overtake
    receipts.append(session.finish())
    assert receipts[0] == receipts[1]
    assert len(any_fleet.store.asks.uploads(RUN)) == 1
    assert [row["payloads"] for row in any_fleet.store.history.traffic(RUN)] == [1]


def test_of_two_streams_of_one_upload_the_newest_wins(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    chunks = in_pieces(payload, 16)
    older = any_fleet.begin(identity, payload)
    feed(older, chunks[:3])
    newer = any_fleet.begin(identity, payload, first_byte=48)
    with pytest.raises(RefusedError) as error:
        older.feed(chunks[3])
    assert (error.value.code, str(error.value)) == (
        Code.OUT_OF_STEP,
        "another stream of the same upload has taken over",
    )
    with pytest.raises(RefusedError, match="another stream"):
        older.finish()
    older.abandon()  # what the front does last must not disturb the newer one
    feed(newer, chunks[3:])
    assert newer.finish().sha256 == payload.sha256
    assert data_of(any_fleet.store.blobs.open(payload.sha256)) == data_of(payload)
    assert any_fleet.ask_state() == ("answered", None)


def test_of_two_streams_that_begin_at_the_same_moment_only_one_writes(
    any_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers in one staging file could store bytes that no check has seen."""
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    stage, in_stage, go_on = any_fleet.store.blobs.stage, threading.Event(), threading.Event()

    def slow_stage(key: str, parts: knowledge_pb2.Parts) -> Any:
        if not in_stage.is_set():
            in_stage.set()
            go_on.wait(PATIENCE_SECONDS)
        return stage(key, parts)

    monkeypatch.setattr(any_fleet.store.blobs, "stage", slow_stage)
    sessions: list[UploadSession] = []
    threads = [threading.Thread(target=lambda: sessions.append(any_fleet.begin(identity, payload))) for _ in range(2)]
    threads[0].start()
    in_stage.wait(PATIENCE_SECONDS)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    chunks = in_pieces(payload, 16)
    (winner,) = (session for session in sessions if takes(session, chunks[0]))
    feed(winner, chunks[1:])
    assert data_of(any_fleet.store.blobs.open(winner.finish().sha256)) == data_of(payload)


def test_no_stream_begins_before_every_older_one_has_let_go(any_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once: the second is still ending the first when the third takes over from the second."""
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    first = any_fleet.begin(identity, payload)
    stage, abandon = any_fleet.store.blobs.stage, first.abandon
    ending, go_on = threading.Event(), threading.Event()
    first_was_over = []

    def slow_abandon() -> None:
        ending.set()
        go_on.wait(PATIENCE_SECONDS)
        abandon()

    def noted_stage(key: str, parts: knowledge_pb2.Parts) -> Any:
        first_was_over.append(go_on.is_set())
        return stage(key, parts)

    monkeypatch.setattr(first, "abandon", slow_abandon)
    monkeypatch.setattr(any_fleet.store.blobs, "stage", noted_stage)
    threads = [threading.Thread(target=lambda: any_fleet.begin(identity, payload)) for _ in range(2)]
    threads[0].start()
    ending.wait(PATIENCE_SECONDS)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert first_was_over
    assert all(first_was_over)


def test_an_upload_goes_on_where_a_broken_stream_left_it(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    chunks = in_pieces(payload, 16)
    broken = any_fleet.begin(identity, payload)
    feed(broken, chunks[:5])
    broken.abandon()
    status = any_fleet.status(identity)
    assert (status.next_byte, status.ask_open, status.HasField("receipt")) == (80, True, False)
    assert any_fleet.status(identity, attempt=2).next_byte == 0
    session = any_fleet.begin(identity, payload, first_byte=80)
    feed(session, chunks[5:])
    assert session.finish().sha256 == payload.sha256
    assert data_of(any_fleet.store.blobs.open(payload.sha256)) == data_of(payload)


def test_an_upload_survives_a_restart_of_the_front(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    chunks = in_pieces(payload, 16)
    broken = any_fleet.begin(identity, payload)
    feed(broken, chunks[:5])
    broken.abandon()
    any_fleet.api = DeviceApi(any_fleet.store)
    session = any_fleet.begin(identity, payload, first_byte=any_fleet.status(identity).next_byte)
    feed(session, chunks[5:])
    assert session.finish().sha256 == payload.sha256


@pytest.mark.parametrize("first_byte", [0, 64, 96, 10**6])
def test_an_upload_that_goes_on_elsewhere_is_told_to_ask_for_its_status(any_fleet: Fleet, first_byte: int) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    broken = any_fleet.begin(identity, payload)
    feed(broken, in_pieces(payload, 16)[:5])
    broken.abandon()
    with pytest.raises(RefusedError) as error:
        any_fleet.begin(identity, payload, first_byte=first_byte)
    assert (error.value.code, str(error.value)) == (
        Code.OUT_OF_STEP,
        f"device d1: the upload goes on at byte {first_byte}, the server has 80; ask for its status",
    )
    assert any_fleet.status(identity).next_byte == 80  # nothing was lost
    assert any_fleet.ask_state() == ("open", None)


def test_a_restarted_device_with_another_answer_begins_afresh(any_fleet: Fleet) -> None:
    """Same attempt number, other parts: what is staged belongs to neither."""
    identity = any_fleet.join()
    any_fleet.ask()
    broken = any_fleet.begin(identity, make_payload())
    feed(broken, in_pieces(make_payload(), 16)[:5])
    broken.abandon()
    other = make_payload(5)
    assert any_fleet.send(identity, other).sha256 == other.sha256


def test_an_ask_stages_two_attempts_at_most(any_fleet: Fleet) -> None:
    """The number of the attempt is the device's own choice."""
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    for attempt in (1, 7, 3, 2**32 - 1, 0, 1, 5):
        session = any_fleet.begin(
            identity, payload, attempt=attempt, first_byte=any_fleet.status(identity, attempt).next_byte
        )
        if session.held == 0:
            feed(session, in_pieces(payload, 16)[:5])
        session.abandon()
        assert len(any_fleet.store.blobs.staging()) <= 2
        assert any_fleet.status(identity, attempt).next_byte == 80
    assert refused_bytes(any_fleet) == 6 * 80, "what was thrown away had travelled"


def test_a_stream_of_another_attempt_takes_over_too(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    older = any_fleet.begin(identity, payload)
    newer = any_fleet.begin(identity, payload, attempt=2)
    with pytest.raises(RefusedError, match="another stream"):
        older.feed(in_pieces(payload, 16)[0])
    feed(newer, in_pieces(payload, 16))
    assert newer.finish().name.attempt == 2


@pytest.mark.parametrize("where", ["feed", "start", "finish"])
def test_whatever_goes_wrong_ends_the_session(any_fleet: Fleet, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(f"fleetdistill_server.intake.uploads.Ingest.{where}", fail)
    with pytest.raises(MemoryError):
        any_fleet.send(identity, payload)
    assert any_fleet.api.uploads._streams == {}
    assert any_fleet.api.limiter._calls.all == 0
    monkeypatch.undo()
    session = any_fleet.begin(identity, payload, first_byte=any_fleet.status(identity).next_byte)
    feed(session, [one for one in in_pieces(payload, 16) if place_of(payload, one) >= session.held])
    assert session.finish().sha256 == payload.sha256


def place_of(payload: Payload, chunk: knowledge_pb2.TensorChunk) -> int:
    return payload.slots[chunk.tensor].start + chunk.offset


def test_a_refused_upload_ends_although_what_it_staged_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(Store.open(tmp_path))
    identity = fleet.join()
    fleet.ask()

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise OSError(5, "Input/output error")

    session = fleet.begin(identity, make_payload(labels=i32([9, 0, 0, 0])))
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(StoreError, match="deleting what is staged"):
        feed(session, in_pieces(make_payload(labels=i32([9, 0, 0, 0])), WHOLE))
    assert fleet.api.uploads._streams == {}
    fleet.store.close()


def test_looking_at_what_is_staged_may_fail_only_as_the_store_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(Store.open(tmp_path))
    identity = fleet.join()
    fleet.ask()
    fleet.begin(identity, make_payload()).abandon()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(StoreError, match="looking at what is staged"):
        fleet.status(identity)
    monkeypatch.undo()
    fleet.store.close()


@pytest.mark.parametrize("bad", ["value", "checksum", "header"])
def test_the_bytes_of_a_refused_upload_are_counted_as_such(any_fleet: Fleet, bad: str) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload(labels=i32([9, 0, 0, 0])) if bad == "value" else make_payload()
    chunks = in_pieces(payload, 16)
    taken = [one for one in chunks if one.tensor == 0 or bad != "value"][:3]
    wrong = (
        next(one for one in chunks if one.tensor == payload.slots.index(label_slot(payload)))
        if bad == "value"
        else chunks[3]
    )
    if bad == "checksum":
        wrong.crc32c ^= 1
    if bad == "header":
        with pytest.raises(RefusedError):
            any_fleet.begin(identity, payload, samples=0)
        assert refused_bytes(any_fleet) == payload.header().ByteSize()
        return
    sent = chunks[: chunks.index(wrong) + 1] if bad == "value" else [*taken, wrong]
    session = any_fleet.begin(identity, payload)
    with pytest.raises(RefusedError):
        feed(session, sent)
    assert refused_bytes(any_fleet) == payload.header().ByteSize() + sum(len(one.data) for one in sent)
    session.abandon()
    assert refused_bytes(any_fleet) == payload.header().ByteSize() + sum(len(one.data) for one in sent)


def label_slot(payload: Payload) -> Any:
    return next(slot for slot in payload.slots if slot.path.endswith("labels"))


def test_a_broken_upload_counts_once_with_its_answer_or_when_it_is_thrown_away(any_fleet: Fleet) -> None:
    first, second = any_fleet.join("d1"), any_fleet.join("d2")
    any_fleet.ask("d1", "d2")
    payload = make_payload()
    for identity in (first, second):
        broken = any_fleet.begin(identity, payload)
        feed(broken, in_pieces(payload, 16)[:5])
        broken.abandon()
    session = any_fleet.begin(first, payload, first_byte=80)
    feed(session, in_pieces(payload, 16)[5:])
    session.finish()
    assert refused_bytes(any_fleet, "d1") == refused_bytes(any_fleet, "d2") == 0
    any_fleet.store.asks.close(2, "deadline passed")
    sweep(any_fleet.store)
    assert (refused_bytes(any_fleet, "d1"), refused_bytes(any_fleet, "d2")) == (0, 80)


def test_an_answer_that_is_sent_again_is_counted_too(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    any_fleet.send(identity, payload)
    before = any_fleet.store.history.traffic(RUN)[0]["tensor_bytes"]
    again = any_fleet.begin(identity, payload)
    feed(again, in_pieces(payload, WHOLE))
    again.finish()
    again.abandon()
    assert refused_bytes(any_fleet) == payload.header().ByteSize() + payload.data_bytes
    assert any_fleet.store.history.traffic(RUN)[0]["tensor_bytes"] == before


BAD_UPLOADS: dict[str, tuple[Payload, Code, str]] = {
    "NaN": (
        make_payload(logits=np.full((4, 3), np.nan, np.float32)),
        Code.BAD_VALUE,
        "device d1: non-finite logits at row 0 of knowledge/logits",
    ),
    "wrong shape": (
        make_payload(logits=np.zeros((4, 9), np.float32)),
        Code.BAD_TENSOR,
        "device d1: knowledge/logits has shape [4, 9], expected [N, 3]",
    ),
    "doubled ids": (
        make_payload(sample_ids=np.zeros(4, np.int64)),
        Code.BAD_VALUE,
        "device d1: sample id 0 appears twice, again at row 1 of knowledge/sample_ids",
    ),
    "wrong kind": (
        encode({"knowledge": SampleKnowledge(sample_ids=np.arange(4)), "more": make_metrics()}),
        Code.BAD_MESSAGE,
        "device d1: the answer has parts knowledge (sample_knowledge), more (metrics), "
        "asked for knowledge (sample_knowledge)",
    ),
}


@pytest.mark.parametrize("name", BAD_UPLOADS)
def test_a_bad_upload_puts_the_device_out_for_the_round(any_fleet: Fleet, name: str) -> None:
    payload, code, sentence = BAD_UPLOADS[name]
    identity = any_fleet.join()
    any_fleet.ask()
    wakes = any_fleet.wakes
    with pytest.raises(RefusedError) as error:
        any_fleet.send(identity, payload)
    assert (error.value.code, str(error.value)) == (code, sentence)
    (event,) = any_fleet.store.history.events(RUN, "refused")
    assert (event["text"], event["code"], event["device"], event["round"]) == (sentence, code, "d1", 1)
    assert any_fleet.ask_state() == ("out", f"refused: {sentence}")
    assert any_fleet.wakes > wakes  # nobody waits for it
    assert any_fleet.store.asks.uploads(RUN) == []
    assert any_fleet.store.devices.present(RUN) == ["d1"]  # the next round asks it again
    status = any_fleet.status(identity)
    assert (status.ask_open, status.next_byte) == (False, 0)


@pytest.mark.parametrize("samples", [0, 2**63, 2**64 - 1])
def test_an_answer_of_no_or_absurdly_many_samples_is_refused(fleet: Fleet, samples: int) -> None:
    identity = fleet.join()
    fleet.ask()
    with pytest.raises(RefusedError) as error:
        fleet.send(identity, make_payload(), samples=samples)
    assert (error.value.code, str(error.value)) == (
        Code.BAD_VALUE,
        f"device d1: the answer is weighted with {samples} samples, must be 1 to 2**63 - 1",
    )


def test_an_answer_weighs_no_more_than_the_samples_that_its_device_has_declared_last(fleet: Fleet) -> None:
    identity = make_identity("d1", fleet.check_in(profile=make_profile(samples=20)).secret)
    fleet.ask()
    with pytest.raises(RefusedError) as error:
        fleet.send(identity, make_payload(), samples=21)
    sentence = "device d1: the answer is weighted with 21 samples, the device has declared 20 samples"
    assert (error.value.code, str(error.value)) == (Code.BAD_VALUE, sentence)
    assert error.value.details["check_in"] == "again"  # this server may be older than the device's data
    assert fleet.ask_state() == ("out", f"refused: {sentence}")
    fleet.check_in(secret=identity.secret, profile=make_profile(samples=21))  # its data have grown
    fleet.ask(step_number=2)
    fleet.send(identity, make_payload(), samples=21, step_number=2)
    assert [row["samples"] for row in fleet.store.asks.uploads(RUN)] == [21]


@pytest.mark.parametrize("how", ["chunk", "digest", "short"])
def test_what_went_wrong_on_the_way_may_be_sent_again(any_fleet: Fleet, how: str) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    chunks = in_pieces(payload, 16)
    header_of = make_payload(labels=i32([2, 2, 2, 2])) if how == "digest" else payload
    session = any_fleet.begin(identity, header_of)
    if how == "chunk":
        chunks[3].crc32c ^= 1
    with pytest.raises(RefusedError) as error:
        feed_all(session, chunks[:-1] if how == "short" else chunks)
    code = Code.INCOMPLETE if how == "short" else Code.CHECKSUM
    assert error.value.code == code
    assert any_fleet.refused() == [("d1", code)]
    assert any_fleet.ask_state() == ("open", None)
    first = any_fleet.status(identity).next_byte
    assert first == (payload.data_bytes - 16 if how == "short" else 0)  # nothing doubtful is kept
    again = any_fleet.begin(identity, payload, first_byte=first)
    feed(again, [c for c in in_pieces(payload, 16) if payload.slots[c.tensor].start + c.offset >= first])
    assert again.finish().sha256 == payload.sha256


def test_a_session_that_was_refused_takes_nothing_more(any_fleet: Fleet) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    session = any_fleet.begin(identity, make_payload(labels=i32([9, 0, 0, 0])))
    with pytest.raises(RefusedError, match="label 9"):
        feed(session, in_pieces(make_payload(labels=i32([9, 0, 0, 0])), WHOLE))
    with pytest.raises(RefusedError):
        session.finish()
    session.abandon()
    assert any_fleet.store.asks.uploads(RUN) == []


def test_a_store_that_fails_while_chunks_come_leaves_the_ask_open(
    any_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = any_fleet.join()
    any_fleet.ask()
    payload = make_payload()
    session = any_fleet.begin(identity, payload)

    def full(data: bytes) -> None:
        raise StoreError("writing an upload: the disk is full")

    monkeypatch.setattr(session._staging, "append", full)
    with pytest.raises(StoreError, match="the disk is full"):
        session.feed(in_pieces(payload, 16)[0])
    assert any_fleet.ask_state() == ("open", None)
    monkeypatch.undo()
    assert any_fleet.send(identity, payload).sha256 == payload.sha256


def test_a_round_closes_with_every_receipt_used_or_reported(fleet: Fleet) -> None:
    """From check-in to the end of the round, with one good, one bad and one silent device."""
    good, bad, silent = (fleet.join(device) for device in ("good", "bad", "silent"))
    number = fleet.store.runs.start_round(RUN, ["bad", "good", "silent"])
    fleet.ask("good", "bad", "silent")
    receipt = fleet.send(good, make_payload())
    with pytest.raises(RefusedError):
        fleet.send(bad, make_payload(sample_ids=i64([0, 1, 2, -1])))
    (accepted,) = (row for row in fleet.store.asks.of_step(RUN, number, 1) if row["receipt"])
    fleet.store.runs.close_round(RUN, number, b"c", [accepted["id"]], {})
    assert [(row["receipt"], row["status"]) for row in fleet.store.asks.uploads(RUN)] == [(receipt.id, "used")]
    assert fleet.refused() == [("bad", "bad-value")]
    with pytest.raises(RefusedError, match="takes no answer any more"):
        fleet.send(silent, make_payload())


# --- downloads


def fetch(fleet: Fleet, identity: service_pb2.Identity, sha256: bytes, first_byte: int = 0) -> tuple[Payload, bytes]:
    request = service_pb2.DownloadRequest(identity=identity, sha256=sha256, first_byte=first_byte)
    payload, chunks = fleet.api.downloads.open(request)
    return payload, b"".join(chunk.data for chunk in chunks)


def test_a_payload_is_given_only_to_those_it_is_meant_for(fleet: Fleet) -> None:
    asked, other = fleet.join("d1"), fleet.join("d2")
    payload = make_payload()
    fleet.ask("d1", payload=payload)
    found, data = fetch(fleet, asked, payload.sha256)
    assert (found.header(), data) == (payload.header(), data_of(payload))
    with pytest.raises(RefusedError) as error:
        fetch(fleet, other, payload.sha256)
    assert (error.value.code, str(error.value)) == (
        Code.NOT_FOUND,
        f"device d2: payload {payload.sha256.hex()} is not meant for it",
    )


def test_one_device_s_answer_is_not_another_s_to_fetch(fleet: Fleet) -> None:
    fleet.ask("d1", "d2")
    first, second = fleet.join("d1"), fleet.join("d2")
    receipt = fleet.send(first, make_payload())
    for identity in (first, second):
        with pytest.raises(RefusedError, match="is not meant for it"):
            fetch(fleet, identity, receipt.sha256)


def test_no_digest_names_no_payload(fleet: Fleet) -> None:
    """Neither in an ask without payload nor in a contract without initial weights."""
    identity = fleet.join()
    fleet.ask()
    with pytest.raises(RefusedError, match="is not meant for it"):
        fetch(fleet, identity, b"")


def test_a_payload_that_went_with_its_round_is_not_found(fleet: Fleet) -> None:
    identity = fleet.join()
    payload = make_payload()
    fleet.ask(payload=payload)
    fleet.store.blobs.drop(payload.sha256)
    with pytest.raises(StoreError):  # while the ask is open, that is a fault of the server
        fetch(fleet, identity, payload.sha256)
    fleet.store.asks.close(1, "round closed")
    with pytest.raises(RefusedError) as error:
        fetch(fleet, identity, payload.sha256)
    assert (error.value.code, str(error.value)) == (
        Code.NOT_FOUND,
        f"device d1: payload {payload.sha256.hex()} is gone, the round that it belonged to is over",
    )


def test_the_initial_weights_are_for_every_device_of_the_run(store: Store) -> None:
    initial = make_payload(2)
    store.blobs.put(initial)
    fleet = Fleet(store, initial_weights=initial.sha256)
    assert fetch(fleet, fleet.join(), initial.sha256)[1] == data_of(initial)


def test_the_extractor_s_file_is_for_every_device_of_the_run_and_for_no_other(store: Store) -> None:
    file = encode({"extractor": NetworkFile(onnx=np.arange(50, dtype=np.uint8))})
    store.blobs.put(file)
    fleet = Fleet(store, extractor_file=file.sha256)
    for device in ("d1", "d2"):
        assert fetch(fleet, fleet.join(device), file.sha256)[1] == bytes(range(50))
    with pytest.raises(RefusedError) as error:
        fetch(fleet, make_identity("stranger", b"s" * 32), file.sha256)
    assert error.value.code == Code.BAD_IDENTITY


@pytest.mark.parametrize("first_byte", [0, 1, 40, 127, 128, 10**9])
def test_a_download_goes_on_at_any_byte_and_counts_what_it_sends(fleet: Fleet, first_byte: int) -> None:
    identity = fleet.join()
    payload = make_payload()
    fleet.ask(payload=payload)
    found, data = fetch(fleet, identity, payload.sha256, first_byte)
    assert (found.header(), data) == (payload.header(), data_of(payload)[first_byte:])
    (row,) = fleet.store.history.traffic(RUN)
    assert (row["direction"], row["round"], row["tensor_bytes"]) == ("down", 1, len(data))
    assert row["envelope_bytes"] == payload.header().ByteSize()


def test_a_download_counts_for_the_round_of_its_ask(fleet: Fleet) -> None:
    """A slow device still fetches the question of a round that is over, or has two asks open."""
    identity = fleet.join()
    old, new = make_payload(), make_payload(5)
    fleet.ask(payload=old)
    fleet.store.blobs.put(new)
    row: Row = {"run": RUN, "round": 2, "step_number": 1, "step": "train", "expects": EXPECTS, "seed": 7}
    row |= {"payload": new.sha256, "payload_bytes": new.data_bytes, "deadline_at": time.time() + 600, "device": "d1"}
    fleet.store.asks.write([row])
    fetch(fleet, identity, new.sha256)
    fleet.store.asks.close(1, "round closed")
    fetch(fleet, identity, old.sha256)
    assert {row["round"]: row["tensor_bytes"] for row in fleet.store.history.traffic(RUN)} == {
        1: old.data_bytes,
        2: new.data_bytes,
    }


def test_what_the_events_say_can_be_read_by_a_machine(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    with pytest.raises(RefusedError):
        fleet.send(identity, make_payload(labels=i32([0, 0, 7, 0])))
    (event,) = fleet.store.history.events(RUN)
    assert json.loads(json.dumps(event))["code"] == "bad-value"
    assert event["text"] == "device d1: label 7 outside [0, 3) at row 2 of knowledge/labels"
