"""The server's log: one line an event, as text or JSON, in every process, with nothing secret and nothing forged."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.answering import AnsweringFleet
from support.processes import COMMAND, children, wait_until

from fleetdistill.errors import RunError
from fleetdistill.printable import PrintableRecords
from fleetdistill_server import logs
from fleetdistill_server.logs import FIELDS, JsonLines, TextLines, about
from fleetdistill_server.store.store import Store

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\w+) (.*)")


def written(formatter: logging.Formatter, message: str, *args: Any, **given: Any) -> str:
    """What a logger with this formatter writes for one call."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    handler.addFilter(PrintableRecords())
    logger = logging.Logger("fleetdistill.server.test", logging.DEBUG)
    logger.addHandler(handler)
    logger.warning(message, *args, **given)
    return stream.getvalue()


def test_line_has_time_level_process_message_and_subject() -> None:
    extra = about(run="digits", round=3, device="camera-7", ask=12, code="bad-shape", event="refused")
    line = written(TextLines("front"), "a %s", "refusal", extra=extra)
    matched = LINE.fullmatch(line.rstrip("\n"))
    assert matched is not None
    assert matched.groups() == (
        "WARNING",
        "front",
        "a refusal run=digits round=3 device=camera-7 ask=12 event=refused code=bad-shape",
    )


def test_the_same_as_json() -> None:
    line = written(JsonLines("engine"), "a %s", "refusal", extra=about(run="digits", round=3, device="", ask=None))
    told = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told.pop("time"))
    assert told == {
        "level": "warning",
        "process": "engine",
        "logger": "fleetdistill.server.test",
        "message": "a refusal",
        "run": "digits",
        "round": 3,
    }


FORGED = "camera\n2026-01-01T00:00:00.000Z INFO front all is well\x1b[31m"


@pytest.mark.parametrize("formatter", [TextLines("front"), JsonLines("front")])
def test_what_a_device_chose_makes_no_line_and_no_field(formatter: logging.Formatter) -> None:
    line = written(formatter, "device %s", FORGED, extra=about(device=FORGED, code="a run=other"))
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert " run=other" not in line.replace('"a run=other"', "")


@pytest.mark.parametrize("formatter", [TextLines("engine"), JsonLines("engine")])
def test_a_traceback_stays_with_its_line(formatter: logging.Formatter) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        lines = written(formatter, "the engine failed", exc_info=True).splitlines()
    if isinstance(formatter, JsonLines):
        (line,) = lines
        assert "ValueError: camera" in json.loads(line)["traceback"]
    else:
        assert LINE.fullmatch(lines[0])
        assert all(line.startswith("    ") for line in lines[1:])
        assert any("ValueError: camera" in line for line in lines)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store.in_memory()
    made.runs.begin("digits", {})
    yield made
    made.close()


def test_an_event_is_logged_once_with_all_that_it_is_about(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with store.transaction():
        store.history.add_event("digits", "refused", "the reason", number=3, device="d1", code="bad-shape", ask=7)
        assert caplog.records == [], "not before it is committed"
    store.history.add_event("digits", "declined", "another")
    first, second = caplog.records
    assert {name: getattr(first, f"about_{name}", None) for name in FIELDS} == {
        "run": "digits",
        "round": 3,
        "device": "d1",
        "ask": 7,
        "event": "refused",
        "code": "bad-shape",
        "trace_id": None,
    }
    assert (first.getMessage(), first.levelname) == ("the reason", "WARNING")
    assert (second.getMessage(), second.levelname) == ("another", "INFO")


def test_an_event_that_is_taken_back_is_not_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The commit thread takes back one job of a group, and tries the others again if the whole group fails."""

    def failing() -> None:
        with store.transaction():
            store.history.add_event("digits", "late", "taken back")
            raise RunError("undone")

    caplog.set_level(logging.INFO)
    with store.transaction():
        store.history.add_event("digits", "late", "kept")
        with pytest.raises(RunError):
            failing()
    with pytest.raises(RunError):
        failing()
    store.history.add_event("digits", "late", "the next")
    assert [record.getMessage() for record in caplog.records] == ["kept", "the next"]


def test_a_program_without_a_log_has_no_events_on_its_terminal() -> None:
    code = (
        "from fleetdistill_server.store.store import Store\n"
        "store = Store.in_memory()\n"
        "store.history.add_event('digits', 'late', 'a sentence')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_logger_of_the_server_is_below_one_name() -> None:
    sources = "\n".join(path.read_text() for path in Path(logs.__file__).parents[1].rglob("*.py"))
    names = re.findall(r"getLogger\(([^)]*)\)", sources)
    assert len(names) > 8
    of_the_sdk = '"fleetdistill"'  # simulated devices silence it
    libraries = {'"botocore"', '"aiobotocore"', "library", ""}  # whose levels or handlers are set
    assert {name for name in names if not name.startswith('"fleetdistill.server.')} == {of_the_sdk} | libraries


RUN_TOML = """
[run]
name = "digits"
method = "feddkc"
rounds = 2
[contract]
classes = 10
input_shape = [1, 8, 8]
[method]
server_epochs = 1
[server]
listen = "127.0.0.1:0"
store = "{store}"
torch_device = "cpu"
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_error_that_ends_the_server_is_a_line_of_its_log(tmp_path: Path, log_format: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML.format(store=tmp_path / "store").replace("127.0.0.1:0", "0.0.0.0:0"))
    command = [*COMMAND, "serve", str(path), "--log-format", log_format]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    text = json.loads(line)["message"] if log_format == "json" else line.removeprefix("error: ")
    assert text.startswith("[server] listen is '0.0.0.0:0', which is not a loopback address")


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_front_engine_and_supervisor_log_alike(tmp_path: Path, log_format: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML.format(store=tmp_path / "store"))
    command = [*COMMAND, "serve", str(path)]
    options = ["--log-format", log_format, "--log-level", "DEBUG"]
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            port = int(re.findall(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[0])
            with AnsweringFleet(port, "digits", 2):
                wait_until(lambda: log.read_text().count("round closed") == 2, "two rounds", 120)
                os.kill(children(process.pid, "fleetdistill_server.front")[0], signal.SIGKILL)
                wait_until(lambda: "the front was killed by SIGKILL" in log.read_text(), "the supervisor to notice")
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "SIGHUP is ignored" in log.read_text(), "the server to ignore it")
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    lines = log.read_text().splitlines()
    if log_format == "json":
        told = [json.loads(line) for line in lines]
    else:
        told = []
        for line in lines:
            matched = LINE.fullmatch(line)
            assert matched is not None, line
            told.append({"process": matched[2], "message": matched[3]})
    assert {"serve", "front", "engine"} == {item["process"] for item in told}
    said = [item["message"] for item in told if item["process"] == "serve"]
    assert said[0] == f"the store {tmp_path / 'store'} is new"
    assert said[1].endswith(f"serves the store {tmp_path / 'store'}")
    assert said[-2:] == ["stopping because of SIGTERM", "stopped"]
    of_device = [item for item in told if item["message"].startswith("checked in")]
    assert len(of_device) >= 2
    assert sum("is answered" in item["message"] for item in told) == 4
