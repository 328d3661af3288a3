"""Methods of an app's own: made known by `register`, and by nothing that comes over the wire."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import counting, counting_server
from support.open_device import open_device
from support.processes import python

from fleetdistill import methods
from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, answers
from fleetdistill.methods.local import LocalTraining
from fleetdistill_server import methods as server_methods
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.cohort import Cohort


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counting method, for one test."""
    monkeypatch.setattr(methods, "registered", {})
    monkeypatch.setattr(server_methods, "registered", {})
    counting_server.register()


def test_a_registered_method_is_found_like_any_other(registered: None) -> None:
    assert methods.config_class("counting") is counting.CountingConfig
    assert methods.device_class("counting") is counting.CountingDevice
    assert server_methods.server_class("counting") is counting_server.CountingServer
    settings = {"run": {"name": "r", "method": "counting"}, "contract": {"classes": 2, "input_shape": [1]}}
    assert run_config({**settings, "method": {"steps": 3}}).method_config().steps == 3
    with pytest.raises(ConfigurationError, match="unknown setting"):
        run_config({**settings, "method": {"stepps": 3}})


def test_registering_the_same_again_changes_nothing(registered: None) -> None:
    counting_server.register()
    assert methods.device_class("counting") is counting.CountingDevice


@pytest.mark.parametrize("name", ["feddkc", "counting"])
def test_a_name_that_is_taken_is_refused(registered: None, name: str) -> None:
    class Other(counting.CountingDevice):
        pass

    class OtherServer(counting_server.CountingServer):
        pass

    with pytest.raises(ConfigurationError, match=f"method '{name}' is already registered"):
        methods.register(name, counting.CountingConfig, Other)
    with pytest.raises(ConfigurationError, match=f"method '{name}' is already registered"):
        server_methods.register(name, OtherServer)


def test_a_configuration_that_is_no_local_training_is_refused(registered: None) -> None:
    class Foreign:
        pass

    with pytest.raises(
        ConfigurationError,
        match=r"Foreign, the configuration of method 'foreign', is not a LocalTraining; let it inherit",
    ):
        methods.register("foreign", Foreign, counting.CountingDevice)
    with pytest.raises(ConfigurationError, match="unknown method"):
        methods.config_class("foreign")


def test_a_config_and_a_device_half_need_no_further_members() -> None:
    """A configuration of settings alone, and a device half of handlers alone: one of two steps and the delivery."""

    class Plain(LocalTraining):
        pass

    class Half(DeviceMethod):
        @answers("train", "predict")
        def work(self, ask: Ask) -> Answer:
            raise AssertionError

        @answers("deliver")
        def take(self, ask: Ask) -> Answer:
            raise AssertionError

    config = Plain()
    assert config.for_classes(3) is config
    assert set(Half.metrics_steps(config)) == {"train", "predict"}


def test_server_half_without_a_required_member_is_refused(registered: None) -> None:
    class Half(ServerMethod):
        summary = "has no state"

        async def round(self, cohort: Cohort) -> None:
            raise AssertionError

    with pytest.raises(
        ConfigurationError,
        match=r"^Half, the server half of method 'own', lacks exchanges, state_dict, load_state_dict; define what",
    ):
        server_methods.register("own", Half)
    assert "own" not in server_methods.registered


@pytest.mark.parametrize("name", ["counting", "os", "../methods/feddkc", "chaos.counting"])
def test_contract_cannot_name_code_not_registered_by_app(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(methods, "registered", {})
    with pytest.raises(ConfigurationError, match="unknown method"):
        methods.device_class(name)


def test_unknown_method_error_lists_registered_ones_too(registered: None) -> None:
    for find in (methods.config_class, server_methods.server_class):
        with pytest.raises(ConfigurationError, match=r"expected one of .*counting.*feddkc"):
            find("gossip")


@pytest.mark.parametrize(
    "given",
    [{}, {"model": object}, {"data": ()}, {"model": object, "data": (), "worker": counting.CountingWorker}],
)
def test_a_device_has_a_model_and_data_or_a_worker(given: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="either model= and data=, or worker= without both"):
        open_device(server="127.0.0.1:1", state_dir=tmp_path / "d", **given)


def test_a_device_with_a_worker_of_its_own_loads_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from chaos import counting
from fleetdistill import Device
from fleetdistill.wire.v1 import contract_pb2
counting.register()
with Device(server="127.0.0.1:1", state_dir={str(tmp_path)!r} + "/d", worker=counting.CountingWorker) as device:
    contract = contract_pb2.Contract(method="counting", classes=["a", "b"], input_shape=[1])
    assert device._backend.make(contract).profile(["features"]).classes == 2
print("torch" in sys.modules)
"""
    assert python(code, {"PYTHONPATH": str(Path(__file__).parents[1])}).strip() == "False"
