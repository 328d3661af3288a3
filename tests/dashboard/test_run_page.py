"""A run in the browser, against `fleetdistill serve` with devices that train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard.dashboard_fleet import SETTINGS, devices_at_work, tiles_of
from support.dashboards import Watched, dashboard, picture
from support.served import RUN, served

from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted

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


@pytest.mark.long
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


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A store with a run of 1,001 events and compressed bytes; made before the browser has its event loop.

    Up 5 MB became 2 MB, and down 4 MB became 3.5 MB.
    """
    store = Store.open(tmp_path / "store")
    store.runs.begin(RUN, {"run": {"name": RUN, "method": "fedavg", "rounds": 3}})
    number = store.runs.start_round(RUN, ["a"])
    for direction, tensor, sent in (("up", 5_000_000, 2_000_000), ("down", 4_000_000, 3_500_000)):
        counted = Counted(Counter(model_parameters=tensor), Counter(model_parameters=sent))
        store.history.add_traffic(RUN, number, "a", direction, counted, 0)
    with store.transaction():
        for event in range(1001):
            store.history.add_event(RUN, "late", f"answer {event}")
    store.runs.close_round(RUN, number, b"", [], {})
    store.close()
    return tmp_path


@pytest.mark.long
def test_more_events_are_shown_once_up_to_a_thousand(stored: Path, page: Any) -> None:
    with dashboard(stored, "--store", "store") as url:
        page.goto(f"{url}/runs/{RUN}?tab=events")
        page.get_by_text("200 of 1,001 events shown").wait_for()
        more = page.get_by_role("button", name="Show up to 1,000")
        more.click()
        page.get_by_text("1,000 of 1,001 events shown").wait_for()
        assert not more.is_visible(), "there are no more that it could show"


@pytest.mark.long
def test_the_bytes_that_were_saved_are_those_of_both_directions(stored: Path, page: Any) -> None:
    with dashboard(stored, "--store", "store") as url:
        page.goto(f"{url}/runs/{RUN}?tab=data-and-bytes")
        shown = tiles_of(page, "Bytes by kind", "MB")
    assert shown == {
        "Received from devices": "2.00 MB",
        "Sent to devices": "3.50 MB",
        "Saved by compression": "3.50 MB",
    }
