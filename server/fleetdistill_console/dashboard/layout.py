"""The frame of every page: header, navigation, state of the connection to the source, and the main landmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from nicegui import app, ui

from fleetdistill_console.dashboard.board import Board, Snapshot
from fleetdistill_console.dashboard.session import LOGOUT

LOOK_SECONDS = 0.5
"""Seconds between two looks of a page at the feed, which reads less often."""
_DARK = "dark"


def run_link(run: str) -> str:
    """Returns the path of a run's page."""
    return f"/runs/{quote(run, safe='')}"


def device_link(run: str, device: str) -> str:
    """Returns the path of a device's page."""
    return f"{run_link(run)}/devices/{quote(device, safe='')}"


@contextmanager
def frame(board: Board, heading: str, trail: Sequence[tuple[str, str]] = ()) -> Iterator[None]:
    """Draws the frame of a page; what is created within the block is the page's content.

    Args:
        board: What all pages share.
        heading: Heading of the page.
        trail: Name and path of the pages above this one.
    """
    ui.page_title(f"{heading} · {board.title}")
    ui.add_head_html(
        '<link rel="stylesheet" href="/static/dashboard.css"><script defer src="/static/session.js"></script>'
    )
    dark = ui.dark_mode(value=app.storage.user.get(_DARK))
    with ui.element("header").props("role=banner").classes("fd-header"):
        ui.link(board.title, "/").classes("fd-brand")
        with ui.element("nav").props('aria-label="Pages"').classes("fd-nav"):
            ui.link("Runs", "/")
            ui.link("Compare", "/compare")
            ui.link("Server", "/server")
        ui.label(board.place).classes("fd-place").props('title="What this dashboard reads"')
        _dark_switch(dark)
        with ui.element("form").props(f"method=post action={LOGOUT}"):
            ui.button("Sign out").props("type=submit flat no-caps")
    ui.colors(primary="var(--fd-accent)", negative="var(--fd-bad)")
    ui.query("main.q-page").props("role=presentation")  # NiceGUI puts the header into a main landmark of its own
    main = ui.element("main").classes("fd-main")
    ui.skip_link("Skip to the content", target=main)
    with main:
        _show_problem(board)
        _trail(trail, heading)
        ui.label(heading).props("role=heading aria-level=1").classes("fd-h1")
        yield


def _show_problem(board: Board) -> None:
    """Shows what is wrong with the server, as long as something is."""
    with ui.element("div").props("role=alert").classes("fd-notice fd-error") as box:
        text = ui.label()
    box.set_visibility(False)

    def update() -> None:
        text.text = board.problem() or ""
        box.set_visibility(bool(text.text))

    live(update)


def _trail(trail: Sequence[tuple[str, str]], here: str) -> None:
    if not trail:
        return
    with ui.element("nav").props('aria-label="Breadcrumb"').classes("fd-trail"):
        for name, path in trail:
            ui.link(name, path)
            ui.label("›").props("aria-hidden=true")
        ui.label(here).props("aria-current=page")


def _dark_switch(dark: ui.dark_mode) -> None:
    def switch(value: bool | None) -> None:
        dark.value = app.storage.user[_DARK] = value

    choices: dict[str, bool | None] = {"Auto": None, "Light": False, "Dark": True}
    chosen = next(name for name, value in choices.items() if value is dark.value)
    select = ui.select(list(choices), value=chosen, label="Theme", on_change=lambda event: switch(choices[event.value]))
    select.props("dense outlined options-dense").classes("fd-theme")


class Notice:
    """A line that says whether the shown figures are current: loading, live, or why they are not."""

    def __init__(self) -> None:
        with ui.element("div").props("role=status aria-live=polite").classes("fd-notice") as self._box:
            self._text = ui.label("Loading …")

    def show(self, snapshot: Snapshot[Any]) -> None:
        """Shows the state of a snapshot."""
        if snapshot.version:
            at = time.strftime("%H:%M:%S", time.localtime(snapshot.read_at))
            since = f" The figures below are from {at}." if snapshot.read_at else ""
            self.fail(f"{snapshot.error}.{since}" if snapshot.error else "")

    def fail(self, text: str) -> None:
        """Shows why figures are missing or old; an empty text hides the line."""
        if text != self._text.text:
            self._text.text = text
            self._box.classes(replace="fd-notice fd-error").set_visibility(bool(text))


def live(update: Callable[[], object]) -> None:
    """Calls a function regularly for as long as the page is open; it shows what has changed."""
    ui.timer(LOOK_SECONDS, update)


@contextmanager
def panel(heading: str) -> Iterator[None]:
    """Draws a section with a heading; what is created within the block is its content."""
    with ui.element("section").classes("fd-panel") as section:
        section.props["aria-label"] = heading
        ui.label(heading).props("role=heading aria-level=2").classes("fd-h2")
        yield


class Tiles:
    """Figures of a page, each with its name and unit."""

    def __init__(self, names: Sequence[str]) -> None:
        self._values: dict[str, ui.label] = {}
        with ui.element("dl").classes("fd-tiles"):
            for name in names:
                with ui.element("div").classes("fd-tile"):
                    with ui.element("dt"):
                        ui.label(name)
                    with ui.element("dd"):
                        self._values[name] = ui.label("–")

    def show(self, values: Mapping[str, str]) -> None:
        """Shows values by name; those that are not given stay."""
        for name, value in values.items():
            self._values[name].text = value
