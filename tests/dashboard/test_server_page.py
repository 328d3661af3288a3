"""The page of the server, and the sentence on the first page that says whether everything is all right."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from dashboard.dashboard_fleet import SETTINGS, tiles_of
from support.dashboards import Watched, dashboard, picture
from support.secured import make_pki
from support.served import RUN, served
from typer.testing import CliRunner

from fleetdistill_console.dashboard.pages.server import sentence, tiles
from fleetdistill_server.cli.app import app
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.service.serve_lock import SERVED_FILE
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.runs import View
from fleetdistill_server.views.server import OF_FORGOTTEN_CA

WELL = {"problems": [], "warnings": [], "serves": True}


@pytest.mark.parametrize(
    ("facts", "problem", "severity", "says"),
    [
        ({}, "", "good", "Everything is all right."),
        ({"queue": ["running"]}, "", "good", "Everything is all right."),
        ({"queue": ["waiting for devices"]}, "", "good", "Everything is all right; 1 run waits for devices."),
        (
            {"queue": ["queued (1 of 2)", "waiting for devices", "queued (2 of 2)", "idle"]},
            "",
            "good",
            "Everything is all right; 1 run waits for devices, 2 runs wait for an engine.",
        ),
        ({"warnings": ["the certificate of server expires"]}, "", "warn", "the certificate of server expires"),
        ({"serves": False}, "", "warn", "No server works on this store."),
        ({"problems": ["the front does not run"]}, "", "bad", "the front does not run"),
        ({}, "the database is away", "bad", "the database is away"),
        ({"serves": False, "warnings": ["old"]}, "no answer for 13 s", "bad", "no answer for 13 s"),
    ],
)
def test_one_sentence_says_whether_everything_is_all_right(
    facts: dict[str, Any], problem: str, severity: str, says: str
) -> None:
    queue = [{"status": status} for status in facts.get("queue", ())]
    result, text = sentence(View({"queue": queue}, {**WELL, **facts}), problem)
    assert (result, says in text) == (severity, True)


def test_the_figures_of_the_server() -> None:
    lists: dict[str, list[dict[str, Any]]] = {
        "queue": [{"engine": True}, {"engine": False}],
        "certificates": [
            {"holder": "CA", "device": "", "expires": "1970-02-01T00:00:00Z", "state": "valid"},
            {"holder": "server", "device": "", "expires": "1970-01-11T00:00:00Z", "state": "valid"},
            {"holder": "viewer-vera", "device": "", "expires": "1970-01-02T00:00:00Z", "state": "revoked"},
            {"holder": "viewer-vic", "device": "", "expires": "1970-01-02T00:00:00Z", "state": OF_FORGOTTEN_CA},
            {"holder": "off", "device": "off", "expires": "1970-01-02T00:00:00Z", "state": "expired"},
        ],
        "backups": [
            {"at": "1970-01-03T00:00:00Z", "result": "failed: no space"},
            {
                "at": "1970-01-02T00:00:00Z",
                "result": "done: 3 payloads and the database, 9.0 kB, with 2 payloads missing",
            },
        ],
    }
    view = View(lists, {"serves": True, "engines_at_once": 2, "disk_free": 5_000_000})
    runs = [{"status": "running"}, {"status": "queued (1 of 1)"}, {"status": "running"}]
    assert list(tiles(view, runs, now=4 * 86_400.0).values()) == [
        "1 of 2 in use",
        "1 queued, 2 running",
        "5.00 MB",
        "server, in 6 d 0 h",
        "3 d 0 h ago, with 2 payloads missing",
    ]


@pytest.fixture
def large_store(tmp_path: Path) -> Path:
    """A store of a little more than 3 MB, which may have 9 MB; made before the browser has its event loop."""
    Store.open(tmp_path / "store").close()
    (tmp_path / "store" / "blobs" / "more").write_bytes(bytes(3_000_000))
    limits = "[server]\ndisk_budget_bytes = 9_000_000\nkeep_free_bytes = 7_000_000\n"
    (tmp_path / "store" / SERVED_FILE).write_text(limits)
    return tmp_path


@pytest.mark.long
@pytest.mark.slow
def test_the_size_of_the_store_is_shown_with_its_limits(large_store: Path, page: Any) -> None:
    with dashboard(large_store, "--store", "store") as url:
        page.goto(f"{url}/server")
        shown = tiles_of(page, "Store and disk", "of 9.00 MB")
    assert re.fullmatch(r"3\.\d\d MB of 9\.00 MB", shown["Size of the store"])
    assert shown["Uploads are refused below"] == "7.00 MB"
    assert (shown["Database"], shown["Payloads"]) == ("SQLite", "files")


@pytest.mark.long
@pytest.mark.slow
def test_the_server_is_seen_from_its_machine_and_from_elsewhere(tmp_path: Path, page: Any, watched: Watched) -> None:
    make_pki(tmp_path / "pki").issue_person(Role.VIEWER, "vera", 1.0, tmp_path / "pki" / "viewer-vera")
    tls = {"pki": str(tmp_path / "pki"), "enrol_listen": "127.0.0.1:0"}
    with served(tmp_path, {**SETTINGS, "server": tls}) as address:
        made = CliRunner().invoke(app, ["backup", str(tmp_path / "backup"), "--store", str(tmp_path / "store")])
        assert made.exit_code == 0, made.output
        identity = ["--identity", str(tmp_path / "pki" / "viewer-vera")]
        for where in (["--store", "store"], ["--server", address, *identity]):
            with dashboard(tmp_path, *where) as url:
                page.goto(url)
                page.get_by_text("viewer-vera, in").wait_for()
                page.get_by_text(r"The server works, but the certificate of").wait_for()  # hers is valid for a day
                picture(page, f"server-glance{where[0]}")
                page.get_by_role("link", name="Server").click()
                for name in ("supervisor", "front", "engine", RUN, "CA", "Python"):
                    page.get_by_role("gridcell", name=name, exact=True).first.wait_for()
                page.get_by_role("gridcell", name="done: ").first.wait_for()
                calls = page.get_by_role("heading", name="Operators' calls")
                calls.wait_for(state="hidden" if "--server" in where else "visible")
                for width in (1280, 400):
                    page.set_viewport_size({"width": width, "height": 900})
                    picture(page, f"server{where[0]}-{width}")
                away = "ERR_CONNECTION_REFUSED"  # the page went on to call the dashboard of before
                assert [error for error in watched.errors if away not in error] == []
        view = LocalStore(tmp_path / "store").server()
        assert {row["process"]: row["state"] for row in view.lists["processes"]} == dict.fromkeys(
            ("supervisor", "front", "engine"), "works"
        )
        assert view.facts["problems"] == []
        (supervisor,) = [row["pid"] for row in view.lists["processes"] if row["process"] == "supervisor"]
        os.kill(supervisor, signal.SIGSTOP)
        try:
            until = time.monotonic() + 60
            while not (said := LocalStore(tmp_path / "store").server().facts["problems"]):
                assert time.monotonic() < until
            assert "the supervisor hangs" in said[0]
        finally:
            os.kill(supervisor, signal.SIGCONT)
