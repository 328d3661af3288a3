"""`fleetdistill simulate --open`: the page of the finished run, with what only the report contains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import Watched, picture
from support.forked_popen import REAL_POPEN
from support.processes import COMMAND, PATIENCE_SECONDS, wait_until

from fleetdistill_console.dashboard.server import SimulatedRun, training_classes, with_alone
from fleetdistill_server.store.store import Store

OPTIONS = (
    *("--devices", "3", "--rounds", "2", "--method", "fedavg"),
    *("--set", "simulation.train_limit=120", "--set", "simulation.test_limit=40"),
)


def test_rounds_have_accuracy_of_devices_trained_alone_as_long() -> None:
    rounds = [
        {"round": number, "status": status} for number, status in enumerate(["closed", "short: late", "closed"], 1)
    ]
    result = with_alone(rounds, {"a": [0.2, 0.4], "b": [0.4, 0.8]})
    assert [row["alone_accuracy"] for row in result] == pytest.approx([0.3, None, 0.6])
    assert [row["alone_accuracy"] for row in with_alone(rounds, {})] == [None] * 3


def test_rounds_after_a_round_have_the_accuracy_of_as_many_alone(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "work" / "store")
    store.runs.begin("r", {"run": {"name": "r", "method": "fedavg", "rounds": 3}})
    for _ in range(3):
        store.runs.close_round("r", store.runs.start_round("r", ["a"]), b"", [], {})
    store.close()
    (tmp_path / "report.json").write_text(json.dumps({"alone_accuracy_by_round": {"a": [0.1, 0.2, 0.3]}}))
    result = SimulatedRun(tmp_path).rounds("r", after=1).lists["rounds"]
    assert [(row["round"], row["alone_accuracy"]) for row in result] == [(2, 0.2), (3, 0.3)]


def test_classes_are_those_of_the_training_data() -> None:
    [row] = training_classes([{"name": "a", "samples_by_class": [3, 0, 2]}])
    assert row == {"device": "a", "split": "train", "counts": {"0": 3, "2": 2}}


@pytest.mark.long
@pytest.mark.slow
def test_simulate_opens_the_page_of_its_run(tmp_path: Path, page: Any, watched: Watched) -> None:
    browser = tmp_path / "browser"  # what `webbrowser` calls: it only takes down the address
    browser.write_text(
        f'#!/bin/sh\nprintf "%s" "$1" > {tmp_path}/opened.new; mv {tmp_path}/opened.new {tmp_path}/opened\n'
    )
    browser.chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with (tmp_path / "log").open("w") as log:
        process = REAL_POPEN(
            [*COMMAND, "simulate", *OPTIONS, "--out", "sim", "--open"],
            cwd=tmp_path,
            env={**environment, "BROWSER": f"{browser} %s", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: (tmp_path / "opened").exists() or process.poll() is not None, "the browser to be opened")
        assert process.poll() is None, (tmp_path / "log").read_text()
        page.goto((tmp_path / "opened").read_text())
        page.get_by_role("img", name=re.compile("Accuracy by round: .*Devices alone")).wait_for()
        picture(page, "simulated")
        page.get_by_role("tab", name="Data and bytes").click()
        page.get_by_text("number of samples in the training data").wait_for()
        picture(page, "simulated-data")
        assert (tmp_path / "sim" / "fleet.png").exists()
        assert watched.errors == []
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)
