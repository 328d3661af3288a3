"""The SDK's Device over the in-memory link: what an app gives, and what it sees."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device.sdk_fleet import ALLOW, RUN, Crash, Fleet, equal, knowledge_of, make_device, tiny_data, tiny_model, weights
from support.devices import compute_of
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS
from torch import nn

from fleetdistill import Step
from fleetdistill.errors import (
    ConfigurationError,
    DataError,
    LinkError,
    ModelError,
    RefusedError,
    StateError,
)
from fleetdistill.state.directory import Storage
from fleetdistill.state.format import json_object, sealed_json
from fleetdistill.state.saved_profile import save_profile
from fleetdistill.testing import EventLog
from fleetdistill.training.model import split_sequential
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.intake import device_api
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.states import RunStatus

# --- one turn


def test_a_device_checks_in_answers_and_finishes(fleet: Fleet, tmp_path: Path) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        assert device.step(0) is Step.WAITED
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
        fleet.store.runs.set_status(RUN, RunStatus.FINISHED, "1 round completed")
        device.run()
    assert events.kinds() == ["checked-in", "ask", "scored", "answered", "delivered", "finished"]
    upload = fleet.store.asks.uploads(RUN)[0]
    assert upload.samples == 24
    assert events.of("answered").values == {"receipt": upload.receipt, "tries": 1}
    assert knowledge_of(fleet).features["cut"].dtype == np.float16
    assert [row.count for row in fleet.store.history.figures(RUN, "accuracy", "test")] == [9]
    assert fleet.store.devices.present(RUN) == []


def test_devices_train_from_runs_extractor_and_app_keeps_its_own(fleet: Fleet, tmp_path: Path) -> None:
    sent = fleet.initial.parameters["0.weight"]  # type: ignore[attr-defined]
    with make_device(fleet, tmp_path) as device:
        assert equal(weights(device), tiny_model().state_dict())
        np.testing.assert_array_equal(compute_of(device).module.extractor.state_dict()["0.weight"].numpy(), sent)


def test_metrics_stay_home_when_the_app_keeps_them_back(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path, allow=("features", "logits", "labels")) as device:
        fleet.ask("d")
        device.step(0)
    assert fleet.store.history.figures(RUN, "accuracy", "test") == []


def test_columns_kept_back_are_refused_at_check_in_with_sentence(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path, allow=("features", "logits")) as device, pytest.raises(RefusedError) as error:
        device.run()
    assert "feddkc sends features, logits, labels; the app does not allow labels" in str(error.value)
    assert fleet.store.asks.uploads(RUN) == []


# --- what the app gives


def test_a_state_directory_of_another_run_or_device_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
    with pytest.raises(StateError, match="belongs to run 'sdk', not 'other'"):
        make_device(fleet, tmp_path, run="other")
    with pytest.raises(StateError, match="belongs to device id 'd', not 'e'"):
        make_device(fleet, tmp_path, device_id="e")


def test_names_that_no_server_accepted_may_be_corrected(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path, run="typo", device_id="e") as device, pytest.raises(RefusedError, match="no run"):
        device.step(0)
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        assert fleet.store.devices.present(RUN) == ["d"]


def test_lost_response_to_first_check_in_does_not_lock_id(fleet: Fleet, tmp_path: Path) -> None:
    class Losing(MemoryLink):
        def check_in(self, identity: Any, profile: Any) -> Any:
            response = super().check_in(identity, profile)
            if profile is not None:
                raise Crash
            return response

    losing = make_device(fleet, tmp_path, link=Losing(fleet.api))
    with pytest.raises(Crash):
        losing.step(0)
    losing.close(leave=False)
    with make_device(fleet, tmp_path) as device:
        assert device.step(0) is Step.WAITED


def test_damaged_profile_is_made_anew_and_damaged_secret_is_said(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
    (tmp_path / "profile.bin").write_bytes(b"\xff\xff")
    with make_device(fleet, tmp_path) as device:
        assert device.step(0) is Step.WAITED
    text = (tmp_path / "device.json").read_text()
    (tmp_path / "device.json").write_text(text.replace('"secret": "', '"secret": "xyz'))
    with pytest.raises(StateError, match=r"device\.json is damaged: it does not match its checksum"):
        make_device(fleet, tmp_path)
    saved = json_object(tmp_path / "device.json", text.encode())
    (tmp_path / "device.json").write_bytes(sealed_json({**saved, "secret": "xyz"}))
    with pytest.raises(StateError, match="its secret is not hexadecimal"):
        make_device(fleet, tmp_path)


def test_class_counts_stay_home_when_the_app_keeps_them_back(fleet: Fleet, tmp_path: Path) -> None:
    for name, allow in (("kept", ALLOW), ("told", (*ALLOW, "counts"))):
        with make_device(fleet, tmp_path / name, device_id=name, allow=allow) as device:
            fleet.ask(name)
            device.step(0)
            fleet.store.runs.close_short_round(RUN, fleet.round, "over")
    told = {row.device: row.by_class for row in fleet.store.history.figures(RUN, "accuracy", "test")}
    assert told["kept"] == {}
    assert told["told"] != {}


def test_a_device_without_an_id_makes_one_and_keeps_it(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path, device_id=None) as device:
        device.step(0)
        name = device.device_id
    with make_device(fleet, tmp_path, device_id=None) as device:
        assert device.device_id == name
    assert len(name) == 36


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"data": (np.zeros((3, 7), np.float32), np.arange(3))}, DataError, r"have shape \[7\].*expects \[4\]"),
        ({"data": (np.zeros((3, 4), np.float32), np.array([0, 1, 3]))}, DataError, "label 3"),
        ({"data": (np.full((3, 4), np.nan, np.float32), np.arange(3))}, DataError, "NaN or infinity, first at row 0"),
        ({"model": lambda: nn.Linear(4, 3)}, ModelError, "split_sequential"),
    ],
)
def test_data_and_models_that_do_not_fit_say_what_to_do(
    fleet: Fleet, tmp_path: Path, changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence), make_device(fleet, tmp_path, **changes) as device:
        device.step(0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"allow": ("images",)}, "unknown columns images; must be in"),
        ({"device_id": "a/b"}, "device_id is 'a/b', must be"),
        ({"predictor": "space_mpl_64"}, "unknown predictor 'space_mpl_64'; did you mean 'space_mlp_64'"),
        ({"predictor": 64}, "unknown predictor 64, expected one of space_linear.*or a function"),
        ({"export": "rounds"}, "unknown export 'rounds'; did you mean 'round'"),
    ],
)
def test_arguments_out_of_range_are_refused(
    fleet: Fleet, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make_device(fleet, tmp_path, **changes)


@pytest.mark.parametrize("server", ["10.0.0.5:50051", "example.org:50051", "0.0.0.0:50051"])
def test_plain_text_to_another_machine_needs_the_apps_word(tmp_path: Path, server: str) -> None:
    arguments: dict[str, Any] = {"server": server, "model": tiny_model, "data": tiny_data(), "state_dir": tmp_path}
    with pytest.raises(ConfigurationError, match=r"is not on this machine, and plain text can be read.*insecure=True"):
        open_device(**arguments)
    assert not (tmp_path / "lock").exists()
    open_device(**arguments, insecure=True).close()


def test_a_device_of_a_stopped_run_stays_and_goes_on_with_it(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` returns only once the run is finished; the app is told once why nothing happens."""
    monkeypatch.setattr(device_api, "STOPPED_SECONDS", 0.0)
    events, asked = EventLog(), 0

    class Operator(MemoryLink):
        """Starts the run again after three questions for work."""

        def next_ask(self, identity: Any, wait_seconds: float) -> Any:
            nonlocal asked
            asked += 1
            if asked == 4:
                fleet.store.runs.set_status(RUN, RunStatus.RUNNING, "started again")
                fleet.ask("d")
            if asked == 5:
                fleet.store.runs.set_status(RUN, RunStatus.FINISHED, "1 round completed")
            return super().next_ask(identity, wait_seconds)

    fleet.store.runs.set_status(RUN, RunStatus.STOPPED, "the engine failed 6 times")
    with make_device(fleet, tmp_path, events, link=Operator(fleet.api)) as device:
        device.run()
    assert events.kinds() == ["checked-in", "stopped", "ask", "scored", "answered", "delivered", "finished"]
    assert events[1].text == (
        "the run is stopped until its operator restarts it: the engine failed 6 times; the device waits"
    )


def test_stop_ends_a_run_that_waits_for_work_at_once(fleet: Fleet, tmp_path: Path) -> None:
    class Waiting(MemoryLink):
        """Holds the question for work until it is interrupted, as a long poll does."""

        asked, interrupted = threading.Event(), threading.Event()

        def next_ask(self, identity: Any, wait_seconds: float) -> Any:
            self.asked.set()
            assert self.interrupted.wait(PATIENCE_SECONDS), "nobody interrupted the poll"
            raise LinkError("the request for work was cancelled")

        def interrupt(self) -> None:
            self.interrupted.set()

    events = EventLog()
    with make_device(fleet, tmp_path, events, link=Waiting(fleet.api)) as device:
        running = threading.Thread(target=device.run)
        running.start()
        assert Waiting.asked.wait(PATIENCE_SECONDS)
        device.stop()
        running.join(PATIENCE_SECONDS)
        assert not running.is_alive()
    assert "lost-contact" not in events.kinds()


def test_model_with_other_extractor_is_refused_naming_both_sides(fleet: Fleet, tmp_path: Path) -> None:
    def other() -> nn.Module:
        return split_sequential(nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)), 2)

    with make_device(fleet, tmp_path, model=other) as device, pytest.raises(RefusedError) as error:
        device.step(0)
    assert error.value.code == "contract-mismatch"
    assert "extractor: the device has" in str(error.value)


def test_an_idle_device_that_is_known_loads_no_torch(tmp_path: Path) -> None:
    """The first check-in builds the model; after a restart the saved profile serves."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from fleetdistill import Device, Step
        from fleetdistill.wire.v1 import service_pb2, contract_pb2

        TERMS = contract_pb2.Contract(run="r", method="feddkc", classes="ab", knowledge_type=1, threads=1)

        class Idle:
            remote = False
            def check_in(self, identity, profile):
                assert profile is not None and profile.model_name == "known"
                return service_pb2.CheckInResponse(contract=TERMS, heartbeat_seconds=15)
            def next_ask(self, identity, wait_seconds):
                return service_pb2.NextAskResponse(come_back=service_pb2.ComeBack())
            def leave(self, identity, forget=False): pass
            def interrupt(self): pass
            def close(self): pass

        device = Device(server=Idle(), model=lambda: 1 / 0, data=lambda: 1 / 0, state_dir=Path(sys.argv[1]))
        assert device.step(0) is Step.WAITED
        device.close()
        assert "torch" not in sys.modules and "onnx" not in sys.modules
        """
    )

    storage = Storage(tmp_path)
    storage.save_identity({"device": "d", "run": "r", "secret": "00" * 32})
    save_profile(storage, contract_pb2.DeviceProfile(model_name="known"))
    storage.close()
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
