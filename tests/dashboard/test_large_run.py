"""1,000 devices and 1,000 rounds: what the browser holds and is sent stays small, and the page stays live."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import Watched, dashboard, picture
from support.large_run import RUN, add_round, device_name, fill

DEVICES, ROUNDS = 1000, 1000
MAX_ELEMENTS = 5_000
"""Elements of a page; a row of a table has about 15, so 1,000 devices cannot all be there."""
MAX_BYTES = 50_000
"""Bytes of all messages to the browser in one update."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with such a run, whose rounds asked five devices each, and the open one all."""
    folder = tmp_path_factory.mktemp("large")
    fill(folder / "store", DEVICES, ROUNDS, per_round=5)
    return folder / "store"


@pytest.fixture(scope="module")
def url(store: Path) -> Iterator[str]:
    with dashboard(store.parent, "--store", "store") as url:
        yield url


def elements(page: Any) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


@pytest.mark.long
def test_the_page_of_a_large_run_holds_few_elements(url: str, page: Any, watched: Watched) -> None:
    page.goto(f"{url}/runs/{RUN}")
    page.get_by_role("img", name=re.compile("Accuracy by round.*at 1,000")).wait_for()
    page.get_by_text("500 of 1,000 devices acknowledged").wait_for()
    assert elements(page) < MAX_ELEMENTS
    picture(page, "large")
    for tab, wanted in (("Devices", device_name(3)), ("Rounds", "1,000")):
        page.get_by_role("tab", name=tab).click()
        page.get_by_role("gridcell", name=wanted, exact=True).first.wait_for()
        assert elements(page) < MAX_ELEMENTS
    page.get_by_role("tab", name="Devices").click()
    page.get_by_label("Filter devices").fill(device_name(999))
    page.get_by_role("link", name=device_name(999)).wait_for()  # though it was not drawn before
    assert watched.errors == []


@pytest.mark.long
def test_a_new_round_is_shown_and_only_what_changed_is_sent(store: Path, url: str, page: Any) -> None:
    received: list[int] = []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: received.append(len(frame))))
    page.goto(f"{url}/runs/{RUN}")
    page.get_by_role("tab", name="Rounds").click()
    page.get_by_role("gridcell", name="open", exact=True).wait_for()
    received.clear()
    add_round(store, [device_name(0)])
    page.get_by_role("gridcell", name="1,002", exact=True).wait_for()
    assert 0 < sum(received) < MAX_BYTES
