"""A small part of what `make fuzz` does to devices, and proof that it would notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz.device_side import device_target
from fuzz.liar import FIELDS
from fuzz.played import LIGHT, Played, play_all
from fuzz.run import MOST_GROWTH, fuzz_in_process
from support.processes import own_peak_memory

from fleetdistill.wire.v1 import service_pb2

MUST_OCCUR = {
    "answered",
    "finished",
    "waited",
    "WireError",
    "LinkError",
    "RefusedError",
    "ConfigurationError",
    "enrolled",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Played]:
    """A method that trains, and class statistics with PyTorch and without."""
    return play_all(["feddkc", LIGHT], tmp_path_factory.mktemp("played"))


def test_every_field_of_every_message_is_changed_and_nothing_foreign_comes_out(runs: list[Played]) -> None:
    assert [one.name for one in runs] == ["feddkc", LIGHT, f"light {LIGHT}"]
    with device_target(runs) as target:
        before = own_peak_memory()
        sent, broken = fuzz_in_process(target, 1_500, seed=1)
        assert broken == []
        assert sent >= 1_500
        assert not target.liar.untouched()
        assert target.outcomes.keys() >= MUST_OCCUR
        assert own_peak_memory() - before < MOST_GROWTH


def test_all_that_a_server_says_to_a_device_is_among_the_messages() -> None:
    calls = service_pb2.DESCRIPTOR.services_by_name["DeviceService"].methods
    assert {call.output_type.name for call in calls} | {"EnrolResponse", "RenewResponse"} == FIELDS.keys()
    assert {"Contract.threads", "PlanEntry.integer", "ChannelSteps.step"} <= FIELDS["CheckInResponse"] | (
        FIELDS["DownloadResponse"]
    )


@pytest.mark.slow
def test_devices_over_grpc(runs: list[Played]) -> None:
    with device_target(runs, remote=True) as target:
        _, broken = fuzz_in_process(target, 400, seed=1)
        assert broken == []
        assert target.outcomes.keys() >= {"answered", "LinkError", "RefusedError"}


# --- would it notice? Each of these is a fault that devices had.


def _terms_are_taken_as_they_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fleetdistill.device.check_terms", lambda *given: None)


def _faults_leave_the_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fleetdistill.work._FAULTS", ())
    patch.setattr("fleetdistill.methods.feddkc.check_rows", lambda *given: None)


def _any_certificate_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fleetdistill.x509.check_fits", lambda *given: None)


def _pauses_are_taken_as_they_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fleetdistill.device.pause_of", lambda pause, remote: int(pause.after_seconds))


@pytest.mark.parametrize(
    "fault",
    [
        _terms_are_taken_as_they_come,
        _faults_leave_the_worker,
        _any_certificate_is_kept,
        _pauses_are_taken_as_they_come,
    ],
)
def test_a_fault_is_found(runs: list[Played], fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, device_target(runs) as target:
        fault(patch)
        for seed in range(1, 1_000):
            if fuzz_in_process(target, 1, seed)[1]:
                return
        raise AssertionError("not noticed")
