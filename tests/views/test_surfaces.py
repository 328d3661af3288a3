"""All surfaces show the same number under the same name: one finished run of every method, read from each of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fleets import EVERY_METHOD, SUITED
from support.long import long_except
from typer.testing import CliRunner

from fleetdistill_console.dashboard.server import SimulatedRun
from fleetdistill_console.metrics.runs import RunsCollector
from fleetdistill_console.tracking.run_figures import points_since
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app
from fleetdistill_server.store.store import Store

SETTINGS: dict[str, dict[str, Any]] = {
    "classstats_private": {"epsilon": 8.0},
    "classstats_secure": {"epsilon": 8.0},
}
"""Settings that a method requires."""
SMALL: dict[str, Any] = {"devices": 3, "rounds": 2, "train_limit": 300, "test_limit": 40, "torch_device": "cpu"}
SMALL |= {"with_alone": False, "with_fedavg": False}
DEVICE_FIGURES = {"accuracy/test": "test_accuracy", "loss/train": "train_loss"}
ROUND_FIGURES = ("used", "reported", "seconds", "guards")
METRICS = {
    ("last_round_accuracy_ratio", "test"): "test_accuracy",
    ("last_round_loss", "train"): "train_loss",
    ("last_round_global_accuracy_ratio", ""): "global_accuracy",
    ("last_round_duration_seconds", ""): "seconds",
}
Figures = Mapping[int, Mapping[str, Any]]
"""Values by round and name."""


def printed(store: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ["runs", *words, RUN, "--store", str(store), "--json"])
    assert done.exit_code == 0, done.output
    return done.stdout


def shown(store: Path) -> Figures:
    return {row["round"]: row for row in json.loads(printed(store, "show"))["rounds"]}


def watched(store: Path) -> Figures:
    changes = map(json.loads, printed(store, "watch").splitlines())
    return {row["round"]: row for row in changes if row["kind"] == "round"}


def on_the_dashboard(out: Path) -> Figures:
    return {row["round"]: row for row in SimulatedRun(out).rounds(RUN, 0).lists["rounds"]}


def scraped(store: Path, last: int) -> Figures:
    collector, values = RunsCollector(store), {}
    for metric in collector.collect():
        for sample in metric.samples:
            labels = sample.labels
            name = METRICS.get((sample.name.removeprefix("fleetdistill_"), labels.get("split", "")))
            if name is not None:
                values[name] = sample.value
            elif sample.name == "fleetdistill_last_round_method_figure":
                values[labels["figure"]] = sample.value
    collector.close()
    return {last: values}


def tracked(store: Store) -> Figures:
    """Figures of the server have their name after the last slash."""
    return {
        points.step: {
            DEVICE_FIGURES.get(name, name.rpartition("/")[2]): value
            for name, value in points.values.items()
            if name in DEVICE_FIGURES or name.startswith(("server/", "round/"))
        }
        | {f"bytes_{direction}": points.values[f"bytes/{direction}"] for direction in ("up", "down")}
        for points in points_since(store, RUN, 0)
    }


def in_the_report(report: FleetReport) -> Figures:
    return {number: {"global_accuracy": rate} for number, rate in enumerate(report.global_accuracy_by_round, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("method", long_except(EVERY_METHOD, "classstats", "feddkc"))
def test_every_surface_shows_the_same_figures(method: str, tmp_path: Path) -> None:
    models = SUITED.get(method, {}).get("models", ())
    report = simulate(
        Simulation(method=method, settings=SETTINGS.get(method, {}), models=models, out=tmp_path, **SMALL)
    )
    directory = tmp_path / "work" / "store"
    expected = shown(directory)
    last = max(expected)
    store = Store.open(directory)
    declared = store.runs.existing(RUN).figures
    surfaces = {
        "watch": watched(directory),
        "dashboard": on_the_dashboard(tmp_path),
        "metrics": scraped(directory, last),
        "tracking": tracked(store),
        "report": in_the_report(report),
    }
    store.close()
    digits = {name: figure.digits for name, figure in declared.items()} | {"seconds": 2}
    for surface, rounds in surfaces.items():
        assert rounds.keys() == ({last} if surface == "metrics" else expected.keys()), surface
        for number, values in rounds.items():
            for figure in values.keys() & expected[number].keys():
                value = values[figure]
                shown_value = round(value, digits.get(figure, 4)) if isinstance(value, float) else value
                assert shown_value == expected[number][figure], (surface, number, figure)
    numbers = {name for name in (*declared, "global_accuracy") if isinstance(expected[last][name], int | float)}
    for surface in ("dashboard", "metrics", "tracking"):
        assert numbers <= surfaces[surface][last].keys(), surface
    assert declared.keys() <= expected[last].keys()
