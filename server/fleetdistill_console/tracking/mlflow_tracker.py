"""Runs on an MLflow tracking server."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, TypeVar

from fleetdistill_console.tracking.tracker import Description, RoundPoint
from fleetdistill_server.store.states import RunStatus

T = TypeVar("T")
_ID = "fleetdistill.id"
_NOTE = "fleetdistill."
_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""Limits of MLflow for one request."""
_MAX_CHARACTERS = 5000
"""Longest value of a tag and, in part, of a parameter that MLflow accepts."""
_STATUSES: Mapping[str, str] = {
    RunStatus.FINISHED: "FINISHED",
    RunStatus.CANCELLED: "KILLED",
    RunStatus.STOPPED: "FAILED",
}
EXPERIMENT = "fleetdistill"
"""Name of the experiment, unless MLFLOW_EXPERIMENT_NAME is set."""
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Variables for a process that uses this module: the follower repeats what fails, so the client should not."""


class MlflowTracker:
    """An experiment on an MLflow tracking server.

    Args:
        uri: URI of the tracking server.
        experiment: Name of the experiment, created if necessary; empty for the usual one.
    """

    def __init__(self, uri: str, experiment: str = "") -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT

    def open(self, run: Description) -> MlflowRun:
        """Returns a run of the experiment, created if necessary."""
        experiment = self._experiment_id()
        result = self._find(experiment, run.id)
        if result is None:
            tags = {_ID: run.id}
            parent = self._find(experiment, run.parent) if run.parent else None
            if parent is not None:
                tags["mlflow.parentRunId"] = parent.info.run_id
            result = self._client.create_run(experiment, int(run.began * 1000), tags, run.title)
        opened = MlflowRun(self._client, result)
        opened.set_settings(run.settings)
        return opened

    def _find(self, experiment: str, run: str) -> Any:
        runs = self._client.search_runs([experiment], f"tags.`{_ID}` = '{run}'", max_results=1)
        return runs[0] if runs else None

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except MlflowException:  # another process has just created it
                experiment = self._client.get_experiment_by_name(self._experiment)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)


class MlflowRun:
    """A run on an MLflow tracking server; see `TrackedRun`."""

    def __init__(self, client: Any, found: Any) -> None:
        self._client = client
        self._id: str = found.info.run_id
        self._status: str = found.info.status
        self._settings: dict[str, str] = dict(found.data.params)
        self._tags: dict[str, str] = dict(found.data.tags)
        self._known = defaultdict[str, set[int]](set)
        for name in found.data.metrics:
            self._known[name] = {item.step for item in client.get_metric_history(self._id, name)}

    def known(self) -> Mapping[str, AbstractSet[int]]:
        """Returns the steps that the server has of each figure."""
        return self._known

    def set_settings(self, settings: Mapping[str, str]) -> None:
        """Stores settings as parameters. MLflow never changes one, so a changed value becomes a tag."""
        from mlflow.entities import Param

        short = {name: value[:_MAX_CHARACTERS] for name, value in settings.items()}
        new = [Param(name, value) for name, value in short.items() if name not in self._settings]
        for some in _batches(new, _MAX_PARAMS):
            self._client.log_batch(self._id, params=some)
        for name, value in short.items():
            if self._settings.get(name, value) != value:
                self.set_note(f"changed.{name}", value)

    def write(self, points: Sequence[RoundPoint]) -> None:
        """Writes figures, those of one round in one request."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for some in _batches(metrics, _MAX_METRICS):
            self._client.log_batch(self._id, metrics=some)
            for item in some:
                self._known[item.key].add(item.step)

    def note(self, name: str) -> str | None:
        """Returns a tag of the run."""
        return self._tags.get(_NOTE + name)

    def set_note(self, name: str, value: str) -> None:
        """Sets a tag of the run."""
        tag, value = _NOTE + name, value[:_MAX_CHARACTERS]
        if self._tags.get(tag) != value:
            self._client.set_tag(self._id, tag, value)
            self._tags[tag] = value

    def keep(self, files: Mapping[str, Path]) -> None:
        """Uploads files as artefacts."""
        for name, file in files.items():
            folder = Path(name).parent.as_posix()
            self._client.log_artifact(self._id, str(file), None if folder == "." else folder)

    def end(self, status: str, reason: str) -> None:
        """Sets the run's status; a run that is resumed runs again."""
        wanted = _STATUSES.get(status, "RUNNING")
        self.set_note("status", f"{status}: {reason}" if reason else status)
        if wanted == self._status:
            return
        if wanted == "RUNNING":
            self._client.update_run(self._id, status=wanted)
        else:
            self._client.set_terminated(self._id, wanted)
        self._status = wanted

    def close(self) -> None:
        """Does nothing; a client holds no connection."""


def _batches(all_: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    return (all_[first : first + most] for first in range(0, len(all_), most))
