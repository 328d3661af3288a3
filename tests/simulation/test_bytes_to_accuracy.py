"""benchmarks/bytes_to_accuracy.py: which runs it compares, and the bytes until a goal is reached."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetdistill.methods import METHODS
from fleetdistill.methods.dafkd.samples import make_generator
from fleetdistill_lab import Simulation, simulate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = Simulation(
    devices=2, train_limit=60, test_limit=20, rounds=2, models=("digits_linear",), with_alone=False, with_fedavg=False
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("bytes_to_accuracy")


def test_every_method_is_compared(script: Any) -> None:
    assert {item["method"] for item in script.METHODS.values()} == set(METHODS)


@pytest.mark.parametrize(
    ("method", "types"),
    [
        ("fedavg", ["float32"]),
        ("dafkd", ["float32"]),
        ("cdkt", ["float32", "float16"]),
        ("feddkc", ["float32", "float16", "uint8"]),
        ("fedd2s", ["float32", "float16", "uint8"]),
        ("classstats", ["float32"]),
        ("classstats_private, epsilon 8", ["float32"]),
        ("classstats_secure, epsilon 8", ["float32"]),
        ("classstats_summed", ["float32"]),
    ],
)
def test_a_method_runs_with_the_encodings_that_change_its_bytes(script: Any, method: str, types: list[str]) -> None:
    assert script.encodings(script.simulation(script.FLEETS["digits"], method)) == types


@pytest.mark.parametrize(("fleet", "size"), [("digits", 8), ("mnist", 14)])
def test_the_generator_fits_the_images(script: Any, fleet: str, size: int) -> None:
    config = script.simulation(script.FLEETS[fleet], "dafkd").configuration()
    image = (1, size, size)
    assert make_generator(config.for_classes(10), image, 10)(torch.zeros(2, config.noise_dim)).shape == (2, *image)


def test_bytes_are_those_of_the_report(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One real small run of FedAvg: its model reaches its own accuracy, at the report's bytes."""
    reports: list[Any] = []

    def watched(wanted: Simulation) -> Any:
        reports.append(simulate(wanted))
        return reports[-1]

    monkeypatch.setattr(script, "simulate", watched)
    monkeypatch.setattr(script, "FLEETS", {"digits": TINY})
    script.main(["--fleets", "digits", "--methods", "fedavg", "--rounds", "2", "--seeds", "3"])
    (report,) = reports
    for number, direction in [(1, "up"), (1, "down"), (2, "up"), (2, "down")]:
        known = sum(item[direction] for item in report.bytes_by_round[:number])
        assert script.spent(report, number, direction, script.PLAIN) == pytest.approx(known)
    sent = {name: script.spent(report, 2, name, script.SENT) for name in ("up", "down")}
    assert sent["up"] == pytest.approx(sum(device.sent_up for device in report.devices) / 2)
    assert sent["down"] == pytest.approx(sum(device.sent_down for device in report.devices) / 2)
    *_, devices, global_model = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert devices[2] == "FedAvg devices"
    assert "round" in devices[4]
    assert global_model[2] == "FedAvg global"
    assert "round" in global_model[5]
    unreachable = replace(script.goals(report), devices=1.1, global_model=1.1)
    assert all(line.count("never") == 2 for line in script.lines(("fedavg", "float32"), [report], [unreachable]))
