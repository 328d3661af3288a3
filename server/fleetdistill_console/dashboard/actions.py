"""What operators do from the pages. Viewers see none of it, and the server would refuse their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from nicegui import ui

from fleetdistill.errors import FleetDistillError
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.readers import ABOUT
from fleetdistill_server.operations.source import Source
from fleetdistill_server.store.states import ACTIVE, IDLE, QUEUED, WAITING, RunStatus
from fleetdistill_server.views.results import deleted

T = TypeVar("T")
_ACTING = ("operator", "local")
"""Roles whose calls change something."""
_MAX_REASON = 512
_MAX_TOKENS = 1000
"""Largest number of tokens that a page shows; `fleetdistill enrol --out` writes more of them to a file."""
_MAX_HOURS = 366 * 24


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


@dataclass(frozen=True)
class RunAction:
    """Something that an operator does with a run.

    Attributes:
        verb: Its name, as on the button.
        says: What happens.
        statuses: Statuses of a run in which it makes sense; None for all.
        do: Does it and returns a sentence on the result.
        is_final: Whether it cannot be undone: the run's name must be typed.
    """

    verb: str
    says: str
    statuses: frozenset[str] | None
    do: Callable[[Source, str], str]
    is_final: bool = False


_AT_WORK = frozenset({*ACTIVE, QUEUED, WAITING, IDLE})


def _change(status: RunStatus) -> Callable[[Source, str], str]:
    return lambda source, run: source.change(run, status).sentence


RUN_ACTIONS = (
    RunAction(
        "Start",
        "The run goes on as soon as an engine is free; a paused run continues its open round.",
        frozenset({RunStatus.CREATED, RunStatus.PAUSED, RunStatus.STOPPED}),
        _change(RunStatus.RUNNING),
    ),
    RunAction(
        "Pause",
        "The run's engine ends, also within a round, and frees its memory. What devices have sent stays, and "
        "devices wait until the run is started again.",
        _AT_WORK,
        _change(RunStatus.PAUSED),
    ),
    RunAction(
        "Stop",
        "The run's engine ends, and the round under way is closed without a result. Completed rounds stay, and the run "
        "can be started again.",
        _AT_WORK | {RunStatus.PAUSED},
        _change(RunStatus.STOPPED),
    ),
    RunAction(
        "Delete",
        "The run is deleted with its rounds, answers, events and models. Its devices are refused. This "
        "cannot be undone.",
        None,
        lambda source, run: deleted(run, source.delete(run)),
        is_final=True,
    ),
)


def may_act(board: Board) -> bool:
    """Returns whether the dashboard's identity may change something; False until it is known."""
    about = board.feed.look(ABOUT).value
    return about is not None and about.facts["role"] in _ACTING


class RunActions:
    """Buttons for what an operator does with a run."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        with ui.element("div").classes("fd-row").props('role=group aria-label="Actions"'):
            self._buttons = [(action, self._button(action)) for action in RUN_ACTIONS]

    def update(self, status: str) -> None:
        """Shows the buttons that make sense in a status, such as `queued (1 of 2)`."""
        word = status.partition(" (")[0]
        acts = may_act(self._board)
        for action, button in self._buttons:
            button.set_visibility(acts and (action.statuses is None or word in action.statuses))

    def _button(self, action: RunAction) -> ui.button:
        if action.is_final:
            return _final_button(f"{action.verb} permanently", lambda: self._ask(action))
        button = ui.button(action.verb, on_click=lambda: self._ask(action)).props("outline no-caps")
        button.set_visibility(False)
        return button

    def _ask(self, action: RunAction) -> None:
        heading = f"{action.verb} run {self._run}?"
        verb = f"{action.verb} the run"
        asked = Confirmation(
            self._board, heading, action.says, verb, lambda source: action.do(source, self._run), ui.notify
        )
        if action.is_final:
            asked.warn()
            asked.require("Name of the run, to confirm", self._run)


def _final_button(text: str, on_click: Callable[[], object]) -> ui.button:
    """Returns a button, hidden at first, for what cannot be undone: red, and apart from the others."""
    button = ui.button(text, icon="delete_forever", on_click=on_click, color="negative")
    button.props("flat no-caps").classes("fd-final").set_visibility(False)
    return button


class RevokeButton:
    """A button that revokes a device."""

    def __init__(self, board: Board, device: str) -> None:
        self._board, self._device = board, device
        self._button = _final_button("Revoke permanently", self._ask)

    def update(self, revoked: bool) -> None:
        """Shows the button unless the device is revoked already."""
        self._button.set_visibility(may_act(self._board) and not revoked)

    def _ask(self) -> None:
        asked = Confirmation(
            self._board,
            f"Revoke device {self._device}?",
            "The device is refused from its next call, in every run, and its id can never be used again. Answers that "
            "it has sent stay in the runs. This cannot be undone.",
            "Revoke the device",
            lambda source: source.revoke(self._device, str(reason.value or "")).changed,
            self._told,
        )
        asked.warn()
        with asked.fields:
            reason = ui.input("Reason, which is stored").props(f"dense outlined maxlength={_MAX_REASON}")

    def _told(self, changed: bool) -> None:
        ui.notify(f"Device {self._device} {'is revoked' if changed else 'was already revoked'}.")


class EnrolButton:
    """A button that creates enrolment tokens for a run, where the server has TLS and creates them itself.

    A dashboard of a store does not know the directory of the PKI.
    """

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        self._button = ui.button("Create tokens", icon="key", on_click=self._ask).props("outline no-caps")
        self._button.set_visibility(False)

    def update(self) -> None:
        """Shows the button to those who may use it."""
        about = self._board.feed.look(ABOUT).value
        makes = about is not None and about.facts["tls"] and self._board.feed.source.is_remote
        self._button.set_visibility(makes and may_act(self._board))

    def _ask(self) -> None:
        asked = Confirmation(
            self._board,
            f"Create enrolment tokens for run {self._run}?",
            f"Whoever has a token can enrol one device, which then takes part in run {self._run}. Tokens are shown "
            "once; the server keeps only their SHA-256.",
            "Create the tokens",
            lambda source: source.tokens(
                int(count.value or 0), float(hours.value or 0) * 3600, self._run, _ids(device.value)
            ),
            _show_tokens,
        )
        with asked.fields:
            count = ui.number("Number of tokens", value=1, min=1, max=_MAX_TOKENS, precision=0)
            hours = ui.number("Valid for (hours)", value=24, min=0.1, max=_MAX_HOURS)
            device = ui.input("Only for the device id (optional)")
            for field in (count, hours, device):
                field.props("dense outlined")
            device.on_value_change(lambda: count.set_enabled(not _ids(device.value)))


def _ids(text: str | None) -> list[str]:
    return [text.strip()] if text and text.strip() else []


def _show_tokens(tokens: list[str]) -> None:
    """Shows tokens for the only time."""
    count = "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"
    with dialog(f"{count}, shown only once") as shown:
        ui.label("Give each to one device: Server(..., enrolment=token).")
        lines = ui.textarea("Enrolment tokens", value="\n".join(tokens))
        lines.props('readonly outlined autofocus input-class="fd-code" rows=6').classes("fd-tokens")
        said = ui.label().props("role=status aria-live=polite")
        with ui.element("div").classes("fd-row fd-buttons"):
            ui.button("Close", on_click=shown.close).props("flat no-caps")
            ui.button("Copy", icon="content_copy", on_click=lambda: _copy(tokens, said)).props("unelevated no-caps")


def _copy(tokens: list[str], said: ui.label) -> None:
    ui.clipboard.write("\n".join(tokens))
    said.text = "Copied."
