"""A dialog that names what an action does, and does it once a person has confirmed it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from nicegui import ui

from fleetdistill.errors import FleetDistillError
from fleetdistill_console.dashboard.board import Board
from fleetdistill_server.operations.source import Source

T = TypeVar("T")


@contextmanager
def dialog(heading: str) -> Iterator[ui.dialog]:
    """Opens a dialog with a heading; what is created within the block is its content. It is removed once it is closed.

    Tab stays within it, Escape closes it, and the focus then returns to where it was.
    """
    with ui.context.client.content:  # else it would be removed together with a dialog that opens it
        made = ui.dialog()
    made.props["aria-label"] = heading
    made.on("hide", made.delete)
    with made, ui.card().classes("fd-dialog"):
        ui.label(heading).props("role=heading aria-level=2").classes("fd-h2")
        yield made
    made.open()


class Confirmation(Generic[T]):
    """A dialog for one action. What is created within `fields` stands between the text and the buttons.

    Args:
        board: What all pages share.
        heading: The action as a question.
        says: What happens, in sentences.
        verb: Text of the button that does it.
        do: Does it; called in a thread. A FleetDistillError is shown in the dialog, which stays open.
        then: Called with its result after the dialog was closed.
    """

    def __init__(
        self,
        board: Board,
        heading: str,
        says: str,
        verb: str,
        do: Callable[[Source], T],
        then: Callable[[T], object],
    ) -> None:
        self._board = board
        self._do = do
        self._then = then
        self._works = False
        with dialog(heading) as self._dialog:
            ui.label(says)
            self.fields = ui.element("div").classes("fd-fields")
            self._error = ui.label().classes("fd-notice fd-error").props("role=alert")
            self._error.set_visibility(False)
            with ui.element("div").classes("fd-row fd-buttons"):
                ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps autofocus")
                self._button = ui.button(verb, on_click=self.confirm).props("unelevated no-caps")

    def warn(self) -> None:
        """Shows that the action cannot be undone: its button is red."""
        self._button.props("color=negative")

    def require(self, label: str, text: str) -> None:
        """Adds a field, and lets the action be confirmed only while the field contains a text."""
        with self.fields:
            field = ui.input(label).props("dense outlined autocomplete=off")
        self._button.bind_enabled_from(field, "value", lambda typed: (typed or "").strip() == text)

    async def confirm(self) -> None:
        """Does what the dialog names; a second call while it works does nothing."""
        if self._works:
            return
        self._works = True
        self._button.props("loading")
        try:
            done = await asyncio.to_thread(self._do, self._board.feed.source)
        except FleetDistillError as error:
            self._error.text = str(error)
            self._error.set_visibility(True)
        else:
            self._dialog.close()
            self._board.feed.refresh()
            self._then(done)
        finally:
            self._works = False
            self._button.props(remove="loading")
