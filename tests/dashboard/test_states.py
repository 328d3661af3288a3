"""States of the pages other than a healthy run, and their use with the keyboard and a screen reader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import Watched, dashboard, picture

from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.long]

CONTRAST = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = rgb => rgb.slice(0, 3).map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
    if (element.closest('script, style, svg, [aria-hidden=true], .nicegui-error-popup')) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${element.textContent.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""
"""Texts whose contrast with what is behind them is below 4.5, the bound of WCAG 2.2 AA for small texts."""
UNNAMED = """() => [...document.querySelectorAll('a, button, input, select, [role=tab], [role=button], [role=img]')]
  .filter(one => one.checkVisibility() && !one.closest('[aria-hidden=true]'))
  .filter(one => !(one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') || one.textContent.trim()
    || one.labels?.length || one.title))
  .map(one => one.outerHTML.slice(0, 120))"""
"""Controls and pictures without a name that a screen reader can read."""

CUT_OFF = """() => [...document.querySelectorAll(
    '.ag-header-cell-label, .ag-cell[col-id=status] .ag-cell-value, ' +
    '.fd-h2, .fd-tile *, .q-btn, .q-tab__label, .fd-header *')]
  .filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1 && one.clientWidth
    && one.textContent.trim())
  .map(one => one.textContent)"""
"""Headings, figures, statuses and names of controls that are wider than the place for them."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A store on which a dashboard looks, and the address of the dashboard."""
    work = tmp_path_factory.mktemp("states")
    Store.open(work / "store").close()
    with dashboard(work, "--store", "store") as url:
        yield work / "store", url


@pytest.fixture
def empty(shown: tuple[Path, str]) -> Iterator[Path]:
    """The store, without runs at the begin and the end of the test."""
    yield shown[0]
    opened = Store.open(shown[0])
    for name in opened.runs.names():
        opened.runs.delete(name)
    opened.close()


@pytest.fixture
def store(empty: Path) -> Path:
    """The store with a run that nobody serves."""
    opened = Store.open(empty)
    opened.runs.begin("digits", {"run": {"name": "digits", "method": "fedavg", "rounds": 3}})
    opened.history.add_event("digits", "refused", "the answer is too large", device="d0", code="too-large")
    opened.history.add_event("digits", "norm-guard", "an update was <b>scaled</b>", device="d1")
    opened.close()
    return empty


@pytest.fixture
def url(shown: tuple[Path, str], store: Path) -> str:
    return shown[1]


def test_a_store_without_runs_says_how_to_begin(shown: tuple[Path, str], empty: Path, page: Any) -> None:
    page.goto(shown[1])
    page.get_by_text("There are no runs yet").wait_for()
    picture(page, "no-runs")


def test_run_deleted_while_shown_is_said_to_be_gone(store: Path, url: str, page: Any) -> None:
    page.goto(f"{url}/runs/digits")
    page.get_by_text("0 of 3 rounds").wait_for()
    opened = Store.open(store)
    opened.runs.delete("digits")
    opened.close()
    page.get_by_text("There is no run 'digits': it was deleted, or never existed.").wait_for()
    picture(page, "deleted")


def test_a_run_is_deleted_only_once_its_name_is_typed(store: Path, url: str, page: Any) -> None:
    page.goto(f"{url}/runs/digits")
    page.get_by_role("button", name="Delete permanently").click()
    confirm = page.get_by_role("button", name="Delete the run")
    confirm.wait_for()
    assert confirm.is_disabled()
    page.get_by_label("Name of the run, to confirm").fill("digit")
    page.wait_for_timeout(1000)
    assert confirm.is_disabled()
    picture(page, "delete")
    page.get_by_label("Name of the run, to confirm").fill("digits")
    confirm.click()
    page.get_by_text("There is no run 'digits'").wait_for()
    page.get_by_role("tab", name="Overview").wait_for(state="hidden")
    opened = Store.open(store)
    names = opened.runs.names()
    calls = [row["call"] for row in LocalStore(store).operators().lists["operators"]]
    opened.close()
    assert (list(names), calls) == ([], ["DeleteRun"])


def test_events_are_filtered_by_kind_and_text_and_shown_as_text(url: str, page: Any, watched: Watched) -> None:
    page.goto(f"{url}/runs/digits")
    page.get_by_role("tab", name="Events").click()
    guard = page.get_by_role("gridcell", name="an update was <b>scaled</b>")
    guard.wait_for()
    page.get_by_label("Text, device or code").fill("TOO-LARGE")
    guard.wait_for(state="detached")
    page.get_by_role("gridcell", name="the answer is too large").wait_for()
    picture(page, "events")
    page.get_by_label("Text, device or code").fill("nothing like it")
    page.get_by_text("No event fits the filter").wait_for()
    assert watched.errors == []


def test_runs_are_filtered_and_sorted(store: Path, url: str, page: Any) -> None:
    opened = Store.open(store)
    for name, rounds in (("cars", 5), ("birds", 7)):
        opened.runs.begin(name, {"run": {"name": name, "method": "feddkc", "rounds": rounds}})
    opened.close()
    page.goto(url)
    links = page.locator(".fd-table").get_by_role("link")
    page.get_by_role("link", name="birds").wait_for()
    page.get_by_role("columnheader", name="Run", exact=True).click()
    page.wait_for_function("document.querySelector('.fd-table a').textContent === 'birds'")
    assert links.all_text_contents() == ["birds", "cars", "digits"]
    page.get_by_label("Filter runs").fill("feddkc cars")
    page.get_by_role("link", name="digits").wait_for(state="detached")
    assert links.all_text_contents() == ["cars"]
    picture(page, "runs")


def test_the_keyboard_reaches_the_content_and_every_tab(url: str, page: Any) -> None:
    page.goto(f"{url}/runs/digits")
    page.get_by_text("0 of 3 rounds").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.className") == "fd-main"
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("banner").count() == 1
    page.get_by_role("tab", name="Overview").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.get_by_role("tabpanel", name="Devices").wait_for()


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.long), "dark"])
def test_every_control_has_a_name_and_every_text_enough_contrast(scheme: str, url: str, page: Any) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.goto(url)
    page.get_by_role("link", name="digits").wait_for()
    assert (page.evaluate(CONTRAST), page.evaluate(UNNAMED)) == ([], [])
    page.goto(f"{url}/runs/digits")
    page.get_by_text("0 of 3 rounds").wait_for()
    for tab in page.get_by_role("tab").all():
        tab.click()
        page.get_by_role("tabpanel", name=re.compile(tab.inner_text())).wait_for()
        page.wait_for_timeout(300)
        assert (tab.inner_text(), page.evaluate(CONTRAST), page.evaluate(UNNAMED)) == (tab.inner_text(), [], [])


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.long), 400])
def test_no_heading_status_or_figure_is_cut_off(width: int, url: str, page: Any) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(url)
    page.get_by_role("gridcell", name="preparing (no server)").wait_for()
    page.wait_for_timeout(300)
    assert page.evaluate(CUT_OFF) == []
    page.goto(f"{url}/runs/digits")
    page.get_by_text("Shown once a round is complete").locator("visible=true").wait_for()  # once for both charts
    for tab in ("Overview", "Devices", "Rounds", "Events", "Data and bytes"):
        page.get_by_role("tab", name=tab).click()
        page.get_by_role("tabpanel", name=tab).wait_for()
        page.wait_for_timeout(300)
        assert (tab, page.evaluate(CUT_OFF)) == (tab, [])


def test_the_theme_is_switched_and_kept_on_the_next_page(url: str, page: Any) -> None:
    page.goto(url)
    page.get_by_label("Theme").click()
    page.get_by_role("option", name="Dark").click()
    page.wait_for_function("document.body.classList.contains('body--dark')")
    page.get_by_role("link", name="Compare").click()
    page.wait_for_url("**/compare")
    page.wait_for_function("document.body.classList.contains('body--dark')")
