"""The dashboard's process: where it listens, what it asks for, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.dashboards import Watched, dashboard
from typer.testing import CliRunner

from fleetdistill_server.cli.app import app
from fleetdistill_server.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a run that nobody serves."""
    store = Store.open(tmp_path / "store")
    store.runs.begin("digits", {"run": {"name": "digits", "method": "fedavg", "rounds": 3}})
    store.close()
    return tmp_path / "store"


def refused(*options: str) -> str:
    """The error with which the command ends."""
    result = CliRunner().invoke(app, ["dashboard", *options])
    assert result.exit_code == 1
    return result.stderr


def test_a_dashboard_of_a_store_listens_on_loopback_only(store: Path) -> None:
    said = refused("--store", str(store), "--listen", "0.0.0.0")
    assert "--listen is 0.0.0.0" in said
    assert "--server" in said


def test_a_directory_without_a_store_is_an_error(tmp_path: Path) -> None:
    assert "there is no store in" in refused("--store", str(tmp_path / "nothing"))


@pytest.mark.cold_start
@pytest.mark.slow
def test_pages_use_only_the_dashboard_and_leave_nothing_behind(store: Path, page: Any, watched: Watched) -> None:
    before = sorted(store.parent.iterdir())
    with dashboard(store.parent, "--store", str(store)) as address:
        for path in ("/", "/runs/digits", "/runs/digits/devices/d0", "/compare?runs=digits"):
            page.goto(f"{address}{path}")
            page.wait_for_load_state("networkidle")
    hosts = {url.split("/")[2] for url in watched.requests if not url.startswith("data:")}
    assert hosts == {address.removeprefix("http://")}
    assert watched.errors == []
    assert sorted(path for path in store.parent.iterdir() if path.name != "dashboard.log") == before
