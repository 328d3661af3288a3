"""Sentences on what a reader of a comparison has to know: of rates, settings, networks, bytes, controls and seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

from fleetdistill.methods import config_class, device_class
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill_lab.experiments.controls import Control, missing_controls
from fleetdistill_lab.experiments.definition import SCALE, Cell, Experiment
from fleetdistill_lab.experiments.summary import significant_ratio
from fleetdistill_lab.simulation.data.partition import partition_parameters
from fleetdistill_lab.simulation.spec.plan import DIGITS_MODELS, RESNET_MODELS, models_in_words
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.averaging import OFF
from fleetdistill_server.methods.traffic import Sizes
from fleetdistill_server.texts import counted

__all__ = [
    "cautions",
    "controls_missing",
    "header_notes",
    "model_notes",
    "notes",
    "power_notes",
    "setting_notes",
    "shared_labels",
    "silent_labels",
    "source_notes",
]

_MANY_SEEDS = 5


def notes(experiment: Experiment) -> list[str]:
    """Returns sentences about rates and settings of the methods, for below the tables."""
    return [
        *_rates(experiment),
        *_own_settings(experiment),
        *_changed_settings(experiment),
        *_bounds(experiment),
    ]


def setting_notes(experiment: Experiment) -> list[str]:
    """Returns a sentence on data, devices, rounds, partition and seeds of the runs."""
    runs = [cell.simulation for cell in experiment.first_seed()]
    of = {
        "data": [str(getattr(one.dataset, "name", one.dataset)) for one in runs],
        "training rows at most": [f"{one.train_limit:,}" for one in runs if one.train_limit],
        "image size": [f"{one.image_size} x {one.image_size}" for one in runs if one.image_size],
        "devices": [str(one.devices) for one in runs],
        "devices a round": [str(one.devices_per_round) for one in runs if one.devices_per_round],
        "rounds": [str(one.rounds_to_complete) for one in runs],
        "partition": [one.partition_path for one in runs],
        "alpha": [f"{one.alpha:g}" for one in runs if "alpha" in partition_parameters(one.partition_path)],
        "seeds": [", ".join(map(str, experiment.seeds))],
    }
    said = "; ".join(f"{name} {' or '.join(dict.fromkeys(values))}" for name, values in of.items() if values)
    return [f"{said[0].upper()}{said[1:]}."]


def shared_labels(experiment: Experiment) -> list[str]:
    """Returns the labels of the methods whose devices have the global model at the end."""
    methods = {label: entry.method or label for label, entry in experiment.methods.items()}
    return [label for label, method in methods.items() if device_class(method).shares_fleet_model]


def cautions(experiment: Experiment) -> list[str]:
    """Returns sentences about what a reader may take for equal or for there: defaults, networks and controls."""
    missing = [control.caution(experiment.is_file) for control in controls_missing(experiment)]
    return [*_differing_defaults(experiment), *_differing_networks(experiment), *missing]


def controls_missing(experiment: Experiment) -> list[Control]:
    """Returns the controls that the experiment lacks."""
    runs = [cell.simulation for cell in experiment.first_seed()]
    return missing_controls(runs, experiment.tuned_setting == "method.learning_rate")


def header_notes(experiment: Experiment) -> list[str]:
    """Returns a sentence about bytes of methods without tensors."""
    if not (silent := silent_labels(experiment)):
        return []
    return [
        f"Bytes are of tensors and the headers of messages; {_some(silent)} has headers only, with a device's "
        "number of rows, loss and metrics."
    ]


def model_notes(experiment: Experiment) -> list[str]:
    """Returns which methods' devices have the global model at the end, which metrics of that model are about."""
    if not (shared := shared_labels(experiment)):
        return []
    methods = "all methods" if len(shared) == len(experiment.methods) else "; ".join(shared)
    return [
        f"The model that a device has at the end is the global one with {methods}. The metrics after local "
        "training are about device models with all methods."
    ]


def source_notes(experiment: Experiment) -> list[str]:
    """Returns that printed values are of another scale than the runs, if they are."""
    printed = (*experiment.printed.values(), *experiment.printed_elsewhere.values())
    if experiment.scale == SCALE or not any(of for by_label in printed for of in by_label.values()):
        return []
    return [
        f"Values in the source are of its own data sets, networks and rounds; these runs have the scale "
        f"{experiment.scale}, so that the order of the methods can be compared, not the values."
    ]


def power_notes(seeds: int, number: int) -> list[str]:
    """Returns a sentence about what few seeds cannot show.

    Args:
        seeds: Number of seeds.
        number: Number of comparisons of a metric; without one there is nothing to say.
    """
    if not number:
        return []
    ratio = significant_ratio(seeds, number)
    if ratio is None:
        return [f"Only {counted(seeds, 'seed')}: no difference can be told from chance."]
    if seeds >= _MANY_SEEDS:
        return []
    how = f"{seeds} seeds and {counted(number, 'comparison')} a metric"
    return [
        f"{how}: a difference is significant only if its mean is {ratio:.1f} times its standard deviation, "
        "or less after larger ones that are (Holm's steps)."
    ]


def _rates(experiment: Experiment) -> list[str]:
    """Returns a sentence about the learning rates of the runs: tuned, set or defaults."""
    found: dict[str, dict[str, None]] = {}
    for cell in experiment.first_seed():
        if "learning_rate" in experiment.settings_of(cell.label):
            is_set = "learning_rate" in cell.sections.get("method", {})
            is_tuned = experiment.tuned_setting == "method.learning_rate"
            how = "tuned" if is_tuned else "set, not tuned" if is_set else "defaults, not tuned"
            found.setdefault(how, {})[cell.label] = None
    of = [how if len(found) == 1 else f"{how} ({', '.join(labels)})" for how, labels in found.items()]
    return [f"Rates: {'; '.join(of)}."] * bool(of)


def _own_settings(experiment: Experiment) -> list[str]:
    """Returns a sentence about what methods that extend FedAvg add to its settings."""
    tuned = experiment.tuned_setting.removeprefix("method.")
    shared = {item.name for item in fields(FedAvgConfig)}
    found = {}
    for cell in _first_point(experiment):
        config = cell.simulation.configuration()
        if isinstance(config, FedAvgConfig) and (own := {item.name for item in fields(config)} - shared - {tuned}):
            found[cell.label] = ", ".join(f"{name} = {json.dumps(getattr(config, name))}" for name in sorted(own))
    said = "; ".join(f"{label}: {settings}" for label, settings in found.items())
    return [f"Settings beyond FedAvg's, not tuned: {said}."] if said else []


def _changed_settings(experiment: Experiment) -> list[str]:
    """Returns a sentence about the settings that are not a method's defaults; those of the grid have columns."""
    columns = {key for of in experiment.points.values() for key in of} | {experiment.tuned_setting}
    found: dict[str, list[str]] = {}
    for cell in _first_point(experiment):
        defaults = {item.name: item.default for item in fields(config_class(cell.simulation.method))}
        for name, value in cell.sections.get("method", {}).items():
            if value != defaults.get(name) and f"method.{name}" not in columns:
                found.setdefault(f"{name} = {json.dumps(value)}", []).append(cell.label)
    of_labels: dict[str, list[str]] = {}
    for setting, labels in found.items():
        of_labels.setdefault(_words_of(experiment, labels), []).append(setting)
    said = "; ".join(f"{labels}: {', '.join(settings)}" for labels, settings in of_labels.items())
    return [f"Not the defaults: {said}."] if said else []


def _bounds(experiment: Experiment) -> list[str]:
    """Returns a sentence about methods whose server bounds what devices far from the others send."""
    silent = silent_labels(experiment)
    sending = [cell for cell in _first_point(experiment) if cell.label not in silent]
    bounded = [cell.label for cell in sending if getattr(cell.simulation.configuration(), "robust", OFF) != OFF]
    if not bounded:
        return []
    remedy = (
        'set robust = "off" in [method] of the file' if experiment.is_file else "give compare --set method.robust=off"
    )
    return [
        f"robust is on with {_words_of(experiment, bounded)}: the server bounds answers far from the others', also "
        f"of honest devices, which no method's paper does. For plain means, {remedy}."
    ]


def silent_labels(experiment: Experiment) -> list[str]:
    """Returns the labels whose devices exchange no tensors."""
    return [
        cell.label
        for cell in _first_point(experiment)
        for config in [cell.simulation.configuration()]
        if not any(one.up or one.down for one in server_class(cell.simulation.method).exchanges(config, Sizes()))
    ]


def _differing_defaults(experiment: Experiment) -> list[str]:
    """Returns a sentence if the default learning rates or weight decays of methods differ and are not set."""
    cells, found = _first_point(experiment), dict[str, str]()
    for name in ("learning_rate", "weight_decay"):
        labels: dict[float, list[str]] = {}
        for cell in cells:
            if name in experiment.settings_of(cell.label) and name not in cell.sections.get("method", {}):
                labels.setdefault(getattr(cell.simulation.configuration(), name), []).append(cell.label)
        if len(labels) > 1 and experiment.tuned_setting != f"method.{name}":
            found[name] = ", ".join(f"{value:g} with {_some(of)}" for value, of in labels.items())
    if not found:
        return []
    options = " ".join(f"--set method.{name}=VALUE" for name in found)
    remedy = f"set {' and '.join(found)} in [method] of the file" if experiment.is_file else f"give compare {options}"
    differing = "; ".join(f"{name} is {of}" for name, of in found.items())
    return [f"Defaults differ between methods: {differing}. To set them alike, {remedy}."]


def _differing_networks(experiment: Experiment) -> list[str]:
    """Returns a sentence if the devices of some methods have other networks than those of others."""
    points: dict[str, dict[str, list[str]]] = {}
    cells = experiment.first_seed()
    for cell in cells:
        points.setdefault(cell.point, {}).setdefault(models_in_words(cell.simulation), []).append(cell.label)
    point, found = max(points.items(), key=lambda of: len(of[1]))
    if len(found) == 1:
        return []
    one = cells[0].simulation
    usual = DIGITS_MODELS[2] if one.dataset == "digits" and one.image_size is None else RESNET_MODELS[-1]
    differing = "; ".join(f"{_some(of)}: {models}" for models, of in found.items())
    models = f'models=["{(*one.model_paths, usual)[0]}"]'
    remedy = (
        f"set {models} in [simulation] of the file"
        if experiment.is_file
        else f"give compare --set 'simulation.{models}'"
    )
    where = f" ({point})" if point else ""
    return [f"Devices' networks differ between methods{where}: {differing}. To give all the same one, {remedy}."]


def _first_point(experiment: Experiment) -> list[Cell]:
    """Returns the cells of the first seed at the first grid point."""
    return [cell for cell in experiment.first_seed() if cell.point == next(iter(experiment.points))]


def _words_of(experiment: Experiment, labels: Sequence[str]) -> str:
    others = [label for label in experiment.methods if label not in labels]
    if len(labels) == 1 or (others and len(labels) <= 3):
        return _some(labels)
    return f"all but {_some(others)}" if others else "all methods"


def _some(labels: Sequence[str]) -> str:
    """Returns the labels in words; the first two and a number if they are many."""
    shown = labels if len(labels) <= 3 else [*labels[:2], f"{len(labels) - 2} others"]
    return " and ".join(shown)
