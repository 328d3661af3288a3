"""A real `mlflow server` on 127.0.0.1, and what it has stored."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.processes import free_port, wait_until


class MlflowServer:
    """A server with a database in a folder.

    Attributes:
        uri: Its address.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.uri = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Starts the server, and waits until it answers."""
        files = [f"--backend-store-uri=sqlite:///{self._folder}/mlflow.db", f"--artifacts-destination={self._folder}"]
        where = ["--host=127.0.0.1", f"--port={self._port}", "--workers=1"]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        command = [sys.executable, "-m", "mlflow", "server", *files, *where]
        with (self._folder / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        wait_until(self._answers, "the MLflow server to answer")

    def stop(self) -> None:
        """Kills the server and its workers."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In the block the server accepts calls and does not answer; afterwards it does what it was called for."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)  # of its own session

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "mlflow.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health") as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def runs(self, experiment: str = "fleetdistill") -> list[Any]:
        """The runs of an experiment, the oldest first."""
        client = self.client()
        result = client.get_experiment_by_name(experiment)
        return client.search_runs([result.experiment_id], order_by=["attributes.start_time"]) if result else []

    def steps(self, run: Any, name: str) -> list[int]:
        """Steps of each value of a figure, in order, doubled ones too."""
        return sorted(item.step for item in self.client().get_metric_history(run.info.run_id, name))

    def files(self, run: Any, folder: str = "") -> list[str]:
        """Paths of a run's artefacts in a folder."""
        return [artifact.path for artifact in self.client().list_artifacts(run.info.run_id, folder)]

    def client(self) -> Any:
        """A client of the server."""
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri)


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """Runs a server until the end of the block."""
    server = MlflowServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
