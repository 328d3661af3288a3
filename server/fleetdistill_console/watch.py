"""Shows the changes in a run: a live table on a terminal, and lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fleetdistill.printable import printable
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.texts import counted, readable_bytes, to_json
from fleetdistill_server.views.runs import UNTIL_STOPPED, TableRow

_LAST_EVENTS = 8
_LAST_ROUNDS = 20


class Printer(Protocol):
    """Displays changes as they arrive."""

    def show(self, new: list[TableRow]) -> None:
        """Displays new changes."""


class JsonLines:
    """Prints one JSON object per line."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def show(self, new: list[TableRow]) -> None:
        for item in new:
            self._write(to_json(item))


class PlainLines:
    """Prints one sentence per line, for pipes and logs."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def show(self, new: list[TableRow]) -> None:
        for item in new:
            self._write(sentence(item))


class LiveTable:
    """Live display of the current step and events, above the newest rounds that fit on the terminal.

    The display is redrawn after every change.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._run: TableRow = {}
        self._rounds: dict[int, TableRow] = {}
        self._step = ""
        self._events: deque[str] = deque(maxlen=_LAST_EVENTS)

    def show(self, new: list[TableRow]) -> None:
        for item in new:
            self._take(item)
        if new:
            self._live.update(self._drawn(), refresh=True)

    def _take(self, one: TableRow) -> None:
        if one["kind"] == "run":
            self._run = one
        elif one["kind"] == "round":
            self._rounds[one["round"]] = one
            if len(self._rounds) > _LAST_ROUNDS:
                del self._rounds[min(self._rounds)]
        elif one["kind"] == "step":
            self._step = sentence(one)
        else:
            self._events.append(sentence(one))

    def _drawn(self) -> Group:
        console = self._live.console
        drawn = self._with_rounds(0)
        for count in range(1, min(len(self._rounds), _LAST_ROUNDS) + 1):
            taller = self._with_rounds(count)
            if len(console.render_lines(taller, pad=False)) >= console.height:  # keeps one line for the cursor
                break
            drawn = taller
        return drawn

    def _with_rounds(self, count: int) -> Group:
        lines = [Text(sentence(self._run), style="bold"), *map(Text, (self._step, *self._events))]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"  # `runs show` prints the full texts
        return Group(*lines, *([self._table(count)] if count else []))

    def _table(self, count: int) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # fits in 80 columns
        for name in (
            "round",
            "status",
            "devices",
            "answers",
            "used",
            "test accuracy",
            "guards",
            "up",
            "down",
            "seconds",
        ):
            table.add_column(name, justify="left" if name == "status" else "right")
        for number in sorted(self._rounds)[-count:]:
            table.add_row(*_cells(self._rounds[number]))
        return table


def _cells(row: TableRow) -> list[str]:
    accuracy, seconds = row["test_accuracy"], row["seconds"]
    return [
        str(row["round"]),
        escape(printable(row["status"])),
        str(row["devices"]),
        str(row["answers"]),
        str(row["used"]),
        "" if accuracy is None else f"{accuracy:.1%}",
        str(row["guards"]),
        readable_bytes(row["bytes_up"]),
        readable_bytes(row["bytes_down"]),
        "" if seconds is None else f"{seconds:.1f}",
    ]


def sentence(change: TableRow) -> str:
    """Formats a change as one line without control characters, because events contain text sent by devices."""
    return printable(_sentence(change))


def _sentence(change: TableRow) -> str:
    if change["kind"] == "run":
        done, wanted = change["completed_rounds"], change["wanted_rounds"]
        of = (
            f"{counted(done, 'round')} completed, {UNTIL_STOPPED}"
            if wanted is None
            else f"{done} of {counted(wanted, 'round')}"
        )
        reason = f": {change['reason']}" if change["reason"] else ""
        text = f"run {change['run']} ({change['method']}): {change['status']}{reason}"
        return f"{text}, {of}, {counted(change['present'], 'device')} present"
    if change["kind"] == "step":
        gone = f", {change['out']} out" if change["out"] else ""
        return f"round {change['round']}, {change['step']}: {change['answered']} of {change['asked']} answers{gone}"
    if change["kind"] == "event":
        about = " ".join(item for item in (change["device"], change["code"]) if item)
        begin = f"round {change['round']}, " if change["round"] else ""
        return f"{begin}{change['event']}{f' ({about})' if about else ''}: {change['text']}"
    return _round_sentence(change)


def _round_sentence(row: TableRow) -> str:
    reason = f" ({row['reason']})" if row["reason"] else ""
    text = f"round {row['round']}: {row['status']}{reason}, {row['devices']} devices, {row['answers']} answers"
    if row["status"] == RoundStatus.OPEN:
        return text
    figures = [f"{row['used']} used, {row['reported']} reported", f"{row['seconds']:.1f} s"]
    figures += [f"test accuracy {row['test_accuracy']:.1%}"] if row["test_accuracy"] is not None else []
    figures += [f"guards {row['guards']}"] if row["guards"] else []
    sent = f"{readable_bytes(row['bytes_up'])} up, {readable_bytes(row['bytes_down'])} down"
    return ", ".join([text, *figures, sent])


def show_changes(changes: Iterable[list[TableRow]], *, as_json: bool, console: Console) -> None:
    """Displays changes as they arrive: a live table if `console` is a terminal, else lines. Ctrl-C stops."""
    live = console.is_terminal and not as_json
    screen = Live(console=console, auto_refresh=False) if live else None
    shown: AbstractContextManager[object] = screen if screen is not None else nullcontext()

    def write(line: str) -> None:
        print(line, file=console.file, flush=True)

    lines = JsonLines(write) if as_json else PlainLines(write)
    printer: Printer = LiveTable(screen) if screen is not None else lines
    try:
        with shown:
            for new in changes:
                printer.show(new)
    except KeyboardInterrupt:
        return
