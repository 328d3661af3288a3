"""The page of an experiment: one HTML file that needs no other, with its tables and figures as files beside it."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetdistill.knowledge import KINDS
from fleetdistill_lab.experiments.definition import SCALE, Experiment, join_names
from fleetdistill_lab.experiments.figures import (
    AXES,
    CURVE_TITLES,
    draw_boxes,
    draw_curves,
    draw_lines,
    draw_partitions,
    save_figure,
)
from fleetdistill_lab.experiments.metrics import METRICS
from fleetdistill_lab.experiments.notes import (
    cautions,
    header_notes,
    model_notes,
    notes,
    power_notes,
    setting_notes,
    shared_labels,
    silent_labels,
    source_notes,
)
from fleetdistill_lab.experiments.results import FAILED, FINISHED, Results, Run, StoredCell
from fleetdistill_lab.experiments.summary import (
    at_equal_bytes,
    check_claims,
    comparisons,
    lines_of,
    summarize,
)
from fleetdistill_lab.experiments.tables import (
    ClassAccuracy,
    PrintedValue,
    Table,
    claim_table,
    equal_bytes_table,
    format_value,
    model_table,
    printed_table,
    save_csv,
    save_latex,
    short_table,
    summary_table,
)
from fleetdistill_lab.simulation.report.comparison import devices_lines
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.traffic import Sizes, tensor_columns
from fleetdistill_server.texts import counted, readable_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Written", "write_report"]


@dataclass(frozen=True)
class Written:
    """A report that was written.

    Attributes:
        page: The HTML file.
        tables: Tables of the metrics and claims, as the terminal shows them.
        warnings: What the reader has to know of it, such as missing controls and failed runs.
    """

    page: Path
    tables: Sequence[Table]
    warnings: Sequence[str]


@dataclass(frozen=True)
class _Picture:
    svg: str
    caption: str


@dataclass(frozen=True)
class _Section:
    title: str
    lines: Sequence[str] = ()
    tables: list[Table] = field(default_factory=list)
    figures: list[_Picture] = field(default_factory=list)
    folded: bool = False


class _Writer:
    """Writes tables and figures beside the page, and collects them for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("tables", "figures"):
            shutil.rmtree(folder / name, ignore_errors=True)  # those of grid points that the file no longer has
            (folder / name).mkdir(parents=True)

    def table(self, table: Table, name: str, rows: Any = None, lines: Sequence[str] = ()) -> Table:
        """Writes a table, as CSV with the rows if there are some; the lines are those that the page has above it."""
        note = " ".join([*lines, *[table.note] * bool(table.note)])
        save_csv(table if rows is None else rows, self._folder / "tables" / f"{name}.csv")
        file = self._folder / "tables" / f"{name}.tex"
        save_latex(table, file, f"tab:{name}", note, of_texts=rows is None)
        return table

    def figure(self, figure: Figure, name: str, caption: str) -> _Picture:
        _, svg = save_figure(figure, self._folder / "figures", name)
        text = svg.read_text(encoding="utf-8")
        return _Picture(text[text.index("<svg") :], f"{caption} (figures/{name}.pdf)")


def write_report(experiment: Experiment, results: Results, folder: Path) -> Written:
    """Writes index.html, tables (CSV, LaTeX) and figures (PDF, SVG).

    Args:
        experiment: The experiment.
        results: Its results.
        folder: Folder of the page.
    """
    from jinja2 import Environment, PackageLoader

    writer = _Writer(folder)
    cells, runs = results.cells(), results.runs()
    finished = [cell for cell in cells if cell.run in runs and runs[cell.run].status == FINISHED]
    by_status = Counter(runs[cell.run].status if cell.run in runs else "not run" for cell in cells)
    warnings = _warnings(experiment, results, by_status)
    metrics, short = _metric_sections(experiment, results, writer, warnings)
    sections = [
        *metrics,
        _tuning_section(experiment, results, writer),
        _class_section(experiment, results, writer),
        _curve_section(results, writer),
        _equal_bytes_section(experiment, results, writer),
        *_fleet_sections(experiment, results, writer),
        _methods_section(results, writer),
        _versions_section(runs, finished, writer),
        _runs_section(results, finished, writer),
    ]
    text = Environment(loader=PackageLoader("fleetdistill_lab.experiments", "."), autoescape=True).get_template(
        "page.html"
    )
    seeds = ", ".join(map(str, experiment.seeds))
    page = folder / "index.html"
    page.write_text(
        text.render(
            title=experiment.title,
            subtitle=f"Scale {experiment.scale}, " * bool(experiment.source)
            + f"seeds {seeds}; "
            + ", ".join(f"{count} {status}" for status, count in by_status.items()),
            source=experiment.source,
            note=experiment.note,
            warnings=warnings,
            sections=[section for section in sections if section.tables or section.figures],
            definition=next(iter(results.database["experiment"].rows))["definition"],
        ),
        encoding="utf-8",
    )
    return Written(
        page,
        short,
        [
            *model_notes(experiment),
            *source_notes(experiment),
            *notes(experiment),
            *header_notes(experiment),
            *tuning_lines(experiment, results),
            *warnings,
        ],
    )


def _warnings(experiment: Experiment, results: Results, by_status: Mapping[str, int]) -> list[str]:
    result = [*cautions(experiment), *results.clients_left_out(), *results.initial_models()]
    reference = experiment.reference or next(iter(experiment.methods))
    result += power_notes(len(experiment.seeds), comparisons(results.run_names(), reference))
    result += _edge_lines(experiment, results)
    if by_status.get("not run"):
        result.append(
            f"{counted(by_status['not run'], 'cell')} not run yet: a mean or a lead says over how many seeds it is, "
            "and what lacks a run has no difference, no p value and no verdict. P values are adjusted for the "
            "differences that are there, and can grow with further ones."
        )
    runs = results.runs()
    for cell in results.cells():
        if cell.run in runs and runs[cell.run].status == FAILED:
            where = join_names(cell.label, cell.point, f"seed {cell.seed}")
            result.append(f"Failed: {where}: {runs[cell.run].error}")
    finished = [runs[cell.run] for cell in results.cells() if cell.run in runs and runs[cell.run].status == FINISHED]
    versions = {json.dumps(run.versions, sort_keys=True) for run in finished}
    if len(versions) > 1:
        result.append("Not all runs were made with the same versions on the same kind of processor; see Versions.")
    return result


def _with_k(ks: Collection[int | None], table: Table) -> Table:
    """Returns a table whose title has the k of the runs' top-k accuracy."""
    known = " or ".join(str(k) for k in sorted(k for k in ks if k is not None))
    return replace(table, title=table.title.replace("Top-k", f"Top-{known or 'k'}"))


def _metric_sections(
    experiment: Experiment, results: Results, writer: _Writer, warnings: Sequence[str]
) -> tuple[list[_Section], list[Table]]:
    counts = {status: results.counts(status) for status in (FINISHED, FAILED)}
    reference = experiment.reference or next(iter(experiment.methods))
    lines = [
        f"Mean ± standard deviation over seeds; differences from {reference} are paired by seed, with the p value of "
        "a two-sided paired t test, adjusted by Holm's method for all methods and grid points of the table; those "
        "that share their runs count once. The best mean of a grid point whose runs have all finished is bold."
    ]
    lines += [*model_notes(experiment), *source_notes(experiment)]
    runs, names = results.runs(), results.run_names()
    ks = {runs[cell.run].settings["simulation"].get("top_k") for cell in results.cells() if cell.run in runs}
    with_k = functools.partial(_with_k, ks)
    source = "in the source" if experiment.scale == SCALE else "in the source, at its scale"
    settings = [*setting_notes(experiment), *notes(experiment)]
    tables, short = _Section("Results", [*lines, *settings, *header_notes(experiment)]), list[Table]()
    whole = [*lines, *settings, *warnings, *[experiment.note.strip()] * bool(experiment.note)]
    of_bytes = [*setting_notes(experiment), *header_notes(experiment)]
    partitions = results.partitions()
    kinds = " or ".join(dict.fromkeys(partitions.values()))
    for metric in experiment.metrics:
        given = (counts[FINISHED], len(experiment.seeds), counts[FAILED], names, METRICS[metric].unit)
        summaries = [
            replace(one, partition=partitions.get((one.point, one.label), ""))
            for one in summarize(results.values(metric), reference, *given)
        ]
        printed = experiment.printed.get(metric, {})
        table = with_k(summary_table(metric, summaries, reference, printed, source))
        table = replace(table, title=f"{table.title}; partition {kinds}") if kinds else table
        short.append(with_k(short_table(metric, summaries, printed)))
        said = of_bytes if METRICS[metric].unit == "bytes" else whole
        tables.tables.append(writer.table(table, f"metric-{metric}", summaries, said))
        if elsewhere := experiment.printed_elsewhere.get(metric):
            values = [PrintedValue(label, *item) for label, of in elsewhere.items() for item in of.items()]
            table = with_k(printed_table(metric, elsewhere))
            tables.tables.append(writer.table(table, f"source-{metric}", values, source_notes(experiment)))
            short.append(tables.tables[-1])
    claims = _Section(
        "The order in the source",
        [
            "Each method beside the next one of the order that the source prints. The p value is of a two-sided t test "
            "of one lead a seed, its mean over the grid points, adjusted by Holm's method for the pairs of all claims "
            "of the file; so few seeds decide only large and even leads, however many grid points there are. Ahead in "
            "counts all pairs of runs; one that several grid points share counts once."
        ],
    )
    checked = [(claim, claim.metric or experiment.metrics[0]) for claim in experiment.claims]
    values_of = {metric: results.values(metric) for _, metric in checked}
    found = check_claims(checked, values_of, counts[FINISHED], len(experiment.seeds), names)
    for number, ((claim, metric), pairs) in enumerate(zip(checked, found, strict=True), 1):
        table = with_k(claim_table(claim.text, metric, pairs))
        claims.tables.append(writer.table(table, f"claim-{number}", pairs, claims.lines))
        short.append(claims.tables[-1])
    models = _Section(
        "All models",
        [
            "In %; differences are from the reference's model of the same name, or else of the same kind (global or of "
            "a device), or else its first. P values are only in the tables of the metrics, where they are adjusted for "
            "all comparisons of the table."
        ],
    )
    for point in experiment.points:
        rows = results.models(point)
        if rows:
            drawn = lines_of(rows, reference, len(experiment.seeds))
            name = f"models{'-' if point else ''}{_slug(point)}"
            table = model_table(drawn, join_names("All models", point), with_p=False)
            table = replace(table, note=" ".join(devices_lines(drawn, results.devices(point))))
            models.tables.append(writer.table(table, name, rows, models.lines))
            caption = f"Accuracy by bytes {point}".strip()
            models.figures.append(writer.figure(draw_lines(drawn, point), name, caption))
    return [tables, claims, models], short


def tuning_lines(experiment: Experiment, results: Results) -> list[str]:
    """Returns the chosen value of each method and grid point; empty without tuning."""
    return [
        f"{experiment.tune.setting} = {of[0][0]}: {join_names(label, point)}"
        for (label, point), of in results.tuned(experiment).items()
        if experiment.tune is not None
    ]


def _edge_lines(experiment: Experiment, results: Results) -> list[str]:
    """Returns a sentence about tuned values beyond which a better one may be."""
    found = []
    for (label, point), of in results.tuned(experiment).items():
        chosen, tried = of[0][0], [value for value, _ in of]
        if len(tried) > 1 and all(type(value) in (int, float) for value in tried):
            end = {min(tried): "smallest", max(tried): "largest"}.get(chosen)
            found += [f"{join_names(label, point)}: {chosen} is the {end}"] if end else []
    if experiment.tune is None or not found:
        return []
    return [
        f"A better {experiment.tune.setting} may be beyond the values that were tried: {'; '.join(found)}. Try further "
        "values in [tune]."
    ]


def _tuning_section(experiment: Experiment, results: Results, writer: _Writer) -> _Section:
    if experiment.tune is None:
        return _Section("Tuned settings")
    metric, found = METRICS[experiment.tune.metric], results.tuned(experiment)
    rows = [
        [label, point, *(f"{value} ({format_value(rate, None, metric.unit)})" for value, rate in of)]
        for (label, point), of in found.items()
    ]
    header = ["method", "grid point", "chosen", *["tried"] * (len(experiment.tune.values) - 1)]
    rows = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    said = (
        f"{experiment.tune.setting} by {metric.title[0].lower()}{metric.title[1:]}, on 20 % of each device's training "
        f"rows, with seed {experiment.seeds[0]}. The p values of the other tables do not count this choice."
    )
    table = writer.table(Table(experiment.tune.setting, header, rows), "tuned", lines=[said])
    return _Section("Tuned settings", [said], [table])


def _class_section(experiment: Experiment, results: Results, writer: _Writer) -> _Section:
    said = "In percent, mean over seeds: of the global model, and of the models that the devices have at the end."
    section, classes = _Section("Accuracy by class", [said], folded=True), results.table("classes")
    for point in dict.fromkeys(classes["point"]):
        of = classes[classes["point"] == point].astype({"global": float, "devices": float})
        means = of.melt(["label", "class"], ["global", "devices"], "model").dropna()
        means = means.groupby(["label", "model", "class"], sort=False)["value"].mean()
        rows = [ClassAccuracy(label, point, model, name, rate) for (label, model, name), rate in means.items()]
        wanted, counts = len(experiment.seeds), of.groupby("label")["seed"].nunique()
        seeds = {label: f" ({number} of {wanted} seeds)" for label, number in counts.items() if number < wanted}
        columns = {"global": "global model", "devices": "devices' models at the end"}
        rates = {
            (f"{row.label}, {columns[row.model]}{seeds.get(row.label, '')}", row.name): format_value(
                row.accuracy, None, "percent"
            )
            for row in rows
        }
        header = list(dict.fromkeys(model for model, _ in rates))
        lines = [[name, *(rates.get((model, name), "") for model in header)] for name in dict.fromkeys(of["class"])]
        file = f"classes{'-' if point else ''}{_slug(point)}"
        table = Table(join_names("Accuracy by class", point), ["", *header], lines, width=1)
        section.tables.append(writer.table(table, file, rows, section.lines))
    return section


def _curve_section(results: Results, writer: _Writer) -> _Section:
    section = _Section("Curves", ["Mean over seeds, and their range; device models after local training."])
    rounds = results.table("rounds")
    for metric, x in itertools.product(CURVE_TITLES, AXES):
        if (figure := draw_curves(rounds, metric, x)) is not None:
            title = f"{CURVE_TITLES[metric]} by {AXES[x]}"
            section.figures.append(writer.figure(figure, f"curve-{metric}-{x}", f"{title[0].upper()}{title[1:]}"))
    return section


def _equal_bytes_section(experiment: Experiment, results: Results, writer: _Writer) -> _Section:
    reference = experiment.reference or next(iter(experiment.methods))
    shared = shared_labels(experiment)
    whose = f"the global one with {'; '.join(shared)}, and with others " if shared else ""
    lines = [
        f"Each method beside {reference}, both after the last scored round within the bytes that the cheaper run of "
        "the two exchanges in its rounds; differences are paired by seed, p values are by Holm's method for the table. "
        f"The model is {whose}the device's own after local training. After rounds has the method's rounds and the "
        "reference's, means over seeds; without a scored round of both within these bytes there is no difference. With "
        "score_every = 1 each round is scored.",
        *setting_notes(experiment),
    ]
    silent = silent_labels(experiment)  # their bytes are headers, which pay for no round of another method
    curves = {key: of for key, of in results.curves(shared).items() if key[1] not in silent}
    found = at_equal_bytes(curves, reference, len(experiment.seeds), results.run_names())
    if not found:
        return _Section("At equal bytes")
    table = writer.table(equal_bytes_table(found, reference), "equal-bytes", found, lines)
    return _Section("At equal bytes", lines[:1], [table])


def _fleet_sections(experiment: Experiment, results: Results, writer: _Writer) -> list[_Section]:
    devices, partitions = results.table("devices"), results.table("partitions")
    boxes = _Section("Devices", ["Every device of every seed: median, quartiles, and 1.5 times their distance."])
    for value, caption in (("own_accuracy", "on its own classes"), ("accuracy", "on all classes")):
        if (figure := draw_boxes(devices, value)) is not None:
            boxes.figures.append(writer.figure(figure, f"devices-{value}", f"Accuracy of each device {caption}"))
    if (figure := draw_boxes(devices, "own_accuracy", histogram=True)) is not None:
        boxes.figures.append(writer.figure(figure, "devices-histogram", "Devices by accuracy on their own classes"))
    data = _Section("Partitions")
    if not partitions.empty:
        data.figures.append(writer.figure(draw_partitions(partitions), "partitions", "Training rows of each class"))
    lines = [
        "Bytes of a device in the whole run by kind of part, mean over runs; headers are what messages have besides "
        "their tensors. docs/explanation/privacy.md says what each kind reveals, and docs/reference/device.md what the "
        "columns are."
    ]
    leaves = _Section("What leaves the device", lines)
    traffic = results.table("traffic")
    if not traffic.empty:
        lines += _tensor_lines(experiment, set(traffic["label"]))
        leaves.tables.append(writer.table(_traffic_table(results, traffic), "leaves-device", lines=lines))
    return [boxes, data, leaves]


def _tensor_lines(experiment: Experiment, labels: Collection[str]) -> list[str]:
    """Returns what tensors of a method are declared to contain, a sentence for each label that sends some."""
    result = dict[str, None]()
    for cell in replace(experiment, seeds=experiment.seeds[:1]).cells():
        config = cell.simulation.configuration()
        columns = tensor_columns(server_class(cell.simulation.method).exchanges(config, Sizes()))
        if columns and cell.label in labels:
            result[f"Tensors of {cell.label} are declared to contain {', '.join(columns)} of the device."] = None
    return list(result)


def _traffic_table(results: Results, traffic: Any) -> Table:
    sizes = {row["run"]: row["devices"] for row in results.database["runs"].rows}
    traffic = traffic[traffic["direction"] == "up"].copy()
    traffic["each"] = traffic["bytes"] / traffic["run"].map(sizes)
    means = traffic.groupby(["label", "kind"], sort=False)["each"].mean()
    labels = list(dict.fromkeys(traffic["label"]))
    kinds = list(dict.fromkeys(traffic["kind"]))
    words = {kind: _words(kind) for kind in kinds}
    rows = [
        [label, *(readable_bytes(round(means[label, kind])) if (label, kind) in means else "" for kind in kinds)]
        for label in labels
    ]
    return Table("From a device", ["", *words.values()], rows)


def _words(kind: str) -> str:
    """Returns what `fleetdistill methods` calls a kind of part."""
    if kind not in KINDS:
        return "headers"  # of payloads
    columns = " or ".join(KINDS[kind].possible_columns or ())
    return KINDS[kind].description.format(columns=columns) or kind


def _methods_section(results: Results, writer: _Writer) -> _Section:
    """Returns what was trained: networks and all settings of each method, in its finished runs."""
    runs, devices = results.runs(), results.table("devices")
    rows = []
    for label in dict.fromkeys(devices["label"]):
        of = devices[devices["label"] == label]
        found: dict[str, dict[str, list[str]]] = {}
        for point, run in dict.fromkeys(zip(of["point"], of["run"], strict=True)):
            for name, value in runs[run].method_settings.items():
                at = found.setdefault(name, {}).setdefault(json.dumps(value), [])
                at += [point] if point not in at else []
        shown = ", ".join(f"{name} = {_by_point(values)}" for name, values in found.items())
        rows.append([label, ", ".join(dict.fromkeys(of["model"])), shown])
    table = Table("Networks and settings", ["", "networks of the devices", "settings"], rows)
    return _Section("Methods", [], [writer.table(table, "methods")])


def _versions_section(runs: Mapping[str, Run], finished: Sequence[StoredCell], writer: _Writer) -> _Section:
    found: dict[str, dict[str, None]] = {}
    for cell in finished:
        for name, value in runs[cell.run].versions.items():
            found.setdefault(name, {})[value] = None
    rows = [[name, " or ".join(values)] for name, values in found.items()]
    table = Table("What the runs were made with", ["", "version"], rows)
    return _Section("Versions", [], [writer.table(table, "versions")] if rows else [])


def _by_point(values: Mapping[str, Sequence[str]]) -> str:
    """Returns a setting's value, or its values with the grid points that have them, if there are several."""
    if len(values) == 1:
        return next(iter(values))
    return " or ".join(f"{value} ({'; '.join(points)})" for value, points in values.items())


def _runs_section(results: Results, finished: Sequence[Any], writer: _Writer) -> _Section:
    runs = results.runs()
    rows = [
        [
            cell.label,
            cell.point,
            str(cell.seed),
            runs[cell.run].settings["simulation"].get("partition", "dirichlet_by_class"),
            f"{runs[cell.run].seconds:.1f}",
            ", ".join(f"{name} {runs[cell.run].versions.get(name, '')}" for name in ("fleetdistill", "torch")),
            f"runs/{cell.run}/simulation.toml",
        ]
        for cell in finished
    ]
    header = ["method", "grid point", "seed", "partition", "seconds", "versions", "repeat with fleetdistill simulate"]
    return _Section("Runs", [], [writer.table(Table("Finished runs", header, rows), "runs")], folded=True)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
