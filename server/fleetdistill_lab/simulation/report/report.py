"""Builds a simulation's report, and writes report.json and the figure."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fleetdistill.methods import config_class
from fleetdistill.methods.classstats_private.merge import much_noise, other_dimensions, strength
from fleetdistill.methods.local import LocalTraining
from fleetdistill.training.figures import Confusion, Counts
from fleetdistill_lab.simulation.report.comparison import (
    NAMES,
    Candidate,
    ComparisonRow,
    candidates,
    local_only,
)
from fleetdistill_lab.simulation.report.device_plots import DeviceCurves
from fleetdistill_lab.simulation.report.device_report import DeviceBytes, device_report, last_matrices, parameters_of
from fleetdistill_lab.simulation.report.history import FleetHistory, OwnHistory
from fleetdistill_lab.simulation.report.metrics import (
    Ints,
    accuracy_by_class,
    accuracy_or_none,
    f1_macro,
    f1_weighted,
    fairness_of,
)
from fleetdistill_lab.simulation.report.outcome import Controls, FedAvgControl, Outcome
from fleetdistill_lab.simulation.report.plots import FIGURES, save_report_figure
from fleetdistill_lab.simulation.report.results import (
    DeviceReport,
    FleetReport,
    PrivacyReport,
    Scored,
    TrafficRow,
    VariantRates,
)
from fleetdistill_lab.simulation.report.scores import FleetFigures, fleet_figures, late_figures, summaries
from fleetdistill_lab.simulation.report.simulated_time import simulated_times
from fleetdistill_server.store.run_figures import RoundFigures, round_figures
from fleetdistill_server.store.states import RoundStatus, UploadStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY
from fleetdistill_server.texts import SUMS_UNREVIEWED, counted
from fleetdistill_server.views.expected import expected, of_the_fleet
from fleetdistill_server.views.runs import named


def make_report(done: Outcome) -> FleetReport:
    """Builds the report of the completed rounds and writes it to the simulation's `out`."""
    shares = done.split.class_counts(done.data.train_labels.numpy(), len(done.data.classes))
    estimates = expected(done.store, done.run)
    traffic, parameters = _bytes_by_device(done.store, done.run), parameters_of(done)
    devices = [
        device_report(
            done, spec, parameters[spec.model], shares[[row]], traffic.get(spec.name, DeviceBytes()), estimates
        )
        for row, spec in enumerate(done.specs)
    ]
    left_out = _left_out(devices, done.wanted.score)
    counted = [device for device in devices if device.name not in left_out]
    scores = _scores(done.history, shares, done.controls, left_out)
    by_round = done.history.figures(shares)
    figures = round_figures(done.store.database, done.run)
    report = FleetReport(
        **_settings(done),
        completed_rounds=len(by_round),
        finished=done.finished,
        seconds=round(done.seconds, 2),
        **_mean_accuracies(counted, scores),
        **_scores_at_the_end(done.history, counted),
        **_fedavg_figures(done.controls.fedavg),
        scores=scores,
        figures_by_round=by_round,
        counted_by_round=done.history.counted(),
        late=late_figures(by_round),
        summaries=summaries(by_round),
        further=_mean_further(counted),
        bytes_by_round=done.cost.bytes_by_round,
        traffic=_total_traffic(done.store, done.run),
        **_upload_counts(done.store, done.run),
        **_protection(done.store, done.run, figures),
        devices=devices,
        privacy=_privacy(done.config.method_config(), devices),
        **_accuracies_by_round(done.history, done.controls.alone),
        global_accuracy_by_round=[
            figure.global_accuracy for figure in figures if figure.round.status is RoundStatus.CLOSED
        ],
        leave_one_out=of_the_fleet(estimates.values()),
        **_comparison(done, shares, left_out),
        simulated_time=simulated_times(done),
    )
    write_report(report, done.wanted.out, done.wanted.figure, done.wanted.panels)
    for kind in FIGURES:
        if kind != done.wanted.figure:  # of an interrupted simulation, which has been resumed with another type
            (done.wanted.out / f"fleet.{kind}").unlink(missing_ok=True)
    return report


def _bytes_by_device(store: Store, run: str) -> dict[str, DeviceBytes]:
    result: dict[str, DeviceBytes] = {}
    for sent in store.history.traffic(run):
        up, down, sent_up, sent_down = result.get(sent.device, DeviceBytes())
        if sent.direction == "up":
            up, sent_up = up + sent.uncompressed_bytes, sent_up + sent.sent_bytes
        else:
            down, sent_down = down + sent.uncompressed_bytes, sent_down + sent.sent_bytes
        result[sent.device] = DeviceBytes(up, down, sent_up, sent_down)
    return result


def _total_traffic(store: Store, run: str) -> list[TrafficRow]:
    return [
        {
            "round": sent.round,
            "direction": sent.direction,
            "kind": sent.kind,
            "payloads": sent.payloads,
            "tensor_bytes": sent.tensor_bytes,
            "envelope_bytes": sent.envelope_bytes,
            "sent_bytes": sent.sent_bytes,
        }
        for sent in store.history.total_traffic(run)
    ]


def _settings(done: Outcome) -> dict[str, Any]:
    """Returns the report's fields that follow from the simulation's settings and data."""
    return {
        "method": done.wanted.method,
        "settings": asdict(done.config.method_config()),
        "link": done.wanted.link,
        "dataset": done.data.name,
        "partition": done.split.kind,
        "partition_parameters": dict(done.split.parameters),
        "test_part": done.wanted.test_part,
        "without_test_rows": sum(not spec.own_test_file for spec in done.specs) if done.history.own else 0,
        "seed": done.wanted.seed,
        "rounds": done.config.run.rounds,
        "control_rounds": done.wanted.rounds_of_controls,
        "hostile": done.wanted.hostile,
        "attack": done.wanted.attack,
        "class_names": list(done.data.classes),
        "proxy_per_class": done.wanted.proxy_per_class or 0,
        "scored": _scored(done),
        "top_k": done.wanted.top_k,
    }


def _scored(done: Outcome) -> Scored:
    """Returns what was scored, for `FleetReport.scored`."""
    rows = len(done.data.test_labels)
    return {
        "models": done.wanted.score,
        "every": done.wanted.rounds_between_scores,
        "rows": done.wanted.rows_scored(rows) if done.wanted.scores_devices else 0,
        "test_rows": rows,
    }


def _privacy(config: LocalTraining, devices: Sequence[DeviceReport]) -> PrivacyReport | None:
    guarantee = config.guarantee
    if guarantee is None:
        return None
    result = strength(
        statistics.mean(device.samples for device in devices), [config.device_mu(len(devices))] * len(devices)
    )
    return {
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "exact": guarantee.exact,
        "sentence": guarantee.sentence,
        "expected_strength": round(result, 1),
    }


def _mean_accuracies(devices: Sequence[DeviceReport], scores: Mapping[str, FleetFigures]) -> dict[str, Any]:
    return {
        "mean_accuracy_alone": _mean_where_known([device.accuracy_alone for device in devices]),
        "mean_accuracy_fleet": _mean_where_known([device.accuracy_fleet for device in devices]),
        "mean_accuracy_trained": _mean_where_known([device.accuracy_trained for device in devices]),
        "mean_own_accuracy_alone": _c_spec(scores, "alone"),
        "mean_own_accuracy_fleet": _mean_where_known([device.own_accuracy_fleet for device in devices]),
        "mean_own_accuracy_trained": _c_spec(scores, "fleet"),
        "mean_own_accuracy_fedavg_device": _c_spec(scores, "fedavg"),
    }


def _scores_at_the_end(history: FleetHistory, devices: Sequence[DeviceReport]) -> dict[str, Any]:
    last = [last_matrices(history, device.name)[1] for device in devices]
    of_devices = [counts for counts in last if counts is not None]
    own = [device.own_accuracy_fleet for device in devices]
    return {
        "mean_f1_weighted_fleet": _mean_where_known([f1_weighted(counts) for counts in of_devices]),
        "mean_f1_macro_fleet": _mean_where_known([f1_macro(counts) for counts in of_devices]),
        "own_fairness_fleet": fairness_of([rate for rate in own if rate is not None]),
        "mean_accuracy_by_class": accuracy_by_class(of_devices),
        "global_accuracy_by_class": accuracy_by_class([counts for counts in history.server[-1:] if counts is not None]),
    }


def _left_out(devices: Sequence[DeviceReport], score: str) -> set[str]:
    """Returns the devices that no mean counts, of the fleet or of a control, so that all are over the same devices.

    Devices that were not scored in the fleet, unless none was, and those that never took part, unless `score` asks for
    the models of all devices.
    """
    idle = {device.name for device in devices if score != "devices" and not device.took_part}
    unscored = {device.name for device in devices if device.accuracy_fleet is None}
    return next((names for names in (idle | unscored, idle) if len(names) < len(devices)), set())


def _rate_of(counts: Counts | None) -> float | None:
    """Returns the accuracy of counts; None without counts."""
    return None if counts is None else counts.accuracy


def _accuracies_by_round(history: FleetHistory, alone: Mapping[str, Sequence[Counts | None]]) -> dict[str, Any]:
    def of(counts: Mapping[str, Sequence[Confusion | None]]) -> dict[str, list[float | None]]:
        shared = {id(by_round): by_round for by_round in counts.values()}  # all devices may have one model
        rates = {key: [accuracy_or_none(item) for item in by_round] for key, by_round in shared.items()}
        return {device: rates[id(by_round)] for device, by_round in counts.items()}

    return {
        "accuracy_by_round": of(history.devices),
        "delivered_accuracy_by_round": of(history.products),
        "further_accuracy_by_round": {variant: of(counts) for variant, counts in history.further.items()},
        "alone_accuracy_by_round": {device: [_rate_of(count) for count in counts] for device, counts in alone.items()},
    }


def _protection(store: Store, run: str, figures: Sequence[RoundFigures]) -> dict[str, Any]:
    """Returns the report's fields about suspicious devices, guards and apps that kept their models."""
    return {
        "named": named(store, run),
        "guards_fired": sum(store.summaries.guards(run, 0, EVERY).values()),
        "models_kept": sum(figure.kept or 0 for figure in figures),
        "models_replaced": sum(figure.replaced or 0 for figure in figures),
    }


def _comparison(done: Outcome, shares: Ints, left_out: AbstractSet[str]) -> dict[str, Any]:
    compared = _compare(done, shares, left_out)
    return {
        "comparison": [*_alone_row(done, shares, left_out), *(item.row() for item in compared)],
        "curves": [item.curve() for item in compared],
    }


def write_report(report: FleetReport, out: Path, figure: str = "png", panels: Sequence[str] = ()) -> None:
    """Writes report.json and the figure to `out`; `figure` and `panels` as in `Simulation`.

    Raises:
        ConfigurationError: `figure` or a panel is unknown.
        DataError: The figure cannot be written.
    """
    with (out / "report.json").open("w", encoding="utf-8") as file:
        file.writelines(json_lines(report))
    save_report_figure(
        out / f"fleet.{figure}",
        counts_jc=[device.samples_by_class for device in report.devices],
        class_names=report.class_names,
        device_names=[f"{device.name} ({device.model})" for device in report.devices],
        partition=describe_partition(report),
        curves=report.curves,
        by_device=_by_device(report),
        alone=report.mean_accuracy_alone,
        title=report_title(report),
        panels=panels,
    )


def json_lines(report: FleetReport) -> Iterator[str]:
    """Yields the report as JSON: a line for each field, and for each entry of a field with an entry per device."""
    yield "{"
    for number, field in enumerate(fields(report)):
        yield f"{',' if number else ''}\n{json.dumps(field.name)}: "
        value = getattr(report, field.name)
        if value and (isinstance(value, list) or field.name.endswith("_by_round")):
            yield from _json_entries(value)
        else:
            yield json.dumps(value, default=vars)
    yield "\n}\n"


def _json_entries(value: Sequence[Any] | Mapping[str, Any]) -> Iterator[str]:
    if isinstance(value, Mapping):
        entries = (f"{json.dumps(name)}: {json.dumps(entry, default=vars)}" for name, entry in value.items())
        yield "{"
    else:
        entries = (json.dumps(entry, default=vars) for entry in value)
        yield "["
    for number, entry in enumerate(entries):
        yield f"{',' if number else ''}\n {entry}"
    yield "}" if isinstance(value, Mapping) else "]"


def report_title(report: FleetReport) -> str:
    """Returns the title of a report's figure, with the meaning of a private run's epsilon."""
    text = f"{report.method} on {report.dataset}, seed {report.seed}, over {report.link}"
    if not report.finished:
        text = f"{text}: interrupted after {report.completed_rounds} of {report.rounds} rounds"
    return "\n".join([text, *privacy_lines(report)[:1]])


def privacy_lines(report: FleetReport) -> list[str]:
    """Returns the meaning of a private run's epsilon, and what to change if noise or features cost accuracy.

    Of secure sums without noise, it is that nobody has reviewed them.
    """
    if report.privacy is None:
        return [f"{report.method}: {SUMS_UNREVIEWED}"] if config_class(report.method).sums_securely else []
    has_controls = report.mean_accuracy_alone is not None or report.mean_accuracy_fedavg_global is not None
    controls = "; the controls are not private" if has_controls else ""
    name = NAMES.get(report.method, report.method)
    found, settings = report.privacy["expected_strength"], report.settings
    return [
        f"Privacy of {name}: {report.privacy['sentence']}{controls}",
        *much_noise(found),
        *other_dimensions(found, settings["features"], settings["dimensions"]),
    ]


def _by_device(report: FleetReport) -> DeviceCurves:
    rounds = report.completed_rounds
    left_out = _left_out(report.devices, report.scored["models"])
    alone = [rates for name, rates in report.alone_accuracy_by_round.items() if name not in left_out]
    fedavg = next((curve.accuracy for curve in report.curves if curve.name == "FedAvg global"), [])
    controls = {
        "alone, mean": [_mean_where_known(rates) for rates in zip(*alone, strict=True)],
        "FedAvg global": fedavg,
        "global model": [] if report.method == "fedavg" else report.global_accuracy_by_round,
    }
    return DeviceCurves(
        devices=report.accuracy_by_round,
        fleet={device.name: device.accuracy_fleet for device in report.devices if device.accuracy_fleet is not None},
        controls={
            name: rates[:rounds]
            for name, rates in controls.items()
            if len(rates) >= rounds and any(rate is not None for rate in rates)
        },
        alone={device.name: device.accuracy_alone for device in report.devices if device.accuracy_alone is not None},
        further={
            variant: {
                device.name: device.further[variant]["accuracy"]
                for device in report.devices
                if variant in device.further
            }
            for variant in report.further
        },
        moment="at the end" if report.finished else f"after round {rounds}",
    )


def describe_partition(report: FleetReport) -> str:
    """Returns the partition of the data over the devices, with its main parameters."""
    given = report.partition_parameters
    text = ", ".join([report.partition, *(f"{name} {given[name]}" for name in ("alpha", "seed") if name in given)])
    return "; ".join([text, *left_out(given)])


def left_out(partition_parameters: Mapping[str, Any]) -> list[str]:
    """Returns a sentence about the clients of a data set that have no device, if there are any."""
    rows, clients = (partition_parameters.get(name, 0) for name in ("rows_left_out", "clients"))
    without = clients - partition_parameters["devices"] if rows else 0
    return [f"{without} of {clients} clients with {counted(rows, 'row')} have no device"] if rows else []


def _compare(done: Outcome, samples_jc: Ints, left_out: AbstractSet[str]) -> list[Candidate]:
    """Returns the models of the method and, unless the method is FedAvg, of the FedAvg control."""
    own = candidates(done.wanted.method, done.history, samples_jc, done.cost, done.top_k, left_out)
    fedavg = done.controls.fedavg
    if fedavg is None or done.wanted.method == "fedavg":
        return own
    return [*own, *candidates("fedavg", fedavg.history, samples_jc, fedavg.cost, fedavg.top_k, left_out)]


def _alone_row(done: Outcome, samples_jc: Ints, left_out: AbstractSet[str]) -> list[ComparisonRow]:
    alone, history = done.controls.alone, done.history
    counts_kr = [
        [None if counts is None or name in left_out else counts.confusion for counts in of]
        for name, of in alone.items()
    ]
    has_more = done.wanted.one_exchange or done.wanted.rounds_of_controls > len(history.server)
    took_part = [has_more or any(history.took_part[name]) for name in alone]  # as in `train_fleet_local_only`
    top_k = [None if name in left_out else done.top_k_alone.get(name) for name in alone]
    own_k = None if history.own is None else _alone_on_own(history.own, alone, left_out)
    return [local_only(counts_kr, samples_jc, took_part, top_k, own_k).row()] if alone else []


def _alone_on_own(own: OwnHistory, alone: Collection[str], left_out: AbstractSet[str]) -> list[Confusion | None]:
    """Returns the matrices of local-only training on the devices' own test rows."""
    return [own.alone.get(name) if name in alone and name not in left_out else None for name in own.devices]


def _mean_where_known(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None and not math.isnan(rate)]
    return statistics.mean(known) if known else None


def _mean_further(devices: Sequence[DeviceReport]) -> dict[str, VariantRates]:
    names = dict.fromkeys(variant for device in devices for variant in device.further)
    rates = {name: [device.further[name] for device in devices if name in device.further] for name in names}
    return {
        name: {
            "accuracy": statistics.mean(one["accuracy"] for one in of),
            "own_accuracy": _mean_where_known([one["own_accuracy"] for one in of]),
        }
        for name, of in rates.items()
    }


def _fedavg_figures(fedavg: FedAvgControl | None) -> dict[str, Any]:
    if fedavg is None:
        names = ("mean_accuracy_fedavg_global", "mean_accuracy_fedavg_device", "fedavg_model", "fedavg_settings")
        return dict.fromkeys(names)
    history = fedavg.history
    return {
        "mean_accuracy_fedavg_global": accuracy_or_none(history.server[-1]),
        "mean_accuracy_fedavg_device": _mean_where_known([accuracy_or_none(counts) for counts in history.last()]),
        "fedavg_model": fedavg.model,
        "fedavg_settings": fedavg.settings,
    }


def _c_spec(scores: Mapping[str, FleetFigures], control: str) -> float | None:
    """Returns a control's mean accuracy on own classes; None without the control."""
    return scores[control]["accuracy"]["c_spec"] if control in scores else None


def _scores(
    history: FleetHistory, samples_jc: Ints, controls: Controls, left_out: AbstractSet[str]
) -> dict[str, FleetFigures]:
    def last(one: FleetHistory) -> FleetFigures:
        return fleet_figures(one.last(), samples_jc, one.server[-1], one.last_own())

    result = {"fleet": last(history)}
    if controls.alone:
        last_k = {name: controls.alone[name][-1] for name in history.devices}
        alone_kcc = [
            None if counts is None or name in left_out else counts.confusion for name, counts in last_k.items()
        ]
        own = history.own
        own_kcc = None if own is None else _alone_on_own(own, controls.alone, left_out)
        result["alone"] = fleet_figures(alone_kcc, samples_jc, None, own_kcc)
    if controls.fedavg is not None:
        of = controls.fedavg.history
        result["fedavg"] = result["fleet"] if of is history else last(of)
    return result


def _upload_counts(store: Store, run: str) -> dict[str, Any]:
    uploads = store.asks.uploads(run)
    by_status = Counter(upload.status for upload in uploads)
    return {
        "acknowledged_uploads": len(uploads),
        "used_uploads": by_status[UploadStatus.USED],
        "reported_uploads": by_status[UploadStatus.REPORTED],
        "refused_uploads": len(store.history.events(run, "refused")),
    }
