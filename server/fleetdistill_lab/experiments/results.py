"""The results of an experiment: one SQLite file, and the same tables as Parquet files.

docs/how-to/run-experiments.md describes the tables. A run is added in one transaction, so that a killed experiment has
whole runs only.
"""

from __future__ import annotations

import functools
import json
import platform
import re
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlite_utils import Database

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.experiments.definition import Cell, Experiment, join_names
from fleetdistill_lab.experiments.metrics import CURVES, METRICS, Report, Target, curve_of, read_metrics
from fleetdistill_lab.simulation.report.comparison import NAMES
from fleetdistill_lab.simulation.report.report import left_out

if TYPE_CHECKING:
    import pandas

__all__ = ["SCHEMA_VERSION", "ModelRow", "Results", "Run", "StoredCell", "open_results"]

SCHEMA_VERSION = 1
"""Version of the tables; raised if a column changes its meaning or goes."""
FINISHED, FAILED = "finished", "failed"
_UNTRAINED = ("untrained_first", "untrained_late")
"""Devices whose initial models count after round 1, and at most in one of the last 20 rounds; beside the metrics."""
_PACKAGES = ("fleetdistill", "torch", "torchvision", "numpy", "scikit-learn", "scipy")
_TABLES: Mapping[str, tuple[dict[str, type], tuple[str, ...]]] = {
    "experiment": ({"schema_version": int, "name": str, "title": str, "scale": str, "definition": str}, ("name",)),
    "cells": ({"label": str, "point": str, "seed": int, "run": str}, ("label", "point", "seed")),
    "tuning": ({"label": str, "point": str, "value": str, "run": str}, ("label", "point", "value")),
    "runs": (
        {
            "run": str,
            "method": str,
            "seed": int,
            "status": str,
            "error": str,
            "seconds": float,
            "devices": int,
            "partition": str,
            "partition_parameters": str,
            "settings": str,
            "method_settings": str,
            "versions": str,
        },
        ("run",),
    ),
    "metrics": ({"run": str, "metric": str, "value": float}, ("run", "metric")),
    "models": (
        {
            "run": str,
            "model": str,
            "accuracy": float,
            "own_accuracy": float,
            "top_k": float,
            "bytes": float,
            "exchanges": float,
            "devices": int,
            "untrained": int,
        },
        ("run", "model"),
    ),
    "rounds": (
        {
            "run": str,
            "round": int,
            **dict.fromkeys(CURVES, float),
            "bytes_up": float,
            "bytes_down": float,
            "exchanges": float,
            "steps": float,
            "seconds": float,
        },
        ("run", "round"),
    ),
    "devices": (
        {
            "run": str,
            "device": str,
            "model": str,
            "samples": int,
            "accuracy": float,
            "own_accuracy": float,
        },
        ("run", "device"),
    ),
    "classes": ({"run": str, "class": str, "global": float, "devices": float}, ("run", "class")),
    "partitions": ({"run": str, "device": str, "class": str, "samples": int}, ("run", "device", "class")),
    "traffic": ({"run": str, "direction": str, "kind": str, "bytes": int}, ("run", "direction", "kind")),
}
"""Columns and primary key of each table."""


@dataclass(frozen=True)
class Run:
    """A row of the table `runs`.

    Attributes:
        run: Name of the run.
        status: `finished` or `failed`.
        error: Why it failed; empty otherwise.
        seconds: Duration.
        settings: Settings as a file for `fleetdistill simulate` has them.
        method_settings: All settings of the method, the defaults included.
        versions: Versions of Python and the packages by name; `commit` of a checkout, and `processor`.
    """

    run: str
    status: str
    error: str
    seconds: float
    settings: Mapping[str, Any]
    method_settings: Mapping[str, Any]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class StoredCell:
    """A row of the table `cells`."""

    label: str
    point: str
    seed: int
    run: str


@dataclass(frozen=True)
class ModelRow:
    """One model of one cell; accuracies are in [0, 1].

    Attributes:
        label: Label of the method.
        seed: Seed of the run.
        model: `devices`, `global`, or the name of a variant such as `general` and `personal`.
        accuracy: Mean accuracy over the devices on all classes; None if it was not scored.
        own_accuracy: As `ComparisonRow.own_accuracy`.
        bytes: Bytes from and to a device in the whole run.
        exchanges: Mean number of a device's exchanges.
        devices: Number of devices that the means are over.
        untrained: Number of these that never took part.
        networks: Device models of the run, with commas.
        partition: Kind of the partition.
    """

    label: str
    seed: int
    model: str
    accuracy: float | None
    own_accuracy: float | None
    bytes: float
    exchanges: float
    devices: int
    untrained: int = 0
    networks: str = ""
    partition: str = ""


class Results:
    """The results in a folder.

    Args:
        folder: Folder of the experiment.

    Raises:
        ConfigurationError: The folder's results have a newer schema version.
        DataError: The file is not a database.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "results.sqlite"
        folder.mkdir(parents=True, exist_ok=True)
        self.database = Database(self.file)
        try:
            found = set(self.database.table_names())
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.file}: {error}; delete it to repeat the experiment's runs") from error
        for name, (columns, key) in _TABLES.items():
            if name not in found:
                self.database.create_table(name, columns, pk=key if len(key) > 1 else key[0])
        stored = next(self.database.query("SELECT schema_version FROM experiment"), None)
        if stored is not None and stored["schema_version"] != SCHEMA_VERSION:
            raise ConfigurationError(
                f"{self.file} has schema version {stored['schema_version']}, this fleetdistill reads {SCHEMA_VERSION}; "
                "use the version that wrote it, or another --out folder"
            )

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def begin(self, experiment: Experiment, cells: Sequence[Cell], definition: str) -> None:
        """Stores an experiment's definition and cells, which replace earlier ones; runs stay.

        Args:
            experiment: The experiment.
            cells: Its cells.
            definition: Text of its file.
        """
        row = {
            "schema_version": SCHEMA_VERSION,
            "name": experiment.name,
            "title": experiment.title,
            "scale": experiment.scale,
            "definition": definition,
        }
        with self.database.conn:
            self.database.table("experiment").delete_where()
            self.database.table("experiment").insert(row)
            self.database.table("cells").delete_where()
            self.database.table("cells").insert_all(
                {"label": cell.label, "point": cell.point, "seed": cell.simulation.seed, "run": cell.run}
                for cell in cells
            )

    def tune(self, experiment: Experiment, tried: Sequence[tuple[Any, Cell]]) -> dict[tuple[str, str], Any]:
        """Stores the runs that tried values, and returns the best value by label and grid point.

        Args:
            experiment: The experiment.
            tried: Values with their cells, whose runs have ended.
        """
        with self.database.conn:
            self.database.table("tuning").delete_where()
            self.database.table("tuning").insert_all(
                {"label": cell.label, "point": cell.point, "value": json.dumps(value), "run": cell.run}
                for value, cell in tried
            )
        return {key: of[0][0] for key, of in self.tuned(experiment).items()}

    def tuned(self, experiment: Experiment) -> dict[tuple[str, str], list[tuple[Any, float]]]:
        """Returns the tried values by label and grid point, each with its metric, the best one first."""
        if experiment.tune is None:
            return {}
        rows = self.database.query(
            "SELECT label, point, tuning.value AS tried, metrics.value AS rate FROM tuning JOIN metrics USING (run) "
            "WHERE metric = ? AND metrics.value IS NOT NULL ORDER BY tuning.rowid",
            [experiment.tune.metric],
        )
        found: dict[tuple[str, str], list[tuple[Any, float]]] = {}
        for row in rows:
            found.setdefault((row["label"], row["point"]), []).append((json.loads(row["tried"]), row["rate"]))
        sign = -1 if METRICS[experiment.tune.metric].higher_is_better else 1
        return {key: sorted(of, key=lambda one: sign * one[1]) for key, of in found.items()}

    def finished(self) -> set[str]:
        """Returns the names of the finished runs."""
        return {row["run"] for row in self.database["runs"].rows_where("status = ?", [FINISHED])}

    def runs(self) -> dict[str, Run]:
        """Returns all runs by name."""
        return {
            row["run"]: Run(
                row["run"],
                row["status"],
                row["error"],
                row["seconds"],
                json.loads(row["settings"]),
                json.loads(row["method_settings"]),
                json.loads(row["versions"]),
            )
            for row in self.database["runs"].rows
        }

    def fail(self, cell: Cell, error: str) -> None:
        """Stores that a run failed."""
        with self.database.conn:
            self._delete(cell.run)
            self.database.table("runs").insert(_run_row(cell, FAILED, error, 0.0, {}))

    def add(self, cell: Cell, report: Report, seconds: Sequence[float], target: Target | None) -> None:
        """Stores a finished run.

        Args:
            cell: The run's cell.
            report: Contents of its report.json.
            seconds: Seconds to the end of each completed round; may be shorter.
            target: The experiment's target.
        """
        tables = {
            "runs": [_run_row(cell, FINISHED, "", report["seconds"], report)],
            "metrics": _metric_rows(cell.run, report, target),
            "models": [_model_row(report, row) for row in report["comparison"]],
            "rounds": list(_round_rows(report, seconds)),
            "devices": [_device_row(device) for device in report["devices"]],
            "classes": list(_class_rows(report)),
            "partitions": [
                {"device": device["name"], "class": name, "samples": count}
                for device in report["devices"]
                for name, count in zip(report["class_names"], device["samples_by_class"], strict=True)
            ],
            "traffic": list(_traffic_rows(report)),
        }
        with self.database.conn:
            self._delete(cell.run)
            for name, rows in tables.items():
                self.database.table(name).insert_all({"run": cell.run, **row} for row in rows)

    def measure(self, run: str, report: Report, target: Target | None) -> None:
        """Reads the metrics of a finished run again, because the target or the metrics may have changed.

        Everything else stays as it was when the run ended, such as the versions of the packages.
        """
        with self.database.conn:
            self.database.table("metrics").delete_where("run = ?", [run])
            self.database.table("metrics").insert_all(_metric_rows(run, report, target))

    def _delete(self, run: str) -> None:
        for name in _TABLES:
            if "run" in _TABLES[name][0] and name not in ("cells", "tuning"):
                self.database.table(name).delete_where("run = ?", [run])

    def values(self, metric: str) -> dict[str, dict[str, dict[int, float]]]:
        """Returns a metric of the finished cells by grid point, label and seed, without runs that lack the figure."""
        result: dict[str, dict[str, dict[int, float]]] = {}
        for cell in self.cells():
            result.setdefault(cell.point, {}).setdefault(cell.label, {})
        rows = self.database.query(
            "SELECT label, point, seed, value FROM cells JOIN metrics USING (run) "
            "WHERE metric = ? AND value IS NOT NULL",
            [metric],
        )
        for row in rows:
            result[row["point"]][row["label"]][row["seed"]] = row["value"]
        return result

    def curves(self, shared: Collection[str]) -> dict[tuple[str, str], dict[int, list[tuple[float, float | None]]]]:
        """Returns the accuracy on all classes after each round of the finished cells, of the model that devices have.

        Args:
            shared: Labels of the methods whose devices have the global model; with others it is the device's own, after
                local training.

        Returns:
            By grid point and label, then by seed: for each round the bytes from and to a device until then, and the
            accuracy; None where it was not scored.
        """
        result: dict[tuple[str, str], dict[int, list[tuple[float, float | None]]]] = {}
        rows = self.database.query(
            "SELECT label, point, seed, bytes_up + bytes_down AS bytes, [global], trained "
            "FROM cells JOIN rounds USING (run) ORDER BY cells.rowid, round"
        )
        for row in rows:
            curve = result.setdefault((row["point"], row["label"]), {}).setdefault(row["seed"], [])
            spent = row["bytes"] + (curve[-1][0] if curve else 0.0)
            curve.append((spent, row["global" if row["label"] in shared else "trained"]))
        return result

    def cells(self) -> list[StoredCell]:
        """Returns the experiment's cells, in their order."""
        return [StoredCell(**row) for row in self.database["cells"].rows_where(order_by="rowid")]

    def run_names(self) -> dict[tuple[str, str, int], str]:
        """Returns the names of the cells' runs by grid point, label and seed."""
        return {(cell.point, cell.label, cell.seed): cell.run for cell in self.cells()}

    def counts(self, status: str) -> Counter[tuple[str, str]]:
        """Returns the number of cells whose runs have a status, by grid point and label."""
        text = "SELECT point, label FROM cells JOIN runs USING (run) WHERE status = ?"
        return Counter((row["point"], row["label"]) for row in self.database.query(text, [status]))

    def partitions(self) -> dict[tuple[str, str], str]:
        """Returns the kind of the partition of the cells' runs, by grid point and label."""
        text = "SELECT point, label, partition FROM cells JOIN runs USING (run) ORDER BY cells.rowid"
        return {(row["point"], row["label"]): row["partition"] for row in self.database.query(text)}

    def models(self, point: str) -> list[ModelRow]:
        """Returns the models of a grid point's finished cells, in the order of the cells."""
        text = """
            SELECT label, seed, model, accuracy, own_accuracy, bytes, exchanges, devices, untrained,
                (SELECT group_concat(DISTINCT model) FROM devices WHERE run = cells.run) AS networks,
                (SELECT partition FROM runs WHERE run = cells.run) AS partition
            FROM cells JOIN models USING (run) WHERE point = ? ORDER BY cells.rowid, models.rowid
        """
        return [ModelRow(**row) for row in self.database.query(text, [point])]

    def devices(self, point: str) -> int:
        """Returns the largest number of devices of the finished runs of a grid point."""
        text = "SELECT MAX(devices) AS devices FROM cells JOIN runs USING (run) WHERE point = ?"
        return int(next(iter(self.database.query(text, [point])))["devices"] or 0)

    def clients_left_out(self) -> list[str]:
        """Returns sentences about clients of the data set that have no device, by grid point."""
        text = "SELECT point, partition_parameters AS given FROM cells JOIN runs USING (run) ORDER BY cells.rowid"
        found = {
            f"{join_names(row['point'], sentence)}; leave out devices to have one for each.": None
            for row in self.database.query(text)
            for sentence in left_out(json.loads(row["given"]))
        }
        return list(found)

    def initial_models(self) -> list[str]:
        """Returns sentences about devices whose initial models count in figures by round, by grid point."""
        text = """
            SELECT point, MAX(first.value) AS first, MAX(late.value) AS late
            FROM cells JOIN metrics AS first USING (run) JOIN metrics AS late USING (run)
            WHERE first.metric = ? AND late.metric = ? GROUP BY point ORDER BY MIN(cells.rowid)
        """
        counts = "up to {first:.0f} after round 1 and {late:.0f} in one of the last 20 rounds"
        found = [join_names(row["point"], counts.format_map(row)) for row in self.database.query(text, _UNTRAINED)]
        said = "Curves, medians and means over rounds count initial models of devices that had not yet taken part"
        return [f"{said}: {'; '.join(found)}."] if found else []

    def table(self, name: str) -> pandas.DataFrame:
        """Returns a table that has a column `run`, with a row for each cell of a run: its label, point and seed too."""
        import pandas

        text = f"SELECT label, point, cells.seed, {name}.* FROM cells JOIN {name} USING (run) ORDER BY cells.rowid"
        return pandas.read_sql_query(text, self.database.conn)

    def save_parquet(self) -> None:
        """Writes each table to a Parquet file."""
        import pandas

        (self.folder / "parquet").mkdir(exist_ok=True)
        for name in _TABLES:
            file = self.folder / "parquet" / f"{name}.parquet"
            new = file.with_suffix(".new")
            pandas.read_sql_query(f"SELECT * FROM {name}", self.database.conn).to_parquet(new, index=False)
            new.replace(file)


def open_results(folder: Path) -> closing[Results]:
    """Context manager that opens and closes the results in a folder.

    Raises:
        ConfigurationError: The folder has no results.
    """
    if not (folder / "results.sqlite").exists():
        raise ConfigurationError(f"{folder} has no results.sqlite; run the experiment with --out {folder} first")
    return closing(Results(folder))


def _run_row(cell: Cell, status: str, error: str, seconds: float, report: Report) -> dict[str, Any]:
    return {
        "run": cell.run,
        "method": cell.simulation.method,
        "seed": cell.simulation.seed,
        "status": status,
        "error": error,
        "seconds": seconds,
        "devices": len(report.get("devices", ())) or cell.simulation.devices,
        "partition": cell.simulation.partition_path,
        "partition_parameters": json.dumps(report.get("partition_parameters", {})),
        "settings": json.dumps(cell.sections, default=str),
        "method_settings": json.dumps(report.get("settings", {})),
        "versions": json.dumps(_versions()),
    }


@functools.cache
def _versions() -> dict[str, str]:
    """Returns the versions of Python and the packages, the commit of a checkout, and the model of the processor."""
    here, commit = Path(__file__), dict[str, str]()
    git = ["git", "-C", str(here.parent)]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        told = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, check=True)
        commit = {"commit": told.stdout.decode().strip()}
    cpus = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpus.read_text() if cpus.exists() else "", re.MULTILINE)
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        **commit,
        "processor": found[1] if found else platform.processor() or platform.machine(),
    }


def _metric_rows(run: str, report: Report, target: Target | None) -> list[dict[str, Any]]:
    initial = [of["untrained"] for of in report.get("counted_by_round", ())]
    counts = dict(zip(_UNTRAINED, (initial[0], max(initial[-20:])), strict=True)) if any(initial) else {}
    values = {**read_metrics(report, target), **counts}
    return [{"run": run, "metric": name, "value": value} for name, value in values.items()]


def _model_row(report: Report, row: Mapping[str, Any]) -> dict[str, Any]:
    name = row["name"].removeprefix(NAMES.get(report["method"], report["method"])).strip()
    shown = ("accuracy", "own_accuracy", "top_k", "bytes", "exchanges", "devices", "untrained")
    return {"model": name or "devices", **{key: row[key] for key in shown}}


def _device_row(device: Mapping[str, Any]) -> dict[str, Any]:
    personal = device["further"].get("personal", {})
    return {
        "device": device["name"],
        "model": device["model"],
        "samples": device["samples"],
        "accuracy": device["accuracy_fleet"],
        "own_accuracy": personal.get("own_accuracy", device["own_accuracy_fleet"]),
    }


def _class_rows(report: Report) -> Iterator[dict[str, Any]]:
    of_all, of_devices = report["global_accuracy_by_class"], report["mean_accuracy_by_class"]
    for at, name in enumerate(report["class_names"]):
        yield {"class": name, "global": of_all and of_all[at], "devices": of_devices and of_devices[at]}


def _round_rows(report: Report, seconds: Sequence[float]) -> Iterator[dict[str, Any]]:
    curves, spent = {name: curve_of(report, name) for name in CURVES}, report["curves"][0]["spent"]
    for at, sent in enumerate(report["bytes_by_round"]):
        yield {
            "round": at + 1,
            **{name: curve[at] if at < len(curve) else None for name, curve in curves.items()},
            "bytes_up": sent["up"],
            "bytes_down": sent["down"],
            "exchanges": spent[at]["exchanges"],
            "steps": spent[at]["steps"],
            "seconds": seconds[at] if at < len(seconds) else None,
        }


def _traffic_rows(report: Report) -> Iterator[dict[str, Any]]:
    totals: dict[tuple[str, str], int] = {}
    for sent in report["traffic"]:
        key = sent["direction"], sent["kind"]
        totals[key] = totals.get(key, 0) + sent["tensor_bytes"] + sent["envelope_bytes"]
    for (direction, kind), total in totals.items():
        yield {"direction": direction, "kind": kind, "bytes": total}
