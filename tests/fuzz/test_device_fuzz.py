"""A small part of what `make fuzz` does to devices, and proof that it would notice."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.device_side import device_target
from fuzz.liar import FIELDS, Liar
from fuzz.played import LIGHT, Played, play_all
from fuzz.run import MAX_GROWTH, fuzz_in_process
from fuzz.spoilt_enrolment import enrol_with_lies
from support.processes import own_peak_memory

from fleetdistill.errors import StateError
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

_MAX_SESSIONS = 1_000


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[Played]:
    """A method that trains."""
    return play_all(["feddkc"], tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def runs(training: list[Played], tmp_path_factory: pytest.TempPathFactory) -> list[Played]:
    """The same, and class statistics with PyTorch and without."""
    return [*training, *play_all([LIGHT], tmp_path_factory.mktemp("played"))]


@pytest.mark.long
def test_changing_every_message_field_raises_only_known_errors(runs: list[Played]) -> None:
    assert [run.name for run in runs] == ["feddkc", LIGHT, f"light {LIGHT}"]
    with device_target(runs) as target:
        before = own_peak_memory()
        for seed in range(1, _MAX_SESSIONS):
            assert fuzz_in_process(target, 1, seed)[1] == []
            if not target.liar.untouched():
                break
        assert not target.liar.untouched()
        assert target.outcomes.keys() >= MUST_OCCUR
        assert own_peak_memory() - before < MAX_GROWTH


def test_every_server_reply_to_device_is_among_fuzzed_messages() -> None:
    calls = service_pb2.DESCRIPTOR.services_by_name["DeviceService"].methods
    assert {call.output_type.name for call in calls} | {"EnrolResponse", "RenewResponse"} == FIELDS.keys()
    assert {"Contract.threads", "PlanEntry.integer", "ChannelSteps.step"} <= FIELDS["CheckInResponse"] | (
        FIELDS["DownloadResponse"]
    )


@pytest.mark.slow
@pytest.mark.long
def test_devices_over_grpc(training: list[Played]) -> None:
    with device_target(training, remote=True) as target:
        _, broken = fuzz_in_process(target, 200, seed=1)
        assert broken == []
        assert target.outcomes.keys() >= {"declined", "WireError"}


# --- would it notice? Each of these is a fault that devices had; threads without bound would hurt the machine instead.


@pytest.mark.long
def test_a_pause_that_overflows_is_found(training: list[Played]) -> None:
    with pytest.MonkeyPatch.context() as patch, device_target(training) as target:
        patch.setattr("fleetdistill.device.loop.pause_seconds", lambda pause, remote: int(pause.after_seconds))
        assert any(fuzz_in_process(target, 1, seed)[1] for seed in range(1, _MAX_SESSIONS)), "not noticed"


def test_a_certificate_that_locks_a_device_out_is_found(tmp_path: Path) -> None:
    liar = Liar()
    liar.rate = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetdistill.link.x509.check_fits", lambda *given: None)
        with pytest.raises(StateError, match="its certificate cannot be read"):
            [enrol_with_lies(liar, tmp_path) for _ in range(_MAX_SESSIONS)]
