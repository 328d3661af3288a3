"""Builds the report of one simulated device and collects its exported models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fleetdistill.knowledge import GENERAL
from fleetdistill.training.model import parameter_count
from fleetdistill.training.onnx_file import cpu_session
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.data.datasets import Dataset
from fleetdistill_lab.simulation.report.comparison import total_bytes
from fleetdistill_lab.simulation.report.history import FleetHistory
from fleetdistill_lab.simulation.report.metrics import Ints, accuracy, confusion
from fleetdistill_lab.simulation.report.outcome import Outcome
from fleetdistill_lab.simulation.report.results import DeviceReport
from fleetdistill_lab.simulation.report.scores import in_class_mix
from fleetdistill_lab.simulation.spec.device import DeviceSpec, build_device_model
from fleetdistill_server.store.records import Traffic
from fleetdistill_server.views.expected import Expected

_BATCH = 1024


def device_report(
    done: Outcome, spec: DeviceSpec, samples_1c: Ints, own_traffic: Sequence[Traffic], estimates: Mapping[str, Expected]
) -> DeviceReport:
    """Builds the report of one device and copies its exported models to the simulation's `out`.

    Args:
        done: The simulation's data.
        spec: The device.
        samples_1c: `[1, C]`, the device's number of training samples of each class.
        own_traffic: Traffic of the device.
        estimates: Leave-one-out estimates of the devices that have them, by id.
    """
    trained_cc = done.history.devices[spec.name][-1]
    exported = json.loads(spec.exported_file.read_text()) if spec.exported_file.exists() else None
    onnx_file = _collect(done.wanted.out, spec, "model", spec.name) if exported else None
    fleet_cc = _confusion_in_use(done, spec.name, onnx_file)
    alone = done.controls.alone.get(spec.name)
    alone_cc = alone[-1].confusion if alone else None
    return DeviceReport(
        name=spec.name,
        model=spec.model,
        parameters=_parameters(done, spec),
        samples=spec.rows,
        accuracy_alone=accuracy_or_none(alone_cc),
        accuracy_fleet=accuracy(fleet_cc),
        own_accuracy_alone=None if alone_cc is None else _own(alone_cc, samples_1c),
        own_accuracy_fleet=_own(fleet_cc, samples_1c),
        accuracy_trained=accuracy(trained_cc),
        own_accuracy_trained=_own(trained_cc, samples_1c),
        bytes_up=total_bytes(own_traffic, "up"),
        bytes_down=total_bytes(own_traffic, "down"),
        sent_up=_sent(own_traffic, "up"),
        sent_down=_sent(own_traffic, "down"),
        onnx_file=onnx_file,
        onnx_max_difference=exported["max_difference"] if exported else None,
        onnx_answers={
            variant: _collect(done.wanted.out, spec, variant, f"{spec.name}-{variant}")
            for variant in (GENERAL, *done.history.further)
            if (Path(spec.state_dir) / f"{variant}.onnx").exists()
        },
        further=_further(done.history, spec.name, samples_1c),
        samples_by_class=samples_1c[0].tolist(),
        leave_one_out=estimates[spec.name].rates if spec.name in estimates else None,
        own_statistics_kept=estimates[spec.name].own_statistics_kept if spec.name in estimates else None,
    )


def _parameters(done: Outcome, spec: DeviceSpec) -> int:
    """Returns the number of the model's parameters, from the device's check-in if it has joined."""
    known = done.store.devices.get(done.run, spec.name)
    if known is None:
        return parameter_count(build_device_model(spec, tuple(done.data.train_images.shape[1:])))
    return contract_pb2.DeviceProfile.FromString(known.profile).parameters


def _confusion_in_use(done: Outcome, device: str, onnx_file: str | None) -> Ints:
    """Returns the confusion matrix of a device's exported model, or of the model that it would receive next."""
    trained_cc = done.history.devices[device][-1]
    if any(device in of for of in done.history.further.values()):
        return trained_cc
    if onnx_file is None:
        return done.history.products[device][-1] if done.history.products else trained_cc
    return _confusion_of_file(done.wanted.out / onnx_file, done.data)


def _confusion_of_file(file: Path, data: Dataset) -> Ints:
    """Returns an exported model's confusion matrix on the test set, computed with onnxruntime."""
    session = cpu_session(str(file))
    parts = data.test_images.split(_BATCH)
    predictions = [session.run(["logits"], {"input": part.numpy()})[0].argmax(axis=1) for part in parts]
    return confusion(data.test_labels.numpy(), np.concatenate(predictions), len(data.classes))


def _further(history: FleetHistory, device: str, samples_1c: Ints) -> dict[str, dict[str, float]]:
    """Returns the figures of a device's further variants."""
    return {
        variant: _further_figures(of[device][-1], samples_1c) for variant, of in history.further.items() if device in of
    }


def _further_figures(counts_cc: Ints | None, samples_1c: Ints) -> dict[str, float]:
    assert counts_cc is not None  # a device that has a variant keeps it
    return {"accuracy": accuracy(counts_cc), "own_accuracy": _own(counts_cc, samples_1c)}


def accuracy_or_none(counts_cc: Ints | None) -> float | None:
    """Returns the accuracy of a confusion matrix; None if there is no matrix."""
    return None if counts_cc is None else accuracy(counts_cc)


def _own(counts_cc: Ints, samples_1c: Ints) -> float:
    """Returns the accuracy on the global test set with classes weighted by the device's samples."""
    return accuracy(in_class_mix(counts_cc, samples_1c)[0])


def _sent(traffic: Sequence[Traffic], direction: str) -> int:
    return sum(sent.sent_bytes for sent in traffic if sent.direction == direction)


def _collect(out: Path, spec: DeviceSpec, model: str, name: str) -> str:
    target = out / "onnx" / f"{name}.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(spec.state_dir) / f"{model}.onnx", target)
    return str(target.relative_to(out))
