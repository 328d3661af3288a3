"""The control that trains alone: it follows the method's local training, round by round."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fleets import RUNS, SMALL, prepare, run_in_memory

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import METHODS, config_class, device_class
from fleetdistill_lab.simulation import fleet
from fleetdistill_lab.simulation.controls import local_only as alone
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.engine.contract import build_method

Training = tuple[torch.optim.Optimizer, float, int]
"""Optimiser, learning rate and passes of one call."""


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Training]:
    """Fills up with what the control trains, which goes on as ever."""
    seen: list[Training] = []
    train_epochs = alone.train_epochs  # type: ignore[attr-defined]

    def watched(*parts: Any, epochs: int, optimizer: torch.optim.Optimizer, **given: Any) -> Any:
        seen.append((optimizer, optimizer.param_groups[0]["lr"], epochs))
        return train_epochs(*parts, epochs=epochs, optimizer=optimizer, **given)

    monkeypatch.setattr(alone, "train_epochs", watched)
    return seen


def train_local_only(work: Path, took_part: list[bool], method: str, **settings: Any) -> list[float]:
    """Accuracies of one device after each round."""
    config, specs, _ = prepare(replace(SMALL, method=method, settings={**RUNS[method].settings, **settings}), work)
    counts = alone.train_local_only(specs[0], config, build_method(config).initial(), took_part)
    assert None not in counts, "each round is scored"
    return [count.accuracy for count in counts if count is not None]


def test_the_rate_of_a_round_is_the_methods(tmp_path: Path, trainings: list[Training]) -> None:
    """FedDKD's decays with the rounds of the run, those that did not take the device included."""
    settings = {"learning_rate": 0.1, "learning_rate_round_decay": 0.5}
    train_local_only(tmp_path / "work", [True, False, True], "feddkd", **settings)
    assert [rate for _, rate, _ in trainings] == pytest.approx([0.1, 0.025])


KEEPS_OPTIMIZER = ("classstats", "classstats_private", "classstats_secure", "classstats_summed", "feddkc", "fedd2s")


@pytest.mark.parametrize("method", METHODS)
def test_the_optimiser_is_kept_where_the_method_keeps_it(
    method: str, tmp_path: Path, trainings: list[Training]
) -> None:
    train_local_only(tmp_path / "work", [True, True], method)
    (first, *_), (second, *_) = trainings
    assert (first is second) == (method in KEEPS_OPTIMIZER)


@pytest.mark.parametrize("method", [method for method in METHODS if not method.startswith("classstats")])
def test_a_method_says_the_truth_about_its_optimiser(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices of two rounds make two optimisers that they keep, or four."""
    wanted = RUNS[method]
    half = device_class(method)
    module, made = importlib.import_module(half.__module__), []
    make = module.make_local_optimizer
    monkeypatch.setattr(module, "make_local_optimizer", lambda *given: made.append(1) or make(*given))  # type: ignore[func-returns-value]
    run_in_memory(prepare(wanted, tmp_path / "work"))
    assert len(made) == (2 if config_class(method).keeps_optimizer else 4)


def test_round_without_label_pass_leaves_control_unchanged(tmp_path: Path, trainings: list[Training]) -> None:
    """FedD2S that learns labels in its warm-up only."""
    curve = train_local_only(tmp_path / "work", [True, True, True], "fedd2s", label_epochs=0)
    assert [epochs for _, _, epochs in trainings] == [1]
    assert len(curve) == 3
    assert len(set(curve)) == 1


# --- a control that can not be had


NO_LABELS = Simulation(
    method="fedd2s", settings={"label_epochs": 0}, models=("fedd2s_digits",), devices=2, rounds=1, train_limit=60
)


def test_settings_fedavg_cannot_match_are_refused_before_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "run_over_memory", lambda *given: pytest.fail("the fleet ran"))
    with pytest.raises(ConfigurationError, match=r"fedd2s makes no pass over the labels .* --no-controls"):
        simulate(replace(NO_LABELS, out=tmp_path))


def test_without_fedavg_they_run_and_have_the_control_alone(tmp_path: Path) -> None:
    report = simulate(replace(NO_LABELS, with_fedavg=False, out=tmp_path))
    assert report.mean_accuracy_alone is not None


def test_models_that_do_not_begin_alike_are_named(tmp_path: Path) -> None:
    wanted = Simulation(method="feddkc", models=("digits_linear", "resnet4"), rounds=6, out=tmp_path)
    says = "the initial extractor of the run does not fit model 'resnet4': weight stem.0.weight has shape"
    with pytest.raises(ConfigurationError, match=says):
        simulate(wanted)


# --- as long as they like


@pytest.mark.long
def test_one_exchange_controls_train_as_long_as_other_methods(tmp_path: Path) -> None:
    wanted = Simulation(method="classstats", devices=2, train_limit=100, test_limit=40, out=tmp_path)
    assert (wanted.rounds_to_complete, wanted.rounds_of_controls) == (1, 30)
    report = simulate(replace(wanted, control_rounds=3))
    assert (report.rounds, report.control_rounds) == (1, 3)
    assert [len(curve) for curve in report.accuracy_by_round.values()] == [1, 1]
    assert [len(curve) for curve in report.alone_accuracy_by_round.values()] == [3, 3]
    fedavg = next(curve for curve in report.curves if curve.name == "FedAvg global")
    assert len(fedavg.bytes) == 3
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("method", "settings", "rounds", "expected"),
    [
        ("feddkc", {}, None, (30, 30)),
        ("feddkc", {}, 7, (7, 7)),
        ("classstats", {}, None, (1, 30)),
        ("classstats", {}, 40, (40, 40)),
    ],
)
def test_rounds_that_nobody_names(
    method: str, settings: dict[str, Any], rounds: int | None, expected: tuple[int, int]
) -> None:
    wanted = Simulation(method=method, settings=settings, rounds=rounds)
    assert (wanted.rounds_to_complete, wanted.rounds_of_controls) == expected


def test_longer_control_continues_where_devices_were_not_asked(tmp_path: Path, trainings: list[Training]) -> None:
    """FedAvg asks one of two devices in its one round; alone both train in the two rounds that come on top."""
    wanted = replace(SMALL, method="fedavg", rounds=1, control_rounds=3, with_alone=True, out=tmp_path)
    simulate(replace(wanted, settings={"participation_ratio": 0.5}))
    assert len(trainings) == 1 + 2 * 2
