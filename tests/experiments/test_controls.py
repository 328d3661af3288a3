"""Controls that a comparison lacks, and the lines that add them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import config_class
from fleetdistill_lab.experiments.definition import Experiment, MethodEntry, Tune
from fleetdistill_lab.experiments.notes import cautions, controls_missing

USUAL = {
    "fedavg": MethodEntry(),
    "no_transfer": MethodEntry(),
    "falling": MethodEntry(method="fedavg", settings={"learning_rate_round_decay": 0.9237}),
}
TUNED = Tune(setting="method.learning_rate", values=[0.01, 0.03])


def experiment(entries: Mapping[str, MethodEntry], **others: Any) -> Experiment:
    given = {"tune": TUNED, "sections": {"simulation": {"rounds": 30, "proxy_per_class": 8}}, **others}
    return Experiment(name="x", title="x", seeds=[0, 1], methods=entries, **given)


def missing(entries: Mapping[str, MethodEntry], **others: Any) -> list[str]:
    return [control.label for control in controls_missing(experiment({**USUAL, **entries}, **others))]


def test_missing_controls_are_named_with_a_remedy() -> None:
    given = experiment({"fedprox": MethodEntry()}, tune=None, is_file=True)
    assert [control.label for control in controls_missing(given)] == ["fedavg", "no_transfer", "falling_rate", "tune"]
    said = [line for line in cautions(given) if "control" in line]
    assert said == [
        "A control is missing: FedAvg, the weighted mean of the models; add [methods.fedavg].",
        "A control is missing: training alone; add [methods.no_transfer].",
        "A control is missing: FedAvg with a rate that falls to a tenth; add [methods.falling_rate] with "
        'method = "fedavg" and settings = { learning_rate_round_decay = 0.9236 }.',
        "A control is missing: a learning rate that is tuned for each method; add [tune] with "
        'setting = "method.learning_rate" and values, such as [0.005, 0.02, 0.08].',
    ]
    of_compare = [line.partition("; ")[2] for line in cautions(replace(given, is_file=False)) if "control" in line]
    assert of_compare == [
        "add --method fedavg.",
        "add --method no_transfer.",
        "add --method falling_rate=fedavg --set 'falling_rate.learning_rate_round_decay=0.9236'.",
        "an experiment's file has it with [tune].",
    ]
    assert missing({}) == []


@pytest.mark.parametrize(
    ("rounds", "decay", "is_enough"), [(30, 0.9236, True), (30, 0.95, False), (350, 0.99, True), (30, 1.0, False)]
)
def test_falling_rate_reaches_a_tenth(rounds: int, decay: float, is_enough: bool) -> None:
    entries = {"falling": MethodEntry(method="fedavg", settings={"learning_rate_round_decay": decay})}
    found = missing(entries, sections={"simulation": {"rounds": rounds}})
    assert found == [] if is_enough else found == ["falling_rate"]


def test_one_round_has_no_falling_rate() -> None:
    assert missing({"falling": MethodEntry(method="fedavg")}, sections={"simulation": {"rounds": 1}}) == []


@pytest.mark.parametrize(
    ("method", "settings"),
    [("cdkt", {"exchange": False}), ("feddkc", {"server_beta": 0.0}), ("dafkd", {"correlation": False})],
)
def test_method_needs_itself_without_its_own_part(method: str, settings: dict[str, Any]) -> None:
    assert missing({method: MethodEntry()}) == [f"{method}_control"]
    assert missing({method: MethodEntry(), "control": MethodEntry(method=method, settings=settings)}) == []
    (said,) = [line for line in cautions(experiment({**USUAL, method: MethodEntry()})) if "control is" in line]
    ((name, value),) = settings.items()
    assert f"--method {method}_control={method} --set '{method}_control.{name}={str(value).lower()}'" in said


def test_own_method_declares_its_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_class("fedprox"), "control", MappingProxyType({"mu": 0.0}), raising=False)
    assert missing({"fedprox": MethodEntry()}) == ["fedprox_control"]
    assert missing({"fedprox": MethodEntry(settings={"mu": 0.0})}) == []


def test_control_of_a_base_class_is_not_a_methods() -> None:
    """FedGKT has FedDKC's settings, but what is FedDKC's own is not in it."""
    assert missing({"fedgkt": MethodEntry()}) == []


def test_several_exchanges_need_fedavg_with_as_many() -> None:
    assert missing({"feddkd": MethodEntry(settings={"dkd_steps": 3})}) == ["equal_exchanges"]
    assert missing({"feddkd": MethodEntry(settings={"dkd_steps": 0})}) == []
    more = MethodEntry(method="fedavg", simulation={"rounds": 120})
    assert missing({"feddkd": MethodEntry(settings={"dkd_steps": 3}), "more": more}) == []
    (said,) = [line for line in cautions(experiment({**USUAL, "feddkd": MethodEntry()})) if "control is" in line]
    assert said.endswith("add --method equal_exchanges=fedavg --set 'equal_exchanges.simulation.rounds=120'.")


def test_fixed_features_need_fedavg_and_alone_on_them() -> None:
    assert missing({"classstats": MethodEntry()}) == ["fedavg_on_scattering", "no_transfer_on_scattering"]
    on_features = {
        f"{name} on features": MethodEntry(method=name, simulation={"models": ["linear:scattering"]})
        for name in ("fedavg", "no_transfer")
    }
    assert missing({"classstats": MethodEntry(), **on_features}) == []
    trained = {"classstats": MethodEntry(settings={"features": "model"})}
    assert missing(trained) == [], "the features of the run's own extractor"
    (said, _) = [line for line in cautions(experiment({**USUAL, "classstats": MethodEntry()})) if "control is" in line]
    assert """--set 'fedavg_on_scattering.simulation.models=["linear:scattering"]'.""" in said


def test_control_that_is_no_mapping_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_class("cdkt"), "control", property(lambda self: {"exchange": False}))
    with pytest.raises(ConfigurationError, match=r"CDKTConfig\.control is of type property, must be a class attribute"):
        missing({"cdkt": MethodEntry()})
