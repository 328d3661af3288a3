"""Sentences on what a reader of a comparison has to know."""

from __future__ import annotations

from dataclasses import replace

from fleetdistill_lab.experiments.definition import Experiment, MethodEntry, Tune
from fleetdistill_lab.experiments.notes import cautions, header_notes, notes, setting_notes


def of_methods(*names: str, **method: float) -> Experiment:
    methods = {name: MethodEntry() for name in names}
    return Experiment(name="x", title="x", seeds=[0, 1], methods=methods, sections={"method": method})


def noted(experiment: Experiment, *starts: str) -> list[str]:
    """Returns the notes that begin with one of these words."""
    return [line for line in notes(experiment) if line.startswith(starts)]


def cautioned(experiment: Experiment, start: str) -> list[str]:
    return [line for line in cautions(experiment) if line.startswith(start)]


def test_defaults_that_differ_are_named_with_a_remedy() -> None:
    """feddkc has the defaults of LocalTraining, fedavg and no_transfer have others."""
    (said,) = cautioned(of_methods("no_transfer", "fedavg", "feddkc"), "Defaults")
    assert "learning_rate is 0.02 with no_transfer and fedavg, 0.01 with feddkc; " in said
    assert "weight_decay is 0 with no_transfer and fedavg, 0.0005 with feddkc. " in said
    assert said.endswith("give compare --set method.learning_rate=VALUE --set method.weight_decay=VALUE.")
    (of_file,) = cautioned(replace(of_methods("fedavg", "feddkc"), is_file=True), "Defaults")
    assert of_file.endswith("To set them alike, set learning_rate and weight_decay in [method] of the file.")
    (other,) = cautioned(of_methods("fedavg", "feddkc", learning_rate=0.1), "Defaults")
    assert "learning_rate" not in other, "set alike"
    assert cautioned(of_methods("fedavg", "no_transfer"), "Defaults") == []
    (many,) = cautioned(of_methods("fedavg", "no_transfer", "fedprox", "feddkd", "feddkc"), "Defaults")
    assert "0.02 with fedavg and no_transfer and 2 others, 0.01 with feddkc; " in many


def test_rates_are_said_to_be_defaults_set_or_tuned() -> None:
    usual = of_methods("no_transfer", "fedavg")
    assert noted(usual, "Rates") == ["Rates: defaults, not tuned."]
    assert noted(of_methods("no_transfer", "fedavg", learning_rate=0.1), "Rates") == ["Rates: set, not tuned."]
    one = {"fedavg": MethodEntry(settings={"learning_rate": 0.1}), "no_transfer": MethodEntry()}
    (said,) = noted(replace(usual, methods=one), "Rates")
    assert said == "Rates: set, not tuned (fedavg); defaults, not tuned (no_transfer)."
    tuned = replace(usual, tune=Tune(setting="method.learning_rate", values=[0.1, 0.2]))
    assert noted(tuned, "Rates") == ["Rates: tuned."]


def test_settings_beyond_fedavgs_are_named_as_not_tuned() -> None:
    rates, own = noted(of_methods("fedavg", "fedprox", "moon", "classstats"), "Rates", "Settings")
    assert rates == "Rates: defaults, not tuned."
    assert own == "Settings beyond FedAvg's, not tuned: fedprox: mu = 0.1; moon: contrast_temperature = 0.5, mu = 1.0."
    tuned = replace(of_methods("fedavg", "fedprox"), tune=Tune(setting="method.mu", values=[0.1, 1.0]))
    assert noted(tuned, "Rates") == ["Rates: defaults, not tuned."]


def test_notes_name_settings_that_are_not_the_defaults() -> None:
    assert noted(of_methods("fedavg", "fedprox", momentum=0.9), "Not the") == [], "the default"
    fewer = of_methods("no_transfer", "fedavg", "fedprox", momentum=0.5)
    assert noted(fewer, "Not the") == ["Not the defaults: all methods: momentum = 0.5."]
    of_one = {"fedavg": MethodEntry(), "FedProx": MethodEntry(method="fedprox", settings={"mu": 1.0})}
    assert noted(replace(fewer, methods=of_one, sections={}), "Not the") == ["Not the defaults: FedProx: mu = 1.0."]
    many = of_methods("fedavg", "fedprox", "fedmax", "moon", "fedbn", "feddkc", momentum=0.5, mu=3.0)
    assert noted(many, "Not the") == ["Not the defaults: all methods: momentum = 0.5; fedprox and moon: mu = 3.0."]
    (said,) = noted(replace(many, sections={"method": {"weighting": "uniform"}}), "Not the")
    assert said == 'Not the defaults: all but fedbn and feddkc: weighting = "uniform".'
    point = {"mu": {"1": {"method.mu": 1.0}}}
    assert noted(replace(of_methods("fedavg", "fedprox"), grid=point), "Not the") == [], "the grid has it"


def test_notes_name_bounded_methods_and_headers_alone() -> None:
    both = of_methods("no_transfer", "fedavg")
    (said,) = noted(both, "robust")
    assert said.startswith("robust is on with fedavg: ")
    assert said.endswith("For plain means, give compare --set method.robust=off.")
    assert 'set robust = "off" in [method]' in noted(replace(both, is_file=True), "robust")[0]
    assert noted(replace(both, sections={"method": {"robust": "off"}}), "robust") == []
    (silent,) = header_notes(both)
    assert silent.startswith("Bytes are of tensors and the headers of messages; no_transfer has headers only")
    assert header_notes(of_methods("fedavg", "fedprox")) == []


def test_settings_of_the_runs_are_named_by_their_values() -> None:
    sections = {"simulation": {"dataset": "mnist", "train_limit": 600, "image_size": 8, "rounds": 6}}
    grid = {"alpha": {"0.1": {"simulation.alpha": 0.1}, "1": {"simulation.alpha": 1.0}}}
    assert setting_notes(replace(of_methods("fedavg"), sections=sections, grid=grid)) == [
        "Data mnist; training rows at most 600; image size 8 x 8; devices 5; rounds 6; partition dirichlet_by_class; "
        "alpha 0.1 or 1; seeds 0, 1."
    ]


def test_networks_that_differ_are_named_with_a_remedy() -> None:
    """Methods that average models have the largest default network on each device, others have all of them."""
    (said,) = cautioned(of_methods("fedavg", "no_transfer", "fedprox"), "Devices' networks")
    assert "fedavg and fedprox: only the largest of the default networks; " in said
    assert "no_transfer: the default networks in turn. " in said
    assert """--set 'simulation.models=["digits_mlp_large"]'""" in said
    assert cautioned(of_methods("fedavg", "fedprox"), "Devices' networks") == []
    compared = of_methods("fedavg", "no_transfer")
    two = {"simulation": {"models": ["digits_linear", "digits_mlp_large"]}}
    (among,) = cautioned(replace(compared, sections=two), "Devices' networks")
    assert "fedavg: only the largest of digits_linear, digits_mlp_large; no_transfer: digits_linear, " in among
    one = {"simulation": {"models": ["digits_mlp_large"]}}
    assert cautioned(replace(compared, sections=one), "Devices' networks") == []
