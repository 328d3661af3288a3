"""A run in the browser, against `fleetdistill serve` with devices that train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard.dashboard_fleet import SETTINGS, devices_at_work
from support.dashboards import Watched, dashboard, picture
from support.served import RUN, served

pytestmark = pytest.mark.slow


def tile(page: Any, name: str) -> Any:
    """The figure with a name."""
    return page.locator("dl div", has=page.locator("dt", has_text=name)).locator("dd").first


def wait_for_text(page: Any, name: str, text: str) -> None:
    """Waits until a figure contains a text."""
    tile(page, name).filter(has_text=text).wait_for()


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where devices reach a server that has just begun."""
    with served(tmp_path, SETTINGS) as address:
        yield address


@pytest.mark.long
def test_a_run_is_watched_from_its_beginning_to_its_end(
    address: str, tmp_path: Path, page: Any, watched: Watched
) -> None:
    with dashboard(tmp_path, "--store", "store") as url:
        page.goto(url)
        page.evaluate("window.opened = 'once'")
        page.get_by_role("link", name=RUN).click()
        wait_for_text(page, "Progress", "0 of 3 rounds")
        page.evaluate("window.opened = 'once'")
        assert page.get_by_text("No round has begun").is_visible()
        with devices_at_work(address, tmp_path, RUN):
            wait_for_text(page, "Progress", "3 of 3 rounds")
            wait_for_text(page, "Status", "finished")
        page.get_by_role("img", name="Accuracy by round").wait_for()
        page.get_by_text("Round 3 is closed: 2 of 2 devices acknowledged").wait_for()
        picture(page, "run")
        assert page.evaluate("window.opened") == "once"  # nothing was loaded again
    assert watched.errors == []


def test_the_parts_of_a_run_have_its_figures(address: str, tmp_path: Path, page: Any, watched: Watched) -> None:
    with dashboard(tmp_path, "--store", "store") as url, devices_at_work(address, tmp_path, RUN):
        page.goto(f"{url}/runs/{RUN}")
        wait_for_text(page, "Status", "finished")
        for name in ("Bytes", "Time", "Rounds"):
            page.get_by_role("button", name=name, exact=True).click()
        open_tab(page, "Devices")
        page.get_by_role("link", name="device-1").wait_for()
        page.get_by_label("Filter devices").fill("device-0")
        page.get_by_role("link", name="device-1").wait_for(state="detached")
        picture(page, "devices")
        open_tab(page, "Rounds")
        page.get_by_role("gridcell", name="closed").nth(2).wait_for()
        picture(page, "rounds")
        open_tab(page, "Data and bytes")
        page.get_by_role("gridcell", name="model_parameters").wait_for()
        page.get_by_role("img", name="Samples by class: 2 devices").wait_for()
        picture(page, "data")
        open_tab(page, "Settings")
        page.get_by_role("rowheader", name="local_epochs").wait_for()
        picture(page, "settings")
        open_tab(page, "Add a device")
        page.get_by_text(f'server=Server("{address}"').wait_for()
        picture(page, "embed")
    assert watched.errors == []
