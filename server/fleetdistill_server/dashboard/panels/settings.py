"""The settings of a run, by section."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from fleetdistill_server.dashboard.board import Board
from fleetdistill_server.dashboard.layout import panel
from fleetdistill_server.dashboard.readers import settings
from fleetdistill_server.dashboard.units import setting


class SettingsPanel:
    """A list of settings for each section of run.toml."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        self._shown: object = None
        with panel("Settings"):
            ui.label("As in run.toml, with the defaults of settings that it does not contain.").classes("fd-muted")
            self._box = ui.element("div").classes("fd-columns")

    def update(self) -> None:
        """Shows the settings if they have changed."""
        view = self._board.feed.look(settings(self._run)).value
        if view is None or view == self._shown:
            return
        self._shown = view
        self._box.clear()
        with self._box:
            for section, values in sections(view.facts["settings"]).items():
                _draw(section, values)


def sections(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the settings by section; those outside of a section are under an empty name."""
    single = {name: value for name, value in values.items() if not isinstance(value, dict)}
    return {**({"": single} if single else {}), **{name: one for name, one in values.items() if isinstance(one, dict)}}


def _draw(section: str, values: dict[str, Any]) -> None:
    with ui.element("table").classes("fd-settings"):
        with ui.element("caption"):
            ui.label(f"[{section}]" if section else "top level")
        for name, value in values.items():
            with ui.element("tr"):
                with ui.element("th").props("scope=row"):
                    ui.label(name)
                with ui.element("td"):
                    ui.label(setting(value))
