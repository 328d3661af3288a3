"""Runs the cells of an experiment, each in a process of its own; a finished run is not repeated."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import tomli_w

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.state.file_lock import lock_file
from fleetdistill_lab.experiments.definition import Cell, Experiment, join_names
from fleetdistill_lab.experiments.process import SETTINGS, round_seconds
from fleetdistill_lab.experiments.results import Results, open_results
from fleetdistill_lab.simulation.checks import check_plan
from fleetdistill_lab.simulation.data.datasets import Dataset
from fleetdistill_lab.simulation.fleet import load_data
from fleetdistill_server.texts import counted

__all__ = ["Progress", "Times", "check_cells", "follow_edits", "run_experiment"]

_LOG = "errors.log"
_OF_DATA = ("dataset", "client_column", "data_dir", "train_limit", "test_limit", "image_size", "seed")
"""Settings that decide which rows are loaded."""


@dataclass(frozen=True)
class Progress:
    """Progress of an experiment.

    Attributes:
        total: Number of runs.
        finished: Number of finished runs, those of earlier calls included.
        failed: Number of failed runs.
        seconds_left: Estimate of the remaining time in seconds, from the finished runs of all calls and the starts of
            their processes in this one; None before the first one.
        cell: The run that ended last; None while one makes progress.
        error: Why it failed; empty otherwise.
        seconds: Its duration in seconds.
        following: Number of runs of the grid that follow, which no other number counts; 0 if these are not of the
            tuning.
    """

    total: int
    finished: int
    failed: int
    seconds_left: float | None
    cell: Cell | None = None
    error: str = ""
    seconds: float = 0.0
    following: int = 0


@dataclass
class Times:
    """Estimates the remaining time from the durations of finished runs.

    Attributes:
        seconds: Durations by label, those of earlier calls included, without the starts of the processes.
        outside: Seconds of each process of this call that its run does not count, such as those of its imports.
        left: Part of each pending run that is left, in [0, 1], by its name; `labels` has their labels.
    """

    left: dict[str, float]
    labels: Mapping[str, str]
    seconds: dict[str, list[float]]
    outside: list[float] = field(default_factory=list)

    def estimate(self, workers: int) -> float | None:
        """Returns the seconds that a number of workers needs for what is left; None before the first finished run."""
        start = statistics.mean(self.outside) if self.outside else 0.0
        known = {label: statistics.mean(seconds) + start for label, seconds in self.seconds.items()}
        if not known:
            return None
        usual = statistics.mean(known.values())
        pending = [part * known.get(self.labels[run], usual) for run, part in self.left.items() if part]
        return sum(pending) / max(1, min(workers, len(pending)))


@dataclass(frozen=True)
class _Event:
    """What a thread tells of a run: a part of it is left, or it has ended after `seconds` of its process."""

    cell: Cell
    left: float
    ended: bool = False
    error: str = ""
    seconds: float = 0.0


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    definition: str = "",
    workers: int = 1,
    overwrite: bool = False,
    data_dir: Path | None = None,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> list[Cell]:
    """Runs what is missing of an experiment and stores it in `out`/results.sqlite and `out`/parquet.

    Every run has a process of its own, so that none depends on another one, and a folder in `out`/runs. A run that was
    interrupted or killed continues. A run that failed is tried again by the next call.

    Args:
        experiment: The experiment.
        out: Folder of the experiment.
        definition: Text of its file, which is stored.
        workers: Number of runs at the same time, at least 1.
        overwrite: Whether to repeat finished runs.
        data_dir: Folder of the data sets; None for that of the file or the environment.
        on_progress: Called when a run makes progress or ends.

    Returns:
        All cells.

    Raises:
        ConfigurationError: A setting is out of range, or a run's data, partition and models do not fit each other;
            nothing has been run then.
        DataError: The experiment is running in `out` already.
        KeyboardInterrupt: Ctrl-C was pressed; the same call continues.
    """
    if workers < 1:
        raise ConfigurationError(f"workers is {workers}, must be at least 1")
    tried = experiment.tuning_cells()
    cells = experiment.cells()
    done = set[str]()
    if not overwrite and (out / "results.sqlite").exists():
        with open_results(out) as earlier:
            done = earlier.finished()
    check_cells([cell for cell in (*(cell for _, cell in tried), *cells) if cell.run not in done], data_dir)
    with _lock(out) as lock, closing(Results(out)) as results:
        run = _Run(experiment, results, workers, overwrite, data_dir, lock.fileno(), on_progress)
        try:
            results.begin(experiment, cells, definition)
            if tried:
                following = len({cell.run for cell in cells})
                of_tuning = replace(run, on_progress=lambda done: on_progress(replace(done, following=following)))
                of_tuning.cells([cell for _, cell in tried])
                cells = experiment.cells(results.tune(experiment, tried))
                results.begin(experiment, cells, definition)
            run.cells(cells)
        finally:
            results.save_parquet()
    return cells


def check_cells(cells: Sequence[Cell], data_dir: Path | None) -> None:
    """Checks data, partition and models of the first run of each method and grid point, as the run itself will.

    Args:
        cells: Cells that are to run.
        data_dir: Folder of the data sets; None for that of the file or the environment.

    Raises:
        ConfigurationError: A run would fail.
    """
    first = {(cell.point, cell.label, bool(cell.tried)): cell for cell in reversed(cells)}
    loaded: dict[tuple[object, ...], Dataset] = {}
    for cell in reversed(first.values()):
        given = cell.simulation
        wanted = replace(given, data_dir=given.data_dir or data_dir)
        key = tuple(getattr(wanted, name) for name in _OF_DATA)
        try:
            loaded = loaded if key in loaded else {key: load_data(wanted)}
            check_plan(wanted, loaded[key])
        except (ConfigurationError, DataError) as error:
            where = join_names(cell.label, cell.point, f"seed {wanted.seed}")
            raise ConfigurationError(f"nothing was run: {where}: {error}") from error


def _lock(out: Path) -> IO[Any]:
    out.mkdir(parents=True, exist_ok=True)
    lock = lock_file(out / "lock")
    if lock is None:
        raise DataError(f"the experiment is running in {out}; wait for it, or choose another --out folder")
    return lock


def follow_edits(experiment: Experiment, out: Path, definition: str) -> None:
    """Gives the results in `out` the cells and the target of an experiment's file if it was edited; runs nothing.

    Args:
        experiment: The experiment.
        out: Folder of the experiment.
        definition: Text of its file.

    Raises:
        ConfigurationError: The folder has no results.
        DataError: The experiment is running in `out`, or values of its tuned setting have not been tried.
    """
    with open_results(out) as results:
        if (stored := next(iter(results.database["experiment"].rows), None)) is not None and (
            (stored["scale"], stored["definition"]) == (experiment.scale, definition)
        ):
            return
        tried = experiment.tuning_cells()
        with _lock(out):
            if missing := {cell.run for _, cell in tried} - results.runs().keys():
                page = out / "report" / "index.html"
                earlier = f"; the earlier report is still in {page}" if page.exists() else ""
                raise DataError(
                    f"the file of {experiment.name} was edited, and {counted(len(missing), 'run')} that tune a setting "
                    f"are missing; make them with `fleetdistill experiment run`{earlier}"
                )
            cells = experiment.cells(results.tune(experiment, tried))
            results.begin(experiment, cells, definition)
            for run in results.finished() & {cell.run for cell in cells}:
                if (out / "runs" / run / "report.json").exists():
                    results.measure(run, _read_report(out / "runs" / run), experiment.target)
            results.save_parquet()


@dataclass(frozen=True)
class _Run:
    """One call of `run_experiment`; attributes as its arguments, and the results and the lock's file descriptor."""

    experiment: Experiment
    results: Results
    workers: int
    overwrite: bool
    data_dir: Path | None
    lock: int
    on_progress: Callable[[Progress], object]

    def cells(self, cells: Sequence[Cell]) -> None:
        """Runs what is missing of some cells."""
        unique = {cell.run: cell for cell in reversed(cells)}  # the first cell of each run
        reports = {run: self.results.folder / "runs" / run / "report.json" for run in unique}
        if self.overwrite:
            for report in reports.values():
                shutil.rmtree(report.parent, ignore_errors=True)
        finished = {run for run in self.results.finished() & unique.keys() if reports[run].exists()}
        seconds: dict[str, list[float]] = {}
        for run in finished:
            read = _read_report(reports[run].parent)
            self.results.measure(run, read, self.experiment.target)
            seconds.setdefault(unique[run].label, []).append(read["seconds"])
        pending = [cell for cell in cells if cell is unique[cell.run] and cell.run not in finished]
        times = Times({cell.run: 1.0 for cell in pending}, {cell.run: cell.label for cell in pending}, seconds)
        self.on_progress(Progress(len(unique), len(finished), 0, times.estimate(self.workers)))
        self._run_all(pending, len(finished), times)

    def _run_all(self, pending: Sequence[Cell], finished: int, times: Times) -> None:
        total, failed = finished + len(pending), 0
        todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        for cell in pending:
            todo.put(cell)
        folder, number = self.results.folder / "runs", min(self.workers, len(pending))
        pool = [_Worker(folder, todo, events, self.data_dir, self.lock) for _ in range(number)]
        ended = 0
        try:
            while ended < len(pending):
                event = events.get()
                times.left[event.cell.run] = event.left
                if not event.ended:
                    self.on_progress(Progress(total, finished, failed, times.estimate(self.workers)))
                    continue
                ended += 1
                seconds = 0.0
                if event.error:
                    failed += 1
                    self.results.fail(event.cell, event.error)
                else:
                    finished += 1
                    seconds, of_call = self._store(event.cell)
                    times.seconds.setdefault(event.cell.label, []).append(seconds)
                    times.outside.append(max(0.0, event.seconds - of_call))
                left = times.estimate(self.workers)
                self.on_progress(Progress(total, finished, failed, left, event.cell, event.error, seconds))
        finally:
            for worker in pool:
                worker.stop()

    def _store(self, cell: Cell) -> tuple[float, float]:
        """Stores a finished run and deletes its state; returns its duration, and that in the last call only."""
        folder = self.results.folder / "runs" / cell.run
        report = _read_report(folder)
        self.results.add(cell, report, round_seconds(folder), self.experiment.target)
        shutil.rmtree(folder / "work", ignore_errors=True)
        of_call = json.loads((folder / "report.json").read_text())["seconds"]
        return float(report["seconds"]), float(of_call)


class _Worker:
    """A thread that starts the process of one run after another.

    Args:
        folder: Folder of the runs.
        todo: Cells to run; all workers take from it.
        events: Gets what happens.
        data_dir: Folder of the data sets.
        lock: File descriptor of the experiment's lock, which the processes hold too until they have ended.
    """

    def __init__(
        self,
        folder: Path,
        todo: queue.SimpleQueue[Cell],
        events: queue.SimpleQueue[_Event],
        data_dir: Path | None,
        lock: int,
    ) -> None:
        self._folder, self._todo, self._events, self._data_dir = folder, todo, events, data_dir
        self._inherited = [lock] if os.name == "posix" else []
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="experiment-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Interrupts the run in progress, which can be continued, and waits for its process."""
        with self._starting:
            self._stopping.set()
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
        self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                cell = self._todo.get_nowait()
            except queue.Empty:
                return
            folder = self._folder / cell.run
            began = time.monotonic()
            try:
                status = self._run(cell, folder)
            except OSError as error:
                self._events.put(_Event(cell, 0.0, ended=True, error=str(error)))
                continue
            if self._stopping.is_set():
                return
            reason = "" if status == 0 else _last_line(folder / _LOG, status)
            self._events.put(_Event(cell, 0.0, ended=True, error=reason, seconds=time.monotonic() - began))

    def _run(self, cell: Cell, folder: Path) -> int:
        """Runs the process of a cell to its end and returns its exit status."""
        folder.mkdir(parents=True, exist_ok=True)
        sections = {name: dict(values) for name, values in cell.sections.items()}
        if self._data_dir is not None:
            sections["simulation"].setdefault("data_dir", str(self._data_dir))
        (folder / SETTINGS).write_text(tomli_w.dumps(sections))
        command = [sys.executable, "-m", "fleetdistill_lab.experiments.process", str(folder), str(os.getpid())]
        with (folder / _LOG).open("w") as log:
            with self._starting:
                if self._stopping.is_set():
                    return 0
                self._process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=log, text=True, pass_fds=self._inherited
                )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("{"):  # a model may print
                    done = json.loads(line)
                    self._events.put(_Event(cell, 1 - done["completed"] / max(1, done["total"])))
            return self._process.wait()


def _read_report(folder: Path) -> dict[str, Any]:
    """Returns the report of a finished run, with the seconds of all calls; report.json has those of the last one."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return {**report, "seconds": max(report["seconds"], *round_seconds(folder)[-1:])}


def _last_line(log: Path, status: int) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else f"the process ended with status {status}"
