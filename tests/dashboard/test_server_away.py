"""Pages over `--server` with TLS: each run has its own, and they survive a server that goes away and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.dashboards import dashboard, picture
from support.postgres import Postgres
from support.secured import make_pki, secured_front

from fleetdistill_server.security.certificates import Role
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow


def begin(store: Store, run: str, rounds: int) -> None:
    store.runs.begin(run, {"run": {"name": run, "method": "fedavg", "rounds": rounds}})


@pytest.mark.long
def test_the_pages_of_a_server_that_goes_away_and_comes_back(tmp_path: Path, page: Any) -> None:
    make_pki(tmp_path / "pki").issue_person(Role.VIEWER, "vera", 1.0, tmp_path / "vera")
    store = Store.open(tmp_path / "store")
    begin(store, "digits", 3)
    begin(store, "sounds", 7)
    with secured_front(tmp_path / "store", tmp_path / "pki") as front:
        where = ["--server", f"127.0.0.1:{front.port}", "--identity", str(tmp_path / "vera")]
        with dashboard(tmp_path, *where) as url:
            page.goto(url)
            page.get_by_role("gridcell", name="0 of 3").wait_for()
            page.get_by_role("gridcell", name="digits").focus()
            page.keyboard.press("ArrowDown")  # the table's own keys; Enter then opens the run of the cell
            page.keyboard.press("Enter")
            page.get_by_text("0 of 7 rounds").wait_for()
            front.stop()
            page.get_by_text("The figures below are from").wait_for()
            picture(page, "server-away")
            begin(store, "later", 5)
            front.start()
            page.get_by_text("The figures below are from").wait_for(state="hidden")
            page.get_by_text("0 of 7 rounds").wait_for()
            page.goto(url)
            page.get_by_role("gridcell", name="0 of 5").wait_for()
    store.close()


@pytest.mark.long
@pytest.mark.postgres
def test_an_open_page_says_that_the_database_is_away(own_postgres: Postgres, tmp_path: Path, page: Any) -> None:
    with own_postgres.schema() as url:
        set_location(tmp_path / "store", Location(database=url))
        store = Store.open(tmp_path / "store")
        begin(store, "digits", 3)
        store.close()
        with dashboard(tmp_path, "--store", str(tmp_path / "store")) as address:
            page.goto(address)
            page.get_by_role("gridcell", name="0 of 3").wait_for()
            own_postgres.stop()
            page.get_by_text("The figures below are from").wait_for()
            page.get_by_text("Something is wrong: the database is not available").wait_for()
            own_postgres.start_again()
            page.get_by_text("The figures below are from").wait_for(state="hidden")
