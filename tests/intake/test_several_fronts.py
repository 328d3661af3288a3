"""Two fronts over one store: a device that calls one of them is not gone for the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.wire_samples import make_contract, make_identity, make_profile

from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.store.store import Store

RUN, LEASE_SECONDS = "digits", 60.0


class Fronts:
    """Two device APIs over one store, with one clock for both."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        self.stores = [Store.open(directory) for _ in range(2)]
        for store in self.stores:
            store.database.now = lambda: self.now
        self.stores[0].runs.begin(RUN, {})
        self.stores[0].runs.publish_contract(RUN, make_contract(run=RUN).SerializeToString())
        monkeypatch.setattr("fleetdistill_server.intake.sessions.time.monotonic", lambda: self.now)  # of its notes
        self.apis = [DeviceApi(store, lease_seconds=LEASE_SECONDS, clock=lambda: self.now) for store in self.stores]

    def pass_time(self, seconds: int, calling: int | None = None) -> None:
        """Lets seconds pass, each with a sweep of both fronts and a call of the device to one of them."""
        for _ in range(seconds):
            self.now += 1
            if calling is not None:
                self.apis[calling].heartbeat(service_pb2.HeartbeatRequest(identity=self.identity))
            for api in self.apis:
                api.sessions.end_leases()

    def join(self) -> None:
        request = service_pb2.CheckInRequest(identity=make_identity("d1", run=RUN), profile=make_profile())
        self.identity = make_identity("d1", run=RUN, secret=self.apis[0].check_in(request).secret)

    @property
    def present(self) -> list[str]:
        return self.stores[1].devices.present(RUN)


@pytest.fixture
def fronts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fronts]:
    made = Fronts(tmp_path / "store", monkeypatch)
    yield made
    for store in made.stores:
        store.close()


def test_a_device_that_moves_to_another_front_stays_present(fronts: Fronts) -> None:
    fronts.join()
    fronts.pass_time(5, calling=0)
    fronts.pass_time(3 * int(LEASE_SECONDS), calling=1)
    assert fronts.present == ["d1"]
    assert fronts.stores[0].history.events(RUN, "lease-ended") == []


def test_a_device_that_calls_neither_is_gone_once(fronts: Fronts) -> None:
    fronts.join()
    fronts.pass_time(5, calling=0)
    fronts.pass_time(5, calling=1)
    fronts.pass_time(3 * int(LEASE_SECONDS))
    assert fronts.present == []
    assert len(fronts.stores[0].history.events(RUN, "lease-ended")) == 1


def test_devices_of_dead_front_are_absent_once_silent(fronts: Fronts) -> None:
    fronts.join()
    fronts.pass_time(5, calling=0)
    fronts.apis.pop(0)  # killed: nobody sweeps there any more
    fronts.pass_time(int(LEASE_SECONDS) // 2)
    assert fronts.present == ["d1"]
    fronts.pass_time(3 * int(LEASE_SECONDS))
    assert fronts.present == []


def test_a_contract_that_another_server_changed_is_noticed(fronts: Fronts) -> None:
    contract = fronts.apis[0].sessions.contract(RUN)
    fronts.stores[1].runs.publish_contract(RUN, make_contract(run=RUN, rounds=77).SerializeToString())
    assert fronts.apis[0].sessions.contract(RUN) == contract
    fronts.pass_time(10)
    assert fronts.apis[0].sessions.contract(RUN).rounds == 77
