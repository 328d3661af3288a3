"""Arguments of the wrong type or out of range: one error at construction that names them; nothing stored or locked."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from device.sdk_fleet import Fleet, make_device, tiny_data, tiny_model
from support.hostile_server import LyingLink
from support.open_device import open_device
from torch import nn

from fleetdistill import AsyncDevice, Deployment, Device, Eligibility, Predictor, Server
from fleetdistill.device.deployer import Deployer
from fleetdistill.errors import ConfigurationError, FleetDistillError, ModelError
from fleetdistill.link.enrolment import Enrolment
from fleetdistill.testing import refused
from fleetdistill.training import SplitModel

GIVEN: dict[str, Any] = {"server": "127.0.0.1:1", "model": tiny_model, "data": tiny_data(), "export": "never"}


class Unfit(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def test_the_representation_of_a_server_has_no_token() -> None:
    assert "fd1-SECRET" not in repr(Server("fleet.example.org:50051", enrolment="fd1-SECRET"))


def test_a_device_has_at_most_13_arguments() -> None:
    assert len(inspect.signature(Device).parameters) <= 13


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eligibility": True}, "eligibility is True, expected an object of class Eligibility"),
        ({"budgets": {}}, r"budgets is \{\}, expected an object of class Budgets"),
        ({"deployment": 5}, "deployment is 5, expected an object of class Deployment"),
        ({"runtime": 5}, "runtime is 5, expected an object of class Runtime"),
        ({"clock": 3}, "clock is 3, expected an object with the methods now, time and wait"),
        ({"server": 5}, "server is 5, expected host:port, or a fleetdistill.link.base.Link"),
        ({"server": "127.0.0.1"}, "server is '127.0.0.1', expected host:port with a port from 1 to 65535"),
        ({"server": ":50051"}, "server is ':50051', expected host:port"),
        ({"server": "http://127.0.0.1:50051"}, "server is 'http://127.0.0.1:50051', expected host:port"),
        ({"server": "127.0.0.1:99999"}, "server is '127.0.0.1:99999', expected host:port"),
        ({"server": "::1:50051"}, "server is '::1:50051', expected host:port"),
        ({"server": "127.example.org:50051"}, "127.example.org:50051 is not on this machine"),
        ({"device_id": 5}, "device_id is 5, must be 1 to 64 letters"),
        ({"run": 5}, "run is 5, must be 1 to 64 letters"),
        ({"run": "a/b"}, "run is 'a/b', must be 1 to 64 letters"),
        ({"enrolment": 5}, "enrolment is 5, expected a token, or the path of a file with a token"),
        ({"enrolment": "nofile"}, "nor a file with one: nofile: No such file"),
        ({"insecure": "no"}, "insecure is 'no', expected True or False"),
        ({"model": 5}, "model is 5, expected a function that returns a torch.nn.Module, or the module itself"),
        ({"model": None, "data": None, "worker": 5}, "worker is 5, expected a function that takes the run's contract"),
        ({"data": None}, "model= and data=, or worker= without both; missing: data"),
        ({"model": None, "data": None}, "model= and data=, or worker= without both; missing: model, data"),
        ({"worker": print}, "worker= without both; pass only one of them"),
        ({"on_event": 5}, "on_event is 5, expected a function that takes an event"),
        ({"torch_device": "gpu"}, 'torch_device is \'gpu\', expected a torch device, such as "cpu" or "cuda:0"'),
        ({"torch_device": 0}, "torch_device is 0, expected a torch device"),
        ({"name": 5}, "name is 5, expected text"),
        ({"spool_bytes": -1}, "spool_bytes is -1, expected an integer of at least 1"),
        ({"threads": "2"}, "threads is '2', expected an integer of at least 1"),
        ({"seconds_per_ask": "2"}, "seconds_per_ask is '2', expected a number"),
        ({"allow": None}, r'allow is None, expected a list of columns, such as \["class_statistics"\]'),
        ({"allow": "features"}, "allow is 'features', expected a list of columns"),
        ({"allow": ("features", 5)}, "allow has unknown columns 5; must be in"),
        (
            {"allow": ["parameter"]},
            r"columns parameter; did you mean 'parameters'\? Must be in class_statistics",
        ),
        (
            {"model": "digits_linear"},
            r"model is 'digits_linear', .* built-in model, lambda: fleetdistill.models.build_model\('digits_linear'\)",
        ),
        ({"export": 5}, "unknown export 5"),
    ],
)
def test_a_wrong_argument_is_named_and_leaves_nothing_behind(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as error:
        open_device(**{**GIVEN, "state_dir": tmp_path / "d", **changes})
    assert len(str(error.value).split()) <= 50
    assert not (tmp_path / "d").exists()


def test_an_unfit_module_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Unfit lacks features, predict, extractor"):
        open_device(**{**GIVEN, "state_dir": tmp_path / "d", "model": Unfit()})
    assert not (tmp_path / "d").exists()


def test_a_function_that_returns_no_module_is_a_model_error(fleet: Fleet, tmp_path: Path) -> None:
    with (
        make_device(fleet, tmp_path, model=lambda: None) as device,
        pytest.raises(ModelError, match="the function model returned NoneType, expected a "),
    ):
        device.step(0)


class Own(SplitModel):
    """A model's class, which an app may pass in place of a function."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__({"extractor": nn.Linear(4, hidden), "head": nn.Linear(hidden, 3)}, cut="extractor")


class Sized(Own):
    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)


async def await_event(event: object) -> None:
    """Nothing awaits it."""


@pytest.mark.parametrize(
    ("on_event", "sentence"),
    [
        (await_event, "on_event is a coroutine function, which Device does not await; use AsyncDevice"),
        (lambda: None, "which does not take an event alone: too many positional arguments"),
        (lambda event, app: None, "which does not take an event alone: missing a required argument: 'app'"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused(tmp_path: Path, on_event: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Device(server="127.0.0.1:1", model=tiny_model, data=tiny_data(), state_dir=tmp_path / "d", on_event=on_event)
    assert not (tmp_path / "d").exists()
    with Device(
        server="127.0.0.1:1", model=tiny_model, data=tiny_data(), state_dir=tmp_path / "d", on_event=print
    ) as device:
        assert repr(device) == f"<Device {device.device_id!r}, version 0>"


def test_a_models_class_without_arguments_is_called(fleet: Fleet, tmp_path: Path) -> None:
    inputs = tiny_data()[0]
    with make_device(fleet, tmp_path / "a", link=LyingLink(), model=Own) as device:
        assert device.predict(inputs).shape == (len(inputs), 3)
        assert isinstance(device.model, Own)
    says = r"Sized.*missing.*'hidden'; it is called without arguments, so pass model=lambda: MyModel\(...\)"
    with make_device(fleet, tmp_path / "b", model=Sized) as device, pytest.raises(ModelError, match=says):
        device.step(0)


def test_a_torch_device_that_this_machine_lacks_is_named(fleet: Fleet, tmp_path: Path) -> None:
    with (
        make_device(fleet, tmp_path, torch_device="vulkan") as device,
        pytest.raises(ConfigurationError, match="torch_device 'vulkan' cannot be used: "),
    ):
        device.step(0)


def test_any_error_in_the_constructor_unlocks_the_directory(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("a fault of the SDK")

    with monkeypatch.context() as patched:
        patched.setattr(Deployer, "__init__", fail)
        with pytest.raises(RuntimeError, match="a fault of the SDK"):
            make_device(fleet, tmp_path)
    make_device(fleet, tmp_path).close()


def test_a_wrong_token_stores_no_key(tmp_path: Path) -> None:
    """A stored key would require TLS at every later start."""
    with pytest.raises(ConfigurationError, match=r"neither a token, .* nor a file with one: nofile"):
        Enrolment("127.0.0.1:1", tmp_path, "d", "nofile")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Deployment(dynamic_size="no"), "dynamic_size is 'no', expected True or False"),  # type: ignore[arg-type]
        (lambda: Deployment(max_bytes=1.5), "max_bytes is 1.5, expected an integer"),  # type: ignore[arg-type]
        (lambda: Deployment(keep_versions="3"), "keep_versions is '3', expected an integer"),  # type: ignore[arg-type]
        (lambda: Deployment(max_accuracy_drop="1"), "max_accuracy_drop is '1', expected a number"),  # type: ignore[arg-type]
        (lambda: Eligibility(charging="yes"), "charging is 'yes', expected True or False"),  # type: ignore[arg-type]
        (lambda: Eligibility(probes=[len]), "probes is .*, expected a dict of functions by name"),  # type: ignore[arg-type]
        (lambda: Predictor(".", variant=5), "variant is 5, must be"),  # type: ignore[arg-type]
        (lambda: Predictor(".", threads="2"), "threads is '2', expected an integer"),  # type: ignore[arg-type]
        (lambda: AsyncDevice(on_event=5), "on_event is 5, expected a function"),  # type: ignore[arg-type, call-arg]
        (lambda: refused("next_ask", "nonsense"), "unknown code 'nonsense', expected one of not-ready"),
    ],
)
def test_other_classes_check_their_arguments_too(make: Any, sentence: str) -> None:
    with pytest.raises(FleetDistillError, match=sentence):
        make()
