"""What came of a simulation: report.json, a figure, a table, and the exported models in one folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.local_training import Counts
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.run_config import RunConfig
from fleetdistill_server.simulation.datasets import Dataset
from fleetdistill_server.simulation.device import DeviceSpec
from fleetdistill_server.simulation.partition import Partition
from fleetdistill_server.simulation.plots import save_report_figure
from fleetdistill_server.simulation.settings import Simulation
from fleetdistill_server.store import Row, Store

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class DeviceReport:
    """One device's line. Accuracies are in [0, 1] on the global test part; `own` weighs classes as the device has them.

    Attributes:
        bytes_up, bytes_down: Everything that went over the link for it, tensors and envelopes.
        onnx_max_difference: Largest difference between a logit of onnxruntime's and of PyTorch's.
    """

    name: str
    model: str
    parameters: int
    samples: int
    accuracy_alone: float | None
    accuracy_fleet: float
    own_accuracy_alone: float | None
    own_accuracy_fleet: float
    bytes_up: int
    bytes_down: int
    onnx_file: str
    onnx_max_difference: float


@dataclass(frozen=True)
class FleetReport:
    """A simulation's outcome; what report.json holds."""

    method: str
    settings: dict[str, Any]
    link: str
    dataset: str
    partition: str
    partition_parameters: dict[str, Any]
    seed: int
    rounds: int
    seconds: float
    mean_accuracy_alone: float | None
    mean_accuracy_fleet: float
    mean_own_accuracy_alone: float | None
    mean_own_accuracy_fleet: float
    acknowledged_uploads: int
    used_uploads: int
    reported_uploads: int
    refused_uploads: int
    guards_fired: int
    devices: list[DeviceReport]
    accuracy_by_round: dict[str, list[float]]
    alone_accuracy_by_round: dict[str, list[float]]


def make_report(
    wanted: Simulation,
    store: Store,
    config: RunConfig,
    data: Dataset,
    split: Partition,
    specs: Sequence[DeviceSpec],
    alone: Mapping[str, list[Counts]],
    seconds: float,
) -> FleetReport:
    """Gathers the figures of a finished run and writes them under the simulation's `out`."""
    shares = split.class_counts(data.train_labels.numpy(), len(data.classes))
    curves = _curves(store, config.run.name, specs)
    devices = [
        _device_report(wanted.out, store, config.run.name, spec, shares[number], alone.get(spec.name))
        for number, spec in enumerate(specs)
    ]
    report = FleetReport(
        method=wanted.method,
        settings=asdict(config.method_config()),
        link=wanted.link,
        dataset=data.name,
        partition=split.kind,
        partition_parameters=dict(split.parameters),
        seed=wanted.seed,
        rounds=config.run.rounds,
        seconds=round(seconds, 2),
        mean_accuracy_alone=_mean([one.accuracy_alone for one in devices]),
        mean_accuracy_fleet=_mean([one.accuracy_fleet for one in devices]) or 0.0,
        mean_own_accuracy_alone=_mean([one.own_accuracy_alone for one in devices]),
        mean_own_accuracy_fleet=_mean([one.own_accuracy_fleet for one in devices]) or 0.0,
        **_upload_counts(store, config.run.name),
        guards_fired=sum(one["kind"].endswith("-guard") for one in store.events(config.run.name)),
        devices=devices,
        accuracy_by_round=curves,
        alone_accuracy_by_round={name: [one.accuracy for one in counts] for name, counts in alone.items()},
    )
    _write(wanted, report, data, split)
    return report


def _write(wanted: Simulation, report: FleetReport, data: Dataset, split: Partition) -> None:
    (wanted.out / "report.json").write_text(json.dumps(asdict(report), indent=1))
    save_report_figure(
        wanted.out / "fleet.png",
        labels=data.train_labels.numpy(),
        partition=split,
        class_names=data.classes,
        device_names=[f"{one.name} ({one.model})" for one in report.devices],
        rounds=list(range(1, report.rounds + 1)),
        fleet_by_device=report.accuracy_by_round,
        alone_by_device=report.alone_accuracy_by_round,
        title=f"{report.method} on {report.dataset}, seed {report.seed}, over {report.link}",
    )


def _device_report(
    out: Path, store: Store, run: str, spec: DeviceSpec, counts: np.ndarray, alone: list[Counts] | None
) -> DeviceReport:
    row = store.device(run, spec.name)
    assert row is not None  # the run is finished, so the device was there
    profile = contract_pb2.DeviceProfile.FromString(row["profile"])
    last = [one for one in store.figures(run, "accuracy", "test") if one["device"] == spec.name][-1]
    traffic = [one for one in store.traffic(run) if one["device"] == spec.name]
    exported = json.loads(spec.exported_file.read_text())
    return DeviceReport(
        name=spec.name,
        model=spec.model,
        parameters=profile.parameters,
        samples=profile.samples,
        accuracy_alone=alone[-1].accuracy if alone else None,
        accuracy_fleet=last["sum"] / last["count"],
        own_accuracy_alone=_own(counts, _rates_of_counts(alone[-1])) if alone else None,
        own_accuracy_fleet=_own(counts, _rates_of_figure(last)),
        bytes_up=_bytes(traffic, "up"),
        bytes_down=_bytes(traffic, "down"),
        onnx_file=_collect_model(out, spec),
        onnx_max_difference=exported["max_difference"],
    )


def _curves(store: Store, run: str, specs: Sequence[DeviceSpec]) -> dict[str, list[float]]:
    closed = [row["round"] for row in store.rounds(run) if row["status"] == "closed"]
    rates = {(r["device"], r["round"]): r["sum"] / r["count"] for r in store.figures(run, "accuracy", "test")}
    return {spec.name: [rates.get((spec.name, number), float("nan")) for number in closed] for spec in specs}


def _upload_counts(store: Store, run: str) -> dict[str, int]:
    uploads = store.uploads(run)
    by_status = {status: sum(one["status"] == status for one in uploads) for status in ("used", "reported")}
    return {
        "acknowledged_uploads": len(uploads),
        "used_uploads": by_status["used"],
        "reported_uploads": by_status["reported"],
        "refused_uploads": len(store.events(run, "refused")),
    }


def _rates_of_counts(counts: Counts) -> dict[int, float]:
    pairs = zip(counts.per_class_correct.tolist(), counts.per_class_count.tolist(), strict=True)
    return {label: correct / count for label, (correct, count) in enumerate(pairs) if count}


def _rates_of_figure(row: Row) -> dict[int, float]:
    return {int(label): correct / count for label, (correct, count) in json.loads(row["by_class"]).items()}


def _own(counts: np.ndarray, rates: Mapping[int, float]) -> float:
    """Accuracy on the device's own classes: per-class accuracy on the whole test part, weighted by its class shares."""
    return float(sum(counts[label] * rate for label, rate in rates.items()) / counts.sum())


def _bytes(traffic: Sequence[Row], direction: str) -> int:
    return sum(one["tensor_bytes"] + one["envelope_bytes"] for one in traffic if one["direction"] == direction)


def _collect_model(out: Path, spec: DeviceSpec) -> str:
    target = out / "onnx" / f"{spec.name}.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(spec.state_dir) / "model.onnx", target)
    return str(target.relative_to(out))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def report_table(report: FleetReport) -> Table:
    """The table that a person reads at the end; `ONNX` is the largest difference to PyTorch."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{report.method} on {report.dataset}: accuracy on the global test part, alone -> in the fleet"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("device", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("params", "samples", "alone -> fleet", "own classes", "up", "down", "ONNX"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in report.devices:
        table.add_row(
            one.name,
            one.model,
            f"{one.parameters:,}",
            f"{one.samples:,}",
            _arrow(one.accuracy_alone, one.accuracy_fleet),
            _arrow(one.own_accuracy_alone, one.own_accuracy_fleet),
            _size(one.bytes_up),
            _size(one.bytes_down),
            f"{one.onnx_max_difference:.0e}",
        )
    table.add_section()
    table.add_row(
        "mean",
        *("", "", f"{sum(one.samples for one in report.devices):,}"),
        _arrow(report.mean_accuracy_alone, report.mean_accuracy_fleet),
        _arrow(report.mean_own_accuracy_alone, report.mean_own_accuracy_fleet),
        _size(sum(one.bytes_up for one in report.devices) // len(report.devices)),
        _size(sum(one.bytes_down for one in report.devices) // len(report.devices)),
        "",
    )
    return table


def _arrow(before: float | None, after: float) -> str:
    return f"{after:.1%}" if before is None else f"{before:.1%} -> {after:.1%}"


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
