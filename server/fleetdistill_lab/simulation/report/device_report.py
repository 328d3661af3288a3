"""Builds the report of one simulated device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fleetdistill.training.figures import Confusion
from fleetdistill.training.model import parameter_count
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.report.history import FleetHistory
from fleetdistill_lab.simulation.report.metrics import Ints, accuracy, accuracy_or_none
from fleetdistill_lab.simulation.report.outcome import Outcome
from fleetdistill_lab.simulation.report.results import DeviceReport, VariantRates
from fleetdistill_lab.simulation.report.scores import margins_in_mix
from fleetdistill_lab.simulation.spec.arrays import split_slice
from fleetdistill_lab.simulation.spec.device import DeviceSpec, build_device_model
from fleetdistill_server.views.expected import Expected


class DeviceBytes(NamedTuple):
    """Bytes of a device, uncompressed and on the wire; fields of `DeviceReport`."""

    bytes_up: int = 0
    bytes_down: int = 0
    sent_up: int = 0
    sent_down: int = 0


def device_report(
    done: Outcome,
    spec: DeviceSpec,
    parameters: int,
    samples_1c: Ints,
    traffic: DeviceBytes,
    estimates: Mapping[str, Expected],
) -> DeviceReport:
    """Builds the report of one device.

    Args:
        done: The simulation's data.
        spec: The device.
        parameters: Number of its model's parameters.
        samples_1c: `[1, C]`, the device's number of training samples of each class.
        traffic: Bytes of the device.
        estimates: Leave-one-out estimates of the devices that have them, by id.
    """
    name, history, own = spec.name, done.history, done.history.own
    trained, fleet = last_matrices(history, name)
    own_trained, own_fleet = (None, None) if own is None else last_matrices(own, name)
    top_trained, top_fleet = (None, None) if done.top_k is None else last_matrices(done.top_k, name)
    alone = done.controls.alone.get(spec.name)
    last_alone = alone[-1].confusion if alone and alone[-1] is not None else None
    exported = done.exports.get(spec.name)
    return DeviceReport(
        name=spec.name,
        model=spec.model,
        parameters=parameters,
        samples=spec.rows,
        took_part=any(history.took_part[name]),
        own_test_rows=None if history.own is None else _rows_of(spec.own_test_file),
        accuracy_alone=accuracy_or_none(last_alone),
        accuracy_fleet=accuracy_or_none(fleet),
        own_accuracy_alone=_own(history, last_alone, samples_1c, own.alone.get(name) if own else None),
        own_accuracy_fleet=_own(history, fleet, samples_1c, own_fleet),
        accuracy_trained=accuracy_or_none(trained),
        own_accuracy_trained=_own(history, trained, samples_1c, own_trained),
        top_k_alone=accuracy_or_none(done.top_k_alone.get(spec.name)) if alone else None,
        top_k_fleet=accuracy_or_none(top_fleet),
        top_k_trained=accuracy_or_none(top_trained),
        **traffic._asdict(),
        onnx_file=exported.file if exported else None,
        onnx_max_difference=exported.max_difference if exported else None,
        onnx_answers=dict(exported.variants) if exported else {},
        further=_further(done.history, spec.name, samples_1c),
        samples_by_class=samples_1c[0].tolist(),
        leave_one_out=estimates[spec.name].rates if spec.name in estimates else None,
        own_statistics_kept=estimates[spec.name].own_statistics_kept if spec.name in estimates else None,
    )


def last_matrices(history: FleetHistory, device: str) -> tuple[Confusion | None, Confusion | None]:
    """Returns the confusion matrices of a device's model after its last training, and of the model of its app."""
    trained, fleet = history.devices[device][-1], history.delivered.get(device)
    if fleet is None:  # before the end, or it is the model of the last training
        fleet = history.products[device][-1] if history.products else trained
    return trained, fleet


def _rows_of(file: str) -> int:
    """Returns the number of rows in the name of some rows of a file; 0 for an empty name."""
    rows = split_slice(file)[1]
    return rows.stop - rows.start if file else 0


def parameters_of(done: Outcome) -> dict[str, int]:
    """Returns the number of each model's parameters, from the check-in of its first device if that has joined."""
    first = {spec.model: spec for spec in reversed(done.specs)}
    return {model: _parameters(done, spec) for model, spec in first.items()}


def _parameters(done: Outcome, spec: DeviceSpec) -> int:
    known = done.store.devices.get(done.run, spec.name)
    if known is None:
        return parameter_count(build_device_model(spec, tuple(done.data.train_images.shape[1:])))
    return contract_pb2.DeviceProfile.FromString(known.profile).parameters


def _further(history: FleetHistory, device: str, samples_1c: Ints) -> dict[str, VariantRates]:
    """Returns the figures of a device's further variants."""
    result: dict[str, VariantRates] = {}
    for variant, of in history.further.items():
        counts = of[device][-1] if device in of else None
        if counts is not None:
            own = history.own.last_further(variant, device) if history.own else None
            result[variant] = {
                "accuracy": accuracy(counts),
                "own_accuracy": _own(history, counts, samples_1c, own),
            }
    return result


def _own(history: FleetHistory, counts: Confusion | None, samples_1c: Ints, own: Confusion | None) -> float | None:
    """Returns a model's accuracy on the device's own test rows, or without such rows with classes weighted by samples.

    Args:
        history: History of the run.
        counts: The model's matrix on the test set; None if it was not scored.
        samples_1c: As in `device_report`.
        own: The model's matrix on the device's own test rows; None without such rows.
    """
    if counts is None:
        return None
    if history.own is not None:
        return accuracy_or_none(own)
    return accuracy(margins_in_mix(counts, samples_1c).part(0))
