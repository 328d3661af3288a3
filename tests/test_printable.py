"""What a device calls itself, or says, is shown and logged as text: it is no markup, no control sequence, no line."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.methods.classstats.exchange import LEAVE_ONE_OUT
from fleetdistill.printable import PrintableRecords, printable
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_console.tables import tables
from fleetdistill_server.cli.app import app
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views

HOSTILE = "[/x] [link=http://evil]here[/link] \x1b]0;owned\x07\u202e\r\nserve: all is well"
SHOWN = "[/x] [link=http://evil]here[/link] \\x1b]0;owned\\x07\\u202e\\r\\nserve: all is well"


@given(st.text())
def test_what_is_printable_is_one_line_that_no_terminal_obeys(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)


def test_escapes_say_what_they_stand_for() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("é 雪 \ud800") == "é 雪 \\ud800"


def hostile_store(directory: Path) -> Store:
    """A run in which every text that a device can choose is hostile."""
    store = Store.open(directory)
    store.runs.begin("r", {"run": {"name": "r", "method": "classstats"}})
    store.runs.publish_contract("r", b"")
    profile = contract_pb2.DeviceProfile(model_name=HOSTILE, sdk_version=HOSTILE)
    store.devices.register("r", "a", b"", profile.SerializeToString())
    store.runs.start_round("r", ["a"])
    names = (f"{HOSTILE[:40]}/accuracy", "accuracy", LEAVE_ONE_OUT)
    figures = Metrics(metrics=[Metric(name=n, split="test", sum=1, count=2) for n in names])
    store.history.add_figures("r", 1, "a", figures)
    store.history.add_event("r", "declined", HOSTILE, number=1, device="a")
    store.runs.close_short_round("r", 1, HOSTILE)
    store.runs.set_status("r", RunStatus.RUNNING, HOSTILE)
    return store


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_shown_with_whatever_its_devices_call_things(tmp_path: Path, terminal: bool) -> None:
    store = hostile_store(tmp_path)
    for view in (views.run(store, "r"), views.runs(store), views.devices(store, None)):
        console = Console(width=4000, force_terminal=terminal, file=io.StringIO(), no_color=True)
        console.print(*tables(view))
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert SHOWN in text
        assert "http" not in text.replace(SHOWN, "").replace(SHOWN[:40], "")
        assert "\x1b]" not in text
        assert "\nserve:" not in text
    store.close()


@pytest.mark.parametrize("words", [["runs", "show", "r"], ["runs", "list"], ["devices"], ["runs", "show", HOSTILE]])
def test_the_commands_print_it_too(tmp_path: Path, words: list[str]) -> None:
    hostile_store(tmp_path).close()
    done = CliRunner().invoke(app, [*words, "--store", str(tmp_path)])
    assert not isinstance(done.exception, Exception), done.exception
    assert "\x1b" not in done.output
    assert "\nserve:" not in done.output


def test_a_log_has_the_lines_that_the_program_wrote() -> None:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(logging.Formatter("front: %(message)s"))
    handler.addFilter(PrintableRecords())
    logger = logging.Logger("of this test")
    logger.addHandler(handler)
    logger.warning("the call failed: %s", HOSTILE)
    try:
        raise ValueError("\nfront: a forged line\x1b[2J")
    except ValueError:
        logger.exception("a call failed")
    lines = said.getvalue().splitlines()
    assert lines[0] == f"front: the call failed: {SHOWN}"
    assert [line for line in lines if line.startswith("front:")] == [lines[0], "front: a call failed"]
    assert "\x1b" not in said.getvalue()
