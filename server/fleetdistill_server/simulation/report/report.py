"""What came of a simulation: report.json, a figure, a table, and the exported models in one folder."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.knowledge import GENERAL
from fleetdistill.training.figures import Counts
from fleetdistill.training.onnx_file import cpu_session
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.simulation.data.datasets import Dataset
from fleetdistill_server.simulation.data.partition import Partition
from fleetdistill_server.simulation.report.comparison import (
    Candidate,
    ComparisonRow,
    Cost,
    Curve,
    candidates,
    cost_of,
    total_bytes,
    trained_alone,
)
from fleetdistill_server.simulation.report.controls import Controls, FedAvgControl
from fleetdistill_server.simulation.report.device_plots import DeviceCurves
from fleetdistill_server.simulation.report.history import FleetHistory
from fleetdistill_server.simulation.report.metrics import Ints, accuracy, confusion
from fleetdistill_server.simulation.report.plots import save_report_figure
from fleetdistill_server.simulation.report.scores import (
    Figures,
    FleetFigures,
    fleet_figures,
    in_class_mix,
    late_figures,
)
from fleetdistill_server.simulation.spec.device import DeviceSpec
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.store.guards import guard_events, verdict_rows, verdicts
from fleetdistill_server.store.store import Row, Store
from fleetdistill_server.views.expected import Expected, expected, of_the_fleet
from fleetdistill_server.views.suspects import named
from fleetdistill_server.views.units import readable_bytes

if TYPE_CHECKING:
    from rich.table import Table

_BATCH = 1024


@dataclass(frozen=True)
class DeviceReport:
    """One device's line. Accuracies are in [0, 1] on the global test part; `own` weighs classes as the device has them.

    Attributes:
        accuracy_fleet, own_accuracy_fleet: Of the model in `onnx_file`, measured on that file; of the general answer
            where the device has several. Before the run is over, of what the device would be delivered.
        accuracy_trained, own_accuracy_trained: Of its model after its last local training, which fedavg, feddkd and
            dafkd then replace by the fleet's. For FedDKD_BN, whose models are complete on the devices only, of the
            fleet's layers with the device's own batch-norm.
        bytes_up, bytes_down: Everything that went over the link for it, tensors and envelopes, before packing.
        sent_up, sent_down: The same as it travelled.
        onnx_file: The model that its app uses, under the simulation's `out`; None before the run is over.
        onnx_max_difference: Largest difference between a logit of onnxruntime's and of PyTorch's, of all its files.
        onnx_answers: The file of each answer, where the app has several: `general`, then the further ones.
        further: For each further answer of the device, such as classstats' `personal`, `accuracy` and `own_accuracy`.
            The device's other figures are those of its general answer.
        samples_by_class: Training samples of each class, in label order.
        leave_one_out: What the device expects of its answers, `general` and `personal`, on unseen data with its mix of
            classes, without held-out data: the share of own rows that they get right, left out. None where a method
            has no such figure.
        own_statistics_kept: Whether its personal answer is made of its own statistics alone, which were better; None
            where a method has no such choice.
    """

    name: str
    model: str
    parameters: int
    samples: int
    accuracy_alone: float | None
    accuracy_fleet: float
    own_accuracy_alone: float | None
    own_accuracy_fleet: float
    accuracy_trained: float
    own_accuracy_trained: float
    bytes_up: int
    bytes_down: int
    sent_up: int
    sent_down: int
    onnx_file: str | None
    onnx_max_difference: float | None
    onnx_answers: dict[str, str]
    further: dict[str, dict[str, float]]
    samples_by_class: list[int]
    leave_one_out: dict[str, float] | None
    own_statistics_kept: bool | None


@dataclass(frozen=True)
class FleetReport:
    """A simulation's outcome; what report.json holds.

    Attributes:
        rounds, completed_rounds: Wanted, and done; the figures are those after the last completed one.
        finished: False where the simulation was interrupted; then controls that are not complete are missing, and the
            devices have exported no models.
        seconds: How long it took, controls included, since its last start.
        mean_accuracy_fedavg_global: FedAvg's global model on the global test part, the control of the comparison.
        mean_accuracy_fedavg_device: FedAvg's device models after local training there, mean over devices.
        mean_accuracy_fleet, mean_accuracy_trained: Of the devices' figures of these names.
        mean_own_accuracy_alone, mean_own_accuracy_fleet, mean_own_accuracy_trained, mean_own_accuracy_fedavg_device:
            Means on own classes, over the devices that have samples of a class of the test part; None without any.
            All but that of `fleet` are C-Spec in accuracy.
        fedavg_model: The model that every device has in this control: the largest of the fleet's.
        fedavg_settings: FedAvg's settings in it.
        scores: `fleet`, `alone` and `fedavg`, each with CDKT-FL's figures after the last round; see
            `scores.fleet_figures`.
        figures_by_round: CDKT-FL's figures of the fleet after each round, in accuracy; of devices' models as in
            `accuracy_trained`.
        delivered_accuracy_by_round: Device -> accuracy of the model that it would be delivered after each round; empty
            for methods whose devices keep what they train, which is in `accuracy_by_round`.
        late: What papers report of a fleet's last rounds, in accuracy; see `scores.late_figures`.
        bytes_by_round: For each completed round what a device sent (`up`) and was sent (`down`), tensors and envelopes,
            mean over all devices. Rounds that fell short, initial weights and the proxy set count with the completed
            round after them, the end result with the last round, so that the sum is everything.
        traffic: Bytes by round, device, direction and kind of part, as they are and as they travelled (`sent_bytes`);
            the headers' kind is "envelope".
        further: For each further answer of the devices `accuracy` and `own_accuracy`, means over those that have it.
        hostile, attack: How many devices, the first ones, were hostile, and what they did.
        named: Devices that the server named, each with the kinds of the events; see `suspects.named`.
        guards_fired: How often a guard of the method acted.
        models_kept, models_replaced: Verdicts of devices on their apps' models; 0 without `validation_share`.
        further_accuracy_by_round: Answer -> device -> those of a further answer; None in the rounds before it had it.
        global_accuracy_by_round: The global model's on the global test part; None where there is none to be scored.
        alone_accuracy_by_round: Those of devices that train alone, one a round of the controls: more than the run has
            where it has one exchange (`control_rounds`).
        class_names: In label order.
        proxy_per_class: Training images of each class that were held out as the proxy set.
        control_rounds: Rounds of the controls.
        leave_one_out: As `DeviceReport.leave_one_out`, over the rows of all devices.
        comparison: Alone, the method and FedAvg, answer by answer; see `comparison.ComparisonRow`.
        curves: Their accuracy against bytes; see `comparison.Curve`.
    """

    method: str
    settings: dict[str, Any]
    link: str
    dataset: str
    partition: str
    partition_parameters: dict[str, Any]
    seed: int
    rounds: int
    completed_rounds: int
    finished: bool
    seconds: float
    mean_accuracy_alone: float | None
    mean_accuracy_fleet: float
    mean_accuracy_trained: float
    mean_own_accuracy_alone: float | None
    mean_own_accuracy_fleet: float | None
    mean_own_accuracy_trained: float | None
    mean_accuracy_fedavg_global: float | None
    mean_accuracy_fedavg_device: float | None
    mean_own_accuracy_fedavg_device: float | None
    fedavg_model: str | None
    fedavg_settings: dict[str, Any] | None
    scores: dict[str, FleetFigures]
    figures_by_round: list[Figures]
    late: Figures
    further: dict[str, dict[str, float]]
    bytes_by_round: list[dict[str, float]]
    traffic: list[dict[str, Any]]
    acknowledged_uploads: int
    used_uploads: int
    reported_uploads: int
    refused_uploads: int
    hostile: int
    attack: str
    named: dict[str, list[str]]
    guards_fired: int
    models_kept: int
    models_replaced: int
    devices: list[DeviceReport]
    accuracy_by_round: dict[str, list[float]]
    delivered_accuracy_by_round: dict[str, list[float]]
    further_accuracy_by_round: dict[str, dict[str, list[float | None]]]
    global_accuracy_by_round: list[float | None]
    alone_accuracy_by_round: dict[str, list[float]]
    class_names: list[str]
    proxy_per_class: int
    control_rounds: int
    leave_one_out: dict[str, float] | None
    comparison: list[ComparisonRow]
    curves: list[Curve]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A simulation, as its report needs it: finished, or interrupted after at least one round.

    Attributes:
        controls: Those that are complete.
        seconds: How long it took with its controls, since its last start.
        finished: False where it was interrupted.
    """

    wanted: Simulation
    store: Store
    config: RunConfig
    data: Dataset
    split: Partition
    specs: Sequence[DeviceSpec]
    history: FleetHistory
    controls: Controls
    seconds: float
    finished: bool = True

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.config.run.name


def make_report(done: Outcome) -> FleetReport:
    """Gathers the figures of the completed rounds and writes them under the simulation's `out`."""
    history, alone = done.history, done.controls.alone
    shares = done.split.class_counts(done.data.train_labels.numpy(), len(done.data.classes))
    traffic, told = done.store.traffic(done.run), expected(done.store, done.run)
    devices = [_device_report(done, spec, shares[[number]], traffic, told) for number, spec in enumerate(done.specs)]
    scores, cost = _scores(history, shares, done.controls), cost_of(done.store, done.run, len(devices))
    compared = _compared(done, shares, cost)
    by_round = history.figures(shares)
    app_models = verdicts(verdict_rows(done.store, done.run))
    report = FleetReport(
        method=done.wanted.method,
        settings=asdict(done.config.method_config()),
        link=done.wanted.link,
        dataset=done.data.name,
        partition=done.split.kind,
        partition_parameters=dict(done.split.parameters),
        seed=done.wanted.seed,
        rounds=done.config.run.rounds,
        completed_rounds=len(by_round),
        finished=done.finished,
        seconds=round(done.seconds, 2),
        mean_accuracy_alone=statistics.mean(one[-1].accuracy for one in alone.values()) if alone else None,
        mean_accuracy_fleet=statistics.mean(one.accuracy_fleet for one in devices),
        mean_accuracy_trained=statistics.mean(one.accuracy_trained for one in devices),
        mean_own_accuracy_alone=_c_spec(scores, "alone"),
        mean_own_accuracy_fleet=_mean_where_known([one.own_accuracy_fleet for one in devices]),
        mean_own_accuracy_trained=_c_spec(scores, "fleet"),
        mean_own_accuracy_fedavg_device=_c_spec(scores, "fedavg"),
        **_fedavg_figures(done.controls.fedavg),
        scores=scores,
        figures_by_round=by_round,
        late=late_figures(by_round),
        further=_mean_further(devices),
        bytes_by_round=cost.bytes_by_round,
        traffic=[_traffic_row(one) for one in done.store.traffic_by_kind(done.run)],
        **_upload_counts(done.store, done.run),
        hostile=done.wanted.hostile,
        attack=done.wanted.attack,
        named=named(done.store, done.run),
        guards_fired=len(guard_events(done.store, done.run)),
        models_kept=app_models.kept,
        models_replaced=app_models.replaced,
        devices=devices,
        accuracy_by_round={name: [accuracy(one) for one in counts] for name, counts in history.devices.items()},
        delivered_accuracy_by_round={
            name: [accuracy(one) for one in counts] for name, counts in history.products.items()
        },
        further_accuracy_by_round={
            answer: {name: [_accuracy(one) for one in counts] for name, counts in of.items()}
            for answer, of in history.further.items()
        },
        global_accuracy_by_round=[_accuracy(counts) for counts in history.server],
        alone_accuracy_by_round={name: [one.accuracy for one in counts] for name, counts in alone.items()},
        class_names=list(done.data.classes),
        proxy_per_class=done.wanted.proxy_per_class or 0,
        control_rounds=done.wanted.rounds_of_controls,
        leave_one_out=of_the_fleet(told.values()),
        comparison=[*_alone_row(alone, shares), *(one.row() for one in compared)],
        curves=[one.curve() for one in compared],
    )
    write_report(report, done.wanted.out)
    return report


def write_report(report: FleetReport, out: Path) -> None:
    """Writes report.json and fleet.png."""
    (out / "report.json").write_text(json.dumps(asdict(report), indent=1))
    save_report_figure(
        out / "fleet.png",
        counts_jc=[one.samples_by_class for one in report.devices],
        class_names=report.class_names,
        device_names=[f"{one.name} ({one.model})" for one in report.devices],
        partition=_described(report),
        curves=report.curves,
        by_device=_by_device(report),
        alone=report.mean_accuracy_alone,
        title=f"{report.method} on {report.dataset}, seed {report.seed}, over {report.link}",
    )


def _by_device(report: FleetReport) -> DeviceCurves:
    rounds = report.completed_rounds
    alone = list(report.alone_accuracy_by_round.values())
    fedavg = next((one.accuracy for one in report.curves if one.name == "FedAvg global"), [])
    controls = {
        "alone, mean": [statistics.mean(rates) for rates in zip(*alone, strict=True)],
        "FedAvg global": fedavg,
        "global model": [] if report.method == "fedavg" else report.global_accuracy_by_round,
    }
    return DeviceCurves(
        devices=report.accuracy_by_round,
        controls={
            name: rates[:rounds]
            for name, rates in controls.items()
            if len(rates) >= rounds and any(rate is not None for rate in rates)
        },
        alone={one.name: one.accuracy_alone for one in report.devices if one.accuracy_alone is not None},
        further={
            answer: {one.name: one.further[answer]["accuracy"] for one in report.devices if answer in one.further}
            for answer in report.further
        },
    )


def _described(report: FleetReport) -> str:
    given = report.partition_parameters
    return ", ".join([report.partition, *(f"{name} {given[name]}" for name in ("alpha", "seed") if name in given)])


def _compared(done: Outcome, samples_jc: Ints, cost: Cost) -> list[Candidate]:
    """The method, and FedAvg where that is another one."""
    own = candidates(done.wanted.method, done.history, samples_jc, cost)
    fedavg = done.controls.fedavg
    if fedavg is None or done.wanted.method == "fedavg":
        return own
    return [*own, *candidates("fedavg", fedavg.history, samples_jc, fedavg.cost)]


def _alone_row(alone: Mapping[str, Sequence[Counts]], samples_jc: Ints) -> list[ComparisonRow]:
    counts_kr = [[counts.confusion for counts in of] for of in alone.values()]
    return [trained_alone(counts_kr, samples_jc).row()] if alone else []


def _device_report(
    done: Outcome, spec: DeviceSpec, samples_1c: Ints, traffic: Sequence[Row], told: Mapping[str, Expected]
) -> DeviceReport:
    row = done.store.device(done.run, spec.name)
    assert row is not None  # the run is finished, so the device was there
    profile = contract_pb2.DeviceProfile.FromString(row["profile"])
    trained_cc = done.history.devices[spec.name][-1]
    exported = json.loads(spec.exported_file.read_text()) if spec.exported_file.exists() else None
    onnx_file = _collect(done.wanted.out, spec, "model", spec.name) if exported else None
    fleet_cc = _confusion_in_use(done, spec.name, onnx_file)
    alone = done.controls.alone.get(spec.name)
    alone_cc = alone[-1].confusion if alone else None
    own_traffic = [one for one in traffic if one["device"] == spec.name]
    return DeviceReport(
        name=spec.name,
        model=spec.model,
        parameters=profile.parameters,
        samples=profile.samples,
        accuracy_alone=_accuracy(alone_cc),
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
            answer: _collect(done.wanted.out, spec, answer, f"{spec.name}-{answer}")
            for answer in (GENERAL, *done.history.further)
            if (Path(spec.state_dir) / f"{answer}.onnx").exists()
        },
        further=_further(done.history, spec.name, samples_1c),
        samples_by_class=samples_1c[0].tolist(),
        leave_one_out=told[spec.name].rates if spec.name in told else None,
        own_statistics_kept=told[spec.name].own_statistics_kept if spec.name in told else None,
    )


def _confusion_in_use(done: Outcome, device: str, onnx_file: str | None) -> Ints:
    """Of the exported model; before there is one, of what the device would be delivered."""
    trained_cc = done.history.devices[device][-1]
    if any(device in of for of in done.history.further.values()):
        return trained_cc
    if onnx_file is None:
        return done.history.products[device][-1] if done.history.products else trained_cc
    return _confusion_of_file(done.wanted.out / onnx_file, done.data)


def _confusion_of_file(file: Path, data: Dataset) -> Ints:
    """What an exported model answers on the test part, as onnxruntime runs it."""
    session = cpu_session(str(file))
    parts = data.test_images.split(_BATCH)
    answers = [session.run(["logits"], {"input": part.numpy()})[0].argmax(axis=1) for part in parts]
    return confusion(data.test_labels.numpy(), np.concatenate(answers), len(data.classes))


def _mean_where_known(rates: Sequence[float]) -> float | None:
    known = [rate for rate in rates if not math.isnan(rate)]
    return statistics.mean(known) if known else None


def _further(history: FleetHistory, device: str, samples_1c: Ints) -> dict[str, dict[str, float]]:
    """Figures of the further answers that a device has."""
    return {
        answer: _further_figures(of[device][-1], samples_1c) for answer, of in history.further.items() if device in of
    }


def _further_figures(counts_cc: Ints | None, samples_1c: Ints) -> dict[str, float]:
    assert counts_cc is not None  # a device that has an answer keeps it
    return {"accuracy": accuracy(counts_cc), "own_accuracy": _own(counts_cc, samples_1c)}


def _mean_further(devices: Sequence[DeviceReport]) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(answer for one in devices for answer in one.further)
    return {
        answer: {
            figure: statistics.mean(one.further[answer][figure] for one in devices if answer in one.further)
            for figure in ("accuracy", "own_accuracy")
        }
        for answer in names
    }


def _fedavg_figures(fedavg: FedAvgControl | None) -> dict[str, Any]:
    if fedavg is None:
        names = ("mean_accuracy_fedavg_global", "mean_accuracy_fedavg_device", "fedavg_model", "fedavg_settings")
        return dict.fromkeys(names)
    history = fedavg.history
    return {
        "mean_accuracy_fedavg_global": _accuracy(history.server[-1]),
        "mean_accuracy_fedavg_device": statistics.mean(accuracy(counts) for counts in history.last()),
        "fedavg_model": fedavg.model,
        "fedavg_settings": fedavg.settings,
    }


def _c_spec(scores: Mapping[str, FleetFigures], control: str) -> float | None:
    """The mean accuracy on own classes, where there is the control."""
    return scores[control]["accuracy"]["c_spec"] if control in scores else None


def _scores(history: FleetHistory, samples_jc: Ints, controls: Controls) -> dict[str, FleetFigures]:
    def last(one: FleetHistory) -> FleetFigures:
        return fleet_figures(one.last(), samples_jc, one.server[-1])

    found = {"fleet": last(history)}
    if controls.alone:
        alone_kcc = [controls.alone[name][-1].confusion for name in history.devices]
        found["alone"] = fleet_figures(alone_kcc, samples_jc, None)
    if controls.fedavg is not None:
        found["fedavg"] = last(controls.fedavg.history)
    return found


def _upload_counts(store: Store, run: str) -> dict[str, Any]:
    uploads = store.uploads(run)
    by_status = {status: sum(one["status"] == status for one in uploads) for status in ("used", "reported")}
    return {
        "acknowledged_uploads": len(uploads),
        "used_uploads": by_status["used"],
        "reported_uploads": by_status["reported"],
        "refused_uploads": len(store.events(run, "refused")),
    }


def _accuracy(counts_cc: Ints | None) -> float | None:
    return None if counts_cc is None else accuracy(counts_cc)


def _own(counts_cc: Ints, samples_1c: Ints) -> float:
    """Accuracy on the device's own classes: on the global test part in the device's mix of classes."""
    return accuracy(in_class_mix(counts_cc, samples_1c)[0])


def _sent(traffic: Sequence[Row], direction: str) -> int:
    return sum(one["sent_bytes"] for one in traffic if one["direction"] == direction)


def _traffic_row(row: Row) -> dict[str, Any]:
    names = ("round", "device", "direction", "kind", "payloads", "tensor_bytes", "envelope_bytes", "sent_bytes")
    return {name: row[name] for name in names}


def _collect(out: Path, spec: DeviceSpec, model: str, name: str) -> str:
    target = out / "onnx" / f"{name}.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(spec.state_dir) / f"{model}.onnx", target)
    return str(target.relative_to(out))


def report_table(report: FleetReport) -> Table:
    """The table that a person reads at the end; `ONNX` is the largest difference to PyTorch.

    A device's line has the figures of its general answer; each further one has a line below with its own.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{report.method} on {report.dataset}: accuracy on the global test part, alone -> in the fleet"
    # The lines of further answers are read together with those above, so all columns must fit: 100 characters.
    narrow: dict[str, Any] = {"padding": (0, 1, 0, 0), "show_edge": False, "pad_edge": False}
    layout = narrow if report.further else {"padding": (0, 1)}
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, **layout)
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
            readable_bytes(one.bytes_up),
            readable_bytes(one.bytes_down),
            "" if one.onnx_max_difference is None else f"{one.onnx_max_difference:.0e}",
        )
        _add_further(table, one.further)
    table.add_section()
    table.add_row(
        "mean",
        *("", "", f"{sum(one.samples for one in report.devices):,}"),
        _arrow(report.mean_accuracy_alone, report.mean_accuracy_fleet),
        _arrow(report.mean_own_accuracy_alone, report.mean_own_accuracy_fleet),
        readable_bytes(sum(one.bytes_up for one in report.devices) // len(report.devices)),
        readable_bytes(sum(one.bytes_down for one in report.devices) // len(report.devices)),
        "",
    )
    _add_further(table, report.further)
    return table


def _add_further(table: Table, further: Mapping[str, Mapping[str, float]]) -> None:
    for answer, figures in further.items():
        rates = (figures["accuracy"], figures["own_accuracy"])
        table.add_row("", f" {answer} answer", "", "", *(f"{rate:.1%}" for rate in rates))


def _arrow(before: float | None, after: float | None) -> str:
    return " -> ".join(f"{one:.1%}" for one in (before, after) if one is not None)
