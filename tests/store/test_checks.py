"""A store that is not whole is refused with a sentence and the way out, and nothing is started on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.later_version import LATER, later_version, rows, schema
from support.wire_samples import make_payload
from typer.testing import CliRunner

from fleetdistill.errors import StoreError
from fleetdistill_server.cli.app import app
from fleetdistill_server.store.store import Store

PAGE = 4096
RUN_TOML = """
[run]
name = "{run}"
[contract]
classes = 10
input_shape = [1, 8, 8]
[server]
listen = "127.0.0.1:0"
store = "{store}"
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with a run, many events and a payload."""
    store = Store.open(tmp_path / "store")
    store.runs.begin("before", {})
    for number in range(200):
        store.history.add_event("before", "note", f"{number} " * 200)
    store.blobs.put(make_payload())
    store.close()
    return tmp_path / "store"


def refused(directory: Path) -> str:
    """What `fleetdistill serve` says of the store, on one line."""
    config = directory.parent / "run.toml"
    config.write_text(RUN_TOML.format(run="after", store=directory))
    done = CliRunner().invoke(app, ["serve", str(config)])
    assert done.exit_code == 1
    assert "Traceback" not in done.output
    (line,) = done.stderr.splitlines()
    return line


def lose(directory: Path) -> None:
    (directory / "store.sqlite").unlink()


def empty(directory: Path) -> None:
    os.truncate(directory / "store.sqlite", 0)


@pytest.mark.parametrize("how", [lose, empty])
def test_a_lost_database_beside_payloads_does_not_begin_anew(how: object, directory: Path) -> None:
    how(directory)  # type: ignore[operator]
    told = "the store has 1 payload, but its database store.sqlite is missing or empty. Move the store's directory"
    for _ in range(2):  # the first refusal leaves nothing that the second would take for a store
        assert told in refused(directory)
    with pytest.raises(StoreError, match=r"restore a backup with `fleetdistill restore`, or set \[server\] store"):
        Store.open(directory)


def test_a_lost_database_without_payloads_is_a_new_store(tmp_path: Path) -> None:
    Store.open(tmp_path / "store").close()
    lose(tmp_path / "store")
    Store.open(tmp_path / "store").close()


@pytest.mark.parametrize("part", ["the header", "a page in the middle", "the end"])
def test_a_damaged_database_is_refused_before_anything_starts(part: str, directory: Path) -> None:
    path = directory / "store.sqlite"
    if part == "the end":
        os.truncate(path, path.stat().st_size // PAGE // 2 * PAGE)
    else:
        with path.open("r+b") as file:
            file.seek(0 if part == "the header" else path.stat().st_size // PAGE // 2 * PAGE)
            file.write(b"\xff" * PAGE)
    assert "the database store.sqlite is damaged (" in refused(directory)
    assert "`fleetdistill restore`" in refused(directory)


@pytest.mark.parametrize("byte", [b"\xff", b"\x5a"])
def test_no_damaged_page_is_a_traceback(byte: bytes, directory: Path) -> None:
    path, config = directory / "store.sqlite", directory.parent / "server.toml"
    config.write_text(f'[server]\nlisten = "127.0.0.1:0"\nstore = "{directory}"\n')
    whole = path.read_bytes()
    for page in range(min(30, len(whole) // PAGE)):
        path.write_bytes(whole[: page * PAGE] + byte * PAGE + whole[(page + 1) * PAGE :])
        commands = (["serve", "--check"], ["doctor"], ["runs", "list", "--store"])
        said = [
            CliRunner().invoke(app, [*command, str(directory if command[0] == "runs" else config)])
            for command in commands
        ]
        for command, done in zip(commands, said, strict=True):
            assert isinstance(done.exception, SystemExit | None), (page, command, done.exception)
        check, doctor, _ = said
        assert (check.exit_code, doctor.exit_code) == (1, 1), page
        assert "the database store.sqlite is damaged (" in check.output, page
        assert "the database store.sqlite is damaged (" in doctor.output, page
    path.write_bytes(whole)
    assert CliRunner().invoke(app, ["serve", "--check", str(config)]).exit_code == 0


def test_a_store_of_a_later_version_is_refused(directory: Path) -> None:
    with later_version():
        Store.open(directory).close()
    before = schema(directory), rows(directory)
    told = f"the store was written by a later version of fleetdistill (its schema includes {LATER}); this is"
    assert told in refused(directory)
    shown = CliRunner().invoke(app, ["runs", "list", "--store", str(directory)])
    assert (shown.exit_code, told in shown.stderr) == (1, True)
    assert (schema(directory), rows(directory)) == before
