"""A browser for the tests of this folder; without one they are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.dashboards import TOKEN, Watched, browser_arguments, chromium

set_running_loop = asyncio._set_running_loop


@pytest.fixture(scope="session")
def started_browser() -> Iterator[tuple[Any, asyncio.AbstractEventLoop]]:
    """A headless Chromium for all tests of the process, and Playwright's event loop, which is not running."""
    path = chromium()
    if path is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=browser_arguments())
        loop = asyncio.get_running_loop()
        set_running_loop(None)
        yield opened, loop
        set_running_loop(loop)
        opened.close()


@pytest.fixture
def browser(started_browser: tuple[Any, asyncio.AbstractEventLoop]) -> Iterator[Any]:
    """The browser. Playwright's event loop counts as running during the test alone, so that others have their own."""
    opened, loop = started_browser
    set_running_loop(loop)
    yield opened
    set_running_loop(None)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page, 1,400 pixels wide, of a browser without cookies, which signs in to a dashboard that it goes to."""
    context = browser.new_context(
        viewport={"width": 1400, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(120_000)  # a machine may be busy
    go, known = page.goto, set()

    def goto(url: str) -> Any:
        origin = "/".join(url.split("/")[:3])
        if origin not in known:
            known.add(origin)
            context.request.post(f"{origin}/login", form={"token": TOKEN}, max_redirects=0)
        return go(url)

    page.goto = goto
    yield page
    context.close()


@pytest.fixture
def watched(page: Any) -> Watched:
    """What happens in `page`."""
    return Watched(page)
