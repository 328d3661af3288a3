"""Where things stand on the pages: tables that fit, their order, tabs in the address, and what cannot be undone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import dashboard, picture
from support.processes import wait_until

from fleetdistill.knowledge import ClassCount, Metric, Metrics
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.service import run_changes
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted

pytestmark = [pytest.mark.slow, pytest.mark.long]
DEVICES = ("d10", "d2", "d1")
REASON = "the update of d10 is 40 times as long as those of the others"
SIDEWAYS = """() => [...document.querySelectorAll('.ag-root-wrapper')].filter(one => one.checkVisibility())
  .map(one => [...one.querySelectorAll('.ag-body-horizontal-scroll-viewport')]
    .map(part => part.scrollWidth - part.clientWidth)).flat().filter(more => more > 1)"""
"""Pixels by which tables are wider than their place."""
EMPTY = """() => [...document.querySelectorAll('.fd-table')].filter(one => one.checkVisibility()).map(one => {
  const rows = [...one.querySelectorAll('.ag-center-cols-container .ag-row')].map(row => row.offsetHeight);
  const body = one.querySelector('.ag-center-cols-viewport').offsetHeight;
  return body - rows.reduce((sum, height) => sum + height, 0);
}).filter(empty => empty > 2)"""
"""Pixels of empty space below the rows of tables."""


def fill(directory: Path) -> None:
    """A paused run with a closed and an open round, and runs of one, two and ten rounds."""
    store = Store.open(directory)
    contract = contract_pb2.Contract(classes=["cat", "dog"], input_shape=[1, 8, 8])
    profile = contract_pb2.DeviceProfile(samples=1200, model_name="digits_linear", sdk_version="0.1.0", parameters=6)
    with store.transaction():
        store.runs.begin("digits", {"run": {"name": "digits", "method": "fedavg", "rounds": 3, "quorum": 2 / 3}})
        store.runs.publish_contract("digits", contract.SerializeToString())
        for device in DEVICES:
            store.devices.register("digits", device, device.encode(), profile.SerializeToString())
        for rounds in (10, 2):
            store.runs.begin(f"run-{rounds}", {"run": {"name": f"run-{rounds}", "method": "feddkc", "rounds": rounds}})
    with store.transaction():
        number = store.runs.start_round("digits", list(DEVICES))
        ask(store, number)
        asked = {device: store.asks.get("digits", number, 1, device) for device in DEVICES}
        counts = [ClassCount(label=label, sum=1, count=2) for label in range(2)]
        for device, row in asked.items():
            assert row is not None
            store.asks.accept_upload(row.id, 1, hashlib.sha256(b"answer").digest(), 5, 3)
            figures = [Metric(name="accuracy", split="test", sum=4, count=4, by_class=counts)]
            store.history.add_figures("digits", number, device, Metrics(metrics=figures))
        counted = Counted()
        counted.tensor["weights"] = counted.sent["weights"] = 5_000_000
        store.history.add_traffic("digits", number, "d2", "up", counted, 3)
        store.history.add_event("digits", "norm-guard", REASON, number=number, device="d10", code="too-long")
        store.history.add_event("digits", "engine-failed", "the engine was killed")
        store.runs.close_round("digits", number, hashlib.sha256(b"answer").digest(), [], {})
        ask(store, store.runs.start_round("digits", list(DEVICES)))
    run_changes.change(store, "digits", RunStatus.PAUSED, "operator olga")
    store.close()


def ask(store: Store, number: int) -> None:
    """Asks each device in a round, with a deadline in a far future."""
    row: dict[str, Any] = {
        "run": "digits",
        "round": number,
        "step_number": 1,
        "step": "train",
        "expects": {},
        "seed": 1,
    }
    row |= {"payload": hashlib.sha256(b"answer").digest(), "payload_bytes": 5, "deadline_at": 4e9}
    store.asks.add([Ask(**row, device=device) for device in DEVICES])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard of a store with these runs."""
    work = tmp_path_factory.mktemp("layout")
    fill(work / "store")
    with dashboard(work, "--store", "store") as url:
        yield url


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    page.get_by_role("tabpanel", name=name).wait_for()


def column(page: Any, name: str) -> list[str]:
    """The cells of a column, from the top."""
    return texts(page.locator(f".ag-row [col-id={name}]"), "y")


def texts(found: Any, side: str) -> list[str]:
    """The texts of elements by their place: `y` from the top, or `x` from the left."""
    places = found.evaluate_all(f"all => all.map(one => [one.getBoundingClientRect().{side}, one.textContent.trim()])")
    return [text for _, text in sorted(places)]


def shown(page: Any, url: str, path: str, text: str) -> None:
    page.goto(f"{url}{path}")
    page.get_by_text(text).first.wait_for()
    page.wait_for_timeout(300)  # until the tables are drawn


@pytest.mark.parametrize("width", [1280, pytest.param(400, marks=pytest.mark.long)])
def test_columns_fit_at_1280_pixels_and_no_height_is_left_empty(width: int, url: str, page: Any) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    shown(page, url, "", "paused")
    assert page.evaluate(EMPTY) == []
    assert width == 400 or page.evaluate(SIDEWAYS) == []
    picture(page, f"runs-{width}")
    for tab in ("devices", "rounds", "events", "data-and-bytes"):
        shown(page, url, f"/runs/digits?tab={tab}", "1 of 3 rounds")
        page.locator(".fd-table .ag-row").first.wait_for()
        page.wait_for_timeout(300)
        assert (tab, page.evaluate(EMPTY)) == (tab, [])
        assert width == 400 or (tab, page.evaluate(SIDEWAYS)) == (tab, [])
        picture(page, f"{tab}-{width}")
    shown(page, url, "/runs/digits/devices/d2", "1 of 2 asks")
    assert texts(page.get_by_label("Breadcrumb").locator("> *"), "x") == ["Runs", "›", "digits", "›", "d2"]
    assert width == 400 or page.evaluate(SIDEWAYS) == []
    picture(page, f"device-{width}")


@pytest.mark.parametrize(("width", "first"), [(1280, "When (UTC)"), (400, "What happened")])
def test_a_narrow_table_begins_with_what_happened(width: int, first: str, url: str, page: Any) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{url}/runs/digits?tab=events")
    page.get_by_role("gridcell", name=REASON).wait_for()
    assert texts(page.get_by_role("columnheader"), "x")[0] == first


@pytest.mark.long
def test_a_table_of_many_rows_scrolls(tmp_path: Path, page: Any) -> None:
    store = Store.open(tmp_path / "store")
    for number in range(40):
        store.runs.begin(f"run-{number}", {"run": {"name": f"run-{number}", "method": "fedavg", "rounds": 3}})
    store.close()
    with dashboard(tmp_path, "--store", "store") as url:
        shown(page, url, "", "run-2")
        high = page.locator(".fd-table").bounding_box()["height"]
        assert high < 700
        page.get_by_label("Filter runs").fill("run-12")
        page.get_by_role("link", name="run-2", exact=True).wait_for(state="detached")
        page.wait_for_function(f"() => ({EMPTY})().length === 0")  # a table that is filtered shrinks
        page.get_by_label("Filter runs").fill("")
        page.get_by_role("link", name="run-2", exact=True).wait_for()
        page.wait_for_timeout(300)
        assert page.locator(".fd-table").bounding_box()["height"] == high


def test_tab_is_in_address_so_links_and_back_button_work(url: str, page: Any) -> None:
    page.goto(f"{url}/runs/digits?tab=events")
    page.get_by_role("tabpanel", name="Events").wait_for()
    open_tab(page, "Add a device")
    assert page.url == f"{url}/runs/digits?tab=add-a-device"
    open_tab(page, "Overview")
    for name, address in (("Add a device", "add-a-device"), ("Events", "events")):
        page.go_back()
        page.get_by_role("tabpanel", name=name).wait_for()
        assert page.url == f"{url}/runs/digits?tab={address}"
    page.go_forward()
    page.get_by_role("tabpanel", name="Add a device").wait_for()
    page.goto(f"{url}/runs/digits?tab=unknown")
    page.get_by_role("tabpanel", name="Overview").wait_for()


def in_order(labels: Any) -> bool:
    return texts(labels, "y") == ["d1", "d2", "d10"]


@pytest.mark.long
def test_2_comes_before_10_in_tables_and_charts(url: str, page: Any) -> None:
    shown(page, url, "", "run-10")
    page.get_by_role("columnheader", name="Run", exact=True).click()
    page.wait_for_timeout(300)
    assert column(page, "run") == ["digits", "run-2", "run-10"]
    page.get_by_role("columnheader", name="Rounds completed").click()
    page.wait_for_timeout(300)
    assert [cell.split(" (")[0] for cell in column(page, "progress")] == ["0 of 2", "0 of 10", "1 of 3"]
    page.goto(f"{url}/runs/digits?tab=devices")
    page.get_by_role("link", name="d10").wait_for()
    wait_until(lambda: column(page, "device") == ["d1", "d2", "d10"], "the order of devices, to which rows move")
    for tab, chart in (("overview", "Timeline of round 2"), ("data-and-bytes", "Samples by class")):
        page.goto(f"{url}/runs/digits?tab={tab}")
        labels = page.get_by_role("img", name=re.compile(chart)).locator("text").filter(has_text=re.compile(r"^d\d+$"))
        labels.nth(2).wait_for()
        wait_until(partial(in_order, labels), "the labels, which move to their places")


def test_the_axis_of_one_accuracy_ends_at_100_percent(url: str, page: Any) -> None:
    page.goto(f"{url}/runs/digits")
    chart = page.get_by_role("img", name=re.compile("^Accuracy by round"))
    chart.locator("text", has_text="100").wait_for()
    marks = [text for text in chart.locator("text").all_text_contents() if text.isdecimal()]
    assert max(map(int, marks)) == 100
    picture(page, "one-point")


def test_what_cannot_be_undone_does_not_look_like_start(url: str, page: Any) -> None:
    page.goto(f"{url}/runs/digits")
    start, delete = (page.get_by_role("button", name=name) for name in ("Start", "Delete permanently"))
    delete.wait_for()
    colours = [item.evaluate("one => getComputedStyle(one).color") for item in (start, delete)]
    assert colours[0] != colours[1]
    stop = page.get_by_role("button", name="Stop").bounding_box()
    assert delete.bounding_box()["x"] - stop["x"] - stop["width"] > 300
    delete.click()
    confirm = page.get_by_role("button", name="Delete the run")
    confirm.wait_for()
    page.get_by_label("Name of the run, to confirm").fill("digits")
    page.wait_for_function("one => !one.disabled", arg=confirm.element_handle())
    assert confirm.evaluate("one => getComputedStyle(one).backgroundColor") == colours[1]
    picture(page, "delete-dialog")


def test_quorum_is_a_fraction_and_run_event_has_no_round(url: str, page: Any) -> None:
    page.goto(f"{url}/runs/digits?tab=settings")
    page.get_by_role("cell", name="2/3", exact=True).wait_for()
    page.goto(f"{url}/runs/digits?tab=events")
    page.get_by_role("gridcell", name="the engine was killed").wait_for()
    assert column(page, "round") == ["", "", "1"]
