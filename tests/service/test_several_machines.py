"""`fleetdistill serve --only`: fronts and an engine that share nothing but PostgreSQL and an object store."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from service.load_balancer import MISSING, load_balancer
from support.answering import AnsweringFleet
from support.fleets import assert_no_upload_lost
from support.processes import COMMAND, PATIENCE_SECONDS, free_port, wait_until
from support.scraping import scraped_until
from typer.testing import CliRunner

from fleetdistill_server.cli.app import app
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY

RUN = "apart"
CONFIG = """
[run]
name = "apart"
method = "feddkc"
rounds = 2
min_devices = 2
[contract]
classes = 10
input_shape = [1, 8, 8]
[method]
server_epochs = 1
[server]
listen = "127.0.0.1:0"
torch_device = "cpu"
store = "{store}"
database = "{database}"
blobs = "{blobs}"
metrics = "127.0.0.1:{metrics}"
"""


class Host:
    """A machine with one process of the server, in a directory of its own."""

    def __init__(self, directory: Path, database: str, blobs: str) -> None:
        directory.mkdir()
        self._config, self._log = directory / "run.toml", directory / "server.log"
        self.store, self.metrics = directory / "store", free_port()
        given = {"store": self.store, "database": database, "blobs": blobs, "metrics": self.metrics}
        self._config.write_text(CONFIG.format(**given))

    @contextlib.contextmanager
    def serve(self, only: str) -> Iterator[subprocess.Popen[bytes]]:
        with self._log.open("w") as log:
            process = subprocess.Popen([*COMMAND, "serve", "--only", only, str(self._config)], stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_SECONDS)

    def port(self) -> int:
        def found() -> int:
            match = re.search(r"is served on 127\.0\.0\.1:(\d+)", self._log.read_text())
            return int(match[1]) if match else 0

        return wait_until(found, "the front to listen")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.s3
def test_two_fronts_and_an_engine_on_three_machines_end_a_run(
    database_url: str, blobs_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGPASSWORD", "not-in-any-file-either")
    fronts = [Host(tmp_path / f"front-{number}", database_url, blobs_url) for number in range(2)]
    engine = Host(tmp_path / "engine", database_url, blobs_url)
    with contextlib.ExitStack() as stack:
        for host, part in ((fronts[0], "front"), (fronts[1], "front"), (engine, "engine")):
            stack.enter_context(host.serve(part))
        with AnsweringFleet([host.port() for host in fronts], RUN, 2) as fleet:
            assert_metrics_of_each(fronts, engine)
            wait_until(lambda: all(device.finished for device in fleet.devices), "the devices to hear of the end")
        store = Store.open(fronts[1].store)  # every host's directory leads to the same store
        assert store.runs.existing(RUN).status == "finished"
        assert_no_upload_lost(store, run=RUN)
        assert [answers.used for _, answers in store.summaries.rounds(RUN, 0, EVERY)] == [2, 2]
        store.close()
        assert not list(tmp_path.glob("*/store/store.sqlite"))
        assert_private([*fronts, engine])
    listed = CliRunner().invoke(app, ["runs", "list", "--store", str(engine.store)])
    assert (listed.exit_code, "finished" in listed.stdout) == (0, True)
    shown = CliRunner().invoke(app, ["runs", "show", RUN, "--json", "--store", str(engine.store)])
    assert shown.exit_code == 0
    assert not any(secret in shown.stdout for secret in secrets())


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.s3
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_run_behind_load_balancer_survives_loss_of_a_front(database_url: str, blobs_url: str, tmp_path: Path) -> None:
    fronts = [Host(tmp_path / f"front-{number}", database_url, blobs_url) for number in range(2)]
    engine = Host(tmp_path / "engine", database_url, blobs_url)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(host.serve("front")) for host in fronts]
        stack.enter_context(engine.serve("engine"))
        port = stack.enter_context(load_balancer(tmp_path, [host.port() for host in fronts]))
        fleet = stack.enter_context(AnsweringFleet(port, RUN, 2))
        wait_until(lambda: all(device.receipts for device in fleet.devices), "the first receipts")
        servers[0].kill()  # its front ends with it
        wait_until(lambda: all(device.finished for device in fleet.devices), "the devices to hear of the end")
        store = Store.open(fronts[1].store)
        assert store.runs.existing(RUN).status == "finished"
        assert_no_upload_lost(store, {receipt for device in fleet.devices for receipt in device.receipts}, RUN)
        store.close()


def assert_metrics_of_each(fronts: Sequence[Host], engine: Host) -> None:
    """Each server has an endpoint of its own with its own processes; the runs are in the engine's only, once."""
    for host in fronts:
        front = scraped_until(host.metrics, lambda now: now.by("process_up"), "the metrics of a front")
        assert set(front.by("process_up")) == {("front", "")}
        assert not front.by("run_info")
    told = scraped_until(
        engine.metrics, lambda now: now.by("run_info") and now.by("process_up"), "the engine's metrics"
    )
    assert set(told.by("process_up")) == {("engine", RUN)}
    assert [key for key in told.by("run_info") if RUN in key]


def secrets() -> list[str]:
    return [os.environ["PGPASSWORD"], os.environ["AWS_SECRET_ACCESS_KEY"]]


def assert_private(hosts: Sequence[Host]) -> None:
    """No secret of the environment is in a file or in a log, and only its owner reads where the store is."""
    for host in hosts:
        files = [path for path in host.store.parent.rglob("*") if path.is_file()]
        assert not [path for path in files for secret in secrets() if secret.encode() in path.read_bytes()]
        for name in ("location.toml", "served.toml"):
            assert (host.store / name).stat().st_mode & 0o777 == 0o600


def test_a_part_alone_needs_what_the_machines_share(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(store=tmp_path / "store", database="postgresql://nowhere/db", blobs="", metrics=9464))
    done = CliRunner().invoke(app, ["serve", "--only", "front", str(path)])
    assert done.exit_code == 1
    assert "--only front requires [server] database and blobs" in done.stderr
    assert not (tmp_path / "store").exists()
