"""The apps in examples/ run, and do what they are examples of. `fleetdistill serve` is a real server."""

from __future__ import annotations

import importlib
import re
import signal
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.forked import ForkedProgram
from support.open_device import grouped
from support.outside import EXAMPLES
from support.processes import PATIENCE_SECONDS, wait_until
from support.served import served

from fleetdistill.testing import EventLog, ManualClock
from fleetdistill_server.testing import MemoryServer


@contextmanager
def example(name: str, log: Path, *options: str | Path) -> Iterator[ForkedProgram]:
    """An example that runs as a script."""
    program = ForkedProgram([EXAMPLES / name, *options], log)
    program.start()
    try:
        yield program
    finally:
        program.kill()


def settings_of(name: str, **changes: Any) -> dict[str, Any]:
    """A configuration in examples/, with other values in its sections."""
    sections = tomllib.loads((EXAMPLES / name).read_text())
    return {section: {**sections.get(section, {}), **changes.get(section, {})} for section in {**sections, **changes}}


@pytest.mark.parametrize("name", ["camera_app.py", "sensor_app.py", "two_models.py"])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 120


# --- the camera

SHARES = re.compile(r"(\d+|-)%? of labelled classes, (\d+)% of other classes correct")


@pytest.mark.long
@pytest.mark.slow
def test_cameras_swap_models_and_learn_classes_users_never_label(tmp_path: Path) -> None:
    with served(tmp_path, settings_of("classstats.toml")) as address, ExitStack() as stack:
        cameras = [
            stack.enter_context(
                example(
                    "camera_app.py",
                    tmp_path / f"{number}.log",
                    *("--server", address, "--state-dir", tmp_path / f"{number}", "--camera", str(number)),
                    *("--fps", "100"),
                )
            )
            for number in (0, 1)
        ]
        for camera in cameras:
            wait_until(partial(is_over_or_knows, camera), "a model that recognises classes of the other camera")
            camera.send(signal.SIGINT)
        for camera in cameras:
            assert camera.ended() == 0, camera.said
            assert camera.said.endswith("stopped\n")
            assert models_of(camera) == sorted(set(models_of(camera)))


def models_of(camera: ForkedProgram) -> list[int]:
    """The versions of the model in the order in which the camera used them."""
    return [int(number) for number in re.findall(r"model (\d+) of round", camera.said)]


def is_over_or_knows(camera: ForkedProgram) -> bool:
    """Whether models were swapped, and most frames of classes were recognised that the camera has no labels of."""
    shares = [int(share) for _, share in SHARES.findall(camera.said)]
    return not camera.is_alive or (len(models_of(camera)) > 1 and max(shares, default=0) > 50)


# --- the sensor


@pytest.fixture
def proxy(tmp_path: Path) -> dict[str, Any]:
    """A section [proxy] with the set that the example writes."""
    with example("sensor_app.py", tmp_path / "proxy.log", "--make-proxy", tmp_path / "proxy.npz") as program:
        assert program.ended() == 0, program.said
    return {"proxy": {"data": str(tmp_path / "proxy.npz")}}


@pytest.mark.long
@pytest.mark.slow
def test_sensors_recognise_a_fault_that_their_machine_never_had(
    tmp_path: Path, proxy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    with served(tmp_path, settings_of("sensor.toml", **proxy)) as address, ExitStack() as stack:
        machines = {"pump": "bearing", "fan": "unbalance"}
        sensors = [
            stack.enter_context(
                example(
                    "sensor_app.py",
                    tmp_path / f"{name}.log",
                    *("--server", address, "--state-dir", tmp_path / name, "--lacks", lacks),
                )
            )
            for name, lacks in machines.items()
        ]
        for sensor, lacks in zip(sensors, machines.values(), strict=True):
            assert sensor.ended() == 0, sensor.said
            shares = [int(share) for share in re.findall(rf"{lacks} (\d+)%", sensor.said)]
            assert shares[0] < 10, "the first round is local training"
            assert shares[-1] > 80


@pytest.fixture
def sensor_app(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("sensor_app")


def test_a_hot_sensor_waits_until_it_is_cool(tmp_path: Path, proxy: dict[str, Any], sensor_app: Any) -> None:
    clock, events, temperatures = ManualClock(), EventLog(), iter([90.0, 85.0])
    settings = settings_of("sensor.toml", run={"min_devices": 1, "rounds": 1}, **proxy)
    with MemoryServer(settings, clock) as server:
        more = grouped(clock=clock, on_event=events.append, export="never")
        temperature = lambda: next(temperatures, 45.0)  # noqa: E731
        with sensor_app.make_device(server.link(), tmp_path / "pump", "bearing", temperature, **more) as device:
            device.run()
            assert set(device.ledger.totals.columns) == {"logits", "metrics"}
        assert server.status == "finished"
    assert events.kinds()[:3] == ["waiting", "resumed", "checked-in"]
    assert events.of("waiting").text == "the temperature is 90 °C, above 70 °C; the device waits"


# --- two models


@pytest.mark.long
@pytest.mark.slow
def test_class_statistics_help_each_model_and_table_shows_losses(tmp_path: Path) -> None:
    with example("two_models.py", tmp_path / "log", "--rounds", "1", "--out", tmp_path / "out") as program:
        assert program.ended(PATIENCE_SECONDS) == 0, program.said
    rows = re.findall(r"^(\w+) +(digits_\w+) .* ([+-][\d.]+) / ([+-][\d.]+) ", program.said, flags=re.M)
    models = ("digits_linear", "digits_cnn_small")
    assert [row[:2] for row in rows] == [
        (method, model) for method in ("feddkc", "cdkt", "classstats") for model in models
    ]
    assert all(float(row[2]) > 10 for row in rows[-2:])
